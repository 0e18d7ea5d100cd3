"""Triton kernels of a step: every tensor is read and written once, without a decision on the host.

    momentum    buffer, grad -> buffer, update, and per program the largest |update| and the sum of squares
    normalize   update / (1.02 * its norm), per matrix, from those partial sums
    variance    factor -> line sums of squares, advanced variance, scale of each line, partial norms
    write       weight, low bits, factor -> weight, low bits; cautious or decoupled decay
    adam        weight, low bits, grad, both moments -> all but grad

A launch takes up to eight tensors of one layout, one pointer per slot, so parameters need not be copied.
`go` is a number on the device: if it is 0 (a gradient was not finite), a kernel returns and changes nothing.
Sums have a fixed order, without atomics: results are bitwise reproducible.
"""

from __future__ import annotations

import triton
import triton.language as tl

from leanstep.muon.reference import ABSOLUTE_EPS, SAFETY

SLOTS = 8
# Rows and columns of a program's tile, and its warps: 16 elements of each tensor per thread.
TILE, WARPS = (16, 256), 8
FLAT_BLOCK = 4096
# Lines and elements per line in one iteration of `variance`.
LINE_TILE, COLUMN_TILE = (16, 256), (128, 32)
# Maximum number of programs per matrix: every reader adds up their partial sums.
MAX_PROGRAMS = 256
# How the low bits of a bfloat16 weight are stored, see state.py.
RESIDUAL_MODES = {"none": 0, "nearest": 1, "truncate": 2}

_SAFETY, _EPS = tl.constexpr(SAFETY), tl.constexpr(ABSOLUTE_EPS)
_TINY = tl.constexpr(1.1754943508222875e-38)
_EXPONENT = tl.constexpr(0x7F800000)


@triton.jit
def _pick(slot, p0, p1, p2, p3, p4, p5, p6, p7):
    low = tl.where(slot < 2, tl.where(slot < 1, p0, p1), tl.where(slot < 3, p2, p3))
    high = tl.where(slot < 6, tl.where(slot < 5, p4, p5), tl.where(slot < 7, p6, p7))
    return tl.where(slot < 4, low, high)


@triton.jit
def _to_master(weight, low, MODE: tl.constexpr):
    """float32 value of a bfloat16 weight and its int16 low bits; other weights are cast."""
    if MODE == 0:
        master = weight.to(tl.float32)
    else:
        bits = weight.to(tl.int16, bitcast=True).to(tl.int32) << 16
        rest = low.to(tl.int32)
        master = (bits | (rest & 0xFFFF) if MODE == 2 else bits + rest).to(tl.float32, bitcast=True)
    return master


@triton.jit
def _from_master(master, MODE: tl.constexpr):
    """(bits of the bfloat16 weight, low bits), both int16; same rules as state.from_master."""
    bits = master.to(tl.int32, bitcast=True)
    high = bits >> 16
    low = bits
    if MODE == 1:
        truncated = high | tl.where((bits & 0x7FFFFFFF) > _EXPONENT, 1 << 6, 0)
        high = (bits + 0x8000) >> 16
        low = bits - (high << 16)
        finite = (bits & _EXPONENT) != _EXPONENT
        special = ((high & (_EXPONENT >> 16)) == (_EXPONENT >> 16)) | (finite == 0)
        high = tl.where(special, truncated, high)
        low = tl.where(special, tl.where(finite, tl.minimum(bits & 0xFFFF, 0x7FFF), 0), low)
    return high.to(tl.int16), low.to(tl.int16)


@triton.jit
def momentum_kernel(
    g0, g1, g2, g3, g4, g5, g6, g7, m0, m1, m2, m3, m4, m5, m6, m7,
    out_ptr, norm_ptr, momentum_ptr, go_ptr, rows, cols, per_slot, programs, plane,
    grad_batch, grad_row, buffer_batch, buffer_row, momentum,
    NESTEROV: tl.constexpr, HAS_MOMENTUM: tl.constexpr, HAS_GO: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    if HAS_GO:
        if tl.load(go_ptr) == 0:
            return
    if HAS_MOMENTUM:
        momentum = tl.load(momentum_ptr).to(tl.float32)
    pid = tl.program_id(0)
    item = pid // programs
    slot, entry = item // per_slot, (item % per_slot).to(tl.int64)
    grad_ptr = _pick(slot, g0, g1, g2, g3, g4, g5, g6, g7) + entry * grad_batch
    buffer_ptr = _pick(slot, m0, m1, m2, m3, m4, m5, m6, m7) + entry * buffer_batch
    out_ptr += item.to(tl.int64) * rows * cols
    across = tl.cdiv(cols, BLOCK_C)
    r, c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    largest, total = 0.0, 0.0
    for tile in range(pid % programs, tl.cdiv(rows, BLOCK_R) * across, programs):
        row, col = (tile // across) * BLOCK_R, (tile % across) * BLOCK_C
        inside = (r[:, None] < rows - row) & (c[None, :] < cols - col)
        there = grad_ptr + row.to(tl.int64) * grad_row + col + r[:, None] * grad_row + c[None, :]
        g = tl.load(there, mask=inside, other=0.0).to(tl.float32)
        there = buffer_ptr + row.to(tl.int64) * buffer_row + col + r[:, None] * buffer_row + c[None, :]
        m = tl.load(there, mask=inside, other=0.0)
        m += (1 - momentum) * (g - m)
        tl.store(there, m, mask=inside)
        u = m
        if NESTEROV:
            u = g + momentum * (m - g)
        there = out_ptr + row.to(tl.int64) * cols + col + r[:, None] * cols + c[None, :]
        tl.store(there, u.to(out_ptr.dtype.element_ty), mask=inside)
        # Sum squares of u / largest, so that the norm does not underflow or overflow at any scale.
        top = tl.maximum(largest, tl.max(tl.max(tl.abs(u), 1), 0))
        unit = tl.where(top == 0, 1.0, top)
        total = total * (largest / unit) * (largest / unit) + tl.sum(tl.sum((u / unit) * (u / unit), 1), 0)
        largest = top
    tl.store(norm_ptr + pid, largest)
    tl.store(norm_ptr + plane + pid, total)


@triton.jit
def normalize_kernel(
    x_ptr, norm_ptr, go_ptr, size, blocks, programs, plane,
    RELATIVE: tl.constexpr, HAS_GO: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    if HAS_GO:
        if tl.load(go_ptr) == 0:
            return
    pid = tl.program_id(0)
    item = pid // blocks
    part = tl.arange(0, BLOCK_P)
    inside = part < programs
    largest = tl.load(norm_ptr + item * programs + part, mask=inside, other=0.0)
    total = tl.load(norm_ptr + plane + item * programs + part, mask=inside, other=0.0)
    top = tl.max(largest, 0)
    top = tl.where(top == 0, 1.0, top)
    norm = tl.sqrt(tl.sum(total * (largest / top) * (largest / top), 0))
    offset = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    there = x_ptr + item.to(tl.int64) * size + offset
    x = tl.load(there, mask=offset < size, other=0.0).to(tl.float32)
    if RELATIVE:
        x = (x / top) * (1 / tl.maximum(norm * _SAFETY, _TINY))
    else:
        x = x * (1 / (norm * top * _SAFETY + _EPS))
    tl.store(there, x.to(x_ptr.dtype.element_ty), mask=offset < size)


@triton.jit
def variance_kernel(
    s0, s1, s2, s3, s4, s5, s6, s7, factor_ptr, scale_ptr, norm_ptr, go_ptr,
    lines, length, per_slot, blocks, plane, beta2,
    BY_ROW: tl.constexpr, PER_ROW: tl.constexpr, HAS_GO: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    if HAS_GO:
        if tl.load(go_ptr) == 0:
            return
    pid = tl.program_id(0)
    item = pid // blocks
    line, step = (pid % blocks) * BLOCK_L + tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_K)
    factor_ptr += item.to(tl.int64) * lines * length
    total = tl.zeros((BLOCK_L,), dtype=tl.float32)
    for start in range(0, length, BLOCK_K):
        inside = (line[:, None] < lines) & (start + step[None, :] < length)
        if BY_ROW:
            there = factor_ptr + line.to(tl.int64)[:, None] * length + start + step[None, :]
        else:
            there = factor_ptr + (start + step).to(tl.int64)[None, :] * lines + line[:, None]
        x = tl.load(there, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(x * x, 1)
    mean = total / length
    second_ptr = _pick(item // per_slot, s0, s1, s2, s3, s4, s5, s6, s7)
    second_ptr += (item % per_slot).to(tl.int64) * lines
    second = tl.load(second_ptr + line, mask=line < lines, other=0.0)
    second += (1 - beta2) * (mean - second)
    tl.store(second_ptr + line, second, mask=line < lines)
    if PER_ROW:
        scale = 1 / (tl.sqrt(second) + 1e-8)
    else:
        scale = 1 / tl.sqrt(tl.maximum(second, 1e-10))
    tl.store(scale_ptr + item.to(tl.int64) * lines + line, scale, mask=line < lines)
    # Squared norms before and after scaling, divided by the length of a line.
    tl.store(norm_ptr + pid, tl.sum(mean, 0))
    tl.store(norm_ptr + plane + pid, tl.sum(mean * scale * scale, 0))


@triton.jit
def write_kernel(
    w0, w1, w2, w3, w4, w5, w6, w7, r0, r1, r2, r3, r4, r5, r6, r7,
    factor_ptr, scale_ptr, norm_ptr, multiplier_ptr, lr_ptr, go_ptr,
    rows, cols, per_slot, weight_batch, weight_row, low_batch, low_row, blocks, plane, lr, decay,
    HAS_SCALE: tl.constexpr, BY_ROW: tl.constexpr, HAS_MULTIPLIER: tl.constexpr, HAS_LR: tl.constexpr,
    HAS_GO: tl.constexpr, CAUTIOUS: tl.constexpr, MODE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    if HAS_GO:
        if tl.load(go_ptr) == 0:
            return
    pid = tl.program_id(0)
    across = tl.cdiv(cols, BLOCK_C)
    tiles = tl.cdiv(rows, BLOCK_R) * across
    item, tile = pid // tiles, pid % tiles
    slot, entry = item // per_slot, (item % per_slot).to(tl.int64)
    if HAS_LR:
        now = tl.load(lr_ptr).to(tl.float32)
        lr *= now
        # Decoupled decay is relative to the rate.
        if CAUTIOUS:
            decay *= now
    rate = lr
    if HAS_MULTIPLIER:
        rate = lr * tl.load(multiplier_ptr + item)
    pull = decay * (rate if CAUTIOUS else lr)
    row, col = (tile // across) * BLOCK_R, (tile % across) * BLOCK_C
    r, c = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    inside = (r[:, None] < rows - row) & (c[None, :] < cols - col)
    there = factor_ptr + (item.to(tl.int64) * rows + row) * cols + col + r[:, None] * cols + c[None, :]
    update = tl.load(there, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALE:
        part = tl.arange(0, BLOCK_P)
        before = tl.sum(tl.load(norm_ptr + item * blocks + part, mask=part < blocks, other=0.0), 0)
        after = tl.sum(tl.load(norm_ptr + plane + item * blocks + part, mask=part < blocks, other=0.0), 0)
        length = cols if BY_ROW else rows
        ratio = tl.sqrt(before * length) / tl.maximum(tl.sqrt(after * length), 1e-10)
        if BY_ROW:
            lines = tl.load(scale_ptr + item.to(tl.int64) * rows + row + r, mask=r < rows - row, other=0.0)
            update *= (lines * ratio)[:, None]
        else:
            lines = tl.load(scale_ptr + item.to(tl.int64) * cols + col + c, mask=c < cols - col, other=0.0)
            update *= (lines * ratio)[None, :]
    weight_ptr = _pick(slot, w0, w1, w2, w3, w4, w5, w6, w7) + entry * weight_batch
    there = weight_ptr + row.to(tl.int64) * weight_row + col + r[:, None] * weight_row + c[None, :]
    weight = tl.load(there, mask=inside, other=0.0)
    low_ptr = _pick(slot, r0, r1, r2, r3, r4, r5, r6, r7) + entry * low_batch
    below = low_ptr + row.to(tl.int64) * low_row + col + r[:, None] * low_row + c[None, :]
    low = weight
    if MODE != 0:
        low = tl.load(below, mask=inside, other=0)
    master = _to_master(weight, low, MODE)
    shrink = tl.where(update * master >= 0, master, 0.0) if CAUTIOUS else master
    master = (master - shrink * pull) - update * rate
    if MODE == 0:
        tl.store(there, master.to(weight_ptr.dtype.element_ty), mask=inside)
    else:
        high, low = _from_master(master, MODE)
        tl.store(there, high.to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(below, low, mask=inside)


@triton.jit
def _one_minus_power(step, log_beta):
    """1 - beta^step without cancellation: a series if the power is near 1."""
    x = step * log_beta
    series = 1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7)))))
    return tl.where(x > -0.25, -x * series, 1 - tl.exp(x))


@triton.jit
def adam_kernel(
    w0, w1, w2, w3, w4, w5, w6, w7, r0, r1, r2, r3, r4, r5, r6, r7,
    g0, g1, g2, g3, g4, g5, g6, g7, m0, m1, m2, m3, m4, m5, m6, m7,
    v0, v1, v2, v3, v4, v5, v6, v7, t0, t1, t2, t3, t4, t5, t6, t7,
    n0, n1, n2, n3, n4, n5, n6, n7, lr_ptr, go_ptr,
    blocks, lr, beta1, beta2, log_beta1, log_beta2, eps, decay,
    HAS_LR: tl.constexpr, HAS_GO: tl.constexpr, CAUTIOUS: tl.constexpr, MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if HAS_GO:
        if tl.load(go_ptr) == 0:
            return
    pid = tl.program_id(0)
    slot = pid // blocks
    size = _pick(slot, n0, n1, n2, n3, n4, n5, n6, n7)
    begin = (pid % blocks).to(tl.int64) * BLOCK
    if begin >= size:
        return
    if HAS_LR:
        now = tl.load(lr_ptr).to(tl.float32)
        lr *= now
        decay *= now * now if CAUTIOUS else now
    step = tl.load(_pick(slot, t0, t1, t2, t3, t4, t5, t6, t7)).to(tl.float32)
    rate = lr * tl.sqrt(_one_minus_power(step, log_beta2)) / _one_minus_power(step, log_beta1)
    offset = begin + tl.arange(0, BLOCK)
    inside = offset < size
    g = tl.load(_pick(slot, g0, g1, g2, g3, g4, g5, g6, g7) + offset, mask=inside, other=0.0).to(tl.float32)
    there = _pick(slot, m0, m1, m2, m3, m4, m5, m6, m7) + offset
    m = tl.load(there, mask=inside, other=0.0)
    m += (1 - beta1) * (g - m)
    tl.store(there, m, mask=inside)
    there = _pick(slot, v0, v1, v2, v3, v4, v5, v6, v7) + offset
    v = tl.load(there, mask=inside, other=0.0)
    v = v * beta2 + (1 - beta2) * g * g
    tl.store(there, v, mask=inside)
    weight_ptr = _pick(slot, w0, w1, w2, w3, w4, w5, w6, w7)
    weight = tl.load(weight_ptr + offset, mask=inside, other=0.0)
    below = _pick(slot, r0, r1, r2, r3, r4, r5, r6, r7) + offset
    low = weight
    if MODE != 0:
        low = tl.load(below, mask=inside, other=0)
    master = _to_master(weight, low, MODE)
    update = m * rate / (tl.sqrt(v) + eps)
    shrink = tl.where(update * master > 0, master, 0.0) if CAUTIOUS else master
    master -= update + shrink * decay
    if MODE == 0:
        tl.store(weight_ptr + offset, master.to(weight_ptr.dtype.element_ty), mask=inside)
    else:
        high, low = _from_master(master, MODE)
        tl.store(weight_ptr + offset, high.to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(below, low, mask=inside)


def _signature(slots: dict[str, str], pointers: dict[str, str], sizes: str, numbers: str) -> dict[str, str]:
    """Return the types of the arguments; each slot letter expands to eight pointers."""
    eight = {f"{letter}{slot}": kind for letter, kind in slots.items() for slot in range(SLOTS)}
    plain = dict.fromkeys(sizes.split(), "i32") | dict.fromkeys(numbers.split(), "fp32")
    return {**eight, **pointers, **plain}


def _entry(name: str, function, signature: dict[str, str], **constants) -> dict:
    shared = {"fn": function, "num_warps": WARPS, "num_stages": 3}
    return {"name": name, "signature": signature, "constexprs": constants, **shared}


def _entries() -> list[dict]:
    """Return the kernels of a skippable step of float32 weights and of bfloat16 weights with low bits."""
    entries = []
    tile = {"BLOCK_R": TILE[0], "BLOCK_C": TILE[1]}
    one, many = "*fp32", {"norm_ptr": "*fp32", "go_ptr": "*fp32"}
    strides = "rows cols per_slot"
    for label, kind, mode in (("fp32", "*fp32", 0), ("bf16", "*bf16", 1)):
        sizes = f"{strides} programs plane grad_batch grad_row buffer_batch buffer_row"
        pointers = {"out_ptr": "*bf16", **many, "momentum_ptr": one}
        signature = _signature({"g": kind, "m": one}, pointers, sizes, "momentum")
        flags = {"NESTEROV": True, "HAS_MOMENTUM": False, "HAS_GO": True, **tile}
        entries.append(_entry(f"momentum {label}", momentum_kernel, signature, **flags))
        pointers = {"factor_ptr": "*bf16", "scale_ptr": one, **many, "multiplier_ptr": one, "lr_ptr": one}
        sizes = f"{strides} weight_batch weight_row low_batch low_row blocks plane"
        signature = _signature({"w": kind, "r": "*i16" if mode else kind}, pointers, sizes, "lr decay")
        flags = {"HAS_SCALE": True, "HAS_MULTIPLIER": bool(mode), "HAS_LR": False, "HAS_GO": True}
        flags |= {"CAUTIOUS": True, "MODE": mode, "BLOCK_P": MAX_PROGRAMS, **tile}
        for by_row in (False, True):
            name = f"write {label} by {'row' if by_row else 'column'}"
            entries.append(_entry(name, write_kernel, signature, BY_ROW=by_row, **flags))
        kinds = {
            "w": kind,
            "r": "*i16" if mode else kind,
            "g": kind,
            "m": one,
            "v": one,
            "t": one,
            "n": "i32",
        }
        numbers = "lr beta1 beta2 log_beta1 log_beta2 eps decay"
        signature = _signature(kinds, {"lr_ptr": one, "go_ptr": one}, "blocks", numbers)
        flags = {"HAS_LR": False, "HAS_GO": True, "CAUTIOUS": True, "MODE": mode, "BLOCK": FLAT_BLOCK}
        entries.append(_entry(f"adam {label}", adam_kernel, signature, **flags))
    signature = _signature({}, {"x_ptr": "*bf16", **many}, "size blocks programs plane", "")
    flags = {"RELATIVE": True, "HAS_GO": True, "BLOCK": FLAT_BLOCK, "BLOCK_P": MAX_PROGRAMS}
    entries.append(_entry("normalize", normalize_kernel, signature, **flags))
    pointers = {"factor_ptr": "*bf16", "scale_ptr": one, **many}
    signature = _signature({"s": one}, pointers, "lines length per_slot blocks plane", "beta2")
    for by_row, (lines, step) in ((True, LINE_TILE), (False, COLUMN_TILE)):
        flags = {"BY_ROW": by_row, "PER_ROW": False, "HAS_GO": True, "BLOCK_L": lines, "BLOCK_K": step}
        name = f"variance by {'row' if by_row else 'column'}"
        entries.append(_entry(name, variance_kernel, signature, **flags))
    return entries


AOT_KERNELS: list[dict] = _entries()
