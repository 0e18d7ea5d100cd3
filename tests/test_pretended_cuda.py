"""Host-side errors of a machine with a GPU, tested on a machine that only pretends to have one."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pretended_cuda
import pytest
import torch

from leanstep.diagnose import unseen
from leanstep.diagnose.watch import Watch

ROOT = Path(__file__).parent.parent


@pytest.fixture
def gpu(monkeypatch):
    """The pretended machine, in a process that has not used sync debugging yet."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: pretended_cuda.state.mode)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", pretended_cuda.set_sync_debug_mode)
    monkeypatch.setattr(pretended_cuda.state, "warned", False)
    monkeypatch.setattr(pretended_cuda.state, "mode", 0)


def test_a_prototypes_warning_leaves_no_mode_behind(gpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with unseen.sync_debug_mode("error"):
            assert pretended_cuda.state.mode == 2
    assert pretended_cuda.state.mode == 0
    with pytest.raises(ZeroDivisionError), unseen.sync_debug_mode("warn"):
        assert pretended_cuda.state.mode == 1
        raise ZeroDivisionError
    assert pretended_cuda.state.mode == 0


def test_a_script_on_the_cpu_of_a_gpu_machine_is_recorded_as_elsewhere(gpu):
    """Its reads are of CPU tensors, which torch's sync debugging rightly does not see."""
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Watch(steps=3, warmup=1) as watch:
            for _ in range(5):
                loss = model(torch.randn(4, 8)).square().mean()
                loss.backward()
                assert loss.item() >= 0
                optimizer.step()
                optimizer.zero_grad()
                watch.step()
            assert pretended_cuda.state.mode == 1
    assert pretended_cuda.state.mode == 0
    assert [finding.rule for finding in watch.findings()] == ["host-sync"]
    assert [note for note in watch.not_seen if "synchronising" in str(note)] == []


def test_documented_indexes_have_the_pinned_torch():
    """torch 2.13 is built for CUDA 12.6, 13.0 and newer; there is no index cu128 with it."""
    pages = ("Makefile", "docs/gpu.md", ".github/workflows/gpu.yml")
    named = {page: re.findall(r"whl/(cu\d+)", (ROOT / page).read_text(encoding="utf-8")) for page in pages}
    assert all(named.values()) and {index for indexes in named.values() for index in indexes} <= {
        "cu126",
        "cu130",
    }
