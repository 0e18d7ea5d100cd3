"""torch.cuda.graph: the public paths can be captured; what cannot be is refused where it happens."""

from __future__ import annotations

import json

import pytest
from rehearse.rehearsed import SCRIPTS, Rehearsed, run_script

from leanstep.rehearse.devices import device_named
from leanstep.rehearse.events import GRAPH_REPLAY, Alloc, Launch
from leanstep.rehearse.time_model import HostCosts, time_steps

PATHS = [
    *("linear_logprobs", "linear_policy_loss", "token_logprobs"),
    "LensObjective",
]


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Rehearsed:
    pytest.importorskip("triton", reason="Triton is not installed")
    folder = tmp_path_factory.mktemp("graphs")
    return run_script(SCRIPTS / "captured.py", capture=folder, steps=10_000, device="h100")


def said(graphs: Rehearsed, name: str) -> dict:
    assert graphs.recording.refused is None, graphs.recording.refused
    return json.loads(graphs.printed.splitlines()[-1])[name]


@pytest.mark.parametrize("name", PATHS)
def test_a_path_is_captured_and_replayed(graphs, name):
    """No wait, no question for free memory, and all it reads is still there when it is replayed."""
    found = said(graphs, name)
    assert "trouble" not in found, found
    recording = graphs.recording
    eager, replays = (recording.steps[found["step"] - back] for back in (1, 0))
    calls = [e for e in recording.events[eager.first : eager.last] if isinstance(e, Launch)]
    again = [e for e in recording.events[replays.first : replays.last] if isinstance(e, Launch)]
    graph_calls = [e for e in again if e.name == GRAPH_REPLAY]
    assert len(graph_calls) == 2
    # As many kernels as the eager call has, one call of the host, no memory taken.
    kernels = [k for e in calls for k in e.kernels]
    assert [sum(k.launches for k in e.kernels) for e in graph_calls] == [sum(k.launches for k in kernels)] * 2
    assert not [e for e in recording.events[replays.first : replays.last] if isinstance(e, Alloc)]
    ends = [step.last for step in recording.steps]
    timings = time_steps(recording.events, ends, device_named("h100"), HostCosts.of(4.0))
    one, two = timings[found["step"] - 1], timings[found["step"]]
    assert two.device_s == pytest.approx(2 * one.device_s) and two.host_s < one.host_s


@pytest.mark.parametrize("what", ["item", "synchronize", "pageable copy"])
def test_a_capture_refuses_what_waits(graphs, what):
    message = said(graphs, what)["said"]
    assert "not permitted when stream is capturing" in message and "captured.py" in message


def test_a_replay_names_memory_that_was_freed(graphs):
    assert "freed after the capture: float32 [300] allocated at captured.py" in said(graphs, "freed")["said"]
