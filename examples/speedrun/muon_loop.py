"""Muon as it is usually first written: matrix after matrix, tall ones transposed, plain matmuls."""

from __future__ import annotations

import torch
from torch import Tensor

# Polar Express, five steps (arXiv 2505.16932).
COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def orthogonalize(update: Tensor) -> Tensor:
    """The nearest matrix with all singular values near one."""
    transposed = update.shape[0] > update.shape[1]
    x = update.T.contiguous() if transposed else update
    x = x / (1.02 * x.norm() + 1e-30)
    for a, b, c in COEFFICIENTS:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T.contiguous() if transposed else x


class MuonLoop(torch.optim.Optimizer):
    """Nesterov momentum, then the orthogonalised update, for every matrix of every bank."""

    def __init__(self, params: list[Tensor], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for bank in group["params"]:
                state = self.state[bank]
                if not state:
                    state["momentum"] = torch.zeros_like(bank)
                rows, cols = bank.shape[-2:]
                matrices = zip(bank.view(-1, rows, cols), bank.grad.view(-1, rows, cols), strict=True)
                for (weight, grad), buffer in zip(
                    matrices, state["momentum"].view(-1, rows, cols), strict=True
                ):
                    buffer.lerp_(grad, 1 - group["momentum"])
                    update = orthogonalize(grad.lerp(buffer, group["momentum"]))
                    weight.sub_(group["lr"] * max(1, rows / cols) ** 0.5 * update)
