"""`leanstep gpu-report`: predictions, nearest device, syncs, figures side by side; then all on a fake GPU."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from rehearse.rehearsed import SCRIPTS, run_script, stub_or_skip
from toy_case import implementation, toy_case, wrong_gradient

from leanstep.case import all_cases, get_case, register, unregister
from leanstep.cli import run
from leanstep.measure.parity import dtype_name
from leanstep.measure.side_by_side import BenchResult, BenchRow
from leanstep.report import gpu_report

HERE = {"leanstep": "0.2.0", "torch": "2.13.0", "device": "cuda", "threads": 1, "dtype": "bf16"}


def properties(name, capability, units, memory_gib, **more):
    major, minor = capability
    parts = {"name": name, "major": major, "minor": minor, "multi_processor_count": units}
    return SimpleNamespace(**parts, total_memory=int(memory_gib * 2**30), **more)


@pytest.mark.parametrize(
    ("found", "key"),
    [
        (properties("NVIDIA H100 80GB HBM3", (9, 0), 132, 79.6), "h100"),
        (properties("NVIDIA H100 PCIe", (9, 0), 114, 79.2), "h100-pcie"),
        (properties("NVIDIA A100-PCIE-40GB", (8, 0), 108, 39.4), "a100-40"),
        (properties("NVIDIA A100-SXM4-80GB", (8, 0), 108, 79.1), "a100"),
        (properties("NVIDIA GeForce RTX 4090", (8, 9), 128, 23.6), "4090"),
        (properties("NVIDIA GB200", (10, 0), 152, 184), "gb200"),
        # Not in the table: the same generation, then the size.
        (properties("NVIDIA L40S", (8, 9), 142, 44.4), "4090"),
        (properties("NVIDIA B100", (10, 0), 148, 178), "b200"),
        (properties("AMD Instinct MI325X", (9, 4), 304, 256, gcnArchName="gfx942"), "mi300x"),
    ],
)
def test_the_nearest_known_device(found, key):
    assert gpu_report.nearest_device(found) == key


def result_of(**figures) -> BenchResult:
    row = BenchRow(
        "leanstep", "fast", True, **{"median_s": 3e-3, "peak_bytes": 1500, "host_syncs": 0, **figures}
    )
    absent = BenchRow("leanstep-bf16", "fast", True)
    return BenchResult(
        "toy", "gpu", HERE, [row, absent, BenchRow("peer", "peer", True, median_s=1.0)], [], 500
    )


def prediction(**changes):
    row = {"case": "toy", "size": "gpu", "dtype": "bf16", "impl": "leanstep", "launches": 4, "host_waits": 0}
    return {"rows": [{**row, "above_bytes": 800, "step_s": {"h100": 2e-3, "a100": 4e-3}, **changes}]}


def test_a_figure_stands_beside_its_prediction():
    figures = {row["figure"]: row for row in gpu_report.compare(result_of(), prediction(), "h100")}
    assert len(figures) == 3
    assert figures["time_s"]["ratio"] == pytest.approx(1.5)
    peak = figures["peak above inputs_bytes"]
    assert (peak["measured"], peak["predicted"], peak["ratio"]) == (1000, 800, 1.25)
    assert (figures["host waits"]["measured"], figures["host waits"]["predicted"]) == (0, 0)
    slower = gpu_report.compare(result_of(), prediction(), "a100")[0]
    assert slower["predicted"] == 4e-3 and slower["ratio"] == pytest.approx(0.75)


@pytest.mark.parametrize("changes", [{"size": "tiny"}, {"dtype": "fp32"}, {"case": "other"}])
def test_a_prediction_for_something_else_is_none(changes):
    figures = gpu_report.compare(result_of(), prediction(**changes), "h100")
    assert [row["predicted"] for row in figures] == [None, None, None]


def test_syncs_are_those_that_torch_warns_about(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)

    def step():
        if modes[-1:] == ["warn"]:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            warnings.warn("something else", stacklevel=1)
        return {}

    count, first = gpu_report.count_syncs(step, torch.device("cuda"))
    assert count == 1 and first.startswith("test_gpu_report.py:")
    assert modes == ["warn", 0]


def test_every_case_is_predicted_to_fit_a_card_of_24_gb_in_16_bits():
    rows = gpu_report.load_predictions()["rows"]
    too_large = {
        (row["case"], row["impl"]): row["peak_bytes"] for row in rows if row["peak_bytes"] >= 22 << 30
    }
    assert too_large == {}
    assert {row["dtype"] for row in rows} == {"bf16"}
    # What a GPU will run is what was predicted; cases of packages that are not installed cannot be.
    run = {
        (case.name, case.size_on("cuda"), dtype_name(case.dtype_on("cuda")))
        for case in all_cases().values()
        if case.reference.missing(case.params("tiny"), "cuda") is None
    }
    assert run <= {(row["case"], row["size"], row["dtype"]) for row in rows}


@pytest.mark.timeout(240)
def test_the_shipped_predictions_are_those_of_this_code():
    stub_or_skip()
    pytest.importorskip("triton", reason="Triton is not installed")
    shipped = [row for row in gpu_report.load_predictions()["rows"] if row["case"] == "masked-head"]
    (made,) = gpu_report.predict([get_case("masked-head")])["rows"]
    for figure in ("impl", "dtype", "launches", "host_waits", "peak_bytes"):
        assert [row[figure] for row in shipped] == [made[figure]], figure


def test_what_fell_short_is_said_in_order():
    row = {"case": "toy", "impl": "leanstep"}
    report = {
        "prove": [{**row, "ok": True}, {**row, "ok": False}],
        "syncs": [{**row, "syncs": 2, "predicted": 1, "first_at": "loss.py:7"}],
        "problems": [{"case": "toy", "part": "bench", "trouble": "RuntimeError: no"}],
    }
    said = gpu_report.shortfalls(report)
    assert said[0] == "1 proofs failed, first toy/leanstep"
    assert "toy/leanstep at loss.py:7" in said[1] and said[2] == "toy: bench did not run: RuntimeError: no"
    # A healthy device waits as often as predicted: dpo once, grpo-step 14 times.
    healthy = [{**row, "syncs": 0, "predicted": None}, {**row, "syncs": 14, "predicted": 14}]
    assert gpu_report.shortfalls({"prove": [], "syncs": healthy, "problems": []}) == []
    unknown = [{**row, "syncs": 1, "predicted": None, "first_at": "loss.py:7"}]
    assert len(gpu_report.shortfalls({"prove": [], "syncs": unknown, "problems": []})) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "case: no case 'nope'"),
        (["--device", "cpu"], "--device: expected cuda[:N], got 'cpu'"),
        (["--budget", "0"], "--budget: expected seconds above 0"),
        (["polar", "--size", "huge"], "--size: polar has no 'huge'"),
        (["polar", "--predict", "/no/such/folder/x.json"], "--predict: the folder /no/such/folder does not"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert run(["gpu-report", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Predictions of one case, then the report on the device that they were made for, rehearsed as well."""
    pytest.importorskip("triton", reason="Triton is not installed")
    stub_or_skip()
    folder = tmp_path_factory.mktemp("gpu_report")
    predicted = gpu_report.predict([get_case("transpose-add")], "tiny")
    (folder / "predictions.json").write_text(json.dumps(predicted))
    ran = run_script(SCRIPTS / "gpu_report.py", str(folder), capture=folder, steps=10**6, device="h100")
    assert ran.recording.refused is None, ran.recording.refused
    page = (folder / "index.html").read_text()
    return (
        predicted,
        json.loads((folder / "report.json").read_text()),
        page,
        (folder / "exit_code").read_text(),
    )


def test_predictions_hold_every_device_and_what_a_call_asks_for(written):
    rows = {row["impl"]: row for row in written[0]["rows"]}
    assert set(rows) == {"leanstep", "leanstep-blocked", "limit"}
    fast = rows["leanstep"]
    assert fast["launches"] == 1 and fast["host_waits"] == 0 and fast["dtype"] == "bf16"
    assert {"h100", "a100", "4090", "b200", "mi300x"} <= set(fast["step_s"])
    assert all(0 < seconds < 1e-3 for seconds in fast["step_s"].values())


def test_the_report_measures_what_was_predicted(written):
    """On the rehearsal's clock, from an idle device, a call takes what its prediction says."""
    _, report, _, exit_code = written
    assert report["nearest"] == "h100" and report["problems"] == []
    assert report["accelerator"]["name"] == "NVIDIA H100 80GB HBM3"
    times = {row["impl"]: row for row in report["figures"] if row["figure"] == "time_s"}
    assert set(times) == {"leanstep", "leanstep-blocked", "limit"}
    assert all(0.5 < row["ratio"] < 2 for row in times.values()), times
    assert {row["impl"]: row["syncs"] for row in report["syncs"]} == {"leanstep": 0, "leanstep-blocked": 0}
    assert {row["case"] for row in report["prove"]} == {"transpose-add"}
    assert [result["case"] for result in report["bench"]] == ["transpose-add"]
    assert all(row["ok"] for row in report["prove"])
    # A healthy device.
    assert exit_code == "0"


def test_one_page_shows_figures_bench_and_proofs(written):
    page = written[2]
    assert "gpu-report: measured and predicted" in page and "nearest known device" in page
    assert "Speed against the others" in page and "peak above inputs" in page


@pytest.fixture
def stand_in(monkeypatch):
    """The CPU as the device: only what the device is asked for differs."""
    cuda = SimpleNamespace(name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: cuda)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(gpu_report, "nearest_device", lambda properties: "h100")
    monkeypatch.setattr(gpu_report, "environment", lambda device: {**HERE, "accelerator": {"name": "x"}})


@pytest.mark.parametrize(("predicted", "falls_short"), [(1, False), (2, False), (0, True)])
def test_a_device_that_waits_as_predicted_is_healthy(predicted, falls_short, stand_in, monkeypatch):
    case = register(toy_case("toy"))
    monkeypatch.setattr(gpu_report, "count_syncs", lambda step, device: (1, "loss.py:7"))
    expected = prediction(size="tiny", dtype="fp32", impl="fast", host_waits=predicted) | HERE
    try:
        report = gpu_report.run_report(
            [case], torch.device("cpu"), size="tiny", budget_s=0.01, predictions=expected
        )
    finally:
        unregister("toy")
    assert [(row["syncs"], row["predicted"]) for row in report["syncs"]] == [(1, predicted)]
    assert bool(gpu_report.shortfalls(report)) == falls_short


def test_a_broken_case_is_a_problem_and_the_others_go_on(stand_in, monkeypatch, tmp_path):
    good = register(toy_case("toy-good", implementation("broken", wrong_gradient)))
    monkeypatch.setattr(gpu_report, "count_syncs", lambda step, device: (0, ""))
    try:
        bad = SimpleNamespace(name="toy-bad")
        report = gpu_report.run_report(
            [bad, good], torch.device("cpu"), size="tiny", budget_s=0.01, predictions=prediction() | HERE
        )
    finally:
        unregister("toy-good")
    assert [(p["case"], p["part"]) for p in report["problems"]] == [
        ("toy-bad", part) for part in ("prove", "bench", "syncs")
    ]
    assert [result["case"] for result in report["bench"]] == ["toy-good"]
    assert gpu_report.shortfalls(report)[0].endswith("first toy-good/broken")
    gpu_report.write_report(report, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["problems"] == report["problems"]
    assert "toy-bad" in (tmp_path / "index.html").read_text()


def test_a_case_of_a_gpus_size_is_rehearsed():
    # Its tensors are drawn with a generator and too large for the host.
    from leanstep.rehearse import Request, rehearse

    stub_or_skip()
    settings = {"size": "gpu", "dtype": "bf16"}
    request = Request("transpose-add", case=True, steps=2, settings=settings, implementation="leanstep")
    recording = rehearse(request, quiet=True)
    assert recording.refused is None and len(recording.steps) == 2
