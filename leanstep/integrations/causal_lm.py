"""What the head of a transformers causal LM computes, and how to score labels with it row by row.

    logits = softcap(scale * (hidden @ weight.T + bias))

The trainers' adapters differ only in what they do with the per-token results. A head that leanstep cannot
express (an unknown module, an adapter with dropout, a sharded ZeRO-3 weight) is refused; and `check_head`
compares our logits with the model's own on three tokens, so that a scaling nobody knew about is an error
and not a slightly different loss.
"""

# B sequences · T positions · D model · V vocabulary

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leanstep.logprob import LogProbs, Transform, linear_logprobs
from leanstep.logprob.inputs import Entropy, unpack_head

IGNORED = -100
_UNKNOWN_ROUTER = "model: the auxiliary loss of {}'s router is not one leanstep knows"


@dataclass(frozen=True)
class CausalHead:
    """A linear layer, perhaps with a LoRA adapter; `scale` multiplies its output, `softcap` follows."""

    layer: nn.Module
    scale: float
    softcap: float | None


@dataclass(frozen=True)
class LabelScores:
    """Per-position results, zero where the label is ignored. `mask` says where it is not.

    mean_logits: over the vocabulary. is_top1: the label is the likeliest token. log_sum_sq_probs: log of
    sum p^2. These have no gradient and are None unless asked for.
    """

    logp: Tensor
    entropy: Tensor | None
    mask: Tensor
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None


def causal_head(model: nn.Module) -> CausalHead:
    """The head that is active now, with scaling and softcap from the config.

    Raises:
        ValueError: for a head that leanstep cannot express.
    """
    layer: Any = model.get_output_embeddings()  # type: ignore[operator]
    if layer is None:
        raise ValueError(f"model: {type(model).__name__} has no output embeddings to project with")
    if hasattr(layer, "modules_to_save"):
        # PEFT trains a full copy of the head under the active adapter's name.
        names = layer.active_adapters
        layer = layer.original_module if layer.disable_adapters else layer.modules_to_save[names[0]]
    weight, _, _ = unpack_head(layer)
    if weight.numel() == 0 or hasattr(weight, "ds_id"):
        raise ValueError("model: its head is partitioned by ZeRO-3; use FSDP2 or ZeRO-2 with leanstep")
    config = model.config.get_text_config()  # type: ignore[union-attr]
    return CausalHead(layer, _scale(config), getattr(config, "final_logit_softcapping", None))


def _scale(config: Any) -> float:
    """The factor on the logits, under the names that model families give it."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None:
        return float(divisor) if config.model_type == "hyperclovax" else 1.0 / float(divisor)
    return 1.0


def score_labels(
    model: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    *,
    shifted: bool = False,
    entropy: Entropy = "none",
    outputs: Sequence[str] = (),
    temperature: float = 1.0,
    in_fp32: bool = False,
) -> LabelScores:
    """Log-prob (and entropy) of every label that is not ignored; only those rows meet the head.

    Args:
        hidden: [B, T, D], the backbone's last hidden state.
        labels: [B, T]; position t is scored by row t - 1, or by row t when `shifted`.
        outputs: any of "mean_logits" (of a head with softcap: one more product, else a vector's worth),
            "is_top1", "log_sum_sq_probs" (one more product).
        in_fp32: project in fp32 whatever the model's dtype.

    Returns:
        [B, T - 1] tensors, or [B, T] when `shifted`.

    Host reads: one, for the number of labelled rows.
    """
    if not shifted:
        labels = torch.cat([labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORED)], dim=1)
    head = causal_head(model)
    mask = labels != IGNORED
    rows = mask.reshape(-1).nonzero().squeeze(1)
    targets = labels.reshape(-1).index_select(0, rows)
    flat = hidden.reshape(-1, hidden.shape[-1])
    # Autocast would have cast the head's input; inside the op it is off, every cast is explicit there. On a
    # GPU the weight is multiplied in the dtype of a 16-bit input.
    flat = flat.to(torch.float32 if in_fp32 else _compute_dtype(hidden))
    shared: dict[str, Any] = {"rows": rows, "transform": Transform(head.scale, head.softcap)}
    with torch.autocast(hidden.device.type, enabled=False):
        scored = linear_logprobs(
            flat,
            head.layer,
            targets,
            entropy=entropy,
            temperature=temperature,
            outputs=[name for asked, name in _NEEDED if asked in outputs],
            **shared,
        )
        more = _more_outputs(head, flat, targets, scored, temperature, outputs, shared)

    def spread(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        full = values.new_zeros(mask.numel()).index_copy(0, rows, values).view(mask.shape)
        return full if shifted else full[:, :-1]

    logp = spread(scored.logp)
    assert logp is not None
    found = {name: spread(values) for name, values in more.items()}
    return LabelScores(logp, spread(scored.entropy), mask if shifted else mask[:, :-1], **found)


# What `linear_logprobs` must return besides, for an output that somebody asked for.
_NEEDED = (("is_top1", "argmax"), ("log_sum_sq_probs", "lse"))


@torch.no_grad()
def _more_outputs(
    head: CausalHead,
    flat: Tensor,
    targets: Tensor,
    scored: LogProbs,
    temperature: float,
    outputs: Sequence[str],
    shared: dict[str, Any],
) -> dict[str, Tensor]:
    """[R] each: statistics of the rows that trainers log."""
    found: dict[str, Tensor] = {}
    if "is_top1" in outputs:
        assert scored.argmax is not None
        found["is_top1"] = scored.argmax == targets
    if "log_sum_sq_probs" in outputs:
        # log sum p^2 = lse(2 z) - 2 lse(z), and half the temperature doubles z.
        doubled = linear_logprobs(
            flat, head.layer, targets, temperature=temperature / 2, outputs=["lse"], **shared
        )
        assert scored.lse is not None and doubled.lse is not None
        found["log_sum_sq_probs"] = doubled.lse - 2.0 * scored.lse
    if "mean_logits" in outputs and head.softcap is not None:
        # Smoothed by one half, a log-prob is that of the target and the mean one, half each.
        even = Transform(head.scale, head.softcap, label_smoothing=0.5)
        options = {**shared, "transform": even, "temperature": temperature, "outputs": ["lse"]}
        smooth = linear_logprobs(flat, head.layer, targets, **options)
        assert smooth.lse is not None
        found["mean_logits"] = 2.0 * smooth.logp - scored.logp + smooth.lse
    elif "mean_logits" in outputs:
        weight, bias, lora = unpack_head(head.layer)
        # Logits are linear in hidden, so their mean is one column: the mean of the weight's rows.
        column: Any = weight.mean(0, dtype=torch.float32)
        column = column.full_tensor() if hasattr(column, "full_tensor") else column
        if lora is not None:
            column = column + lora.scaling * (lora.up.mean(0, dtype=torch.float32) @ lora.down.float())
        means = flat.index_select(0, shared["rows"]).float() @ column
        means = means if bias is None else means + bias.float().mean()
        found["mean_logits"] = means * (head.scale / temperature)
    return found


def router_loss(model: nn.Module, outputs: Any, attention_mask: Tensor | None) -> Tensor:
    """The load-balancing loss of a mixture of experts, unweighted, by the model family's own function.

    Args:
        outputs: the backbone's, with `router_logits`.

    Raises:
        ValueError: for a family that keeps it elsewhere.
    """
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    experts = [getattr(model, name, None) for name in ("num_experts", "num_experts_per_tok")]
    logits = getattr(outputs, "router_logits", None)
    if function is None or None in experts or logits is None:
        raise ValueError(_UNKNOWN_ROUTER.format(type(model).__name__))
    return function(logits, *experts, attention_mask)


def check_router(model: nn.Module, asked: bool = False) -> None:
    """Compare our auxiliary loss and its weight with the model's own on three tokens.

    Args:
        asked: whether somebody will ask for it although the model's config does not.

    Raises:
        ValueError: for a family that computes or weights it in another way.
    """
    parameter, config = next(model.parameters()), model.config.get_text_config()  # type: ignore[union-attr]
    asked = asked or getattr(config, "output_router_logits", False)
    if not asked or parameter.device.type == "meta" or type(parameter.data) is not Tensor:
        return
    ids = (torch.arange(3, device=parameter.device) % config.vocab_size)[None]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            given: dict[str, Any] = {"input_ids": ids, "output_router_logits": True, "use_cache": False}
            theirs = model(**given, labels=ids)
            backbone = model.base_model(**given)  # type: ignore[operator]
            # A single sequence whose labels all count: its cross-entropy is the mean of two.
            plain = -score_labels(model, backbone.last_hidden_state, ids).logp.mean()
            ours = plain + getattr(model, "router_aux_loss_coef", 0.0) * router_loss(model, backbone, None)
    except TypeError:
        raise ValueError(_UNKNOWN_ROUTER.format(type(model).__name__)) from None
    finally:
        model.train(was_training)
    limit = (1e-4 if parameter.dtype == torch.float32 else 2e-2) * max(1.0, abs(theirs.loss.item()))
    if not abs(ours.item() - theirs.loss.item()) <= limit:
        raise ValueError(_UNKNOWN_ROUTER.format(type(model).__name__))


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def check_head(model: nn.Module) -> None:
    """Compare our logits with the model's own on three tokens; a difference is a head we do not understand.

    Raises:
        ValueError: naming the model and the size of the difference.
    """
    parameter = next(model.parameters())
    if parameter.device.type == "meta" or type(parameter.data) is not Tensor:
        # Sharded or not yet there: nothing to compare with.
        return
    vocabulary = model.config.get_text_config().vocab_size  # type: ignore[union-attr]
    ids = (torch.arange(3, device=parameter.device) % vocabulary)[None]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
            expected = logits.float()
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[operator]
            head = causal_head(model)
            weight, bias, lora = unpack_head(head.layer)
            ours = hidden.float() @ weight.float().T
            if lora is not None:
                ours += lora.scaling * (hidden.float() @ lora.down.float().T) @ lora.up.float().T
            ours = head.scale * (ours if bias is None else ours + bias.float())
            ours = ours if head.softcap is None else head.softcap * torch.tanh(ours / head.softcap)
    finally:
        model.train(was_training)
    difference = (ours - expected).abs().max().item()
    # Half-precision models round their logits: 2 % of the largest is far below any forgotten factor.
    limit = (1e-4 if logits.dtype == torch.float32 else 2e-2) * max(1.0, expected.abs().max().item())
    if not difference <= limit:
        name = type(model).__name__
        raise ValueError(
            f"model: the head of {name} differs from weight, scale and softcap by {difference:.3g}"
        )
