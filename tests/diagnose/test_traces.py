"""Findings from traces: hand-made ones of a GPU, every microsecond known, and what a reader refuses."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest
from diagnose.trace_maker import TO_HOST, GpuTrace, waiting

from leanstep import cli
from leanstep.diagnose.traces import trace_file
from leanstep.diagnose.traces.trace_file import read_trace
from leanstep.diagnose.traces.trace_report import TraceRun

PAGEABLE = "Memcpy HtoD (Pageable -> Device)"


def found(path: Path, rule: str) -> list:
    return [finding for finding in TraceRun(str(path)).findings() if finding.rule == rule]


@pytest.mark.parametrize(
    ("vendor", "sync", "copy"),
    [("cuda", "StreamSynchronize", TO_HOST), ("hip", "StreamSynchronize", "CopyDeviceToHost")],
)
def test_a_wait_costs_what_the_device_idles(tmp_path: Path, vendor: str, sync: str, copy: str) -> None:
    path = waiting(vendor, sync, copy).write(tmp_path / "t.json")
    (finding,) = TraceRun(str(path)).findings()
    assert (finding.rule, finding.count, finding.counts) == ("host-sync", 1, [1, 1])
    assert finding.line.place == "aten::item > aten::_local_scalar_dense"
    assert finding.seconds == pytest.approx(43e-6)
    assert finding.share == pytest.approx(0.043)
    assert (finding.basis, finding.confidence) == ("measured", "high")
    assert "waits 94 µs" in finding.what


def test_graphs_compiled_regions_and_other_devices_are_named(tmp_path: Path) -> None:
    """The busiest device is judged, as if the other one were not in the trace."""
    trace = waiting("cuda", "StreamSynchronize", TO_HOST)
    alone = TraceRun(str(trace.write(tmp_path / "t.json")))
    assert {note["kind"] for note in alone.not_seen} == {"dropped"}
    trace.op("Torch-Compiled Region: 0/0", 140, 149)
    trace.call("GraphLaunch", 141, 142)
    trace.add("kernel", "kernel", 125, 160, tid=7, device=1, stream=7, correlation=trace.links)
    run = TraceRun(str(trace.write(tmp_path / "t.json")))
    assert {note["kind"] for note in run.not_seen} == {"dropped", "rank", "cuda-graph", "compiled"}
    (one,), (other,) = alone.findings(), run.findings()
    assert (one.line, one.count, one.seconds) == (other.line, other.count, other.seconds)


def test_a_copy_that_blocks_in_one_call_is_a_wait(tmp_path: Path) -> None:
    """ROCm's `hipMemcpyWithStream` copies and waits at once."""
    trace = GpuTrace("hip")
    for number in range(2):
        at = 1000.0 * number
        trace.step(number, at, at + 1000)
        trace.launch(at + 12, at + 20, at + 120)
        trace.op("aten::_local_scalar_dense", at + 31, at + 134)
        trace.copy("MemcpyWithStream", at + 32, at + 130, "CopyDeviceToHost", at + 120, at + 122)
        trace.launch(at + 155, at + 165, at + 1018)
    (finding,) = found(trace.write(tmp_path / "t.json"), "host-sync")
    assert (finding.count, finding.seconds) == (1, pytest.approx(43e-6))


def test_copies_from_pageable_memory_block(tmp_path: Path) -> None:
    trace = GpuTrace()
    for number in range(2):
        at = 1000.0 * number
        trace.step(number, at, at + 1000)
        trace.launch(at + 2, at + 19, at + 25)
        for name in ("aten::to", "aten::_to_copy", "aten::copy_"):
            trace.op(name, at + 28, at + 75)
        trace.copy("MemcpyAsync", at + 30, at + 60, PAGEABLE, at + 40, at + 55, size=4096)
        trace.call("StreamSynchronize", at + 61, at + 70)
        trace.launch(at + 80, at + 90, at + 1018)
    (finding,) = TraceRun(str(trace.write(tmp_path / "t.json"))).findings()
    assert (finding.rule, finding.count, finding.bytes) == ("blocking-copy", 1, 4096)
    # The device ran dry before the copy because the host was late, and after it because the host waited.
    assert finding.seconds == pytest.approx(35e-6)


def test_pinned_copies_and_queued_kernels_are_nobodys_fault(tmp_path: Path) -> None:
    trace = GpuTrace()
    for number in range(2):
        at = 1000.0 * number
        trace.step(number, at, at + 1000)
        for name in ("aten::to", "aten::_to_copy", "aten::copy_"):
            trace.op(name, at + 2, at + 8)
        trace.copy("MemcpyAsync", at + 3, at + 6, "Memcpy HtoD (Pinned -> Device)", at + 30, at + 60)
        # Launched long before the device ran dry: it waited for something else.
        trace.op("aten::mm", at + 10, at + 20)
        trace.launch(at + 12, at + 400, at + 1029)
    assert TraceRun(str(trace.write(tmp_path / "t.json"))).findings() == []


def test_slow_launches_are_one_stretch(tmp_path: Path) -> None:
    trace = GpuTrace()
    for number in range(2):
        at = 1000.0 * number
        trace.step(number, at, at + 1000)
        for i in range(40):
            trace.op("aten::add", at + 9 + 20 * i, at + 13 + 20 * i)
            trace.launch(at + 10 + 20 * i, at + 14 + 20 * i, at + 16 + 20 * i)
        trace.op("aten::mm", at + 799, at + 803)
        trace.launch(at + 800, at + 805, at + 1012)
    (finding,) = TraceRun(str(trace.write(tmp_path / "t.json"))).findings()
    assert (finding.rule, finding.count, finding.line.place) == ("launch-bound", 41, "forward")
    assert finding.seconds == pytest.approx((39 * 18 + 9) * 1e-6)
    assert finding.evidence["by"] == {"add": 39, "mm": 1}


@pytest.mark.parametrize(
    ("note", "rule"), [("", "op-storm"), ("Optimizer.step#SGD.step", "unbatched-optimizer")]
)
def test_idle_time_goes_to_the_loop_that_makes_it(tmp_path: Path, note: str, rule: str) -> None:
    trace = GpuTrace()
    for number in range(2):
        at = 4000.0 * number
        trace.step(number, at, at + 4000)
        if note:
            trace.note(note, at + 5, at + 3990)
        for i in range(120):
            trace.op("aten::add_", at + 9 + 20 * i, at + 13 + 20 * i, dims=[[64], [64]])
            trace.launch(at + 10 + 20 * i, at + 14 + 20 * i, at + 16 + 20 * i)
        trace.launch(at + 2385, at + 2396, at + 4012)
    (finding,) = TraceRun(str(trace.write(tmp_path / "t.json"))).findings()
    assert (finding.rule, finding.count) == (rule, 120)
    # 120 kernels of 2 µs and 119 gaps of 18; the last gap ends with a launch of no op of the loop's.
    assert finding.seconds == pytest.approx((240 + 119 * 18) * 1e-6)
    assert finding.line.place == (f"{note} > aten::add_" if note else "aten::add_")


def test_a_gap_between_steps_is_the_loaders(tmp_path: Path) -> None:
    trace = GpuTrace()
    for number in range(3):
        at = 1000.0 * number
        trace.step(number, at, at + 1000)
        trace.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at + 5, at + 305)
        trace.op("aten::mm", at + 308, at + 315)
        trace.launch(at + 310, at + 320, at + 998)
    (finding,) = TraceRun(str(trace.write(tmp_path / "t.json"))).findings()
    assert (finding.rule, finding.seconds) == ("step-gap", pytest.approx(322e-6))
    assert finding.evidence["by"] == {"DataLoader": 1}


def test_shapes_tell_the_vocabulary_and_the_layout(tmp_path: Path) -> None:
    trace = GpuTrace()
    for number in range(2):
        at = 1000.0 * number
        trace.step(number, at, at + 1000)
        trace.op("aten::mm", at + 10, at + 20, dims=[[1024, 64], [64, 8192]])
        trace.launch(at + 12, at + 15, at + 115)
        trace.op(
            "aten::_log_softmax",
            at + 30,
            at + 40,
            dims=[[1024, 8192], [], []],
            types=["float", "Scalar", "Scalar"],
        )
        trace.launch(at + 32, at + 115, at + 215)
        trace.op("aten::clone", at + 50, at + 60, dims=[[4096, 1024], []], types=["float", "Scalar"])
        strides = [[1024, 1], [1, 4096]]
        trace.op("aten::copy_", at + 52, at + 59, dims=[[4096, 1024]] * 2, **{"Input Strides": strides})
        trace.launch(at + 54, at + 215, at + 1014)
    findings = TraceRun(str(trace.write(tmp_path / "t.json"))).findings()
    assert [(f.rule, f.count, f.line.place) for f in findings] == [
        ("transposed-copy", 1, "aten::clone"),
        ("full-vocab", 1, "aten::_log_softmax"),
    ]
    assert [f.seconds for f in findings] == [pytest.approx(799e-6), pytest.approx(100e-6)]
    assert findings[1].bytes == 1024 * 8192 * 4


@pytest.mark.parametrize(
    "twice", [False, True], ids=["one frame", "and the function inside, as torch 2.8 has it"]
)
def test_frames_give_the_function(tmp_path: Path, monkeypatch, twice: bool) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "def step(x):\n    y = x @ x\n    z = y.sum()\n    return z.item()\n\n\nstep(1)\n"
    )
    trace = waiting("cuda", "StreamSynchronize", TO_HOST)
    for number in range(2):
        at = 1000.0 * number
        trace.frame("train.py(1): step", at + 5, at + 980)
        if twice:
            trace.frame("<function step at 0x7f67a046cc20>", at + 6, at + 980)
        trace.frame("<built-in method item of Tensor object at 0x7f00>", at + 29, at + 136)
    (finding,) = TraceRun(str(trace.write(tmp_path / "t.json"))).findings()
    assert (finding.line.place, finding.line.code) == ("train.py:1", "def step(x):")


@pytest.mark.parametrize(
    ("frame", "place", "code"),
    [
        # Frames that were running when the profiler started carry the line of that moment.
        ("train.py(3): step", "train.py:1", "def step(x):"),
        ("train.py(7): <module>", "train.py", ""),
        # Another version of the file: the name of the trace, without this one's code.
        ("train.py(6): step", "train.py:6", ""),
        ("{folder}/train.py(1): step", "train.py:1", "def step(x):"),
        # An installed package, of another version; Python's own library is no place.
        ("_pytest/main.py(3): wrap", "_pytest/main.py:3", ""),
        ("threading.py(3): run", "aten::item > aten::_local_scalar_dense", ""),
    ],
)
def test_a_place_is_a_function_never_a_guessed_line(
    tmp_path: Path, monkeypatch, frame: str, place: str, code: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "def step(x):\n    y = x @ x\n    z = y.sum()\n    return z.item()\n\n\nstep(1)\n"
    )
    trace = waiting("cuda", "StreamSynchronize", TO_HOST)
    trace.frame(frame.format(folder=tmp_path), 0, 1990)
    (finding,) = TraceRun(str(trace.write(tmp_path / "t.json"))).findings()
    assert (finding.line.place, finding.line.code) == (place, code)


def test_the_call_stacks_of_older_traces_have_the_running_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("def step(x):\n    y = x @ x\n    return y.item()\n\n\nstep(1)\n")
    trace = waiting("cuda", "StreamSynchronize", TO_HOST)
    for event in trace.events:
        if event["cat"] == "cpu_op":
            event["args"]["Call stack"] = "_pytest/main.py(4): wrap;train.py(3): step;train.py(6): <module>"
    (finding,) = TraceRun(str(trace.write(tmp_path / "t.json"))).findings()
    assert (finding.line.place, finding.line.library) == ("_pytest/main.py:4", True)
    assert [(line.place, line.code) for line in finding.callers] == [("train.py:3", "return y.item()")]


def test_the_backward_has_the_function_of_its_forward(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("def step(x, w):\n    y = x @ w\n    return y.sum()\n")
    trace = GpuTrace()
    for number in range(2):
        at = 9000.0 * number
        trace.step(number, at, at + 9000)
        trace.frame("train.py(1): step", at + 5, at + 4980)
        for i in range(60):
            number_of_node = 100 * number + i
            start = at + 10 + 20 * i
            trace.op("aten::mm", start, start + 4, dims=[[8, 8]] * 2, **{"Sequence number": number_of_node})
            trace.launch(start + 1, start + 5, start + 6)
            start += 2000
            node = {"Sequence number": number_of_node, "Fwd thread id": 1}
            for name in ("autograd::engine::evaluate_function: MmBackward0", "MmBackward0"):
                trace.add("cpu_op", name, start, start + 8, tid=2, **node)
            trace.op("aten::mm", start + 1, start + 7, dims=[[8, 8]] * 2, tid=2)
            trace.launch(start + 2, start + 5, start + 6, tid=2)
        trace.launch(at + 3990, at + 3995, at + 9011)
    storms = found(trace.write(tmp_path / "t.json"), "op-storm")
    assert [(f.line.place, f.count, f.evidence["backward_ops"]) for f in storms] == [("train.py:1", 60, 60)]


# Reading


def columns(path: Path) -> list:
    trace = read_trace(str(path))
    names = [trace.names.texts[i] for i in trace.name]
    return [names, list(trace.kind), list(trace.start), list(trace.duration), list(trace.link)]


@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
def test_pieces_of_any_size_read_the_same(tmp_path: Path, monkeypatch, chunk: int) -> None:
    trace = waiting("cuda", "StreamSynchronize", TO_HOST)
    trace.events[0]["name"] = 'ü \\" { [ ] } , é\n'
    path = trace.write(tmp_path / "t.json", deviceProperties=[{"name": "A, {B}"}], number=-1.5e3)
    whole = columns(path)
    packed, bare = tmp_path / "t.json.gz", tmp_path / "bare.json"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    bare.write_text(json.dumps(trace.events))
    monkeypatch.setattr(trace_file, "CHUNK", chunk)
    assert columns(path) == columns(packed) == columns(bare) == whole
    assert read_trace(str(packed)).facts["deviceProperties"] == [{"name": "A, {B}"}]


def test_reading_keeps_a_small_part_of_the_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(trace_file, "CHUNK", 1 << 16)
    trace = GpuTrace()
    for i in range(4_000):
        dims = [[64, 128], [128, 256], []]
        trace.op("aten::addmm", 10.0 * i, 10.0 * i + 5, dims=dims, **{"External id": i, "Ev Idx": i})
        trace.launch(10.0 * i + 1, 10.0 * i + 4, 10.0 * i + 6)
    path = trace.write(tmp_path / "t.json")
    size = path.stat().st_size
    del trace
    tracemalloc.start()
    held = read_trace(str(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(held) == 12_000
    # One chunk of text in two forms, and forty bytes an event.
    assert peak < 5 * trace_file.CHUNK + 0.35 * size


@pytest.mark.parametrize("mark", ["ProfilerStep#", "Optimizer.step#Adam.step"])
def test_of_too_many_events_the_steps_in_the_middle_are_held(tmp_path: Path, monkeypatch, mark: str) -> None:
    trace = waiting("cuda", "StreamSynchronize", TO_HOST, num_steps=40)
    if mark.startswith("Optimizer"):
        for event in trace.events:
            event["name"] = mark if event["name"].startswith("ProfilerStep#") else event["name"]
    trace.frame("train.py(1): <module>", 0.0, 40_000.0)
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": trace.events[::-1]}).encode()))
    whole = TraceRun(str(path))
    monkeypatch.setattr(trace_file, "MAX_EVENTS", 200)
    monkeypatch.setattr(trace_file, "CHUNK", 1 << 12)
    part = TraceRun(str(path))
    held = part.timeline.trace
    # Eleven events a step: those of the steps that are judged, and what the last of them launched.
    assert held.part is not None and 10 <= len(part.steps) < 20 and len(held) < 240
    assert part.facts[1:3] == [
        f"{len(held)} events held",
        f"steps {held.part.first} to {held.part.last} of {len(whole.steps)}",
    ]
    for one, other in zip(whole.findings(), part.findings(), strict=True):
        assert (one.rule, one.line, one.count, one.seconds) == (
            other.rule,
            other.line,
            other.count,
            other.seconds,
        )


def test_a_large_trace_without_steps_is_read_whole(tmp_path: Path, monkeypatch) -> None:
    trace = waiting("cuda", "StreamSynchronize", TO_HOST)
    trace.events = [event for event in trace.events if not event["name"].startswith("ProfilerStep#")]
    path = trace.write(tmp_path / "t.json")
    monkeypatch.setattr(trace_file, "MAX_EVENTS", 5)
    assert len(read_trace(str(path))) == len(trace.events)


BAD = [
    (b"", "is empty"),
    (b"hello", "is not a torch.profiler trace"),
    (b'{"a": 1}', "it has no traceEvents"),
    (b'{"traceEvents": []}', "none of its 0 events"),
    (b'{"traceEvents": [{"ph": "M", "name": "x"}]}', "none of its 1 events"),
    (
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur"',
        "is truncated: no event",
    ),
    (
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 2}',
        "1 events and 77 bytes",
    ),
    # The time is in the bytes and so in the test's name: workers that collect at different times must agree.
    (gzip.compress(b'{"traceEvents": [' + b'{"ph": "X"}, ' * 999, mtime=0)[:-30], "is truncated"),
    (gzip.compress(b"{}", mtime=0)[:8], "is truncated"),
    (
        b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2, "args": {}}]}',
        "has no host ops",
    ),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_bad_files_are_one_line(tmp_path: Path, capsys, content: bytes, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    assert cli.run(["diagnose", "--trace", str(path), "--json", str(tmp_path / "out.json")]) == 2
    out, error = capsys.readouterr()
    assert error.startswith("leanstep: --trace: ") and error.count("\n") == 1 and message in error
    assert out == "" and not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["t.json", "-m", "x"], "-m: does not fit --trace"),
        (["t.json", "--steps", "5"], "--steps: does not fit --trace"),
        (["t.json", "--device", "h100"], "--device: does not fit --trace"),
        (["train.py"], "expected trace.json"),
        (["t.json", "t.json"], "SCRIPT: does not fit --trace"),
        (["nowhere.json"], "cannot read nowhere.json"),
        (["."], "is a folder"),
    ],
)
def test_wrong_options_are_one_line(
    tmp_path: Path, monkeypatch, capsys, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    waiting("cuda", "StreamSynchronize", TO_HOST).write(Path("t.json"))
    assert cli.run(["diagnose", "--trace", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
