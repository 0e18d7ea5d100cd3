"""The predicted columns of the README: benchmarks on simulated GPUs, kept in `results/predicted-rows.json`.

    python dev/predicted_rows.py               # every row on every device; a minute each
    python dev/predicted_rows.py sft_step      # only this benchmark

Every figure is predicted by `leanstep rehearse`; nothing was measured on a GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import leanstep
from leanstep.files import write_text
from leanstep.rehearse import what_if
from leanstep.rehearse.cuda_allocator import memory_of
from leanstep.rehearse.devices import device_named
from leanstep.rehearse.events import Request
from leanstep.rehearse.stage import rehearse

FILE = Path(__file__).parents[1] / "results" / "predicted-rows.json"
DEVICES = ("h100", "4090")
# benchmark, implementation, parameters that differ from the size `gpu`.
ROWS = (
    ("sft_step", "transformers", {}),
    ("sft_step", "leanstep", {}),
    ("grpo_step", "trl", {}),
    ("grpo_step", "leanstep", {}),
    ("sft_step", "transformers", {"response_frac": 1.0}),
    ("sft_step", "leanstep", {"response_frac": 1.0}),
    ("logprob_linear", "plain", {}),
    ("logprob_linear", "leanstep", {}),
    ("logprob_linear", "cut-cross-entropy", {}),
    ("muon_step", "plain", {}),
    ("muon_step", "leanstep", {}),
)


def key(benchmark: str, impl: str, overrides: dict[str, Any], device: str) -> str:
    changed = "".join(f" {name}={value}" for name, value in overrides.items())
    return f"{benchmark} {impl}{changed} on {device}"


def predict(benchmark: str, impl: str, overrides: dict[str, Any], device: str) -> dict[str, Any]:
    """Rehearse three steps of one implementation; return its figures and the command that repeats them."""
    args = ["--device", "cuda", "--impl", impl, "--steps", "3"]
    args += [word for name, value in overrides.items() for word in ("--set", f"{name}={value}")]
    target = f"benchmarks.{benchmark}"
    recording = rehearse(Request(target, tuple(args), module=True, device=device), quiet=True)
    if recording.refused is not None:
        raise SystemExit(f"{target} {impl}: {recording.refused.line}: {recording.refused.reason}")
    where = device_named(device)
    memory = memory_of(recording, where.memory_bytes, where.context_bytes, points=1)
    timing = what_if.update_step(recording, where)
    assert timing is not None, target
    return {
        "command": f"leanstep rehearse -m {target} --device {device} -- {' '.join(args)}",
        "leanstep": leanstep.__version__,
        "torch": recording.torch,
        "fits": memory.fits,
        "peak_bytes": memory.allocated,
        "needed_bytes": memory.needed,
        "step_s": timing.step_s,
        "interval_s": list(timing.interval_s),
        "bound_by": timing.bound_by,
        "kernels": timing.kernels,
    }


def main(names: list[str]) -> int:
    rows = json.loads(FILE.read_text(encoding="utf-8"))["rows"] if FILE.exists() else {}
    for benchmark, impl, overrides in ROWS:
        for device in DEVICES if not names or benchmark in names else ():
            name = key(benchmark, impl, overrides, device)
            rows[name] = predict(benchmark, impl, overrides, device)
            print(name, rows[name], flush=True)
            text = json.dumps({"command": "python dev/predicted_rows.py", "rows": rows}, indent=1) + "\n"
            write_text(FILE, text, "results")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
