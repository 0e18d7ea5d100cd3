"""Rules on records made by hand: each threshold from both sides, and each guard."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from leanstep.diagnose import rules
from leanstep.diagnose.step_records import (
    DEFAULTS,
    RULE_IDS,
    HeadRecord,
    Limits,
    MatmulKey,
    OpKey,
    OpRecord,
    SavedRecord,
    StepRecord,
    Tally,
)
from leanstep.tape.lines import UNKNOWN, Line, Site

KIB, MIB = 1024, 1024 * 1024
HERE = Site(Line("train.py", 7, "loss_fn"))
THERE = Site(Line("train.py", 9, "loss_fn"))


def counts(step: StepRecord | list[StepRecord], limits: Limits | None = None) -> list[tuple[str, int, int]]:
    steps = step if isinstance(step, list) else [step]
    return [(f.rule, f.line.number, f.count) for f in rules.find(steps, limits)]


def storm(repeats: int, backward: int = 200, parameters: int = 0, **more) -> StepRecord:
    ops = {
        OpKey(HERE, "mul", "forward"): OpRecord(repeats, repeats, repeats, 64, parameters=parameters),
        OpKey(HERE, "mul", "backward", False): OpRecord(backward, backward, backward, 64),
    }
    return StepRecord(ops=ops, backward_runs=1, **more)


def test_the_table_is_whole() -> None:
    assert tuple(rules.RULES) == RULE_IDS == tuple(DEFAULTS)
    for rule in rules.RULES.values():
        assert rule.why
        assert rule.fix
        assert len(rule.short_fix) <= 40


def test_host_sync_counts_reads_and_tells_host_data_apart() -> None:
    step = StepRecord(
        reads={
            HERE: Tally(3, 0, Counter({"scalar": 3, "phase backward": 3, "of the model": 1, "of data": 2})),
            THERE: Tally(1, 0, Counter({"tolist": 1, "phase forward": 1, "of data": 1})),
        }
    )
    first, second = rules.find([step])
    assert (first.count, first.confidence, first.phase, first.in_loop) == (3, "high", "backward", True)
    assert (second.count, second.confidence, second.phase, second.in_loop) == (1, "medium", "forward", False)
    assert "the host may already have it" in second.what


@pytest.mark.parametrize(
    ("repeats", "backward", "fires"), [(31, 200, 0), (32, 67, 0), (32, 68, 1), (100, 0, 1)]
)
def test_op_storm_needs_repeats_and_ops(repeats: int, backward: int, fires: int) -> None:
    assert counts(storm(repeats, backward)) == [("op-storm", 7, repeats)] * fires


def test_op_storm_is_silent_on_layers() -> None:
    assert counts(storm(48, parameters=24)) == []
    assert counts(storm(48, parameters=23)) == [("op-storm", 7, 48)]


def test_op_storm_is_silent_on_accumulated_layers() -> None:
    step = storm(96, parameters=12)
    step.backward_runs = 4
    assert counts(step) == []


def test_large_ops_are_no_storm() -> None:
    ops = {OpKey(HERE, "mul", "forward"): OpRecord(64, 20, 64, MIB)}
    assert counts(StepRecord(ops=ops)) == []


def heads(dead: int, rows: int = 200, width: int = 1000) -> StepRecord:
    return StepRecord(heads={HERE: HeadRecord(rows, dead, 64, width)}, head_width=1000, peak_saved_bytes=MIB)


@pytest.mark.parametrize(("dead", "rows", "fires"), [(15, 100, 0), (16, 100, 1), (16, 161, 0), (192, 256, 1)])
def test_dead_rows_need_a_number_and_a_share(dead: int, rows: int, fires: int) -> None:
    assert counts(heads(dead, rows)) == [("dead-rows", 7, dead)] * fires


def test_dead_rows_are_the_minimum_over_steps_and_only_the_heads() -> None:
    assert counts([heads(60), heads(50), heads(70)]) == [("dead-rows", 7, 50)]
    assert "varies" in rules.find([heads(60), heads(50)])[0].what
    assert counts(heads(100, width=256)) == []
    assert counts([heads(60), heads(0)]) == []


@pytest.mark.parametrize(("ops", "size", "fires"), [(3, MIB, 0), (4, 255 * KIB, 0), (4, 256 * KIB, 1)])
def test_zero_fill_needs_ops_and_bytes(ops: int, size: int, fires: int) -> None:
    step = StepRecord(zero_fills={HERE: Tally(ops, size, Counter(select_backward=ops))})
    assert counts(step) == [("zero-fill", 7, ops)] * fires


def test_zero_fill_without_a_line_is_no_finding() -> None:
    assert counts(StepRecord(zero_fills={UNKNOWN: Tally(9, MIB)})) == []


@pytest.mark.parametrize(
    ("size", "written", "fires"), [(MIB - 1, 2 * MIB, 0), (MIB, 20 * MIB, 1), (MIB, 21 * MIB, 0)]
)
def test_transposed_copies_of_activations_need_a_share(size: int, written: int, fires: int) -> None:
    step = StepRecord(other_copies={HERE: Tally(1, size)}, written_bytes=written)
    assert counts(step) == [("transposed-copy", 7, 1)] * fires


def test_transposed_copies_of_state_always_count_and_join_the_others() -> None:
    step = StepRecord(
        state_copies={HERE: Tally(2, 512 * KIB)},
        other_copies={HERE: Tally(3, 3 * MIB)},
        written_bytes=4 * MIB,
    )
    assert counts(step) == [("transposed-copy", 7, 5)]


@pytest.mark.parametrize(
    ("table", "rule"), [("duplicate_casts", "duplicate-cast"), ("round_trips", "dtype-round-trip")]
)
def test_casts_need_bytes(table: str, rule: str) -> None:
    assert counts(StepRecord(**{table: {HERE: Tally(2, 64 * KIB - 1)}})) == []
    assert counts(StepRecord(**{table: {HERE: Tally(2, 64 * KIB)}})) == [(rule, 7, 2)]


def saved(kept: int, size: int, rows: int = 1000, width: int = 512) -> SavedRecord:
    return SavedRecord(kept, size, kept, size, rows, Counter({f"[{rows}, {width}]": kept}))


def test_full_vocab_sums_the_lines_of_a_step() -> None:
    half = saved(1, 16 * MIB)
    assert counts(StepRecord(saved={(HERE, 512): half}, head_width=512)) == []
    both = StepRecord(saved={(HERE, 512): half, (THERE, 512): saved(2, 16 * MIB)}, head_width=512)
    assert counts(both) == [("full-vocab", 7, 1), ("full-vocab", 9, 2)]


def test_full_vocab_guards() -> None:
    assert counts(StepRecord(saved={(HERE, 256): saved(1, 64 * MIB)}, head_width=512)) == []
    assert counts(StepRecord(saved={(HERE, 512): saved(1, 64 * MIB)}, head_width=0)) == []
    assert counts(StepRecord(saved={(HERE, 512): saved(1, 64 * MIB, rows=63)}, head_width=512)) == []


@pytest.mark.parametrize(("kept", "size", "fires"), [(3, 9 * MIB, 0), (4, 8 * MIB - 1, 0), (4, 8 * MIB, 1)])
def test_retained_chunks_need_chunks_and_bytes(kept: int, size: int, fires: int) -> None:
    step = StepRecord(saved={(HERE, 512): saved(kept, size)}, head_width=512)
    assert counts(step) == [("retained-chunks", 7, kept)] * fires


def test_a_retained_line_is_not_named_twice() -> None:
    step = StepRecord(saved={(HERE, 512): saved(8, 64 * MIB)}, head_width=512)
    assert counts(step) == [("retained-chunks", 7, 8)]


def updates(count: int, small: int, others: int = 60) -> StepRecord:
    ops = {
        OpKey(HERE, "add_", "optimizer"): OpRecord(count, 0, small, 64),
        OpKey(THERE, "mul_", "optimizer"): OpRecord(others, 0, 0, 8 * MIB),
    }
    return StepRecord(ops=ops)


@pytest.mark.parametrize(
    ("count", "small", "others", "fires"),
    [(16, 16, 48, 1), (16, 16, 47, 0), (15, 15, 60, 0), (20, 10, 60, 0)],
)
def test_unbatched_optimizer_needs_repeats_of_small_ops(
    count: int, small: int, others: int, fires: int
) -> None:
    assert counts(updates(count, small, others)) == [("unbatched-optimizer", 7, count)] * fires


@pytest.mark.parametrize(("side", "shapes", "fires"), [(64, 1, 1), (64, 40, 0), (2048, 1, 0)])
def test_unbatched_matmuls_repeat_a_small_shape(side: int, shapes: int, fires: int) -> None:
    count = 40
    ops = {
        OpKey(HERE, "mm", "optimizer"): OpRecord(count, 0, 0, 16, flops=1),
        OpKey(THERE, "mul_", "optimizer"): OpRecord(30, 0, 0, 8 * MIB),
    }
    matmuls = {
        MatmulKey(HERE, "optimizer", True, torch.float32, (1, side, side, side + i, False)): count // shapes
        for i in range(shapes)
    }
    assert counts(StepRecord(ops=ops, matmuls=matmuls)) == [("unbatched-optimizer", 7, count)] * fires


@pytest.mark.parametrize(("rate", "flops", "fires"), [(49.0, 1, 1), (50.0, 1, 0), (10.0, 10**9, 0)])
def test_slow_dtype_needs_a_slow_rate_and_a_share(rate: float, flops: int, fires: int) -> None:
    matmuls = {
        MatmulKey(HERE, "forward", True, torch.bfloat16, (1, 64, 64, 64, True)): 2,
        MatmulKey(HERE, "backward", False, torch.bfloat16, (1, 64, 64, 64, False)): 4,
    }
    step = StepRecord(matmuls=matmuls, flops=flops, half_rates={torch.bfloat16: (rate, 100.0)})
    assert counts(step) == [("slow-dtype", 7, 2)] * fires


@pytest.mark.parametrize(("count", "fires"), [(15, 0), (16, 1)])
def test_alloc_churn_needs_buffers(count: int, fires: int) -> None:
    assert counts(StepRecord(churn={HERE: Tally(count, count * MIB)})) == [("alloc-churn", 7, count)] * fires


def test_unused_grad_counts_leaves_of_a_line() -> None:
    assert counts(StepRecord(unused_grads={HERE: Tally(2, 64)})) == [("unused-grad", 7, 2)]


def test_a_finding_must_hold_on_every_step_and_its_count_is_the_median() -> None:
    steps = [storm(40), storm(90), storm(50)]
    assert counts(steps) == [("op-storm", 7, 50)]
    assert rules.find(steps)[0].counts == [40, 90, 50]
    assert counts([storm(40), storm(4)]) == []


def test_callers_of_a_library_line_are_counted() -> None:
    line = Line("site-packages/net.py", 3, "forward", True)
    one, two = Line("train.py", 1), Line("train.py", 2)
    step = StepRecord(reads={Site(line, one): Tally(2), Site(line, two): Tally(5)})
    (finding,) = rules.find([step])
    assert finding.count == 7
    assert finding.callers == {one: 2, two: 5}


def test_a_compiled_line_is_marked() -> None:
    step = storm(40)
    step.compiled.add(HERE.line)
    assert rules.find([step])[0].compiled


def test_thresholds_can_be_set() -> None:
    limits = Limits({"op-storm": {"repeats": 10, "ops": 10}})
    assert counts(storm(10, 0), limits) == [("op-storm", 7, 10)]


@pytest.mark.parametrize(
    "changes",
    [
        {"storm": {"repeats": 1}},
        {"op-storm": {"size": 1}},
        {"op-storm": {"repeats": "x"}},
        {"op-storm": {"repeats": True}},
        {"op-storm": {"repeats": float("nan")}},
        {"op-storm": {"ops": -1}},
    ],
    ids=str,
)
def test_bad_thresholds_are_named(changes: dict) -> None:
    with pytest.raises(ValueError, match="threshold"):
        Limits(changes)


def test_merging_two_parts_of_a_step_adds_up() -> None:
    whole = storm(20, 50, flops=5)
    whole.merge(storm(30, 60, flops=7))
    assert counts(whole) == [("op-storm", 7, 50)]
    assert (whole.flops, whole.backward_runs) == (12, 2)


def test_forgetting_counters_keeps_the_verdict() -> None:
    step = storm(40)
    step.forget_counters(rules.judge(step, Limits()))
    assert not step.ops
    assert counts([step, storm(60)]) == [("op-storm", 7, 40)]
