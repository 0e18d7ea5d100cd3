"""`StepMarker`: rounds of optimizers, updates by hand, skipped and nested steps, rollouts."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn

from leanstep.tape.hooks import wrap_closure
from leanstep.tape.steps import StepListener, StepMarker


class Counted(StepListener):
    """Notes whether each step ended late."""

    def __init__(self) -> None:
        self.late: list[bool] = []
        self.parts = 0

    def part_ends(self, optimizer: object) -> None:
        self.parts += 1

    def step_ends(self, late: bool) -> None:
        self.late.append(late)


@contextlib.contextmanager
def marked():
    listener = Counted()
    marker = StepMarker(listener)
    with marker:
        yield marker, listener
        marker.finish()


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


def sgd(*parameters: nn.Parameter) -> torch.optim.SGD:
    return torch.optim.SGD(parameters or [parameter()], lr=0.1)


def test_the_end_is_known_at_once_when_all_optimizers_have_stepped():
    with marked() as (marker, listener):
        pair = [sgd(), sgd()]
        for _ in range(3):
            for optimizer in pair:
                optimizer.step()
            assert listener.late == [False] * marker.steps
    assert (marker.steps, listener.parts) == (3, 6)


def test_an_idle_optimizer_makes_the_first_end_late():
    with marked() as (marker, listener):
        idle, working = sgd(), sgd()
        for _ in range(3):
            working.step()
        del idle
    assert listener.late == [True, False, False] and marker.steps == 3


def test_an_optimizer_that_steps_now_and_then_adds_no_step():
    with marked() as (marker, _):
        often, seldom = sgd(), sgd()
        for number in range(9):
            often.step()
            if number % 3 == 2:
                seldom.step()
    assert marker.steps == 9


def test_another_optimizer_takes_over():
    with marked() as (marker, _):
        for _ in range(2):
            optimizer = sgd()
            for _ in range(3):
                optimizer.step()
    assert marker.steps == 6


def test_an_optimizer_from_before_comes_round():
    optimizer = sgd()
    with marked() as (marker, listener):
        for _ in range(3):
            optimizer.step()
    assert listener.late == [True, False, False] and marker.steps == 3


def test_a_step_that_raised_does_not_hide_the_next():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no")

    with marked() as (marker, _):
        working = sgd()
        failing = Failing([parameter()], lr=0.1)
        for _ in range(3):
            with pytest.raises(RuntimeError):
                failing.step()
            working.step()
    assert marker.steps == 3


def update_in_place(w: torch.Tensor) -> torch.Tensor:
    w.square().sum().backward()
    with torch.no_grad():
        w -= 0.1 * w.grad
    return w


def update_through_data(w: torch.Tensor) -> torch.Tensor:
    w.square().sum().backward()
    w.data -= 0.1 * w.grad
    w.grad.zero_()
    return w


def update_functionally(w: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(w.square().sum(), [w])
    return (w - 0.1 * gradient).detach().requires_grad_()


def update_by_a_new_leaf(w: torch.Tensor) -> torch.Tensor:
    w.square().sum().backward()
    return (w - 0.1 * w.grad).detach().requires_grad_()


@pytest.mark.parametrize(
    "update", [update_in_place, update_through_data, update_functionally, update_by_a_new_leaf]
)
def test_an_update_by_hand_is_a_step(update):
    with marked() as (marker, _):
        w = torch.ones(3, requires_grad=True)
        for _ in range(4):
            (w * 2).sum()
            w = update(w)
    assert marker.steps == 4


def test_backward_without_an_update_is_no_step():
    with marked() as (marker, _):
        w = torch.ones(3, requires_grad=True)
        for _ in range(4):
            w.square().sum().backward()
    assert marker.steps == 0


def test_optimizers_in_gradient_hooks_make_one_step_per_backward():
    weights = [parameter(), parameter()]
    with marked() as (marker, _):
        optimizers = {w: sgd(w) for w in weights}
        for w in weights:
            w.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
        for _ in range(3):
            sum(w.square().sum() for w in weights).backward()
    assert marker.steps == 3


def test_a_rollout_begins_an_iteration():
    logits = nn.Parameter(torch.zeros(4, 5))
    with marked() as (marker, _):
        optimizer = sgd(logits)
        for _ in range(3):
            with torch.no_grad():
                actions = torch.distributions.Categorical(logits=logits).sample()
            for _ in range(4):
                torch.distributions.Categorical(logits=logits).log_prob(actions).sum().backward()
                optimizer.step()
    assert (marker.steps, marker.iterations) == (12, 3)


def test_sampling_with_gradients_is_no_rollout():
    mean = parameter()
    with marked() as (marker, _):
        optimizer = sgd(mean)
        torch.distributions.Normal(mean, 1.0).sample()
        mean.sum().backward()
        optimizer.step()
    assert (marker.steps, marker.iterations) == (1, 0)


def test_a_function_that_steps_keeps_none_of_its_tensors_alive():
    """The marker looks at the frames that call step(); holding them would hold the script's activations."""
    with marked():
        optimizer = sgd()

        def step_with(tensor: torch.Tensor) -> weakref.ref[torch.Tensor]:
            activation = tensor * 2
            optimizer.step()
            return weakref.ref(activation)

        gc.disable()
        try:
            assert step_with(torch.ones(3))() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("where", ["args", "kwargs"])
def test_a_closure_is_wrapped_and_another_argument_of_step_is_left_alone(where):
    def arguments(value):
        return (("self", value), {}) if where == "args" else (("self",), {"closure": value})

    def wrap(closure):
        return lambda: ["wrapped", closure()]

    args, kwargs = wrap_closure(*arguments(lambda: 1), wrap)
    assert (args[1] if where == "args" else kwargs["closure"])() == ["wrapped", 1]
    weight = torch.zeros(1, requires_grad=True)
    for value in (None, torch.optim.SGD([weight], lr=0.1), True):
        assert wrap_closure(*arguments(value), wrap) is None
