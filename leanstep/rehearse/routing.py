"""Choices among unknown scores, spread evenly: which experts a router takes, which class is the largest.

A mixture of experts sends each token to the experts with the largest scores. The scores are not known, so
each expert gets its share: row i takes the choices that follow those of row i - 1. What the host derives
from these indices (counts, masks, offsets, splits) then agrees, and is known beyond the usual limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# More choices than this are words of a vocabulary, not experts or classes.
MOST_CHOICES = 512
# Elements of a known tensor that follows from spread choices: a mask for each token and expert.
MOST_ELEMENTS = 1 << 25
SPREAD = frozenset({"topk", "argmax", "max"})
ASSUMED = "spread evenly"


def spread_evenly(name: str, args: Sequence[Any], kwargs: dict[str, Any], indices: Tensor) -> Tensor | None:
    """Indices of the largest scores in each row, every choice equally often.

    None where the call is no such choice: fewer rows than choices, or too many choices.
    """
    dim = _dimension(name, args, kwargs)
    if dim is None or indices.numel() > MOST_ELEMENTS:
        return None
    scores, choices = args[0], args[0].shape[dim]
    rows = scores.numel() // choices
    per_row = indices.numel() // rows
    chosen = torch.arange(rows * per_row, device="cpu").remainder_(choices).to(indices.dtype)
    if indices.dim() < scores.dim():  # the dimension is gone
        return mark_spread(chosen.reshape(indices.shape))
    size = [*indices.shape]
    size.append(size.pop(dim))
    return mark_spread(chosen.reshape(size).movedim(-1, dim))


def is_choice(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call chooses experts or classes: what follows from it may be large."""
    return name in SPREAD and _dimension(name, args, kwargs) is not None


def _dimension(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """The dimension of the choices; None where there are too many of them, or fewer rows than choices."""
    scores = args[0]
    default = -1 if name == "topk" else None
    position = 2 if name == "topk" else 1
    dim = args[position] if len(args) > position else kwargs.get("dim", default)
    if not isinstance(dim, int) or not isinstance(scores, Tensor) or not scores.dim():
        return None
    choices = scores.shape[dim]
    return dim if 1 < choices <= MOST_CHOICES and scores.numel() // choices >= choices else None


def mark_spread(value: Tensor) -> Tensor:
    value._spread = True  # pyright: ignore[reportAttributeAccessIssue]
    return value


def is_spread(value: Any) -> bool:
    return getattr(value, "_spread", False)


def histogram_of_integers(
    name: str, values: Sequence[Any], args: Sequence[Any], kwargs: Any
) -> Tensor | None:
    """`torch.histc` counts integers on a device, but not on the host."""
    if name != "histc" or values[0] is None or values[0].is_floating_point():
        return None
    return torch.histc(values[0].double(), *args[1:], **kwargs).to(values[0].dtype)
