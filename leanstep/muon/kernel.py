"""Triton kernels: symmetric products from their lower tiles, and transposes coalesced on both sides.

    xxt             out = X X^T                     one program per tile; tiles above the diagonal return
    xtx             out = X^T X                     early, the others store their values and the mirror image
    ba_caa          out = beta A + alpha A A^T      A symmetric; the epilogue stays in float32
    transpose_copy  dst = src^T
    transpose_add   dst += src^T

Inside torch.compile each wrapper calls a torch.library op, which is one node of the graph: Dynamo cannot
trace a device guard and a query of the device's shared memory.

The products are bitwise symmetric however `tl.dot` rounds: every pair (i, j), (j, i) is written by one
program from one register, also inside tiles on the diagonal. Each element is written once.
Offsets that grow with batch or rows are 64-bit.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _tile_of(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    # Order the tiles in groups of rows, so that neighbours share their operands in the L2 cache.
    per_group = GROUP * tiles_n
    group = pid // per_group
    first = group * GROUP
    height = min(tiles_m - first, GROUP)
    within = pid % per_group
    return first + within % height, within // height


@triton.jit
def _store_both(out_ptr, acc, row, col, size, stride_out, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # A 64-bit offset per tile and 32-bit offsets inside it: fewer registers than 64-bit pointers everywhere.
    rows, cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    value = acc.to(out_ptr.dtype.element_ty)
    mask = (rows[:, None] < size - row) & (cols[None, :] < size - col)
    mirror = (cols[:, None] < size - col) & (rows[None, :] < size - row)
    there = out_ptr + row.to(tl.int64) * stride_out + col
    back = out_ptr + col.to(tl.int64) * stride_out + row
    if row >= col + BLOCK_N:
        tl.store(there + rows[:, None] * stride_out + cols[None, :], value, mask=mask)
        tl.store(back + cols[:, None] * stride_out + rows[None, :], tl.trans(value), mask=mirror)
    else:
        # The diagonal crosses this tile: elements below it are stored twice, elements above it not at all.
        # A separate branch, because these masks prevent vectorized stores.
        mask = mask & (row + rows[:, None] >= col + cols[None, :])
        tl.store(there + rows[:, None] * stride_out + cols[None, :], value, mask=mask)
        mirror = mirror & (row + rows[None, :] > col + cols[:, None])
        tl.store(back + cols[:, None] * stride_out + rows[None, :], tl.trans(value), mask=mirror)


@triton.jit
def xxt_kernel(
    x_ptr,
    out_ptr,
    rows,
    cols,
    stride_batch,
    stride_row,
    stride_out_batch,
    stride_out,
    alpha,
    beta,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    """out = X X^T, or with EPILOGUE out = beta X + alpha X X^T for a symmetric X (rows == cols)."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(rows, BLOCK_N)
    pid = tl.program_id(0)
    batch = (pid // (tiles_m * tiles_n)).to(tl.int64)
    tile_m, tile_n = _tile_of(pid % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    if row + BLOCK_M <= col:
        return
    x_ptr += batch * stride_batch
    out_ptr += batch * stride_out_batch
    # Rows wrap around at the edge: loads stay in bounds without a mask, and the stores mask extra rows.
    left_rows = ((row + tl.arange(0, BLOCK_M)) % rows).to(tl.int64)
    right_rows = ((col + tl.arange(0, BLOCK_N)) % rows).to(tl.int64)
    inner = tl.arange(0, BLOCK_K)
    left_ptrs = x_ptr + left_rows[:, None] * stride_row + inner[None, :]
    right_ptrs = x_ptr + right_rows[:, None] * stride_row + inner[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(cols, BLOCK_K)):
        left_over = cols - k * BLOCK_K
        left = tl.load(left_ptrs, mask=inner[None, :] < left_over, other=0.0)
        right = tl.load(right_ptrs, mask=inner[None, :] < left_over, other=0.0)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
        left_ptrs += BLOCK_K
        right_ptrs += BLOCK_K
    if EPILOGUE:
        local_rows, local_cols = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        inside = (local_rows[:, None] < rows - row) & (local_cols[None, :] < cols - col)
        corner = x_ptr + row.to(tl.int64) * stride_row + col
        same = tl.load(
            corner + local_rows[:, None] * stride_row + local_cols[None, :], mask=inside, other=0.0
        )
        acc = acc * alpha + same.to(tl.float32) * beta
    _store_both(out_ptr, acc, row, col, rows, stride_out, BLOCK_M, BLOCK_N)


@triton.jit
def xtx_kernel(
    x_ptr,
    out_ptr,
    rows,
    cols,
    stride_batch,
    stride_row,
    stride_out_batch,
    stride_out,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out = X^T X: two column panels, both loaded row by row, one transposed in registers."""
    tiles_m, tiles_n = tl.cdiv(cols, BLOCK_M), tl.cdiv(cols, BLOCK_N)
    pid = tl.program_id(0)
    batch = (pid // (tiles_m * tiles_n)).to(tl.int64)
    tile_m, tile_n = _tile_of(pid % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP)
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    if row + BLOCK_M <= col:
        return
    x_ptr += batch * stride_batch
    out_ptr += batch * stride_out_batch
    left_cols = (row + tl.arange(0, BLOCK_M)) % cols
    right_cols = (col + tl.arange(0, BLOCK_N)) % cols
    inner = tl.arange(0, BLOCK_K)
    offset = inner.to(tl.int64)[:, None] * stride_row
    left_ptrs = x_ptr + offset + left_cols[None, :]
    right_ptrs = x_ptr + offset + right_cols[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(rows, BLOCK_K)):
        left_over = rows - k * BLOCK_K
        left = tl.load(left_ptrs, mask=inner[:, None] < left_over, other=0.0)
        right = tl.load(right_ptrs, mask=inner[:, None] < left_over, other=0.0)
        acc = tl.dot(tl.trans(left), right, acc, input_precision="ieee")
        left_ptrs += BLOCK_K * stride_row
        right_ptrs += BLOCK_K * stride_row
    _store_both(out_ptr, acc, row, col, cols, stride_out, BLOCK_M, BLOCK_N)


@triton.jit
def transpose_kernel(
    src_ptr,
    dst_ptr,
    rows,
    cols,
    stride_src,
    stride_dst,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ADD: tl.constexpr,
):
    """dst[c, r] = src[r, c], or += with ADD; reads and writes of a tile are both coalesced."""
    # One grid dimension: the others are limited to 65,535 programs.
    tiles_n = tl.cdiv(cols, BLOCK_N)
    row, col = (tl.program_id(0) // tiles_n) * BLOCK_M, (tl.program_id(0) % tiles_n) * BLOCK_N
    r, c = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    inside = (r[:, None] < rows - row) & (c[None, :] < cols - col)
    corner = src_ptr + row.to(tl.int64) * stride_src + col
    tile = tl.load(corner + r[:, None] * stride_src + c[None, :], mask=inside, other=0.0)
    target = dst_ptr + col.to(tl.int64) * stride_dst + row + c[:, None] * stride_dst + r[None, :]
    turned = (c[:, None] < cols - col) & (r[None, :] < rows - row)
    value = tl.trans(tile)
    if ADD:
        value = tl.load(target, mask=turned, other=0.0).to(tl.float32) + value.to(tl.float32)
    tl.store(target, value.to(dst_ptr.dtype.element_ty), mask=turned)


_GROUP, _WARPS, _STAGES = 8, 8, 4
# (BLOCK_M, BLOCK_N, BLOCK_K) of symmetric products. Small results use the tile of the record. Results above
# 2,048 rows have enough tiles for every multiprocessor and use a larger one. A long reduction over at most
# 768 rows uses a tile that is deeper along K, as the record does.
SMALL_TILE, LARGE_TILE, DEEP_TILE = (128, 128, 64), (128, 256, 64), (64, 128, 128)


def product_tiles(side: int, reduction: int, element_bytes: int = 2) -> tuple[int, int, int]:
    """Return (BLOCK_M, BLOCK_N, BLOCK_K) of a symmetric product [side, side]."""
    if element_bytes > 2:
        return 64, 64, 32
    if side <= 768 and reduction > side:
        return DEEP_TILE
    return SMALL_TILE if side <= 2048 else LARGE_TILE


def transpose_tiles(elements: int) -> tuple[int, int, int]:
    """Return (BLOCK_M, BLOCK_N, num_warps) of the transposes: larger tiles once they fill the device."""
    return (64, 128, 8) if elements >= 1 << 22 else (32, 32, 4)


def _check(name: str, tensor: Tensor) -> None:
    if tensor.ndim not in (2, 3) or tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: expected [R, C] or [B, R, C] with contiguous rows, got shape {tuple(tensor.shape)}, "
            f"strides {tensor.stride()}"
        )


def _batch(tensor: Tensor) -> tuple[int, int]:
    return (1, 0) if tensor.ndim == 2 else (tensor.size(0), tensor.stride(0))


def shared_memory(device: torch.device) -> int | None:
    """Return the bytes of shared memory that a block may use; None without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    # On ROCm only the plain name exists.
    limit = getattr(properties, "shared_memory_per_block_optin", None)
    return limit or getattr(properties, "shared_memory_per_block", None)


def _stages(tiles: tuple[int, int, int], element_bytes: int, limit: int | None, spare: int = 0) -> int:
    """Return the most pipeline stages whose buffers fit in `limit` bytes; `spare` stages need no buffer."""
    # Consumer GPUs have about 99 KB per block, AMD GPUs 64 KB: drop stages until the operands fit.
    block_m, block_n, block_k = tiles
    if limit is None:
        return _STAGES
    stages = _STAGES
    while stages > 2 and (stages - spare) * (block_m + block_n) * block_k * element_bytes > limit:
        stages -= 1
    return stages


def spare_stages(device: torch.device) -> int:
    """Return the number of pipeline stages without a buffer: 1 if products read registers (sm_8x, sm_12x).

    Products on Hopper and data-centre Blackwell read shared memory, so every stage needs a buffer there.
    """
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_capability(device)[0] in (8, 12))


def _symmetric(
    kernel, x: Tensor, out: Tensor, side: int, reduction: int, *scalars, tiles=None, **flags
) -> None:
    _check("out", out)
    if out.shape[-2:] != (side, side) or _batch(out)[0] != _batch(x)[0]:
        raise ValueError(f"out: expected shape {(*x.shape[:-2], side, side)}, got {tuple(out.shape)}")
    block_m, block_n, block_k = tiles or product_tiles(side, reduction, x.element_size())
    batch, stride_batch = _batch(x)
    grid = (batch * triton.cdiv(side, block_m) * triton.cdiv(side, block_n),)
    limit, spare = shared_memory(x.device), spare_stages(x.device)
    stages = _stages((block_m, block_n, block_k), x.element_size(), limit, spare)
    with torch.cuda.device_of(x):
        kernel[grid](
            x, out, x.size(-2), x.size(-1), stride_batch, x.stride(-2), _batch(out)[1], out.stride(-2),
            *scalars, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP=_GROUP,
            num_warps=_WARPS, num_stages=stages, **flags,
        )  # fmt: skip


def _is_transposed(tensor: Tensor) -> bool:
    return tensor.ndim in (2, 3) and tensor.stride(-1) != 1 and tensor.stride(-2) == 1


def _product(
    kind: str,
    x: Tensor,
    out: Tensor,
    tiles: tuple[int, int, int] | None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Tensor:
    if torch.compiler.is_compiling():
        with torch.no_grad():
            _product_op(x, out, kind, [] if tiles is None else list(tiles), alpha, beta)
    else:
        _launch_product(kind, x, out, tiles, alpha, beta)
    return out


def _launch_product(
    kind: str, x: Tensor, out: Tensor, tiles: tuple[int, int, int] | None, alpha: float, beta: float
) -> None:
    # X X^T of a transposed X is X^T X of the matrix in memory; the result equals its transpose.
    if _is_transposed(x):
        kind, x = {"xxt": "xtx", "xtx": "xxt"}.get(kind, kind), x.mT
    elif x.stride(-1) != 1:
        x = x.contiguous()
    _check("x", x)
    out = out.mT if _is_transposed(out) else out
    rows, cols = x.shape[-2:]
    if kind == "xtx":
        _symmetric(xtx_kernel, x, out, cols, rows, tiles=tiles)
    else:
        _symmetric(xxt_kernel, x, out, rows, cols, alpha, beta, tiles=tiles, EPILOGUE=kind == "ba_caa")


@torch.library.custom_op("leanstep::symmetric_product", mutates_args=("out",))
def _product_op(
    x: Tensor, out: Tensor, kind: str, tiles: list[int], alpha: float, beta: float
) -> None:  # fmt: skip
    _launch_product(kind, x, out, tuple(tiles) or None, alpha, beta)  # type: ignore[arg-type]


def xxt(x: Tensor, out: Tensor, tiles: tuple[int, int, int] | None = None) -> Tensor:
    """out = x @ x.mT for x [R, C] or [B, R, C], any strides; out has contiguous rows or columns."""
    return _product("xxt", x, out, tiles)


def xtx(x: Tensor, out: Tensor, tiles: tuple[int, int, int] | None = None) -> Tensor:
    """out = x.mT @ x for x [R, C] or [B, R, C], any strides; out has contiguous rows or columns."""
    return _product("xtx", x, out, tiles)


def ba_caa(
    a: Tensor, out: Tensor, alpha: float, beta: float, tiles: tuple[int, int, int] | None = None
) -> Tensor:
    """out = beta * a + alpha * a @ a for a symmetric a."""
    return _product("ba_caa", a, out, tiles, alpha, beta)


def _transpose(src: Tensor, dst: Tensor, add: bool) -> None:
    if src.ndim != 2 or dst.shape != src.shape[::-1]:
        expected = f"shape {tuple(src.shape[::-1])} for src [R, C]"
        raise ValueError(f"dst: expected {expected}, got {tuple(dst.shape)} for {tuple(src.shape)}")
    if torch.compiler.is_compiling():
        with torch.no_grad():
            _transpose_op(src, dst, add)
    else:
        _launch_transpose(src, dst, add)


def _launch_transpose(src: Tensor, dst: Tensor, add: bool) -> None:
    if src.stride(-1) != 1 or dst.stride(-1) != 1:
        # If one side is transposed in memory, both are contiguous along the same dimension: no tile needed.
        dst.add_(src.T) if add else dst.copy_(src.T)
        return
    rows, cols = src.shape
    block_m, block_n, warps = transpose_tiles(src.numel())
    tiles = triton.cdiv(rows, block_m) * triton.cdiv(cols, block_n)
    if not tiles:
        return
    with torch.cuda.device_of(src):
        transpose_kernel[(tiles,)](
            src, dst, rows, cols, src.stride(0), dst.stride(0),
            BLOCK_M=block_m, BLOCK_N=block_n, ADD=add, num_warps=warps, num_stages=2,
        )  # fmt: skip


@torch.library.custom_op("leanstep::transpose_tiles", mutates_args=("dst",))
def _transpose_op(src: Tensor, dst: Tensor, add: bool) -> None:
    _launch_transpose(src, dst, add)


def transpose_copy(src: Tensor, dst: Tensor) -> None:
    """dst = src^T; any strides."""
    _transpose(src, dst, add=False)


def transpose_add(src: Tensor, dst: Tensor) -> None:
    """dst += src^T; any strides."""
    _transpose(src, dst, add=True)


def _product_entries() -> list[dict]:
    shared = {
        "x_ptr": "*bf16",
        "out_ptr": "*bf16",
        "rows": "i32",
        "cols": "i32",
        "stride_batch": "i32",
        "stride_row": "i32",
        "stride_out_batch": "i32",
        "stride_out": "i32",
    }
    scaled = {**shared, "alpha": "fp32", "beta": "fp32"}
    entries = []
    kinds = (
        ("xxt", xxt_kernel, scaled, {"EPILOGUE": False}),
        ("xtx", xtx_kernel, shared, {}),
        ("ba_caa", xxt_kernel, scaled, {"EPILOGUE": True}),
    )
    candidates = sorted([SMALL_TILE, LARGE_TILE, DEEP_TILE])
    for (name, function, signature, flags), tiles in itertools.product(kinds, candidates):
        block_m, block_n, block_k = tiles
        entries.append(
            {
                "name": f"{name} {block_m}x{block_n}x{block_k}",
                "fn": function,
                "signature": signature,
                "constexprs": {
                    "BLOCK_M": block_m,
                    "BLOCK_N": block_n,
                    "BLOCK_K": block_k,
                    "GROUP": _GROUP,
                    **flags,
                },
                "num_warps": _WARPS,
                # As many as fit in the shared memory of every data-centre GPU in the list of targets.
                "num_stages": _stages(tiles, 2, 163 * 1024),
            }
        )
    return entries


def _transpose_entries() -> list[dict]:
    signature = {
        "src_ptr": "*bf16",
        "dst_ptr": "*bf16",
        "rows": "i32",
        "cols": "i32",
        "stride_src": "i32",
        "stride_dst": "i32",
    }
    return [
        {
            "name": f"{'transpose_add' if add else 'transpose_copy'} {block_m}x{block_n}",
            "fn": transpose_kernel,
            "signature": signature,
            "constexprs": {"BLOCK_M": block_m, "BLOCK_N": block_n, "ADD": add},
            "num_warps": warps,
            "num_stages": 2,
        }
        for add in (False, True)
        for block_m, block_n, warps in ((32, 32, 4), (64, 128, 8))
    ]


AOT_KERNELS: list[dict] = [*_product_entries(), *_transpose_entries()]
