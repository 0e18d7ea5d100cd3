"""A machine that says it has a GPU: what `make test-gpu` changes for code that never touches the device.

`torch.cuda.is_available()` is true and sync debugging exists, with the warning of a prototype that its first
use gives. There is no device memory: a CUDA tensor cannot be made. Child processes pretend as well.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch

MODES = {"default": 0, "warn": 1, "error": 2}
# What torch's C++ says, once per process.
PROTOTYPE = (
    "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
)
state = SimpleNamespace(mode=0, warned=False)


def set_sync_debug_mode(mode: int | str) -> None:
    """As torch's own: the mode is set first, then comes the warning."""
    state.mode = MODES[mode] if isinstance(mode, str) else mode
    if not state.warned:
        state.warned = True
        warnings.warn(PROTOTYPE, UserWarning, stacklevel=2)


def install() -> None:
    """Pretend in this process and, by the sitecustomize.py beside, in its children."""
    h100 = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=80 << 30,
        shared_memory_per_block_optin=232_448,
        L2_cache_size=50 << 20,
    )
    pretended = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "get_device_properties": lambda device=None: h100,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: h100.name,
        "get_sync_debug_mode": lambda: state.mode,
        "set_sync_debug_mode": set_sync_debug_mode,
    }
    for name, function in pretended.items():
        setattr(torch.cuda, name, function)
    children = str(Path(__file__).parent / "pretended_children")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if children not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([children, *filter(None, paths)])
