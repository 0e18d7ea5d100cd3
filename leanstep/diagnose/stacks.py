"""Stacks that are shared with the user:
modes and saved-tensor hooks can be left though others lie above them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch

# Not in torch's type stubs.
_AUTOGRAD: Any = torch._C._autograd  # type: ignore[attr-defined]


def leave_mode(mode: Any) -> None:
    """Remove `mode` from its stack; modes above it are put back in their order."""
    if isinstance(mode, TorchFunctionMode):
        size, pop, push = (
            torch._C._len_torch_function_stack,
            torch._C._pop_torch_function_stack,
            _push_function,
        )
    else:
        size, pop, push = (
            torch._C._len_torch_dispatch_stack,
            _python_dispatch._pop_mode,
            _python_dispatch._push_mode,
        )
    above = []
    while size() and _top(mode) is not mode:
        above.append(pop())
    if size():
        mode.__exit__(None, None, None)
    for other in reversed(above):
        push(other)


def _top(mode: Any) -> Any:
    if isinstance(mode, TorchFunctionMode):
        return torch._C._get_function_stack_at(torch._C._len_torch_function_stack() - 1)
    return _python_dispatch._get_current_dispatch_mode()


def _push_function(mode: Any) -> None:
    torch._C._push_on_torch_function_stack(mode)


class SavedHooks:
    """One pair of saved-tensor hooks that steps aside where torch forbids any.

    `torch.func.grad` and its kin refuse to run while hooks are on. Ours must not be what breaks a script,
    so they are taken off when hooks get disabled and put back when they are allowed again.
    """

    def __init__(self) -> None:
        self._hooks: Any = None
        self._aside = False

    def enter(self, hooks: Any) -> None:
        self._hooks = hooks
        self._aside = _AUTOGRAD._saved_tensors_hooks_get_disabled_error_message() is not None
        if not self._aside:
            hooks.__enter__()

    def leave(self) -> None:
        hooks, self._hooks = self._hooks, None
        # A with-block of the user's that ended in between has popped ours in place of its own.
        if hooks is not None and not self._aside and _AUTOGRAD._top_saved_tensors_default_hooks(True):
            hooks.__exit__()

    @contextmanager
    def stepping_aside(self) -> Iterator[None]:
        """Watch torch's own switch for hooks while recording."""
        switch = _AUTOGRAD
        disable, enable = switch._saved_tensors_hooks_disable, switch._saved_tensors_hooks_enable

        def disabled(*args: Any, **kwargs: Any) -> Any:
            if self._hooks is not None and not self._aside:
                self._hooks.__exit__()
                self._aside = True
            return disable(*args, **kwargs)

        def enabled() -> Any:
            result = enable()
            if self._hooks is not None and self._aside:
                self._hooks.__enter__()
                self._aside = False
            return result

        switch._saved_tensors_hooks_disable, switch._saved_tensors_hooks_enable = disabled, enabled
        try:
            yield
        finally:
            switch._saved_tensors_hooks_disable, switch._saved_tensors_hooks_enable = disable, enable
