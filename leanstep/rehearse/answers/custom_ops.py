"""Custom ops in Python (`torch.library.custom_op`): their bodies show what they launch on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._library.custom_ops import OPDEFS

from leanstep.rehearse.kernel_costs import has_cost

# Namespaces of torch's own ops, which are priced by name.
TORCHS = frozenset(
    "aten prims rngprims inductor_prims debugprims inductor quantized _quantized quantized_decomposed "
    "c10d c10d_functional _c10d_functional _c10d_functional_autograd fsdp _dtensor symm_mem flex_lib "
    "streams profiler sparse mkl mkldnn onednn onnx export debug_mode_ops _native".split()
)
ONE_PASS = "priced as one pass over its tensors; use register_cost to set another price"


def body_of(func: Any) -> Callable[..., Any] | None:
    """Return what an op runs on the device, if that is Python code and the op has no registered cost."""
    if not needs_a_price(func):
        return None
    definition = OPDEFS.get(func._schema.name)
    if definition is None:
        return None
    bodies = definition._backend_fns
    return bodies.get("cuda", bodies.get(None))


def needs_a_price(func: Any) -> bool:
    """Return whether an op is not torch's own and has no registered cost."""
    return func.namespace not in TORCHS and not has_cost(func._schema.name)
