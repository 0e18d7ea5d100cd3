"""What a figure was measured on: written into every result."""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path
from typing import Any

import torch

import leanstep


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """The head of every JSON object."""
    return {
        "leanstep": leanstep.__version__,
        "torch": torch.__version__,
        "device": device_name(str(device)),
        "threads": torch.get_num_threads(),
    }


@functools.cache
def device_name(device: str) -> str:
    """`cpu (AMD EPYC, 2 cores)` or the GPU's own name."""
    if device.startswith("cuda"):
        return f"{device} ({torch.cuda.get_device_name(device)})"
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text())
        if found:
            model = found.group(1).strip()
    return f"cpu ({model})"
