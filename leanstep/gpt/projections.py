"""From the fused projection to attention and back: norm, rotary, key offset, value embedding and gates.

One matrix product computes queries, keys, values and gate logits of a layer. `Heads` splits it into the
blocks that attention reads, written directly to their padded positions; its backward fills one gradient of
the whole projection.
"""

# T tokens · H heads · D head size · E = H * D model · P = D/2 feature pairs

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from leanstep.gpt.attention import BandPlan, attend, band_view, sum_band
from leanstep.gpt.layers import EPS, NormLinear, add_scaled, dot, number, wide_dtype


@dataclass(frozen=True)
class HeadShape:
    """Parameters of `Heads` for one layer."""

    heads: int
    dim: int
    paired: bool
    key_offset: bool
    gated: bool
    has_ve: bool
    row_multiple: int = 2

    @property
    def model(self) -> int:
        return self.heads * self.dim

    @property
    def gate_at(self) -> int:
        """First row of the output gate in the projection."""
        return 3 * self.model

    @property
    def ve_gate_at(self) -> int:
        return self.gate_at + self.heads * self.gated

    @property
    def rows(self) -> int:
        """Rows of the projection, padded with zeros to a multiple of `row_multiple`.

        At least even, because complex views of its output need that; 64 for tensor cores.
        """
        used = self.ve_gate_at + self.heads * self.has_ve
        return -(-used // self.row_multiple) * self.row_multiple


def _turn(x: Tensor, table: Tensor, out: Tensor) -> None:
    """Write x [T, H, D], rotated by the table [T, H | 2 | 1, P], to `out`; heads contiguous, fp32 or fp64."""
    # [T, H / h, h, P]: a table of h heads (by parity, or one for all) serves every group of h.
    source, target = (
        torch.view_as_complex(y.unflatten(-1, (-1, 2))).unflatten(1, (-1, table.shape[1])) for y in (x, out)
    )
    torch.mul(source, table[:, None], out=target)


def _shift_back(k: Tensor, starts: Tensor | None) -> Tensor:
    """Return a copy with the second half of the previous token, except at the first token and at `starts`."""
    still = k.shape[-1] // 2
    shifted = k.clone()
    shifted[1:, :, still:] = k[:-1, :, still:]
    # Not `shifted[starts] = k[starts]`: a boolean index is a host sync.
    return shifted if starts is None else torch.where(starts[:, None, None], k, shifted)


def _shift_back_backward(grad: Tensor, starts: Tensor | None) -> Tensor:
    still = grad.shape[-1] // 2
    result = grad.clone()
    moved = grad[1:, :, still:]
    if starts is None:
        result[1:, :, still:] = 0
    else:
        result[1:, :, still:].masked_fill_(~starts[1:, None, None], 0)
        moved = moved.masked_fill(starts[1:, None, None], 0)
    result[:-1, :, still:] += moved
    return result


class Heads(torch.autograd.Function):
    """Projection [T, 3E + gates] -> query blocks, key band, value band, output gate.

    Args:
        projected: [T, shape.rows]: queries, keys, values, output-gate logits, value-gate logits.
        ve: [T, E] value embedding or None.
        ve_weight: [H, width] gate weights for `ve` itself, or None.
        table: of `Rotary`, [T, H, P], or [T, 1 | 2, P].
        starts: [T] bool document starts that the key offset respects, or None.
    """

    @staticmethod
    def forward(ctx, projected, ve, ve_weight, table, starts, plan: BandPlan, shape: HeadShape):
        length, heads, dim, model = projected.shape[0], shape.heads, shape.dim, shape.model
        wide = wide_dtype(projected.dtype)
        qk = projected[:, : 2 * model].to(wide).unflatten(1, (2 * heads, dim))
        # Two plain passes: a vector norm over a few strided features takes twice as long.
        inverse = (qk * qk).sum(-1).div_(dim).add_(EPS).rsqrt_()
        streams = heads // 2 if shape.paired else heads
        q_pad = projected.new_zeros(plan.padded, streams, dim)
        k_pad = projected.new_zeros(plan.front + plan.padded, streams, dim)
        v_pad = projected.new_zeros(plan.front + plan.padded, streams, dim)
        q, k, v = (
            x[first : first + plan.length].view(length, heads, dim)
            for x, first in ((q_pad, 0), (k_pad, plan.front), (v_pad, plan.front))
        )
        direct = wide == projected.dtype
        q_wide = q if direct else torch.empty(q.shape, dtype=wide, device=q.device)
        k_wide = k if direct and not shape.key_offset else torch.empty(k.shape, dtype=wide, device=k.device)
        _turn(qk[:, :heads], table, q_wide)
        _turn(qk[:, heads:], table, k_wide)
        q_wide.mul_(inverse[:, :heads, None])
        k_wide.mul_(inverse[:, heads:, None])
        if q_wide is not q:
            q.copy_(q_wide)
        if shape.key_offset:
            k.copy_(_shift_back(k_wide, starts))
        elif k_wide is not k:
            k.copy_(k_wide)

        values = projected[:, 2 * model : 3 * model].unflatten(1, (heads, dim))
        ve_gate = None
        if ve is None:
            v.copy_(values)
        else:
            ve_gate = projected[:, shape.ve_gate_at : shape.ve_gate_at + heads].clone()
            if ve_weight is not None:
                ve_gate.addmm_(ve[:, : ve_weight.shape[1]], ve_weight.T)
            ve_gate.sigmoid_()
            torch.addcmul(values, ve_gate[..., None], ve.unflatten(1, (heads, dim)), value=2, out=v)
        gate = projected[:, shape.gate_at : shape.gate_at + heads].sigmoid() if shape.gated else None
        ctx.plan, ctx.shape = plan, shape
        ctx.save_for_backward(q_wide, k_wide, inverse, table, starts, ve, ve_weight, ve_gate, gate)
        blocks = q_pad.unflatten(0, (plan.num_blocks, plan.block)).transpose(1, 2)
        return blocks, band_view(k_pad, plan), band_view(v_pad, plan), gate

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_q, grad_k, grad_v, grad_gate):  # type: ignore[override]
        q, k, inverse, table, starts, ve, ve_weight, ve_gate, gate = ctx.saved_tensors
        plan, shape = ctx.plan, ctx.shape
        length, heads, dim = q.shape
        model = shape.model
        grad = grad_q.new_empty(length, shape.rows)
        gq = grad_q.transpose(1, 2).reshape(plan.padded, -1)[: plan.length].view(length, heads, dim)
        gk = sum_band(grad_k, plan)[: plan.length].view(length, heads, dim)
        gv = sum_band(grad_v, plan)[: plan.length].view(length, heads, dim)
        if shape.key_offset:
            gk = _shift_back_backward(gk, starts)
        back = table.conj().resolve_conj()
        for i, (g, y) in enumerate(((gq, q), (gk, k))):
            # Rotation preserves lengths and dot products, so the norm's backward runs on the rotated heads.
            g = g.to(y.dtype)
            inv = inverse[:, i * heads : (i + 1) * heads, None]
            mean = (g * y).sum(-1, keepdim=True).div_(-dim)
            local = torch.addcmul(g, y, mean).mul_(inv)
            part = grad[:, i * model : (i + 1) * model].unflatten(1, (heads, dim))
            if part.dtype == y.dtype:
                _turn(local, back, part)
            else:
                turned = torch.empty_like(local)
                _turn(local, back, turned)
                part.copy_(turned)
        grad[:, 2 * model : 3 * model].unflatten(1, (heads, dim)).copy_(gv)
        grad_ve = grad_weight = None
        # Columns of gates and padding: few, so clearing them first is cheap.
        grad[:, shape.gate_at :] = 0
        if gate is not None and grad_gate is not None:
            grad[:, shape.gate_at : shape.gate_at + heads] = grad_gate * gate * (1 - gate)
        if ve is not None:
            grad_ve = (gv * (2 * ve_gate)[..., None]).view(length, model)
            grad_logits = (gv * ve.unflatten(1, (heads, dim))).sum(-1).mul_(2 * ve_gate * (1 - ve_gate))
            grad[:, shape.ve_gate_at : shape.ve_gate_at + heads] = grad_logits
            if ve_weight is not None:
                width = ve_weight.shape[1]
                grad_weight = torch.mm(grad_logits.T, ve[:, :width])
                grad_ve[:, :width].addmm_(grad_logits, ve_weight)
        return grad, grad_ve, grad_weight, *(None,) * 4


def attention(x, projection, ve, ve_weight, table, starts, plan: BandPlan, shape: HeadShape, scale: float):
    """Return attention of norm(x) before the output matrix: (blocks of y, output gate)."""
    projected = NormLinear.apply(x, projection)
    q, k, v, gate = Heads.apply(projected, ve, ve_weight, table, starts, plan, shape)
    return attend(q, k, v, plan, scale), gate


class AttentionOut(torch.autograd.Function):
    """Gate, output product, and residual addition.

    resid * x + (gate * y) @ weight.T + x0_factor * x0 + xb_factor * xb; without `x`, the product alone. x0
    and xb have plain numbers as factors; their gradients go to `edge`, an output of `Injections`.
    """

    @staticmethod
    def forward(ctx, y, gate, weight, x, resid, edge, injected, plan: BandPlan, shape: HeadShape):
        length = plan.length * y.shape[1] // shape.heads
        y_flat = (
            y.transpose(1, 2).reshape(plan.padded, -1)[: plan.length].view(length, shape.heads, shape.dim)
        )
        gated = (y_flat if gate is None else y_flat * gate[..., None]).reshape(length, shape.model)
        ctx.plan, ctx.shape = plan, shape
        ctx.resid = number(resid)
        ctx.resid_dtype = resid.dtype if isinstance(resid, Tensor) else None
        ctx.save_for_backward(y_flat, gate, gated, weight, x)
        if x is None:
            return torch.mm(gated, weight.T)
        out = x * ctx.resid
        for factor, source in injected:
            add_scaled(out, source, factor)
        return out.addmm_(gated, weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[override]
        y, gate, gated, weight, x = ctx.saved_tensors
        plan, shape = ctx.plan, ctx.shape
        grad = grad.contiguous()
        length = y.shape[0]
        grad_weight = torch.mm(grad.T, gated)
        grad_gated = torch.mm(grad, weight).view(length, shape.heads, shape.dim)
        streams = shape.heads // 2 if shape.paired else shape.heads
        grad_gate = None
        if gate is not None:
            grad_gate = (grad_gated * y).sum(-1)
            grad_gated.mul_(gate[..., None])
        grad_y = grad_gated.view(plan.length, streams, shape.dim)
        if plan.padded > plan.length:
            grad_y = torch.nn.functional.pad(grad_y, (0, 0, 0, 0, 0, plan.padded - plan.length))
        grad_y = grad_y.unflatten(0, (plan.num_blocks, plan.block)).transpose(1, 2)
        grad_x = grad_resid = None
        if x is not None:
            grad_x = grad * ctx.resid
            grad_resid = None if ctx.resid_dtype is None else dot(grad, x).to(ctx.resid_dtype)
        edge = grad if ctx.needs_input_grad[5] else None
        return grad_y, grad_gate, grad_weight, grad_x, grad_resid, edge, None, None, None


class AttentionWeights(torch.autograd.Function):
    """All layers' matrices at once, lambdas and gates folded in; the bank's gradient is written once.

    Args:
        bank: [A, 4E, E].
        scales: [A, 2]: of Q, K, V, and of O.
        gates: [A, H, width] or None.
        ve_gates: [tables, H, width] or None, for the layers whose shape has value embeddings, in order.
        shapes: one `HeadShape` per layer.

    Returns:
        per layer a projection [shape.rows, E], then per layer an output matrix [E, E].
    """

    @staticmethod
    def forward(ctx, bank, scales, gates, ve_gates, dtype: torch.dtype, shapes: list[HeadShape]):
        count, _, model = bank.shape
        wide = bank.to(dtype)
        joint = wide.new_zeros(count, max(shape.rows for shape in shapes), model)
        torch.mul(wide[:, : 3 * model], scales[:, :1, None], out=joint[:, : 3 * model])
        if gates is not None:
            at = shapes[0].gate_at
            joint[:, at : at + gates.shape[1], : gates.shape[2]] = gates
        if ve_gates is not None:
            at, owners = shapes[0].ve_gate_at, [i for i, shape in enumerate(shapes) if shape.has_ve]
            for i, gate in zip(owners, ve_gates, strict=True):
                joint[i, at : at + gate.shape[0], : gate.shape[1]] = gate
        out = wide[:, 3 * model :] * scales[:, 1:, None]
        ctx.save_for_backward(bank, scales, gates, ve_gates)
        ctx.dtype, ctx.shapes = dtype, shapes
        return *(w[: shape.rows] for w, shape in zip(joint, shapes, strict=True)), *out

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # type: ignore[override]
        bank, scales, gates, ve_gates = ctx.saved_tensors
        count, _, model = bank.shape
        rows = 3 * model
        grad_bank = torch.empty(bank.shape, dtype=ctx.dtype, device=bank.device)
        grad_scales = torch.empty_like(scales)
        grad_gates = None if gates is None else torch.empty_like(gates)
        grad_ve = None if ve_gates is None else torch.empty_like(ve_gates)
        table = 0
        for i, shape in enumerate(ctx.shapes):
            joint, out = grads[i], grads[count + i]
            weight = bank[i].to(ctx.dtype)
            grad_scales[i, 0] = dot(joint[:rows], weight[:rows])
            grad_scales[i, 1] = dot(out, weight[rows:])
            torch.mul(joint[:rows], scales[i, 0], out=grad_bank[i, :rows])
            torch.mul(out, scales[i, 1], out=grad_bank[i, rows:])
            if grad_gates is not None:
                grad_gates[i] = joint[shape.gate_at : shape.gate_at + shape.heads, : grad_gates.shape[2]]
            if grad_ve is not None and shape.has_ve:
                grad_ve[table] = joint[shape.ve_gate_at : shape.ve_gate_at + shape.heads, : grad_ve.shape[2]]
                table += 1
        return grad_bank.to(bank.dtype), grad_scales, grad_gates, grad_ve, None, None
