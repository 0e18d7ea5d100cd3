"""The harness: rows of the JSON, broken fast paths without a ratio, absent libraries as notes."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import harness
from benchmarks.harness import Benchmark, Row, Workload, check, main, measure, with_gradients
from benchmarks.logprob_linear import BENCHMARK as HEAD

KEYS = {
    *("impl", "kind", "available", "median_s", "p20_s", "p80_s", "samples", "time_ratio"),
    *("peak_bytes", "extra_bytes", "memory_ratio", "host_syncs", "error", "note"),
}


@pytest.fixture(autouse=True)
def no_time_box(monkeypatch):
    """A busy machine may take longer than the time box for a row."""
    monkeypatch.setattr(harness, "MIN_BOX_S", 1_000.0)


def plain(tensors, constants):
    return {"lse": torch.logsumexp(tensors["x"], -1)}


def wrong_gradient(tensors, constants):
    x = tensors["x"]
    return {"lse": torch.logsumexp(x, -1) + 1e-3 * (x - x.detach()).sum(-1)}


def mutating(tensors, constants):
    tensors["x"].detach().add_(1)
    return plain(tensors, constants)


def row(name, kind, function, **options):
    return Row(name, kind, with_gradients(function, ("x",)), **options)


def toy(*rows: Row) -> Benchmark:
    def make(params, dtype, device, generator):
        x = torch.randn(params["rows"], params["cols"], generator=generator)
        return Workload({"x": x.to(device, dtype)})

    return Benchmark(
        name="toy",
        summary="A toy.",
        make=make,
        rows=(row("plain", "reference", plain), *rows),
        sizes={"tiny": {"rows": 3, "cols": 5}, "odd": {"rows": 41, "cols": 7}},
        prove_sizes=("tiny", "odd"),
        default_size="tiny",
    )


def test_rows_and_notes():
    absent = row("absent", "peer", plain, requires=("no_such_package",))
    failing = row("failing", "peer", lambda tensors, constants: 1 / 0)
    result, failed = measure(toy(row("leanstep", "fast", plain), absent, failing), budget_s=0.05)
    rows = {r["impl"]: r for r in result["rows"]}
    assert not failed and all(set(r) == KEYS for r in rows.values())
    assert rows["plain"]["time_ratio"] == 1 and rows["leanstep"]["time_ratio"] > 0
    assert rows["leanstep"]["error"] < 1e-6 and rows["leanstep"]["host_syncs"] == 0
    assert not rows["absent"]["available"] and rows["absent"]["note"] == "no_such_package is not installed"
    assert rows["failing"]["median_s"] is None and "ZeroDivisionError" in rows["failing"]["note"]


@pytest.mark.parametrize(
    ("function", "tensor"), [(wrong_gradient, "tiny/grad:x"), (mutating, "tiny/inputs unchanged")]
)
def test_a_broken_fast_path_gets_no_ratio(function, tensor):
    broken = toy(row("broken", "fast", function))
    assert tensor in [c.tensor for c in check(broken, broken.rows[1], torch.float32, "tiny") if not c.ok]
    result, failed = measure(broken, budget_s=0.05)
    assert failed and result["rows"][1]["time_ratio"] is None
    assert "parity FAILED" in result["rows"][1]["note"]


def test_a_missing_tensor_fails():
    broken = toy(row("broken", "fast", lambda tensors, constants: {"other": tensors["x"].sum()}))
    checks = check(broken, broken.rows[1], torch.float32, "tiny")
    assert "tiny/lse (missing)" in [c.tensor for c in checks if not c.ok]


def test_the_command_line(tmp_path, capsys):
    benchmark = toy(row("leanstep", "fast", plain))
    target = tmp_path / "out.json"
    main(benchmark, ["--impl", "leanstep", "--set", "rows=4", "--budget", "0.05", "--json", str(target)])
    result = json.loads(target.read_text())
    assert result["size"] == "tiny, rows=4" and [r["impl"] for r in result["rows"]] == ["plain", "leanstep"]
    with pytest.raises(SystemExit) as ended:
        main(toy(row("broken", "fast", wrong_gradient)), ["--budget", "0.05"])
    assert ended.value.code == 1
    for arguments, said in (
        (["--impl", "fast"], "--impl: toy has no 'fast'; it has plain, leanstep"),
        (["--set", "width=3"], "--set: toy has no parameter 'width'; it has rows, cols"),
        (["--steps", "2"], "--steps: expected one row with --impl"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(benchmark, arguments)
        assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("impl", "module"),
    [
        ("slime-gather", "torch"),
        ("trl-chunked", "trl"),
        ("trl-chunked-rows", "trl"),
        ("verl-fused", "verl"),
        ("liger-chunked", "liger_kernel"),
        ("torch-linear-ce", "torch"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_other_libraries_compute_the_same_thing(impl, module):
    """Their results equal ours, so that their times can be compared with ours."""
    pytest.importorskip(module)
    missing = HEAD.row(impl).missing(HEAD.params("tiny"))
    if missing:
        pytest.skip(missing)
    workload = HEAD.workload(HEAD.params("tiny"), torch.float32)
    result, expected = HEAD.row(impl).build(workload)(), HEAD.reference.build(workload)()
    if "loss" in result:
        torch.testing.assert_close(result["loss"], -expected["logp"].sum(), atol=1e-4, rtol=1e-5)
        return
    for name in ["logp"] if "entropy" not in result else list(expected):
        torch.testing.assert_close(result[name], expected[name], atol=2e-5, rtol=2e-4)


def test_one_row_runs_as_steps_of_a_script(monkeypatch):
    """For `leanstep rehearse -m benchmarks.NAME`: a step per call, at the given parameters."""
    shapes, updates = [], []

    def seen(tensors, constants):
        shapes.append(tuple(tensors["x"].shape))
        return plain(tensors, constants)

    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: updates.append(len(shapes)))
    main(toy(row("leanstep", "fast", seen)), ["--impl", "leanstep", "--steps", "3", "--set", "rows=8"])
    assert shapes == [(8, 5)] * 3 and updates == [1, 2, 3]
