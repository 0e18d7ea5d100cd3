"""Ahead-of-time compilation: shipped kernels do not spill, broken ones become a row."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from leanstep.measure import aot

# Registers per thread of the record's own kernels at sm_90, compiled with the same Triton.
UPSTREAM_SM90 = {
    "xxt 128x128x64": 115,
    "xxt 64x128x128": 98,
    "xtx 64x128x128": 108,
    "ba_caa 128x128x64": 128,
    "transpose_add 64x128": 40,
}


@pytest.fixture(scope="module")
def rows():
    return json.loads(aot.compile_in_subprocess(("sm_90",)))


def test_no_shipped_kernel_spills_registers_on_sm_90(rows):
    assert {row["kernel"] for row in rows if row["package"] == "muon"} >= set(UPSTREAM_SM90)
    bad = [
        (row["kernel"], row["spill_bytes"], row["error"])
        for row in rows
        if row["spill_bytes"] or row["error"]
    ]
    assert not bad


def test_registers_stay_near_the_records_kernels(rows):
    got = {row["kernel"]: row["registers"] for row in rows if row["package"] == "muon"}
    assert all(got[name] <= 1.1 * limit for name, limit in UPSTREAM_SM90.items())
    assert all(0 < row["registers"] <= 255 and row["shared_bytes"] <= 227 * 1024 for row in rows)


def test_amd_counts_come_from_the_assembly():
    text = "  - .agpr_count: 0\n    .vgpr_count:     124\n    .vgpr_spill_count: 3\n"
    assert aot._amd(text) == (124, 12)


def test_target_names():
    assert aot.parse_target("sm_90").arch == 90
    assert aot.parse_target("gfx942").warp_size == 64
    assert aot.parse_target("gfx1100").warp_size == 32
    for name in ("sm90", "hopper", ""):
        with pytest.raises(ValueError, match=r"^targets: expected names like"):
            aot.parse_target(name)


def test_interpreter_mode_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset it"):
        list(aot.compile_all(("sm_90",)))
