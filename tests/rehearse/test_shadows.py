"""What the host reads of a simulated device."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from leanstep.rehearse.shadows import Shadows

TRUTH = {
    "count": 5,
    "selected": [5, 3],
    "cu_seqlens": [0, 3, 8, 10],
    "longest": 5,
    "nonzero": [3, 2],
    "unique": [1, 3],
    "flags": [False, True, True, False],
    "host_stays_real": [1.0, 2.0, 3.0],
    "known_parameter": 0.25,
}


@pytest.mark.parametrize("name", TRUTH)
def test_values_from_the_host_are_read_back(seen, name):
    assert seen[name] == TRUTH[name]


def test_a_write_of_unknown_values_through_a_view_ends_what_was_known_of_these_elements(seen):
    assert seen["overwritten"] == [10, 11, 1, 1, 14, 15]
    assert seen["overwritten_sum"] == 1
    # A view of what is known in part, and what is written over it.
    assert seen["known_part"] == [14, 15]
    assert seen["written_again"] == [10, 11, 9, 8, 14, 15]
    # Of a large storage all is forgotten.
    assert seen["overwritten_large"] == [1, 1]


def test_unknown_values_read_as_plausible_ones(seen):
    assert seen["assumed_item"] == 1.0
    assert seen["assumed_rows"] == [35]


def test_every_assumption_is_listed_with_its_line(values):
    kinds = {(a.kind, a.value) for a in values.recording.assumed}
    assert kinds == {
        *(("to host", "1"), ("boolean index", "all elements"), ("item", "1.0"), ("item", "1")),
    }
    assert all(a.line is not None and a.line.file.endswith("values.py") for a in values.recording.assumed)


def test_an_absorbing_operand_decides_alone(seen):
    assert seen["absorbing"] is True


def test_draws_of_the_device_leave_the_hosts_random_numbers_alone(seen):
    assert seen["host_randomness"] is True


@pytest.mark.parametrize("part", [slice(None), slice(2)])
def test_a_freed_storage_is_forgotten(part):
    """Its address may be that of the next tensor, which would then pass for unknown."""
    fake_mode = FakeTensorMode()
    shadows = Shadows(fake_mode)
    with fake_mode:
        tensor = torch.empty(8)
        written = tensor[part]
    shadows.forget(written)
    assert len(shadows.stale) + len(shadows.partial) == 1
    del tensor, written
    gc.collect()
    assert not shadows.stale and not shadows.partial
