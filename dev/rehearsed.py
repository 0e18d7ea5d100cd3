"""Predicted figures that must not grow: rehearsed here, kept in `results/rehearsed/`, compared by a test.

    python dev/rehearsed.py                    # rehearse every script, write results/rehearsed/*.json
    python dev/rehearsed.py normuon            # only this script

Every figure is predicted for the device in the file, with 4 us of host time a launch; nothing was measured.
A row of a script is one step: the script cuts its steps, `ROWS` names those that count.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leanstep.files import write_text
from leanstep.rehearse.cuda_allocator import memory_of
from leanstep.rehearse.devices import device_named
from leanstep.rehearse.events import Alloc, Event, Free, HostWait, Launch, Recording, Request
from leanstep.rehearse.stage import rehearse
from leanstep.rehearse.time_model import HostCosts, time_steps
from leanstep.rehearse.what_if import step_events

ROOT = Path(__file__).parents[1]
DEVICE, HOST_US = "h100", 4.0
# script -> {index of a step: name of its row}
ROWS = {
    "normuon": {2: "normuon-124m-fp32", 4: "normuon-124m-bf16", 6: "normuon-124m-banks"},
    "head": dict(
        zip(
            range(2, 100, 2),
            "bare-76k bare-three-76k head-76k finish-76k frozen-76k frozen-entropy-76k policy-76k "
            "bare-152k head-152k autocast-152k bare-1024-152k head-1024-152k logits-152k verl-76k trl-76k "
            "liger-76k verl-152k torch-76k".split(),
            strict=False,
        )
    ),
    "objectives": dict(
        zip(
            range(2, 100, 2),
            "bare-distill-76k distill-jsd-76k distill-kl-76k "
            "bare-preference-76k dpo-76k kto-76k bare-labels-76k cross-entropy-76k masked-76k "
            "bare-distill-128k distill-jsd-128k".split(),
            strict=False,
        )
    ),
}


def figures(script: str) -> dict[str, dict[str, Any]]:
    """Name of a row -> its predicted figures."""
    rows = ROWS[script]
    path = ROOT / "dev" / "rehearsals" / f"{script}.py"
    recording = rehearse(Request(str(path), device=DEVICE, steps=max(rows) + 1), quiet=True)
    if recording.refused is not None or len(recording.steps) <= max(rows):
        raise SystemExit(f"{script}: {recording.refused or 'ended early'}")
    return rows_of(recording, rows)


def rows_of(recording: Recording, rows: dict[int, str]) -> dict[str, dict[str, Any]]:
    """Of one recording, compiled regions fused; reserved memory is the peak of all its steps."""
    device = device_named(DEVICE)
    memory = memory_of(recording, device.memory_bytes, device.context_bytes, points=1)
    played: list[Event] = []
    ends = []
    for step in recording.steps:
        played += step_events(recording, step)
        ends.append(len(played))
    timings = time_steps(played, ends, device, HostCosts.of(HOST_US))
    results = {}
    for index, name in rows.items():
        step, time = recording.steps[index], timings[index]
        waits = [e for e in recording.events[step.first : step.last] if isinstance(e, HostWait)]
        results[name] = {
            "launches": time.kernels,
            "host_waits": len(waits),
            "device_ms": round(time.device_s * 1e3, 3),
            "host_ms": round(time.host_s * 1e3, 3),
            "products_ms": round(time.classes.get("gemm", 0.0) * 1e3, 3),
            "step_ms": round(time.step_s * 1e3, 3),
            "peak_gib": round(memory.reserved / 2**30, 2),
            **_shape_of(recording.events, step.first, step.last),
        }
    return results


def _shape_of(events: Sequence[Event], first: int, last: int) -> dict[str, int]:
    """Products that are slow by their operands, and the peak beyond what is alive at the end of the step."""
    sizes: dict[int, int] = {}
    now = peak = 0
    for index, event in enumerate(events[:last]):
        if isinstance(event, Alloc):
            sizes[event.storage] = event.nbytes
            now += event.nbytes
        elif isinstance(event, Free):
            now -= sizes.pop(event.storage, 0)
        peak = max(peak, now) if index >= first else now
    launches = [e for e in events[first:last] if isinstance(e, Launch)]
    products = [k for launch in launches for k in launch.kernels if k.kind == "gemm"]
    return {
        "misaligned_products": sum(k.alignment < 16 for k in products),
        "fp32_products": sum(k.dtype in ("float32", "tf32") for k in products),
        "extra_mib": round((peak - now) / 2**20),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scripts", nargs="*", choices=[[], *ROWS], help="all without")
    for script in parser.parse_args().scripts or ROWS:
        for name, row in figures(script).items():
            command = f"python dev/rehearsed.py {script}"
            held = {"command": command, "device": DEVICE, "host_us": HOST_US, "predicted": row}
            (ROOT / "results" / "rehearsed").mkdir(exist_ok=True)
            text = json.dumps(held, indent=1) + "\n"
            write_text(ROOT / "results" / "rehearsed" / f"{name}.json", text, "results")
            print(name, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
