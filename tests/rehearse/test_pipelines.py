"""Bubbles of pipelines, counted by hand."""

from __future__ import annotations

import pytest

from leanstep.rehearse.pipelines import Work, waiting_share

COSTS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def forwards(stage: int, count: int) -> list[Work]:
    return [Work(stage, "F", m) for m in range(count)]


def backwards(stage: int, count: int) -> list[Work]:
    return [Work(stage, "B", m) for m in range(count)]


def one_forward_one_backward(stage: int, stages: int, count: int) -> list[Work]:
    ahead = min(count, stages - stage)
    order = forwards(stage, ahead)
    for m in range(count):
        order.append(Work(stage, "B", m))
        if ahead + m < count:
            order.append(Work(stage, "F", ahead + m))
    return order


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (3, 4)])
@pytest.mark.parametrize("cost", [2.0, 3.0])
def test_gpipe_and_1f1b_wait_for_all_stages_but_one(stages, count, cost):
    costs = {"F": 1.0, "B": cost}
    for order in (
        {s: forwards(s, count) + backwards(s, count) for s in range(stages)},
        {s: one_forward_one_backward(s, stages, count) for s in range(stages)},
    ):
        for rank in range(stages):
            assert waiting_share(order, rank, costs) == pytest.approx((stages - 1) / count)


def test_two_stages_per_rank_halve_the_wait():
    # Ranks 0 and 1 hold stages 0, 2 and 1, 3; two micro-batches each way.
    def order(rank: int) -> list[Work]:
        first, second = rank, rank + 2
        return forwards(first, 2) + forwards(second, 2) + backwards(second, 2) + backwards(first, 2)

    # 12 units of work. Rank 1 starts after one forward (1) and its last backward is followed by one (2).
    assert waiting_share({0: order(0), 1: order(1)}, 0, COSTS) == pytest.approx(3 / 12)


def test_gradients_of_weights_fill_the_wait():
    # Two stages, one micro-batch: the first stage has its inputs' gradient one unit earlier.
    whole = {0: [Work(0, "F", 0), Work(0, "B", 0)], 1: [Work(1, "F", 0), Work(1, "B", 0)]}
    parts = {s: [Work(s, "F", 0), Work(s, "I", 0), Work(s, "W", 0)] for s in range(2)}
    assert waiting_share(whole, 0, COSTS) == pytest.approx(3 / 3)
    assert waiting_share(parts, 0, COSTS) == pytest.approx(2 / 3)


def test_an_order_that_cannot_be_kept_says_nothing():
    assert waiting_share({0: [Work(0, "B", 0), Work(0, "F", 0)]}, 0, COSTS) == 0.0
