"""What the head of a transformers causal LM computes, and how to score labels with it row by row.

    logits = softcap(scale * (hidden @ weight.T + bias))

The trainers' adapters differ only in what they do with the per-token results. A head that leanstep cannot
express (an unknown module, an adapter with dropout, a sharded ZeRO-3 weight) is refused; and `check_head`
compares our logits with the model's own on three tokens, so that an unknown scaling is an error
and not a slightly different loss.
"""

# B sequences · T positions · D model · V vocabulary

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leanstep.logprob import LogProbs, Transform, linear_logprobs
from leanstep.logprob.checks import check_entropy
from leanstep.logprob.inputs import Entropy, unpack_head
from leanstep.logprob.padded import PaddedRows

IGNORED = -100
_CHECKED = "_leanstep_head_is_checked"
_UNKNOWN_ROUTER = "model: leanstep does not support the auxiliary loss of {}'s router"


@dataclass(frozen=True)
class CausalHead:
    """A linear layer, optionally with a LoRA adapter; `scale` multiplies its output, `softcap` follows."""

    layer: nn.Module
    scale: float
    softcap: float | None


@dataclass(frozen=True)
class LabelScores:
    """Per-position results, zero where the label is ignored. `mask` says where it is not.

    mean_logits: over the vocabulary. is_top1: the label is the likeliest token. log_sum_sq_probs: log of
    sum p^2. These have no gradient and are None unless requested.
    """

    logp: Tensor
    entropy: Tensor | None
    mask: Tensor
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None


def causal_head(model: nn.Module) -> CausalHead:
    """Return the active head, with scaling and softcap from the config.

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
    """Return the factor on the logits; its name depends on the model family."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None:
        return float(divisor) if config.model_type == "hyperclovax" else 1.0 / float(divisor)
    return 1.0


def model_logprobs(
    model: Any,
    input_ids: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    entropy: Entropy = "none",
    max_rows: int | None = None,
    targets: Tensor | None = None,
    logits_to_keep: int | None = None,
    **inputs: Any,
) -> Any:
    """Log-prob of each token of a padded batch under a transformers model; 0 where the mask is 0.

    Equivalent to:
        logits = model(input_ids, **inputs).logits[:, :-1].float() / temperature
        logp = torch.log_softmax(logits, -1).gather(-1, input_ids[:, 1:, None])[..., 0] * mask[:, 1:]

    The model runs as usual, with its wrappers (DDP, FSDP, DeepSpeed, PEFT), checkpointing and autocast; only
    the head is replaced by `masked_token_logprobs` on the rows that the mask selects. Under `torch.no_grad()`
    this computes old and reference log-probs.

    Args:
        model: a causal LM of transformers, or a wrapper around one.
        input_ids: [B, T], padded on either side.
        mask: bool or 0 and 1: [B, T] or [B, T - 1], or [B, K] of the last K tokens. None: every token counts.
        temperature, entropy, max_rows: as in `masked_token_logprobs`.
        targets: [B, T], scored instead of `input_ids`: labels, for example.
        logits_to_keep: as in the model's forward: only the last `logits_to_keep` - 1 tokens count.
        inputs: of the model: attention_mask, position_ids, use_cache ...

    Returns:
        [B, T - 1], or [B, K] for a mask of the last K tokens; with `entropy` a pair of such tensors.

    Host reads: as `masked_token_logprobs`; the one on a GPU does not wait for the model. The first call of a
        model compares the head with the model's own on three tokens.

    Raises:
        ValueError: for a head that leanstep cannot express.
    """
    check_entropy(entropy)
    causal = _causal_model(model)
    if not getattr(causal, _CHECKED, False):
        check_head(causal)
        setattr(causal, _CHECKED, True)
    head = causal_head(causal)
    tokens = input_ids if targets is None else targets
    if logits_to_keep is not None:
        mask = torch.ones_like(tokens, dtype=torch.bool, device="cpu") if mask is None else mask
        mask = mask[:, -(logits_to_keep - 1) :]
    rows = PaddedRows(tokens, mask, input_ids.shape[1], input_ids.device, max_rows)
    transform, results = Transform(head.scale, head.softcap), []

    def scores(hidden: Tensor) -> Tensor:
        hidden = hidden.to(_compute_dtype(hidden))
        with torch.autocast(hidden.device.type, enabled=False):
            scored = rows.score(hidden, head.layer, entropy, temperature, transform, None)
        results.append(scored)
        # Returned as logits, so that wrappers find every parameter in the graph of the model's output.
        return scored[0].unsqueeze(-1) if isinstance(scored, tuple) else scored.unsqueeze(-1)

    with _replaced_forward(head.layer, scores):
        model(input_ids=input_ids, **inputs)
    if len(results) != 1:
        name = type(causal).__name__
        raise ValueError(
            f"model: expected {name} to run its head once per forward, it ran {len(results)} times"
        )
    return results[0]


def _causal_model(model: Any) -> Any:
    """Return the causal LM inside DDP, FSDP, DeepSpeed, torch.compile and PEFT wrappers."""
    # Wrappers forward the attributes of the wrapped model, so unwrap before checking.
    for name in ("module", "_orig_mod") * 2:
        inner = getattr(model, name, None)
        model = inner if isinstance(inner, nn.Module) else model
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(causal, "get_output_embeddings") or not hasattr(causal, "config"):
        raise ValueError(f"model: expected a transformers causal LM, got {type(causal).__name__}")
    return causal


@contextmanager
def _replaced_forward(layer: nn.Module, forward: Any) -> Iterator[None]:
    """Replace the layer's forward; its hooks still run, so that a sharded weight is gathered around it."""
    own = layer.__dict__.get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        if own is None:
            del layer.forward
        else:
            layer.forward = own


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
    """Return the log-prob (and entropy) of every label that is not ignored; only those rows reach the head.

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
    columns = {name: spread(values) for name, values in more.items()}
    return LabelScores(logp, spread(scored.entropy), mask if shifted else mask[:, :-1], **columns)


# What `linear_logprobs` must also return for each requested output.
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
    results: dict[str, Tensor] = {}
    if "is_top1" in outputs:
        assert scored.argmax is not None
        results["is_top1"] = scored.argmax == targets
    if "log_sum_sq_probs" in outputs:
        # log sum p^2 = lse(2 z) - 2 lse(z), and half the temperature doubles z.
        doubled = linear_logprobs(
            flat, head.layer, targets, temperature=temperature / 2, outputs=["lse"], **shared
        )
        assert scored.lse is not None and doubled.lse is not None
        results["log_sum_sq_probs"] = doubled.lse - 2.0 * scored.lse
    if "mean_logits" in outputs and head.softcap is not None:
        # Smoothed by one half, a log-prob is that of the target and the mean one, half each.
        even = Transform(head.scale, head.softcap, label_smoothing=0.5)
        options = {**shared, "transform": even, "temperature": temperature, "outputs": ["lse"]}
        smooth = linear_logprobs(flat, head.layer, targets, **options)
        assert smooth.lse is not None
        results["mean_logits"] = 2.0 * smooth.logp - scored.logp + smooth.lse
    elif "mean_logits" in outputs:
        weight, bias, lora = unpack_head(head.layer)
        # Logits are linear in hidden, so their mean is one column: the mean of the weight's rows.
        column: Any = weight.mean(0, dtype=torch.float32)
        column = column.full_tensor() if hasattr(column, "full_tensor") else column
        if lora is not None:
            column = column + lora.scaling * (lora.up.mean(0, dtype=torch.float32) @ lora.down.float())
        means = flat.index_select(0, shared["rows"]).float() @ column
        means = means if bias is None else means + bias.float().mean()
        results["mean_logits"] = means * (head.scale / temperature)
    return results


def router_loss(model: nn.Module, outputs: Any, attention_mask: Tensor | None) -> Tensor:
    """Return the unweighted load-balancing loss of a mixture of experts, by the model family's own function.

    Args:
        outputs: the backbone's, with `router_logits`.

    Raises:
        ValueError: for a family that defines it elsewhere.
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
        asked: whether it will be requested although the model's config does not.

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
            inputs: dict[str, Any] = {"input_ids": ids, "output_router_logits": True, "use_cache": False}
            theirs = model(**inputs, labels=ids)
            backbone = model.base_model(**inputs)  # type: ignore[operator]
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
        # Sharded or not materialised yet: nothing to compare with.
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
