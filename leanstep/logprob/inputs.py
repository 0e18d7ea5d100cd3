"""What callers may pass and what they get: records, heads of every kind, checks, the result.

An adapter on a head is never ignored: what cannot be expressed here is refused, before any work, in one line
that names the argument. Checks look at shapes, dtypes and devices; values are checked by the device itself,
without a sync.
"""

# T, N rows of the input · R selected rows (all without `rows`) · V vocabulary · K targets per row

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from leanstep.logprob.engine.lm_head import Head
from leanstep.logprob.engine.tiles import Tiles
from leanstep.logprob.engine.vocab_subset import AllowedIds
from leanstep.logprob.layout import to_device
from leanstep.logprob.parallel import VocabShard, gather_weight, vocab_shard

Entropy = Literal["none", "metric", "grad"]
ENTROPY_MODES = ("none", "metric", "grad")


class LogProbs(NamedTuple):
    """Per-row results; fields that were not asked for are None.

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
    """A low-rank addition to the head: weight + scaling * up @ down, never formed.

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
        weight: [V, D], a tensor, a DTensor or an nn.Linear without a bias of its own.
        bias: [V].
        lora: a low-rank addition to `weight`.
    """

    weight: Any
    bias: Tensor | None = None
    lora: LoRA | None = None


@dataclass(frozen=True)
class Transform:
    """From the head's output u to logits: z = softcap tanh(scale u / softcap) / temperature.

    Args:
        scale: a factor on u.
        softcap: > 0, or None for z = scale u / temperature.
        label_smoothing: eps: logp becomes (1 - eps) logp + eps mean_v log p_v; `linear_logprobs` only.
    """

    scale: float = 1.0
    softcap: float | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap: expected a value > 0 or None, got {self.softcap}")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing: expected 0 <= value < 1, got {self.label_smoothing}")


@dataclass(frozen=True)
class ReferenceHead:
    """The constant head q of "kl" and "reverse_kl"; what is None is taken from the call itself.

    Args:
        weight: [V, D']; None: the call's weight and bias, without its LoRA branch.
        hidden: [T, D']; None: the call's hidden.
        bias: [V].
    """

    weight: Tensor | None = None
    hidden: Tensor | None = None
    bias: Tensor | None = None


class Allowed(NamedTuple):
    """The ids that a row's log-prob runs over besides its target (top-p, top-k replay); ragged lists.

    Args:
        ids: [M] int, the rows' global ids one after another.
        offsets: [R + 1] int, row i has ids[offsets[i] : offsets[i + 1]].
        has_set: [R] bool, False leaves a row unrestricted; None: every row has a set.
    """

    ids: Tensor
    offsets: Tensor
    has_set: Tensor | None = None


@dataclass(frozen=True)
class VocabShards:
    """This rank's columns of a vocabulary that is cut over a process group.

    Args:
        group: a ProcessGroup, a 1-D DeviceMesh, an object with `.tp`; None: one rank.
        start: global id of the first local column; None: all ranks hold equally many.
        total: the real vocabulary; columns from there on are padding and take no part.
        sequence_parallel: hidden is [T / ranks, D]; `rows` are global and on the host.
        reduce_grad: "all_reduce" the hidden gradient over `group`, "reduce_scatter" its rows, or "none" if
            the caller's layer does it.
    """

    group: Any = None
    start: int | None = None
    total: int | None = None
    sequence_parallel: bool = False
    reduce_grad: str = "all_reduce"

    def __post_init__(self) -> None:
        # Here and not where it is used: one rank never gets there, and a typo would wait for the second.
        if self.reduce_grad not in ("all_reduce", "reduce_scatter", "none"):
            expected = "all_reduce, reduce_scatter or none"
            raise ValueError(f"reduce_grad: got {self.reduce_grad!r}, expected {expected}")


@dataclass(frozen=True)
class Tuning:
    """Memory and speed; the numbers do not depend on it beyond rounding.

    Args:
        budget: bytes for tiles of logits; None chooses by the device.
        tile: (rows, columns) or `Tiles` outright; None in a pair means all of them.
        save_logits: what waits for the backward instead of being recomputed. "grad": tiles in the memory of
            the weight's gradient, which the forward then allocates; "none"; a number: tensors up to so many
            bytes; ("grad", bytes): both.
        main_grad: [V, D]; the weight's gradient is added to it and not returned.
        round_logits: on a GPU, with 16-bit products, logits are rounded to 16 bits as nn.Linear rounds them:
            half the bytes of a tile; log-probs then have the error of a 16-bit head.
        invariant: a row's log-prob, entropy and lse have the same bits whatever rows are beside it, whatever
            the tile, the threads and, with whole sixteenths of the vocabulary, the ranks (docs/logprob.md).
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
        given = self.save_logits
        pair = given if isinstance(given, tuple) else ("grad", 0) if given == "grad" else ("none", given)
        count = 0 if pair == ("none", "none") else pair[-1]
        bad = isinstance(count, bool) or not isinstance(count, int) or count < 0
        if bad or len(pair) != 2 or pair[0] not in ("grad", "none"):
            expected = '"grad", "none", a whole number of bytes >= 0 or ("grad", bytes)'
            raise ValueError(f"save_logits: expected {expected}, got {given!r}")
        object.__setattr__(self, "save_logits", (pair[0], count))


# hidden, weight, bias, low_hidden, low_weight: what gradients may flow to, in the Functions' order.
HeadTensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def build_head(
    hidden: Tensor, weight: Any, transform: Transform | None, shards: VocabShards | None
) -> tuple[Head, HeadTensors]:
    """Check the arguments that describe a head; the caller sets its temperature.

    LoRA becomes a second, thin product: low_hidden = scaling hidden @ down^T times up^T.
    """
    transform = Transform() if transform is None else transform
    tensor, bias, lora = unpack_head(weight)
    if is_dtensor(tensor):
        tensor = gather_weight(tensor)
    if bias is not None and is_dtensor(bias):
        bias = gather_weight(bias)
    check_float("hidden", hidden, 2)
    check_float("weight", tensor, 2)
    if tensor.shape[1] != hidden.shape[1]:
        expected = f"[V, {hidden.shape[1]}] to match hidden"
        raise ValueError(f"weight: expected {expected}, got {tuple(tensor.shape)}")
    if tensor.device != hidden.device:
        raise ValueError(f"weight: expected device {hidden.device} to match hidden, got {tensor.device}")
    if bias is not None and bias.shape != tensor.shape[:1]:
        raise ValueError(f"bias: expected [{tensor.shape[0]}], got {tuple(bias.shape)}")
    low_hidden = low_weight = None
    if lora is not None:
        lora.check(tensor)
        low_hidden = torch.nn.functional.linear(hidden, lora.down.to(hidden.dtype)) * lora.scaling
        low_weight = lora.up
    width = tensor.shape[0]
    shard, vocabulary = VocabShard(0, width, width), width
    if shards is not None:
        shard, vocabulary = vocab_shard(width, shards.group, start=shards.start, total=shards.total)
    head = Head(
        weight=tensor.detach(),
        bias=None if bias is None else bias.detach(),
        low_weight=None if low_weight is None else low_weight.detach(),
        scale=transform.scale,
        softcap=transform.softcap,
        temperature=1.0,
        shard=shard,
        vocabulary=vocabulary,
        dtype=accumulation_dtype(hidden.dtype, tensor.dtype),
        autocast=_autocast_dtype(hidden.device.type),
    )
    return head, (hidden, tensor, bias, low_hidden, low_weight)


def unpack_head(head: Any) -> tuple[Tensor, Tensor | None, LoRA | None]:
    """(weight, bias, LoRA) of a weight tensor, an `LMHead`, an nn.Linear or a PEFT LoRA layer around one."""
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
    # Merged adapters already are part of the weight; disabled ones do not act.
    if getattr(layer, "merged", False) or getattr(layer, "disable_adapters", False):
        return None
    active = [a for a in getattr(layer, "active_adapters", []) if a in layer.lora_A]
    if not active:
        return None
    if len(active) > 1:
        count = len(active)
        raise ValueError(f"weight: {count} active adapters on {name}; expected one, or merge them first")
    adapter = active[0]
    beyond = ("lora_magnitude_vector", "lora_variant")
    variants = [v for v in beyond if adapter in (getattr(layer, v, None) or {})]
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


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    """What products are made of under autocast, as in nn.Linear; None outside."""
    enabled = device_type != "meta" and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if enabled else None


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """fp64 when anything is fp64, else fp32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def check_entropy(entropy: str) -> None:
    if entropy not in ENTROPY_MODES:
        raise ValueError(f"entropy: expected one of {', '.join(ENTROPY_MODES)}, got {entropy!r}")


def check_float(name: str, tensor: Tensor, dims: int) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dim() != dims:
        got = _describe(tensor)
        raise ValueError(f"{name}: expected a floating-point tensor with {dims} dimensions, got {got}")


def check_rows(rows: Tensor | None, device: torch.device) -> None:
    if rows is None:
        return
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
        raise ValueError(f"rows: expected a one-dimensional int64 tensor, got {_describe(rows)}")
    if rows.device != device:
        raise ValueError(f"rows: expected device {device}, got {rows.device}")


def select_per_row(name: str, values: Tensor, rows: Tensor | None, num_rows: int) -> Tensor:
    """`values` for the selected rows: given for those already, or for all rows of the input."""
    selected = num_rows if rows is None else rows.shape[0]
    if values.shape[0] == selected:
        return values
    if rows is not None and values.shape[0] == num_rows:
        # Sequence parallelism has its rows on the host.
        return values.index_select(0, rows.to(values.device))
    expected = f"{selected}" if rows is None else f"{selected} (selected rows) or {num_rows} (all rows)"
    raise ValueError(f"{name}: expected length {expected}, got {values.shape[0]}")


def check_targets(
    targets: Tensor, rows: Tensor | None, num_rows: int, vocabulary: int | None, dims: tuple[int, ...] = (1,)
) -> Tensor:
    """Targets of the selected rows; ids outside the vocabulary are an error, on a GPU an asynchronous one."""
    integers = isinstance(targets, Tensor) and targets.dtype in (torch.int64, torch.int32)
    if not integers or targets.dim() not in dims:
        wanted, got = " or ".join(map(str, dims)), _describe(targets)
        raise ValueError(f"targets: expected an int64 tensor with {wanted} dimensions, got {got}")
    targets = select_per_row("targets", targets.long(), rows, num_rows).contiguous()
    if targets.numel() and vocabulary is not None:
        check_range("targets", targets, vocabulary)
    return targets


def check_range(name: str, ids: Tensor, stop: int) -> None:
    """Refuse ids outside [0, stop)."""
    if not _is_fake(ids):
        wrong = f"{name}: expected ids in [0, {stop})"
        _assert_all((ids >= 0).logical_and_(ids < stop), wrong, ids)


def _assert_all(condition: Tensor, wrong: str, values: Tensor) -> None:
    """The device asserts, the host need not look; on a CPU at once, with the values in the message."""
    try:
        torch._assert_async(condition.all(), wrong)
    except RuntimeError:
        if values.device.type != "cpu":
            raise
        raise ValueError(f"{wrong}, got {values.min().item()} to {values.max().item()}") from None


def check_temperature(
    temperature: float | Tensor, rows: Tensor | None, num_rows: int, dtype: torch.dtype
) -> float | Tensor:
    """A positive float, or the positive temperatures of the selected rows in the accumulation dtype."""
    if isinstance(temperature, Tensor):
        if temperature.requires_grad:
            raise ValueError("temperature: expected a constant, got a tensor that requires grad")
        if temperature.dim() == 0:
            temperature = temperature.expand(num_rows if rows is None else rows.shape[0])
        if temperature.dim() != 1 or not temperature.is_floating_point():
            expected, got = "a float or a one-dimensional float tensor", _describe(temperature)
            raise ValueError(f"temperature: expected {expected}, got {got}")
        temperature = select_per_row("temperature", temperature, rows, num_rows).to(dtype)
        if temperature.numel() and not _is_fake(temperature):
            _assert_all(temperature > 0, "temperature: expected values > 0", temperature)
        return temperature
    if not float(temperature) > 0:
        raise ValueError(f"temperature: expected a value > 0, got {temperature}")
    return float(temperature)


def checked_allowed(
    allowed: Any, num_rows: int, vocabulary: int | None, device: torch.device
) -> AllowedIds | None:
    """Validate an `Allowed`, or the same as a tuple. Reads the offsets on the host: one sync on a GPU."""
    if allowed is None:
        return None
    if not isinstance(allowed, (tuple, list)) or len(allowed) not in (2, 3):
        got = f"{len(allowed)} values" if isinstance(allowed, (tuple, list)) else type(allowed).__name__
        raise ValueError(f"allowed: expected (ids, offsets) or (ids, offsets, has_set), got {got}")
    ids, offsets = allowed[0], allowed[1]
    for name, value in (("ids", ids), ("offsets", offsets)):
        if value.dtype not in (torch.int32, torch.int64) or value.dim() != 1:
            got = f"{value.dtype} {tuple(value.shape)}"
            raise ValueError(f"allowed: expected one-dimensional int {name}, got {got}")
    if offsets.shape[0] != num_rows + 1:
        expected = f"{num_rows + 1} offsets for {num_rows} rows"
        raise ValueError(f"allowed: expected {expected}, got {offsets.shape[0]}")
    starts = offsets.tolist()
    rising = all(a <= b for a, b in pairwise(starts))
    if not rising or starts[0] != 0 or starts[-1] != ids.shape[0]:
        got = f"{starts[0]} to {starts[-1]}" + ("" if rising else ", not rising")
        raise ValueError(f"allowed: expected offsets that rise from 0 to {ids.shape[0]}, got {got}")
    has_set = allowed[2] if len(allowed) == 3 else None
    everywhere = has_set is None
    if has_set is None:
        has_set = torch.ones(num_rows, dtype=torch.bool, device=device)
    if has_set.dtype != torch.bool or has_set.shape != (num_rows,):
        got = f"{has_set.dtype} {tuple(has_set.shape)}"
        raise ValueError(f"allowed: expected has_set bool [{num_rows}], got {got}")
    ids = to_device(ids, device).long()
    if ids.numel() and vocabulary is not None:
        check_range("allowed ids", ids, vocabulary)
    lengths = to_device(offsets, device).long().diff()
    row_of = torch.repeat_interleave(lengths, output_size=ids.shape[0])
    return AllowedIds(ids, row_of, starts, to_device(has_set, device), everywhere)


def is_dtensor(tensor: Any) -> bool:
    return type(tensor).__name__ == "DTensor" and hasattr(tensor, "placements")


def _describe(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _is_fake(tensor: Tensor) -> bool:
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"
