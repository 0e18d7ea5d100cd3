"""Leave a mode that need not be on top: torch keeps its modes on a stack, and the user may have pushed others."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch


def leave_mode(mode: Any) -> None:
    """Remove `mode` from its stack; modes above it are put back in their order."""
    if isinstance(mode, TorchFunctionMode):
        size, pop, push = torch._C._len_torch_function_stack, torch._C._pop_torch_function_stack, _push_function
    else:
        size, pop, push = torch._C._len_torch_dispatch_stack, _python_dispatch._pop_mode, _python_dispatch._push_mode
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
