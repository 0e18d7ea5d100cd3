"""The bench: JSON format, no ratio for a wrong result, missing peers, host reads."""

from __future__ import annotations

import io
import time
from dataclasses import replace

import pytest
from rich.console import Console
from toy_case import fast, implementation, syncing, toy_case, wrong_gradient

from leanstep.measure import side_by_side
from leanstep.measure.side_by_side import run_bench
from leanstep.measure.timing import Timing
from leanstep.report.tables import bench_table

ROW_KEYS = {
    "impl", "kind", "available", "median_s", "p20_s", "p80_s", "time_ratio", "peak_bytes", "extra_bytes",
    "memory_ratio", "host_syncs", "max_error", "note",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch):
    """Disable the time box, because a busy machine is slow; only the tests of the time box use it."""
    monkeypatch.setattr(side_by_side, "MIN_BOX_S", 1_000.0)


@pytest.fixture
def box_of_two_seconds(monkeypatch):
    monkeypatch.setattr(side_by_side, "MIN_BOX_S", 2.0)


def rows_of(case, **options):
    result = run_bench(case, "odd", budget_s=0.2, **options)
    return result, {row["impl"]: row for row in result.to_json()["rows"]}


@pytest.fixture(scope="module")
def together():
    """Run one bench for all tests that only read rows: a correct path, a wrong one, one with host reads."""

    def annotate(rows):
        return {"fast": f"{rows['fast']['median_s'] / rows['limit']['median_s']:.1f}× the limit"}

    sized = implementation("sized", fast, unavailable=lambda p: "too large" if p["rows"] > 10**6 else None)
    reading, broken = implementation("syncing", syncing), implementation("broken", wrong_gradient)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_by_side, "MIN_BOX_S", 1_000.0)
        patch.delenv("OMP_WAIT_POLICY", raising=False)
        return rows_of(
            toy_case("toy", implementation("fast", fast), reading, broken, sized, annotate=annotate)
        )


def test_the_object_has_exactly_the_contracts_keys(together):
    result, rows = together
    assert set(result.to_json()) == {"leanstep", "torch", "device", "threads", "case", "size", "rows"}
    assert all(set(row) == ROW_KEYS for row in rows.values())


def test_ratios_are_against_the_reference_of_the_same_run(together):
    _, rows = together
    assert rows["reference"]["time_ratio"] == 1.0
    ratio = rows["reference"]["median_s"] / rows["fast"]["median_s"]
    assert rows["fast"]["time_ratio"] == ratio
    assert rows["fast"]["max_error"] < 1e-5


def test_a_wrong_fast_path_gets_no_ratio(together):
    result, rows = together
    assert rows["broken"]["time_ratio"] is None and rows["broken"]["memory_ratio"] is None
    assert "parity FAILED" in rows["broken"]["note"]
    assert result.failed


def test_an_absent_peer_is_reported_as_absent(together):
    _, rows = together
    assert rows["absent-peer"]["available"] is False
    assert rows["absent-peer"]["note"] == "no_such_module_anywhere is not installed"
    assert rows["absent-peer"]["median_s"] is None


def test_host_reads_are_counted_for_one_call(together):
    _, rows = together
    assert rows["fast"]["host_syncs"] == 0 and rows["syncing"]["host_syncs"] == 2


def test_only_the_chosen_rows_and_the_reference_run():
    _, rows = rows_of(toy_case(), only=("limit",))
    assert list(rows) == ["reference", "limit"]


def test_a_row_on_request_runs_if_it_is_named():
    case = toy_case(
        "toy", implementation("fast", fast), implementation("slow", fast, on_request="it is slow")
    )
    _, rows = rows_of(case)
    assert (rows["slow"]["available"], rows["slow"]["note"]) == (False, "it is slow; runs if it is named")
    _, rows = rows_of(case, only=("slow",))
    assert rows["slow"]["available"] and rows["slow"]["time_ratio"] > 0


def test_a_scaled_row_reports_the_time_of_the_whole_workload(monkeypatch):
    timing = Timing(median_s=0.5, p20_s=0.25, p80_s=0.75, samples=3, first_call_s=0.5)
    monkeypatch.setattr(side_by_side, "interleave", lambda steps, **_: dict.fromkeys(steps, timing))
    part = implementation("part", fast, time_scale=10.0, note="a tenth of the rows, times ten")
    _, rows = rows_of(toy_case("toy", implementation("fast", fast), part))
    times = ("median_s", "p20_s", "p80_s", "time_ratio")
    assert [rows["fast"][name] for name in times] == [0.5, 0.25, 0.75, 1.0]
    assert [rows["part"][name] for name in times] == [5.0, 2.5, 7.5, 0.1]
    assert rows["part"]["note"] == "a tenth of the rows, times ten"


def test_notes_can_be_added_from_the_measured_rows(together):
    _, rows = together
    assert rows["fast"]["note"].endswith("× the limit")


def test_a_row_that_asks_for_its_size_is_asked_with_one(together):
    _, rows = together
    assert rows["sized"]["available"] and rows["sized"]["max_error"] < 1e-5


def endless(tensors, constants):
    while True:
        time.sleep(0.005)


def test_a_row_past_its_time_box_is_given_up_and_the_others_are_not(box_of_two_seconds):
    slow = implementation("slow-peer", endless, kind="peer")
    result, rows = rows_of(toy_case("toy", implementation("fast", fast), slow))
    assert rows["slow-peer"]["median_s"] is None and rows["slow-peer"]["note"].startswith("> 2 s: given up")
    assert rows["slow-peer"]["available"] and rows["slow-peer"]["peak_bytes"] is None
    assert rows["fast"]["time_ratio"] and rows["fast"]["peak_bytes"] and not result.failed
    out = io.StringIO()
    Console(file=out, width=160).print(bench_table(result.to_json()))
    line = next(line for line in out.getvalue().splitlines() if line.startswith("slow-peer"))
    assert "> 2 s" in line


def test_memory_past_its_time_box_is_given_up_and_the_time_stays(box_of_two_seconds, monkeypatch):
    peak = lambda step, inputs, device, earlier=None: earlier and endless({}, {})  # noqa: E731
    monkeypatch.setattr(side_by_side, "measure_peak", peak)
    _, rows = rows_of(toy_case(), only=("fast",))
    assert rows["fast"]["median_s"] and rows["fast"]["peak_bytes"] is None
    assert "> 2 s: memory not measured" in rows["fast"]["note"]


def test_an_endless_fp64_reference_costs_the_errors_and_nothing_else(box_of_two_seconds):
    case = replace(toy_case(), truth=lambda workload: lambda: endless({}, {}), prove_sizes=())
    _, rows = rows_of(case)
    assert rows["fast"]["max_error"] is None and rows["fast"]["time_ratio"]
    assert "> 2 s: no fp64 reference" in rows["reference"]["note"]
