"""Convolutions keep channels-last tensors channels-last, as cuDNN does.

Without cuDNN, a fake convolution returns NCHW tensors, and each following layer would convert its input.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def install() -> None:
    """Replace torch's choice of a convolution's output memory format."""
    torch._C._conv_determine_backend_memory_format = result_format  # pyright: ignore[reportAttributeAccessIssue]


def result_format(x: Tensor, weight: Tensor, backend: object) -> torch.memory_format:
    """Return channels-last if the input or the filter is."""
    layout = _CHANNELS_LAST.get(x.dim())
    if layout is not None and any(_is_in(t, layout) for t in (x, weight)):
        return layout
    return torch.contiguous_format


def _is_in(tensor: Tensor, layout: torch.memory_format) -> bool:
    return tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous()
