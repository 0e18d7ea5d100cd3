"""`leanstep rehearse CASE --sweep`: published figures, measured peaks, what fits, the JSON contract."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import torch
from rehearse.rehearsed import stub_or_skip

from leanstep.case import get_case
from leanstep.cli import run
from leanstep.measure.peaks import measure_peak
from leanstep.rehearse.devices import device_named

GIB, MIB = 2**30, 2**20
SMALL = "tokens=512,vocab=640,hidden=32,dtype=fp32,chunk=128"
NUMBER = {"type": "number", "minimum": 0}
ON_DEVICE = {
    "type": "object",
    "properties": {
        "fits": {"type": "boolean"},
        "step_ms": {"type": ["number", "null"]},
        "bound_by": {"enum": ["device", "host", "syncs", "link", None]},
    },
    "required": ["fits", "step_ms", "bound_by"],
    "additionalProperties": False,
}
CELL = {
    "type": "object",
    "properties": {
        "device": {"type": "string"},
        "value": {"type": ["number", "string", "null"]},
        "why": {"type": ["string", "null"]},
        "peak_bytes": NUMBER,
        "reserved_bytes": NUMBER,
        "largest_buffer_bytes": NUMBER,
        "categories": {"type": "object", "additionalProperties": NUMBER},
        "flops": NUMBER,
        "devices": {"type": "object", "additionalProperties": ON_DEVICE},
    },
    "required": ["value", "why"],
    "if": {"properties": {"why": {"const": None}}},
    "then": {"required": ["peak_bytes", "reserved_bytes", "largest_buffer_bytes", "flops", "devices"]},
    "additionalProperties": False,
}
CONTRACT = {
    "type": "object",
    "properties": {
        "predicted": {"const": True},
        "case": {"type": "string"},
        "sweep": {"type": "string"},
        "values": {"anyOf": [{"type": "array", "minItems": 1}, {"const": "fit"}]},
        "params": {"type": "object"},
        "ranks": {"type": "integer"},
        "reserve_bytes": {"type": "integer"},
        "devices": {
            "additionalProperties": {
                "required": ["name", "memory_bytes", "room_bytes"],
                "additionalProperties": {"type": ["string", "integer"]},
            }
        },
        "rows": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "impl": {"type": "string"},
                    "kind": {"enum": ["reference", "fast", "peer"]},
                    "note": {"type": "string"},
                    "cells": {"type": "array", "minItems": 1, "items": CELL},
                },
                "required": ["impl", "kind", "note", "cells"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["leanstep", "torch", "case", "sweep", "values", "params", "devices", "rows"],
}


def sweep_json(capsys: pytest.CaptureFixture, *arguments: str, code: int = 0) -> dict[str, Any]:
    stub_or_skip()
    assert run(["rehearse", *arguments, "--json", "-"]) == code
    result = json.loads(capsys.readouterr().out)
    jsonschema.validate(result, CONTRACT)
    return result


def cells_of(result: dict[str, Any]) -> dict[tuple[str, Any], dict[str, Any]]:
    return {(row["impl"], cell["value"]): cell for row in result["rows"] for cell in row["cells"]}


def reserve_for(device: str, room: int) -> str:
    """--reserve-gb that leaves this much of a device."""
    there = device_named(device)
    return str((there.memory_bytes - there.context_bytes - room) / GIB)


def test_the_seeds_table_in_small(capsys: pytest.CaptureFixture):
    rows = "reference,leanstep,slime-gather"
    arguments = ["--device", "h200,a100", "--set", SMALL, "--sweep", "response_frac=1,0.25", "--impl", rows]
    result = sweep_json(capsys, "logprob-linear", *arguments)
    assert (result["case"], result["sweep"], result["values"]) == (
        "logprob-linear",
        "response_frac",
        [1, 0.25],
    )
    assert result["params"]["tokens"] == 512 and result["params"]["dtype"] == "fp32"
    assert list(result["devices"]) == ["h200", "a100"] and "response_frac" not in result["params"]
    cells = cells_of(result)
    assert len(cells) == 6 and all(cell["why"] is None for cell in cells.values())
    logits = 4 * 512 * 640
    assert cells["reference", 1]["largest_buffer_bytes"] == logits
    assert cells["slime-gather", 0.25]["peak_bytes"] < cells["slime-gather", 1]["peak_bytes"]
    assert cells["leanstep", 1]["peak_bytes"] < cells["slime-gather", 1]["peak_bytes"] - logits
    assert cells["leanstep", 0.25]["flops"] < cells["leanstep", 1]["flops"] / 3
    assert all(cell["devices"][d]["fits"] for cell in cells.values() for d in ("h200", "a100"))


def test_the_table_names_rows_values_and_what_does_not_fit(capsys: pytest.CaptureFixture):
    stub_or_skip()
    arguments = [
        "--set",
        SMALL,
        "--sweep",
        "response_frac=1,0.25",
        "--impl",
        "reference,leanstep,verl-triton",
    ]
    reserve = reserve_for("h100", 68 * MIB)
    assert run(["rehearse", "logprob-linear", *arguments, "--reserve-gb", reserve]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("logprob-linear: tokens 512, hidden 32, vocab 640")
    assert shown[1] == "peak memory and time per step on h100 (0.1 GiB), predicted"
    assert shown[2].split() == ["response_frac", "=", "1", "0.25"]
    reference, fast, missing = shown[3:6]
    assert reference.split()[0] == "reference" and reference.count("does not fit") == 2
    assert fast.split()[0] == "leanstep" and "MiB" in fast and "µs" in fast and "fit" not in fast
    assert missing.split(maxsplit=1)[0] == "verl-triton"
    assert "needs hidden divisible by 128" in missing or "not installed" in missing


def test_published_figures(capsys: pytest.CaptureFixture):
    """slime's issue 1951 and its pull 2076, which measured 43.6 GiB on a quarter of the rows."""
    settings = "vocab=76032,dtype=fp32,chunk=1024"
    arguments = ["--device", "h200", "--set", settings, "--sweep", "tokens=205280,51320"]
    cells = cells_of(sweep_json(capsys, "logprob-logits", *arguments, "--impl", "slime-gather"))
    whole, quarter = cells["slime-gather", 205_280], cells["slime-gather", 51_320]
    assert whole["largest_buffer_bytes"] == 62_431_395_840 == 205_280 * 76_032 * 4
    assert whole["peak_bytes"] / GIB == pytest.approx(174.4, abs=0.1)
    assert quarter["peak_bytes"] / GIB == pytest.approx(43.6, abs=0.05)
    assert not whole["devices"]["h200"]["fits"] and quarter["devices"]["h200"]["fits"]


@pytest.mark.parametrize("fraction", [1, 0.25])
def test_peaks_of_plain_torch_equal_the_cpu_allocators(fraction: float, capsys: pytest.CaptureFixture):
    settings = {"tokens": 512, "vocab": 3000, "hidden": 96, "samples": 4, "chunk": 128}
    plain = ("reference", "gather-after", "slime-gather")
    typed = ",".join(f"{name}={value}" for name, value in settings.items())
    arguments = ["--device", "a100", "--set", typed, "--sweep", f"response_frac={fraction}"]
    cells = cells_of(sweep_json(capsys, "logprob-linear", *arguments, "--impl", ",".join(plain)))
    case = get_case("logprob-linear")
    workload = case.workload(case.params("cpu", {**settings, "response_frac": fraction}), torch.float32)
    for name in plain:
        measured = measure_peak(case.implementation(name).build(workload), workload.tensors).peak_bytes
        cell = cells[name, fraction]
        predicted = cell["peak_bytes"] - cell["categories"].get("library", 0)
        assert predicted == pytest.approx(workload.num_bytes + measured, rel=0.01), name


def test_leansteps_peak_is_inputs_gradients_one_tile_and_statistics(capsys: pytest.CaptureFixture):
    T, V, D, chunk = 4096, 3000, 256, 512
    for dtype, size in (("fp32", 4), ("bf16", 2)):
        settings = f"tokens={T},vocab={V},hidden={D},chunk={chunk},dtype={dtype},response_frac=1"
        arguments = ["--device", "a100", "--set", settings, "--sweep", "gradients=both,hidden,none"]
        cells = cells_of(sweep_json(capsys, "logprob-linear", *arguments, "--impl", "leanstep-recompute"))
        peaks = {
            key[1]: cell["peak_bytes"] - cell["categories"].get("library", 0) for key, cell in cells.items()
        }
        inputs = (T + V) * D * size + 2 * T * 8
        # The weight's gradient is summed in fp32 and then rounded; two tiles, rows of vectors.
        least = inputs + T * D * size + V * D * 4 + chunk * V * size
        most = inputs + T * D * size + V * D * (4 + size) + 2 * chunk * V * 4 + 16 * T * 4 + chunk * D * 8
        assert least <= peaks["both"] <= most, dtype
        assert inputs + chunk * V * size <= peaks["none"] < peaks["hidden"] < peaks["both"]


@pytest.mark.parametrize(
    ("name", "settings", "logits"),
    [
        ("distill", "tokens=1024,hidden=64,teacher=96", 1024 * 50560),
        ("dpo", "pairs=2,tokens=256,hidden=64", 4 * 255 * 50560),
        ("masked-head", "tokens=1024,hidden=64", 1024 * 50560),
    ],
)
def test_objectives_plain_and_fast(name: str, settings: str, logits: int, capsys: pytest.CaptureFixture):
    typed = f"{settings},dtype=bf16,size=gpu"
    arguments = ["--set", typed, "--sweep", "vocab=50560", "--impl", "reference,leanstep"]
    cells = cells_of(sweep_json(capsys, name, *arguments))
    plain, fast = cells["reference", 50560], cells["leanstep", 50560]
    # Plain code has fp32 logits of all positions, and their gradient beside them.
    assert plain["largest_buffer_bytes"] == 4 * logits and plain["peak_bytes"] > 8 * logits
    assert fast["peak_bytes"] < plain["peak_bytes"] / 2 and fast["flops"] < plain["flops"]
    assert fast["devices"]["h100"]["fits"] and fast["devices"]["h100"]["step_ms"] > 0


def test_the_controllers_objective_needs_less_than_its_eager_form(capsys: pytest.CaptureFixture):
    arguments = ["--set", "samples=4,variants=4", "--sweep", "tokens=512", "--impl", "leanstep,eager"]
    cells = cells_of(sweep_json(capsys, "lens-loss", *arguments))
    assert 0 < cells["leanstep", 512]["peak_bytes"] < cells["eager", 512]["peak_bytes"]


def test_the_longest_batch_fits_and_one_a_percent_longer_does_not(capsys: pytest.CaptureFixture):
    shape = ["--device", "a100", "--set", "vocab=1271,hidden=512,chunk=128,response_frac=1"]
    shape += ["--impl", "reference,leanstep-recompute", "--reserve-gb", reserve_for("a100", 104 * MIB)]
    result = sweep_json(capsys, "logprob-linear", *shape, "--sweep", "tokens=fit")
    assert result["values"] == "fit"
    longest = {row["impl"]: row["cells"][0] for row in result["rows"]}
    assert longest["leanstep-recompute"]["value"] > 1.5 * longest["reference"]["value"] > 1500
    for name, cell in longest.items():
        assert cell["device"] == "a100" and cell["devices"]["a100"]["fits"] and cell["why"] is None
        tokens = (cell["value"], cell["value"] + cell["value"] // 50)
        again = cells_of(
            sweep_json(capsys, "logprob-linear", *shape, "--sweep", f"tokens={tokens[0]},{tokens[1]}")
        )
        fits = [again[name, value]["devices"]["a100"]["fits"] for value in tokens]
        assert fits == [True, False], name


def test_where_nothing_fits_the_longest_batch_is_none(capsys: pytest.CaptureFixture):
    arguments = ["--set", "vocab=1271,hidden=512,samples=1", "--impl", "leanstep", "--sweep", "tokens=fit"]
    result = sweep_json(
        capsys, "logprob-linear", *arguments, "--reserve-gb", reserve_for("h100", MIB), code=3
    )
    (cell,) = result["rows"][0]["cells"]
    assert (cell["value"], cell["why"]) == (0, "not even tokens = 1 fits")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep", "rows=3"], "--sweep: logprob-linear has no parameter 'rows'; it has tokens, hidden"),
        (["--set", "rows=3", "--sweep", "tokens=3"], "--set: logprob-linear has no parameter 'rows'; it has"),
        (["--set", "rows=3"], "--set: logprob-linear has no parameter 'rows'; it has tokens, hidden"),
        (["--sweep", "tokens"], "--sweep: expected name=value,value,… or name=fit, got 'tokens'"),
        (["--sweep", "tokens=1,vocab=2"], "--sweep: expected name=value,value,… or name=fit"),
        (["--sweep", "tokens=1", "--sweep", "vocab=2"], "--sweep: expected one parameter, got 2"),
        (["--sweep", "tokens=0"], "--sweep: tokens: expected a whole number from 1 on, got 0"),
        (["--sweep", "tokens=1.5"], "--sweep: tokens: expected a whole number from 1 on, got 1.5"),
        (["--sweep", "response_frac=1,2"], "--sweep: response_frac: expected a fraction from 0 to 1, got 2"),
        (["--sweep", "response_frac=half"], "--sweep: response_frac: expected a number, got 'half'"),
        (
            ["--sweep", "response_frac=fit"],
            "--sweep: response_frac=fit: expected a parameter that counts: tokens",
        ),
        (["--sweep", "gradients=1"], "--sweep: gradients: expected a name, got 1"),
        (["--sweep", "dtype=int99"], "--sweep: no dtype 'int99'"),
        (["--sweep", "size=huge"], "--sweep: logprob-linear has no size 'huge'; it has tiny"),
        (["--set", "tokens=64", "--sweep", "tokens=1"], "--sweep: tokens is fixed by --set; give it once"),
        (["--sweep", "tokens=1", "--impl", "magic"], "--impl: no implementation 'magic'"),
        (["--sweep", "tokens=1", "--reserve-gb", "-1"], "--reserve-gb: expected 0 or more, got -1"),
        (["--reserve-gb", "1"], "--reserve-gb: expected --sweep beside it"),
        (["--sweep", "tokens=1", "--what-if", "all"], "--what-if: expected no --sweep beside it"),
        (["--sweep", "tokens=1", "--device", "tpu"], "--device: expected one of"),
        (["--sweep", "tokens=1", "--json", "/nowhere/x.json"], "--json: the folder /nowhere does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_two(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture
):
    assert run(["rehearse", "logprob-linear", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_a_script_has_no_parameters_to_sweep(tmp_path, capsys: pytest.CaptureFixture):
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    assert run(["rehearse", str(script), "--sweep", "tokens=1,2"]) == 2
    assert "--set, --impl, --sweep: for registered cases; " in capsys.readouterr().err
