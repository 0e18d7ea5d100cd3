"""Run a training script on a simulated GPU: predicted peak memory, step time, launches and host syncs.

    leanstep rehearse --device h100 train.py

A rehearsal patches torch permanently, so it runs in its own process: `stage.rehearse(Request(...))` starts
one and returns its `Recording`. This module does not import torch at the top level: the stub of the CUDA
device must be loaded before torch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register_cost"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name == "register_cost":
        from leanstep.rehearse.kernel_costs import register_cost

        return register_cost
    raise AttributeError(f"module 'leanstep.rehearse' has no attribute {name!r}")
