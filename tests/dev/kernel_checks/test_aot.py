"""Ahead-of-time compilation: shipped kernels pass the checks, broken ones become a row.

`python -m dev.kernels` compiles every variant for all targets, which takes minutes; these tests compile the
shipped configurations for one target.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from dev.kernel_checks import aot, sass

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


@pytest.mark.skipif(VERSION < (3, 7), reason="the gates were set with Triton 3.7")
def test_each_gate_can_fail(monkeypatch):
    """Really compile kernels that fail one check each."""
    folders = [
        str(Path(__file__).parents[1]),
        str(Path(__file__).parents[3]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))
    got = {
        row["kernel"]: (row["error"], row["shortfall"], row["spill_bytes"] > 0)
        for row in compiled(("kernel_checks.gate_kernels",))
    }
    assert got["good pass"] == got["good product"] == (None, "", False)
    assert "LDG: " in got["narrow pass"][1] and "STG: " in got["narrow pass"][1]
    assert "without tensor cores" in got["narrow product"][1]
    assert got["spilling product"][2]


def test_local_memory_that_is_no_spill_is_a_shortfall():
    assert sass.shortfalls("", Counter({"LDL.64": 2, "STL": 1}), 4) == ["3 accesses to local memory"]


def test_variants_take_every_pair_of_flag_values_once():
    flags = dict.fromkeys("ABCDEF", False)
    entry = {"name": "kernel", "fn": SimpleNamespace(__name__="kernel"), "signature": {"x": "*fp32"}}
    entry |= {"constexprs": {**flags, "TYPE": True, "BLOCK": 64}, "num_warps": 4, "num_stages": 2}
    entries = aot.variants([{**entry, "tied": ("TYPE",)}])
    assert entries[0]["constexprs"] == entry["constexprs"] and entries[0]["name"] == "kernel"
    assert len(entries) < 16 and len({aot._identity(e) for e in entries}) == len(entries)
    for a, b in itertools.combinations(flags, 2):
        assert len({(e["constexprs"][a], e["constexprs"][b]) for e in entries}) == 4
    assert {(e["constexprs"]["TYPE"], e["constexprs"]["BLOCK"]) for e in entries} == {(True, 64)}
    few = aot.variants([{**entry, "constexprs": {"A": True, "B": False, "BLOCK": 64}}])
    assert len(few) == 4 and few[1]["name"] == "kernel A=0"


def test_a_variant_may_spill_a_little_and_a_shipped_kernel_nothing():
    def complaint_of(spills, **more):
        return aot.CompiledKernel("muon", "xxt", "sm_90", 128, spills, 0, 8, 4, **more).complaint

    assert complaint_of(0) == complaint_of(32, shipped=False) == ""
    assert complaint_of(4) == "spills 4 bytes of registers" and "spills 36" in complaint_of(36, shipped=False)
    assert (
        complaint_of(0, error="no") == "did not compile: no" and complaint_of(0, shortfall="slow") == "slow"
    )


@pytest.mark.skipif(VERSION != (3, 7), reason="the record's kernels were compiled with Triton 3.7")
def test_registers_stay_near_the_records_kernels(rows):
    got = {row["kernel"]: row["registers"] for row in rows if row["package"] == "muon"}
    assert all(got[name] <= 1.1 * limit for name, limit in UPSTREAM_SM90.items())


def test_every_kernel_file_is_found_and_lists_what_it_ships():
    assert {"leanstep.heads.kernels", "leanstep.muon.kernel"} <= set(aot.KERNEL_MODULES)
    assert [name for name in aot.KERNEL_MODULES if importlib.util.find_spec(name) is None] == []
    assert {package for package, _ in aot.shipped_kernels()} >= {"heads", "muon"}


@pytest.mark.parametrize("arguments", [0, 1])
def test_the_assembler_is_the_one_that_triton_uses(monkeypatch, arguments):
    """Triton 3.4 has one for all targets, later ones choose by target, 3.9 takes the newer one for sm_90."""
    from triton.backends.nvidia import compiler

    newer, older = SimpleNamespace(path="ptxas-newer"), SimpleNamespace(path="ptxas-older")
    choose = (lambda arch: newer if arch >= 90 else older) if arguments else (lambda: newer)
    monkeypatch.setattr(compiler, "get_ptxas", choose)
    assert aot._assembler(90) == "ptxas-newer"


@pytest.mark.parametrize("target", ["sm_12"])
def test_a_target_that_llvm_does_not_know_is_one_error(monkeypatch, target):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=f"^targets: Triton .* does not compile for {target}: "):
        list(aot.compile_all((target,), ("leanstep.heads.kernels",)))


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
