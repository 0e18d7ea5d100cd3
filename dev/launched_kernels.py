"""Compile what the public paths launch, with the launches' own arguments, for every target.

    python dev/launched_kernels.py                        all targets; writes results/launched-kernels.json
    python dev/launched_kernels.py --targets sm_90        one of them; its row of that file is replaced
    python dev/launched_kernels.py --sample 16            every 16th variant, printed only

Each target's launches are recorded in a rehearsal on a device of its kind (tests/dev/kernel_checks/
recorded_paths.py), because tiles and stages depend on the device. A tool, not a test: all targets take a
quarter of an hour of one core, and a second run finds what the first compiled in Triton's cache.
tests/dev/kernel_checks/test_launched.py compiles a part.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dev.kernel_checks.aot import SHARED_LIMITS, TARGETS
from dev.kernel_checks.launch_variants import RecordedLaunch, compile_variant, variants_of
from leanstep.rehearse.events import Request
from leanstep.rehearse.stage import rehearse

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "dev" / "kernel_checks" / "recorded_paths.py"
RESULTS = ROOT / "results" / "launched-kernels.json"
# The table of devices has no sm_120; consumer cards of both generations have the same shared memory.
DEVICES = {"sm_80": "a100", "sm_89": "4090", "sm_90": "h100", "sm_100": "b200", "sm_120": "4090"}
DEVICES |= {"gfx942": "mi300x"}


def launches_on(device: str, *rooms: str) -> list[RecordedLaunch]:
    """What the public paths launch on a device of the rehearsal's table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "launches.json"
        request = Request(str(SCRIPT), (str(out), *rooms), device=device, steps=100_000)
        recording = rehearse(request, quiet=True)
        if recording.refused is not None or not out.exists():
            raise RuntimeError(f"the rehearsal on {device} ended: {recording.refused}")
        return [RecordedLaunch.from_json(row) for row in json.loads(out.read_text())]


def compiled_for(target: str, launches: list[RecordedLaunch], sample: int = 1) -> dict[str, Any]:
    """One row of the table: variants, those that fall short, and the largest of each figure."""
    variants = variants_of(launches, target)
    rows = []
    for variant in variants[::sample]:
        rows.append(compile_variant(variant, target, shipped=False))
        print(f"{target} {len(rows)} of {len(variants[::sample])}: {rows[-1].kernel}", file=sys.stderr)
    return {
        "target": target,
        "launches": len(launches),
        "variants": len(variants),
        "compiled": len(rows),
        "shared_bytes": max(row.shared_bytes for row in rows),
        "shared_limit": SHARED_LIMITS[target],
        "largest": max(rows, key=lambda row: row.shared_bytes).kernel,
        "registers": max(row.registers for row in rows),
        "spilling": [f"{row.kernel}: {row.spill_bytes} bytes" for row in rows if row.spill_bytes],
        "complaints": [f"{row.kernel} {row.complaint}" for row in rows if row.complaint],
    }


def keep_row(row: dict[str, Any]) -> None:
    """Put one target's row into the file of results."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    rows = [*(other for other in rows if other["target"] != row["target"]), row]
    rows.sort(key=lambda one: TARGETS.index(one["target"]))
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile what the public paths launch.")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--sample", type=int, default=1, help="compile every N-th variant")
    chosen = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "0"
    targets = chosen.targets.split(",")
    recorded: dict[str, list[RecordedLaunch]] = {}
    table = []
    for target in targets:
        device = DEVICES[target]
        if device not in recorded:
            recorded[device] = launches_on(device)
        row = compiled_for(target, recorded[device], chosen.sample)
        table.append(row)
        print(json.dumps(row), flush=True)
        if chosen.sample == 1:
            keep_row(row)
    return 1 if any(row["complaints"] for row in table) else 0


if __name__ == "__main__":
    sys.exit(main())
