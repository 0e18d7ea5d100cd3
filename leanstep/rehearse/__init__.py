"""Run a training script on a simulated GPU: predicted peak memory, step time, launches and host syncs.

    leanstep rehearse --device h100 train.py

A rehearsal patches torch permanently, so it runs in its own process: `rehearse(Request(...))` starts one and
returns its `Recording`. This module does not import torch at the top level: the stub of the CUDA device must
be loaded before torch.
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
