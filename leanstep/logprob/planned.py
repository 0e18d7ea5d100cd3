"""The kernels' functions for a plan: on fake tensors they compute nothing, and they never allocate."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def update_statistics(z: Tensor, *_given: Any) -> None:
    """Stands for `kernel.update_statistics` and `native.update_statistics`."""


def scale_exponentials(z: Tensor, out: Tensor, *_given: Any) -> Tensor:
    """Stands for `kernel.scale_exponentials` and `native.scale_exponentials`."""
    return out
