"""A simulated CUDA device: a small library that makes torch see one, with or without a real one.

`library` builds it into the user's cache. `load` must run before `import torch`, because torch looks up its
CUDA hooks once. So the calling process builds the library, and the rehearsal process loads it.

A CUDA build has hooks and a device guard of its own. `load` loads them first, then the stub replaces them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import operator
import os
import re
import sys
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("stub.cpp")
# Tested versions.
RAN_WITH = "torch 2.8 to 2.15"
# Private names that the tape and the replacements depend on.
NEEDED = (
    "_C._current_autograd_node",
    "_C._autograd._get_sequence_nr",
    "_C._set_only_lift_cpu_tensors",
    "_subclasses.fake_tensor.init_gpu_context",
    "utils._foreach_utils._foreach_supported_types",
    "optim.optimizer._foreach_supported_types",
    "autograd._engine_run_backward",
    "ops.aten._scaled_dot_product_flash_attention",
    "ops.aten._scaled_dot_product_efficient_attention",
)


class RehearsalError(Exception):
    """A rehearsal cannot start; the message is one line for the user."""


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise RehearsalError("torch is not installed")
    return Path(spec.submodule_search_locations[0])


def torch_version() -> tuple[str, str | None]:
    """Return the versions of the installed torch and of its ROCm, if any, without importing torch."""
    text = (torch_folder() / "version.py").read_text()
    version = re.search(r"__version__ = '([^']+)'", text)
    rocm = re.search(r"^hip[^=]*= '([^']+)'", text, re.MULTILINE)
    return version.group(1) if version else "unknown", rocm.group(1) if rocm else None


def library(folder: Path | None = None) -> Path:
    """Return the path of the built stub. Raise RehearsalError if it cannot be built.

    folder: where it is built if the user's cache cannot be written.
    """
    from leanstep.cpu import build_library

    root = torch_folder()
    version, rocm = torch_version()
    if rocm is not None:
        raise RehearsalError(
            f"torch {version} is built for ROCm {rocm}: a rehearsal needs a CPU or a CUDA build "
            "(pip install torch --index-url https://download.pytorch.org/whl/cpu)"
        )
    flags = (
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        f'-DTORCH_IS="{version}"',
        f"-I{root}/include",
        f"-I{root}/include/torch/csrc/api/include",
    )
    link = (
        f"-L{root}/lib",
        "-lc10",
        "-ltorch_cpu",
        f"-Wl,-rpath,{root}/lib",
    )
    try:
        try:
            return build_library(SOURCE, [[*flags, *link]])
        except OSError as reason:
            if folder is None or not _has_no_place(reason):
                raise
            return build_library(SOURCE, [[*flags, *link]], folder)
    except OSError as reason:
        if "no C++ compiler" in str(reason):
            raise RehearsalError(
                f"{reason}: a rehearsal builds a small library for torch once (apt install g++, "
                "dnf install gcc-c++, xcode-select --install, or conda install cxx-compiler)"
            ) from None
        if _has_no_place(reason):
            why = f"{reason.strerror or reason}" + f": {reason.filename}" * bool(reason.filename)
            raise RehearsalError(f"TMPDIR: expected a folder where a library can be built: {why}") from None
        raise RehearsalError(
            f"torch {version}: CUDA hooks differ from those of {RAN_WITH}, "
            f"so the stub does not build: {reason}"
        ) from None


def _has_no_place(reason: OSError) -> bool:
    """Return whether the folder, and not the source, is why the stub was not built."""
    return reason.errno is not None or "No space left" in str(reason)


def load(path: Path) -> None:
    """Load the stub. torch must not have been imported yet.

    Raises a one-line RehearsalError if a library of torch cannot be loaded.
    """
    for library in (*_cuda_libraries(), path):
        _load(library)


def _cuda_libraries() -> list[Path]:
    """Return the libraries of a CUDA build that register its hooks and device guard; none in a CPU build."""
    names = ("libc10_cuda.so", "libtorch_cuda.so")
    return [path for path in (torch_folder() / "lib" / name for name in names) if path.exists()]


def _load(library: Path) -> None:
    """Load a library. If the linker does not find an NVIDIA dependency, search the nvidia packages for it.

    torch does the same on import: the packages may be in another folder than torch.
    """
    sought: set[str] = set()
    while True:
        try:
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            return
        except OSError as reason:
            missing = re.match(r"(lib[^:/]+\.so[^:/]*): cannot open shared object", str(reason))
            if missing is None or missing.group(1) in sought:
                raise RehearsalError(f"{library.name} cannot be loaded: {reason}") from None
        sought.add(missing.group(1))
        _load(_in_nvidia_packages(missing.group(1), library))


def _in_nvidia_packages(name: str, needed_by: Path) -> Path:
    for folder in sys.path:
        for path in sorted((Path(folder) / "nvidia").glob(f"*/lib/{name}")):
            return path
    raise RehearsalError(f"{needed_by.name} needs {name}, which is not installed: reinstall torch")


def hide_devices() -> None:
    """Hide real devices from CUDA in this process. CUDA_VISIBLE_DEVICES still works for the program."""
    ctypes.CDLL(None).setenv(b"CUDA_VISIBLE_DEVICES", b"", 1)
    put, unset = os.putenv, os.unsetenv

    # os.environ calls these two functions: values that the program sets stay in os.environ.
    def putenv(name: Any, value: Any) -> None:
        if os.fsencode(name) != b"CUDA_VISIBLE_DEVICES":
            put(name, value)

    def unsetenv(name: Any) -> None:
        if os.fsencode(name) != b"CUDA_VISIBLE_DEVICES":
            unset(name)

    os.putenv, os.unsetenv = putenv, unsetenv


def check() -> None:
    """Raise RehearsalError unless this torch has everything a rehearsal needs and uses the stub."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    for name in NEEDED:
        module, _, attribute = f"torch.{name}".rpartition(".")
        try:
            owner = importlib.import_module(module)
        except ImportError:  # a namespace of the extension, not a module
            owner = operator.attrgetter(module.removeprefix("torch."))(torch)
        if not hasattr(owner, attribute):
            raise RehearsalError(
                f"torch {torch.__version__} has no torch.{name}: rehearsals were tested with {RAN_WITH}"
            )
    try:
        with FakeTensorMode():
            x = torch.ones(2, device="cuda", requires_grad=True)
            (x * 2).sum().backward()
    except Exception as reason:
        first = str(reason).splitlines()[0] if str(reason) else type(reason).__name__
        raise RehearsalError(
            f"torch {torch.__version__} did not accept the simulated device (tested with {RAN_WITH}): {first}"
        ) from None
