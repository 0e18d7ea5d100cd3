"""Checks for the rules on habits: common code for which torch has a better way.

Hand-written attention and GELU, float64 from the data, copies of weights, retained graphs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from leanstep.diagnose.step_records import FORWARD, Hit, OpKey, OpRecord, StepRecord, Tally, Work, by_line
from leanstep.tape.lines import UNKNOWN_LINE, Line


def attention_matrix(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find a softmax over a product of queries and keys: T x T numbers per head are written and saved."""
    hits = []
    for line, (total, callers) in by_line(step.attention, Tally).items():
        # torch's own attention falls back to this on a CPU (dropout, a mask with a gradient), but not on a
        # GPU.
        if total.bytes < limits["bytes"] or "scaled_dot_product_attention" in line.statement:
            continue
        evidence = {"shapes": dict(total.detail.most_common(3)), "bytes": total.bytes}
        # Scores and softmax, and their gradients: each is written and read at least once.
        work = Work(moved_bytes=8 * total.bytes, held_bytes=total.bytes)
        hits.append(Hit(line, total.count, callers, FORWARD, evidence, work))
    return hits


def float64(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find large tensors computed in float64 although the parameters are narrower."""
    hits = []
    for line, (total, callers) in by_line(step.doubles, Tally).items():
        if line is UNKNOWN_LINE or total.bytes < limits["bytes"]:
            continue
        evidence = {"ops": dict(total.detail.most_common(3)), "bytes": total.bytes}
        # float32 would read and write half as much.
        work = Work(moved_bytes=total.bytes)
        hits.append(Hit(line, total.count, callers, FORWARD, evidence, work, "medium"))
    return hits


def weight_clone(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find parameters that the step copies."""
    hits = []
    for line, (total, callers) in by_line(step.clones, Tally).items():
        if total.bytes >= limits["bytes"]:
            evidence = {"copies": total.count, "bytes": total.bytes}
            work = Work(moved_bytes=2 * total.bytes)
            hits.append(Hit(line, total.count, callers, FORWARD, evidence, work))
    return hits


def indexed_weight(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find rows of a parameter read with weight[ids], whose backward is an index_put that sorts."""
    hits = []
    for line, (total, callers) in by_line(step.indexed, Tally).items():
        if total.bytes >= limits["bytes"]:
            evidence = {"shapes": dict(total.detail.most_common(3)), "bytes": total.bytes}
            # The backward reads the gradient and adds it row by row: about twice the necessary writes.
            work = Work(moved_bytes=2 * total.bytes)
            hits.append(Hit(line, total.count, callers, FORWARD, evidence, work))
    return hits


def retain_graph(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find backward(retain_graph=True): saved tensors stay alive, and their graph is traversed again."""
    hits = []
    retained = sum(total.count for total in step.retained.values())
    for line, (total, callers) in by_line(step.retained, Tally).items():
        if total.count >= limits["calls"]:
            needless = step.backward_runs <= retained
            evidence = {"calls": total.count, "backward_runs": step.backward_runs, "needless": needless}
            work = Work(held_bytes=step.peak_saved_bytes)
            confidence = "high" if needless else "medium"
            hits.append(Hit(line, total.count, callers, "backward", evidence, work, confidence))
    return hits


def gelu_by_hand(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Find an activation with tanh or erf that consists of five or more elementwise ops."""
    lines: dict[Line, list[tuple[OpKey, OpRecord]]] = defaultdict(list)
    for key, record in step.ops.items():
        if key.direct and key.phase == FORWARD and key.site.line is not UNKNOWN_LINE:
            lines[key.site.line].append((key, record))
    hits = []
    for line, entries in lines.items():
        counts: Counter[str] = Counter()
        callers: Counter[Line] = Counter()
        moved = 0
        for key, record in entries:
            if not record.flops and record.max_bytes >= limits["op_bytes"]:
                counts[key.op] += record.count
                moved += record.total_bytes
                if key.site.caller is not None:
                    callers[key.site.caller] += record.count
        calls = max(counts["tanh"], counts["erf"])
        cubic = counts["erf"] or counts["pow"] >= calls or counts["mul"] >= 5 * calls
        ops = sum(counts.values())
        if (
            not calls
            or not cubic
            or counts["mul"] < 2 * calls
            or not counts["add"]
            or any(record.flops for _, record in entries)
        ):
            continue
        if ops < limits["ops"] * calls or moved < limits["bytes"]:
            continue
        evidence = {"ops": dict(counts.most_common(6)), "calls": calls, "bytes": moved}
        # One fused op reads and writes as much as one of these; the backward of each op writes as much again.
        work = Work(moved_bytes=2 * moved * (1 - calls / ops))
        hits.append(Hit(line, ops, callers, FORWARD, evidence, work))
    return hits
