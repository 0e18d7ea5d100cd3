"""Kill a training with SIGKILL at random moments, resume it each time, and compare with one left alone.

python tests/recipes/kill_resume.py --kills 20
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from leanstep.gpt import write_shard
from leanstep.recipes.checkpoint import list_checkpoints, load

ROOT = Path(__file__).parents[2]


def write_data(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in ("train.bin", "val.bin"):
        parts = []
        for _ in range(200):
            length = int(torch.randint(20, 120, (), generator=generator))
            start = int(torch.randint(0, 63, (), generator=generator))
            parts += [
                torch.zeros(1, dtype=torch.int32),
                (start + torch.arange(length) * 7).remainder(63).int() + 1,
            ]
        write_shard(folder / name, torch.cat(parts))


def command(folder: Path, name: str, steps: int) -> list[str]:
    return [
        *(sys.executable, "-m", "leanstep", "train", "gpt", "--preset", "smoke", "--steps", str(steps)),
        *("--set", f"data={folder}", "--set", "vocab_size=64", "--set", "bos=0", "--out", str(folder / name)),
        *("--log-every", "1", "--eval-every", "7", "--save-every", "2", "--keep", "2", "--resume"),
    ]


def start(folder: Path, name: str, steps: int) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command(folder, name, steps),
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(process: subprocess.Popen) -> str:
    text = process.communicate(timeout=240)[0].decode()
    if process.returncode != 0:
        raise AssertionError(f"exit code {process.returncode}:\n{text}")
    return text


def metric_lines(out: Path) -> list[dict]:
    path = out / "metrics.jsonl"
    if not path.exists():
        return []
    lines = []
    for raw in path.read_text().splitlines():
        try:
            line = json.loads(raw)
        except json.JSONDecodeError:
            continue
        lines.append({k: v for k, v in line.items() if k not in ("train_time_s", "tokens_per_s")})
    return lines


def differences(a, b, path: str = "state") -> list[str]:
    """Where two checkpoint states differ, bit for bit."""
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        same = same and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        return [] if same else [path]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [path]
        return [d for key in a for d in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [path]
        return [
            d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}[{i}]")
        ]
    return [] if a == b else [path]


def kill_at_random_steps(folder: Path, kills: int, steps: int, seed: int = 0) -> dict:
    """The number of kills that hit a running training, where, and whether the end is the same."""
    write_data(folder)
    finish(start(folder, "whole", steps))
    rng, hit = random.Random(seed), []
    while len(hit) < kills:
        process = start(folder, "killed", steps)
        before = max([line["step"] for line in metric_lines(folder / "killed")], default=0)
        # The resumed run first drops the lines after its checkpoint; wait for progress past a random step.
        wanted = before + rng.randint(0, max(1, (steps - before) // (kills - len(hit) + 1)))
        seen_restart, deadline = before == 0, time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            lines = metric_lines(folder / "killed")
            latest = max([line["step"] for line in lines], default=0)
            seen_restart = seen_restart or latest != before
            if latest >= max(wanted, 1) and seen_restart:
                break
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        if process.poll() is not None:
            raise AssertionError(f"ended before the kill:\n{process.communicate()[0].decode()}")
        process.send_signal(signal.SIGKILL)
        process.communicate()
        hit.append(max([line["step"] for line in metric_lines(folder / "killed")], default=0))
    finish(start(folder, "killed", steps))
    ends = [load(list_checkpoints(folder / name / "checkpoints")[-1]) for name in ("whole", "killed")]
    assert ends[0].step == ends[1].step == steps
    pairs = zip(metric_lines(folder / "whole"), metric_lines(folder / "killed"), strict=False)
    return {
        "kills": len(hit),
        "steps_at_kill": hit,
        "weights_differ": differences(ends[0].state["recipe"], ends[1].state["recipe"]),
        "random_differs": differences(ends[0].state["random"], ends[1].state["random"], "random"),
        "metrics_equal": metric_lines(folder / "whole") == metric_lines(folder / "killed"),
        "first_difference": next((pair for pair in pairs if pair[0] != pair[1]), None),
        "files": sorted(p.name for p in (folder / "killed" / "checkpoints").iterdir()),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = kill_at_random_steps(Path(temporary), arguments.kills, arguments.steps, arguments.seed)
    print(json.dumps(result, indent=1))
    differ = result["weights_differ"] or result["random_differs"]
    sys.exit(bool(differ) or not result["metrics_equal"])
