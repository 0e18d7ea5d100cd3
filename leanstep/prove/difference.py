"""Classify the difference between two scripts that do not make the same update.

If the gradients agree and the updates do not, the optimizer differs. Otherwise both scripts run again in
fp64, and `cuts.compare_cuts` looks for a constant factor, weights proportional to token counts, padding and
different data. If they agree in fp64, the difference is rounding. The targets passed to losses and gathers
reveal a shift.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from leanstep.prove.captured import Captured, Update
from leanstep.prove.cuts import CutRow, compare_cuts, stacked
from leanstep.prove.script_jobs import Job
from leanstep.prove.sketches import Sketch

# Changes whose directions agree this well differ by a factor; they are computed in fp32 or half precision.
SAME_DIRECTION = 1e-2
# The fraction of two lists of targets that must agree after a shift.
SHIFTED = 0.9


def of_the_optimizer(before: Update, after: Update) -> str:
    """Describe updates that differ although the gradients agree."""
    if bool(before.clipped) != bool(after.clipped):
        return "the same gradients, but only one of the scripts clips them"
    factor = _factor(before.changes, after.changes)
    if factor is not None:
        return f"the same gradients, an update {factor:.4g} times as large: the learning rate or its schedule"
    return "the same gradients, a different update: the optimizer, its options or parameter groups"


def _factor(mine: dict[str, Sketch], theirs: dict[str, Sketch]) -> float | None:
    names = [name for name in mine if name in theirs]
    if not names:
        return None
    a, b = stacked(mine, names), stacked(theirs, names)
    factor = float(a @ b) / max(float(a @ a), 1e-300)
    return factor if (b - factor * a).norm() <= SAME_DIRECTION * b.norm() else None


def of_the_gradient(before: Job, after: Job, step: int, run: Callable[[Job], list[Captured]]) -> str:
    """Describe how the gradients of step number `step` differ, by running both scripts in fp64."""
    sides = []
    for job in (before, after):
        captured = run(replace(job, twin=True, parts=True, steps=step))
        if any(each.error is not None or len(each.updates) < step for each in captured):
            return ""
        sides.append([replace(each, updates=each.updates[step - 1 :]) for each in captured])
    first, other = sides
    row = compare_cuts(before.label, first, after.label, other)
    if row.same:
        return f"in fp64 both have the same gradient: {after.label} rounds more"
    shifted = _of_the_targets(first[0].updates[0].targets, other[0].updates[0].targets)
    if row.kind not in ("mixing", "weights") or not shifted:
        return _words(row)
    return shifted


def _words(row: CutRow) -> str:
    if row.kind == "mixing":
        where = f"first at {row.parameter}"
        return f"the same tokens, different gradients ({where}): the mask, the targets or the formula"
    return row.sentence


def _of_the_targets(mine: list[int], theirs: list[int]) -> str:
    """Describe how two lists of targets differ; empty if they are equal or cannot be compared."""
    if len(mine) != len(theirs) or len(mine) < 2 or mine == theirs:
        return ""
    a, b = torch.tensor(mine), torch.tensor(theirs)
    for name, same in (("later", a[1:] == b[:-1]), ("earlier", a[:-1] == b[1:])):
        if same.double().mean() >= SHIFTED:
            return f"shifted targets: a row scores the token one position {name} than before"
    return f"{int((a != b).sum()):,} of {len(a):,} targets differ"
