"""The distance from fp64 that the fp64 rule compares: special values, shapes, integers, bits."""

from __future__ import annotations

import pytest
import torch

from leanstep.measure.parity import relative_error, same_bits


@pytest.mark.parametrize(
    ("value", "truth", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.2),
        ([float("inf"), 1.0], [float("inf"), 1.0], 0.0),
        ([float("-inf"), 1.0], [float("inf"), 1.0], float("inf")),
        ([float("nan"), 1.0], [0.5, 1.0], float("inf")),
        ([float("nan"), 1.0], [float("nan"), 1.0], 0.0),
        ([0.0], [0.0], 0.0),
    ],
)
def test_relative_error_never_hides_a_special_value(value, truth, expected):
    assert relative_error(torch.tensor(value), torch.tensor(truth, dtype=torch.float64)) == pytest.approx(
        expected
    )


def test_shapes_that_would_broadcast_are_an_error():
    assert relative_error(torch.zeros(3, 1), torch.zeros(3)) == float("inf")


def test_integer_outputs_count_mismatches():
    assert relative_error(torch.tensor([1, 2, 3]), torch.tensor([1, 5, 4])) == 2.0


def test_bits_tell_negative_zero_from_zero():
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    # One element of a longer row keeps the row's stride.
    assert same_bits(torch.zeros(200).as_strided((1,), (128,)), torch.zeros(1))
