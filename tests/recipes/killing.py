"""Kill a recipe with SIGKILL at random steps, resume it each time, and compare with one left alone.

python tests/recipes/killing.py recipes.lens.train --kills 5 --steps 40 -- --save-every 3
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from recipes.run import list_checkpoints, read_checkpoint, read_metrics

ROOT = Path(__file__).parents[2]


def start(module: str, options: list[str], out: Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, "--out", str(out), "--resume", "--log-every", "1", *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen) -> None:
    text = process.communicate(timeout=240)[0].decode()
    assert process.returncode == 0, text


def last_step(out: Path) -> int:
    path = out / "metrics.jsonl"
    return max([line["step"] for line in read_metrics(path)], default=0) if path.exists() else 0


def without_times(out: Path) -> list[dict]:
    lines = read_metrics(out / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k != "train_time_s"} for line in lines]


def kill_at_random_steps(
    module: str, options: list[str], steps: int, folder: Path, kills: int, seed: int = 0
) -> list[int]:
    """Return the steps at which the kills hit; raise if the two runs do not end with the same bits."""
    whole, killed = folder / "whole", folder / "killed"
    options = [*options, "--steps", str(steps)]
    finish(start(module, options, whole))
    rng, hits = random.Random(seed), []
    for number in range(kills):
        before = last_step(killed)
        wanted = before + rng.randint(1, max(1, (steps - 1 - before) // (kills - number + 1)))
        process = start(module, options, killed)
        deadline = time.monotonic() + 240
        while process.poll() is None and last_step(killed) < wanted and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        text = process.communicate()[0].decode()
        assert process.returncode == -signal.SIGKILL, f"it ended before the kill:\n{text}"
        hits.append(last_step(killed))
    finish(start(module, options, killed))
    ends = [read_checkpoint(list_checkpoints(out)[-1]) for out in (whole, killed)]
    assert ends[0]["step"] == ends[1]["step"] == steps
    for name in ("state", "ranks", "settings"):
        assert_same_bits(ends[0][name], ends[1][name], name)
    assert without_times(whole) == without_times(killed)
    assert not list(killed.glob(".*.partial"))
    return hits


def assert_same_bits(a, b, path: str) -> None:
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, path
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same_bits(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same_bits(x, y, f"{path}[{i}]")
    else:
        assert a == b, path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.epilog = "Options of the recipe go behind --."
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    arguments = parser.parse_args(words[:end])
    with tempfile.TemporaryDirectory() as temporary:
        hits = kill_at_random_steps(
            arguments.module,
            words[end + 1 :],
            arguments.steps,
            Path(temporary),
            arguments.kills,
        )
    print(f"{arguments.module}: killed at steps {hits} of {arguments.steps}, resumed: same bits")
