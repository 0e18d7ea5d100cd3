"""Heads as they come: a plain weight, a Linear, a LoRA-wrapped Linear, a sharded DTensor.

An adapter is never ignored: what cannot be expressed here is refused.
"""

# V vocabulary · D model · r adapter rank

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leanstep.logprob.gradient import first_order_only
from leanstep.logprob.head import Head
from leanstep.logprob.outputs import accumulation_dtype, check_float, vocabulary_size
from leanstep.logprob.parallel import vocab_shard


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


# hidden, weight, bias, low_hidden, low_weight: what gradients may flow to, in the Functions' order.
HeadTensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def build_head(
    hidden: Tensor,
    weight: Tensor | nn.Module,
    bias: Tensor | None,
    lora: LoRA | None,
    *,
    scale: float,
    softcap: float | None,
    group: Any,
    vocab_start: int | None,
    vocab_total: int | None,
) -> tuple[Head, HeadTensors]:
    """Check the arguments that describe a head; the caller sets its temperature.

    LoRA becomes a second, thin product: low_hidden = scaling hidden @ down^T times up^T.
    """
    tensor, own_bias, own_lora = unpack_head(weight)
    if own_bias is not None and bias is not None:
        raise ValueError("bias: expected None, because the head has its own")
    if own_lora is not None and lora is not None:
        raise ValueError("lora: expected None, because the head has its own adapter")
    bias, lora = own_bias if bias is None else bias, own_lora if lora is None else lora
    if is_dtensor(tensor):
        tensor = gather_weight(tensor)
    if bias is not None and is_dtensor(bias):
        bias = gather_weight(bias)
    check_float("hidden", hidden, 2)
    check_float("weight", tensor, 2)
    if tensor.shape[1] != hidden.shape[1]:
        raise ValueError(
            f"weight: expected [V, {hidden.shape[1]}] to match hidden, got {tuple(tensor.shape)}"
        )
    if tensor.device != hidden.device:
        raise ValueError(f"weight: expected device {hidden.device} to match hidden, got {tensor.device}")
    if bias is not None and bias.shape != tensor.shape[:1]:
        raise ValueError(f"bias: expected [{tensor.shape[0]}], got {tuple(bias.shape)}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap: expected a value > 0 or None, got {softcap}")
    low_hidden = low_weight = None
    if lora is not None:
        lora.check(tensor)
        low_hidden = torch.nn.functional.linear(hidden, lora.down.to(hidden.dtype)) * lora.scaling
        low_weight = lora.up
    shard = vocab_shard(tensor.shape[0], group, vocab_start=vocab_start, vocab_total=vocab_total)
    head = Head(
        weight=tensor.detach(),
        bias=None if bias is None else bias.detach(),
        low_weight=None if low_weight is None else low_weight.detach(),
        scale=scale,
        softcap=softcap,
        temperature=1.0,
        shard=shard,
        vocabulary=vocabulary_size(shard, group, vocab_start, vocab_total),
        dtype=accumulation_dtype(hidden.dtype, tensor.dtype),
    )
    return head, (hidden, tensor, bias, low_hidden, low_weight)


def unpack_head(head: Tensor | nn.Module) -> tuple[Tensor, Tensor | None, LoRA | None]:
    """(weight, bias, LoRA) of a weight tensor, an nn.Linear or a PEFT LoRA layer around one."""
    if isinstance(head, Tensor):
        return head, None, None
    if not isinstance(head, nn.Module):
        raise ValueError(f"weight: expected a tensor or a module, got {type(head).__name__}")
    inner = getattr(head, "base_layer", None)
    if inner is None:
        if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
            raise ValueError(
                f"weight: expected nn.Linear or a LoRA layer around one, got {type(head).__name__}"
            )
        _refuse_hooks(head)
        return head.weight, head.bias, None
    if not isinstance(inner, nn.Linear) or type(inner).forward is not nn.Linear.forward:
        raise ValueError(
            f"weight: expected an adapter around nn.Linear, got one around {type(inner).__name__}"
        )
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
        raise ValueError(
            f"weight: {len(active)} active adapters on {name}; expected one, or merge them first"
        )
    adapter = active[0]
    variants = [
        v for v in ("lora_magnitude_vector", "lora_variant") if adapter in (getattr(layer, v, None) or {})
    ]
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
        raise ValueError(
            f"weight: {type(module).__name__} has forward hooks, which would not run; pass its weight"
        )


def is_dtensor(tensor: Any) -> bool:
    return type(tensor).__name__ == "DTensor" and hasattr(tensor, "placements")


def gather_weight(weight: Tensor) -> Tensor:
    """The full weight of a DTensor; its gradient comes back with the same placement, averaged over ranks.

    Averaging is what FSDP does with data-parallel gradients; ranks with equal data are unaffected.
    Collectives: one all-gather forward, one reduce-scatter backward per sharded mesh dimension.
    """
    for placement in weight.placements:  # type: ignore[attr-defined]
        if not (placement.is_replicate() or (placement.is_shard() and placement.dim == 0)):
            raise ValueError(
                f"weight: expected a DTensor with Shard(0) or Replicate placements, got {placement}"
            )
    return _GatherWeight.apply(weight)  # type: ignore[return-value]


class _GatherWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:  # type: ignore[override]
        ctx.mesh, ctx.placements = weight.device_mesh, weight.placements
        full = weight.full_tensor()
        # A replicated weight gathers into itself; autograd needs a tensor of its own.
        return full.view_as(full)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Partial

        grad = grad / ctx.mesh.size()
        partial = DTensor.from_local(grad, ctx.mesh, [Partial()] * ctx.mesh.ndim, run_check=False)
        return partial.redistribute(placements=ctx.placements)
