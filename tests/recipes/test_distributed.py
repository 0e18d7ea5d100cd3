"""The process group: one rank without communication, several through the real `torchrun`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from recipes.kill_resume import ROOT, metric_lines, write_data

from leanstep.recipes import World, process_group
from leanstep.recipes.checkpoint import list_checkpoints


def test_one_rank_needs_no_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with process_group() as world:
        assert (world.rank, world.size, world.is_main) == (0, 1, True)
        assert world.any(True) and not world.any(False)
        assert world.gather("x") == ["x"] and world.mean(torch.tensor([2.0])).tolist() == [2.0]
        world.barrier()
    assert not torch.distributed.is_initialized()
    assert World().device == torch.device("cpu")


def test_an_impossible_device_is_named():
    with pytest.raises(ValueError, match="device: expected cpu or cuda, got 'tpu'"), process_group("tpu"):
        pass


def exchange(rank, world_size):
    with process_group() as world:
        return (
            world.gather({"rank": rank}),
            world.any(rank == 1),
            world.any(False),
            world.mean(torch.tensor([float(rank), 1.0])).tolist(),
        )


def test_ranks_agree(run_ranks):
    for gathered, one, none, mean in run_ranks(2, exchange):
        assert gathered == [{"rank": 0}, {"rank": 1}] and one and not none and mean == [0.5, 1.0]


@pytest.mark.timeout(280)
def test_torchrun_trains_on_two_ranks_like_one(tmp_path):
    write_data(tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    arguments = [
        *("leanstep", "train", "gpt", "--preset", "smoke", "--steps", "8", "--log-every", "1"),
        *(
            "--set",
            f"data={tmp_path}",
            "--set",
            "vocab_size=64",
            "--set",
            "bos=0",
            "--set",
            "micro_batches=2",
        ),
    ]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    for name, launcher in (("one", []), ("two", torchrun)):
        command = [sys.executable, "-m", *launcher, *arguments, "--out", str(tmp_path / name)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        assert "8/8" in done.stdout and done.stdout.count("end at step") == 1
    one, two = (metric_lines(tmp_path / name) for name in ("one", "two"))
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for a, b in zip(one, two, strict=True):
        key = "val_loss" if "eval" in a else "loss"
        assert b[key] == pytest.approx(a[key], rel=1e-4)
    assert len(list_checkpoints(tmp_path / "two" / "checkpoints")) == 2
