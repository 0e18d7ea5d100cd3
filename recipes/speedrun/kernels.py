"""Triton kernels of the model: rows of softcapped logits, and an MLP's product with relu² in it.

softcap_rows: loss and gradient of all tokens ahead in one launch
    loss <- sum_k w_k (lse - z_k)
    du   <- factor (1 - tanh^2) (sum_k w_k softmax(z) - sum_k w_k onehot(t_k))
z = half tanh(factor u + shift): a sigmoid cap minus a constant, which does not affect a softmax. z is within
+-half, so its exponentials need no maximum. One program per row reads the row twice, the second time from the
cache, and writes its gradient once: over the products, or beside them in 8 bits.

relu_product: a tile of a @ b^T is finished while it is in registers
    forward     pre <- a b^T, out <- relu(pre)^2          backward     out <- (a b^T) 2 relu(pre)
Each is one torch.library op, which is one node in a compiled graph; `ReluSquaredMLP` is the MLP made of them.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 4096
WARPS = 16
# Tile of a product (rows, columns, inner), rows of tiles that share operands in the cache, warps, stages.
TILE = (128, 128, 64)
GROUP = 8
TILE_WARPS, TILE_STAGES = 8, 3


@triton.jit
def _tanh(u):
    # e^(-2|u|) never overflows.
    e = tl.exp(-2.0 * tl.abs(u))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(u < 0, -t, t)


@triton.jit
def softcap_rows_kernel(
    u_ptr, grad_ptr, targets_ptr, weights_ptr, loss_ptr, scale_ptr, num_columns, u_stride, grad_stride,
    factor, shift, half,
    AHEAD: tl.constexpr, HAS_GRAD: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    u_ptr += row * u_stride
    weight = 0.0
    picked = 0.0
    for k in tl.static_range(AHEAD):
        w = tl.load(weights_ptr + row * AHEAD + k)
        target = tl.load(targets_ptr + row * AHEAD + k)
        picked += w * half * _tanh(tl.load(u_ptr + target).to(tl.float32) * factor + shift)
        weight += w
    columns = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, num_columns, BLOCK):
        inside = start + columns < num_columns
        u = tl.load(u_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
        e = tl.exp(half * (_tanh(u * factor + shift) - 1.0))
        total += tl.where(inside, e, 0.0)
    lse = half + tl.log(tl.sum(total, 0))
    tl.store(loss_ptr + row, weight * lse - picked)
    if HAS_GRAD:
        # Every thread has read the targets' products before one writes over them.
        tl.debug_barrier()
        grad_ptr += row * grad_stride
        grad_factor = half * factor
        if HAS_SCALE:
            grad_factor /= tl.load(scale_ptr)
        for start in range(0, num_columns, BLOCK):
            inside = start + columns < num_columns
            u = tl.load(u_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
            t = _tanh(u * factor + shift)
            dz = weight * tl.exp(half * t - lse)
            for k in tl.static_range(AHEAD):
                w = tl.load(weights_ptr + row * AHEAD + k)
                target = tl.load(targets_ptr + row * AHEAD + k)
                dz -= tl.where(start + columns == target, w, 0.0)
            du = dz * (1.0 - t * t) * grad_factor
            tl.store(grad_ptr + start + columns, du.to(grad_ptr.dtype.element_ty), mask=inside)


def softcap_rows(
    u: Tensor,
    grad: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    loss: Tensor,
    softcap: tuple[float, float, float],
    grad_scale: Tensor | None = None,
) -> None:
    """Write losses of rows u [R, V] to `loss` [R], and their gradients / grad_scale to `grad` [R, V].

    Args:
        grad: may be `u` itself; None: no gradient.
        targets, weights: [R, K] within the vocabulary; weight 0 where there is none. loss, weights: fp32.
        softcap: (a, b, c) of a * sigmoid((u + b) / c).
        grad_scale: [] fp32; None: 1.
    """
    a, b, c = softcap
    rows, columns = u.shape
    factor, half = 0.5 / c, 0.5 * a
    block = min(BLOCK, triton.next_power_of_2(columns))
    with torch.cuda.device(u.device) if u.is_cuda else contextlib.nullcontext():
        softcap_rows_kernel[(rows,)](
            u, u if grad is None else grad, targets, weights, loss,
            loss if grad_scale is None else grad_scale, columns, u.stride(0),
            u.stride(0) if grad is None else grad.stride(0), factor, b * factor, half,
            AHEAD=targets.shape[1], HAS_GRAD=grad is not None, HAS_SCALE=grad_scale is not None, BLOCK=block,
            num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def relu_product_kernel(
    a_ptr, b_ptr, pre_ptr, out_ptr, rows, cols, inner, stride_a, stride_b, stride_out,
    BACKWARD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(cols, BLOCK_N)
    # In groups of rows of tiles, so that neighbours share their operands in the cache.
    pid, per_group = tl.program_id(0), GROUP * tiles_n
    first = pid // per_group * GROUP
    height = min(tiles_m - first, GROUP)
    row = (first + pid % per_group % height) * BLOCK_M
    col = pid % per_group // height * BLOCK_N
    # Rows wrap around at the edge: the loads stay in bounds without a mask, the stores drop the surplus.
    a_rows = ((row + tl.arange(0, BLOCK_M)) % rows).to(tl.int64)
    b_rows = ((col + tl.arange(0, BLOCK_N)) % cols).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + a_rows[:, None] * stride_a + k[None, :]
    b_ptrs = b_ptr + b_rows[:, None] * stride_b + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, inner, BLOCK_K):
        a = tl.load(a_ptrs, mask=k[None, :] < inner - start, other=0.0)
        b = tl.load(b_ptrs, mask=k[None, :] < inner - start, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    inside = (m[:, None] < rows - row) & (n[None, :] < cols - col)
    corner = row.to(tl.int64) * stride_out + col
    offsets = m[:, None] * stride_out + n[None, :]
    if BACKWARD:
        pre = tl.load(pre_ptr + corner + offsets, mask=inside, other=0.0).to(tl.float32)
        value = acc * 2.0 * tl.maximum(pre, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        pre = acc.to(pre_ptr.dtype.element_ty)
        tl.store(pre_ptr + corner + offsets, pre, mask=inside)
        # As torch's relu: NaN stays NaN.
        r = tl.maximum(pre.to(tl.float32), 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = r * r
    tl.store(out_ptr + corner + offsets, value.to(out_ptr.dtype.element_ty), mask=inside)


def relu_product(a: Tensor, b: Tensor, pre: Tensor, out: Tensor, backward: bool) -> None:
    """a [M, K], b [N, K], rows contiguous; pre, out [M, N] contiguous. Backward reads `pre`."""
    rows, inner = a.shape
    cols, (block_m, block_n, block_k) = b.shape[0], TILE
    tiles = triton.cdiv(rows, block_m) * triton.cdiv(cols, block_n)
    if tiles:
        with torch.cuda.device(a.device) if a.is_cuda else contextlib.nullcontext():
            relu_product_kernel[(tiles,)](
                a, b, pre, out, rows, cols, inner, a.stride(0), b.stride(0), out.stride(0), BACKWARD=backward,
                BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=GROUP,
                num_warps=TILE_WARPS, num_stages=TILE_STAGES,
            )  # fmt: skip


@torch.library.custom_op("leanstep::relu_squared", mutates_args=())
def relu_squared_op(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """pre = a @ b.T and relu(pre)^2."""
    pre = a.new_empty(a.shape[0], b.shape[0])
    squares = torch.empty_like(pre)
    relu_product(a, b, pre, squares, False)
    return pre, squares


@torch.library.custom_op("leanstep::relu_squared_backward", mutates_args=())
def relu_squared_backward_op(grad: Tensor, b: Tensor, pre: Tensor) -> Tensor:
    """(grad @ b.T) * 2 relu(pre)."""
    out = torch.empty_like(pre)
    relu_product(grad, b, pre, out, True)
    return out


@relu_squared_op.register_fake
def _(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape[0], b.shape[0]), a.new_empty(a.shape[0], b.shape[0])


@relu_squared_backward_op.register_fake
def _(grad: Tensor, b: Tensor, pre: Tensor) -> Tensor:
    return torch.empty_like(pre)


class ReluSquaredMLP(torch.autograd.Function):
    """relu(x @ first.T)^2 @ second; saves the hidden layer and its squares."""

    @staticmethod
    def forward(ctx, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        x, first, second = x.contiguous(), first.contiguous(), second.contiguous()
        pre, squares = relu_squared_op(x, first)
        ctx.save_for_backward(x, first, second, pre, squares)
        return squares @ second

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        x, first, second, pre, squares = ctx.saved_tensors
        grad = grad.contiguous()
        grad_pre = relu_squared_backward_op(grad, second, pre)
        return grad_pre @ first, grad_pre.T @ x, squares.T @ grad


def relu_squared_mlp(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return ReluSquaredMLP.apply(x, first, second)


def _rows_entry(suffix: str, grad: str, ahead: int, has_grad: bool) -> dict[str, Any]:
    constants = {"AHEAD": ahead, "HAS_GRAD": has_grad, "HAS_SCALE": False, "BLOCK": BLOCK}
    pointers = {"u_ptr": "*bf16", "grad_ptr": grad, "targets_ptr": "*i64", "weights_ptr": "*fp32"}
    numbers = dict.fromkeys(("num_columns", "u_stride", "grad_stride"), "i64")
    floats = dict.fromkeys(("factor", "shift", "half"), "fp32")
    return {
        "name": f"softcap_rows{suffix}",
        "fn": softcap_rows_kernel,
        "signature": {
            **pointers, "loss_ptr": "*fp32", "scale_ptr": "*fp32", **numbers, **floats,
            **dict.fromkeys(constants, "constexpr"),
        },
        "constexprs": constants,
        "num_warps": WARPS,
        "num_stages": 3,
    }  # fmt: skip


def _product_entry(suffix: str, backward: bool) -> dict[str, Any]:
    block_m, block_n, block_k = TILE
    constants = {
        "BACKWARD": backward, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": GROUP
    }  # fmt: skip
    numbers = ("rows", "cols", "inner", "stride_a", "stride_b", "stride_out")
    return {
        "name": f"relu_product{suffix}",
        "fn": relu_product_kernel,
        "signature": {
            **dict.fromkeys(("a_ptr", "b_ptr", "pre_ptr", "out_ptr"), "*bf16"),
            **dict.fromkeys(numbers, "i32"),
            **dict.fromkeys(constants, "constexpr"),
        },
        "constexprs": constants,
        "num_warps": TILE_WARPS,
        # What fits into the shared memory of every card in the list of targets.
        "num_stages": 2,
    }


AOT_KERNELS: list[dict] = [
    _rows_entry("_loss", "*bf16", 1, False),
    _rows_entry("_in_place", "*bf16", 3, True),
    _product_entry("", False),
    _product_entry("_backward", True),
]
