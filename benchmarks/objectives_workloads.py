"""Workloads and rows that several benchmarks of this family share."""

# T rows · R selected rows · S sequences · D model · V vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import (
    Row,
    Step,
    with_gradients,
)

Tensors = dict[str, Tensor]


Constants = dict[str, Any]


def normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=generator) * scale


def four_products(other: Tensor, other_weight: Tensor, hidden: Tensor, weight: Tensor) -> Step:
    """Compute only the other head's logits, this head's logits, then this head's d hidden and d weight."""
    logits = hidden.new_empty(len(hidden), len(weight))

    def step() -> Tensors:
        torch.mm(other, other_weight.t(), out=logits)
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight)
        torch.mm(logits.t(), hidden)
        return {}

    return step


def gradient_row(name: str, kind: Any, function: Any, note: str, **options: Any) -> Row:
    return Row(name, kind, with_gradients(function, ("hidden", "weight")), note=note, **options)


DTYPES = (torch.float32, torch.float64, torch.bfloat16)
