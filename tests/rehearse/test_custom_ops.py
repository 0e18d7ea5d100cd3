"""Custom ops are priced by what their bodies launch, compiled or not."""

from __future__ import annotations

import pytest
from rehearse.rehearsed import SCRIPTS, run_script

from leanstep.rehearse.events import Launch

ROWS, WIDTH, WORDS = 512, 256, 1024
PRODUCT = 2 * ROWS * WIDTH * WORDS


@pytest.fixture(scope="module")
def rehearsed():
    rehearsed = run_script(SCRIPTS / "custom_ops.py", device="h100", steps=4)
    assert rehearsed.recording.refused is None, rehearsed.recording.refused
    return rehearsed


def launches(rehearsed, step):
    return [e for e in rehearsed.recording.events if isinstance(e, Launch) and e.step == step and e.kernels]


@pytest.mark.parametrize("step", [0, 1], ids=["eager", "compiled"])
def test_products_of_the_forward_and_the_backward(rehearsed, step):
    products = [k for e in launches(rehearsed, step) for k in e.kernels if k.kind == "gemm"]
    assert sum(k.flops for k in products) == 3 * PRODUCT
    assert not [e.name for e in launches(rehearsed, step) if e.name.startswith("project")]


def test_a_compiler_does_not_look_into_a_body(rehearsed):
    """The regions of the body are its own; what the caller compiles begins after it."""
    product, total = [e for e in launches(rehearsed, 1) if e.phase == "forward" and e.name in ("mm", "sum")]
    assert product.region not in (0, total.region)
    assert all(e.region == 0 for e in launches(rehearsed, 1) if e.name == "mm" and e.phase == "backward")


@pytest.mark.parametrize("step", [2, 3], ids=["eager", "compiled"])
def test_leansteps_own_ops(rehearsed, step):
    flops = sum(k.flops for e in launches(rehearsed, step) for k in e.kernels if k.kind == "gemm")
    assert flops == pytest.approx(
        3 * PRODUCT, rel=1e-5
    )  # logits and the gradient of the head; the logits again


def test_a_body_that_cannot_run_is_one_pass_and_noted(rehearsed):
    (call,) = [e for e in launches(rehearsed, 0) if rehearsed.is_at(e.line, "binary")]
    assert [k.nbytes for k in call.kernels] == [2 * 2 * ROWS * WIDTH]
    (note,) = [note for note in rehearsed.recording.notes if "custom op" in note]
    assert note.startswith("custom op shop::binary: priced as one pass over its tensors")
