"""What-ifs on hand-made recordings, the JSON object and the text."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from leanstep import units
from leanstep.rehearse import verdict, what_if
from leanstep.rehearse.devices import DEVICES
from leanstep.rehearse.events import (
    Alloc,
    Assumed,
    Free,
    HostWait,
    Kernel,
    Launch,
    Recording,
    Refusal,
    Region,
    Request,
    Step,
    Storage,
)
from leanstep.rehearse.time_model import seconds
from leanstep.tape.lines import Line

H100, A100 = DEVICES["h100"], DEVICES["a100"]
MIB = 2**20
MODEL, LOSS, UPDATE = (Line("train.py", n, "main") for n in (4, 5, 6))
PRODUCT = Kernel("gemm", 3 * 2.0 * 4096**2, 2.0 * 4096**3, "bfloat16", (1, 4096, 4096, 4096), 1, 2)
PASS = Kernel("pointwise", 64.0 * MIB)


def call(kernel: Kernel, line: Line, phase: str, step: int, reads=(), writes=(), region: int = 0) -> Launch:
    traffic = tuple(32 * MIB for _ in (*reads, *writes))
    return Launch("op", (kernel,), line, phase, step, tuple(reads), tuple(writes), traffic, region)


def recorded(steps: int = 3, waits: int = 1, region: int = 0, state_bytes: int = 64 * MIB) -> Recording:
    """Product, three passes (1 -> 2 -> 3 -> 4), a sync, a product that reads 4, an optimizer's pass."""
    made = Recording(Request("train.py", device="h100"), "2.13")

    def born(number: int, nbytes: int, category: str, dtype: str = "float32") -> None:
        made.storages[number] = Storage(number, nbytes, (nbytes // 4,), dtype, MODEL, "forward", 0, category)
        made.events.append(Alloc(number, nbytes, MODEL, "forward", 0))

    born(0, 32 * MIB, "parameter")
    born(7, state_bytes, "optimizer state")
    born(8, 32 * MIB, "gradient")
    for number in range(1, 6):
        born(number, 32 * MIB, "activation")
    for step in range(steps):
        first = len(made.events) if step else 0
        made.events += [
            call(PRODUCT, MODEL, "forward", step, (0,), (1,), region),
            call(PASS, MODEL, "forward", step, (1,), (2,), region),
            call(PASS, MODEL, "forward", step, (2,), (3,), region),
            call(PASS, MODEL, "forward", step, (3,), (4,), region),
            *[HostWait("item", LOSS, "forward", step)] * waits,
            call(PRODUCT, MODEL, "backward", step, (4,), (5,), region),
            call(PASS, UPDATE, "optimizer", step, (0, 7, 8), (0, 7)),
            call(PASS, UPDATE, "optimizer", step, (0, 7, 8), (0, 7)),
        ]
        made.steps.append(Step(step, first, len(made.events)))
    made.events.append(Free(1, steps))
    made.peak_bytes = sum(s.nbytes for s in made.storages.values())
    made.ended = "steps"
    if region:
        made.regions[region] = Region(region, "forward", MODEL, steps)
    return made


def test_without_its_waits_a_step_is_never_longer_and_a_line_is_found_by_name():
    made = recorded(waits=3)
    now = what_if.update_step(made, H100)
    free = what_if.update_seconds(made, H100, what_if.without_waits())
    other = what_if.update_seconds(made, H100, what_if.without_waits("train.py:99 main"))
    assert now is not None and free is not None and other is not None
    assert free < now.step_s == pytest.approx(other) and now.waits == 3
    (gain,) = what_if.sync_gains(made, H100, now)
    assert (gain.line, gain.kind, gain.count) == ("train.py:5 main", "item", 3)
    assert gain.saved_ms == pytest.approx((now.step_s - free) * 1e3)


def test_a_fused_run_reads_its_input_and_writes_what_is_read_later():
    step = recorded(waits=0).steps[-1]
    events = recorded(waits=0).events[step.first : step.last]
    launches = [e for e in what_if.fused(events) if isinstance(e, Launch)]
    assert [e.name for e in launches] == ["op", "fused", "op", "fused"]
    # 1 comes in and 4 goes out; 2 and 3 never leave the kernel. The product is padded.
    assert launches[1].kernels[0].nbytes == 64 * MIB
    assert launches[0].kernels[0].alignment == 16
    # The optimizer's two passes read three tensors, then one that the first did not write; both that are
    # updated in place are written.
    assert launches[3].kernels[0].nbytes == (3 + 1 + 2) * 32 * MIB


def test_padding_copies_the_operands_that_have_an_odd_size():
    m, n, k = 8192, 50257, 768
    odd = Kernel("gemm", 2.0 * (m * n + m * k + n * k), 2.0 * m * n * k, "bfloat16", (1, m, n, k), 1, 2)
    even = PRODUCT._replace(alignment=16)
    events = [call(kernel, MODEL, "forward", 0, (0,), (1,), 1) for kernel in (odd, even)]
    regions = {1: Region(1, "forward", MODEL, 1)}
    (copied, product), (same,) = (e.kernels for e in what_if.fused(events, regions))
    # Only the second operand has the odd side: read and written in bf16.
    assert (copied.nbytes, product.alignment, same) == (2 * 2 * n * k, 16, even)
    regions[1] = regions[1]._replace(padded=False)
    assert [e.kernels for e in what_if.fused(events, regions)] == [(odd,), (even,)]


def test_a_gather_joins_a_fused_run_and_reads_what_it_takes():
    rows = Launch("gather", (Kernel("gather", 2.0 * MIB),), MODEL, "forward", 0, (4,), (9,), (32 * MIB, MIB))
    events = [
        call(PASS, MODEL, "forward", 0, (1,), (2,)),
        rows,
        call(PRODUCT, MODEL, "forward", 0, (9,), (5,)),
    ]
    (run, _) = what_if.fused(events)
    # 1 is read, a part of 4 is read, 9 is written for the product; 2 is nobody's.
    assert run.kernels[0].nbytes == (32 + 1 + 1) * MIB


def test_a_sync_ends_a_fused_run():
    made = recorded(waits=1)
    step = made.steps[-1]
    events = [*made.events[step.first : step.last]]
    events.insert(2, HostWait("item", LOSS, "forward", 2))
    kinds = [
        type(e).__name__ if isinstance(e, HostWait) else e.name
        for e in what_if.fused(events)
        if isinstance(e, (Launch, HostWait))
    ]
    assert kinds[:5] == ["op", "op", "HostWait", "fused", "HostWait"]


def test_regions_are_fused_by_themselves_and_the_eager_figure_stands_beside():
    eager, compiled = recorded(), recorded(region=1)
    report = verdict.judge(compiled, [H100])
    report["time"]["eager_ms"] = verdict.eager_ms(eager, H100)
    plain = what_if.update_step(eager, H100)
    assert plain is not None
    assert report["time"]["eager_ms"] == pytest.approx(plain.step_s * 1e3)
    assert report["time"]["step_ms"] < report["time"]["eager_ms"]
    assert "torch.compile" in verdict.text(report).splitlines()[1]
    # The lines' times are those of the fused kernels: they add up to the step's.
    time = report["time"]
    assert sum(line["device_ms"] for line in report["lines"]) == pytest.approx(time["device_ms"])


def test_an_optimizer_in_one_pass_moves_each_tensor_once():
    made = recorded()
    step = made.steps[-1]
    events = what_if.fused_optimizer(made.storages)(made.events[step.first : step.last])
    (one,) = [e for e in events if isinstance(e, Launch) and e.phase == "optimizer"]
    assert one.kernels[0].nbytes == 2 * 32 * MIB + 2 * 64 * MIB + 32 * MIB


def test_smaller_states_are_replayed_not_guessed():
    made = recorded(state_bytes=640 * MIB)
    full = what_if.resized_replay(made, None, "none")
    half = what_if.resized_replay(made, None, "bf16_state")
    sharded = what_if.resized_replay(made, None, "zero1:4")
    assert full.allocated - half.allocated == 320 * MIB
    assert full.allocated - sharded.allocated == 480 * MIB


@pytest.mark.parametrize(
    ("state_mib", "memory_mib", "expected"),
    [
        (520, 600, [("bf16_state", True), ("zero1:2", True)]),
        (1_200, 600, [("bf16_state", False), ("zero1:4", True)]),
        # The state alone is not enough: a sixteenth of 584 MiB, 160 of activations, 64 gathered.
        (520, 280, [("bf16_state", False), ("fsdp:16", True)]),
    ],
)
def test_what_makes_it_fit_is_the_smallest_change_that_does(state_mib, memory_mib, expected):
    device = replace(H100, memory_bytes=memory_mib * MIB, context_bytes=0)
    changes = verdict.what_fits(recorded(state_bytes=state_mib * MIB), device)
    assert [(change["change"], change["fits"]) for change in changes] == expected
    report = {**verdict.judge(recorded(), [device]), "to_fit": changes}
    fits = [line for line in verdict.text(report).splitlines() if line.startswith("  to fit: ")]
    assert [": fits, " in line for line in fits] == [fits for _, fits in expected]


def test_the_json_object_has_the_fields_of_the_specification():
    made = recorded()
    made.assumed.append(Assumed(LOSS, "item", 2, "1.0"))
    made.notes["torch.save: nothing is written"] = 2
    report = json.loads(json.dumps(verdict.judge(made, [H100, A100])))
    assert report["predicted"] is True and report["device"] == "h100" and report["steps"] == 3
    assert {"allocated_bytes", "reserved_bytes", "context_bytes", "at", "owners"} <= set(report["memory"])
    assert {"line", "when", "bytes", "storages", "largest"} <= set(report["memory"]["owners"][0])
    assert {"step_ms", "device_ms", "host_ms", "bound_by", "kernels", "calls", "class_ms"} <= set(
        report["time"]
    )
    assert {"no_syncs_ms", "fused_ms", "without_bytes"} <= set(report["what_if"])
    assert report["host_syncs"][0].keys() == {"line", "kind", "count", "saved_ms"}
    assert report["assumed"] == [{"line": "train.py:5 main", "kind": "item", "count": 2, "value": "1.0"}]
    assert report["refused"] is None
    assert [d["device"] for d in report["devices"]] == ["h100", "a100"]
    assert report["devices"][1]["step_ms"] > report["devices"][0]["step_ms"]


def test_device_time_by_line_adds_up_to_the_device_time():
    report = verdict.judge(recorded(), [H100])
    assert sum(e["device_ms"] for e in report["lines"]) == pytest.approx(report["time"]["device_ms"])
    assert sum(report["time"]["class_ms"].values()) == pytest.approx(report["time"]["device_ms"])
    expected = 2 * seconds(PRODUCT, H100) + 5 * seconds(PASS, H100)
    assert report["time"]["device_ms"] == pytest.approx(expected * 1e3)


def test_the_text_gives_the_verdict_first_and_stays_short():
    made = recorded(waits=4)
    for number in range(30):
        made.notes[f"a note about thing {number}"] = 1
    lines = verdict.text(verdict.judge(made, [H100, A100, DEVICES["4090"], DEVICES["b200"]])).splitlines()
    assert len(lines) <= 40
    assert lines[0].startswith("predicted on h100: fits: ") and "-bound" in lines[0]
    assert "nothing was measured" in lines[-1]


def test_a_step_that_does_not_fit_says_so_first():
    small = replace(H100, memory_bytes=200 * MIB, context_bytes=0)
    assert verdict.judge(recorded(), [small])["verdict"].startswith("predicted on h100: DOES NOT FIT")


def test_a_refused_script_gives_its_line_and_reason_and_no_step_time():
    made = Recording(Request("train.py"), "2.13", refused=Refusal(MODEL, "reads data_ptr()"), ended="refused")
    report = verdict.judge(made, [H100])
    assert report["time"] is None
    assert report["refused"] == {"line": "train.py:4 main", "reason": "reads data_ptr()"}
    assert "stopped at train.py:4 main: reads data_ptr()" in verdict.text(report)


def test_a_timed_script_that_was_refused_says_where_and_what_its_links_took():
    made = recorded(steps=1)
    made.refused, made.ended = Refusal(LOSS, "reads data_ptr()"), "refused"
    made.steps[-1] = made.steps[-1]._replace(last=len(made.events) + 1)
    exchange = Kernel("collective", 1e9, sizes=(8, 1), name="all_gather")
    made.events.append(call(exchange, UPDATE, "optimizer", 0))
    report = verdict.judge(made, [H100])
    said = verdict.text(report)
    assert "  stopped at train.py:5 main: reads data_ptr()" in said.splitlines()
    assert f", links {units.ms(seconds(exchange, H100) * 1e3)} (" in said


def test_a_compiled_script_without_the_eager_figure_does_not_claim_to_have_run_eagerly():
    made = recorded(region=1)
    made.notes["torch.compile: graphs captured and priced by a fusion model, not compiled"] = 1
    report = verdict.judge(made, [H100])
    assert "ran eagerly" not in verdict.text(report) and "eager: " not in verdict.text(report)
    report["time"]["eager_ms"] = 7.0
    assert "eager: 7.0 ms predicted" in verdict.text(report)


def test_what_is_counted_as_eager_code_is_among_the_notes_that_are_shown():
    made = recorded(region=1)
    made.notes = {"one": 1, "two": 1, "three": 1, "torch.compile: x is counted as eager code": 1}
    assert "note  torch.compile: x is counted as eager code" in verdict.text(verdict.judge(made, [H100]))
