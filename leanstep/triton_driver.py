"""Check whether Triton can launch kernels on this machine's GPU.

Triton builds a C module when its driver starts. That needs a C compiler and Python's headers, which slim
containers do not have; without this check the first launch would fail.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings

import torch


@functools.cache
def can_launch() -> bool:
    """Return whether Triton is installed and its driver starts; warn once if it is installed but does not.

    Without a GPU nothing is launched, so the result only says whether Triton is installed: plans and the
    interpreter use the kernel modules there.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        return True
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as problem:
        reason = str(problem).strip().splitlines() or [type(problem).__name__]
        warnings.warn(
            f"Triton cannot launch kernels here, leanstep uses torch operations, which are slower "
            f"({reason[0]}); expected a C compiler and Python's headers (gcc, python3-dev)",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
