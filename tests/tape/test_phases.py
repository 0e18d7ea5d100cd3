"""Rollout, scoring and update: what the marker says, and that diagnose and rehearse say the same."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from rehearse.rehearsed import stub_or_skip
from torch import nn

from leanstep.diagnose.iteration_times import IterationClock, Position
from leanstep.diagnose.outputs import screen
from leanstep.diagnose.watch import Watch
from leanstep.rehearse.devices import device_named
from leanstep.rehearse.events import Request
from leanstep.rehearse.iterations import last_iteration
from leanstep.rehearse.stage import rehearse
from leanstep.tape.children import call_in_child
from leanstep.tape.marks import NO_GRAD, OTHER, ROLLOUT, SCORING, UPDATE, Mark, spans
from leanstep.tape.phases import PhaseMarker
from leanstep.tape.run import Program, run_script
from leanstep.tape.steps import StepListener, StepMarker

SCRIPTS = Path(__file__).parent / "phases"
# Script -> its phases but OTHER, and the steps of an iteration.
PHASES = {
    "cached_rollout": ({ROLLOUT, SCORING, UPDATE}, 2),
    "method_rollout": ({ROLLOUT, UPDATE}, 1),
    "greedy_rollout": ({ROLLOUT, SCORING, UPDATE}, 1),
    "evaluated_training": ({NO_GRAD, UPDATE}, 1),
}


def marked(run: Any) -> list[str]:
    """The phases that a training goes through."""
    marker = StepMarker(StepListener(), PhaseMarker(itertools.count().__next__))
    with marker:
        run()
    return [mark.phase for mark in marker.phases.marks if mark.phase != OTHER]


def policy() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    model(tokens).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", ["cached_rollout", "method_rollout", "greedy_rollout"])
def test_the_phases_of_a_script_alternate(name: str) -> None:
    phases = marked(lambda: runpy.run_path(str(SCRIPTS / f"{name}.py")))
    scored = [SCORING] if SCORING in PHASES[name][0] else []
    iteration = [ROLLOUT, *scored, *[UPDATE] * PHASES[name][1]]
    assert phases == iteration * (len(phases) // len(iteration)) and len(phases) >= 2 * len(iteration)


def test_an_evaluation_is_no_rollout() -> None:
    phases = marked(lambda: runpy.run_path(str(SCRIPTS / "evaluated_training.py")))
    assert phases == [UPDATE, SCORING] * 6


def test_a_reference_between_forward_and_backward_returns_to_the_update() -> None:
    """What follows the no-grad block is the loss of the update, not scoring."""
    model, optimizer = policy()

    def run() -> None:
        tokens = torch.zeros(2, 3, dtype=torch.long)
        logits = model(tokens)
        with torch.no_grad():
            reference = model(tokens)
        (logits - reference).square().sum().backward()
        optimizer.step()

    assert marked(run) == [UPDATE, SCORING, UPDATE]


def test_batches_whose_lengths_happen_to_grow_are_scored() -> None:
    """Three calls in a row that grow by one are not enough for a generation."""
    model, optimizer = policy()

    def run() -> None:
        update(model, optimizer, torch.zeros(2, 3, dtype=torch.long))
        with torch.no_grad():
            for length in (4, 5, 6, 9, 10, 11):
                model(torch.zeros(1, length, dtype=torch.long))

    assert marked(run) == [UPDATE, SCORING]


def test_a_frozen_model_is_scored_without_no_grad() -> None:
    model, optimizer = policy()
    judge = nn.Linear(4, 1).requires_grad_(False)

    def run() -> None:
        judge(torch.zeros(2, 4))
        update(model, optimizer, torch.zeros(2, 3, dtype=torch.long))

    assert marked(run) == [SCORING, UPDATE]


def test_spans_are_cut_at_both_ends() -> None:
    marks = [Mark(2, ROLLOUT), Mark(5, SCORING), Mark(5, UPDATE), Mark(9, OTHER)]
    assert spans(marks, 3, 8) == [(ROLLOUT, 3, 5), (UPDATE, 5, 8)]
    assert spans(marks, 0, 2) == [(OTHER, 0, 2)]


def test_the_iteration_clock_times_a_rollout_and_all_its_updates() -> None:
    """The updates that were left of the iteration before are not part of it."""
    clock = IterationClock()
    clock.start(Position(1.0))
    clock.step_ends(Position(2.0))
    assert not clock.rollout_begins()
    for now in (10.0, 11.0):
        clock.step_ends(Position(now))
    assert clock.rollout_begins()
    iteration = clock.iteration
    assert iteration is not None
    assert (iteration.start.time, iteration.end.time, iteration.steps) == (2.0, 11.0, 2)
    watch = Watch()
    watch.iteration_clock = clock
    assert "9 s per iteration, 2 updates" in screen.header(watch, "train.py")


def _diagnosed(path: str, steps: int) -> tuple[dict[str, int], bool, float | None]:
    watch = Watch(steps=steps, warmup=1, timed_warmup=True)
    run_script(Program(path), [], watch)
    timed = all(entry.seconds is not None for entry in watch.phases if entry.phase != OTHER)
    flops = {entry.phase: entry.flops for entry in watch.phases if entry.phase != OTHER}
    # Beside other processes the timed step may be nothing but waits.
    return flops, timed, watch.step_seconds or watch.waited_seconds


@pytest.mark.parametrize("name", PHASES)
def test_diagnose_and_rehearse_agree_on_phases_and_their_flops(name: str) -> None:
    stub_or_skip()
    path, (names, steps) = SCRIPTS / f"{name}.py", PHASES[name]
    flops, timed, step_seconds = call_in_child(_diagnosed, str(path), steps, fork=True)
    assert set(flops) == names and timed and step_seconds
    recording = rehearse(Request(str(path), steps=3 * steps), quiet=True)
    iteration = last_iteration(recording, device_named("h100"))
    assert iteration is not None and len(iteration.steps) == steps and iteration.whole
    assert {entry.phase: entry.flops for entry in iteration.phases if entry.phase != OTHER} == flops
    recorded, extrapolated = recording.model_calls
    assert extrapolated >= recorded
    assert all(
        entry.peak_bytes > 0 and entry.kernels > 0 for entry in iteration.phases if entry.phase in names
    )


def test_diagnose_counts_an_iteration_when_the_recording_ends_inside_one() -> None:
    path = str(SCRIPTS / "cached_rollout.py")
    whole, cut = (call_in_child(_diagnosed, path, steps, fork=True)[0] for steps in (2, 3))
    assert whole == cut


@pytest.mark.parametrize("name", PHASES)
def test_extrapolated_calls_cost_what_they_cost_when_all_of_them_run(name: str) -> None:
    stub_or_skip()
    runs = []
    for every_call in (True, False):
        request = Request(str(SCRIPTS / f"{name}.py"), steps=4, every_call=every_call)
        recording = rehearse(request, quiet=True)
        iteration = last_iteration(recording, device_named("h100"))
        assert iteration is not None
        runs.append(iteration)
    whole, short = runs
    for every, few in zip(whole.phases, short.phases, strict=True):
        assert (every.phase, every.kernels, every.flops) == (few.phase, few.kernels, few.flops)
        assert few.device_s == pytest.approx(every.device_s, rel=0.01)
        assert few.seconds == pytest.approx(every.seconds, rel=0.05)
        assert few.peak_bytes == pytest.approx(every.peak_bytes, rel=0.02)
