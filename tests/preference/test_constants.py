"""Kept constants never cross from a simulation into a real call."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from leanstep.preference.constants import kept


def test_a_constant_is_made_once_and_never_from_a_simulation():
    made = []

    @kept
    def table(size: int) -> torch.Tensor:
        made.append(size)
        return torch.arange(size)

    with FakeTensorMode():
        table(3)
        table(3)
    first, second = table(3), table(3)
    assert first is second and first.tolist() == [0, 1, 2]
    assert made == [3, 3, 3]
