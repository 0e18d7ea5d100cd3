"""The model's operations as plain tensor code: residual stream, norms, attention with its projections.

The same code runs eagerly on a CPU and under torch.compile on a GPU. Values that a schedule changes may be
tensors: then a new value needs no new graph.
"""

# T tokens · A layers with attention · H heads · D head size · E = H * D model

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from leanstep.gpt.attention import rotate, windowed_attention

EPS = torch.finfo(torch.float32).eps

Number = float | Tensor
Term = tuple[Number, Tensor]


@dataclass(frozen=True)
class HeadShape:
    """What distinguishes one layer's attention from another's.

    Args:
        heads, dim: H and D.
        paired: heads h and h + H/2 are time slots 2t and 2t + 1 of one stream.
        key_offset: the second half of a key comes from the previous token.
        gated: a gate per head scales the output.
    """

    heads: int
    dim: int
    paired: bool
    key_offset: bool
    gated: bool


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def norm(x: Tensor) -> Tensor:
    """Return `x` divided by its root mean square over the last dimension."""
    if x.is_cuda:
        return F.rms_norm(x, (x.shape[-1],), eps=EPS)
    # On a CPU `rms_norm` is not fused and takes more passes, mostly in its backward.
    wide = x.to(wide_dtype(x.dtype))
    mean_square = (wide * wide).sum(-1, keepdim=True) / x.shape[-1]
    return (wide * torch.rsqrt(mean_square + EPS)).to(x.dtype)


def weighted_sum(*terms: Term) -> Tensor:
    """Return the sum of factor * tensor; factors are floats or 0-dimensional tensors."""
    (factor, x), *others = terms
    out = x if isinstance(factor, float) and factor == 1.0 else factor * x
    for factor, x in others:
        if isinstance(factor, Tensor):
            out = torch.addcmul(out, factor, x)
        else:
            out = torch.add(out, x, alpha=factor)
    return out


def smear_norm(x: Tensor, smear: Tensor, weight: Tensor, closed: Tensor | None) -> Tensor:
    """norm(x_t + gate_t * x_{t-1}), gate_t = smear * sigmoid(weight . x_t[:width]), 0 where `closed`."""
    gate = smear * torch.sigmoid(F.linear(x[1:, : weight.shape[1]], weight))
    if closed is not None:
        gate = gate.masked_fill(closed[1:, None], 0)
    return norm(torch.cat([x[:1], torch.addcmul(x[1:], gate, x[:-1])]))


def shift_keys(k: Tensor, starts: Tensor | None) -> Tensor:
    """Return keys [T, H, D] with the second half of each from the previous token, except at `starts`."""
    turning, still = k.chunk(2, dim=-1)
    before = torch.cat([still[:1], still[:-1]])
    if starts is not None:
        before = torch.where(starts[:, None, None], still, before)
    return torch.cat([turning, before], dim=-1)


def attention_weights(
    bank: Tensor, scales: Tensor, gates: Tensor | None, ve_gates: Tensor | None, row_multiple: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return every layer's projection [rows, E] and output matrix [E, E], lambdas and gates folded in.

    One product then computes queries, keys, values and the logits of both gates.

    Args:
        bank: [A, 4E, E].
        scales: [A, 2]: of Q, K and V, and of O.
        gates: [A, H, width] weights of the output gates, or None.
        ve_gates: [A, H, width] weights of the value-embedding gates, or None.
        row_multiple: rows of zeros pad the projection to a multiple of it.
    """
    model = bank.shape[2]
    qkv, output = bank.split([3 * model, model], dim=1)
    of_qkv, of_output = scales[:, :, None, None].unbind(1)
    parts = [qkv * of_qkv]
    parts += [F.pad(g, (0, model - g.shape[2])) for g in (gates, ve_gates) if g is not None]
    missing = -sum(part.shape[1] for part in parts) % row_multiple
    parts.append(bank.new_zeros(bank.shape[0], missing, model))
    return torch.cat(parts, dim=1).unbind(0), (output * of_output).unbind(0)


def attention(
    x: Tensor,
    projection: Tensor,
    output: Tensor,
    ve: Tensor | None,
    ve_weight: Tensor | None,
    table: Tensor,
    starts: Tensor | None,
    plan: Any,
    shape: HeadShape,
    scale: Number,
) -> Tensor:
    """Return the attention of norm(x) [T, E] after its output matrix, [T, E].

    Args:
        x: [T, E].
        projection, output: of `attention_weights`.
        ve: [T, E] value embedding, or None.
        ve_weight: [H, width] weights of its gate for `ve` itself, or None.
        table: of `Rotary.head_table`, or of `Rotary.real_table` if the forward is compiled.
        starts: [T] bool document starts that the key offset respects, or None.
        scale: of the softmax.
    """
    length, heads, dim = x.shape[0], shape.heads, shape.dim
    model = heads * dim
    projected = F.linear(norm(x), projection)
    widths = [model, model, model, heads * shape.gated, 0 if ve is None else heads]
    widths.append(projected.shape[1] - sum(widths))
    q, k, v, gate, ve_gate, _ = projected.split(widths, dim=1)
    q, k, v = (part.unflatten(1, (heads, dim)) for part in (q, k, v))
    wide = wide_dtype(x.dtype)
    # Rounded once, after norm, rotation and scale.
    q, k = (rotate(norm(part.to(wide)), table) for part in (q, k))
    if isinstance(scale, Tensor):
        q, scale = q * scale, 1.0
    q, k = q.to(x.dtype), k.to(x.dtype)
    if shape.key_offset:
        k = shift_keys(k, starts)
    if ve is not None:
        if ve_weight is not None:
            ve_gate = ve_gate + F.linear(ve[:, : ve_weight.shape[1]], ve_weight)
        v = torch.addcmul(v, 2 * torch.sigmoid(ve_gate)[..., None], ve.unflatten(1, (heads, dim)))
    if shape.paired:
        # Head h of token t: time slot 2t + h // (H/2) of stream h mod (H/2).
        q, k, v = (part.reshape(2 * length, heads // 2, dim) for part in (q, k, v))
    y = windowed_attention(q, k, v, plan, scale)
    y = y.reshape(length, heads, dim)
    if shape.gated:
        y = y * torch.sigmoid(gate)[..., None]
    return F.linear(y.flatten(1), output)
