"""Kernels for the checks of `dev.kernel_checks.sass`: two that pass, three that fail one check each."""

import triton
import triton.language as tl


@triton.jit
def stream(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at) * 2.0)


@triton.jit
def product(x_ptr, out_ptr, K, M: tl.constexpr, N: tl.constexpr):
    rows, cols, inner = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, 64)
    total = tl.zeros([M, N], dtype=tl.float32)
    for k in range(0, K, 64):
        a = tl.load(x_ptr + rows * K + k + inner[None, :])
        b = tl.load(x_ptr + cols * K + k + inner[:, None])
        total += tl.dot(a, b)
    tl.store(out_ptr + rows * N + cols, total)


def entry(name, fn, signature, constexprs, num_warps):
    listed = {"name": name, "fn": fn, "signature": signature, "constexprs": constexprs}
    return {**listed, "num_warps": num_warps, "num_stages": 2}


FLOATS = {"x_ptr": "*fp32", "out_ptr": "*fp32"}
HALVES = {"x_ptr": "*bf16", "out_ptr": "*fp32", "K": "i32"}
# A stride of a type that is not known to be a multiple of 16 bytes: nothing can be joined.
AOT_KERNELS = [
    entry("good pass", stream, {**FLOATS, "stride": "i32"}, {"BLOCK": 2048}, 4),
    entry("narrow pass", stream, {**FLOATS, "stride": "u32"}, {"BLOCK": 2048}, 4),
    entry("good product", product, HALVES, {"M": 64, "N": 64}, 4),
    entry("narrow product", product, HALVES, {"M": 32, "N": 32}, 2),
    entry("spilling product", product, HALVES, {"M": 256, "N": 256}, 4),
]
