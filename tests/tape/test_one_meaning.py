"""One meaning of step, line and sync: nine scripts, and diagnose, prove, bench and rehearse say the same.

Every script makes six updates. Its lines that wait for the device are marked `# SYNC`.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rehearse.rehearsed import stub_or_skip

from leanstep.cli import run
from leanstep.prove.script_jobs import Job
from leanstep.prove.stopwatch import bench_scripts
from leanstep.rehearse.events import HostWait, Recording, Request
from leanstep.rehearse.stage import rehearse
from leanstep.tape.children import call_in_child

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py"))
STEPS = 6
# Rollouts; other scripts have none.
ITERATIONS = {"grpo": 2}
# Imported once here, before processes are forked for each command.
NEEDS = {
    "lightning_trainer": ("lightning", "Trainer"),
    "hf_trainer": ("transformers", "Trainer"),
    "compiled": ("torch._dynamo.backends.debugging", "aot_eager"),
}
Lines = dict[tuple[str, int], int]


def script(name: str) -> Path:
    if name in NEEDS:
        module, attribute = NEEDS[name]
        assert hasattr(pytest.importorskip(module), attribute)
    return SCRIPTS / f"{name}.py"


def marked(path: Path) -> set[int]:
    return {n for n, text in enumerate(path.read_text().splitlines(), 1) if text.endswith("# SYNC")}


def _run_in_child(arguments: list[str], folder: str) -> dict[str, Any]:
    target = Path(folder) / "report.json"
    run([*arguments, "--json", str(target)])
    return json.loads(target.read_text())


def report_of(folder: Path, *arguments: str) -> dict[str, Any]:
    """What a command writes with --json, from a process of its own: trainers leave much behind."""
    return call_in_child(_run_in_child, list(arguments), str(folder), fork=True)


def diagnosed(folder: Path, path: Path) -> tuple[int, int, Lines]:
    report = report_of(folder, "diagnose", str(path), "--steps", "100", "--all")
    syncs = {
        (Path(finding["file"]).name, finding["line"]): finding["count"]
        for finding in report["findings"]
        if finding["rule"] == "host-sync"
    }
    steps = report["steps"]
    return steps["warmup"] + steps["recorded"], steps["iterations"] or 0, syncs


def proven(folder: Path, path: Path) -> dict[str, Any]:
    return report_of(folder, "prove", str(path), str(path), "--steps", "100")


def rehearsed(path: Path) -> Recording:
    return rehearse(Request(str(path), device="h100", steps=STEPS + 1), quiet=True)


def waits(recording: Recording, step: int) -> Lines:
    """Syncs of a step by line; copies of a batch to the device have no counterpart on a CPU."""
    first, last = recording.steps[step].first, recording.steps[step].last
    events = [e for e in recording.events[first:last] if isinstance(e, HostWait)]
    events = [e for e in events if not e.kind.startswith("to device")]
    return dict(Counter((Path(e.line.file).name, e.line.number) for e in events if e.line is not None))


@pytest.mark.parametrize("name", NAMES)
def test_every_command_sees_the_same_steps_and_syncs(name: str, tmp_path: Path, capfd) -> None:
    stub_or_skip()
    path = script(name)
    expected = (STEPS, ITERATIONS.get(name, 0))

    steps, iterations, syncs = diagnosed(tmp_path, path)
    assert (steps, iterations) == expected
    assert {number for file, number in syncs if file == path.name} == marked(path)

    proof = proven(tmp_path, path)
    assert proof["problem"] is None and proof["ok"], proof["verdict"]
    assert (proof["steps"], proof["iterations"]) == expected

    job = Job(str(path))
    bench = bench_scripts(job, job, budget_s=60.0, min_rounds=2, fork=True)
    # The side that is asked first sees the script end; both count what ran.
    assert max((row.steps, row.iterations) for row in (bench.before, bench.after)) == expected
    assert bench.before.host_syncs == bench.after.host_syncs == sum(syncs.values())

    recording = rehearsed(path)
    assert (len(recording.steps), recording.iterations) == expected
    for step in range(1, STEPS - 1):
        assert waits(recording, step) == syncs


def test_prove_lists_the_parameters_of_all_optimizers(tmp_path: Path, capfd) -> None:
    proof = proven(tmp_path, script("gan"))
    names = {row["parameter"] for row in proof["rows"] if row["what"] == "update" and row["step"] == 1}
    assert proof["parameters"] == 4 and len(names) == 4
