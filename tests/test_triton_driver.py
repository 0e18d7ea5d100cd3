"""If Triton's driver cannot be built, torch operations run and one warning says why."""

from __future__ import annotations

import types
import warnings

import pytest
import torch

from leanstep import triton_driver
from leanstep.heads import passes
from leanstep.muon import transpose

pytest.importorskip("triton")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A machine with a GPU, an empty Triton cache and no cached result of `can_launch`."""
    triton_driver.can_launch.cache_clear()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield
    triton_driver.can_launch.cache_clear()


def without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def without_headers(monkeypatch, tmp_path):
    failing = tmp_path / "cc"
    failing.write_text("#!/bin/sh\necho 'fatal error: Python.h: No such file or directory' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("CC", str(failing))


@pytest.mark.parametrize("lack", [without_a_compiler, without_headers])
def test_torch_takes_over_with_one_warning(lack, fresh, monkeypatch, tmp_path):
    lack(monkeypatch, tmp_path)
    on_gpu = types.SimpleNamespace(is_cuda=True, is_meta=False, device=torch.device("cuda:0"))
    with pytest.warns(RuntimeWarning, match="expected a C compiler and Python's headers") as said:
        assert passes.passes_for(on_gpu, torch.float32, 1 << 30) is passes.TORCH
        assert transpose.triton_kernels() is None
    assert len(said) == 1


def test_a_driver_that_starts_is_used(fresh, monkeypatch):
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", types.SimpleNamespace(get_current_target=lambda: "sm_90"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert triton_driver.can_launch()


def test_without_a_gpu_nothing_is_built(fresh, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    without_a_compiler(monkeypatch, tmp_path)
    assert triton_driver.can_launch()
