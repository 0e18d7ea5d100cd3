"""Two checkouts of leanstep, one interleaved run: did any case become slower?

    git worktree add ../before COMMIT
    python tools/old_new.py ../before . --seconds 20 --json old-new.json

One process per checkout holds the case's workload; they take turns, one step each, so a busy machine slows
both alike. Printed per case: medians, and the median ratio of neighbouring steps with its quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, cast


def serve(name: str, implementation: str) -> None:
    """A worker: build the case once, then one timed step for every line on standard input."""
    import torch

    from leanstep.case import all_cases

    case = all_cases()[name]
    params = case.params(case.default_size)
    build = next(i for i in case.implementations if i.name == implementation).build
    torch.manual_seed(0)
    step = build(case.workload(params, case.bench_dtype))
    step()
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        print(time.perf_counter() - start, flush=True)


def list_cases() -> None:
    """The cases of this checkout and the name of the fast path of each."""
    from leanstep.case import all_cases

    rows = {}
    for name, case in sorted(all_cases().items()):
        fast = [
            i.name for i in case.implementations if i.kind == "fast" and not i.missing(case.params("tiny"))
        ]
        rows[name] = "leanstep" if "leanstep" in fast else fast[0]
    print(json.dumps(rows))


def start(checkout: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=checkout
    )


def cases_of(checkout: Path) -> dict[str, str]:
    out, _ = start(checkout, "--list").communicate()
    return json.loads(out)


def take_turns(workers: list[subprocess.Popen[str]], seconds: float, least: int) -> list[list[float]]:
    """Steps of all workers in turn until `seconds` have passed and each has done `least`."""
    times: list[list[float]] = [[] for _ in workers]
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times[0]) < least:
        order = range(len(workers)) if len(times[0]) % 2 == 0 else reversed(range(len(workers)))
        for i in order:
            print(file=cast(IO[str], workers[i].stdin), flush=True)
            times[i].append(float(cast(IO[str], workers[i].stdout).readline()))
    return times


def compare(
    old: Path, new: Path, case: str, implementation: str, options: argparse.Namespace
) -> dict[str, float]:
    workers = [start(checkout, "--serve", case, implementation) for checkout in (old, new)]
    try:
        for worker in workers:
            if cast(IO[str], worker.stdout).readline().strip() != "ready":
                raise SystemExit(f"{case}: a worker ended before its first step")
        before, after = take_turns(workers, options.seconds, options.least)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    ratios = sorted(a / b for a, b in zip(after, before, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "old_ms": statistics.median(before) * 1e3,
        "new_ms": statistics.median(after) * 1e3,
        "ratio": middle,
        "low": low,
        "high": high,
        "turns": len(ratios),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="OLD NEW")
    parser.add_argument(
        "--cases", default="", help="comma-separated; all that both checkouts have by default"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="per case")
    parser.add_argument("--least", type=int, default=7, help="turns per case, however long they take")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return 0
    if options.list:
        list_cases()
        return 0
    if len(options.checkouts) != 2:
        parser.error(f"expected two checkouts, got {len(options.checkouts)}")
    old, new = options.checkouts
    before, after = cases_of(old), cases_of(new)
    wanted = [n for n in options.cases.split(",") if n] or sorted(before.keys() & after.keys())
    results = {}
    for name in wanted:
        row = results[name] = compare(old, new, name, after[name], options)
        print(
            f"{name:20} {after[name]:12} old {row['old_ms']:9.2f} ms  new {row['new_ms']:9.2f} ms  "
            f"new/old {row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]  {row['turns']:.0f} turns",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
