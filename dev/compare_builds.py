"""Do rehearsals count the same with several builds of torch?

    python dev/compare_builds.py PYTHON PYTHON ...                  # the programs of dev/programs.py
    python dev/compare_builds.py --programs FILE PYTHON PYTHON ...  # another file with the same interface

Each PYTHON is the interpreter of an environment with another build. Compared are launches by name, bytes,
host waits, peak memory and how each rehearsal ended. Exit code 1 when a count differs from the first build's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def counts(script: str, name: str) -> dict[str, Any]:
    """What one rehearsal counts."""
    from leanstep.rehearse.events import HostWait, Launch, Request
    from leanstep.rehearse.stage import rehearse

    recording = rehearse(Request(script, (name,), device="h100", steps=3), quiet=True)
    launches = [event for event in recording.events if isinstance(event, Launch) and event.kernels]
    return {
        "ended": recording.ended,
        "refused": recording.refused.reason if recording.refused is not None else None,
        "launches": sum(kernel.launches for event in launches for kernel in event.kernels),
        "bytes": round(sum(kernel.nbytes for event in launches for kernel in event.kernels)),
        "waits": sum(isinstance(event, HostWait) for event in recording.events),
        "peak_bytes": recording.peak_bytes,
        "calls": dict(sorted(Counter(event.name for event in launches).items())),
    }


def count_all(script: str) -> dict[str, Any]:
    """Counts of every program of the file, with the torch of this interpreter."""
    import torch

    names = subprocess.run(
        [sys.executable, script], check=True, capture_output=True, text=True
    ).stdout.split()
    return {"torch": torch.__version__, "programs": {name: counts(script, name) for name in names}}


def start(python: str, script: str) -> subprocess.Popen[str]:
    command = [python, __file__, "--count", "--programs", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def differences(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """One line per figure of a program that differs."""
    lines = []
    for name, expected in first["programs"].items():
        figures = other["programs"][name]
        for key, value in expected.items():
            if key != "calls" and figures[key] != value:
                lines.append(f"{name}: {key} {value} → {figures[key]}")
        before, after = Counter(expected["calls"]), Counter(figures["calls"])
        for call in sorted({*before, *after}):
            if before[call] != after[call]:
                lines.append(f"{name}: {call} {before[call]} → {after[call]}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", nargs="*", help="interpreters, one per build")
    parser.add_argument("--programs", default=str(ROOT / "dev" / "programs.py"))
    parser.add_argument("--count", action="store_true", help="print the counts of this interpreter as JSON")
    options = parser.parse_args()
    if options.count:
        print(json.dumps(count_all(options.programs)))
        return 0
    if len(options.python) < 2:
        parser.error("PYTHON: expected two interpreters or more")
    builds = [json.loads(start(p, options.programs).communicate()[0]) for p in options.python]
    first, different = builds[0], False
    ended = Counter(figures["ended"] for figures in first["programs"].values())
    print(f"{first['torch']}: {len(first['programs'])} programs, {dict(ended)}")
    for build in builds[1:]:
        lines = differences(first, build)
        programs = {line.partition(":")[0] for line in lines}
        same = len(first["programs"]) - len(programs)
        print(f"{build['torch']}: {same} of {len(first['programs'])} the same")
        print(*(f"  {line}" for line in lines), sep="\n", end="\n" if lines else "")
        different |= bool(lines)
    return int(different)


if __name__ == "__main__":
    raise SystemExit(main())
