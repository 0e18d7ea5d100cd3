"""Live bytes of ten training loops: the fake device against the CPU's allocator."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from rehearse.rehearsed import SCRIPTS, run_script

NAMES = (
    *("fused attention", "unfused attention", "tied weights", "checkpointing", "reentrant checkpointing"),
    *("grad scaler", "foreach", "per tensor", "accumulation", "normuon"),
)
# Storages alive at the peak of any of them; each may be rounded up by 512 bytes.
STORAGES = 130


def both(script, folder):
    """{variant: peak bytes} on the CPU's allocator and on the fake device."""
    real = subprocess.run(
        [sys.executable, str(script), "cpu"],
        **{"capture_output": True, "text": True, "check": True, "timeout": 250},
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    fake = run_script(script, "cuda", capture=folder, steps=1000)
    assert fake.recording.refused is None, fake.recording.refused
    return json.loads(real.stdout.splitlines()[-1]), json.loads(fake.printed.splitlines()[-1])


@pytest.fixture(scope="module")
def peaks(tmp_path_factory):
    return both(SCRIPTS / "truth.py", tmp_path_factory.mktemp("truth"))


@pytest.mark.parametrize("name", NAMES)
def test_peak_equals_the_cpu_allocators(peaks, name):
    real, fake = peaks
    assert abs(real[name] - fake[name]) <= 512 * STORAGES


def test_trainers_of_transformers_and_trl(tmp_path):
    for package in ("transformers", "trl", "datasets"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    real, fake = both(SCRIPTS / "truth_trainers.py", tmp_path)
    assert {name: abs(real[name] - fake[name]) <= 512 * STORAGES for name in real} == {
        "transformers": True,
        "trl": True,
    }
