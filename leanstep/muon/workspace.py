"""Scratch memory that one matrix after the other reuses."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Scratch tensors by role, shape and dtype: equal matrices in a row reuse the same memory."""

    def __init__(self) -> None:
        self._tensors: dict[tuple, Tensor] = {}
        self._children: list[Workspace] = []

    def take(
        self, role: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        dtype = dtype or like.dtype
        key = (role, shape, dtype, like.device)
        if key not in self._tensors:
            self._tensors[key] = torch.empty(shape, dtype=dtype, device=like.device)
        return self._tensors[key]

    def child(self, index: int) -> Workspace:
        """Scratch of its own for the index-th of several threads."""
        while len(self._children) <= index:
            self._children.append(Workspace())
        return self._children[index]

    def clear(self) -> None:
        self._tensors.clear()
        self._children.clear()
