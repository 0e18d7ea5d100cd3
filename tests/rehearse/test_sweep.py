"""The sweep's engine: the search for the largest value, rows that cannot run, what a cell holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from rehearse.test_verdict import recorded

from leanstep.case import get_case
from leanstep.rehearse.answers.fake_device import RehearsalError
from leanstep.rehearse.devices import device_named
from leanstep.rehearse.events import Recording, Refusal, Request
from leanstep.rehearse.sweep import FIT, LARGEST, Sweep, _drop_unpriced_times, largest_fitting, run_sweep

ROOM = 1_000_000
GROWTH: dict[str, Callable[[int], int]] = {
    "a line": lambda v: 1000 + 20 * v,
    "steps": lambda v: 1000 + 2048 * (v // 100),
    "a square": lambda v: 10 + v * v // 50,
    "tiles up to a budget": lambda v: 500 + 40 * min(v, 3000) + 3 * v,
}


@pytest.mark.parametrize("growth", GROWTH)
@pytest.mark.parametrize("start", [1, 7, 2048, 10_000_000])
def test_the_largest_value_that_fits(growth: str, start: int):
    needed, probed = GROWTH[growth], []

    def probe(value: int) -> tuple[bool, int]:
        probed.append(value)
        return needed(value) <= ROOM, needed(value)

    got = largest_fitting(probe, ROOM, start)
    assert needed(got) <= ROOM < needed(got + max(1, got // 100))
    assert got in probed and len(probed) == len(set(probed)) <= 25


def test_a_line_takes_few_rehearsals():
    probed = []

    def probe(value: int) -> tuple[bool, int]:
        probed.append(value)
        return 1000 + 20 * value <= ROOM, 1000 + 20 * value

    largest_fitting(probe, ROOM, 2048)
    assert len(probed) <= 4


def test_nothing_fits_or_everything():
    assert largest_fitting(lambda value: (False, 10**9), ROOM, 300) == 0
    assert largest_fitting(lambda value: (True, 10), ROOM, 300) == LARGEST


def sweep(values: tuple | str, *implementations: str, devices: str = "h100", **options) -> Sweep:
    case = get_case("logprob-linear")
    request = Request(case.name, case=True, steps=2, settings={"vocab": 64})
    rows = tuple(case.implementation(name) for name in implementations)
    judged = tuple(device_named(name) for name in devices.split(","))
    return Sweep(case, request, "tokens", values, rows, judged, **options)


def test_every_implementation_at_every_value():
    asked: list[Request] = []

    def rehearse(request: Request) -> Recording:
        asked.append(request)
        return replace(recorded(), request=request)

    reported: list[tuple[str, float]] = []
    rows = run_sweep(
        sweep((64, 128), "reference", "leanstep", devices="h100,a100"),
        rehearse,
        lambda what, share: reported.append((what, share)),
    )
    assert [(r.implementation, r.settings["tokens"], r.settings["vocab"]) for r in asked] == [
        ("reference", 64, 64),
        ("reference", 128, 64),
        ("leanstep", 64, 64),
        ("leanstep", 128, 64),
    ]
    assert reported == [("reference", 0.0), ("leanstep", 0.5)]
    cell = rows[1]["cells"][0]
    assert cell["value"] == 64 and cell["peak_bytes"] == recorded().peak_bytes <= cell["reserved_bytes"]
    assert sum(cell["categories"].values()) == cell["peak_bytes"] >= cell["largest_buffer_bytes"] > 0
    assert list(cell["devices"]) == ["h100", "a100"]
    assert all(there["fits"] and there["step_ms"] > 0 for there in cell["devices"].values())


def test_what_is_reserved_is_not_there_for_the_case():
    h100 = device_named("h100")
    room = recorded().peak_bytes // 2
    small = sweep((64,), "leanstep", reserve_bytes=h100.memory_bytes - h100.context_bytes - room)
    (row,) = run_sweep(small, lambda request: recorded(), lambda what, share: None)
    assert row["cells"][0]["devices"]["h100"] == {"fits": False, "step_ms": None, "bound_by": None}


@pytest.mark.parametrize("values", [(64, 128), FIT])
def test_a_row_that_cannot_run_says_why(values: tuple | str):
    def refuse(request: Request) -> Recording:
        if request.implementation == "reference":
            raise RehearsalError("logprob-linear, reference: this torch has none")
        return Recording(request, "2.13", refused=Refusal(None, "reads data_ptr()"), ended="refused")

    rows = run_sweep(sweep(values, "reference", "leanstep"), refuse, lambda what, share: None)
    assert {cell["why"] for cell in rows[0]["cells"]} == {"this torch has none"}
    assert {cell["why"] for cell in rows[1]["cells"]} == {"reads data_ptr()"}


def test_a_missing_package_needs_no_rehearsal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    (row,) = run_sweep(
        sweep((64, 128), "trl-chunked"), lambda request: pytest.fail("rehearsed"), lambda what, share: None
    )
    assert row["cells"] == [{"value": v, "why": "trl is not installed"} for v in (64, 128)]


def test_an_engine_that_cannot_start_is_no_row():
    def broken(request: Request) -> Recording:
        raise RehearsalError("no C++ compiler")

    with pytest.raises(RehearsalError, match="no C"):
        run_sweep(sweep((64,), "reference"), broken, lambda what, share: None)


def test_a_peer_whose_products_were_not_seen_has_no_time():
    def cell(flops: float, value: int = 4) -> dict:
        there = {"fits": True, "step_ms": 2.0, "bound_by": "device"}
        return {"value": value, "why": None, "flops": flops, "devices": {"h100": there}}

    cells = [
        cell(400.0),
        cell(300.0),
        cell(140.0),
        cell(160.0),
        {"value": 4, "why": "no package"},
        cell(500.0, 40),
    ]
    _drop_unpriced_times(["reference", "fast", *["peer"] * 4], cells)
    times = [c["devices"]["h100"]["step_ms"] if c["why"] is None else "-" for c in cells]
    # Half of 300 is needed; the last cell is of a value ten times as large.
    assert times == [2.0, 2.0, None, 2.0, "-", None]
