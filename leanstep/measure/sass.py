"""What a compiled kernel's machine code must look like on an H100: gates that need no GPU.

Triton's own intermediate code says what a kernel does (which tensors it loads, whether it multiplies), the
machine code how: `nvdisasm` comes inside the Triton wheel. Three gates for sm_90:

    products   16-bit products run on tensor cores (HGMMA)
    passes     a kernel that only streams floats loads and stores 16 bytes a thread (LDG.128, STG.128)
    local      no register lives in local memory (LDL, STL)

They hold for rows that are multiples of 16 bytes, as the tile sizes of the fast paths make them.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GATED_TARGET = "sm_90"
LOCAL = "accesses to local memory"
# One instruction of the listing: address, perhaps a predicate, the name with its suffixes.
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", re.MULTILINE)
_ACCESS = re.compile(r"\btt\.(load|store)\b.*: (tensor<((?:\d+x)+)!tt\.ptr<(\w+)>>|!tt\.ptr<\w+>)")
_DOT = re.compile(r"\btt\.dot\b.*: tensor<[\dx]+x(\w+)")
_HALF = ("bf16", "f16")
_WIDTH = {"f64": 8, "f32": 4, "i32": 4, "bf16": 2, "f16": 2, "i16": 2}
_THREADS = 32
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class Accesses:
    """Loads or stores of a kernel as written: of one value, and of tensors wide enough for 16 bytes a thread.

    `streams`: tensors only, none of bytes or indices, so that nothing but the address decides what is loaded.
    """

    single: int
    wide: int
    streams: bool


def instructions(cubin: bytes) -> Counter[str]:
    """{name with its suffixes: how often} of a CUDA binary, by Triton's own disassembler."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(knobs.nvidia.nvdisasm.path), "-c", str(path)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Counter(_INSTRUCTION.findall(listing))


def accesses(ttir: str, kind: str, num_warps: int) -> Accesses:
    """What the kernel's Triton code says about its loads or stores (`kind`)."""
    single = wide = 0
    streams = True
    for found, pointer, shape, element in _ACCESS.findall(ttir):
        if found != kind:
            continue
        if not pointer.startswith("tensor"):
            single += 1
        elif element not in _WIDTH:
            streams = False
        else:
            share = math.prod(int(n) for n in shape.split("x") if n) * _WIDTH[element]
            wide += share >= _VECTOR_BYTES * _THREADS * num_warps
            # A tensor too small for the vector width is no fault of the code.
            single += 0 if share >= _VECTOR_BYTES * _THREADS * num_warps else _VECTOR_BYTES
    return Accesses(single, wide, streams)


def shortfalls(ttir: str, counted: Counter[str], num_warps: int) -> list[str]:
    """Which gates the machine code misses, one sentence each; empty when it passes.

    Args:
        ttir: the kernel's Triton code before any target is known.
        counted: `instructions` of its sm_90 binary.
        num_warps: the launch's.
    """
    missed = []
    local = _count(counted, r"(LDL|STL)\b")
    if local:
        missed.append(f"{local} {LOCAL}")
    operands = _DOT.findall(ttir)
    if any(operand in _HALF for operand in operands) and not _count(counted, r"HGMMA\b"):
        missed.append("a 16-bit product without tensor cores (no HGMMA)")
    if operands:
        return missed
    loads, stores = accesses(ttir, "load", num_warps), accesses(ttir, "store", num_warps)
    if loads.streams and stores.streams:
        for name, written in (("LDG", loads), ("STG", stores)):
            wide = _count(counted, rf"{name}\b.*\.128\b")
            narrow = _count(counted, rf"{name}\b") - wide
            if written.wide and (not wide or narrow > written.single):
                missed.append(f"{name}: {narrow} narrow beside {wide} of 128 bits, {written.single} expected")
    return missed


def _count(counted: Counter[str], pattern: str) -> int:
    return sum(times for name, times in counted.items() if re.match(pattern, name))


def check(kernel: Any, num_warps: int) -> list[str]:
    """`shortfalls` of a kernel that Triton compiled for sm_90."""
    return shortfalls(kernel.asm["ttir"], instructions(kernel.asm["cubin"]), num_warps)
