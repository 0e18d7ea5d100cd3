"""Where the Triton kernels are used: fp32 tiles on a GPU, when Triton is installed."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor


@functools.cache
def _kernel_module() -> ModuleType | None:
    try:
        from leanstep.logprob import kernel
    except ImportError:
        return None
    return kernel


def kernels_for(z: Tensor) -> ModuleType | None:
    """The kernel module if it can run on the tile `z`, else None: plain torch, in place."""
    if not z.is_cuda or z.dtype != torch.float32:
        return None
    module = _kernel_module()
    return module if module is not None and z.stride(-1) == 1 else None
