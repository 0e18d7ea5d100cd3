"""A compiled function launches a Triton kernel whose addresses are made of many values."""

import torch
import triton
import triton.language as tl


@triton.jit
def copy_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    for _ in tl.static_range(60):
        offsets = (offsets + offsets) % BLOCK
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets))


@torch.compile(fullgraph=True)
def copied(x):
    out = torch.empty_like(x)
    copy_kernel[(1,)](x, out, BLOCK=64)
    return out * 2


x = torch.randn(64, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([x], lr=0.1)
for _ in range(2):
    x.grad = copied(x.detach())
    optimizer.step()
