"""Dtypes: repeated and needless casts, float64, half precision on a CPU without instructions for it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import torch

from leanstep.diagnose.findings import Hit, Launches, Rule, Work, callers_of, listed, plural
from leanstep.diagnose.rules.ops import CASTS
from leanstep.diagnose.step import HALF, Op, Step, dtype_text, grouped
from leanstep.tape.events import FORWARD, NO_STORAGE, RECOMPUTE
from leanstep.units import size

# Smaller ops in float64 do not matter.
MIN_BYTES = 16 * 1024


def _casts(step: Step) -> Iterator[Op]:
    for op in step.ops:
        if op.name == "_to_copy" and op.outs and op.tensors[0].dtype != op.outs[0].dtype:
            # Tensors of inference mode have no version.
            if op.tensors[0].version >= 0 and op.tensors[0].storage != NO_STORAGE:
                yield op


def _of_casts(casts: list[tuple[Op, str]], limits: Mapping[str, float]) -> Iterator[Hit]:
    for line, repeated in grouped(casts, lambda cast: cast[0].site).items():
        num_bytes = sum(op.outs[0].num_bytes for op, _ in repeated)
        if num_bytes >= limits["bytes"]:
            evidence = {"casts": dict(Counter(text for _, text in repeated)), "bytes": num_bytes}
            callers = callers_of(op.site for op, _ in repeated)
            # Read in one width and written in the other: three halves of the wide tensor.
            yield Hit(line, len(repeated), callers, FORWARD, evidence, Work(moved_bytes=1.5 * num_bytes))


def duplicate_cast(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find repeated casts of the same version of a tensor to the same dtype."""
    seen: set[tuple[object, ...]] = set()
    again: list[tuple[Op, str]] = []
    for op in _casts(step):
        source, target = op.tensors[0], op.outs[0].dtype
        key = (source.storage, source.offset, source.version, source.layout, target)
        # A checkpoint recomputes its casts on purpose.
        if key in seen and op.phase != RECOMPUTE:
            again.append((op, f"{dtype_text(source.dtype)} to {dtype_text(target)}"))
        seen.add(key)
    return _of_casts(again, limits)


DUPLICATE_CAST = Rule(
    "duplicate-cast",
    duplicate_cast,
    limits={"bytes": 64 * 1024},
    fires_when="the same version of a tensor is cast to the same dtype again",
    what=lambda f: (
        f"The same version of a tensor is cast again: {listed(f.evidence['casts'])}, "
        f"{size(f.evidence['bytes'])} written."
    ),
    amount=lambda f: plural(f.count, "cast"),
    why="The result already exists.",
    fix="Cast once, keep the result in a variable and reuse it.",
    short_fix="cast once, pass the result",
    removes="cast",
    compiled=Launches(ops=CASTS, only=True, backward=False),
)


def dtype_round_trip(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find widened tensors that are cast straight back."""
    came_from: dict[tuple[int, int], torch.dtype] = {}
    trips: list[tuple[Op, str]] = []
    for op in _casts(step):
        source, out = op.tensors[0], op.outs[0]
        narrow = came_from.get((source.storage, source.version))
        if narrow == out.dtype and widens(out.dtype, source.dtype):
            trips.append((op, f"{dtype_text(out.dtype)} to {dtype_text(source.dtype)} and back"))
        came_from[out.storage, out.version] = source.dtype
    return _of_casts(trips, limits)


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether `target` represents every value of `source` exactly: casting back loses nothing."""
    if source == torch.bool:
        return True
    if source.is_floating_point != target.is_floating_point or source.is_complex or target.is_complex:
        return False
    return target.itemsize > source.itemsize and torch.promote_types(source, target) == target


DTYPE_ROUND_TRIP = Rule(
    "dtype-round-trip",
    dtype_round_trip,
    limits={"bytes": 64 * 1024},
    fires_when="a tensor is widened and cast back at once",
    what=lambda f: (
        f"A widened tensor is cast straight back: {listed(f.evidence['casts'])}, "
        f"{size(f.evidence['bytes'])} written."
    ),
    amount=lambda f: plural(f.count, "trip"),
    why="Widening and then narrowing changes no bit.",
    fix="Use the original tensor.",
    short_fix="drop both casts",
    removes="cast",
    compiled=Launches(ops=CASTS, only=True),
)


def slow_dtype(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find half-precision matmuls on a CPU that has no fast instructions for them."""
    by_dtype: dict[torch.dtype, list[Op]] = defaultdict(list)
    for op in step.ops:
        if op.matmul is not None and op.factors[0].dtype in HALF:
            by_dtype[op.factors[0].dtype].append(op)
    for dtype, half in by_dtype.items():
        rate, full_rate = step.tape.half_rates.get(dtype, (1.0, 1.0))
        if rate >= limits["rate"] * full_rate:
            continue
        for line, ops in grouped(half, lambda op: op.site).items():
            flops = sum(op.flops for op in ops)
            direct = [op for op in ops if op.direct]
            if not direct or flops < limits["share"] * step.flops:
                continue
            evidence = {
                "dtype": dtype_text(dtype),
                "gflops_per_s": round(rate, 1),
                "fp32_gflops_per_s": round(full_rate, 1),
            }
            work = Work(seconds=flops * (1 / rate - 1 / full_rate) / 1e9)
            yield Hit(line, len(direct), callers_of(op.site for op in direct), ops[0].phase, evidence, work)


SLOW_DTYPE = Rule(
    "slow-dtype",
    slow_dtype,
    limits={"rate": 0.5, "share": 0.01},
    fires_when="half-precision matmuls run at less than half the measured fp32 rate of this CPU",
    what=lambda f: (
        f"{plural(f.count, 'matmul')} in {f.evidence['dtype']}, measured here at "
        f"{f.evidence['gflops_per_s']} GFLOP/s against {f.evidence['fp32_gflops_per_s']} in float32."
    ),
    amount=lambda f: plural(f.count, "matmul"),
    why="This CPU has no fast instructions for the dtype.",
    fix="Compute in float32 on this CPU (keep the weights as they are and cast once). leanstep chooses "
    "its compute dtype the same way.",
    short_fix="compute in float32 on this CPU",
    removes="this CPU",
)


def float64(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find large tensors computed in float64 although the parameters are narrower."""
    parameters = step.run.parameters.values()
    # A model in float64 is intended.
    if all(tensor.dtype == torch.float64 for tensor in parameters):
        return
    doubles = [
        op
        for op in step.ops
        if op.direct
        and op.outs
        and op.outs[0].dtype == torch.float64
        and op.written_bytes >= MIN_BYTES
        and not op.in_leanstep
    ]
    for line, ops in grouped(doubles, lambda op: op.site).items():
        num_bytes = sum(op.written_bytes for op in ops)
        if num_bytes >= limits["bytes"]:
            evidence = {"ops": dict(Counter(op.name for op in ops).most_common(3)), "bytes": num_bytes}
            callers = callers_of(op.site for op in ops)
            # float32 would read and write half as much.
            yield Hit(line, len(ops), callers, FORWARD, evidence, Work(moved_bytes=num_bytes), "medium")


FLOAT64 = Rule(
    "float64",
    float64,
    limits={"bytes": 256 * 1024},
    fires_when="≥ 256 KiB computed in float64 on a line while parameters are narrower",
    what=lambda f: (
        f"{plural(f.count, 'op')} in float64 ({listed(f.evidence['ops'])}), "
        f"{size(f.evidence['bytes'])} written, although the parameters are narrower."
    ),
    amount=lambda f: plural(f.count, "op"),
    why="Usually the data has NumPy's default dtype, and every op that uses it is widened. GPUs "
    "compute float64 at a fraction of their float32 rate.",
    fix="Cast the input once: torch.from_numpy(x.astype(numpy.float32)), or .float(). Where "
    "float64 is intended, add # leanstep: ignore[float64].",
    short_fix="cast the input to float32",
)
