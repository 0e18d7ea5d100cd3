"""The fp64 rule itself, with right and broken fast paths; then every registered fast path."""

from __future__ import annotations

import time

import pytest
import torch
from toy_case import fast, implementation, mutating, toy_case, unrepeatable, wrong_gradient

from leanstep.case import all_cases
from leanstep.measure.parity import check_in_time, prove_case, relative_error, same_bits


def failures(case):
    return [row.tensor for row in prove_case(case) if not row.ok]


def test_a_right_fast_path_passes_at_every_size():
    rows = prove_case(toy_case())
    assert [row for row in rows if not row.ok] == []
    assert {row.tensor.split("/")[0] for row in rows} == {"tiny", "odd", "empty"}
    assert {row.tensor.split("/")[1] for row in rows} >= {
        "lse",
        "grad:x",
        "inputs unchanged",
        "bitwise repeatable",
    }


def test_a_wrong_gradient_fails_although_the_value_is_right():
    failed = failures(toy_case("toy", implementation("broken", wrong_gradient)))
    assert "tiny/grad:x" in failed and not any("lse" in name for name in failed)


def test_a_mutated_input_fails():
    assert "tiny/inputs unchanged" in failures(toy_case("toy", implementation("broken", mutating)))


def test_an_unrepeatable_result_fails():
    failed = failures(toy_case("toy", implementation("broken", unrepeatable)))
    assert "odd/bitwise repeatable" in failed


def test_a_missing_tensor_fails():
    broken = implementation("broken", lambda t, c: {"other": fast(t, c)["lse"]})
    assert "tiny/lse (missing)" in failures(toy_case("toy", broken))


def test_a_row_on_request_is_proven_if_it_is_named():
    case = toy_case("toy", implementation("slow", wrong_gradient, on_request="it is slow"))
    assert prove_case(case) == []
    assert "tiny/grad:x" in [row.tensor for row in prove_case(case, implementations=("slow",)) if not row.ok]


def test_a_check_that_does_not_end_is_a_failed_one(monkeypatch):
    def endless(tensors, constants):
        while True:
            time.sleep(0.005)

    case = toy_case("toy", implementation("endless", endless))
    (row,) = check_in_time(case, case.implementation("endless"), torch.float32, "tiny", box_s=0.1)
    assert (row.ok, row.tensor) == (False, "tiny/checked within 0 s")


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


@pytest.mark.parametrize("name", sorted(all_cases()))
def test_every_registered_fast_path_is_proven(name, device, available_case):
    rows = prove_case(available_case(name), device=device)
    assert rows, f"{name}: nothing was proven"
    assert [row for row in rows if not row.ok] == []
