"""The process group of a run: one process, or several started by `torchrun`.

    with process_group() as world:
        recipe = build(..., world=world)
        run(recipe, out, world=world)

Nothing here owns a protocol: `torchrun` sets the environment, torch.distributed does the work. Without
`torchrun` the world has one rank and every function below returns at once without communication.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """Who this process is.

    `control` is a gloo group beside the training group: it carries flags and small objects, so that
    asking "did anyone get SIGTERM?" never waits for a GPU stream. None = torch's default group.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    control: Any = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """True on every rank when it is true on one: all ranks stop at the same step or none does."""
        if self.size == 1:
            return flag
        votes = torch.tensor([flag], dtype=torch.int32)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.control)
        return bool(votes.item())

    def mean(self, values: Tensor) -> Tensor:
        """The mean over ranks of a small CPU tensor."""
        if self.size == 1:
            return values
        total = values.clone()
        dist.all_reduce(total, group=self.control)
        return total / self.size

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.control)
        return gathered

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)


def current_world(device: torch.device | str | None = None) -> World:
    """Return the world of an initialised process group, or a world of one process."""
    if not (dist.is_available() and dist.is_initialized()):
        return World(device=torch.device(device or "cpu"))
    control = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_rank=int(os.environ.get("LOCAL_RANK") or dist.get_rank()),
        device=torch.device(device or "cpu"),
        control=control,
    )


def check_device(device: str) -> None:
    """ValueError unless a run can take place there."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: got cuda, but this torch sees no CUDA device")


@contextlib.contextmanager
def process_group(device: str = "cpu") -> Iterator[World]:
    """Join the group that `torchrun` announces in the environment; leave it at the end.

    Args:
        device: `cpu` (gloo) or `cuda` (nccl, one device per local rank).
    """
    check_device(device)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    place = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield current_world(place)
        return
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield current_world(place)
    finally:
        dist.destroy_process_group()
