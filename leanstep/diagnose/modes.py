"""The two modes that stand between the user's calls and torch, and nothing more: they pass on and report."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from leanstep.host_reads import RUNS_USER_CODE, call_kind, run_under

_num_function_modes = torch._C._len_torch_function_stack
_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_CAN_HIDE = hasattr(_eval_frame, "set_code_exec_strategy")


def hide_from_compiler(*functions: Any) -> None:
    """Frames of the recorder below a compiled region are not for tracing."""
    if _CAN_HIDE:
        skip = _eval_frame._FrameAction.SKIP
        for function in functions:
            _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))


class OpMode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap the method to keep its compiler out, at 3 us per op; `hide_from_compiler`
        # does it once.
        return not _CAN_HIDE

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        recorder = self.recorder
        if recorder.active:
            try:
                if _num_function_modes():
                    # A function mode would see every look at a shape or a dtype below.
                    with torch._C.DisableTorchFunction():
                        recorder.on_op(func, args, kwargs, out)
                else:
                    recorder.on_op(func, args, kwargs, out)
            except Exception as error:
                recorder.failed(error)
        return out


class CallMode(TorchFunctionMode):
    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in RUNS_USER_CODE:
            return run_under(self, func, args, kwargs)
        if self.recorder.active and call_kind(func) is not None:
            return self.recorder.on_call(func, args, kwargs)
        return func(*args, **kwargs)


hide_from_compiler(OpMode.__torch_dispatch__, CallMode.__torch_function__)
