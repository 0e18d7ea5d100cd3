"""Small constant tensors that every call needs again: made once per key and kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar

import torch

Made = TypeVar("Made")


def kept(make: Callable[..., Made]) -> Callable[..., Made]:
    """Cache what `make` returns, except where a kept tensor would outlive its world.

    A compiled graph holds its own constants (and the compiler warns about caches); under FakeTensorMode the
    tensor has no data, and a later real call must not find it.
    """
    cached = lru_cache(maxsize=64)(make)

    @wraps(make)
    def constant(*key: object) -> Made:
        return make(*key) if torch.compiler.is_compiling() or _fake_mode() else cached(*key)

    return constant


def _fake_mode() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
