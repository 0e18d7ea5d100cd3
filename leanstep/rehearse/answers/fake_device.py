"""A simulated CUDA device: a small library that makes a CPU build of torch see one.

`library` builds it once into the cache; `load` must run before `import torch`, because torch looks its CUDA
hooks up once. So the process that asks for a rehearsal builds, and the process of the rehearsal loads.
"""

from __future__ import annotations

import ctypes
import importlib.util
import operator
import re
from pathlib import Path

SOURCE = Path(__file__).with_name("stub.cpp")
# What was run.
RAN_WITH = "torch 2.13"
# Private names that the tape and the answers rest on.
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
    """Version of the installed torch and the CUDA version it was built for, without importing it."""
    text = (torch_folder() / "version.py").read_text()
    version = re.search(r"__version__ = '([^']+)'", text)
    cuda = re.search(r"^cuda[^=]*= '([^']+)'", text, re.MULTILINE)
    return version.group(1) if version else "unknown", cuda.group(1) if cuda else None


def library() -> Path:
    """The built stub; raises RehearsalError when it cannot be had."""
    from leanstep.cpu import build_library

    root = torch_folder()
    version, cuda = torch_version()
    if cuda is not None:
        raise RehearsalError(
            f"torch {version} is built for CUDA {cuda}: a rehearsal needs an environment with a CPU build "
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
        return build_library(SOURCE, [[*flags, *link]])
    except OSError as reason:
        if "no C++ compiler" in str(reason):
            raise RehearsalError(f"{reason}: a rehearsal builds a small library for torch once") from None
        raise RehearsalError(
            f"torch {version}: CUDA hooks differ from those of {RAN_WITH}, its stub does not build: {reason}"
        ) from None


def load(path: Path) -> None:
    """Load the stub; torch must not have been imported yet."""
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def check() -> None:
    """Raise RehearsalError unless this torch has what a rehearsal rests on and took the stub."""
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
                f"torch {torch.__version__} has no torch.{name}: rehearsals ran with {RAN_WITH}"
            )
    try:
        with FakeTensorMode():
            x = torch.ones(2, device="cuda", requires_grad=True)
            (x * 2).sum().backward()
    except Exception as reason:
        first = str(reason).splitlines()[0] if str(reason) else type(reason).__name__
        raise RehearsalError(
            f"torch {torch.__version__} did not take the fake device (they ran with {RAN_WITH}): {first}"
        ) from None
