"""On the practice scripts a trace made on the CPU says what the recorder says, where it can know."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from trace_maker import profiled

from leanstep.diagnose.traces.trace_report import TraceRun

STEPS = Path(__file__).parent / "steps"
MARK = re.compile(r"# expect: (.*)$")
# Rules that a trace can answer; the others need values, storages or which leaf an optimizer holds.
KNOWN = ("host-sync", "op-storm", "unbatched-optimizer", "transposed-copy", "full-vocab", "retained-chunks")
# (script, rule) -> why a trace cannot know it.
CANNOT = {
    ("clean_host_data", "host-sync"): "whether a tensor lives on the host: on a CPU all do",
}
# `unbatched_by_hand` has no optimizer: nothing marks where a step ends.
PLANTED = ("sync_", "storm_", "unbatched_a", "unbatched_m", "transposed_", "full_vocab_", "retained_")
CLEAN = (
    "clean_checkpoint",
    "clean_chunk_backward",
    "clean_average_then_layers",
    "clean_host_data",
)
SCRIPTS = sorted(path for path in STEPS.glob("*.py") if path.stem.startswith((*PLANTED, *CLEAN)))


def expected(script: Path) -> set[tuple[str, int, int]]:
    found = set()
    for number, text in enumerate(script.read_text(encoding="utf-8").splitlines(), 1):
        match = MARK.search(text)
        for mark in match[1].split(";") if match and match[1] != "nothing" else ():
            rule, count, *_ = mark.split()
            found.add((rule, number, int(count.removeprefix("count="))))
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_trace_and_recorder_agree(script: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(STEPS)
    run = TraceRun(str(profiled(script, tmp_path / "trace.json")))
    rules = [rule for rule in KNOWN if (script.stem, rule) not in CANNOT]
    found = {(f.rule, f.line.number, f.count) for f in run.findings() if f.rule in rules}
    assert found == {mark for mark in expected(script) if mark[0] in rules}
    assert len(run.steps) == 3
