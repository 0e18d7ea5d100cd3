"""bench and prove on the command line: contracts, exit codes, one-line errors."""

from __future__ import annotations

import json

import pytest
import torch
from toy_case import implementation, toy_case, wrong_gradient

from leanstep.case import all_cases, register, unregister
from leanstep.cli import run
from leanstep.commands.terminal import case_names


@pytest.fixture
def toy():
    case = register(toy_case("toy"))
    yield case
    unregister("toy")


@pytest.fixture
def broken():
    case = register(toy_case("toy-broken", implementation("broken", wrong_gradient)))
    yield case
    unregister("toy-broken")


def test_bench_json_is_one_object_and_nothing_else(toy, capsys):
    assert run(["bench", "toy", "--budget", "0.1", "--json", "-"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["case"] == "toy" and result["rows"][0]["impl"] == "reference"
    assert "toy" in captured.err


def test_a_sweep_gives_one_result_per_value(toy, tmp_path):
    target = tmp_path / "out.json"
    assert run(["bench", "toy", "--budget", "0.05", "--sweep", "rows=3,5", "--json", str(target)]) == 0
    results = json.loads(target.read_text())["results"]
    assert [r["size"] for r in results] == ["tiny, rows=3", "tiny, rows=5"]


def test_prove_json_rows_have_exactly_the_contracts_keys(toy, capsys):
    assert run(["prove", "toy", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    keys = {"case", "impl", "dtype", "tensor", "error", "reference_error", "bound", "ok"}
    assert result["rows"] and all(set(row) == keys for row in result["rows"])


def test_prove_exits_1_when_a_fast_path_is_broken(broken, capsys):
    assert run(["prove", "toy-broken"]) == 1
    err = capsys.readouterr().err.strip().splitlines()
    assert err[-1].startswith("leanstep: prove: ") and "toy-broken/broken tiny/grad:x" in err[-1]


def test_bench_exits_1_and_prints_no_ratio_when_a_fast_path_is_broken(broken, capsys):
    assert run(["bench", "toy-broken", "--budget", "0.05", "--json", "-"]) == 1
    row = next(r for r in json.loads(capsys.readouterr().out)["rows"] if r["impl"] == "broken")
    assert row["time_ratio"] is None and row["median_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "nope"], "case: no case 'nope'"),
        (["prove", "nope"], "case: no case 'nope'"),
        (["bench", "toy", "--size", "huge"], "--size: toy has no 'huge'; it has tiny, odd, empty"),
        (["bench", "toy", "--impl", "nope"], "--impl: no implementation 'nope'; there are absent-peer, fast"),
        (["prove", "toy", "--impl", "nope"], "--impl: no implementation 'nope'"),
        (
            ["bench", "toy", "--json", "/no/such/folder/x.json"],
            "--json: the folder /no/such/folder does not exist",
        ),
        (["bench", "toy", "--json", "/proc/x.json"], "--json: cannot write to /proc"),
        (["bench", "toy", "--sweep", "rows"], "--sweep: expected key=value,value, got 'rows'"),
        (["bench", "toy", "--sweep", "rows="], "--sweep: expected key=value,value, got 'rows='"),
        (["bench", "toy", "--sweep"], "--sweep"),
        (["bench", "toy", "--sweep", "depth=1"], "--sweep: toy has no parameter 'depth'"),
        (["bench", "toy", "--sweep", "rows=many"], "--sweep: expected a number, got 'many'"),
        (["bench", "toy", "--budget", "0"], "--budget: expected seconds above 0, got 0.0"),
        (["bench", "toy", "--beside", "-1"], "--beside: expected a number of processes, 0 or more, got -1"),
        (["bench", "toy", "--device", "tpu"], "--device:"),
        (["bench", "toy", "--dtype", "fp8"], "--dtype: no dtype 'fp8'; it takes fp64, fp32, fp16, bf16"),
        (["bench", "toy", "--dtype", "fp32,bf16"], "--dtype: expected one dtype, got 'fp32,bf16'"),
        (["prove", "toy", "--dtype", "fp8"], "--dtype: no dtype 'fp8'; it takes fp64, fp32, fp16, bf16"),
        (["prove", "toy", "--drift"], "--drift: none of toy has a training run"),
        (["prove", "toy", "--runs", "1"], "--runs: expected at least 2 paired runs"),
        (["nope"], "No such command 'nope'"),
        (["bench", "--nope"], "No such option"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(toy, capsys, arguments, message):
    assert run(arguments) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert message in lines[-1] and lines[-1].startswith("leanstep: ")
    assert "Traceback" not in captured.err and captured.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_cpu_build_refuses_a_gpu_in_one_line(toy, capsys):
    assert run(["bench", "toy", "--device", "cuda"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("leanstep: --device: cuda is not available on this machine")


def test_a_dtype_is_measured_proven_and_named(toy, capsys):
    assert run(["bench", "toy", "--dtype", "bf16", "--budget", "0.01", "--json", "-"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["dtype"] == "bf16"
    plain = next(row for row in result["rows"] if row["impl"] == "reference")
    # Far above what fp32 rounds, far below a wrong answer.
    assert 1e-4 < plain["max_error"] < 2e-2


def test_a_bench_beside_busy_processes_says_so(toy, capsys):
    assert run(["bench", "toy", "--budget", "0.01", "--beside", "1", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["beside"] == 1
    assert "· beside 1 busy process" in " ".join(captured.err.split())


def test_version_and_help(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("leanstep 0.")
    for command in ("demo", "diagnose", "bench", "prove", "rehearse", "train", "kernels"):
        assert run([command, "--help"]) == 0
        assert "Example" in capsys.readouterr().out, command


@pytest.mark.parametrize("command", ["bench", "prove"])
def test_help_names_every_case(command, capsys):
    assert case_names() == sorted(all_cases())
    assert run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in case_names())


@pytest.mark.parametrize(
    ("options", "compared", "trained"),
    [(["--drift"], 2, 60), (["--drift", "--steps", "9"], 2, 9), (["--steps", "3"], 3, None)],
)
def test_drift_of_two_scripts_trains_long_enough_to_see_one(
    tmp_path, monkeypatch, capsys, options, compared, trained
):
    from leanstep.prove import compare

    seen = {}

    def same_update(before, after, **_):
        seen["compared"] = before.steps, after.steps
        return compare.PairProof(before.label, after.label)

    def drift(before, after, *, runs, fork):
        seen["trained"] = before.steps, after.steps
        numbers = {"shift": 0.0, "shift_low": 0.0, "shift_high": 0.0, "p_value": 1.0, "detectable_shift": 0.1}
        return {"runs": runs, "steps": before.steps, "first_divergence": None, "ok": True, **numbers}

    monkeypatch.setattr(compare, "prove_scripts", same_update)
    monkeypatch.setattr(compare, "prove_drift", drift)
    monkeypatch.setattr(compare.PairProof, "ok", property(lambda self: True))
    scripts = []
    for name in ("before.py", "after.py"):
        (tmp_path / name).write_text("import torch\n")
        scripts.append(str(tmp_path / name))
    run(["prove", *scripts, *options])
    assert seen["compared"] == (compared, compared)
    assert seen.get("trained") == (None if trained is None else (trained, trained))
    assert (trained is None) or f"loss after {trained} steps, 8 paired runs" in capsys.readouterr().out


def test_drift_of_two_scripts_needs_two_runs(tmp_path, capsys):
    (tmp_path / "a.py").write_text("import torch\n")
    assert run(["prove", str(tmp_path / "a.py"), str(tmp_path / "a.py"), "--drift", "--runs", "1"]) == 2
    assert "--runs: expected at least 2 paired runs, got 1" in capsys.readouterr().err
