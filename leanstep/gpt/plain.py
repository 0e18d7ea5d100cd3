"""The operations of the model as plain tensor code for torch.compile, used on GPUs.

Each function has the signature of a hand-written one in `layers.py` or `projections.py`, used on CPUs;
`Operations` names both sets. Autograd differentiates these functions, and Inductor fuses their passes. Values
that a schedule changes are passed as tensors: a new value needs no new graph.
"""

# T tokens · H heads · D head size · E = H * D model

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanstep.gpt.attention import windowed_attention
from leanstep.gpt.layers import EPS, Number, wide_dtype
from leanstep.gpt.mlp import fused_mlp, squared_relu_mlp
from leanstep.gpt.projections import HeadShape

Terms = list[tuple[Number, Tensor]]


@dataclass(frozen=True)
class Operations:
    """A set of operations; `model.py` calls them in order."""

    norm: Callable[..., Tensor]
    mix: Callable[..., Tensor]
    mlp: Callable[..., Tensor]
    residual_mlp: Callable[..., Tensor]
    smear_norm: Callable[..., Tensor]
    injections: Callable[..., tuple[list[Tensor | None], list[Terms]]]
    attention: Callable[..., tuple[Tensor, Tensor | None]]
    attention_out: Callable[..., Tensor]
    attention_weights: Callable[..., tuple[Tensor, ...]]


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=EPS)


def mix(edge: None, injected: Terms, *arguments: Any) -> Tensor:
    """sum_i factors_i * tensors_i + injected terms; n factors, then n tensors."""
    half = len(arguments) // 2
    out = arguments[0] * arguments[half]
    for factor, x in zip(arguments[1:half], arguments[half + 1 :], strict=True):
        out = out + factor * x
    return _add_terms(out, injected)


def _add_terms(out: Tensor, terms: Terms) -> Tensor:
    for factor, x in terms:
        out = out + factor * x
    return out


def mlp(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """relu(norm(x) @ first.T)^2 @ second."""
    return squared_relu_mlp(norm(x), first, second)


def residual_mlp(x: Tensor, resid: Tensor, post: Number, first: Tensor, second: Tensor) -> Tensor:
    return resid * x + post * mlp(x, first, second)


def mlp_by_kernels(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return fused_mlp(norm(x), first, second)


def residual_mlp_by_kernels(x: Tensor, resid: Tensor, post: Number, first: Tensor, second: Tensor) -> Tensor:
    return resid * x + post * mlp_by_kernels(x, first, second)


def smear_norm(x: Tensor, smear: Tensor, weight: Tensor, closed: Tensor | None) -> Tensor:
    """norm(x_t + gate_t * x_{t-1}), gate_t = smear * sigmoid(weight . x_t[:width]), 0 where `closed`."""
    gate = smear * torch.sigmoid(F.linear(x[1:, : weight.shape[1]], weight))
    if closed is not None:
        gate = gate.masked_fill(closed[1:, None], 0)
    return norm(torch.cat([x[:1], x[1:] + gate * x[:-1]]))


def injections(
    x0: Tensor,
    x0_factors: Tensor | None,
    xb: Tensor | None,
    xb_factors: Tensor | None,
    layers: list[int],
    count: int,
) -> tuple[list[Tensor | None], list[Terms]]:
    """Return the terms that each layer adds, unchanged: a compiler needs no autograd edges for them."""
    terms: list[Terms] = [[] for _ in range(count)]
    for source, factors in ((x0, x0_factors), (xb, xb_factors)):
        if source is None or factors is None:
            continue
        # Layer 0 already includes its bigram.
        numbers = factors.unbind(0)
        for layer in layers:
            if source is x0 or layer > 0:
                terms[layer].append((numbers[layer], source))
    return [None] * count, terms


def turned(x: Tensor, table: Tensor) -> Tensor:
    """Rotate heads [T, H, D] by a table [2, T, h, D/4] of `Rotary.real_table`; groups of h share it."""
    cos, sin = table[:, :, None].unbind(0)
    turning, still = x.unflatten(1, (-1, table.shape[2])).chunk(2, dim=-1)
    even, odd = turning.unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack([even * cos + odd * sin, odd * cos - even * sin], dim=-1).flatten(-2)
    return torch.cat([pairs, still], dim=-1).flatten(1, 2)


def shifted(k: Tensor, starts: Tensor | None) -> Tensor:
    """Return keys [T, H, D] with the second half of each from the previous token, except at `starts`."""
    turning, still = k.chunk(2, dim=-1)
    before = torch.cat([still[:1], still[:-1]])
    if starts is not None:
        before = torch.where(starts[:, None, None], still, before)
    return torch.cat([turning, before], dim=-1)


def attention(
    x: Tensor,
    projection: Tensor,
    ve: Tensor | None,
    ve_weight: Tensor | None,
    table: Tensor,
    starts: Tensor | None,
    plan: Any,
    shape: HeadShape,
    scale: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return attention of norm(x) before the output matrix: (y [T, H, D], output gate [T, H])."""
    length, heads, dim, model = x.shape[0], shape.heads, shape.dim, shape.model
    widths = [model, model, model, heads * shape.gated, heads * shape.has_ve]
    widths.append(shape.rows - sum(widths))
    q, k, v, gate, ve_gate, _ = F.linear(norm(x), projection).split(widths, dim=1)
    q, k, v = (part.unflatten(1, (heads, dim)) for part in (q, k, v))
    wide = wide_dtype(x.dtype)
    # Rounded once, after norm, rotation and scale.
    q, k = (turned(norm(part.to(wide)), table) for part in (q, k))
    q, k = (q * scale).to(x.dtype), k.to(x.dtype)
    if shape.key_offset:
        k = shifted(k, starts)
    if ve is not None:
        if ve_weight is not None:
            ve_gate = ve_gate + F.linear(ve[:, : ve_weight.shape[1]], ve_weight)
        v = v + 2 * torch.sigmoid(ve_gate)[..., None] * ve.unflatten(1, (heads, dim))
    if shape.paired:
        # Head h of token t: time slot 2t + h // (H/2) of stream h mod (H/2).
        q, k, v = (part.reshape(2 * length, heads // 2, dim) for part in (q, k, v))
    y = windowed_attention(q.contiguous(), k.contiguous(), v.contiguous(), plan, 1.0)
    return y.reshape(length, heads, dim), torch.sigmoid(gate) if shape.gated else None


def attention_out(
    y: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    x: Tensor | None,
    resid: Number,
    edge: None,
    injected: Terms,
    plan: Any,
    shape: HeadShape,
) -> Tensor:
    """resid * x + (gate * y) @ weight.T + injected terms; without `x`, the product alone."""
    gated = y if gate is None else y * gate[..., None]
    out = F.linear(gated.flatten(1), weight)
    return out if x is None else _add_terms(resid * x + out, injected)


def attention_weights(
    bank: Tensor,
    scales: Tensor,
    gates: Tensor | None,
    ve_gates: Tensor | None,
    dtype: torch.dtype,
    shapes: list[HeadShape],
) -> tuple[Tensor, ...]:
    """Per layer a projection [shape.rows, E], then per layer an output matrix [E, E]: `AttentionWeights`."""
    model = bank.shape[2]
    layer_gates = [None] * len(shapes) if gates is None else gates.unbind(0)
    tables = iter(() if ve_gates is None else ve_gates.unbind(0))
    projections, outputs = [], []
    for matrices, scale, gate, shape in zip(
        bank.to(dtype).unbind(0), scales.unbind(0), layer_gates, shapes, strict=True
    ):
        of_qkv, of_output = scale.unbind(0)
        qkv, output = matrices.split([3 * model, model])
        narrow = [g for g in (gate, next(tables) if shape.has_ve else None) if g is not None]
        rows = [qkv * of_qkv, *(F.pad(g.to(dtype), (0, model - g.shape[1])) for g in narrow)]
        missing = shape.rows - sum(part.shape[0] for part in rows)
        projections.append(torch.cat([*rows, qkv.new_zeros(missing, model)]))
        outputs.append(output * of_output)
    return *projections, *outputs


PLAIN = Operations(
    norm=norm,
    mix=mix,
    mlp=mlp,
    residual_mlp=residual_mlp,
    smear_norm=smear_norm,
    injections=injections,
    attention=attention,
    attention_out=attention_out,
    attention_weights=attention_weights,
)
# The same, for GPUs with the kernels of `mlp.py`.
FUSED = replace(PLAIN, mlp=mlp_by_kernels, residual_mlp=residual_mlp_by_kernels)
