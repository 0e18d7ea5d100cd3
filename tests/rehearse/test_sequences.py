"""Recurrent layers are one cuDNN call; packed sequences, GRU cells and the CTC loss run."""

from __future__ import annotations

import json

import pytest
from rehearse.rehearsed import SCRIPTS, Rehearsed, run_script

from leanstep.rehearse.events import HostWait, Launch


@pytest.fixture(scope="module")
def sequences(tmp_path_factory) -> Rehearsed:
    rehearsed = run_script(SCRIPTS / "sequences.py", capture=tmp_path_factory.mktemp("sequences"))
    assert rehearsed.recording.refused is None, rehearsed.recording.refused
    return rehearsed


@pytest.fixture(scope="module")
def seen(sequences) -> dict:
    return json.loads(sequences.printed.splitlines()[-1])


def launches(sequences: Rehearsed, name: str, mark: str) -> list[Launch]:
    last = [e for e in sequences.recording.events if isinstance(e, Launch) and e.step == 2]
    return [e for e in last if e.name == name and sequences.is_at(e.line, mark)]


def test_shapes_are_those_of_the_host(seen):
    assert seen["lstm"] == [[3, 7, 64], [4, 3, 32], [4, 3, 32]]
    assert seen["packed"] == [[13, 16], [3, 3, 2, 2, 1, 1, 1]]
    assert seen["gru"] == [[7, 3, 32], [1, 3, 32], [7, 4, 2]]
    assert seen["gradient of packed"] == [7, 3, 16]
    assert seen["gradients"] is True


@pytest.mark.parametrize(
    ("mark", "gates", "inputs", "rows", "steps"),
    [("lstm", 4, [16, 16, 64, 64], 21, 7), ("gru", 3, [16], 13, 7)],
)
def test_a_layer_is_one_call_with_the_products_of_every_layer_and_direction(
    sequences, mark, gates, inputs, rows, steps
):
    (forward,) = launches(sequences, "recurrent", mark)
    (backward,) = launches(sequences, "recurrent_backward", mark)
    width = gates * 32
    batch = rows // steps
    expected = sum(2 * rows * width * inner + steps * 2 * batch * width * 32 for inner in inputs)
    assert sum(kernel.flops for kernel in forward.kernels) == expected
    # Backward: the time steps, the input's gradient and those of both weights.
    again = sum(
        steps * 2 * batch * 32 * width + 2 * (2 * rows * width * inner) + 2 * rows * width * 32
        for inner in inputs
    )
    assert sum(kernel.flops for kernel in backward.kernels) == again
    assert len(forward.kernels) == len(inputs) * (1 + 2 * steps)


def test_a_gru_cell_is_one_fused_kernel_after_its_two_products(sequences):
    assert len(launches(sequences, "_thnn_fused_gru_cell", "cell")) == 1
    assert len(launches(sequences, "_thnn_fused_gru_cell_backward", "cell")) == 1


def test_ctc_lengths_on_the_device_are_read_by_the_host(sequences):
    assert len(launches(sequences, "ctc_loss", "ctc")) == 1
    waits = [e for e in sequences.recording.events if isinstance(e, HostWait) and e.step == 2]
    # And are copied back as the divisors of the mean.
    assert [e.kind for e in waits if sequences.is_at(e.line, "ctc")] == ["to host", "to host", "to device"]
