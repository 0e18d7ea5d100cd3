"""relu(x @ first.T)^2 @ second: as plain code, and with relu² fused into the product kernels on a GPU.

Forward and backward are one torch.library op each, which is one node in a compiled graph.
"""

# T tokens · E model · F hidden

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from leanstep.logprob.engine.passes import launches_triton


def squared_relu_mlp(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Of x [T, E], first and second [F, E]."""
    hidden = F.linear(x, first).relu_()
    # Not `square`, whose backward copies its input.
    return (hidden * hidden) @ second


def has_kernel(x: Tensor) -> bool:
    """Return whether `fused_mlp` can run on tensors like this one."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16) or not launches_triton(x):
        return False
    # The tiles are sized for the shared memory of NVIDIA GPUs.
    return torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (8, 0)


@torch.library.custom_op("leanstep::relu_product", mutates_args=())
def relu_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """pre = a @ b.T and relu(pre)^2."""
    from leanstep.gpt import kernel

    pre = a.new_empty(a.shape[0], b.shape[0])
    squares = torch.empty_like(pre)
    kernel.relu_product(a, b, pre, squares, False)
    return pre, squares


@relu_product.register_fake
def _(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape[0], b.shape[0]), a.new_empty(a.shape[0], b.shape[0])


@torch.library.custom_op("leanstep::relu_product_backward", mutates_args=())
def relu_product_backward(grad: Tensor, b: Tensor, pre: Tensor) -> Tensor:
    """(grad @ b.T) * 2 relu(pre)."""
    from leanstep.gpt import kernel

    out = torch.empty_like(pre)
    kernel.relu_product(grad, b, pre, out, True)
    return out


@relu_product_backward.register_fake
def _(grad: Tensor, b: Tensor, pre: Tensor) -> Tensor:
    return torch.empty_like(pre)


class FusedMLP(torch.autograd.Function):
    """`squared_relu_mlp`; saves the hidden layer and its squares."""

    @staticmethod
    def forward(ctx, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        pre, squares = relu_product(x, first)
        ctx.save_for_backward(x, first, second, pre, squares)
        return squares @ second

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        x, first, second, pre, squares = ctx.saved_tensors
        grad = grad.contiguous()
        grad_pre = relu_product_backward(grad, second, pre)
        return grad_pre @ first, grad_pre.T @ x, squares.T @ grad


def fused_mlp(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return FusedMLP.apply(x.contiguous(), first.contiguous(), second.contiguous())
