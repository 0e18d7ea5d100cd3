"""Matrices are dealt out the same way everywhere and evenly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leanstep.muon.assignment import assign


def test_biggest_first_to_the_least_loaded_ties_to_the_lowest_rank():
    got = assign({"a": (4, 4.0), "b": (9, 9.0), "c": (4, 4.0), "d": (1, 1.0)}, 2)
    assert got.owner == {"a": 1, "b": 0, "c": 1, "d": 1}
    assert got.loads == (9.0, 9.0)
    assert "rank 0" in str(got) and "imbalance 1.000" in str(got)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 5))
def test_every_matrix_has_one_owner_and_no_order_matters(sizes, world):
    costs = {f"m{i}": (size, float(size)) for i, size in enumerate(sizes)}
    got = assign(costs, world)
    assert assign(dict(reversed(costs.items())), world).owner == got.owner
    assert sum(got.loads) == pytest.approx(sum(sizes))
    # Whoever got the last matrix had the lowest load before it, at most the average of the others.
    assert max(got.loads) <= sum(sizes) / world + (1 - 1 / world) * max(sizes) + 1e-9


def test_world_size_is_checked():
    with pytest.raises(ValueError, match=r"^world_size: expected"):
        assign({}, 0)
