"""The timeline and the snapshot agree with the verdict; the sweep edits arguments and finds what fits."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from rehearse.rehearsed import run_text
from torch.cuda import _memory_viz

from leanstep.cli import run
from leanstep.files import BadInput
from leanstep.rehearse import exports, sweep
from leanstep.rehearse.cuda_allocator import MIB, Settings, memory_of, replay
from leanstep.rehearse.devices import device_named
from leanstep.rehearse.events import Alloc, Free, Kernel, Launch, Recording, Request, Step, StreamWait
from leanstep.rehearse.time_model import seconds
from leanstep.rehearse.what_if import timed_step, update_step

H100 = device_named("h100")
SCRIPT = """\
import os
os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
import torch
model = torch.nn.Linear(2048, 2048).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for i in range(4):
    model(torch.randn(1024 * (i + 1), 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    return run_text(tmp_path_factory.mktemp("exports"), SCRIPT).recording


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_the_snapshot_has_the_peaks_of_the_verdict(recording, settings):
    assert recording.allocator == "expandable_segments:True"
    recording = replace(recording, allocator=settings)
    memory = memory_of(recording, H100.memory_bytes, H100.context_bytes)
    snapshot = exports.memory_snapshot(recording, memory)
    sign = {"alloc": 1, "free_completed": -1}
    mapped = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    peaks = []
    for signs in (sign, mapped):
        level = peak = 0
        for action in snapshot["device_traces"][0]:
            level += signs.get(action["action"], 0) * action["size"]
            peak = max(peak, level)
        peaks.append(peak)
    assert peaks == [memory.allocated, memory.reserved]
    assert "<html" in _memory_viz.trace_plot(snapshot).lower()
    assert _memory_viz.segsum(snapshot)


@pytest.mark.parametrize("expandable", [False, True])
def test_what_a_full_device_gives_back_is_in_the_snapshot(expandable):
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    for seed in range(20):
        draw, held = random.Random(seed), {}
        allocator = exports._Addresses(400 * MIB, Settings(expandable=expandable))
        for number in range(200):
            if held and draw.random() < 0.5:
                key = draw.choice(list(held))
                allocator.release(key, held.pop(key))
            elif allocator.allocate(number, size := 512 * draw.randint(1, 120_000)):
                held[number] = size
        mapped = sum(signs[action["action"]] * action["size"] for action in allocator.actions)
        assert mapped == allocator.reserved, seed


def test_the_timeline_is_a_chrome_trace_of_the_step(recording):
    step = timed_step(recording, H100)
    trace = json.loads(json.dumps(exports.chrome_trace(recording, H100, step)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    end = max(event["ts"] + event["dur"] for event in spans)
    assert end == pytest.approx(update_step(recording, H100, step=step).step_s * 1e6, rel=1e-6)
    assert {"kernel", "cpu_op"} <= {event["cat"] for event in spans}
    kernels = sorted((e["ts"], e["dur"]) for e in spans if e["cat"] == "kernel")
    assert all(a + d <= b + 1e-2 for (a, d), (b, _) in pairwise(kernels))


def test_the_timeline_has_a_row_of_collectives():
    gather = Kernel("collective", 1e9, sizes=(8, 1), name="all_gather")
    product = Kernel("pointwise", 1e9)
    step = [Launch("all_gather", (gather,), None, "forward", 0, mark=1), StreamWait(1, 0)]
    step.append(Launch("mul", (product,), None, "forward", 0))
    made = Recording(Request("train.py"), "2.13", step, steps=[Step(0, 0, 3)])
    spans = [e for e in exports.chrome_trace(made, H100, made.steps[0])["traceEvents"] if e["ph"] == "X"]
    sent, waits = (e for e in spans if e["cat"] == "kernel")
    assert (sent["name"], sent["tid"], waits["tid"]) == ("all_gather (all_gather)", 1000, 0)
    assert sent["dur"] == pytest.approx(seconds(gather, H100) * 1e6, rel=1e-3)
    assert waits["ts"] == pytest.approx(sent["ts"] + sent["dur"], abs=0.01)


def test_each_stream_has_its_own_blocks():
    events = [Alloc(0, 64 * MIB, None, "forward", 0), Free(0, 0), Alloc(1, 64 * MIB, None, "forward", 0, 1)]
    assert replay(events, {}).reserved == 128 * MIB


@pytest.mark.parametrize(
    ("args", "name", "got"),
    [
        (("--batch-size", "4", "--lr", "1"), "batch-size", ("--batch-size", "8", "--lr", "1")),
        (("--batch_size=4",), "batch-size", ("--batch_size=8",)),
        (("batch=4", "x"), "batch", ("batch=8", "x")),
        ((), "batch-size", ("--batch-size", "8")),
    ],
)
def test_an_argument_is_replaced_or_appended(args, name, got):
    assert sweep.with_value(args, name, "8") == got


def searched(largest: int, takes=lambda value: True, first: int = 1) -> tuple[list[int], list[int]]:
    """The values that fit and all that were tried, for a script that `takes` some values only."""
    asked = []

    def judge(value: str):
        asked.append(int(value))
        fits, needed = int(value) <= largest, 1000 * int(value) + 37
        memory = {
            "fits": fits,
            "failed_line": "x:1",
            "advice": "",
            "allocated_bytes": needed,
            "reserved_bytes": needed,
            "context_bytes": 0,
        }
        memory["capacity_bytes"] = 1000 * largest + 500
        return {
            "memory": memory,
            "time": {"step_ms": 1.0, "interval_ms": [1, 1]},
            "refused": None if takes(int(value)) else {"reason": "AssertionError"},
            "steps": 3,
        }

    rows = sweep.run(None, judge, lambda row: None, first)
    return [int(row["value"]) for row in rows if row["fits"]], asked


@pytest.mark.parametrize("largest", [0, 1, 2, 17, 64, 1000])
def test_the_search_ends_at_the_largest_value_that_fits(largest):
    fits, asked = searched(largest)
    assert (fits[-1] if fits else 0) == largest and largest + 1 in asked
    assert len(asked) <= 12


@pytest.mark.parametrize("first", [1, 16, 17, 18, 500])
def test_the_search_begins_at_the_value_of_the_command_line(first):
    fits, asked = searched(17, first=first)
    assert asked[0] == first and fits[-1] == 17 and 18 in asked
    assert sweep.start(("--batch-size", str(first)), "batch_size") == first
    assert sweep.start((f"batch={first}",), "batch") == first
    assert sweep.start(("--batch", "auto"), "batch") == sweep.start((), "batch") == 1


@pytest.mark.parametrize(
    ("takes", "found"),
    [
        (lambda value: 512 % value == 0, 64),  # divides a total batch
        (lambda value: value % 8 == 0, 64),  # whole groups of generations
        (lambda value: value < 5, 4),
        (lambda value: False, 0),
    ],
)
def test_the_search_goes_on_where_the_script_takes_some_values_only(takes, found):
    fits, asked = searched(100, takes)
    assert (fits[-1] if fits else 0) == found and len(asked) <= 14


@pytest.mark.parametrize("text", ["batch", "=4", "batch=", "batch=,"])
def test_a_sweep_names_an_argument_and_values(text):
    with pytest.raises(BadInput, match="--sweep: expected"):
        sweep.parse(text)


def rows_of(*ends: tuple[int, str, bool]) -> list[dict]:
    """Rows of a search: a value, why it ended, and whether the script stopped for another reason."""
    return [
        {"value": str(n), "fits": not why, "reason": why, "ran": ran, "fragmented": "fragmentation" in why}
        for n, why, ran in ends
    ]


def test_the_search_says_what_stopped_the_next_value():
    rows = rows_of((1, "", True), (3, "", True), (4, "the program ended: odd", False))
    assert sweep.conclusion("batch", rows) == "the largest batch that fits: 3; 4: the program ended: odd"
    rows = rows_of((1, "does not fit at x:1", True))
    assert sweep.conclusion("batch", rows) == "no batch fits; 1: does not fit at x:1"


def test_a_search_that_fragmentation_ended_does_not_claim_the_largest():
    why = "fragmentation, PYTORCH_ALLOC_CONF=expandable_segments:True makes it fit"
    said = sweep.conclusion("batch", rows_of((942, "", True), (943, f"does not fit at x:1; {why}", True)))
    assert "largest" not in said and said.startswith(
        f"batch: 942 fits, 943 does not: {why}\n  no larger value"
    )


def test_the_row_of_a_fragmented_value_has_the_remedy():
    def judge(value):
        memory = {"fits": value == "1", "failed_line": "x:1", "advice": "A makes it fit", "context_bytes": 5}
        memory |= {"allocated_bytes": 70, "reserved_bytes": 95, "capacity_bytes": 80}
        return {"memory": memory, "time": {"step_ms": 1.0, "interval_ms": [1, 1]}, "refused": None}

    fits, row = sweep.run(["1", "2"], judge, lambda row: None)
    assert row["reason"] == "does not fit at x:1; fragmentation, A makes it fit" and row["fragmented"]
    assert fits["fits"] and not fits["fragmented"]


def test_a_sweep_shows_the_error_of_a_script_that_takes_no_such_argument(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    assert run(["rehearse", str(script), "--sweep", "batchsize=fit"]) == 3
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith("no value of batchsize could be rehearsed; 1: the program ended with exit code 2")
    assert last.endswith("error: unrecognized arguments: --batchsize 1")
