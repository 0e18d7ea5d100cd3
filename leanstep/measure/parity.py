"""Parity: a fast path may be at most k times as far from the fp64 reference as the plain code in its dtype.

    truth     = reference(inputs in fp64)
    plain     = reference(inputs)                 same dtype as the candidate
    candidate = fast(inputs)
    error(candidate, truth) <= k * error(plain, truth) + floor

A tolerance without the baseline's own error means little: it is either so wide that a bug passes, or so
narrow that a correct reordering of a sum fails. The error of a tensor is max |x - truth| / max |truth|.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.case import Case, Implementation, Outputs, Params, Workload
from leanstep.measure.timing import TimeUp, time_box

# Sizes for `prove` are small: a check takes seconds at most, unless a dtype is emulated.
BOX_S = 60.0
# For rows that run only if they are named: torch.compile takes minutes for a model.
SLOW_BOX_S = 900.0
FACTOR = {torch.float64: 2.0, torch.float32: 2.0, torch.float16: 3.0, torch.bfloat16: 3.0}
# In units of max |truth|: allows one or two units in the last place of the output.
FLOOR = {torch.float64: 1e-12, torch.float32: 5e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class ParityRow:
    """One row of `prove --json`; `tensor` is `size/name`."""

    case: str
    impl: str
    dtype: str
    tensor: str
    error: float
    reference_error: float
    bound: float
    ok: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def dtype_name(dtype: torch.dtype) -> str:
    return {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[
        str(dtype).split(".")[1]
    ]


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Return max |value - truth| / max |truth|; infinite if one is not finite and the other differs."""
    if value.shape != truth.shape:
        return float("inf")
    if truth.numel() == 0:
        return 0.0
    if not truth.is_floating_point():
        return float((value != truth).sum().item())
    value64, truth64 = value.detach().double(), truth.detach().double()
    finite = torch.isfinite(truth64)
    same_special = (value64 == truth64) | (value64.isnan() & truth64.isnan())
    if not bool((finite | same_special).all()) or not bool(torch.isfinite(value64[finite]).all()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    scale = truth64[finite].abs().max().item()
    difference = (value64[finite] - truth64[finite]).abs().max().item()
    return difference / max(scale, torch.finfo(torch.float32).tiny)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are bitwise equal, including NaN patterns and the sign of zero."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    # A copy: a tensor of one element counts as contiguous with any stride.
    flat = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def truth_of(case: Case, workload: Workload) -> Outputs:
    return (case.truth or case.reference.build)(workload.cast(torch.float64))()


def plain_of(case: Case, workload: Workload) -> Outputs:
    """Return the outputs of the plain code in this dtype, whose error is the baseline."""
    return (case.error_baseline or case.reference.build)(workload)()


def compare(
    case: Case,
    implementation: Implementation,
    dtype: torch.dtype,
    label: str,
    truth: Outputs,
    plain: Outputs,
    candidate: Outputs,
) -> list[ParityRow]:
    """Return one row per tensor; a fast path must return every tensor of the reference, a peer need not."""
    rows = []
    for name, expected in truth.items():
        if name not in candidate:
            if implementation.kind == "fast":
                rows.append(
                    _row(case, implementation, dtype, f"{label}/{name} (missing)", float("inf"), 0.0, 0.0)
                )
            continue
        error = relative_error(candidate[name], expected)
        reference_error = relative_error(plain[name], expected) if name in plain else 0.0
        floor = case.floor if case.floor is not None else FLOOR[dtype]
        bound = FACTOR[dtype] * reference_error + floor if expected.is_floating_point() else 0.0
        rows.append(_row(case, implementation, dtype, f"{label}/{name}", error, reference_error, bound))
    return rows


def check(
    case: Case,
    implementation: Implementation,
    dtype: torch.dtype,
    size: str,
    *,
    params: Params | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[ParityRow]:
    """Run the checks of `prove` at one size: distance from fp64, repeatability, unchanged inputs."""
    workload = case.workload(params or case.params(size), dtype, device, seed)
    before = {name: t.clone() for name, t in workload.tensors.items()}
    truth, plain = truth_of(case, workload), plain_of(case, workload)
    candidate = implementation.build(workload)()
    rows = compare(case, implementation, dtype, size, truth, plain, candidate)
    changed = [name for name, t in workload.tensors.items() if not same_bits(t, before[name])]
    rows.append(_flag(case, implementation, dtype, f"{size}/inputs unchanged", not changed))
    again = implementation.build(workload)()
    repeats = all(same_bits(candidate[name], again[name]) for name in candidate)
    rows.append(_flag(case, implementation, dtype, f"{size}/bitwise repeatable", repeats))
    return rows


def check_in_time(
    case: Case,
    implementation: Implementation,
    dtype: torch.dtype,
    size: str,
    *,
    box_s: float = BOX_S,
    device: torch.device | str = "cpu",
) -> list[ParityRow]:
    """Run `check`, but stop after `box_s`; a check that does not finish fails."""
    try:
        with time_box(box_s):
            return check(case, implementation, dtype, size, device=device)
    except TimeUp:
        return [_flag(case, implementation, dtype, f"{size}/checked within {box_s:.0f} s", False)]


def prove_case(
    case: Case,
    *,
    dtypes: tuple[torch.dtype, ...] | None = None,
    implementations: tuple[str, ...] | None = None,
    device: torch.device | str = "cpu",
) -> list[ParityRow]:
    """Check every fast path of a case at every size in `prove_sizes` and in every dtype."""
    rows: list[ParityRow] = []
    for implementation in case.implementations:
        wanted = implementation.name in implementations if implementations else implementation.kind == "fast"
        if not wanted:
            continue
        for dtype in dtypes or implementation.dtypes or case.dtypes:
            for size in case.prove_sizes:
                if implementation.missing(case.params(size), device, named=bool(implementations)) is None:
                    box_s = SLOW_BOX_S if implementation.on_request else BOX_S
                    rows += check_in_time(case, implementation, dtype, size, box_s=box_s, device=device)
    return rows


def _row(case, implementation, dtype, tensor, error, reference_error, bound) -> ParityRow:
    # A NaN error compares false with everything: `not (error > bound)` would accept it.
    ok = error <= bound
    return ParityRow(
        case.name, implementation.name, dtype_name(dtype), tensor, error, reference_error, bound, bool(ok)
    )


def _flag(case: Case, implementation: Implementation, dtype: torch.dtype, what: str, ok: bool) -> ParityRow:
    """Return a yes-or-no check as a row: error 0 for yes, 1 for no, bound 0."""
    return _row(case, implementation, dtype, what, 0.0 if ok else 1.0, 0.0, 0.0)
