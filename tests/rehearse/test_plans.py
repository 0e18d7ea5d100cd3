"""A call that is built from its plan leaves the same tape as one that FakeTensorMode works out."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from rehearse.rehearsed import SCRIPTS, run_script

from leanstep.rehearse.answers.fake_device import library
from leanstep.rehearse.events import Launch, Recording, Request

CODE = """
import sys
from pathlib import Path
from leanstep.rehearse import stage
from leanstep.rehearse.answers import fake_device
fake_device.load(Path(sys.argv[1]))
from leanstep.rehearse import tape
tape.MOST_PLANS = 0
stage._child(*sys.argv[2:4])
"""


def without_plans(folder: Path) -> tuple[Recording, str]:
    """In an interpreter of its own: there is no option for it."""
    asked, answered = folder / "asked", folder / "answered"
    request = Request(str(SCRIPTS / "repeats.py"), device="a100", steps=5)
    asked.write_bytes(pickle.dumps((request, dict(os.environ), str(Path.cwd()))))
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r})" + CODE
    command = [sys.executable, "-c", code, str(library()), str(asked), str(answered)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert answered.exists(), done.stderr[-2000:]
    return pickle.loads(answered.read_bytes()), done.stdout


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    planned = run_script(SCRIPTS / "repeats.py", capture=folder, steps=5)
    return (planned.recording, planned.printed), without_plans(folder)


def test_the_tape_is_the_same(pair):
    (planned, _), (plain, _) = pair
    assert plain.refused is None
    assert plain.ended == planned.ended == "steps"
    assert planned.peak_bytes == plain.peak_bytes
    assert planned.steps == plain.steps
    for mine, theirs in zip(planned.events, plain.events, strict=True):
        assert mine == theirs
    assert planned.storages == plain.storages
    assert planned.assumed == plain.assumed


def test_the_program_reads_the_same_values(pair):
    (_, said), (_, expected) = pair
    assert said == expected
    assert said.splitlines()[0] == "(17, 1, 'torch.float32', (3,))"


def test_floats_that_change_make_no_new_calls(pair):
    """Steps 1 to 4 differ in the learning rate and in the mask only."""
    (planned, _), _ = pair
    names = [
        [e.name for e in planned.events[s.first : s.last] if isinstance(e, Launch)] for s in planned.steps[1:]
    ]
    assert all(other == names[0] for other in names)
