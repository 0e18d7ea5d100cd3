"""A full device: raise `torch.OutOfMemoryError` if the program catches it, else report it in the verdict.

A program that searches for the largest batch catches the error and continues with a smaller one. The error is
raised at the allocation that does not fit, so the program takes the same branch as on the device.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
import sys
import threading
from types import FrameType

import torch

from leanstep.rehearse.cuda_allocator import CachingAllocator
from leanstep.script.lines import LIBRARY, judge_code
from leanstep.units import gib

_BROAD = ("RuntimeError", "Exception", "BaseException")
# Handlers of broad errors that check the message, directly or through a function.
_LOOKS = re.compile(r"out.?of.?memory|oom|reduce_batch_size", re.IGNORECASE)


class DeviceMemory:
    """The caching allocator of the device while the program runs.

    mode: "raise" raises when the device is full, "report" never raises, "auto" if the program catches it.
    """

    def __init__(self, capacity: int, mode: str, main_thread: int) -> None:
        self._allocator = CachingAllocator(capacity)
        self._mode, self._main_thread, self._capacity = mode, main_thread, capacity
        self.is_over = False  # more was allocated than the device has; reported in the verdict
        self.num_errors = 0

    def allocate(self, number: int, nbytes: int) -> None:
        """Allocate memory for a storage; raise torch.OutOfMemoryError depending on the mode."""
        if self.is_over or self._allocator.allocate(number, nbytes):
            return
        if self._mode == "report" or (self._mode == "auto" and not self.error_is_caught()):
            self.is_over = True
            return
        self.num_errors += 1
        free = gib(self._capacity - self._allocator.reserved)
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {gib(nbytes)}. GPU 0 has a total capacity of "
            f"{gib(self._capacity)} of which {free} is free (predicted, without the context)."
        )

    def release(self, number: int, nbytes: int) -> None:
        if not self.is_over:
            self._allocator.release(number, nbytes)

    def reserved(self, live_bytes: int) -> int:
        return live_bytes if self.is_over else self._allocator.reserved

    def peak_reserved(self, live_bytes: int) -> int:
        return live_bytes if self.is_over else self._allocator.peak_reserved

    def reset_peak(self) -> None:
        self._allocator.peak_reserved = self._allocator.reserved

    def empty_cache(self) -> None:
        if not self.is_over:
            self._allocator.give_back()

    def error_is_caught(self) -> bool:
        """Whether the program catches torch.OutOfMemoryError around the current call."""
        if _is_inside_handler(sys._getframe(1)):
            return True
        if threading.get_ident() == self._main_thread:
            return False
        # Backward runs on its own thread while the program's thread waits. (A function that holds its own
        # frame would keep all tensors of its callers alive.)
        return _is_inside_handler(sys._current_frames().get(self._main_thread))


def _is_inside_handler(frame: FrameType | None) -> bool:
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if judge_code(file, function) >= LIBRARY and _catches(file, frame.f_lineno or 0):
            return True
        frame = frame.f_back
    return False


@functools.cache
def _catches(file: str, number: int) -> bool:
    """Whether a `try` around this line handles out-of-memory errors."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return False
    return any(
        node.body[0].lineno <= number <= (node.body[-1].end_lineno or 0)
        and any(map(_handles_full_memory, node.handlers))
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
    )


def _handles_full_memory(handler: ast.ExceptHandler) -> bool:
    named = ast.unparse(handler.type) if handler.type is not None else "BaseException"
    if "OutOfMemoryError" in named:
        return True
    is_broad = any(re.search(rf"\b{name}\b", named) for name in _BROAD)
    return is_broad and any(_LOOKS.search(ast.unparse(part)) for part in handler.body)
