"""The rank fixture itself: values come back in order, errors and hangs fail."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist


def add_ranks(rank: int, world_size: int, offset: int) -> float:
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return value.item() + rank


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise RuntimeError("broken on purpose")


def hang(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(60)


def compute(rank: int, world_size: int) -> bool:
    while time.process_time() < 3:
        pass
    return True


def test_values_come_back_in_rank_order(run_ranks):
    assert run_ranks(2, add_ranks, 10) == [21.0, 22.0]


def test_an_error_on_one_rank_fails(run_ranks):
    with pytest.raises(AssertionError, match="broken on purpose"):
        run_ranks(2, fail_on_one, timeout=30)


def test_a_hang_fails(run_ranks):
    with pytest.raises(AssertionError, match="not done after"):
        run_ranks(2, hang, timeout=3)


def test_a_rank_that_computes_does_not_hang(run_ranks):
    """Time counts in which no rank could go on: a busy machine fails no test."""
    assert run_ranks(1, compute, timeout=1.5) == [True]
