"""What makes the two passes over a tile of fp32 logits: Triton on a GPU, C++ on a CPU, else plain torch."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from leanstep.cpu import has_memory, num_threads
from leanstep.logprob import native, planned

# Fewer logits in a call are done before a first build (a third of a second, once per machine) would be.
NATIVE_LOGITS = 1 << 18
# C++ on one core is as fast as torch's passes on two or three.
MOST_IDLE_THREADS = 2


@functools.cache
def _triton() -> ModuleType | None:
    try:
        from leanstep.logprob import kernel
    except ImportError:
        return None
    return kernel


def kernels_for(given: Tensor, dtype: torch.dtype, num_logits: int) -> ModuleType | None:
    """`kernel`, `native` or None for a call with so many logits, made of `given`, summed in `dtype`.

    A plan (fake tensors) counts on kernels for as many logits as a CPU would use them.
    """
    if dtype != torch.float32:
        return None
    if isinstance(given, FakeTensor) and not torch.compiler.is_compiling():
        return planned if num_logits >= NATIVE_LOGITS else None
    if given.is_cuda:
        return _triton()
    if given.device.type != "cpu" or num_logits < NATIVE_LOGITS or not has_memory(given):
        return None
    return native if native.is_built() else None


def suited(kernels: ModuleType | None, cores: int) -> ModuleType | None:
    """The same kernels, but not C++ on the calling core alone where many threads could share the passes."""
    alone = kernels is native and cores == 1 and num_threads() > MOST_IDLE_THREADS
    return None if alone else kernels
