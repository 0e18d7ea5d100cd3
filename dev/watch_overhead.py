"""How much longer a training step takes while `leanstep.diagnose` records it.

    python dev/watch_overhead.py [--rounds 9]

Two steps, each timed bare and recorded in turns: a loop of thousands of tiny ops, where all is overhead, and
a stack of matmuls, where nothing should be. The time depends on the machine, so it is printed, not tested.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from leanstep.diagnose.watch import Watch


def tiny_ops() -> Callable[[], None]:
    model = torch.nn.Linear(32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 32)

    def step() -> None:
        optimizer.zero_grad()
        scores = model(x).squeeze(-1)
        loss = torch.zeros(())
        for i in range(16):
            for j in range(i + 1, 16):
                loss = loss - F.logsigmoid(scores[i] - scores[j])
        loss.backward()
        optimizer.step()

    return step


def matmuls() -> Callable[[], None]:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(512, 512)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def measure(step: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Median CPU seconds of a bare and of a recorded step, in turns."""
    for _ in range(3):
        step()
    bare, recorded = [], []
    with Watch(steps=10 * rounds, warmup=0) as watch:
        watch._leave_modes()
        for _ in range(rounds):
            bare.append(_cpu_seconds(step))
            watch._enter_modes()
            recorded.append(_cpu_seconds(step))
            watch._leave_modes()
            watch.step()
    return statistics.median(bare), statistics.median(recorded)


def _cpu_seconds(step: Callable[[], None]) -> float:
    # CPU time: on a shared machine the wall clock measures the neighbours.
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    for name, make in (("tiny ops", tiny_ops), ("matmuls", matmuls)):
        bare, recorded = measure(make(), rounds)
        print(
            f"{name:9}  {bare * 1e3:8.2f} ms bare  {recorded * 1e3:8.2f} ms recorded  {recorded / bare:.2f} x"
        )


if __name__ == "__main__":
    main()
