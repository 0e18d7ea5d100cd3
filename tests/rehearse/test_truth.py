"""Live bytes of fourteen training loops: the fake device against the CPU's allocator."""

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
    *("logits read twice, gather", "logits read twice, rows"),
)
PACKAGES = ("transformers", "trl", "datasets")
# Storages alive at the peak of any of them; each may be rounded up by 512 bytes.
STORAGES = 130


@pytest.fixture(scope="module")
def peaks(tmp_path_factory):
    """{variant: peak bytes} on the CPU's allocator and on the fake device; imports cost most of it."""
    script = SCRIPTS / "truth.py"
    more = ["trainers"] if all(importlib.util.find_spec(name) for name in PACKAGES) else []
    real = subprocess.run(
        [sys.executable, str(script), "cpu", *more],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    fake = run_script(script, "cuda", *more, capture=tmp_path_factory.mktemp("truth"), steps=1000)
    assert fake.recording.refused is None, fake.recording.refused
    return json.loads(real.stdout.splitlines()[-1]), json.loads(fake.printed.splitlines()[-1])


@pytest.mark.parametrize("name", [*NAMES, "transformers", "trl"])
def test_peak_equals_the_cpu_allocators(peaks, name):
    real, fake = peaks
    if name not in NAMES and name not in real:
        pytest.skip(f"not all of {', '.join(PACKAGES)} are installed")
    assert abs(real[name] - fake[name]) <= 512 * STORAGES
