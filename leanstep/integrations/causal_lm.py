"""What the head of a transformers causal LM computes, and how to score labels with it row by row.

    logits = softcap(scale * (hidden @ weight.T + bias))

The trainers' adapters differ only in what they do with the per-token results. A head that leanstep cannot
express (an unknown module, an adapter with dropout, a sharded ZeRO-3 weight) is refused; and `check_head`
compares our logits with the model's own on a few made-up tokens, so that an unknown scaling is an error and
not a slightly different loss. Checks leave the model and the random state as they were (`unchanged`).
"""

# B sequences · T positions · D model · V vocabulary

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from leanstep.heads import Head, LogProbs, linear_logprobs, rowwise
from leanstep.heads.head import unpack_head
from leanstep.heads.logprob import Entropy, check_entropy
from leanstep.heads.padded import PaddedRows

IGNORED = -100
_CHECKED = "_leanstep_head_is_checked"
UNKNOWN_ROUTER = "model: leanstep does not support the auxiliary loss of {}'s router"


@dataclass(frozen=True)
class CausalHead:
    """`module` is what the model calls; `head` is the same as a head of `linear_logprobs`.

    `head.weight` may be the module: FSDP replaces its parameters while it runs.
    """

    module: nn.Module
    head: Head


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
    module = layer
    if isinstance(layer, FSDPModule) and isinstance(layer, nn.Linear):
        # Its own FSDP2 group: the sharded weight is gathered where it is used, without the layer's hooks.
        layer = Head(layer.weight, layer.bias)
    head = layer if isinstance(layer, Head) else Head(layer)
    weight = unpack_head(head).weight
    if weight.numel() == 0 or hasattr(weight, "ds_id"):
        raise ValueError("model: its head is partitioned by ZeRO-3; use FSDP2 or ZeRO-2 with leanstep")
    config = model.config.get_text_config()  # type: ignore[union-attr]
    softcap = getattr(config, "final_logit_softcapping", None)
    return CausalHead(module, replace(head, scale=_scale(config), softcap=softcap))


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
        logits_to_keep: as in the model's forward: only the last `logits_to_keep` - 1 tokens count; 0 or None
            keeps all.
        inputs: of the model: attention_mask, position_ids, use_cache ...

    Returns:
        [B, T - 1], or [B, K] for a mask of the last K tokens; with `entropy` a pair of such tensors.

    Host reads: as `masked_token_logprobs`; the one on a GPU does not wait for the model. The first call of a
        model compares the head with the model's own on a few made-up tokens.

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
    if logits_to_keep:
        # K logits score the last K - 1 tokens. One logit scores none: its target is not in the batch.
        if logits_to_keep == 1:
            return _no_scores(tokens, entropy)
        mask = torch.ones_like(tokens, dtype=torch.bool, device="cpu") if mask is None else mask
        mask = mask[:, -(logits_to_keep - 1) :]
    rows = PaddedRows(tokens, mask, input_ids.shape[1], input_ids.device, max_rows)
    results = []

    def scores(hidden: Tensor) -> Tensor:
        hidden = hidden.to(_compute_dtype(hidden))
        with torch.autocast(hidden.device.type, enabled=False):
            scored = rows.score(hidden, head.head, entropy, temperature)
        results.append(scored)
        # Returned as logits, so that wrappers find every parameter in the graph of the model's output.
        return scored[0].unsqueeze(-1) if isinstance(scored, tuple) else scored.unsqueeze(-1)

    with _replaced_forward(head.module, scores):
        model(input_ids=input_ids, **inputs)
    if len(results) != 1:
        name = type(causal).__name__
        raise ValueError(
            f"model: expected {name} to run its head once per forward, it ran {len(results)} times"
        )
    return results[0]


def _no_scores(tokens: Tensor, entropy: Entropy) -> Any:
    empty = torch.zeros((len(tokens), 0), device=tokens.device)
    return empty if entropy == "none" else (empty, empty.clone())


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
    if labels.shape != hidden.shape[:-1]:
        expected = f"{tuple(hidden.shape[:-1])}, one per scored position"
        raise ValueError(f"labels: expected shape {expected}, got {tuple(labels.shape)}")
    if not shifted:
        labels = torch.cat([labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORED)], dim=1)
    head = causal_head(model).head
    mask = labels != IGNORED
    rows = mask.reshape(-1).nonzero().squeeze(1)
    targets = labels.reshape(-1).index_select(0, rows)
    flat = hidden.reshape(-1, hidden.shape[-1])
    # Autocast would have cast the head's input; inside the op it is off, every cast is explicit there. On a
    # GPU the weight is multiplied in the dtype of a 16-bit input.
    flat = flat.to(torch.float32 if in_fp32 else _compute_dtype(hidden))
    with torch.autocast(hidden.device.type, enabled=False):
        scored = linear_logprobs(flat, head, targets, rows=rows, entropy=entropy, temperature=temperature)
        more = _more_outputs(head, flat, targets, rows, scored, temperature, outputs)

    def spread(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        full = values.new_zeros(mask.numel()).index_copy(0, rows, values).view(mask.shape)
        return full if shifted else full[:, :-1]

    logp = spread(scored.logp)
    assert logp is not None
    columns = {name: spread(values) for name, values in more.items()}
    return LabelScores(logp, spread(scored.entropy), mask if shifted else mask[:, :-1], **columns)


@torch.no_grad()
def _more_outputs(
    head: Head,
    flat: Tensor,
    targets: Tensor,
    rows: Tensor,
    scored: LogProbs,
    temperature: float,
    outputs: Sequence[str],
) -> dict[str, Tensor]:
    """[R] each: statistics of the rows that trainers log."""
    head = unpack_head(head)
    results: dict[str, Tensor] = {}
    if "is_top1" in outputs:
        results["is_top1"] = scored.argmax == targets
    if "log_sum_sq_probs" in outputs:
        # log sum p^2 = lse(2 z) - 2 lse(z), and half the temperature doubles z.
        doubled = linear_logprobs(flat, head, targets, rows=rows, temperature=temperature / 2)
        results["log_sum_sq_probs"] = doubled.lse - 2.0 * scored.lse
    if "mean_logits" in outputs and head.softcap is not None:
        results["mean_logits"] = rowwise(lambda z: z.mean(-1), flat, head, rows=rows) / temperature
    elif "mean_logits" in outputs:
        # Logits are linear in hidden, so their mean is one column: the mean of the weight's rows.
        column: Any = head.weight.mean(0, dtype=torch.float32)
        column = column.full_tensor() if hasattr(column, "full_tensor") else column
        if head.lora is not None:
            down, up, scaling = head.lora
            column = column + scaling * (up.mean(0, dtype=torch.float32) @ down.float())
        means = flat.index_select(0, rows).float() @ column
        means = means if head.bias is None else means + head.bias.float().mean()
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
        raise ValueError(UNKNOWN_ROUTER.format(type(model).__name__))
    return function(logits, *experts, attention_mask)


def check_router(model: nn.Module, asked: bool = False) -> None:
    """Compare our auxiliary loss and its weight with the model's own on a few made-up tokens.

    Args:
        asked: whether it will be requested although the model's config does not.

    Raises:
        ValueError: for a family that computes or weights it in another way.
    """
    config = model.config.get_text_config()  # type: ignore[union-attr]
    asked = asked or getattr(config, "output_router_logits", False)
    if not asked or is_sharded(model):
        return
    inputs: dict[str, Any] = {"input_ids": made_up_tokens(model)[:1], "output_router_logits": True}
    inputs["use_cache"] = False
    try:
        with unchanged(model):
            theirs = model(**inputs, labels=inputs["input_ids"])
            backbone = model.base_model(**inputs)  # type: ignore[operator]
            # A single sequence whose labels all count: its cross-entropy is the mean over them.
            plain = -score_labels(model, backbone.last_hidden_state, inputs["input_ids"]).logp.mean()
            ours = plain + getattr(model, "router_aux_loss_coef", 0.0) * router_loss(model, backbone, None)
    except TypeError:
        raise ValueError(UNKNOWN_ROUTER.format(type(model).__name__)) from None
    if not abs(ours.item() - theirs.loss.item()) <= rounding(model, theirs.logits, theirs.loss):
        raise ValueError(UNKNOWN_ROUTER.format(type(model).__name__))


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def check_head(model: nn.Module, *, of_backbone: bool = False) -> None:
    """Compare our logits with the model's own on a few made-up tokens, to find a head we do not understand.

    Args:
        of_backbone: the caller projects `model.base_model`'s last hidden state; check that the model does.

    Raises:
        ValueError: naming the model and what differs.
    """
    if is_sharded(model):
        return
    name, ids, inputs_of_head = type(model).__name__, made_up_tokens(model), []
    causal = causal_head(model)
    head = unpack_head(causal.head)
    hook = causal.module.register_forward_pre_hook(lambda _, inputs: inputs_of_head.append(inputs[0]))
    try:
        with unchanged(model):
            logits = model(input_ids=ids, use_cache=False).logits
            hook.remove()
            if len(inputs_of_head) != 1:
                raise ValueError(
                    f"model: expected {name} to call its head once per forward, it did {len(inputs_of_head)} "
                    "times"
                )
            hidden = inputs_of_head[0].float()
            ours = hidden @ head.weight.float().T
            if head.lora is not None:
                down, up, scaling = head.lora
                ours += scaling * (hidden @ down.float().T) @ up.float().T
            ours = head.scale * (ours if head.bias is None else ours + head.bias.float())
            ours = ours if head.softcap is None else head.softcap * torch.tanh(ours / head.softcap)
            if of_backbone:
                outputs = model.base_model(input_ids=ids, use_cache=False)  # type: ignore[operator]
                _check_same_hidden(name, last_hidden(model, outputs), hidden)
    finally:
        hook.remove()
    difference = (ours - logits.float()).abs().max().item()
    if not difference <= rounding(model, logits):
        raise ValueError(
            f"model: the head of {name} differs from weight, scale and softcap by {difference:.3g}"
        )


def _check_same_hidden(name: str, hidden: Tensor, input_of_head: Tensor) -> None:
    same = hidden.shape == input_of_head.shape
    # A head in another dtype than the backbone rounds its input.
    limit = 2e-2 * input_of_head.abs().max().item()
    if not same or not (hidden.float() - input_of_head).abs().max().item() <= limit:
        raise ValueError(f"model: the head of {name} does not project its base model's last hidden state")


def last_hidden(model: nn.Module, outputs: Any) -> Tensor:
    """Return the last hidden state of a base model's outputs; of a tuple, the first element."""
    hidden = getattr(outputs, "last_hidden_state", outputs[0] if isinstance(outputs, tuple) else None)
    if not isinstance(hidden, Tensor):
        got = f"{type(model.base_model).__name__} returns {type(outputs).__name__}"
        raise ValueError(
            f"model: expected a base model that returns last_hidden_state, {got}; call "
            "linear_cross_entropy(hidden, head, labels) in the model's forward instead"
        )
    return hidden


def is_sharded(model: nn.Module) -> bool:
    """Return whether a parameter is on the meta device or distributed: nothing can be compared yet."""
    return any(p.device.type == "meta" or type(p.data) is not Tensor for p in model.parameters())


def made_up_tokens(model: nn.Module) -> Tensor:
    """Return [2, 8] ids, none of them special in the model's config."""
    config: Any = model.config
    special: set[Any] = set()
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if "token_i" in name:
                special.update(value if isinstance(value, list) else [value])
    vocabulary = config.get_text_config().vocab_size
    ordinary = [i for i in range(min(vocabulary, 64)) if i not in special] or [0]
    ids = [ordinary[(7 * i + 3) % len(ordinary)] for i in range(16)]
    return torch.tensor(ids, device=next(model.parameters()).device).view(2, 8)


def rounding(model: nn.Module, logits: Tensor, loss: Tensor | None = None) -> float:
    """Return how far two correct computations of the same logits, or of their loss, may differ."""
    weight = unpack_head(causal_head(model).head).weight
    kinds = {weight.dtype, logits.dtype}
    if torch.is_autocast_enabled(logits.device.type):
        kinds.add(torch.get_autocast_dtype(logits.device.type))
    unit = max(torch.finfo(kind).eps for kind in kinds)
    # TF32 keeps ten bits; fp32 sums of D products lose a few units.
    unit = max(unit, 2e-3 if logits.device.type == "cuda" else 1e-5)
    largest = logits.float().abs().max().item()
    return unit * max(largest, 1e-3) + (0.0 if loss is None else 1e-5 * abs(loss.item()))


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Run the model in evaluation mode without gradients and restore it and the random state afterwards.

    Restores each module's own mode, attributes (counters, lists and dicts of its own) and buffers, and the
    generators of torch (CPU and the model's device), NumPy and Python.
    """
    modules = list(model.modules())
    saved = [(module, dict(vars(module)), _contents(module)) for module in modules]
    devices = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    kind = next(iter(devices)).type if devices else "cuda"
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        for module in modules:
            module.training = False
        with torch.random.fork_rng(devices=list(devices), device_type=kind), torch.no_grad():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for module, attributes, contents in saved:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            _restore(module, contents)


def _contents(module: nn.Module) -> list[tuple[str, Any, Any]]:
    """Name, object and copy of what a forward may change in place."""
    values = [(name, value) for name, value in module._buffers.items() if value is not None]
    values += [(n, v) for n, v in vars(module).items() if type(v) in (Tensor, list, dict) and n[0] != "_"]
    return [(n, v, v.detach().clone() if isinstance(v, Tensor) else v.copy()) for n, v in values]


@torch.no_grad()
def _restore(module: nn.Module, contents: list[tuple[str, Any, Any]]) -> None:
    for name, value, before in contents:
        if name in module._buffers:
            module._buffers[name] = value
        if isinstance(value, Tensor):
            if value.device.type != "meta" and not torch.equal(value, before):
                value.copy_(before)
        elif isinstance(value, list):
            value[:] = before
        else:
            value.clear()
            value.update(before)
