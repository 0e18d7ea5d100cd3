"""One list of host syncs: `diagnose` on a CPU and a rehearsal count the same ones."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
from rehearse.rehearsed import SCRIPTS, run_script

from leanstep.rehearse.devices import DEVICES
from leanstep.rehearse.events import HostWait, Recording
from leanstep.rehearse.shadows import DYNAMIC
from leanstep.rehearse.time_model import Clock
from leanstep.tape.syncs import ALWAYS_READ, count_host_reads

SHARED = runpy.run_path(str(SCRIPTS / "sync_snippets.py"))
SNIPPETS: dict[str, tuple[str, int]] = SHARED["SNIPPETS"]


@pytest.fixture(scope="module")
def recording() -> Recording:
    return run_script(SCRIPTS / "syncs.py", steps=10_000).recording


def waits_of(recording: Recording, name: str) -> list[HostWait]:
    """The waits of a snippet; copies to the device are no reads."""
    assert recording.refused is None, recording.refused
    step = recording.steps[2 * list(SNIPPETS).index(name) + 1]
    events: list[Any] = recording.events[step.first : step.last]
    return [e for e in events if isinstance(e, HostWait) and not e.kind.startswith("to device")]


@pytest.mark.parametrize("name", SNIPPETS)
def test_diagnose_and_rehearse_count_the_syncs_of_a_gpu(recording, name):
    code, expected = SNIPPETS[name]
    names = SHARED["namespace"]("cpu")
    with count_host_reads() as reads:
        exec(code, names)
    assert reads.total == expected
    assert sum(wait.counts for wait in waits_of(recording, name)) == expected


def test_the_backward_of_a_boolean_index_takes_time_and_is_not_counted_again(recording):
    waits = waits_of(recording, "mask read, backward")
    assert [(wait.phase, wait.counts) for wait in waits] == [("forward", True), ("backward", False)]
    clock = Clock(DEVICES["h100"])
    for wait in waits:
        clock.play(wait)
    assert clock.waits == 1
    assert clock.host == pytest.approx(2 * clock.costs.wait_us * 1e-6)


def test_every_op_of_the_list_has_an_answer():
    names = {name.removeprefix("aten::") for name in ALWAYS_READ}
    of_fixed_shape = {"_local_scalar_dense", "equal", "allclose", "_linalg_check_errors"}
    assert names - of_fixed_shape <= DYNAMIC.keys()
