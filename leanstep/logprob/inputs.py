"""Inputs and outputs of the public functions: option records, all supported kinds of LM heads, the result.

An adapter on a head is never ignored: an adapter that `LoRA` cannot express raises an error before any work
starts. checks.py holds the checks of the other arguments.
"""

# T rows of the input · R selected rows (all without `rows`) · V vocabulary · K targets per row · r low rank

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from leanstep.logprob.engine.tiles import Tiles

Entropy = Literal["none", "metric", "grad"]
ENTROPY_MODES = ("none", "metric", "grad")


class LogProbs(NamedTuple):
    """Per-row results; fields that were not requested are None.

    logp: [R] or [R, K]. entropy: [R]. lse, z_loss (lse squared), kl, reverse_kl: [R], differentiable.
    argmax: [R] ids. top_k: values and ids, [R, k], largest first. Both detached.
    """

    logp: Tensor
    entropy: Tensor | None = None
    lse: Tensor | None = None
    z_loss: Tensor | None = None
    argmax: Tensor | None = None
    top_k: tuple[Tensor, Tensor] | None = None
    kl: Tensor | None = None
    reverse_kl: Tensor | None = None


@dataclass(frozen=True)
class LoRA:
    """A low-rank addition to the head: weight + scaling * up @ down. The sum is never materialized.

    Args:
        down: [r, D], PEFT's lora_A.weight.
        up: [V, r], PEFT's lora_B.weight.
        scaling: usually alpha / r.
    """

    down: Tensor
    up: Tensor
    scaling: float = 1.0

    def check(self, weight: Tensor) -> None:
        rank = self.down.shape[0] if self.down.dim() == 2 else -1
        expected = ((rank, weight.shape[1]), (weight.shape[0], rank))
        got = (tuple(self.down.shape), tuple(self.up.shape))
        if got != expected:
            wanted = f"down [r, {weight.shape[1]}] and up [{weight.shape[0]}, r]"
            raise ValueError(f"lora: expected {wanted}, got {got[0]} and {got[1]}")


@dataclass(frozen=True)
class LMHead:
    """An LM head as tensors: logits = hidden @ weight.T + bias, plus a LoRA branch.

    Args:
        weight: [V, D], a tensor, a DTensor or an nn.Linear without bias.
        bias: [V].
        lora: a low-rank addition to `weight`.
    """

    weight: Any
    bias: Tensor | None = None
    lora: LoRA | None = None


@dataclass(frozen=True)
class Transform:
    """Map the head's output u to logits: z = softcap tanh(scale u / softcap) / temperature.

    Args:
        scale: a factor on u.
        softcap: > 0, or None for z = scale u / temperature.
        label_smoothing: eps; logp becomes (1 - eps) logp + eps mean_v log p_v. `linear_logprobs` only.
    """

    scale: float = 1.0
    softcap: float | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ValueError(f"scale: expected a finite number, got {self.scale}")
        if self.softcap is not None and not torch.finfo(torch.float32).tiny <= self.softcap < math.inf:
            raise ValueError(f"softcap: expected a value > 0 (in float32) or None, got {self.softcap}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing: expected 0 <= value < 1, got {self.label_smoothing}")


@dataclass(frozen=True)
class ReferenceHead:
    """The constant head q of "kl" and "reverse_kl". Fields that are None are taken from the call.

    Args:
        weight: [V, D']; None: the call's weight and bias, without its LoRA branch.
        hidden: [T, D']; None: the call's hidden.
        bias: [V].
    """

    weight: Tensor | None = None
    hidden: Tensor | None = None
    bias: Tensor | None = None


class Allowed(NamedTuple):
    """Per row, the ids that the softmax covers in addition to the target (top-p, top-k replay); ragged lists.

    The log-prob is that of the distribution over these ids. `whole_entropy` selects the ids that the entropy
    covers; it has the same meaning in `linear_logprobs`, `token_logprobs` and `linear_masked_logprobs`.

    Args:
        ids: [M] int, the concatenated global ids of all rows.
        offsets: [R + 1] int, row i has ids[offsets[i] : offsets[i + 1]].
        has_set: [R] bool, False leaves a row unrestricted; None: every row has a set.
        whole_entropy: True: the whole vocabulary, as in slime; False: the allowed ids and the target. None:
            True in the two functions that read all logits anyway, False in `linear_masked_logprobs`, which
            reads only the logits of the allowed ids.
    """

    ids: Tensor
    offsets: Tensor
    has_set: Tensor | None = None
    whole_entropy: bool | None = None


@dataclass(frozen=True)
class VocabShards:
    """This rank's columns of a vocabulary that is sharded over a process group.

    Args:
        group: a ProcessGroup, a 1-D DeviceMesh, an object with `.tp`; None: one rank.
        start: global id of the first local column; None: all ranks hold the same number of columns.
        total: size of the real vocabulary; columns from `total` on are padding and are ignored.
        sequence_parallel: hidden is [T / ranks, D]; `rows` are global and on the host.
        reduce_grad: "all_reduce" the hidden gradient over `group`, "reduce_scatter" its rows, or "none" if
            the caller's layer reduces it.
    """

    group: Any = None
    start: int | None = None
    total: int | None = None
    sequence_parallel: bool = False
    reduce_grad: str = "all_reduce"

    def __post_init__(self) -> None:
        # Checked here because a single rank never reads the value.
        if self.reduce_grad not in ("all_reduce", "reduce_scatter", "none"):
            expected = "all_reduce, reduce_scatter or none"
            raise ValueError(f"reduce_grad: got {self.reduce_grad!r}, expected {expected}")


@dataclass(frozen=True)
class Tuning:
    """Memory and speed settings. Results do not depend on them beyond rounding.

    Args:
        budget: bytes for tiles of logits; None: chosen for the device.
        tile: (rows, columns) or `Tiles`; None within a pair means all rows or all columns.
        save_logits: which logits are saved for the backward pass instead of recomputed. "grad": tiles in the
            memory of the weight's gradient, which the forward pass allocates; "none"; a number: tensors of up
            to that many bytes; ("grad", bytes): both.
        main_grad: [V, D]; the weight's gradient is added to it and not returned.
        round_logits: on a GPU, with 16-bit products, logits are rounded to 16 bits as in nn.Linear. A tile
            takes half the bytes; log-probs have the error of a 16-bit head.
        invariant: a row's log-prob, entropy and lse are bitwise independent of the other rows, the tile, the
            number of threads and, if each rank holds whole sixteenths of the vocabulary, the number of ranks
            (docs/logprob.md).
    """

    budget: int | None = None
    tile: tuple[int | None, int | None] | Tiles | None = None
    save_logits: str | int | tuple[str, int] = "grad"
    main_grad: Tensor | None = None
    round_logits: bool = False
    invariant: bool = False

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget <= 0:
            raise ValueError(f"budget: expected a positive number of bytes, got {self.budget}")
        mode = self.save_logits
        pair = mode if isinstance(mode, tuple) else ("grad", 0) if mode == "grad" else ("none", mode)
        count = 0 if pair == ("none", "none") else pair[-1]
        bad = isinstance(count, bool) or not isinstance(count, int) or count < 0
        if bad or len(pair) != 2 or pair[0] not in ("grad", "none"):
            expected = '"grad", "none", a whole number of bytes >= 0 or ("grad", bytes)'
            raise ValueError(f"save_logits: expected {expected}, got {mode!r}")
        object.__setattr__(self, "save_logits", (pair[0], count))


def unpack_head(head: Any) -> tuple[Tensor, Tensor | None, LoRA | None]:
    """Return (weight, bias, LoRA) of a tensor, an `LMHead`, an nn.Linear or a PEFT LoRA layer around one."""
    if isinstance(head, Tensor):
        return head, None, None
    if isinstance(head, LMHead):
        tensor, own_bias, own_lora = unpack_head(head.weight)
        if own_bias is not None and head.bias is not None:
            raise ValueError("bias: expected None, because the head has its own")
        if own_lora is not None and head.lora is not None:
            raise ValueError("lora: expected None, because the head has its own adapter")
        return tensor, own_bias if head.bias is None else head.bias, head.lora or own_lora
    name = type(head).__name__
    if not isinstance(head, nn.Module):
        raise ValueError(f"weight: expected a tensor, an LMHead or a module, got {name}")
    inner = getattr(head, "base_layer", None)
    if inner is None:
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise ValueError(f"weight: expected nn.Linear or a LoRA layer around one, got {name}")
        _refuse_hooks(head)
        return head.weight, head.bias, None
    if not isinstance(inner, nn.Linear) or type(inner).forward is not nn.Linear.forward:
        got = type(inner).__name__
        raise ValueError(f"weight: expected an adapter around nn.Linear, got one around {got}")
    _refuse_hooks(head)
    _refuse_hooks(inner)
    return inner.weight, inner.bias, _lora_of(head)


def _lora_of(layer: Any) -> LoRA | None:
    name = type(layer).__name__
    missing = [a for a in ("lora_A", "lora_B", "scaling") if not hasattr(layer, a)]
    if missing:
        raise ValueError(f"weight: adapter {name} is not LoRA (no {', '.join(missing)}); merge it first")
    # Merged adapters are already part of the weight; disabled ones have no effect.
    if getattr(layer, "merged", False) or getattr(layer, "disable_adapters", False):
        return None
    active = [a for a in getattr(layer, "active_adapters", []) if a in layer.lora_A]
    if not active:
        return None
    if len(active) > 1:
        count = len(active)
        raise ValueError(f"weight: {count} active adapters on {name}; expected one, or merge them first")
    adapter = active[0]
    extensions = ("lora_magnitude_vector", "lora_variant")
    variants = [v for v in extensions if adapter in (getattr(layer, v, None) or {})]
    if variants or getattr(layer, "use_dora", {}).get(adapter):
        raise ValueError(f"weight: adapter {adapter!r} on {name} is more than plain LoRA; merge it first")
    if any(getattr(part[adapter], "bias", None) is not None for part in (layer.lora_A, layer.lora_B)):
        raise ValueError(f"weight: adapter {adapter!r} on {name} has a bias; merge it first")
    dropout = layer.lora_dropout[adapter] if hasattr(layer, "lora_dropout") else None
    if dropout is not None and layer.training and getattr(dropout, "p", 0.0) > 0:
        raise ValueError(f"weight: adapter {adapter!r} drops out its input (p = {dropout.p}); set it to 0")
    return LoRA(layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, float(layer.scaling[adapter]))


def _refuse_hooks(module: nn.Module) -> None:
    if module._forward_hooks or module._forward_pre_hooks:
        name = type(module).__name__
        raise ValueError(f"weight: {name} has forward hooks, which would not run; pass its weight")
