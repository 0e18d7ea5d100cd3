"""Recordings of whole scripts: the poisoned `torch.empty` of the other tests would add ops to them."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch

from leanstep.diagnose.rules import Limits
from leanstep.diagnose.watch import Watch

STEPS = Path(__file__).parent / "steps"


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Switched off here."""


@pytest.fixture(autouse=True)
def same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@contextlib.contextmanager
def run_beside(script: Path):
    """Modules beside a script are found while it runs; the next script's `model` or `losses` is another."""
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(script.parent))
    try:
        with warnings.catch_warnings():
            # What a script warns of is its own affair.
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith(str(script.parent) + os.sep):
                del sys.modules[name]


def run_watched(script: Path, watch: Watch | None = None, limits: Limits | None = None) -> Watch:
    """Run a script in this process the way the command line does."""
    watch = watch or Watch(limits=limits, timed_warmup=True)
    with run_beside(script), contextlib.redirect_stdout(io.StringIO()), watch:
        runpy.run_path(str(script), run_name="__main__")
    assert watch.recorder.errors == []
    return watch


@pytest.fixture
def watched():
    return run_watched


@pytest.fixture
def write_script(tmp_path: Path):
    """write_script(text) -> path of a script made of it."""

    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write
