"""Rules on events made by hand: each threshold from both sides, and each guard."""

from __future__ import annotations

import pytest
import torch
from diagnose.made import (
    HERE,
    KIB,
    LEAF,
    MIB,
    THERE,
    backward,
    head,
    held,
    matmul,
    op,
    read,
    save,
    sized,
    steps,
    tensor,
    update,
)

from leanstep.diagnose.find import find, judge
from leanstep.diagnose.rules import RULES, Limits
from leanstep.tape import events
from leanstep.tape.events import Event
from leanstep.tape.lines import IN_COMPILED, UNKNOWN, Line, Site


def counts(*parts: list[Event], limits: Limits | None = None, **spans) -> list[tuple[str, int, int]]:
    return [(f.rule, f.line.number, f.count) for f in find(steps(*parts, **spans), limits)]


def of(rule: str, *parts: list[Event]) -> list[tuple[int, int]]:
    return [(line, count) for name, line, count in counts(*parts) if name == rule]


def storm(repeats: int, after: int = 200, weights: int = 0, runs: int = 1) -> list[Event]:
    """A line that repeats a tiny op, reads weights meanwhile, and has a backward."""
    small = tensor(16)
    read_weights = [op("t", tensor(4, 4, role=LEAF), site=UNKNOWN) for _ in range(weights)]
    found = []
    for _ in range(runs):
        part = [op("mul", small, 2.0) for _ in range(repeats // runs)]
        found += [part[0], *read_weights, *part[1:]]
        found += [backward("mul", small, 2.0) for _ in range(after // runs)]
    return found


def test_the_table_is_whole() -> None:
    for name, rule in RULES.items():
        assert name == rule.name and rule.why and rule.fix and rule.fires_when and rule.limits
        assert len(rule.short_fix) <= 40
        assert rule.needs in ("step", "steps", "trace")


def test_host_sync_counts_reads_and_tells_host_data_apart() -> None:
    model = tensor(4, 4, role=LEAF)
    data, batch = tensor(4), tensor(4, 4)
    step = [
        op("mul", batch, model, node=1),
        read(phase=events.BACKWARD),
        Event(events.READ, "tolist", THERE, args=(batch,), read="tolist"),
        # Never used together with the model.
        Event(events.READ, "tolist", Site(Line("train.py", 11)), args=(data,), read="tolist"),
    ]
    step[1:1] = [read(phase=events.BACKWARD)] * 2
    first, second = find(steps([op("mul", batch, model, node=1), *step], step))
    assert (first.count, first.confidence, first.phase, first.in_loop) == (3, "high", "backward", True)
    assert (second.count, second.confidence, second.phase, second.in_loop) == (1, "medium", "forward", False)
    assert "the host may already have it" in second.what


def test_data_that_moves_to_the_device_was_on_the_host_before() -> None:
    model, batch = tensor(4, 4, role=LEAF), tensor(4, 4)
    begin = op("mul", tensor(4, 4), model, node=1)
    before = Event(events.READ, "tolist", HERE, args=(batch,), read="tolist")
    move = Event(events.MOVE, "to", HERE, args=(batch,))
    use = op("mul", batch, model, node=2)
    assert counts([begin, before, move, use]) == []
    assert counts([begin, before, use]) == [("host-sync", 7, 1)]


@pytest.mark.parametrize(("repeats", "after", "fires"), [(31, 200, 0), (32, 67, 0), (32, 68, 1), (100, 0, 1)])
def test_op_storm_needs_repeats_and_ops(repeats: int, after: int, fires: int) -> None:
    assert counts(storm(repeats, after)) == [("op-storm", 7, repeats)] * fires


def test_op_storm_is_silent_on_layers_and_on_accumulated_layers() -> None:
    assert counts(storm(48, weights=24)) == []
    assert counts(storm(48, weights=23)) == [("op-storm", 7, 48)]
    assert counts(storm(96, weights=12, runs=4)) == []


def test_large_ops_are_no_storm() -> None:
    assert counts([op("mul", sized(MIB), 2) for _ in range(120)]) == []


def dead(zeros: int, rows: int = 200) -> list[Event]:
    product, softmax = head(rows, 64, 1000)
    gradient = tensor(rows, 1000)
    return [product, softmax, backward("mm", gradient, tensor(1000, 64), node=5, value=(rows, zeros))]


@pytest.mark.parametrize(
    ("zeros", "rows", "fires"), [(15, 100, 0), (16, 100, 1), (16, 161, 0), (192, 256, 1)]
)
def test_dead_rows_need_a_number_and_a_share(zeros: int, rows: int, fires: int) -> None:
    assert counts(dead(zeros, rows)) == [("dead-rows", 7, zeros)] * fires


def test_dead_rows_are_the_minimum_over_steps_and_only_the_heads() -> None:
    assert counts(dead(60), dead(50), dead(70)) == [("dead-rows", 7, 50)]
    assert "varies" in find(steps(dead(60), dead(50)))[0].what
    assert counts(dead(60), dead(0)) == []
    product, _, after = dead(100)
    # A wide layer that no softmax reads is no head. logits[rows, targets] reads classes; logits[rows] none.
    assert counts([product, after]) == []
    rows, targets, logits = tensor(200), tensor(200), product.outs[0]
    read = op("index", logits, (rows, targets), outs=[tensor(200)])
    assert counts([product, read, after]) == [("dead-rows", 7, 100)]
    assert counts([product, op("index", logits, (rows,), outs=[tensor(200, 1000)]), after]) == []


def fills(count: int, num_bytes: int, ratio: int = 4, name: str = "select_backward") -> list[Event]:
    return [
        backward(name, sized(num_bytes // count // ratio), outs=[sized(num_bytes // count)])
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("count", "num_bytes", "ratio", "fires"),
    [(3, MIB, 4, 0), (4, 255 * KIB, 4, 0), (4, 256 * KIB, 4, 1), (4, MIB, 2, 0)],
)
def test_zero_fill_needs_ops_bytes_and_a_ratio(count: int, num_bytes: int, ratio: int, fires: int) -> None:
    assert counts(fills(count, num_bytes, ratio)) == [("zero-fill", 7, count)] * fires


def test_zeros_that_a_backward_fills_are_fills() -> None:
    step = []
    for _ in range(4):
        zeros = sized(256 * KIB)
        step += [
            backward("new_zeros", sized(8), outs=[zeros]),
            backward("index_put_", zeros, (), sized(8), outs=[zeros]),
        ]
    assert counts(step) == [("zero-fill", 7, 4)]
    assert counts([event for event in step if event.name != "new_zeros"]) == []


def test_zero_fill_without_a_line_is_no_finding() -> None:
    assert counts([event._replace(site=UNKNOWN) for event in fills(8, MIB)]) == []


def across(num_bytes: int, other: int = 0) -> Event:
    side = num_bytes // 4 // 64
    first, second = tensor(64, side), tensor(64, side, stride=(1, 64), storage=other)
    return op("add", first, second)


@pytest.mark.parametrize(
    ("num_bytes", "written", "fires"),
    [(MIB - 256, 2 * MIB, 0), (MIB, 19 * MIB, 1), (MIB, 20 * MIB, 0)],
)
def test_transposed_copies_of_activations_need_a_share(num_bytes: int, written: int, fires: int) -> None:
    step = [across(num_bytes), op("mul", sized(written), 2, site=THERE)]
    assert counts(step) == [("transposed-copy", 7, 1)] * fires


def test_transposed_copies_of_state_always_count_and_join_the_others() -> None:
    weight = tensor(8, role=LEAF)
    state = [across(256 * KIB, 77) for _ in range(2)]
    step = [op("mul", weight, 2), *state, update(held(weight), state=[77])]
    assert of("transposed-copy", step) == [(7, 2)]
    others = [across(MIB) for _ in range(3)]
    assert of("transposed-copy", [*others, *step]) == [(7, 5)]


def test_foreach_adds_across_layouts_count_each_pair() -> None:
    first = [tensor(256, 512), tensor(512, 512)]
    second = [tensor(256, 512, stride=(1, 256)), tensor(512, 512, stride=(1, 512))]
    step = [op("_foreach_add_", tuple(first), tuple(second), outs=())]
    assert counts(step) == [("transposed-copy", 7, 2)]


def test_casts_need_bytes() -> None:
    for num, fires in ((32 * KIB // 2 - 1, 0), (32 * KIB // 2, 1)):
        wide, narrow = tensor(num), {"dtype": torch.bfloat16}
        casts = [op("_to_copy", wide, outs=[tensor(num, **narrow)]) for _ in range(3)]
        assert counts(casts) == [("duplicate-cast", 7, 2)] * fires
        # A later version is another tensor.
        later = [event._replace(args=(wide._replace(version=i),)) for i, event in enumerate(casts)]
        assert counts(later) == []
        start = tensor(2 * num, **narrow)
        widened = tensor(2 * num)
        trip = [op("_to_copy", start, outs=[widened]), op("_to_copy", widened, outs=[start])]
        assert counts(trip) == [("dtype-round-trip", 7, 1)] * bool(2 * num * 2 >= 64 * KIB)


def kept(count: int, num_bytes: int, width: int = 512, site: Site = HERE) -> list[Event]:
    rows = num_bytes // count // 4 // width
    return [save(tensor(rows, width), site) for _ in range(count)]


BIG = head(1000, 64, 512)


def test_full_vocab_sums_the_lines_of_a_step() -> None:
    assert counts([*BIG, *kept(1, 16 * MIB)]) == []
    both = [*BIG, *kept(1, 16 * MIB), *kept(2, 16 * MIB, site=THERE)]
    assert counts(both) == [("full-vocab", 7, 1), ("full-vocab", 9, 2)]


def test_full_vocab_guards() -> None:
    assert counts([*BIG, *kept(1, 64 * MIB, width=256)]) == []
    assert counts(kept(1, 64 * MIB)) == []
    # 63 rows, a weight, and what the next backward keeps.
    assert counts([*head(63, 64, 2**18), save(tensor(63, 2**18))]) == []
    weight = tensor(2**15, 512, role=LEAF)
    assert counts([*BIG, op("t", weight), save(weight)]) == []
    half = kept(1, 16 * MIB)
    assert counts([*BIG, *half, backward("mul", tensor(4)), *BIG, *kept(1, 16 * MIB)]) == []


@pytest.mark.parametrize(
    ("count", "num_bytes", "fires"), [(3, 9 * MIB, 0), (4, 8 * MIB - 8 * KIB, 0), (4, 8 * MIB, 1)]
)
def test_retained_chunks_need_chunks_and_bytes(count: int, num_bytes: int, fires: int) -> None:
    assert counts([*BIG, *kept(count, num_bytes)]) == [("retained-chunks", 7, count)] * fires


def test_a_retained_line_is_not_named_twice() -> None:
    assert counts([*BIG, *kept(8, 64 * MIB)]) == [("retained-chunks", 7, 8)]


def updates(count: int, small: int, others: int = 60) -> list[Event]:
    phase = {"phase": events.OPTIMIZER}
    return [
        *(op("add_", sized(8 if i < small else 8 * MIB), 1, **phase) for i in range(count)),
        *(op("mul_", sized(8 * MIB), 1, site=THERE, **phase) for _ in range(others)),
    ]


@pytest.mark.parametrize(
    ("count", "small", "others", "fires"),
    [(16, 16, 48, 1), (16, 16, 47, 0), (15, 15, 60, 0), (20, 10, 60, 0)],
)
def test_unbatched_optimizer_needs_repeats_of_small_ops(
    count: int, small: int, others: int, fires: int
) -> None:
    assert of("unbatched-optimizer", updates(count, small, others)) == [(7, count)] * fires


@pytest.mark.parametrize(("side", "shapes", "fires"), [(64, 1, 1), (64, 40, 0), (2048, 1, 0)])
def test_unbatched_matmuls_repeat_a_small_shape(side: int, shapes: int, fires: int) -> None:
    count = 40
    phase = {"phase": events.OPTIMIZER}
    step = [
        *(matmul(side, side, side + i % shapes, weight=tensor(side, side + i % shapes), **phase)
          for i in range(count)),
        *(op("mul_", sized(8 * MIB), 1, site=THERE, **phase) for _ in range(30)),
    ]  # fmt: skip
    assert of("unbatched-optimizer", step) == [(7, count)] * fires


@pytest.mark.parametrize(("rate", "others", "fires"), [(49.0, 0, 1), (50.0, 0, 0), (10.0, 1000, 0)])
def test_slow_dtype_needs_a_slow_rate_and_a_share(rate: float, others: int, fires: int) -> None:
    half = tensor(64, 64, dtype=torch.bfloat16)
    step = [matmul(64, 64, 64, first=half) for _ in range(2)]
    step += [backward("mm", half, half, outs=[half]) for _ in range(4)]
    step += [matmul(64, 64, 64, site=THERE) for _ in range(others)]
    made = steps(step)
    made[0].tape.half_rates[torch.bfloat16] = (rate, 100.0)
    found = [(f.line.number, f.count) for f in find(made) if f.rule == "slow-dtype"]
    assert found == [(7, 2)] * fires


def churned(count: int, **more) -> list[Event]:
    return [op("add", sized(MIB), 1, grad=False, **more) for _ in range(count)]


@pytest.mark.parametrize(("count", "fires"), [(15, 0), (16, 1)])
def test_alloc_churn_needs_buffers_that_are_freed(count: int, fires: int) -> None:
    def found(step: list[Event], *, freed: bool) -> list[tuple[int, int]]:
        made = steps(step, [])
        if freed:
            made[0].tape.freed = {out.storage: 1 for event in step for out in event.results}
        hits = judge(made[0], Limits())["alloc-churn"].values()
        return [(hit.line.number, hit.count) for hit in hits]

    assert found(churned(count), freed=True) == [(7, count)] * fires
    assert found(churned(count), freed=False) == []
    # Layers of a frozen model run between its activations.
    layers = [event for one in churned(count) for event in (one, matmul(8, 8, 8, grad=False))]
    assert found(layers, freed=True) == []


def gradient_of(weight) -> Event:
    return backward("detach", weight, leaf=weight.storage)


def test_unused_grad_counts_leaves_of_a_line() -> None:
    mine, others = tensor(8, role=LEAF), [tensor(16, role=LEAF) for _ in range(2)]
    use = [op("mul", weight, 2.0, node=i) for i, weight in enumerate((mine, *others))]
    step = [*use, *map(gradient_of, (mine, *others)), update(held(mine))]
    assert of("unused-grad", step) == [(7, 2)]
    # Without an optimizer nobody knows what becomes of a gradient; written by hand, it is used.
    assert of("unused-grad", step[:-1]) == []
    by_hand = [op("sub_", weight, 1, grad=False, outs=[weight]) for weight in others]
    assert of("unused-grad", [*step, *by_hand]) == []


def test_the_gradient_of_an_input_that_the_script_reads_is_used() -> None:
    mine, inputs = tensor(8, role=LEAF), tensor(16, role=events.TRAINED_LEAF)
    step = [op("mul", mine, 2.0, node=1), op("mul", inputs, 2.0, node=2)]
    step += [gradient_of(mine), gradient_of(inputs)]
    sign = op("sign", step[-1].outs[0], site=THERE)
    assert of("unused-grad", [*step, update(held(mine))]) == [(7, 1)]
    assert of("unused-grad", [*step, sign, update(held(mine))]) == []


def trained(*gradients: str, frozen: bool = False) -> list[Event]:
    """A step with a parameter per gradient; the last one is not called in the step."""
    weights = [tensor(8, 4 + i, role=LEAF, storage=900 + i) for i in range(len(gradients))]
    use = [op("mul", weight, 2.0, node=i) for i, weight in enumerate(weights[:-1])]
    pairs = zip(weights, gradients, strict=True)
    return [*use, update(*(held(weight, gradient, trains=not frozen) for weight, gradient in pairs))]


def test_missing_grad_names_the_first_use_or_the_update() -> None:
    step = trained("live", "zero", "none")
    assert of("missing-grad", step, step, step) == [(7, 1), (9, 1)]
    assert of("missing-grad", *[trained("live", "zero", "none", frozen=True)] * 3) == []


def test_a_gradient_that_was_live_once_is_not_missing() -> None:
    lost, found = trained("live", "zero", "none"), trained("live", "live", "live")
    assert of("missing-grad", lost, found, lost) == []


def test_an_adapters_first_gradients_may_be_zero() -> None:
    """In one or two steps; a gradient that does not exist is missing from the first one on."""
    step = trained("live", "zero", "none")
    assert of("missing-grad", step, step) == [(9, 1)]


def test_an_optimizer_without_any_gradient_is_one_finding() -> None:
    step = trained("zero", "zero", "none")
    assert of("missing-grad", step, step, step) == [(9, 3)]


def test_an_expert_that_no_token_reached_is_silent() -> None:
    experts = [tensor(8, 16, role=LEAF) for _ in range(3)]

    def step(*rows: int) -> list[Event]:
        use = [matmul(n, 8, 16, weight=w, node=1) for n, w in zip(rows, experts, strict=False)]
        gradients = ("live", "live", "none")
        return [*use, update(*(held(w, g) for w, g in zip(experts, gradients, strict=True)))]

    assert of("missing-grad", *[step(5, 3)] * 3) == []
    # Layers that all get the same rows are no experts.
    assert of("missing-grad", *[step(4, 4)] * 3) == [(9, 1)]


def test_a_finding_must_hold_on_every_step_and_its_count_is_the_median() -> None:
    parts = [storm(40), storm(90), storm(50)]
    assert counts(*parts) == [("op-storm", 7, 50)]
    assert find(steps(*parts))[0].counts == [40, 90, 50]
    assert counts(storm(40), storm(4)) == []


def test_callers_of_a_library_line_are_counted() -> None:
    line = Line("site-packages/net.py", 3, "forward", True)
    one, two = Line("train.py", 1), Line("train.py", 2)
    step = [*[read(Site(line, one))] * 2, *[read(Site(line, two))] * 5]
    (finding,) = find(steps(step))
    assert finding.count == 7
    assert finding.callers == {one: 2, two: 5}


def test_a_compiled_line_is_marked() -> None:
    step = [event._replace(flags=IN_COMPILED) for event in storm(40)]
    assert find(steps(step))[0].compiled


def test_thresholds_can_be_set() -> None:
    limits = Limits({"op-storm": {"repeats": 10, "ops": 10}})
    assert counts(storm(10, 0), limits=limits) == [("op-storm", 7, 10)]


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


def test_forgetting_the_ops_keeps_the_verdict_and_the_totals() -> None:
    first, second = steps(storm(40), storm(60))
    before = first.num_ops, first.written_bytes
    first.forget(judge(first, Limits()))
    first.tape.drop_before(first.span.last)
    assert (first.num_ops, first.written_bytes) == before
    assert [(f.rule, f.count) for f in find([first, second])] == [("op-storm", 40)]
