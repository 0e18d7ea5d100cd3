"""Convolutions keep channels-last tensors channels-last, as cuDNN does.

Without cuDNN a fake convolution answers in the order NCHW, and each layer behind it would turn its input.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def install() -> None:
    """Answer which memory format a convolution's result has."""
    torch._C._conv_determine_backend_memory_format = result_format  # pyright: ignore[reportAttributeAccessIssue]


def result_format(x: Tensor, weight: Tensor, backend: object) -> torch.memory_format:
    """Channels-last where the input or the filter is."""
    layout = _CHANNELS_LAST.get(x.dim())
    if layout is not None and any(_is_in(t, layout) for t in (x, weight)):
        return layout
    return torch.contiguous_format


def _is_in(tensor: Tensor, layout: torch.memory_format) -> bool:
    return tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous()
