"""The LM head as one record, and the plain tensors that every function of this folder computes with."""

# N rows · D model · V vocabulary · r low rank

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leanstep.heads.parallel import gather_weight


class LoRA(NamedTuple):
    """A low-rank addition to the head: weight + scaling * up @ down. The sum is never materialized.

    down: [r, D], PEFT's lora_A.weight. up: [V, r], PEFT's lora_B.weight. scaling: usually alpha / r.
    """

    down: Tensor
    up: Tensor
    scaling: float = 1.0


@dataclass(frozen=True)
class Head:
    """logits = cap(scale * (hidden @ weight.T + bias)), cap(a) = softcap * tanh(a / softcap).

    Args:
        weight: [V, D], a tensor, a DTensor (Shard(0) or Replicate), an nn.Linear (its bias is used) or a PEFT
            LoRA layer around one. With a process group: this rank's columns, equally many on every rank.
        bias: [V]; -inf excludes a column.
        lora: `LoRA(down, up, scaling)`.
        scale: > 0.
        softcap: > 0, or None for no cap.
    """

    weight: Any
    bias: Tensor | None = None
    lora: LoRA | None = None
    scale: float = 1.0
    softcap: float | None = None


def open_head(head: Any, hidden: Tensor) -> Head:
    """Return a checked `Head` of plain tensors from a tensor, a module or a `Head`; gathers DTensors."""
    head = unpack_head(head)
    weight, bias, lora = _full(head.weight), _full(head.bias), head.lora
    for name, tensor in (("hidden", hidden), ("head.weight", weight)):
        check_matrix(name, tensor)
    if weight.shape[1] != hidden.shape[1]:
        expected = f"[V, {hidden.shape[1]}] to match hidden"
        raise ValueError(f"head.weight: expected {expected}, got {tuple(weight.shape)}")
    if weight.device != hidden.device:
        raise ValueError(f"head.weight: expected device {hidden.device} like hidden, got {weight.device}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"head.bias: expected [{len(weight)}], got {tuple(bias.shape)}")
    if lora is not None:
        lora = LoRA(*lora)
        rank = lora.down.shape[0] if lora.down.dim() == 2 else -1
        got = (tuple(lora.down.shape), tuple(lora.up.shape))
        if got != ((rank, weight.shape[1]), (len(weight), rank)):
            wanted = f"down [r, {weight.shape[1]}] and up [{len(weight)}, r]"
            raise ValueError(f"head.lora: expected {wanted}, got {got[0]} and {got[1]}")
    if not (head.scale > 0 and math.isfinite(head.scale)):
        raise ValueError(f"head.scale: expected a finite number > 0, got {head.scale}")
    if head.softcap is not None and not torch.finfo(torch.float32).tiny <= head.softcap < math.inf:
        raise ValueError(f"head.softcap: expected a value > 0 (in float32) or None, got {head.softcap}")
    return replace(head, weight=weight, bias=bias, lora=lora)


def unpack_head(head: Any) -> Head:
    """Return the `Head` of a tensor, a module or a `Head` around one; an adapter is never ignored."""
    if isinstance(head, Head):
        inner = unpack_head(head.weight)
        for name in ("bias", "lora"):
            if getattr(head, name) is not None and getattr(inner, name) is not None:
                raise ValueError(f"head.{name}: expected None, because the module has its own")
        bias, lora = (getattr(inner if getattr(head, n) is None else head, n) for n in ("bias", "lora"))
        return replace(head, weight=inner.weight, bias=bias, lora=lora)
    if isinstance(head, Tensor):
        return Head(head)
    name = type(head).__name__
    if not isinstance(head, nn.Module):
        raise ValueError(f"head: expected a tensor, a Head or a module, got {name}")
    inner = getattr(head, "base_layer", head)
    if not isinstance(inner, nn.Linear) or type(inner).forward is not nn.Linear.forward:
        raise ValueError(f"head: expected nn.Linear or a LoRA layer around one, got {name}")
    for module in {head, inner}:
        if module._forward_hooks or module._forward_pre_hooks:
            got = type(module).__name__
            raise ValueError(f"head: {got} has forward hooks, which would not run; pass its weight")
    return Head(inner.weight, inner.bias, None if inner is head else _active_lora(head))


def _active_lora(layer: Any) -> LoRA | None:
    """Return the active adapter of a PEFT layer; refuse one that `LoRA` does not express."""
    name = type(layer).__name__
    missing = [a for a in ("lora_A", "lora_B", "scaling") if not hasattr(layer, a)]
    if missing:
        raise ValueError(f"head: adapter {name} is not LoRA (no {', '.join(missing)}); merge it first")
    # Merged adapters are already part of the weight; disabled ones have no effect.
    if getattr(layer, "merged", False) or getattr(layer, "disable_adapters", False):
        return None
    active = [a for a in getattr(layer, "active_adapters", []) if a in layer.lora_A]
    if not active:
        return None
    if len(active) > 1:
        raise ValueError(f"head: {len(active)} active adapters on {name}; expected one, or merge them first")
    adapter = active[0]
    variants = [adapter in (getattr(layer, v, None) or {}) for v in ("lora_magnitude_vector", "lora_variant")]
    if any(variants) or getattr(layer, "use_dora", {}).get(adapter):
        raise ValueError(f"head: adapter {adapter!r} on {name} is more than plain LoRA; merge it first")
    if any(getattr(part[adapter], "bias", None) is not None for part in (layer.lora_A, layer.lora_B)):
        raise ValueError(f"head: adapter {adapter!r} on {name} has a bias; merge it first")
    dropout = layer.lora_dropout[adapter] if hasattr(layer, "lora_dropout") else None
    if dropout is not None and layer.training and getattr(dropout, "p", 0.0) > 0:
        raise ValueError(f"head: adapter {adapter!r} drops out its input (p = {dropout.p}); set it to 0")
    return LoRA(layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, float(layer.scaling[adapter]))


def _full(tensor: Any) -> Any:
    is_dtensor = type(tensor).__name__ == "DTensor" and hasattr(tensor, "placements")
    return gather_weight(tensor) if is_dtensor else tensor


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Return the dtype in which autocast would project `hidden`; without autocast, its own."""
    device = hidden.device.type
    casts = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(device) if casts else hidden.dtype


# Checks of per-row arguments. They read shapes, dtypes and devices; values only on a CPU.


def check_matrix(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dim() != 2:
        expected = "a floating-point tensor with 2 dimensions"
        raise ValueError(f"{name}: expected {expected}, got {describe(tensor)}")
    if tensor.layout != torch.strided or tensor.dtype.itemsize < 2:
        got = f"{tensor.dtype} {tensor.layout}"
        raise ValueError(f"{name}: expected a dense tensor of at least 16 bits per number, got {got}")


def check_rows(rows: Tensor | None, tensor: Tensor) -> None:
    if rows is None:
        return
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
        raise ValueError(f"rows: expected a one-dimensional int64 tensor, got {describe(rows)}")
    if rows.device != tensor.device:
        raise ValueError(f"rows: expected device {tensor.device}, got {rows.device}")
    check_range("rows", rows, len(tensor))


def select(name: str, values: Tensor, rows: Tensor | None, total: int) -> Tensor:
    """Return one entry per selected row of `values` [N] or, with `rows` [N], of `values` [total]."""
    num_rows = total if rows is None else len(rows)
    if values.dim() != 1 or len(values) not in (num_rows, total):
        expected = f"[{num_rows}]" + ("" if rows is None else f" (selected rows) or [{total}] (all rows)")
        raise ValueError(f"{name}: expected {expected}, got {tuple(values.shape)}")
    if len(values) == num_rows:
        return values
    assert rows is not None
    return values.index_select(0, rows.to(values.device))


def check_targets(targets: Any, rows: Tensor | None, total: int, vocab: int) -> Tensor:
    """Return the selected rows' targets, [N] int64. An id outside the vocabulary raises, on a GPU later."""
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets: expected an int64 tensor, got {describe(targets)}")
    targets = select("targets", targets.long(), rows, total).contiguous()
    check_range("targets", targets, vocab)
    return targets


def inverse_temperature(
    temperature: float | Tensor, rows: Tensor | None, total: int, like: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return 1 / temperature of every selected row, [N] in the accumulation dtype."""
    if not isinstance(temperature, Tensor):
        if not float(temperature) >= torch.finfo(torch.float32).tiny:
            raise ValueError(f"temperature: expected a value > 0 (in float32), got {temperature}")
        size = total if rows is None else len(rows)
        return torch.full((size,), 1.0 / float(temperature), dtype=dtype, device=like.device)
    if temperature.requires_grad or not temperature.is_floating_point():
        got = describe(temperature)
        raise ValueError(f"temperature: expected a float or floating-point constants, got {got}")
    if temperature.dim() == 0:
        temperature = temperature.expand(total)
    temperature = select("temperature", temperature, rows, total).to(like.device, dtype)
    if not is_fake(temperature):
        assert_all(temperature > 0, "temperature: expected values > 0", temperature)
    return temperature.reciprocal()


def check_range(name: str, ids: Tensor, stop: int) -> None:
    """Raise an error for ids outside [0, stop)."""
    if ids.numel() and not is_fake(ids):
        assert_all((ids >= 0).logical_and_(ids < stop), f"{name}: expected ids in [0, {stop})", ids)


def assert_all(condition: Tensor, wrong: str, values: Tensor) -> None:
    """Assert on the device without a host sync; on a CPU, raise with the values in the message."""
    try:
        torch._assert_async(condition.all(), wrong)
    except RuntimeError:
        if values.device.type != "cpu":
            raise
        raise ValueError(f"{wrong}, got {values.min().item()} to {values.max().item()}") from None


def is_fake(tensor: Tensor) -> bool:
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"


def describe(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
