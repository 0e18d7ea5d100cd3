"""Settings of the test suite: seeds, poisoned memory, a device fixture, ranks that cannot hang."""

from __future__ import annotations

import os
import tempfile

# Before anything imports Triton. Kernels run in its interpreter, unless `make test-gpu` names a device to
# compile them for; ahead-of-time tests use a subprocess.
os.environ.setdefault("LEANSTEP_TEST_DEVICE", "cpu")
os.environ["TRITON_INTERPRET"] = "1" if os.environ["LEANSTEP_TEST_DEVICE"] == "cpu" else "0"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
# Workers of pytest-xdist are told a width of 80, and output would be folded to it.
os.environ.pop("COLUMNS", None)
# Inductor's cache key does not include this: code compiled for AVX-512 gives NaN in a run for AVX2.
if _capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    _cache = f"leanstep-inductor-{os.getuid() if hasattr(os, 'getuid') else 0}-{_capability}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/{_cache}")

import gc
import importlib.util
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import costs
import numpy as np
import pretended_cuda
import pytest
import torch
from hypothesis import HealthCheck, settings
from ranks import run_ranks as _run_ranks
from torch.utils import _device

TEST_DEVICE = os.environ["LEANSTEP_TEST_DEVICE"]
# The host half of `make test-gpu` without a GPU.
PRETENDED = TEST_DEVICE == "pretended"
if PRETENDED:
    pretended_cuda.install()
# Examples have no time limit, because a machine may be busy. No database: a checkout may be read-only.
settings.register_profile("suite", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    # A background shell ignores Ctrl-C, which tests press.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Two workers on two cores: more threads only spin. dev/matrix tries 2 and 4.
    torch.set_num_threads(int(os.environ.get("LEANSTEP_TEST_THREADS", "1")))
    if TEST_DEVICE != "cpu" and not torch.cuda.is_available():
        raise pytest.UsageError(
            f"LEANSTEP_TEST_DEVICE: expected a device that is here, got {TEST_DEVICE!r}; "
            f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no CUDA device; "
            "docs/gpu.md says which driver it needs"
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` does not import the files of which it runs nothing: transformers alone takes seconds."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return (
        True
        if config.option.markexpr == "quick" and is_test and not costs.has_quick(collection_path)
        else None
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its costs, and by `quick` if `make test` runs it.

    Tests that launch kernels on CPU tensors have the mark `interpreter` from their author, because they need
    Triton's interpreter; tests/on_device has their twins for a GPU.
    """
    skip = pytest.mark.skip(reason="runs kernels on CPU tensors in Triton's interpreter")
    for item in items:
        if TEST_DEVICE != "cpu" and item.get_closest_marker("interpreter"):
            item.add_marker(skip)
        markers = set(costs.costs(item.path, getattr(item, "originalname", item.name)))
        for marker in sorted(markers):
            item.add_marker(marker)
        if costs.is_smoke(item.nodeid) or not any(item.get_closest_marker(name) for name in costs.NAMES):
            item.add_marker("quick")


def pytest_collection_finish(session: pytest.Session) -> None:
    # Measurements collect garbage before every turn: half a second each, were all of torch looked at again.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def processes_have_a_name(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test of `make test` that starts a process although `costs` sees none."""
    costs.started.clear()
    yield
    is_quick = request.node.get_closest_marker("quick") is not None
    if costs.started and is_quick and not any(map(request.node.get_closest_marker, costs.STARTERS)):
        pytest.fail(f"starts a process; tests/costs.py needs a name for it: {costs.started[0]}")


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill `torch.empty*` memory with NaN (or the largest integer): reading it unwritten fails loudly."""

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        # Fake and meta tensors hold no memory; a compiled region must not see the fill.
        if torch.compiler.is_compiling() or tensor.device.type == "meta" or type(tensor) is not torch.Tensor:
            return tensor
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.detach().fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
        return tensor

    def wrap(function):
        def poisoned(*args, **kwargs):
            return poison(function(*args, **kwargs))

        return poisoned

    # `with torch.device(...)` looks its functions up once per process: it must find torch's own.
    _device._device_constructors()
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, wrap(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, wrap(getattr(torch.Tensor, name)))


@pytest.fixture(scope="session", autouse=True)
def exact_interpreter() -> Iterator[None]:
    """bfloat16 in Triton's interpreter as a GPU has it; the interpreter's own products of it are wrong."""
    if TEST_DEVICE != "cpu" or importlib.util.find_spec("triton") is None:
        yield
        return
    from dev.kernel_checks.bfloat16 import exact_bfloat16

    with exact_bfloat16():
        yield


@pytest.fixture
def device() -> torch.device:
    """The CPU (kernels interpreted), or the GPU of `make test-gpu` (kernels compiled)."""
    if PRETENDED:
        pytest.skip("a pretended device has no memory")
    return torch.device(TEST_DEVICE)


@pytest.fixture
def run_ranks():
    """run_ranks(world_size, function, *args, timeout=60): gloo ranks; a hang fails instead of hanging."""
    return _run_ranks
