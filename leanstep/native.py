"""C++ beside the Python that calls it: one source file, built once per machine with its C++ compiler.

A build takes seconds; the library stays in the user's cache, under a name made of source, compiler, flags and
processor. `LEANSTEP_NATIVE=0` keeps every path in torch. Without a compiler they stay there, too.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from leanstep.cache import cache_folder

BASE_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
# The first set that compiles is used: vector functions of glibc, else plain ones.
FLAG_SETS = (
    ("-march=native", "-fopenmp-simd", "-lmvec", "-lm"),
    ("-march=native", "-fopenmp-simd", "-lm"),
    ("-lm",),
)


def has_memory(tensor: Tensor) -> bool:
    """Whether the numbers lie where `data_ptr` says: not while tracing, planning or transforming."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and not is_functorch_wrapped_tensor(tensor)
    return plain and not torch.compiler.is_compiling()


def is_wanted() -> bool:
    """Whether the user leaves anything to code that is not torch's."""
    return os.environ.get("LEANSTEP_NATIVE", "1") != "0"


def load(source: Path, declare: Callable[[ctypes.CDLL], None] | None = None) -> ctypes.CDLL | str:
    """The library built from a C++ file, or why there is none; `declare` sets its functions' types, once."""
    return _load(source, declare) if is_wanted() else "LEANSTEP_NATIVE is 0"


@functools.cache
def _load(source: Path, declare: Callable[[ctypes.CDLL], None] | None) -> ctypes.CDLL | str:
    try:
        try:
            library = ctypes.CDLL(str(_build(source, cache_folder())))
        except PermissionError:
            library = ctypes.CDLL(str(_build(source, Path(tempfile.mkdtemp(prefix="leanstep-")))))
    except (OSError, RuntimeError) as reason:
        return str(reason)
    if declare is not None:
        declare(library)
    return library


def _build(source: Path, folder: Path) -> Path:
    """The shared library for this source, compiler and processor; raises OSError when it cannot be built."""
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("no C++ compiler (c++, g++ or clang++) found")
    # A home folder may be shared by machines: code for one processor must not reach another.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    made_of = f"{source.read_text()}{compiler}{BASE_FLAGS}{FLAG_SETS}{flags}"
    target = folder / f"{source.parent.name}-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    said = ""
    for extra in FLAG_SETS:
        handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        command = [compiler, *BASE_FLAGS, str(source), "-o", name, *extra]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            Path(name).replace(target)
            return target
        Path(name).unlink()
        said = (done.stderr.strip().splitlines() or ["no message"])[0]
    raise OSError(f"{compiler} failed: {said}")
