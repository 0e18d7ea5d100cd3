"""Rules about tensors: dead head rows, zero-filled gradients, layouts, casts, vocabulary-wide buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from leanstep.diagnose.finding import Hit, Work
from leanstep.diagnose.record import HeadRecord, SavedRecord, StepRecord, Tally, by_line
from leanstep.diagnose.source import UNKNOWN_LINE, Line


def dead_rows(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Rows of the head's output gradient are exactly zero: computed, stored and thrown away."""
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
        work = Work(
            flops=6 * total.dead * first.inner * first.width, held_bytes=total.dead * first.width * per_row
        )
        hits.append(Hit(line, total.dead, callers, "forward", evidence, work))
    return hits


def _saved_bytes_per_element(step: StepRecord) -> float:
    """Bytes saved per logit: all [N, V] tensors of the step over the rows of the head."""
    rows = sum(head.rows for head in step.heads.values() if head.width == step.head_width)
    saved = sum(record.bytes for (_, width), record in step.saved.items() if width == step.head_width)
    return saved / max(rows * step.head_width, 1)


def zero_fill(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Backward ops write a whole buffer of zeros for a small gradient."""
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
        # Written once by the fill, read and written again by the add that merges it.
        work = Work(moved_bytes=total.bytes * (3 if merges else 1))
        hits.append(Hit(line, total.count, callers, "backward", evidence, work))
    return hits


def transposed_copy(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Copies or adds across memory layouts."""
    found = dict(by_line(step.state_copies, Tally))
    for line, (total, callers) in by_line(step.other_copies, Tally).items():
        if total.bytes >= limits["bytes"] and total.bytes >= limits["share"] * step.written_bytes:
            if line in found:
                found[line][0].add(total)
                found[line][1].update(callers)
            else:
                found[line] = (total, callers)
    hits = []
    for line, (total, callers) in found.items():
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
    """The same version of a tensor is cast to the same dtype again."""
    return _casts(step.duplicate_casts, limits)


def dtype_round_trip(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """A widened tensor is cast straight back."""
    return _casts(step.round_trips, limits)


def _wide(step: StepRecord) -> dict[Line, tuple[SavedRecord, Counter[Line]]]:
    """What each line saved of the head's width."""
    if not step.head_width:
        return {}
    sites = {site: record for (site, width), record in step.saved.items() if width == step.head_width}
    return by_line(sites, SavedRecord)


def retained_chunks(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """A loop over chunks of the vocabulary-wide tensor, every chunk kept for the backward."""
    hits = []
    for line, (total, callers) in _wide(step).items():
        if (
            total.kept >= limits["chunks"]
            and total.kept_bytes >= limits["bytes"]
            and total.kept_rows >= limits["rows"]
        ):
            evidence = {
                "chunks": total.kept,
                "bytes": total.kept_bytes,
                "shapes": dict(total.shapes.most_common(3)),
            }
            work = Work(held_bytes=total.kept_bytes)
            hits.append(Hit(line, total.kept, callers, "forward", evidence, work))
    return hits


def full_vocab(step: StepRecord, limits: Mapping[str, float]) -> list[Hit]:
    """Vocabulary-wide tensors are saved for the backward."""
    rows = limits["rows"]
    wide = {line: found for line, found in _wide(step).items() if found[0].kept_rows >= rows * found[0].kept}
    if sum(total.kept_bytes for total, _ in wide.values()) < limits["bytes"]:
        return []
    # A line that `retained-chunks` names is not named twice: see `rules.judge`.
    hits = []
    for line, (total, callers) in wide.items():
        evidence = {
            "shapes": dict(total.shapes.most_common(3)),
            "bytes": total.kept_bytes,
            "all_saved_bytes": step.peak_saved_bytes,
        }
        hits.append(Hit(line, total.count, callers, "forward", evidence, Work(held_bytes=total.kept_bytes)))
    return hits
