"""What the process holds, asked of the garbage collector: optimizers, loaders, compiled kernels."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch


def scan() -> tuple[set[int], bool]:
    """The storages of all parameters that some optimizer holds, and whether a DataLoader runs workers."""
    held: set[int] = set()
    has_workers = False
    loader = getattr(sys.modules.get("torch.utils.data.dataloader"), "_MultiProcessingDataLoaderIter", None)
    for obj in gc.get_objects():
        kind = type(obj)
        if issubclass(kind, torch.optim.Optimizer):
            held |= storages_of(obj)
        elif kind is loader:
            has_workers = True
    return held, has_workers


def storages_of(optimizer: Any) -> set[int]:
    storages = set()
    for group in getattr(optimizer, "param_groups", ()):
        for parameter in group["params"]:
            if isinstance(parameter, torch.Tensor):
                storages.add(parameter.untyped_storage()._cdata)
    return storages


def triton_entries() -> int:
    """How many compiled kernels Triton holds; it grows when one is launched for the first time."""
    jit = sys.modules.get("triton.runtime.jit")
    kind = getattr(jit, "JITFunction", None)
    if kind is None:
        return 0
    total = 0
    for obj in gc.get_objects():
        if type(obj) is kind:
            total += sum(
                len(cache[0]) if isinstance(cache, tuple) else 1 for cache in obj.device_caches.values()
            )
    return total
