"""One GRPO update with the LM head on all rows and on response rows: same gradients, less time, less memory.

python examples/rl/row_selection.py
"""

from __future__ import annotations

import statistics
import time

import torch

from leanstep.measure.peaks import measure_peak
from leanstep.recipes.grpo import build


def main(rounds: int = 7) -> None:
    recipe = build("tiny", seed=0)
    for i in range(5):
        recipe.step(i)
    rollout = recipe.roll_out()

    def update(select: str) -> dict[str, torch.Tensor]:
        metrics = recipe.loss_and_gradients(rollout, select)
        result = {f"grad{i}": p.grad for i, p in enumerate(recipe.model.parameters()) if p.grad is not None}
        recipe.optimizer.zero_grad()
        return {"loss": metrics["loss"], **result}

    times: dict[str, list[float]] = {"all": [], "response": []}
    for _ in range(rounds):
        for select, seconds in times.items():
            start = time.perf_counter()
            update(select)
            seconds.append(time.perf_counter() - start)
    peaks = {select: measure_peak(lambda s=select: update(s), {}).peak_bytes for select in times}
    every, selected = update("all"), update("response")
    apart = max(
        float((every[k] - selected[k]).abs().max() / every[k].abs().max().clamp(min=1e-12)) for k in every
    )

    plan = rollout.plan
    print(f"{plan.T_local} rows, {plan.num_rows} of them scored; vocabulary {recipe.task.vocab}")
    for select, seconds in times.items():
        print(
            f"{select:>9}: {statistics.median(seconds) * 1e3:7.1f} ms  peak {peaks[select] / 2**20:7.1f} MiB"
        )
    print(f"largest relative difference of loss and gradients: {apart:.1e}")


if __name__ == "__main__":
    main()
