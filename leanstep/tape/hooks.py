"""Replaces torch functions while a script is watched, and tells whose code is running."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch._guards import TracingContext

_current_node: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)


def in_engine() -> bool:
    """Return whether this thread runs code of a backward pass."""
    return _current_node is not None and _current_node() is not None


def replace_function(place: Any, name: str, handler: Callable[..., Any]) -> Callable[[], None]:
    """Redirect calls of `place.name` to `handler(original, ...)` outside compilers; return an undo."""
    original = getattr(place, name)
    is_inherited = isinstance(place, type) and name not in vars(place)
    busy = False

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        nonlocal busy
        # A compiler treats this branch as constant and traces torch's own function. AOTAutograd of torch 2.8
        # reports tracing but not compiling. A function mode calls the public name, which is this one, again.
        if torch.compiler.is_compiling() or busy or TracingContext.try_get() is not None:
            return original(*args, **kwargs)
        busy = True
        try:
            return handler(original, *args, **kwargs)
        finally:
            busy = False

    # A function mode receives the replacement and looks up the torch function behind it.
    replaced._leanstep_original = getattr(original, "_leanstep_original", original)  # type: ignore[attr-defined]
    setattr(place, name, replaced)
    if is_inherited:
        return lambda: delattr(place, name)
    return lambda: setattr(place, name, original)


def wrap_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Callable[[Callable[[], Any]], Callable[[], Any]]
) -> tuple[Any, Any] | None:
    """Return the arguments of `optimizer.step(closure)` with the closure wrapped; None without a closure.

    An optimizer of a script's own may take something else there, another optimizer for instance.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None
    if len(args) > 1:
        return (args[0], wrap(closure), *args[2:]), kwargs
    return args, {**kwargs, "closure": wrap(closure)}


def frame_key(frame: FrameType) -> tuple[int, int]:
    """Identify a frame while it runs. Holding the frame itself would keep the script's variables alive."""
    return id(frame), id(frame.f_code)


def running_frames() -> set[tuple[int, int]]:
    """The frames of the current stack."""
    keys: set[tuple[int, int]] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        keys.add(frame_key(frame))
        frame = frame.f_back
    return keys
