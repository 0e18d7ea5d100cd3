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

from leanstep.rehearse.cuda_allocator import CachingAllocator, Settings
from leanstep.tape.lines import LIBRARY, USER, judge_code
from leanstep.units import gib

_BROAD = ("RuntimeError", "Exception", "BaseException")
_EXITS = re.compile(r"(sys\.|os\.)?_?(exit|quit|abort)\(")
# Handlers of broad errors in a library that check the message, directly or through a function.
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

    def configure(self, settings: Settings) -> None:
        """Set the allocator's options; torch reads them when a program first uses the device."""
        self._allocator.settings = settings

    def allocate(self, number: int, nbytes: int, stream: int = 0) -> None:
        """Allocate memory for a storage; raise torch.OutOfMemoryError depending on the mode."""
        if self.is_over or self._allocator.allocate(number, nbytes, stream):
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
        file, verdict = frame.f_code.co_filename, judge_code(frame.f_code.co_filename, frame.f_code.co_name)
        if verdict >= LIBRARY and _catches(file, frame.f_lineno or 0, bool(verdict & USER)):
            return True
        frame = frame.f_back
    return False


@functools.cache
def _catches(file: str, number: int, users: bool = True) -> bool:
    """Whether a `try` or `suppress` around this line catches out-of-memory errors and goes on.

    users: False for a library, whose broad handlers count only where they look for full memory.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return False
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Try, ast.With, ast.AsyncWith)):
            continue
        if not node.body[0].lineno <= number <= (node.body[-1].end_lineno or 0):
            continue
        if isinstance(node, ast.Try):
            # The first handler that catches the error decides.
            catching = next((h for h in node.handlers if _names_it(h.type) != "no"), None)
            if catching is not None and _goes_on(catching, users):
                return True
        elif users:
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            suppressed = [
                arg for call in calls if ast.unparse(call.func).endswith("suppress") for arg in call.args
            ]
            if any(_names_it(error) != "no" for error in suppressed):
                return True
    return False


def _names_it(errors: ast.expr | None) -> str:
    """How a handler names the error: "named", "broad" (a base class, or nothing) or "no"."""
    text = ast.unparse(errors) if errors is not None else "BaseException"
    if "OutOfMemoryError" in text:
        return "named"
    return "broad" if any(re.search(rf"\b{name}\b", text) for name in _BROAD) else "no"


def _goes_on(handler: ast.ExceptHandler, users: bool) -> bool:
    """Whether the program continues behind the handler: it does not always raise or exit again."""
    if not users and _names_it(handler.type) == "broad":
        return any(_LOOKS.search(ast.unparse(part)) for part in handler.body)
    last = handler.body[-1]
    return not isinstance(last, ast.Raise) and not _EXITS.match(ast.unparse(last))
