"""Ahead-of-time compilation: shipped kernels pass the checks, broken ones become a row.

`python -m dev.kernels` compiles every variant for all targets, which takes minutes; these tests compile the
shipped configurations for one target.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

pytest.importorskip("triton")

from dev.kernel_checks import aot

# All kernels are compiled once for this file: minutes on a busy machine.
pytestmark = pytest.mark.timeout(1200)

VERSION = tuple(int(part) for part in metadata.version("triton").split(".")[:2])

# Registers per thread of the record's own kernels at sm_90, compiled with the same Triton.
UPSTREAM_SM90 = {
    "xxt 128x128x64": 115,
    "xxt 64x128x128": 98,
    "xtx 64x128x128": 108,
    "ba_caa 128x128x64": 128,
    "transpose_add 64x128": 40,
}


def compiled(modules: tuple[str, ...]) -> list[dict]:
    """The rows of `compile_all` for sm_90 from a process without TRITON_INTERPRET, which the suite sets."""
    code = (
        "import json; from dev.kernel_checks.aot import compile_all; "
        f"print(json.dumps([row.to_json() for row in compile_all(('sm_90',), {modules!r})]))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def rows():
    return compiled(aot.KERNEL_MODULES)


def test_every_shipped_kernel_compiles_for_sm_90(rows):
    assert {row["kernel"] for row in rows if row["package"] == "muon"} >= set(UPSTREAM_SM90)
    assert [(row["kernel"], row["error"]) for row in rows if row["error"]] == []
    assert all(0 < row["registers"] <= 255 and row["shared_bytes"] <= 227 * 1024 for row in rows)


@pytest.mark.skipif(
    VERSION < (3, 7), reason="the assembler of an older Triton spills where newer ones do not"
)
def test_no_shipped_kernel_spills_registers_on_sm_90(rows):
    assert [(row["kernel"], row["spill_bytes"]) for row in rows if row["spill_bytes"]] == []


@pytest.mark.skipif(VERSION < (3, 7), reason="the gates were set with Triton 3.7")
def test_machine_code_of_shipped_kernels_passes_the_gates(rows):
    assert [(row["kernel"], row["shortfall"]) for row in rows if row["shortfall"]] == []


@pytest.mark.skipif(VERSION != (3, 7), reason="the record's kernels were compiled with Triton 3.7")
def test_registers_stay_near_the_records_kernels(rows):
    got = {row["kernel"]: row["registers"] for row in rows if row["package"] == "muon"}
    assert all(got[name] <= 1.1 * limit for name, limit in UPSTREAM_SM90.items())
