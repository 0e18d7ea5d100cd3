"""Evenly spread choices among unknown scores: experts that a router selects, the class with the top score.

A mixture of experts sends each token to the experts with the largest scores. The scores are unknown, so each
expert gets an equal share: row i takes the choices that follow those of row i - 1. All values that the host
derives from these indices (counts, masks, offsets, splits) then agree, and are known beyond the usual limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# More choices than this are words of a vocabulary, not experts or classes.
MOST_CHOICES = 512
# Most elements of a known tensor derived from spread choices: a mask per token and expert.
MOST_ELEMENTS = 1 << 25
SPREAD = frozenset({"topk", "argmax", "max"})
ASSUMED = "spread evenly"


def spread_evenly(name: str, args: Sequence[Any], kwargs: dict[str, Any], indices: Tensor) -> Tensor | None:
    """Return indices of the largest scores in each row, with every choice equally often.

    None if the call is not such a choice: fewer rows than choices, or too many choices.
    """
    dim = _dimension(name, args, kwargs)
    if dim is None or indices.numel() > MOST_ELEMENTS:
        return None
    scores, choices = args[0], args[0].shape[dim]
    rows = scores.numel() // choices
    per_row = indices.numel() // rows
    chosen = torch.arange(rows * per_row, device="cpu").remainder_(choices).to(indices.dtype)
    if indices.dim() < scores.dim():  # the dimension was reduced
        return mark_spread(chosen.reshape(indices.shape))
    size = [*indices.shape]
    size.append(size.pop(dim))
    return mark_spread(chosen.reshape(size).movedim(-1, dim))


def is_choice(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call chooses experts or classes: tensors derived from it may be large."""
    return name in SPREAD and _dimension(name, args, kwargs) is not None


def _dimension(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """Return the dimension of the choices; None if there are too many, or fewer rows than choices."""
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
    """Compute `torch.histc` of integers, which torch supports on a device but not on the host."""
    if name != "histc" or values[0] is None or values[0].is_floating_point():
        return None
    return torch.histc(values[0].double(), *args[1:], **kwargs).to(values[0].dtype)
