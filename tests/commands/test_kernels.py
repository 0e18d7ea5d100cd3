"""`leanstep kernels`: bad targets and a missing compiler are one line; the table and the JSON agree."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from leanstep.cli import run
from leanstep.measure import aot

ROWS = [
    aot.CompiledKernel("muon", "xxt 128x128x64", "sm_90", 112, 0, 131072, 8, 4),
    aot.CompiledKernel("muon", "xxt 128x128x64", "gfx942", 124, 0, 32768, 8, 2),
]


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    rows = list(ROWS)
    monkeypatch.setattr(aot, "compile_all", lambda targets, **_: iter(rows))
    return rows


def test_json_holds_every_row(compiled, capsys):
    assert run(["kernels", "--targets", "sm_90,gfx942", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["rows"][0]["registers"] == 112 and result["targets"] == ["sm_90", "gfx942"]
    assert "112 / 131072" in err


def test_spill_is_a_shortfall(compiled, capsys):
    compiled[0] = aot.CompiledKernel("muon", "xxt 128x128x64", "sm_90", 255, 48, 131072, 8, 4)
    assert run(["kernels", "--targets", "sm_90,gfx942"]) == 1
    assert "48 bytes" in capsys.readouterr().err


def test_compile_error_is_a_shortfall(compiled, capsys):
    compiled[1] = aot.CompiledKernel("muon", "xxt 128x128x64", "gfx942", 0, 0, 0, 8, 2, "RuntimeError: no")
    assert run(["kernels", "--targets", "sm_90,gfx942"]) == 1
    assert "did not compile" in capsys.readouterr().err


@pytest.mark.parametrize("targets", ["hopper", "sm_90,,gfx942", ""])
def test_bad_targets_are_named(compiled, capsys, targets):
    assert run(["kernels", "--targets", targets]) == 2
    assert "--targets: expected" in capsys.readouterr().err


def test_interpreter_mode_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run(["kernels"]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err
