"""Other libraries' implementations, called as their docs recommend; imported only when they are measured."""

# T rows · R selected rows · D model · V vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Constants = dict[str, Any]

# For TRL and Liger. On a CPU, 1024 is the fastest of 32768 (TRL's default, chosen for GPUs), 8192, 4096, 2048
# and 1024 for both, because a tile should fit the cache; TRL is a third faster than with its default.
COLUMNS = {"cpu": 1024, "cuda": 32768}


def selected(t: Tensors) -> tuple[Tensor, Tensor]:
    """Return the hidden states and targets of the selected rows, for peers that run on the same rows."""
    return t["hidden"].index_select(0, t["rows"]), t["targets"].index_select(0, t["rows"])


def picked(t: Tensors, logp: Tensor, entropy: Tensor) -> Tensors:
    """Select the rows from results that were computed for all rows."""
    return {"logp": logp.index_select(0, t["rows"]), "entropy": entropy.index_select(0, t["rows"])}


def trl_all_rows(t: Tensors, constants: Constants) -> Tensors:
    return picked(t, *_trl(t["hidden"], t["weight"], t["targets"]))


def trl_same_rows(t: Tensors, constants: Constants) -> Tensors:
    hidden, targets = selected(t)
    logp, entropy = _trl(hidden, t["weight"], targets)
    return {"logp": logp, "entropy": entropy}


def _trl(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    from trl.kernels import ChunkedLogProbFunction

    columns = COLUMNS[hidden.device.type]
    out = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, columns, None, 1.0, ("entropy",))
    return out[0], out[1]


def verl_all_rows(t: Tensors, constants: Constants) -> Tensors:
    return picked(t, *_verl(t["hidden"], t["weight"], t["targets"], constants))


def verl_same_rows(t: Tensors, constants: Constants) -> Tensors:
    hidden, targets = selected(t)
    logp, entropy = _verl(hidden, t["weight"], targets, constants)
    return {"logp": logp, "entropy": entropy}


def _verl(hidden: Tensor, weight: Tensor, targets: Tensor, constants: Constants) -> tuple[Tensor, Tensor]:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    return FusedLinearForPPO(chunk_size=constants.get("chunk") or 512)(hidden, weight, targets)


def verl_triton(t: Tensors, constants: Constants) -> Tensors:
    """verl's fused kernel on the same rows: log-prob and entropy without logits in memory."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    hidden, targets = selected(t)
    logp, entropy = linear_cross_entropy(hidden, t["weight"], targets, 1.0)
    return {"logp": logp, "entropy": entropy}


def liger_logprob(t: Tensors, constants: Constants) -> Tensors:
    """The log-prob part of Liger's chunked GRPO, on the same rows; it has no entropy."""
    from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction

    hidden, targets = selected(t)
    columns = COLUMNS[hidden.device.type]
    return {"logp": _ChunkedSelectiveLogProbFunction.apply(hidden, t["weight"], targets, None, 1.0, columns)}


def liger_triton(t: Tensors, constants: Constants) -> Tensors:
    """Liger's fused linear cross-entropy in Triton on the same rows: a summed loss, no entropy."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    hidden, targets = selected(t)
    loss: Any = liger_fused_linear_cross_entropy(hidden, t["weight"], targets, reduction="sum")
    return {"loss": loss}


def torch_linear_cross_entropy(t: Tensors, constants: Constants) -> Tensors:
    """PyTorch's chunked head on the same rows: a summed loss, no log-prob per row, no entropy."""
    hidden, targets = selected(t)
    options = torch.nn.LinearCrossEntropyOptions()
    loss = torch.nn.functional.linear_cross_entropy(
        hidden, t["weight"], targets, reduction="sum", options=options
    )
    return {"loss": loss}


def cut_cross_entropy(t: Tensors, constants: Constants) -> Tensors:
    """Cut-cross-entropy on the same rows, its own kernel on a GPU; it has no entropy."""
    from cut_cross_entropy import linear_cross_entropy

    hidden, targets = selected(t)
    impl = "cce" if hidden.is_cuda else "torch_compile"
    nll = linear_cross_entropy(hidden, t["weight"], targets, impl=impl, reduction="none")
    return {"logp": -nll}


def liger_grpo(t: Tensors, constants: Constants) -> Tensors:
    """Liger's whole chunked GRPO loss on the same rows: token mean, k3 KL, no entropy bonus."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    hidden, targets = selected(t)
    lengths = constants["sequence_lengths"]
    shape = (len(lengths), lengths[0])
    objective = constants["objective"]
    loss_of = LigerFusedLinearGRPOLoss(
        beta=objective["kl_coef"],
        compiled=constants["compiled"],
        use_ref_model=True,
        epsilon_low=objective["clip_low"],
        epsilon_high=objective["clip_high"],
        loss_type="dapo",
    )
    loss, _ = loss_of(
        hidden.view(*shape, -1),
        t["weight"],
        targets.view(shape),
        t["mask"].view(shape),
        # Liger expects one advantage per sequence; ours are equal within a sequence.
        t["advantages"].view(shape)[:, 0].contiguous(),
        ref_per_token_logps=t["ref_logp"].view(shape),
        old_per_token_logps=t["old_logp"].view(shape),
    )
    return {"loss_without_entropy": loss}


def slime_linear(t: Tensors, constants: Constants) -> Tensors:
    """slime pull 2076 in a training step: compute the logits of all rows, then select the response rows."""
    logits = torch.nn.functional.linear(t["hidden"], t["weight"])
    return slime_logits({**t, "logits": logits}, constants)


def slime_logits(t: Tensors, constants: Constants) -> Tensors:
    logits, targets = t["logits"], t["targets"]
    if len(t["rows"]) < len(logits):
        logits, targets = logits.index_select(0, t["rows"]), targets.index_select(0, t["rows"])
    chunk = constants.get("chunk") or len(logits)
    parts = [_SlimeLoss.apply(*part) for part in zip(logits.split(chunk), targets.split(chunk), strict=True)]
    return {"logp": torch.cat([logp for logp, _ in parts]), "entropy": torch.cat([e for _, e in parts])}


class _SlimeLoss(torch.autograd.Function):
    """Log-prob and entropy of a chunk of logits, fused as in slime pull 2076, without Megatron.

    One buffer of the chunk's size holds the softmax and, in the backward pass, the gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        softmax = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        softmax.sub_(softmax.amax(-1, keepdim=True))
        target = softmax.gather(1, targets[:, None])[:, 0]
        total = softmax.exp_().sum(-1, keepdim=True)
        softmax.div_(total)
        entropy = torch.special.entr(softmax).sum(-1)
        ctx.softmax, ctx.dtype = softmax, logits.dtype
        ctx.save_for_backward(targets, entropy)
        return target - total[:, 0].log(), entropy

    @staticmethod
    def backward(ctx: Any, g_logp: Tensor, g_entropy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        targets, entropy = ctx.saved_tensors
        softmax, g_logp = ctx.softmax, g_logp[:, None]
        tiny = torch.finfo(softmax.dtype).tiny
        factor = softmax.clamp(min=tiny).log_().add_(entropy[:, None])
        softmax.mul_(factor.mul_(g_entropy[:, None]).add_(g_logp).neg_())
        softmax.scatter_add_(1, targets[:, None], g_logp.to(softmax.dtype))
        return softmax.to(ctx.dtype), None
