"""Measure how busy the host's cores are, and keep them busy for `bench --beside N`.

A training host is rarely idle: data loaders, generation and other ranks share its cores. OpenMP threads then
waste time: each spins for milliseconds at the end of an operation, on a core that another thread needs. With
`OMP_WAIT_POLICY=passive` they sleep instead. OpenMP reads that variable once, when torch is loaded.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from leanstep.tape.children import Child, ended_afterwards, start

# The kernel counts hundredths of a second.
LOOK_S = 0.1
BUSY_SHARE = 0.5


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that compute without pause during the block."""
    children: list[Child] = []
    with ended_afterwards(children):
        for _ in range(count):
            children.append(start(_compute, (), fork=False))
        yield


def _compute() -> None:
    """Never wait, to use all the time that the scheduler assigns."""
    while True:
        pass


def sleep_while_waiting() -> None:
    """Let OpenMP's threads sleep instead of spin if other processes use most of this process's cores.

    Call it before torch is loaded. It does not override a value that the user set.
    """
    if "OMP_WAIT_POLICY" not in os.environ and busy_share() > BUSY_SHARE:
        os.environ["OMP_WAIT_POLICY"] = "passive"


def busy_share(seconds: float = LOOK_S) -> float:
    """Return the share of time that this process's cores are in use while it sleeps; 0 if unknown."""
    before = _core_times()
    time.sleep(seconds if before else 0)
    used = [
        (used_after - used, whole_after - whole)
        for (used, whole), (used_after, whole_after) in zip(before, _core_times(), strict=False)
    ]
    elapsed = sum(whole for _, whole in used)
    return sum(share for share, _ in used) / elapsed if elapsed else 0.0


def _core_times() -> list[tuple[int, int]]:
    """Return (ticks in use, all ticks) of each core that this process may use; empty if unknown."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return []
    times = []
    for line in lines:
        name, *ticks = line.split()
        if name in names:
            # user, nice, system, idle, iowait, irq, softirq, steal
            counts = [int(tick) for tick in ticks[:8]]
            times.append((sum(counts) - counts[3] - counts[4], sum(counts)))
    return times
