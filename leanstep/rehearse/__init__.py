"""A training script on a GPU that is not there: peak memory, step time, launches and host waits, predicted.

    leanstep rehearse --device h100 train.py

A rehearsal patches torch for good, so it runs in a process of its own: `rehearse(Request(...))` starts one
and returns its `Recording`. Nothing here imports torch at the top: the stub of the CUDA device must be
loaded before torch is.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Recording": "events",
    "Request": "events",
    "register_cost": "kernel_costs",
    "rehearse": "stage",
}
__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"leanstep.rehearse.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'leanstep.rehearse' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
