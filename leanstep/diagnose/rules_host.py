"""Rules about the host: reads, storms of tiny ops, optimizers that walk, slow dtypes, churn,
unused gradients.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import torch

from leanstep.diagnose.finding import Hit, Work
from leanstep.diagnose.ops import HALF
from leanstep.diagnose.record import OPTIMIZER, MatmulKey, OpKey, OpRecord, StepRecord, Tally, by_line
from leanstep.diagnose.source import UNKNOWN_LINE, Line

MIB = 1024 * 1024


def host_sync(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """The host reads a device value."""
    hits = []
    for line, (total, callers) in by_line(step.reads, Tally).items():
        if total.count < limits["reads"]:
            continue
        phases = {key[6:]: n for key, n in total.detail.items() if key.startswith("phase ")}
        kinds = {k: n for k, n in total.detail.items() if not k.startswith(("phase ", "of "))}
        evidence = {"kinds": kinds, "reads": total.count, "of_the_model": total.detail["of the model"]}
        phase = max(phases, key=lambda name: phases[name]) if phases else "forward"
        confidence = "high" if total.detail["of the model"] else "medium"
        hits.append(Hit(line, total.count, callers, phase, evidence, Work(reads=total.count), confidence))
    return hits


def _ops_by_line(step: StepRecord, keep_optimizer: bool) -> dict[Line, list[tuple[OpKey, OpRecord]]]:
    lines: dict[Line, list[tuple[OpKey, OpRecord]]] = defaultdict(list)
    for key, record in step.ops.items():
        if (key.phase == OPTIMIZER) == keep_optimizer and key.site.line is not UNKNOWN_LINE:
            lines[key.site.line].append((key, record))
    return lines


def op_storm(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """A line repeats a tiny op many times, in forward and backward together."""
    hits = []
    for line, entries in _ops_by_line(step, keep_optimizer=False).items():
        repeats: Counter[str] = Counter()
        callers: Counter[Line] = Counter()
        direct = attributed = total_bytes = 0
        parameters = 0
        for key, record in entries:
            if key.direct:
                repeats[key.op] += record.tiny
                direct += record.tiny
                parameters = max(parameters, record.parameters)
                if key.site.caller is not None:
                    callers[key.site.caller] += record.tiny
            else:
                attributed += record.tiny
            total_bytes += record.total_bytes
        most = max(repeats.values(), default=0)
        if most < limits["repeats"] or direct + attributed < limits["ops"]:
            continue
        # A loop over layers reads new parameters as it goes; each accumulated batch walks it again.
        if parameters >= most / max(step.backward_runs, 1) / 2:
            continue
        evidence = {
            "forward_ops": direct,
            "backward_ops": attributed,
            "repeats": dict(repeats.most_common(3)),
            "mean_bytes": total_bytes // max(direct + attributed, 1),
        }
        phase = max(entries, key=lambda e: e[1].tiny if e[0].direct else 0)[0].phase
        hits.append(Hit(line, direct, callers, phase, evidence, Work(ops=direct + attributed)))
    return hits


def unbatched_optimizer(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """An optimizer walks over its parameters instead of updating them together."""
    lines = _ops_by_line(step, keep_optimizer=True)
    if sum(record.count for entries in lines.values() for _, record in entries) < limits["ops"]:
        return []
    matmuls: dict[Line, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for key, count in step.matmuls.items():
        if (
            key.phase == OPTIMIZER
            and 2 * key.shape[0] * key.shape[1] * key.shape[2] * key.shape[3] <= limits["flops"]
        ):
            matmuls[key.site.line][key.shape] += count
    hits = []
    for line, entries in lines.items():
        repeats: Counter[str] = Counter()
        callers: Counter[Line] = Counter()
        for key, record in entries:
            if not record.flops:
                repeats[key.op] += record.small
            if key.site.caller is not None:
                callers[key.site.caller] += record.count
        same_shape = sum(count for count in matmuls[line].values() if count > 1)
        if same_shape:
            repeats["matmul"] = same_shape
        most = max(repeats.values(), default=0)
        if most < limits["repeats"]:
            continue
        count = sum(record.count for _, record in entries)
        groups = max(len(matmuls[line]), 1) if same_shape else len(repeats)
        evidence = {
            "ops": count,
            "repeats": dict(repeats.most_common(3)),
            "groups": groups,
            "written_bytes": sum(record.written_bytes for _, record in entries),
        }
        hits.append(Hit(line, count, callers, OPTIMIZER, evidence, Work(ops=max(count - groups, 0))))
    return hits


def slow_dtype(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Half-precision matmuls on a CPU that has no fast instructions for them."""
    found: dict[tuple[Line, torch.dtype], list[tuple[MatmulKey, int]]] = defaultdict(list)
    for key, count in step.matmuls.items():
        if key.dtype in HALF and key.site.line is not UNKNOWN_LINE:
            found[key.site.line, key.dtype].append((key, count))
    hits = []
    for (line, dtype), entries in found.items():
        rate, full_rate = step.half_rates.get(dtype, (1.0, 1.0))
        if rate >= limits["rate"] * full_rate:
            continue
        flops = sum(2 * k.shape[0] * k.shape[1] * k.shape[2] * k.shape[3] * n for k, n in entries)
        count = sum(n for key, n in entries if key.direct)
        if not count or flops < limits["share"] * step.flops:
            continue
        callers: Counter[Line] = Counter()
        for key, n in entries:
            if key.direct and key.site.caller is not None:
                callers[key.site.caller] += n
        evidence = {
            "dtype": str(dtype).removeprefix("torch."),
            "gflops_per_s": round(rate, 1),
            "fp32_gflops_per_s": round(full_rate, 1),
        }
        work = Work(seconds=flops * (1 / rate - 1 / full_rate) / 1e9)
        hits.append(Hit(line, count, callers, entries[0][0].phase, evidence, work))
    return hits


def alloc_churn(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Under no_grad a line makes large buffers again and again and drops them."""
    hits = []
    for line, (total, callers) in by_line(step.churn, Tally).items():
        if total.count >= limits["buffers"]:
            evidence = {"buffers": total.count, "bytes": total.bytes}
            in_optimizer = any(k.site.line == line and k.phase == OPTIMIZER for k in step.ops)
            phase = OPTIMIZER if in_optimizer else "forward"
            hits.append(Hit(line, total.count, callers, phase, evidence, Work(moved_bytes=total.bytes)))
    return hits


def unused_grad(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Leaves get gradients that no optimizer uses."""
    hits = []
    for line, (total, callers) in by_line(step.unused_grads, Tally).items():
        if total.count >= limits["leaves"]:
            flops = sum(
                record.flops for key, record in step.ops.items() if key.site.line == line and not key.direct
            )
            evidence = {"leaves": total.count, "gradient_bytes": total.bytes}
            # Of the two matmuls in a backward one is the weight's gradient.
            work = Work(flops=flops / 2, held_bytes=total.bytes)
            hits.append(Hit(line, total.count, callers, "forward", evidence, work))
    return hits
