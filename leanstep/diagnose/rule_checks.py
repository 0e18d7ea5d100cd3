"""The checks behind the rules: one pure function per rule, from a step's record to hits.

Host checks come first: reads, storms of tiny ops, per-parameter optimizer loops, slow dtypes, repeated
allocations, unused gradients. Tensor checks follow: dead head rows, zero-filled gradients, layouts, casts,
vocabulary-wide buffers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import torch

from leanstep.diagnose.recording.ops import HALF
from leanstep.diagnose.step_records import (
    OPTIMIZER,
    HeadRecord,
    Hit,
    MatmulKey,
    OpKey,
    OpRecord,
    SavedRecord,
    StepRecord,
    Tally,
    Work,
    by_line,
)
from leanstep.tape.lines import UNKNOWN_LINE, Line, Site

MIB = 1024 * 1024


def host_sync(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find lines where the host reads a device value."""
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
        # On a CPU NorMuon processes one matrix at a time, each on one core: not a loop of the user's.
        if keep_optimizer and key.site.in_leanstep:
            continue
        if (key.phase == OPTIMIZER) == keep_optimizer and key.site.line is not UNKNOWN_LINE:
            lines[key.site.line].append((key, record))
    return lines


def op_storm(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find lines that repeat a tiny op many times, in forward and backward together."""
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
        # A loop over layers reads new parameters in each iteration; each accumulated batch repeats it.
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
    """Find optimizers that loop over their parameters instead of updating them together."""
    lines = _ops_by_line(step, keep_optimizer=True)
    if sum(record.count for entries in lines.values() for _, record in entries) < limits["ops"]:
        return []
    matmuls: dict[Line, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for key, count in step.matmuls.items():
        if (
            key.phase == OPTIMIZER
            and not key.site.in_leanstep
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
        # One pass would read and write as much as two of the kinds of ops do.
        passes = [(key.op, record.total_bytes) for key, record in entries if not record.flops]
        kinds = len({op for op, _ in passes})
        moved = sum(num_bytes for _, num_bytes in passes) * max(0.0, 1 - 2 / max(kinds, 1))
        work = Work(loop_ops=max(count - groups, 0), moved_bytes=moved)
        hits.append(Hit(line, count, callers, OPTIMIZER, evidence, work))
    return hits


def slow_dtype(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find half-precision matmuls on a CPU that has no fast instructions for them."""
    by_dtype: dict[tuple[Line, torch.dtype], list[tuple[MatmulKey, int]]] = defaultdict(list)
    for key, count in step.matmuls.items():
        if key.dtype in HALF and key.site.line is not UNKNOWN_LINE:
            by_dtype[key.site.line, key.dtype].append((key, count))
    hits = []
    for (line, dtype), entries in by_dtype.items():
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
    """Find lines that repeatedly allocate and free large buffers under no_grad."""
    hits = []
    for line, (total, callers) in by_line(step.churn, Tally).items():
        if total.count >= limits["buffers"]:
            evidence = {"buffers": total.count, "bytes": total.bytes}
            in_optimizer = any(k.site.line == line and k.phase == OPTIMIZER for k in step.ops)
            phase = OPTIMIZER if in_optimizer else "forward"
            hits.append(Hit(line, total.count, callers, phase, evidence, Work(moved_bytes=total.bytes)))
    return hits


def unused_grad(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find leaves whose gradients no optimizer uses."""
    hits = []
    all_bytes = sum(total.bytes for total in step.unused_grads.values())
    for line, (total, callers) in by_line(step.unused_grads, Tally).items():
        if total.count >= limits["leaves"]:
            flops = sum(
                record.flops for key, record in step.ops.items() if key.site.line == line and not key.direct
            )
            evidence = {"leaves": total.count, "gradient_bytes": total.bytes}
            # One of the two matmuls in a backward computes the weight's gradient. If the line depends on no
            # trained parameter (a teacher without no_grad), its whole backward is unused: see `idle_flops`.
            part = total.bytes / max(all_bytes, 1)
            work = Work(
                flops=max(flops / 2, step.idle_flops * part), moved_bytes=step.idle_bytes * part,
                held_bytes=total.bytes,
            )  # fmt: skip
            hits.append(Hit(line, total.count, callers, "forward", evidence, work))
    return hits


def dead_rows(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find rows of the head whose output gradient is exactly zero: computed, stored and unused."""
    hits = []
    heads = {site: head for site, head in step.heads.items() if head.width == step.head_width}
    for line, (total, _) in by_line(heads, HeadRecord).items():
        mine = [(site, head) for site, head in heads.items() if site.line == line]
        first = mine[0][1]
        if total.dead < limits["rows"] or total.dead < limits["share"] * total.rows:
            continue
        callers = Counter({site.caller: head.dead for site, head in mine if site.caller is not None})
        per_row = first.element_bytes + _saved_bytes_per_element(step)
        evidence = {"rows": total.rows, "dead": total.dead, "width": first.width, "inner": first.inner}
        # The backward recomputes the tiles and frees them again.
        products, held = (8, 0.0) if total.in_tiles else (6, total.dead * first.width * per_row)
        work = Work(flops=products * total.dead * first.inner * first.width, held_bytes=held)
        hits.append(Hit(line, total.dead, callers, "forward", evidence, work))
    return hits


def _saved_bytes_per_element(step: StepRecord) -> float:
    """Return the bytes saved per logit: all [N, V] tensors of the step divided by the rows of the head."""
    rows = sum(head.rows for head in step.heads.values() if head.width == step.head_width)
    saved = sum(record.bytes for (_, width), record in step.saved.items() if width == step.head_width)
    return saved / max(rows * step.head_width, 1)


def zero_fill(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find backward ops that write a whole buffer of zeros for a small gradient."""
    hits = []
    for line, (total, callers) in by_line(step.zero_fills, Tally).items():
        if line is UNKNOWN_LINE or total.count < limits["ops"] or total.bytes < limits["bytes"]:
            continue
        merges = sum(
            record.count
            for key, record in step.ops.items()
            if key.site.line == line and not key.direct and key.op in ("add", "add_")
        )
        evidence = {"ops": dict(total.detail), "bytes": total.bytes, "merging_adds": merges}
        # Written once by the fill, then read and written again by the add that accumulates it.
        work = Work(moved_bytes=total.bytes * (3 if merges else 1))
        hits.append(Hit(line, total.count, callers, "backward", evidence, work))
    return hits


def transposed_copy(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find copies or adds across memory layouts."""
    copies = dict(by_line(step.state_copies, Tally))
    for line, (total, callers) in by_line(step.other_copies, Tally).items():
        if total.bytes >= limits["bytes"] and total.bytes >= limits["share"] * step.written_bytes:
            if line in copies:
                copies[line][0].add(total)
                copies[line][1].update(callers)
            else:
                copies[line] = (total, callers)
    hits = []
    for line, (total, callers) in copies.items():
        phases = {key.phase for key in step.ops if key.site.line == line and key.direct}
        phase = "optimizer" if "optimizer" in phases else "forward"
        evidence = {
            "kinds": dict(total.detail),
            "bytes": total.bytes,
            "step_written_bytes": step.written_bytes,
        }
        hits.append(Hit(line, total.count, callers, phase, evidence, Work(strided_bytes=2 * total.bytes)))
    return hits


def _casts(table: Mapping, limits: Mapping[str, float]) -> list[Hit]:
    hits = []
    for line, (total, callers) in by_line(dict(table), Tally).items():
        if line is not UNKNOWN_LINE and total.bytes >= limits["bytes"]:
            evidence = {"casts": dict(total.detail), "bytes": total.bytes}
            # Read in one width and written in the other: three halves of the wide tensor.
            hits.append(
                Hit(line, total.count, callers, "forward", evidence, Work(moved_bytes=1.5 * total.bytes))
            )
    return hits


def duplicate_cast(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find repeated casts of the same version of a tensor to the same dtype."""
    return _casts(step.duplicate_casts, limits)


def dtype_round_trip(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find widened tensors that are cast straight back."""
    return _casts(step.round_trips, limits)


def _wide(step: StepRecord) -> dict[Line, tuple[SavedRecord, Counter[Line]]]:
    """Return the tensors of the head's width that each line saved."""
    if not step.head_width:
        return {}
    sites = {site: record for (site, width), record in step.saved.items() if width == step.head_width}
    return by_line(sites, SavedRecord)


def retained_chunks(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find loops over chunks of the vocabulary-wide tensor that save every chunk for the backward."""
    hits = []
    for line, (total, callers) in _wide(step).items():
        if (
            total.held >= limits["chunks"]
            and total.held_bytes >= limits["bytes"]
            and total.held_rows >= limits["rows"]
        ):
            evidence = {
                "chunks": total.held,
                "bytes": total.held_bytes,
                "shapes": dict(total.shapes.most_common(3)),
            }
            work = Work(held_bytes=total.held_bytes)
            hits.append(Hit(line, total.held, callers, "forward", evidence, work))
    return hits


def full_vocab(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find vocabulary-wide tensors that are saved for the backward."""
    rows = limits["rows"]
    wide = {line: entry for line, entry in _wide(step).items() if entry[0].held_rows >= rows * entry[0].held}
    saved_bytes = sum(total.held_bytes for total, _ in wide.values())
    if saved_bytes < limits["bytes"]:
        return []
    # Logits and gradients that coexist with the saved tensors disappear with them.
    peak = max(step.peak_wide_bytes, saved_bytes)
    # A line that `retained-chunks` names is not named twice: see `rules.judge`.
    hits = []
    for line, (total, callers) in wide.items():
        evidence = {
            "shapes": dict(total.shapes.most_common(3)),
            "bytes": total.held_bytes,
            "all_saved_bytes": step.peak_saved_bytes,
            "peak_bytes": peak,
        }
        work = Work(held_bytes=peak * total.held_bytes / saved_bytes)
        hits.append(Hit(line, total.count, callers, "forward", evidence, work))
    return hits


def no_grad_vocab(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find vocabulary-wide tensors written without gradients: old and reference log-probs, an entropy."""
    sites = {site: total for (site, width), total in step.unsaved.items() if width == step.head_width}
    by_lines = by_line(sites, Tally)
    # Each line reads what the previous one wrote: together they process one tensor.
    if sum(total.bytes for total, _ in by_lines.values()) < limits["bytes"]:
        return []
    hits = []
    for line, (total, callers) in by_lines.items():
        evidence = {"shapes": dict(total.detail.most_common(3)), "bytes": total.bytes}
        # Each is freed before the next one is allocated.
        work = Work(moved_bytes=2 * total.bytes, held_bytes=total.bytes / total.count)
        hits.append(Hit(line, total.count, callers, "forward", evidence, work))
    return hits


def no_kv_cache(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find generation that recomputes all earlier positions for each token."""
    hits = []
    for line, (total, callers) in by_line(step.again, Tally).items():
        if total.count >= limits["calls"]:
            # All but the last position of each call were already computed.
            again = total.bytes - total.count
            evidence = {"calls": total.count, "positions": total.bytes, "computed_again": again}
            hits.append(Hit(line, total.count, callers, "forward", evidence))
    return hits


def no_context(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find generation that calls the model with one token and an empty cache."""
    lines = by_line(step.no_context, Tally).items()
    return [
        Hit(line, total.count, callers, "forward", {"calls": total.count})
        for line, (total, callers) in lines
        if total.count >= limits["calls"]
    ]


def launch_bound(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find phases where the device is idle because the host launches small kernels one by one."""
    return [
        hit
        for hit in _idle(step, step.slow_launches, "launches")
        if hit.evidence["share"] >= limits["share"] and hit.count >= limits["launches"]
    ]


def step_gap(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find gaps where the device waits for the next batch."""
    return [hit for hit in _idle(step, step.pauses, "gaps") if hit.evidence["share"] >= limits["share"]]


def _idle(step: StepRecord, table: dict[Site, Tally], word: str) -> list[Hit]:
    hits = []
    for line, (total, callers) in by_line(table, Tally).items():
        seconds = total.bytes / 1e9
        share = seconds / step.trace_seconds if step.trace_seconds else 0.0
        phase = next((key[6:] for key in total.detail if key.startswith("phase ")), "forward")
        by = {key: n for key, n in total.detail.most_common() if not key.startswith("phase ")}
        evidence = {word: total.count, "idle_seconds": seconds, "share": share, "by": by}
        hits.append(Hit(line, total.count, callers, phase, evidence, Work(seconds=seconds)))
    return hits


def blocking_copy(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find copies to the device for which the host waits."""
    hits = []
    for line, (total, callers) in by_line(step.blocking, Tally).items():
        if total.count >= limits["copies"]:
            evidence = {
                "copies": total.count,
                "bytes": total.bytes,
                "calls": dict(total.detail.most_common(3)),
            }
            hits.append(Hit(line, total.count, callers, "forward", evidence))
    return hits
