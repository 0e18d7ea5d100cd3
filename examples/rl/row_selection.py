"""One GRPO update with the LM head on all rows and on response rows: same gradients, less time, less memory.

python examples/rl/row_selection.py
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch

from leanstep.measure.peaks import measure_peak
from recipes.grpo.train import GPT, Settings, policy_loss, roll_out


def main(rounds: int = 7) -> None:
    torch.manual_seed(0)
    settings = Settings()
    model = GPT(settings)
    rollout = roll_out(model, model, settings, torch.Generator().manual_seed(0))

    def update(select: str) -> dict[str, torch.Tensor]:
        loss, _ = policy_loss(model, rollout, replace(settings, select=select))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        return {"loss": loss.detach(), **{f"grad{i}": grad for i, grad in enumerate(grads)}}

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
    print(f"{plan.T_local} rows, {plan.num_rows} of them scored; vocabulary {settings.vocab}")
    for select, seconds in times.items():
        print(
            f"{select:>9}: {statistics.median(seconds) * 1e3:7.1f} ms  peak {peaks[select] / 2**20:7.1f} MiB"
        )
    print(f"largest relative difference of loss and gradients: {apart:.1e}")


if __name__ == "__main__":
    main()
