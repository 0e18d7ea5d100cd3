"""Stop or kill a recipe, resume it, and compare with one left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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


def stop_and_resume(main: Callable, options: list[str], steps: int, stops: tuple[int, ...], folder: Path):
    """Train once without and once with stops, in this process."""
    whole, parts = folder / "whole", folder / "parts"
    options = [*options, "--log-every", "1", "--steps", str(steps)]
    main(["--out", str(whole), *options])
    for stop in (*stops, steps):
        torch.manual_seed(1000 + stop)
        main(["--out", str(parts), "--resume", "--stop-after", str(stop), *options])
    assert_same_ends(whole, parts, steps)


def kill_and_resume(module: str, options: list[str], steps: int, at: int, folder: Path) -> None:
    """Train in a process of its own; then again, killed with SIGKILL after step `at`."""
    whole, killed = folder / "whole", folder / "killed"
    options = [*options, "--steps", str(steps)]
    finish(start(module, options, whole))
    process = start(module, options, killed)
    deadline = time.monotonic() + 240
    while process.poll() is None and last_step(killed) < at and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    text = process.communicate()[0].decode()
    assert process.returncode == -signal.SIGKILL, f"it ended before the kill:\n{text}"
    finish(start(module, options, killed))
    assert_same_ends(whole, killed, steps)
    assert not list(killed.glob(".*.partial"))


def assert_same_ends(whole: Path, parts: Path, steps: int) -> None:
    ends = [read_checkpoint(list_checkpoints(out)[-1]) for out in (whole, parts)]
    assert ends[0]["step"] == ends[1]["step"] == steps
    for name in ("state", "ranks", "settings"):
        assert_same_bits(ends[0][name], ends[1][name], name)
    assert without_times(whole) == without_times(parts)


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
