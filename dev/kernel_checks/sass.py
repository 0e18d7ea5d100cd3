"""Checks of a compiled kernel's machine code for an H100, without a GPU.

Triton's intermediate code tells what a kernel does (which tensors it loads, whether it multiplies), the
machine code how it does it. `nvdisasm` is part of the Triton wheel. Three checks for sm_90:

    products   16-bit products run on tensor cores (HGMMA)
    passes     a kernel that only streams floats loads and stores 16 bytes per thread (LDG.128, STG.128)
    local      no register is spilled to local memory (LDL, STL)

They apply to rows that are multiples of 16 bytes, which the tile sizes of the fast paths guarantee.
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
# One instruction of the listing: address, optional predicate, the name with its suffixes.
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", re.MULTILINE)
_ACCESS = re.compile(r"\btt\.(load|store)\b.*: (tensor<((?:\d+x)+)!tt\.ptr<(\w+)>>|!tt\.ptr<\w+>)")
_DOT = re.compile(r"\btt\.dot\b.*: tensor<[\dx]+x(\w+)")
_HALF = ("bf16", "f16")
_WIDTH = {"f64": 8, "f32": 4, "i32": 4, "bf16": 2, "f16": 2, "i16": 2}
_THREADS = 32
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class Accesses:
    """Loads or stores in a kernel's source: of single values, and of tensors with 16 bytes per thread.

    `streams`: only float tensors, no bytes or indices, so that addresses do not depend on loaded data.
    """

    single: int
    wide: int
    streams: bool


def instructions(cubin: bytes) -> Counter[str]:
    """Count the instructions of a CUDA binary by name with suffixes, using Triton's disassembler."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(knobs.nvidia.nvdisasm.path), "-c", str(path)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return Counter(_INSTRUCTION.findall(listing))


def accesses(ttir: str, kind: str, num_warps: int) -> Accesses:
    """Classify the loads or stores (`kind`) in the kernel's Triton code."""
    single = wide = 0
    streams = True
    for access, pointer, shape, element in _ACCESS.findall(ttir):
        if access != kind:
            continue
        if not pointer.startswith("tensor"):
            single += 1
        elif element not in _WIDTH:
            streams = False
        else:
            share = math.prod(int(n) for n in shape.split("x") if n) * _WIDTH[element]
            wide += share >= _VECTOR_BYTES * _THREADS * num_warps
            # A tensor smaller than the vector width may use narrow instructions.
            single += 0 if share >= _VECTOR_BYTES * _THREADS * num_warps else _VECTOR_BYTES
    return Accesses(single, wide, streams)


def shortfalls(ttir: str, counted: Counter[str], num_warps: int) -> list[str]:
    """Return the checks that the machine code fails, one sentence each; empty if it passes.

    Args:
        ttir: the kernel's target-independent Triton code.
        counted: `instructions` of its sm_90 binary.
        num_warps: number of warps of the launch.
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
                missed.append(
                    f"{name}: {narrow} narrow and {wide} of 128 bits, expected {written.single} narrow"
                )
    return missed


def _count(counted: Counter[str], pattern: str) -> int:
    return sum(times for name, times in counted.items() if re.match(pattern, name))


def check(kernel: Any, num_warps: int) -> list[str]:
    """Return `shortfalls` of a kernel that Triton compiled for sm_90."""
    return shortfalls(kernel.asm["ttir"], instructions(kernel.asm["cubin"]), num_warps)
