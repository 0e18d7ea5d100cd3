"""Losses of the LM head: cross-entropy, policy objectives, distillation, preferences.

Each objective is its formula on vectors of log-probs (or on a block of logits), next to the `linear_`
function that evaluates it from hidden states. `linear_policy_loss` runs the loops of logprob.py one chunk of
rows at a time and forms its gradients in the forward pass; cross-entropy and preferences compose
`linear_logprobs`; distillation and label smoothing are row functions with their gradients for `rowwise`.
"""

# T rows · N selected rows · B, S sequences · P pairs · D model · V vocabulary

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from functools import wraps
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from leanstep.heads.head import (
    assert_all,
    check_matrix,
    check_rows,
    check_targets,
    inverse_temperature,
    is_fake,
    select,
    unpack_head,
)
from leanstep.heads.layout import to_device
from leanstep.heads.logprob import (
    Entropy,
    HeadLoops,
    Settings,
    accumulation_dtype,
    aligned_tile,
    check_entropy,
    choose_tiles,
    input_gradients,
    is_one_block,
    linear_logprobs,
    local_columns,
    multiply_,
    new_sums,
    open_rows,
    outside_graph,
    row_factors,
    row_outputs,
    rows_in_gradient,
)
from leanstep.heads.parallel import first_order_only, resolve_group
from leanstep.heads.rowwise import apply_rowwise
from leanstep.triton_driver import can_launch

# --- cross-entropy ---


@outside_graph
def linear_cross_entropy(
    hidden: Tensor,
    head: Any,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    shift: int | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    rows: Tensor | None = None,
    group: Any = None,
    vocab_total: int | None = None,
) -> Tensor:
    """Compute the cross-entropy of the LM head on all labels but `ignore_index`.

    Equivalent to, for [N, D]; for [B, T, D] the same after flattening hidden[:, :-1] and labels[:, 1:]:
        logits = torch.nn.functional.linear(hidden, weight).float()
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="mean")

    Args:
        hidden: [B, T, D] or [N, D].
        head: as in `linear_logprobs`.
        labels: [B, T] or [N] ids, `ignore_index` for ignored rows. If they are on the host and `hidden` is on
            a GPU, selecting the rows needs no host sync.
        shift: the row at position t scores labels[t + shift]. None: 1 for [B, T, D], as in transformers
            models, and 0 for [N, D], as in torch.
        reduction: "mean" over the rows that are not ignored (NaN if all are, as in torch), "sum", or "none":
            shaped like labels, 0 for ignored rows.
        label_smoothing: 0 <= eps < 1; not with a group.
        z_loss: adds z_loss times lse squared per row (PaLM, Chowdhery et al. 2022, section 5).
        rows: [R] int64, rows of the flattened hidden to project. None: those that are not ignored; with
            labels on a GPU this takes one host sync for their number.
        group, vocab_total: as in `linear_logprobs`.

    Returns:
        A scalar, or a tensor shaped like `labels`; fp32 (fp64 for fp64 input).

    Peak extra memory, products: those of `linear_logprobs` on R rows, or of `rowwise` with label smoothing.
    Collectives: with a group 1 forward and 1 backward; otherwise none.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: expected mean, sum or none, got {reduction!r}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing: expected 0 <= value < 1, got {label_smoothing}")
    if label_smoothing and resolve_group(group) is not None:
        raise ValueError("label_smoothing: expected 0 with a group; it needs every logit of a row")
    if not isinstance(hidden, Tensor) or hidden.dim() not in (2, 3):
        got = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise ValueError(f"hidden: expected [B, T, D] or [N, D], got {got}")
    check_labels("labels", labels, hidden.shape[:-1])
    flat, targets = (
        hidden.flatten(0, -2),
        align_labels(labels, hidden.dim() - 2 if shift is None else shift, ignore_index),
    )
    if rows is None:
        rows = to_device((targets != ignore_index).nonzero().flatten(), hidden.device)
    targets = to_device(targets, hidden.device).index_select(0, rows)
    counts = targets != ignore_index
    targets = torch.where(counts, targets, 0)
    if label_smoothing:
        check_targets(
            targets, None, len(targets), local_columns(len(unpack_head(head).weight), None, vocab_total)[2]
        )

        functions = _smoothed(label_smoothing, vocab_total, hidden.is_cuda)
        losses, lse = apply_rowwise(*functions, flat, head, (targets,), rows)
    else:
        out = linear_logprobs(flat, head, targets, rows=rows, group=group, vocab_total=vocab_total)
        losses, lse = -out.logp, out.lse
    if z_loss:
        losses = losses + z_loss * lse.square()
    # An ignored row may hold any value: select, do not multiply.
    losses = torch.where(counts, losses, 0.0)
    if reduction == "sum":
        return losses.sum()
    if reduction == "mean":
        return losses.sum() / counts.sum()
    return losses.new_zeros(labels.numel()).index_add(0, rows, losses).view(labels.shape)


@functools.lru_cache(8)
def _smoothed(eps: float, vocab: int | None, on_gpu: bool) -> tuple[Any, Any]:
    """Return the smoothed loss of rows of logits and their lse, and the gradient of both."""

    def losses(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = z[:, :vocab]
        log_p = torch.log_softmax(z, -1)
        logp = log_p.gather(1, y[:, None])[:, 0]
        return -(1 - eps) * logp - eps * log_p.mean(-1), torch.logsumexp(z, -1)

    def gradient(z: Tensor, upstream: Any, y: Tensor) -> Tensor:
        g, g_lse = (y.new_zeros(len(y), dtype=z.dtype) if x is None else x for x in upstream)
        real = z[:, :vocab]
        p = torch.softmax(real, -1)
        # The target's 1 - p is summed over the others: near p = 1, a difference would lose its digits.
        others = p.scatter(1, y[:, None], 0.0).sum(-1)
        dz = p * (g + g_lse)[:, None] - (g * (eps / real.shape[1]))[:, None]
        p_y = p.gather(1, y[:, None])[:, 0]
        at = g_lse * p_y - g * others + g * eps * (1 - 1 / real.shape[1])
        dz = dz.scatter(1, y[:, None], at[:, None])
        padding = z.shape[1] - real.shape[1]
        return torch.nn.functional.pad(dz, (0, padding)) if padding else dz

    return compiled(losses, on_gpu), compiled(gradient, on_gpu)


def compiled(function: Any, on_gpu: bool) -> Any:
    """Return a function of a block of logits that Inductor fuses on a GPU; a CPU runs it as it is.

    Compiled once for any number of rows and columns. If it cannot be compiled, it also runs as it is.
    """
    if not on_gpu or not can_launch():
        return function
    from torch._dynamo.exc import TorchDynamoException

    fused, works = torch.compile(function, dynamic=True), True

    @wraps(function)
    def call(*tensors: Any) -> Any:
        nonlocal works
        if works:
            try:
                return fused(*tensors)
            except TorchDynamoException as problem:
                works = False
                reason = str(problem).strip().splitlines() or [type(problem).__name__]
                warnings.warn(
                    f"torch.compile failed, {function.__qualname__} runs as separate kernels ({reason[0]})",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return function(*tensors)

    return call


def check_labels(name: str, labels: Any, shape: Sequence[int]) -> None:
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape != tuple(shape):
        got = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"{name}: expected ids {tuple(shape)}, got {got}")


def align_labels(labels: Tensor, shift: int, ignore_index: int) -> Tensor:
    """Return the target of each row, [N]: labels[t + shift] of its sequence, `ignore_index` past the end."""
    if isinstance(shift, bool) or shift < 0:
        raise ValueError(f"shift: expected a number of positions >= 0, got {shift!r}")
    labels = labels.long()
    if shift:
        shift = min(shift, labels.shape[-1])
        labels = torch.nn.functional.pad(labels[..., shift:], (0, shift), value=ignore_index)
    return labels.reshape(-1)


# --- policy objectives ---

Normalizer = Literal["token_mean", "sequence_mean", "sequence_sum", "sum"]

# Formula and clip bounds: PPO (Schulman et al. 2017, eq. 7), GRPO (Shao et al. 2024, eq. 3), DAPO (Yu et al.
# 2025, eq. 8), CISPO (MiniMax-M1 2025, eq. 4), GSPO (Zheng et al. 2025, eq. 5). The normalizer is a separate
# argument: token_mean for DAPO, sequence_mean for GRPO.
OBJECTIVES: dict[str, tuple[str, float, float]] = {
    "ppo": ("clip", 0.2, 0.2),
    "grpo": ("clip", 0.2, 0.2),
    "dapo": ("clip", 0.2, 0.28),
    "cispo": ("cispo", 1.0, 0.28),
    "gspo": ("gspo", 3e-4, 4e-4),
}


class PolicyLoss(NamedTuple):
    """`loss` is differentiable; the rest is detached. `metrics` are masked means, 0-dimensional tensors."""

    loss: Tensor
    logp: Tensor
    entropy: Tensor | None
    metrics: dict[str, Tensor]


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    *,
    objective: str = "grpo",
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    mask: Tensor | None = None,
    ref_logp: Tensor | None = None,
    kl: Literal["k1", "k2", "k3"] = "k3",
    kl_coef: float = 0.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    normalizer: Normalizer | float | Tensor = "token_mean",
    sequence_lengths: Sequence[int] | None = None,
) -> PolicyLoss:
    """Compute a policy objective from log-probs; `linear_policy_loss` returns the same loss.

    Equivalent to, for "grpo" with neither mask nor entropy:
        ratio = (logp - old_logp).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()

    With ratio r, advantage A and clip to [1 - clip_low, 1 + clip_high], the loss per row is

        clip    max(-r A, -clip(r) A); with dual_clip k, at most -k A where A < 0   (Ye et al. 2020)
        cispo   -sg(clip(r)) A logp, sg = no gradient
        gspo    clip, with r = exp(mean over the sequence of (logp - old))

    At an exact clip boundary the gradient is not clipped.

    Args:
        logp, old_logp, advantages: [N]. `entropy`, `ref_logp`, `mask` likewise.
        objective: ppo, grpo, dapo, cispo or gspo (`OBJECTIVES`).
        clip_low, clip_high: None: the objective's own.
        dual_clip: k > 1, bounds the loss of negative advantages.
        mask: 0 (or False) excludes a row; its values may be anything, including NaN.
        kl, kl_coef: adds kl_coef times an estimate of the KL to the reference, with d = ref_logp - logp:
            "k1" = -d, "k2" = d^2 / 2, "k3" = e^d - 1 - d.
        entropy_coef: weight of the entropy, which is subtracted.
        normalizer: "token_mean", "sequence_mean" (mean over sequences of their token means), "sequence_sum"
            (mean over sequences of their token sums), "sum", or a number (or tensor without gradient) to
            divide by. It must not depend on the log-probs.
        sequence_lengths: rows per sequence, in order; for gspo, "sequence_mean" and "sequence_sum".
    """
    settings = check_objective(objective, clip_low, clip_high, dual_clip, kl, kl_coef, entropy_coef, ref_logp)
    if entropy_coef and entropy is None:
        raise ValueError("entropy: expected a tensor because entropy_coef is not 0, got None")
    weights = row_weights(mask, logp, normalizer, sequence_lengths)
    losses, ratio, clipped = policy_rows(
        settings, logp, old_logp, advantages, entropy, ref_logp, mask, sequence_lengths
    )
    metrics = policy_metrics(ratio, clipped, logp.detach(), old_logp, entropy, mask)
    entropy = None if entropy is None else entropy.detach()
    return PolicyLoss(weighted_sum(losses, weights), logp.detach(), entropy, metrics)


class _Objective(NamedTuple):
    """The constants of a policy objective."""

    kind: str
    low: float
    high: float
    dual_clip: float | None
    kl: str
    kl_coef: float
    entropy_coef: float


def check_objective(
    objective: str,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None,
    kl: str,
    kl_coef: float,
    entropy_coef: float,
    ref_logp: Tensor | None,
) -> _Objective:
    if objective not in OBJECTIVES:
        raise ValueError(f"objective: expected one of {', '.join(OBJECTIVES)}, got {objective!r}")
    kind, low, high = OBJECTIVES[objective]
    low, high = low if clip_low is None else clip_low, high if clip_high is None else clip_high
    if low < 0 or high < 0:
        raise ValueError(f"clip_low, clip_high: expected values >= 0, got {low}, {high}")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip: expected a value > 1 or None, got {dual_clip}")
    if kl not in ("k1", "k2", "k3"):
        raise ValueError(f"kl: expected k1, k2 or k3, got {kl!r}")
    if kl_coef and ref_logp is None:
        raise ValueError("ref_logp: expected reference log-probs because kl_coef is not 0, got None")
    return _Objective(kind, low, high, dual_clip, kl, kl_coef, entropy_coef)


def policy_rows(
    objective: _Objective,
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    entropy: Tensor | None,
    ref_logp: Tensor | None,
    mask: Tensor | None,
    sequence_lengths: Sequence[int] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return every row's loss before normalization, its ratio, and whether it is clipped, [N] each.

    Values of a row with mask 0 are replaced by zeros before any computation, so that neither its loss nor its
    gradient is ever 0 times infinity.
    """
    if mask is not None:
        masked = mask == 0
        logp, old_logp, advantages = (torch.where(masked, 0.0, x) for x in (logp, old_logp, advantages))
        ref_logp = None if ref_logp is None else torch.where(masked, 0.0, ref_logp)
        entropy = None if entropy is None else torch.where(masked, 0.0, entropy)
    difference = logp - old_logp
    if objective.kind == "gspo":
        difference = _sequence_mean(difference, mask, check_sequences(sequence_lengths, len(logp)))
    ratio = difference.exp()
    bounded = ratio.detach().clamp(1.0 - objective.low, 1.0 + objective.high)
    if objective.kind == "cispo":
        clipped = bounded != ratio.detach()
        losses = -bounded * advantages * logp
    else:
        above = (advantages > 0) & (ratio > 1.0 + objective.high)
        clipped = above | ((advantages < 0) & (ratio < 1.0 - objective.low))
        losses = torch.where(clipped, -bounded * advantages, -ratio * advantages)
        if objective.dual_clip is not None:
            floored = (advantages < 0) & (ratio > objective.dual_clip)
            losses = torch.where(floored, -objective.dual_clip * advantages, losses)
            clipped = clipped | floored
    if objective.kl_coef:
        assert ref_logp is not None
        d = ref_logp - logp
        penalty = (
            -d if objective.kl == "k1" else d.square() / 2 if objective.kl == "k2" else d.exp() - 1.0 - d
        )
        losses = losses + objective.kl_coef * penalty
    if objective.entropy_coef:
        assert entropy is not None
        losses = losses - objective.entropy_coef * entropy
    return losses, ratio.detach(), clipped


def policy_metrics(
    ratio: Tensor,
    clipped: Tensor,
    logp: Tensor,
    old_logp: Tensor,
    entropy: Tensor | None,
    mask: Tensor | None,
) -> dict[str, Tensor]:
    """Return masked means: clip_fraction, mean_ratio, approx_kl to the old policy, entropy."""
    weight = torch.ones_like(logp) if mask is None else mask.to(logp.dtype)
    weight = weight / weight.sum().clamp(min=1.0)
    difference = (logp - old_logp).detach()
    values = {
        "clip_fraction": clipped.to(logp.dtype),
        "mean_ratio": ratio,
        "approx_kl": difference.exp() - 1.0 - difference,
    }
    if entropy is not None:
        values["entropy"] = entropy.detach()
    return {name: weighted_sum(value, weight) for name, value in values.items()}


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    # Select instead of multiplying: values of a row without weight may be infinite.
    return torch.where(weights == 0, 0.0, values * weights).sum()


def row_weights(
    mask: Tensor | None,
    like: Tensor,
    normalizer: Normalizer | float | Tensor,
    sequence_lengths: Sequence[int] | None,
) -> Tensor:
    """Return mask / normalizer per row [N]; it does not depend on the log-probs."""
    n = len(like)
    if mask is not None and mask.shape != (n,):
        raise ValueError(f"mask: expected [{n}], got {tuple(mask.shape)}")
    mask = torch.ones_like(like, requires_grad=False) if mask is None else mask.to(like)
    if isinstance(normalizer, Tensor):
        if normalizer.requires_grad or normalizer.dim() > 0:
            got = f"shape {tuple(normalizer.shape)}, requires_grad={normalizer.requires_grad}"
            raise ValueError(f"normalizer: expected a 0-dimensional constant, got {got}")
        return mask / normalizer.to(mask)
    if isinstance(normalizer, (int, float)):
        if not normalizer > 0:
            raise ValueError(f"normalizer: expected a number > 0, got {normalizer}")
        return mask / normalizer
    if normalizer == "sum":
        return mask
    if normalizer == "token_mean":
        return mask / mask.sum().clamp(min=1.0)
    if normalizer not in ("sequence_sum", "sequence_mean"):
        expected = "token_mean, sequence_mean, sequence_sum, sum or a number"
        raise ValueError(f"normalizer: expected {expected}, got {normalizer!r}")
    lengths = check_sequences(sequence_lengths, n)
    if normalizer == "sequence_sum":
        return mask / max(len(lengths), 1)
    totals, sequence_of = _sequence_sums(mask, lengths)
    return mask / (totals.clamp(min=1.0)[sequence_of] * max(len(lengths), 1))


def check_sequences(lengths: Sequence[int] | None, num_rows: int) -> list[int]:
    if lengths is None:
        raise ValueError("sequence_lengths: expected rows per sequence for this objective, got None")
    lengths = [int(n) for n in lengths]
    if sum(lengths) != num_rows or any(n < 0 for n in lengths):
        expected = f"lengths that add up to {num_rows} rows"
        raise ValueError(f"sequence_lengths: expected {expected}, got {sum(lengths)}")
    return lengths


def _sequence_sums(values: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return the sum per sequence [S] and the sequence of each row [N]."""
    counts = to_device(torch.tensor(lengths, dtype=torch.int64), values.device)
    sequence_of = torch.repeat_interleave(counts, output_size=sum(lengths))
    return values.new_zeros(len(lengths)).index_add(0, sequence_of, values), sequence_of


def _sequence_mean(values: Tensor, mask: Tensor | None, lengths: list[int]) -> Tensor:
    mask = torch.ones_like(values) if mask is None else mask.to(values.dtype)
    sums, sequence_of = _sequence_sums(torch.where(mask == 0, 0.0, values * mask), lengths)
    totals, _ = _sequence_sums(mask, lengths)
    return (sums / totals.clamp(min=1.0))[sequence_of]


# Bytes of a chunk's logits; dW is read and written once per chunk, so fewer rows cost more than they save.
CPU_CHUNK_BYTES, GPU_CHUNK_BYTES, FEWEST_ROWS = 128 << 20, 1 << 30, 64


@outside_graph
def linear_policy_loss(
    hidden: Tensor,
    head: Any,
    targets: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    *,
    objective: str = "grpo",
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    mask: Tensor | None = None,
    ref_logp: Tensor | None = None,
    kl: Literal["k1", "k2", "k3"] = "k3",
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    normalizer: Normalizer | float | Tensor = "token_mean",
    sequence_lengths: Sequence[int] | None = None,
    rows: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: Entropy = "none",
    group: Any = None,
    vocab_total: int | None = None,
) -> PolicyLoss:
    """Compute the policy loss of the LM head on selected rows and its gradients in one pass over the logits.

    Equivalent to:
        out = linear_logprobs(hidden, head, targets, rows=rows, entropy="grad")
        policy_loss(out.logp, old_logp, advantages, entropy=out.entropy, mask=mask)

    The loss is a sum over rows whose weights follow from the masks. So the forward pass computes a chunk's
    logits, differentiates the formulas of `policy_loss` on its [n] vectors, and forms dh and dW from the
    same logits (as Liger's chunked losses do). The backward pass multiplies them by a number.

    Args:
        hidden, head, targets, rows, temperature, group, vocab_total: as in `linear_logprobs`.
        old_logp, advantages, mask, ref_logp: [N], or [T], then selected by `rows`.
        objective, clip_low, clip_high, dual_clip, kl, kl_coef, entropy_coef, normalizer, sequence_lengths: as
            in `policy_loss`. With "gspo", chunks hold whole sequences; a sequence that does not fit a chunk
            is recomputed (4 products).
        entropy: "metric" returns the entropy even without an entropy bonus; with a bonus it is always
            returned.

    Returns:
        PolicyLoss; only `loss` is differentiable, and only once.

    Peak extra memory: the returned gradients; one chunk of logits (128 MiB on a CPU, 1 GiB on a GPU, at least
        64 rows), in the memory of dW if all rows fit there; with several chunks dW in fp32.
    Products (2 N D V FLOPs each): 3. Collectives: with a group 1 per chunk and 1 at the end; otherwise none.
    Use something else when: the normalizer depends on the log-probs.
    """
    settings = check_objective(objective, clip_low, clip_high, dual_clip, kl, kl_coef, entropy_coef, ref_logp)
    check_entropy(entropy)
    check_matrix("hidden", hidden)
    check_rows(rows, hidden)
    ranks, total = resolve_group(group), len(hidden)
    product, opened, index, tensors = open_rows(hidden, head, rows)
    if index is not None:
        # The gradients live from the forward on: those of the selected rows are smaller.
        tensors = (tensors[0].index_select(0, index), *tensors[1:])
    acc = accumulation_dtype(hidden.dtype, opened.weight.dtype)
    first_id, real, vocab = local_columns(len(opened.weight), ranks, vocab_total)
    targets = check_targets(targets, rows, total, vocab)
    k = inverse_temperature(temperature, rows, total, hidden, acc)
    k = k if opened.softcap is not None else k * opened.scale
    old_logp, advantages = (
        select(name, x.detach(), rows, total).to(k)
        for name, x in (("old_logp", old_logp), ("advantages", advantages))
    )
    mask, ref_logp = (
        None if x is None else select(name, x.detach(), rows, total).to(k)
        for name, x in (("mask", mask), ("ref_logp", ref_logp))
    )
    weights = row_weights(mask, k, normalizer, sequence_lengths)
    chunks = _chunks(settings, opened.weight, len(k), acc, sequence_lengths, tensors[1].requires_grad)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    def of_rows(
        rows: slice, logp: Tensor, entropies: Tensor, lengths: list[int] | None
    ) -> tuple[Tensor, ...]:
        """Return the weighted loss of some rows, their ratios, and whether they are clipped."""
        ref, some = (None if x is None else x[rows] for x in (ref_logp, mask))
        losses, ratio, clipped = policy_rows(
            settings, logp, old_logp[rows], advantages[rows], entropies, ref, some, lengths
        )
        return weighted_sum(losses, weights[rows]), ratio, clipped

    call = Settings(
        opened.scale, opened.softcap, product, real, first_id, ranks, True, None, "grad", None, needs_grad
    )
    with torch.autocast(hidden.device.type, enabled=False):
        out = _LinearPolicyLoss.apply(call, targets, k, chunks, of_rows, *tensors)
    loss, logp, entropies, ratio, clipped = out  # type: ignore[misc]
    returned = entropies if entropy != "none" or entropy_coef else None
    metrics = policy_metrics(ratio, clipped, logp, old_logp, returned, mask)
    return PolicyLoss(loss, logp, returned, metrics)


def _chunks(
    objective: _Objective,
    weight: Tensor,
    n: int,
    acc: torch.dtype,
    sequence_lengths: Sequence[int] | None,
    trains_weight: bool,
) -> list[tuple[slice, bool, list[int] | None]]:
    """Return (rows, whether their logits are saved, lengths of their sequences) per chunk.

    The same on all ranks: shards are equally wide.
    """
    size = CPU_CHUNK_BYTES if weight.device.type == "cpu" else GPU_CHUNK_BYTES
    most = min(max(size // max(len(weight) * acc.itemsize, 1), FEWEST_ROWS), 4096)
    if trains_weight and n <= rows_in_gradient(weight, acc):
        most = max(most, n)
    if objective.kind != "gspo":
        count = max(-(-n // most), 1)
        bounds = [i * n // count for i in range(count + 1)]
        return [(slice(a, b), True, None) for a, b in pairwise(bounds)]
    chunks: list[tuple[slice, bool, list[int] | None]] = []
    start = 0
    for length in check_sequences(sequence_lengths, n):
        stop = start + length
        last = chunks[-1] if chunks else None
        if length <= most and last is not None and last[1] and stop - last[0].start <= most:
            chunks[-1] = (slice(last[0].start, stop), True, [*(last[2] or []), length])
        else:
            chunks.append((slice(start, stop), length <= most, [length]))
        start = stop
    return chunks or [(slice(0, 0), True, [])]


class _LinearPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, ids, k, chunks, of_rows, hidden, weight, bias, low, up):  # type: ignore[override]
        needs = [call.needs_grad and n for n in ctx.needs_input_grad[5:]]
        tallest = max((c.stop - c.start for c, saved, _ in chunks if saved), default=0)
        # One block of rows writes dW once, in its own dtype; several add to it.
        alone = len(chunks) == 1 and is_one_block(len(ids), call.real)
        fit = rows_in_gradient(weight, k.dtype)
        in_gradient = needs[1] and alone and tallest <= fit
        memory = dw = None
        if needs[1]:
            dw = torch.empty(weight.shape, dtype=weight.dtype if alone else k.dtype, device=weight.device)
        if in_gradient and dw is not None:
            memory = dw.view(-1).view(k.dtype), fit
        elif any(needs) and tallest:
            memory, fit = (k.new_empty(call.real * tallest), tallest), tallest
        logp, entropies, ratio = k.new_empty(3, len(ids))
        clipped = torch.empty(len(ids), dtype=torch.bool, device=k.device)
        loss, sums = k.new_zeros(()), new_sums(call, needs, dw, k, hidden, None, weight, low, up)
        for rows, saved, lengths in chunks:
            n = rows.stop - rows.start
            held = memory if saved else None
            tiles = choose_tiles(n, hidden.shape[1], call.real, fit if held else 0, call, k.device, True)
            of_lora = None if low is None else low[rows]
            loops = HeadLoops(call, tiles, hidden[rows], None, weight, bias, of_lora, up, ids[rows], k[rows])
            table = loops.statistics(held, None)
            logp[rows], entropies[rows], _, _, softmax = row_outputs(table, k[rows], None)
            with torch.set_grad_enabled(any(needs)):
                leaves = [x[rows].detach().requires_grad_(any(needs)) for x in (logp, entropies)]
                chunk_loss, ratio[rows], clipped[rows] = of_rows(rows, *leaves, lengths)
            loss += chunk_loss.detach()
            if not any(needs):
                continue
            grads = torch.autograd.grad(chunk_loss, leaves, allow_unused=True)
            factors = row_factors(k[rows], call, softmax, None, grads[0], grads[1], None)
            of_rows_ = [None if g is None else g.part(rows) for g in (sums.hidden, sums.low)]
            part = sums._replace(hidden=of_rows_[0], low=of_rows_[1], accumulate=rows.start > 0)
            loops.gradients(factors, held, None, part, in_place=not in_gradient)
        ctx.grads = input_gradients(sums, dw, (hidden, weight, bias, low, up))
        ctx.mark_non_differentiable(logp, entropies, ratio, clipped)
        ctx.set_materialize_grads(False)
        return loss, logp, entropies, ratio, clipped

    @staticmethod
    @first_order_only
    def backward(ctx, g, *_):
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError("linear_policy_loss: its gradients were formed once; call backward only once")
        # On a CPU, reading the factor is cheaper than multiplying by 1.
        if g is not None and not (g.device.type == "cpu" and type(g) is Tensor and float(g) == 1.0):
            grads = [None if x is None else x.mul_(g) for x in grads]
        return *[None] * 5, *(grads if g is not None else [None] * 5)


# --- distillation ---


class TeacherHead(NamedTuple):
    """A frozen model: its hidden states [T, D'] (or [N, D'], the selected rows) and its LM head."""

    hidden: Tensor
    head: Any


class TeacherLogProbs(NamedTuple):
    """Log-probs of the whole vocabulary at the temperature of the call, [T, V] or [N, V]."""

    log_probs: Tensor


class TeacherTopK(NamedTuple):
    """The teacher's k likeliest ids and their log-probs at the temperature of the call, [T, k] or [N, k].

    Ids are distinct within a row. tail: the remaining mass is one more outcome; False omits it on both sides.
    """

    ids: Tensor
    log_probs: Tensor
    tail: bool = True


class DistillLoss(NamedTuple):
    """`loss` is differentiable; divergence and the student's entropy, [N] each, are not."""

    loss: Tensor
    divergence: Tensor
    entropy: Tensor


def row_divergence(log_p: Tensor, log_q: Tensor, kind: str | tuple[str, float]) -> Tensor:
    """Return D [...] of a student `log_p` and a teacher `log_q`, [..., V] each; plain differentiable torch.

    Equivalent to, for "forward_kl":
        d = (log_q.exp() * (log_q - log_p)).sum(-1)

        forward_kl           KL(q || p)
        reverse_kl           KL(p || q)
        (jsd, b)             b KL(q || m) + (1 - b) KL(p || m), m = b q + (1 - b) p   (GKD, Agarwal et al.
                             2023, eq. 1); its ends are the KLs themselves
        (skew_kl, a)         KL(q || a q + (1 - a) p)                                 (DistiLLM 2024)
        (skew_reverse_kl, a) KL(p || a p + (1 - a) q)

    Outcomes with probability 0 are omitted if their limit is 0, in the value and in the gradient.
    """
    of_q, of_p, mix = _divergence_weights(kind)
    if mix in (0.0, 1.0):
        log_m = log_p if mix == 0.0 else log_q
    else:
        # e^-10000 is 0 in fp64, too; from -inf on both sides, the gradient of logaddexp would be NaN.
        log_p, log_q = (x.clamp(min=-1e4) for x in (log_p, log_q))
        log_m = torch.logaddexp(log_p + math.log(1.0 - mix), log_q + math.log(mix))
    total = log_p.new_zeros(log_p.shape[:-1])
    for factor, log_weight in ((of_q, log_q), (of_p, log_p)):
        if factor:
            value = torch.where(log_weight == -torch.inf, 0.0, log_weight - log_m)
            total = total + factor * (log_weight.exp() * value).sum(-1)
    return total


def _divergence_weights(kind: str | tuple[str, float]) -> tuple[float, float, float]:
    """Return the weights of KL(q || m) and of KL(p || m), and the weight of q in m."""
    name, value = (kind, None) if isinstance(kind, str) else kind
    names = ("forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl")
    if name not in names:
        raise ValueError(f"divergence: expected one of {', '.join(names)}, got {kind!r}")
    if (value is None) != (name in ("forward_kl", "reverse_kl")):
        wanted = f'("{name}", value)' if value is None else f'"{name}" without a value'
        raise ValueError(f"divergence: expected {wanted}, got {kind!r}")
    if value is not None and not 0 <= value <= 1:
        raise ValueError(f"divergence: expected 0 <= value <= 1, got {kind!r}")
    if name == "reverse_kl" or (name == "jsd" and value == 1):
        return 0.0, 1.0, 1.0
    if name == "forward_kl" or (name == "jsd" and value == 0):
        return 1.0, 0.0, 0.0
    assert value is not None
    if name == "jsd":
        return value, 1.0 - value, value
    return (1.0, 0.0, value) if name == "skew_kl" else (0.0, 1.0, 1.0 - value)


@outside_graph
def linear_distill_loss(
    hidden: Tensor,
    head: Any,
    teacher: TeacherHead | TeacherLogProbs | TeacherTopK,
    *,
    divergence: str | tuple[str, float] = "forward_kl",
    temperature: float = 1.0,
    rows: Tensor | None = None,
    row_weights: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    group: Any = None,
) -> DistillLoss:
    """Compute the divergence of a student's head to its teacher over selected rows, with exact gradients.

    Equivalent to, for "forward_kl":
        log_p = torch.log_softmax(hidden[rows] @ weight.T / temperature, -1)
        log_q = torch.log_softmax(teacher.hidden[rows] @ teacher.head.T / temperature, -1)
        loss = (log_q.exp() * (log_q - log_p)).sum(-1).mean()

    Args:
        hidden, head, rows: as in `linear_logprobs`.
        teacher: `TeacherHead(hidden, head)`, `TeacherLogProbs(log_probs)`, `TeacherTopK(ids, log_probs)`.
        divergence: "forward_kl", "reverse_kl", ("jsd", beta), ("skew_kl", a) or ("skew_reverse_kl", a).
        temperature: > 0, of both softmaxes; the loss is not multiplied by its square.
        row_weights: [N] or [T], factors of the rows; 0 excludes a row.
        normalizer: divisor of the sum, a number or a 0-dimensional tensor; None: the sum of `row_weights`, at
            least 1.
        group: must be a single rank: the divergence needs every logit of a row.

    Peak extra memory: that of `rowwise`, with the blocks of both heads. Products: 4 of the student's head
        and 2 of the teacher's.
    """
    if resolve_group(group) is not None:
        raise ValueError("group: expected one rank; a divergence needs every logit of a row")
    if not float(temperature) >= torch.finfo(torch.float32).tiny:
        raise ValueError(f"temperature: expected a value > 0 (in float32), got {temperature}")
    _divergence_weights(divergence)
    n, total = len(hidden) if rows is None else len(rows), len(hidden)
    if not isinstance(teacher, (TeacherHead, TeacherLogProbs, TeacherTopK)):
        expected = "TeacherHead, TeacherLogProbs or TeacherTopK"
        raise ValueError(f"teacher: expected {expected}, got {type(teacher).__name__}")
    states = teacher.hidden if isinstance(teacher, TeacherHead) else teacher.log_probs
    check_matrix("teacher", states)
    if len(states) not in (n, total) or (
        isinstance(teacher, TeacherTopK) and teacher.ids.shape != states.shape
    ):
        raise ValueError(f"teacher: expected {n} or {total} rows, got {tuple(states.shape)}")
    if rows is not None and len(states) == total == n and not is_fake(rows):
        # The teacher's rows may then be those of `rows` or those of `hidden`.
        in_order = rows == torch.arange(n, device=rows.device)
        wrong = "rows: expected every row in order if as many rows are selected as there are"
        assert_all(in_order, wrong, rows)
    per_row = [x.detach() for x in (teacher[:2] if isinstance(teacher, TeacherTopK) else teacher[:1])]
    if rows is not None and len(states) == total != n:
        per_row = [x.index_select(0, rows) for x in per_row]
    functions: tuple[Any, Any]
    if isinstance(teacher, TeacherTopK):
        functions = _top_k_rows(teacher.tail, divergence, temperature), None
    else:
        kind = divergence if isinstance(divergence, str) else tuple(divergence)
        has_logits = isinstance(teacher, TeacherHead)
        of_rows, gradient = functions = _full_rows(kind, float(temperature), has_logits, hidden.is_cuda)
    if isinstance(teacher, TeacherHead):
        logits_of = _frozen_head(teacher)
        own, theirs = (unpack_head(h).weight.shape for h in (head, teacher.head))
        if own[0] != theirs[0]:
            expected = f"[{own[0]}, D'] like the student's"
            raise ValueError(f"teacher.head: expected {expected}, got {tuple(theirs)}")
        functions = (
            lambda z, h: of_rows(z, logits_of(h)),
            lambda z, g, h: gradient(z, g, logits_of(h)),
        )
    values, entropy = apply_rowwise(*functions, hidden, head, per_row, rows)
    weights = torch.ones_like(values) if row_weights is None else row_weights.detach()
    weights = select("row_weights", weights, rows, total).to(values)
    if normalizer is None:
        normalizer = weights.sum().clamp(min=1.0)
    elif isinstance(normalizer, Tensor):
        if normalizer.dim() > 0 or normalizer.requires_grad:
            got = f"shape {tuple(normalizer.shape)}, requires_grad={normalizer.requires_grad}"
            raise ValueError(f"normalizer: expected a number or a 0-dimensional constant, got {got}")
        normalizer = normalizer.to(values)
    elif not normalizer > 0:
        raise ValueError(f"normalizer: expected a number > 0, got {normalizer}")
    return DistillLoss(weighted_sum(values, weights / normalizer), values.detach(), entropy.detach())


@functools.lru_cache(8)
def _full_rows(
    divergence: str | tuple[str, float], temperature: float, has_logits: bool, on_gpu: bool
) -> tuple[Any, Any]:
    """Return the divergence and entropy of rows of logits, and the gradient of the divergence.

    `has_logits`: the teacher's rows are logits, not log-probs.
    """
    of_q, of_p, mix = _divergence_weights(divergence)

    def log_probs(z: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(z if temperature == 1 else z / temperature, -1)
        teacher = teacher.to(z.dtype)
        return log_p, torch.log_softmax(teacher / temperature, -1) if has_logits else teacher

    def values(z: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        log_p, log_q = log_probs(z, teacher)
        return row_divergence(log_p, log_q, divergence), _entropy(log_p)

    def gradient(z: Tensor, upstream: Any, teacher: Tensor) -> Tensor:
        # With D = sum_v f(p_v) and x = p f'(p), dz = x - p sum(x); multiples of p in x cancel.
        log_p, log_q = log_probs(z, teacher)
        p, q, impossible = log_p.exp(), log_q.exp(), None
        if mix == 0.0:
            x, impossible = -q, log_p == -torch.inf
        elif mix == 1.0:
            x = torch.where(p == 0, 0.0, p * (log_p - log_q))
        else:
            log_p, log_q = (y.clamp(min=-1e4) for y in (log_p, log_q))
            above = log_p - torch.logaddexp(log_p + math.log(1.0 - mix), log_q + math.log(mix))
            x = of_p * p * above
            if of_q != mix:
                x = x - (1.0 - mix) * above.exp() * (of_q * q + of_p * p)
        # At the likeliest id, x and p sum(x) are nearly equal: their difference is summed over the others.
        top = log_p.argmax(-1, keepdim=True)
        p_top, x_top = p.gather(-1, top), x.gather(-1, top)
        p_rest, x_rest = (y.scatter(-1, top, 0.0).sum(-1, keepdim=True) for y in (p, x))
        dz = (x - p * (x_top + x_rest)).scatter(-1, top, x_top * p_rest - p_top * x_rest)
        # A row whose divergence is infinite gets no gradient.
        infinite = ~(x_top + x_rest).isfinite()
        if impossible is not None:
            infinite = infinite | (impossible & (q > 0)).any(-1, keepdim=True)
        return (dz * (upstream[0][:, None] / temperature)).masked_fill(infinite, 0.0)

    return compiled(values, on_gpu), compiled(gradient, on_gpu)


def _top_k_rows(tail: bool, divergence: str | tuple[str, float], temperature: float) -> Any:
    """Return the divergence of rows of logits to a teacher's top k, and their entropy."""

    def values(z: Tensor, ids: Tensor, of_teacher: Tensor) -> tuple[Tensor, Tensor]:
        if z.requires_grad:
            # A row whose divergence is infinite gets no gradient.
            z = z.view_as(z)
            z.register_hook(lambda g: g.masked_fill(~finite[:, None], 0))
        log_p = _LogSoftmax.apply(z if temperature == 1 else z / temperature)
        entropy, ids, log_q = _entropy(log_p.detach()), ids.long(), of_teacher.to(z.dtype)
        if tail and ids.shape[1] < z.shape[1]:
            # In fp64, because half-precision log-probs may leave a tail of a few 1e-4.
            left = torch.log1p(-of_teacher.double().exp().sum(-1, keepdim=True).clamp(max=1.0))
            log_q = torch.cat([log_q, left.to(z.dtype)], 1)
            rest = torch.logsumexp(log_p.scatter(1, ids, -torch.inf), -1, keepdim=True)
            log_p = torch.cat([log_p.gather(1, ids), rest], 1)
        else:
            log_p = log_p.gather(1, ids)
        of_rows = row_divergence(log_p, log_q, divergence)
        finite = of_rows.detach().isfinite()
        return of_rows, entropy

    return values


def _entropy(log_p: Tensor) -> Tensor:
    return -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)


class _LogSoftmax(torch.autograd.Function):
    """`torch.log_softmax(z, -1)` with an accurate gradient if one outcome has nearly all the mass.

    The gradient of the likeliest outcome is g - p sum(g), a difference of nearly equal numbers if p is close
    to 1. It is computed as g (1 - p) - p rest, with 1 - p and the rest summed over the other outcomes.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        log_p = torch.log_softmax(z, -1)
        ctx.save_for_backward(log_p)
        return log_p

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (log_p,) = ctx.saved_tensors
        p, top = log_p.exp(), log_p.argmax(-1, keepdim=True)
        p_top, grad_top = p.gather(-1, top), grad.gather(-1, top)
        p_rest, grad_rest = (x.scatter(-1, top, 0.0).sum(-1, keepdim=True) for x in (p, grad))
        slope = grad - p * (grad_top + grad_rest)
        return slope.scatter(-1, top, grad_top * p_rest - p_top * grad_rest)


def _frozen_head(teacher: TeacherHead) -> Any:
    """Return a function from a block of the teacher's hidden states to its logits."""
    with torch.no_grad():
        _, opened, _, (_, weight, bias, _, up) = open_rows(teacher.hidden[:0].detach(), teacher.head, None)
        down = None if opened.lora is None else opened.lora.down.detach() * opened.lora.scaling
    wide = accumulation_dtype(teacher.hidden.dtype, weight.dtype)
    # A CPU multiplies 16-bit operands slowly, and a GPU in the dtype of hidden.
    product = teacher.hidden.dtype if weight.is_cuda else wide
    weight = weight.detach().to(product)
    bias, down, up = (None if t is None else t.detach().to(product) for t in (bias, down, up))

    @torch.no_grad()
    def logits(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.to(product)
            z = aligned_tile(len(hidden), len(weight), hidden, wide)
            multiply_(z, hidden, weight.t())
            z = z if bias is None else z.add_(bias)
            if down is not None and up is not None:
                multiply_(z, hidden @ down.t(), up.t(), add=True)
            z = z.mul_(opened.scale)
            return z if opened.softcap is None else opened.softcap * torch.tanh(z / opened.softcap)

    return logits


# --- preferences ---

# Loss per pair with s = sum of a completion's log-probs, r = s - reference, d = r_chosen - r_rejected:
#   dpo     -log sigma(beta d); label smoothing: 1 - eps and eps of both signs (Rafailov et al. 2023, eq. 7)
#   ipo     (d' - 1 / (2 beta))^2, d' of token means                           (Azar et al. 2023, eq. 17)
#   kto     weight (1 - sigma(+-beta (r - kl))), per sequence                  (Ethayarajh et al. 2024, eq. 7)
#   cpo     dpo without a reference, plus nll                                  (Xu et al. 2024)
#   simpo   -log sigma(beta (m_chosen - m_rejected) - gamma), m = token mean   (Meng et al. 2024)
#   orpo    nll - beta log sigma(log odds ratio) of token means                (Hong et al. 2024, eq. 6 and 7)
# The numbers are beta, gamma and the weight of the nll.
PREFERENCES: dict[str, tuple[float, float, float]] = {
    "dpo": (0.1, 0.0, 0.0),
    "ipo": (0.1, 0.0, 0.0),
    "kto": (0.1, 0.0, 0.0),
    "cpo": (0.1, 0.0, 1.0),
    "simpo": (2.0, 1.0, 0.0),
    "orpo": (0.1, 0.0, 1.0),
}
REFERENCE_FREE = ("cpo", "simpo", "orpo")


class PreferenceLoss(NamedTuple):
    """`loss` is differentiable; the rest is detached.

    logps: [S] sums of the completions' log-probs. ref_logps: [S] or None. metrics: 0-dimensional tensors.
    """

    loss: Tensor
    logps: Tensor
    ref_logps: Tensor | None
    metrics: dict[str, Tensor]


def pair_losses(
    objective: str,
    chosen: Tensor,
    rejected: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    beta: float,
    gamma: float = 0.0,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of every pair before the nll, and both rewards that trainers log, detached; [P] each.

    Equivalent to, for "dpo":
        losses = -torch.nn.functional.logsigmoid(beta * (chosen - rejected))

    `chosen`, `rejected`: [P] sums of token log-probs, minus the reference's. An empty completion counts as
    one token with log-prob 0.
    """
    rewards = beta * chosen.detach(), beta * rejected.detach()
    if objective in ("ipo", "simpo", "orpo"):
        chosen = chosen / chosen_lengths.clamp(min=1)
        rejected = rejected / rejected_lengths.clamp(min=1)
        # For IPO, trainers log the rewards of the sums.
        if objective != "ipo":
            rewards = beta * chosen.detach(), beta * rejected.detach()
    difference = chosen - rejected
    if objective == "ipo":
        return (difference - 1.0 / (2.0 * beta)).square(), *rewards
    if objective == "orpo":
        log_odds = difference - (log_one_minus_exp(chosen) - log_one_minus_exp(rejected))
        return -beta * logsigmoid(log_odds), *rewards
    logits = beta * difference - gamma
    losses = -(1.0 - label_smoothing) * logsigmoid(logits)
    return losses - label_smoothing * logsigmoid(-logits) if label_smoothing else losses, *rewards


def kto_losses(
    ratio: Tensor,
    desirable: Tensor,
    *,
    beta: float,
    kl: Tensor | float = 0.0,
    weights: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Return KTO's loss of every sequence, [S].

    Equivalent to, for equal weights:
        sign = torch.where(desirable, 1.0, -1.0)
        losses = 1 - torch.sigmoid(beta * sign * (ratio - max(kl, 0)))

    `ratio`: [S] sums of token log-probs minus the reference's. `kl`: a constant estimate from mismatched
    completions. `weights`: of desirable and of undesirable sequences.
    """
    point = kl.detach().clamp(min=0.0) if isinstance(kl, Tensor) else max(kl, 0.0)
    sign = torch.where(desirable, 1.0, -1.0).to(ratio.dtype)
    weight = torch.full_like(ratio.detach(), weights[1]).masked_fill(desirable, weights[0])
    return weight * (1.0 - torch.sigmoid(beta * sign * (ratio - point)))


def log_one_minus_exp(x: Tensor) -> Tensor:
    """Return log(1 - e^x) for x <= 0, elementwise; -inf at 0, without gradient there."""
    below = x < 0
    safe = torch.where(below, x, -1.0)
    # expm1 near 0, log1p elsewhere: each is accurate where the other loses digits.
    near = safe > -0.6931471805599453
    near_value = torch.where(near, safe, -0.5)
    far_value = torch.where(near, -1.0, safe)
    value = torch.where(near, (-torch.expm1(near_value)).log(), torch.log1p(-far_value.exp()))
    return torch.where(below, value, -torch.inf)


@outside_graph
def linear_preference_loss(
    hidden: Tensor,
    head: Any,
    labels: Tensor,
    *,
    objective: str = "dpo",
    beta: float | None = None,
    gamma: float | None = None,
    label_smoothing: float = 0.0,
    nll_coef: float | None = None,
    reference: TeacherHead | Tensor | None = None,
    desirable: Tensor | None = None,
    kl: Tensor | float = 0.0,
    desirable_weights: tuple[float, float] = (1.0, 1.0),
    nll_labels: Tensor | None = None,
    ignore_index: int = -100,
    group: Any = None,
    vocab_total: int | None = None,
) -> PreferenceLoss:
    """Compute a preference objective from hidden states: the mean over pairs (kto: over sequences).

    Equivalent to, for "dpo" with reference sums:
        rows, targets = next_token_targets(labels, ignore_index=-100)
        logp = linear_logprobs(hidden.flatten(0, 1), head, targets, rows=rows).logp
        sums = torch.zeros(len(hidden)).index_add(0, rows // hidden.shape[1], logp)
        chosen, rejected = (sums - reference).chunk(2)
        loss = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()

    Args:
        hidden: [S, T, D]; pairs: chosen completions first, then the rejected ones in the same order.
        head: as in `linear_logprobs`.
        labels: [S, T] unshifted ids, `ignore_index` on prompts and padding.
        objective: dpo, ipo, kto, cpo, simpo or orpo (`PREFERENCES`).
        beta, gamma, nll_coef: None: the objective's own; gamma is simpo's margin.
        label_smoothing: eps < 0.5, the fraction of flipped labels; dpo, cpo and simpo.
        reference: [S] sums of log-probs; `TeacherHead(hidden, head)` with hidden [S, T, D'], evaluated
            without a graph on the same rows; None: reference-free (not for kto).
        desirable: [S] bool, for kto only. kl: kto's constant KL estimate. desirable_weights: of both classes.
        nll_labels: [P, T], labels of the chosen completions' nll if they differ from `labels`: ORPO's include
            the prompt. Rows of both are projected once.
        group, vocab_total: as in `linear_logprobs`.

    Returns:
        PreferenceLoss; metrics have the names that TRL's trainers log. A pair without tokens has log-prob 0.

    Products (2 N D V FLOPs each): those of `linear_logprobs`, and 1 for a reference head.
    Collectives: with a group 1 forward and 1 backward, 1 more for a reference head; otherwise none.
    """
    if objective not in PREFERENCES:
        raise ValueError(f"objective: expected one of {', '.join(PREFERENCES)}, got {objective!r}")
    defaults = PREFERENCES[objective]
    beta, gamma, nll_coef = (
        d if x is None else x for x, d in zip((beta, gamma, nll_coef), defaults, strict=True)
    )
    is_pairs = objective != "kto"
    if not beta > 0:
        raise ValueError(f"beta: expected a value > 0, got {beta}")
    smooths = objective in ("dpo", "cpo", "simpo")
    if not 0 <= label_smoothing < 0.5 or (label_smoothing and not smooths):
        raise ValueError(
            f"label_smoothing: expected 0 <= value < 0.5, 0 for {objective}, got {label_smoothing}"
        )
    if not isinstance(hidden, Tensor) or hidden.dim() != 3:
        got = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise ValueError(f"hidden: expected [S, T, D], got {got}")
    check_labels("labels", labels, hidden.shape[:2])
    size, length = labels.shape
    if is_pairs == (desirable is not None):
        raise ValueError(f"desirable: expected bool [{size}] for kto and None for the others")
    if desirable is not None and (desirable.dtype != torch.bool or desirable.shape != (size,)):
        raise ValueError(
            f"desirable: expected bool ({size},), got {desirable.dtype} {tuple(desirable.shape)}"
        )
    if is_pairs and size % 2:
        raise ValueError(f"hidden: expected chosen then rejected sequences, got an odd number: {size}")
    if not is_pairs and reference is None:
        raise ValueError("reference: expected log-probs or a TeacherHead for kto, got None")
    if reference is not None and objective in REFERENCE_FREE:
        raise ValueError(f"reference: expected None, because {objective} has no reference")
    if not is_pairs and nll_coef:
        raise ValueError(f"nll_coef: expected 0 for kto, got {nll_coef}")
    # Rows that score a completion, and rows of the chosen nll; both are projected once.
    targets = align_labels(labels, 1, ignore_index)
    scored, half = targets != ignore_index, size // 2 * length
    in_nll = scored & (torch.arange(size * length, device=targets.device) < half)
    if nll_labels is not None and nll_coef:
        check_labels("nll_labels", nll_labels, (size // 2, length))
        more = align_labels(nll_labels, 1, ignore_index)
        more = torch.nn.functional.pad(more, (0, size * length - half), value=ignore_index)
        targets, in_nll = torch.where(scored, targets, more), more != ignore_index
    rows = (targets != ignore_index).nonzero().flatten()
    targets, scored, in_nll = (to_device(x[rows], hidden.device) for x in (targets, scored, in_nll))
    rows = to_device(rows, hidden.device)
    sequence_of = rows.div(max(length, 1), rounding_mode="floor")
    options: dict[str, Any] = {"rows": rows, "group": group, "vocab_total": vocab_total}

    def sums_of(logp: Tensor) -> Tensor:
        return logp.new_zeros(size).index_add(0, sequence_of, torch.where(scored, logp, 0.0))

    logp = linear_logprobs(hidden.flatten(0, 1), head, targets, **options).logp
    sums, ref_sums = sums_of(logp), None
    if isinstance(reference, Tensor):
        if reference.shape != (size,):
            raise ValueError(f"reference: expected [{size}] sums, got {tuple(reference.shape)}")
        ref_sums = reference.detach().to(sums)
    elif reference is not None:
        if reference.hidden.shape[:-1] != hidden.shape[:-1]:
            expected, got = tuple(hidden.shape[:-1]), tuple(reference.hidden.shape[:-1])
            raise ValueError(f"reference.hidden: expected {expected} rows, got {got}")
        with torch.no_grad():
            flat = reference.hidden.flatten(0, 1)
            ref_sums = sums_of(linear_logprobs(flat, reference.head, targets, **options).logp)
    ratio = sums if ref_sums is None else sums - ref_sums
    if not is_pairs:
        assert desirable is not None
        desirable = desirable.to(sums.device)
        losses = kto_losses(ratio, desirable, beta=beta, kl=kl, weights=desirable_weights)
        metrics = _kto_metrics(beta * ratio.detach(), sums.detach(), desirable, kl)
        return PreferenceLoss(losses.mean(), sums.detach(), ref_sums, metrics)
    lengths = sums_of(torch.ones_like(logp)).detach().chunk(2)
    losses, *rewards = pair_losses(
        objective, *ratio.chunk(2), *lengths, beta=beta, gamma=gamma, label_smoothing=label_smoothing
    )
    loss, (chosen, rejected) = losses.mean(), rewards
    metrics = {
        "rewards/chosen": chosen.mean(),
        "rewards/rejected": rejected.mean(),
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype).mean(),
        "rewards/margins": (chosen - rejected).mean(),
    }
    for name, part in zip(("chosen", "rejected"), sums.detach().chunk(2), strict=True):
        metrics[f"logps/{name}"] = part.mean()
    if nll_coef:
        nll = -torch.where(in_nll, logp, 0.0).sum() / in_nll.sum().clamp(min=1)
        loss, metrics["nll_loss"] = loss + nll_coef * nll, nll.detach()
    return PreferenceLoss(loss, sums.detach(), ref_sums, metrics)


def _kto_metrics(rewards: Tensor, logps: Tensor, desirable: Tensor, kl: Tensor | float) -> dict[str, Tensor]:
    # Fill a tensor on the device with the number: copying it there would block the host.
    point = kl.detach().to(logps) if isinstance(kl, Tensor) else torch.full_like(logps[0], kl)
    metrics = {"kl": point.clamp(min=0.0)}
    for name, which in (("chosen", desirable), ("rejected", ~desirable)):
        for kind, values in (("rewards", rewards), ("logps", logps)):
            metrics[f"{kind}/{name}"] = torch.where(which, values, 0.0).sum() / which.sum()
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return metrics
