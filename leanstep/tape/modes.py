"""The modes and hooks through which a recorder sees ops, calls and saved tensors.

Modes and saved-tensor hooks are on stacks shared with the user's code, and can be removed while others are
above them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from leanstep.tape.syncs import (
    NATIVE_TYPES,
    READ_CALLS,
    RUNS_USER_CODE,
    call_kind,
    run_parts,
    run_under,
    torchs_own,
)

function_modes_are_on = torch._C._is_torch_function_mode_enabled
BACKWARD_CALLS = frozenset(map(torchs_own, (torch.Tensor.backward, torch.autograd.backward)))
_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_CAN_HIDE = hasattr(_eval_frame, "set_code_exec_strategy")


def hide_from_compiler(*functions: Any) -> None:
    """Keep the compiler from tracing the recorder's frames inside a compiled region."""
    if _CAN_HIDE:
        skip = _eval_frame._FrameAction.SKIP
        for function in functions:
            _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))


class OpMode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap the method to keep its compiler out, at 3 us per op; `hide_from_compiler` does so
        # once.
        return not _CAN_HIDE

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function_modes_are_on():
            # In a backward: a function mode would be called for every op that the engine dispatches, and for
            # every access to a shape or dtype.
            with torch._C.DisableTorchFunction():
                return self.__torch_dispatch__(func, types, args, kwargs)
        parts = run_parts(self, func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        out = func(*args, **kwargs) if kwargs else func(*args)
        recorder = self.recorder
        if recorder.active:
            try:
                recorder.on_op(func, args, kwargs, out)
            except Exception as error:
                recorder.failed(error)
        return out


class CallMode(TorchFunctionMode):
    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) in NATIVE_TYPES and func not in READ_CALLS:
            return func(*args, **kwargs) if kwargs else func(*args)
        func, kwargs = torchs_own(func), kwargs or {}
        if func in RUNS_USER_CODE:
            if self.recorder.active and func in BACKWARD_CALLS:
                self.recorder.on_backward_call(args[0] if args else None, kwargs, sys._getframe(1))
            return run_under(self, func, args, kwargs)
        if self.recorder.active and call_kind(func) is not None:
            return self.recorder.on_read_call(func, args, kwargs)
        return func(*args, **kwargs)


hide_from_compiler(OpMode.__torch_dispatch__, CallMode.__torch_function__)


# Not in torch's type stubs.
_AUTOGRAD: Any = torch._C._autograd  # type: ignore[attr-defined]


def leave_mode(mode: Any) -> None:
    """Remove `mode` from its stack; modes above it are restored in order."""
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


def reach_modes_again() -> None:
    """Restore dispatch modes entered inside an inference_mode block, which torch drops when it ends.

    The end of the block restores the dispatch keys of its beginning, and with them "there is no mode".
    """
    if torch._C._len_torch_dispatch_stack():
        for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
            torch._C._dispatch_tls_set_dispatch_key_included(key, True)


def _top(mode: Any) -> Any:
    if isinstance(mode, TorchFunctionMode):
        return torch._C._get_function_stack_at(torch._C._len_torch_function_stack() - 1)
    return _python_dispatch._get_current_dispatch_mode()


def _push_function(mode: Any) -> None:
    torch._C._push_on_torch_function_stack(mode)


def as_it_is(packed: Any) -> Any:
    """Return a saved tensor unchanged."""
    return packed


hide_from_compiler(as_it_is)


class SavedHooks:
    """One pair of saved-tensor hooks that is removed where torch forbids any.

    `torch.func.grad` and related functions refuse to run with active hooks. Ours must not break a script, so
    they are removed while hooks are disabled and restored afterwards.
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
        # A user's with-block that ended in between has popped our hooks instead of its own.
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
