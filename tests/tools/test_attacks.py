"""A fast part of `tools/attacks.py`, whose whole table is run before a release: nothing may fail."""

from __future__ import annotations

import importlib
import os

import pytest
from tool_loader import load_tool

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
attacks = load_tool("attacks")
# Group -> every how manieth attack runs here, and from which on.
SHARES = {
    "trace-fields": (31, 5),
    "trace-files": (11, 3),
    "trace-names": (9, 2),
    "trace-reads": (1, 0),
    "reports": (17, 4),
    "outputs": (3, 0),
    "checkpoints": (6, 1),
    "caches": (4, 2),
    "settings": (4, 0),
}
# Reproductions of defects that were seen: by name.
NAMED = {
    "trace-fields": ["ts = huge", "correlation = inf", "Input Dims = object", "Input type = negative"],
    "trace-names": ["newline in file", "escape in file", "html in file", "longer than a path in file"],
    "trace-files": ["FIFO"],
    "reports": ["diff: deep", "diff: count = object", "baseline: count = inf", "page: diagnose = list"],
    "outputs": ["--json null device", "--html link", "--baseline FIFO"],
    "checkpoints": ["200 GiB of nothing", "FIFO", "settings = null", "numpy state", "counts as text"],
    "caches": ["corpus.json is {}", "folder of a killed build"],
    "settings": ["lens width 47", "deep record"],
    "scripts": [
        "diagnose: os._exit(0) at the end",
        "diagnose: os._exit(0) in step 2",
        "diagnose: os._exit(0) in a thread",
        "diagnose: os.execv",
        "diagnose: exception that cannot be printed",
        "prove: os._exit(0) in step 2",
        "prove: SIGKILL to itself",
        "prove: pickle.dumps patched",
        "prove: temporary folders removed",
    ],
    "surroundings": ["ascii: diagnose --trace", "full output, --json -", "long TMPDIR: bench"],
}


def chosen():
    for group, make in attacks.GROUPS.items():
        every, first = SHARES.get(group, (0, 0))
        for number, attack in enumerate(make()):
            if attack.name in NAMED.get(group, ()) or (every and number % every == first):
                yield pytest.param(attack, id=f"{group}-{attack.name}")


@pytest.mark.parametrize("attack", list(chosen()))
def test_an_attack_is_survived_or_refused(attack):
    for name in attacks.IMPORTED:
        importlib.import_module(name)
    verdict, why = attacks.try_attack(attack)
    assert verdict in (attacks.SURVIVED, attacks.REFUSED), why


def test_every_reproduction_exists():
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    for group, names in NAMED.items():
        there = {attack.name for attack in attacks.GROUPS[group]()}
        assert set(names) - there <= (set() if root else {"--json null device"})
