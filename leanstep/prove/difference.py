"""Name the difference between two scripts that do not make the same update.

If the gradients agree and the updates do not, the optimizer differs. Otherwise both scripts run again in
fp64. `explain` looks, in this order, for parameters without a gradient, a constant factor, the gradient of an
earlier step, other targets, a wrong backward (the loss agrees), weights per micro-batch, other data, one
summand of the loss, and the first value that differs. If they agree in fp64, the difference is rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from leanstep.prove.captured import Captured, Update
from leanstep.prove.cuts import (
    NOTHING,
    CutRow,
    CutsProof,
    compare_cuts,
    compare_runs,
    cut_label,
    from_step,
    least_squares,
    limit_of,
    stacked,
)
from leanstep.prove.script_jobs import Job, run_job
from leanstep.prove.sketches import Sketch
from leanstep.prove.watch import Value, first_difference

# Changes whose directions agree this well differ by a factor; they are computed in fp32 or half precision.
SAME_DIRECTION = 1e-2
# The fraction of two lists of targets that must agree after a shift.
SHIFTED = 0.9
# Weights of two fp64 runs that differ by more than this do not start from the same values.
SAME_WEIGHTS = 1e-6
# Kinds that hold although the scripts count different tokens.
CERTAIN = ("factor", "zero", "stale", "token-weights", "weights", "lost")

Runs = Sequence[list[Captured]]


def of_the_optimizer(before: Update, after: Update, names: list[str], step: int) -> str:
    """Describe updates of the parameters `names` that differ in a step although the gradients agree."""
    if bool(before.clipped) != bool(after.clipped):
        return "the same gradients, but only one of the scripts clips them before the optimizer's step"
    clips = "the same gradients, clipped in another way"
    names = [name for name in names if name in before.changes and name in after.changes]
    if (
        before.clipped
        and (factor := _factor(before.clipped, after.clipped, list(before.clipped))) is not None
    ):
        if abs(factor - 1) > SAME_DIRECTION:
            return f"{clips}: {factor:.4g} times as large, the threshold or the norm"
    elif before.clipped:
        return f"{clips}: not by one factor for all parameters, as its norm would"
    others = _other_options(before, after, names)
    if options := [text for key, text in others if key != "optimizer"]:
        return f"the same gradients, {'; '.join(options[:3])}"
    # Weight decay does not scale with the rest of an update.
    free = [name for name in names if not before.options.get(name, {}).get("weight_decay")] or names
    factor = _factor(before.changes, after.changes, free)
    betas = next((o["betas"] for u in (before, after) for o in u.options.values() if "betas" in o), ())
    if factor is not None and len(betas) == 2:
        first, second = (1 - beta**step for beta in betas)
        for missing in (first / second**0.5, second**-0.5, first):
            for wrong, label in ((missing, "after"), (1 / missing, "before")):
                if abs(factor / wrong - 1) <= SAME_DIRECTION < abs(factor - 1):
                    return (
                        f"the same gradients, an update {factor:.4g} times as large: the script {label} "
                        f"does not correct the bias of Adam's averages (beta ** {step})"
                    )
    if factor is not None and abs(factor - 1) > SAME_DIRECTION:
        return f"the same gradients, an update {factor:.4g} times as large: the learning rate or its schedule"
    if others:
        return f"the same gradients, {others[0][1]}"
    return "the same gradients, a different update: the optimizer, its options or parameter groups"


def _other_options(before: Update, after: Update, names: list[str]) -> list[tuple[str, str]]:
    """Name the options of the optimizers in which the parameters `names` differ, with both values."""
    differing: dict[tuple[str, Any, Any], list[str]] = {}
    for name in names:
        mine, theirs = before.options.get(name, {}), after.options.get(name, {})
        for key in mine:
            if key in theirs and mine[key] != theirs[key]:
                differing.setdefault((key, mine[key], theirs[key]), []).append(name)
    # A schedule computes its rate in floating point.
    differing = {
        (key, a, b): of
        for (key, a, b), of in differing.items()
        if not (isinstance(a, float) and isinstance(b, float) and math.isclose(a, b, rel_tol=1e-9))
    }
    texts = []
    for (key, a, b), of in differing.items():
        where = "" if len(of) == len(before.options) else f" of {of[0]}" + _more(len(of) - 1)
        values = [f"{value:g}" if isinstance(value, float) else f"{value}" for value in (a, b)]
        texts.append((key, f"another {key}{where}: {values[0]} before, {values[1]} after"))
    return texts


def _more(count: int) -> str:
    return f" and {count} more" if count else ""


def _factor(mine: dict[str, Sketch], theirs: dict[str, Sketch], names: list[str]) -> float | None:
    names = [name for name in names if name in theirs]
    if not names:
        return None
    a, b = stacked(mine, names), stacked(theirs, names)
    factor = float(a @ b) / max(float(a @ a), 1e-300)
    return factor if (b - factor * a).norm() <= SAME_DIRECTION * b.norm() else None


def of_the_gradient(
    before: Job, after: Job, step: int, run: Callable[[Job], list[Captured]], *, same_loss: bool = False
) -> tuple[str, str]:
    """Return the kind of difference of the gradients of step number `step`, and words for it.

    same_loss: the losses of the original runs agree, which a difference by rounding alone does not imply.
    """
    runs = [run(replace(job, twin=True, parts=True, steps=step)) for job in (before, after)]
    if any(each.error is not None or len(each.updates) < step for side in runs for each in side):
        return "", ""
    return explain(before, after, step, runs, run, same_loss=same_loss)


def explain(
    before: Job,
    after: Job,
    step: int,
    runs: Runs,
    run: Callable[[Job], list[Captured]],
    *,
    same_loss: bool = False,
    labels: tuple[str, str] | None = None,
) -> tuple[str, str]:
    """Do the work of `of_the_gradient`, given the captures of both fp64 runs."""
    first, other = (from_step(side, step) for side in runs)
    _rename(first, other)
    mine, theirs = first[0].updates[0], other[0].updates[0]
    labels = labels or (before.label, after.label)
    if weights := _other_weights(first[0], other[0]):
        return "start", weights
    if zero := _zero_gradients(first[0].order, mine, theirs, labels):
        return "zero", zero
    row = compare_cuts(labels[0], first, labels[1], other)
    if row.same:
        where = (
            f"; look at the backward of {_functions(mine, theirs)}" if same_loss and theirs.functions else ""
        )
        return "rounding", f"in fp64 both have the same gradient: {labels[1]} rounds more{where}"
    if row.kind == "factor":
        return row.kind, row.sentence
    for label, side, place in ((labels[1], runs[1], theirs), (labels[0], runs[0], mine)):
        if step > 1 and _is_stale(side[0].updates[step - 2], place):
            return "stale", (
                f"stale gradient: {label} adds the gradient of step {step - 1} to that of step {step}; "
                "zero_grad() is missing, or comes between backward() and step()"
            )
    if row.kind == "random" and mine.draws == theirs.draws:
        # Both draw the same numbers in the same order.
        row.kind = "mixing"
    is_random = row.kind == "random" and before.dropout and after.dropout
    if not is_random and row.kind in ("random", "mixing", "order") and (lines := _other_random(mine, theirs)):
        return "random", f"the scripts draw different random numbers: {lines[0]} and {lines[1]}"
    shifted = _of_the_targets(mine.targets, theirs.targets)
    if shifted and row.kind in ("mixing", "weights", "order"):
        return "targets", shifted
    if is_random:
        return _without_dropout(before, after, step, run, labels, (mine, theirs))
    if row.kind in ("token-weights", "weights", "lost", "padding", "order"):
        return row.kind, row.sentence
    asked = [replace(job, twin=True, parts=True, explain=True, steps=step) for job in (before, after)]
    explained = [run(job) for job in asked]
    same = abs(mine.loss - theirs.loss) <= limit_of(first, other) * max(1.0, abs(mine.loss))
    summand = value = ""
    if all(each.error is None and len(each.updates) >= step for side in explained for each in side):
        a, b = (side[0].updates[step - 1] for side in explained)
        _rename(explained[0], explained[1])
        summand = _of_the_summands(mine, theirs, a, b, limit_of(first, other), labels)
        value = _of_the_values(a.values, b.values, labels)
    if same:
        return "backward", _backward(row, mine, theirs, summand, labels)
    if summand:
        return "summand", summand + f"; {value}" * bool(value)
    if value:
        return "value", f"the same data, another loss: {value}"
    where = f"first at {row.parameter}"
    return "formula", f"the same tokens, different gradients ({where}): the mask, the targets or the formula"


def _without_dropout(
    before: Job,
    after: Job,
    step: int,
    run: Callable[[Job], list[Captured]],
    labels: tuple[str, str],
    updates: tuple[Update, Update],
) -> tuple[str, str]:
    """Explain what differs besides the random numbers: run both scripts without dropout."""
    jobs = [replace(job, twin=True, parts=True, steps=step, dropout=False) for job in (before, after)]
    runs = [run(job) for job in jobs]
    if any(each.error is not None or len(each.updates) < step for side in runs for each in side):
        return "random", "the scripts draw different random numbers"
    kind, text = explain(jobs[0], jobs[1], step, runs, run, labels=labels)
    if kind != "rounding":
        return kind, text
    silent = [label for label, update in zip(labels, updates, strict=True) if not update.drawn]
    if len(silent) == 1:
        drawn = next(update.drawn[0] for update in updates if update.drawn)
        return (
            "dropout",
            f"{silent[0]} draws no random numbers in the forward pass; the other does, at {drawn}",
        )
    return "random", "the scripts draw different random numbers; without dropout the gradients agree"


def _other_random(mine: Update, theirs: Update) -> tuple[str, str] | None:
    """Return the first draws of the two scripts that have other numbers; None if only one has such a draw."""

    def first(update: Update, others: Update) -> str | None:
        for line, size, norm in update.random:
            if not any(size == n and math.isclose(norm, known) for _, n, known in others.random):
                return line
        return None

    own, other = first(mine, theirs), first(theirs, mine)
    return (own, other) if own is not None and other is not None else None


def prove_cuts(
    script: str, cuts: Sequence[Job], *, fork: bool = False, report: Callable[[str], None] | None = None
) -> CutsProof:
    """Run every split, or every value of a flag, in fp64 and compare each with the first, step by step."""
    proof = CutsProof(script)
    labels = [cut_label(job) for job in cuts]
    runs: list[list[Captured]] = []
    for job, label in zip(cuts, labels, strict=True):
        if report:
            report(label)
        runs.append(run_job(job, fork=fork))
        for each in runs[-1]:
            proof.notes += [note for note in each.notes if note not in proof.notes]
            if proof.problem is None and each.is_lost:
                proof.problem = f"{label} {each.error}" + f"; its last line: {each.said}" * bool(each.said)
            elif proof.problem is None and each.error is not None:
                done = f"after {len(each.updates)} updates" if each.updates else "before its first update"
                proof.problem = f"{label} ended with {each.error} {done}: {each.said}"
            elif proof.problem is None and not each.updates:
                proof.problem = f"{label} never calls optimizer.step(): there is no update to compare"
        if proof.problem is not None:
            return proof
        if len(runs) == 1:
            continue
        row = compare_runs(labels[0], runs[0], label, runs[-1])
        proof.rows.append(row)
        counts = [len(side[0].updates) for side in (runs[0], runs[-1])]
        if row.same and counts[0] != counts[1]:
            proof.problem = f"{labels[0]} made {counts[0]} updates, {label} {counts[1]}"
            return proof
        if row.kind == "optimizer":
            mine, theirs = (side[0].updates[row.step - 1] for side in (runs[0], runs[-1]))
            row.sentence = of_the_optimizer(mine, theirs, list(mine.changes), row.step)
        elif not row.same and not row.is_split and row.kind not in ("nothing", "shapes"):
            # Two values of a flag are two scripts: samples of other micro-batches cannot be the cause.
            row.kind, row.sentence = explain(
                cuts[0],
                job,
                row.step,
                (runs[0], runs[-1]),
                lambda job: run_job(job, fork=fork),
                labels=(labels[0], label),
            )
    return proof.closed()


def _rename(first: list[Captured], other: list[Captured]) -> None:
    """Give parameters the names of the first script if the scripts share none."""
    if set(first[0].initial) & set(other[0].initial) or len(first[0].initial) != len(other[0].initial):
        return
    names = dict(zip(other[0].initial, first[0].initial, strict=True))
    for update in (update for each in other for update in each.updates):
        for sketches in (update.gradients, *update.parts, *(gradient for _, gradient in update.terms)):
            renamed = {names.get(name, name): value for name, value in sketches.items()}
            sketches.clear()
            sketches.update(renamed)


def _other_weights(first: Captured, other: Captured) -> str:
    """Say that the scripts start from weights that one of them rounds; empty if they do not."""
    for name, mine in first.initial.items():
        theirs = other.initial.get(name)
        if theirs is None or theirs.shape != mine.shape or not mine.norm:
            continue
        difference = mine.minus(theirs).norm / mine.norm
        if difference > SAME_WEIGHTS:
            return (
                f"the scripts start from different weights: {name} differs by {difference:.2g} of its norm: "
                "another dtype of the weights, or another seed"
            )
    return ""


def _zero_gradients(order: list[str], mine: Update, theirs: Update, labels: tuple[str, str]) -> str:
    """Describe parameters whose gradient is exactly zero in only one script; empty if there are none."""
    for label, have, lack in ((labels[1], mine, theirs), (labels[0], theirs, mine)):
        names = [
            *(name for name in order if name in have.gradients),
            *(n for n in have.gradients if n not in order),
        ]
        level = math.sqrt(sum(value.norm**2 for value in have.gradients.values()) / max(len(names), 1))
        gone = [
            name
            for name in names
            if have.gradients[name].norm > NOTHING * level
            and (name not in lack.gradients or lack.gradients[name].norm == 0.0)
        ]
        if not gone:
            continue
        more = _more(len(gone) - 1)
        if set(gone) <= set(lack.frozen):
            return f"in {label}, {gone[0]}{more} {'do' if more else 'does'} not require a gradient"
        rest = [
            name
            for name in names
            if name not in gone and name in lack.gradients and lack.gradients[name].norm > 0
        ]
        if not rest:
            added = any(value.norm > 0 for part in lack.parts for value in part.values())
            tail = "no parameter has one" + "; zero_grad() comes between backward() and step()" * added
        elif gone == names[: len(gone)]:
            tail = f"the last parameter with one is {rest[0]}"
        else:
            tail = f"{len(rest)} other parameters have one"
        where = f". Look at the backward of {_functions(have, lack)}" if lack.functions else ""
        return (
            f"in {label}, {gone[0]}{more} get{'' if more else 's'} a gradient of exactly zero; {tail}{where}"
        )
    return ""


def _functions(mine: Update, theirs: Update) -> str:
    """Name the autograd Functions of a script, those that the other one does not use if there are any."""
    own = [name for name in theirs.functions if name not in mine.functions] or theirs.functions
    return ", ".join(own[:3])


def _is_stale(previous: Update, update: Update) -> bool:
    """Return whether the optimizer saw the previous gradient added to what the backward calls added."""
    old = {**previous.gradients, **previous.clipped}
    names = [name for name, value in update.gradients.items() if name in old and value.norm > 0]
    if not update.parts or not names or not all(set(part) >= set(names) for part in update.parts):
        return False
    added = torch.stack([stacked(part, names) for part in update.parts]).sum(0)
    rest, old_gradient = stacked(update.gradients, names) - added, stacked(old, names)
    return bool(old_gradient.norm() > 0 and (rest - old_gradient).norm() <= 1e-6 * old_gradient.norm())


def _of_the_targets(mine: list[int], theirs: list[int]) -> str:
    """Describe how two lists of targets differ; empty if they are equal or cannot be compared."""
    if len(mine) != len(theirs) or len(mine) < 2 or mine == theirs:
        return ""
    a, b = torch.tensor(mine), torch.tensor(theirs)
    for name, same in (("later", a[1:] == b[:-1]), ("earlier", a[:-1] == b[1:])):
        if same.double().mean() >= SHIFTED:
            return f"shifted targets: a row scores the token one position {name} than before"
    return f"{int((a != b).sum()):,} of {len(a):,} targets differ"


def _backward(row: CutRow, mine: Update, theirs: Update, summand: str, labels: tuple[str, str]) -> str:
    """Describe gradients that differ although the loss agrees."""
    agree = f"the loss agrees, the gradient does not (first at {row.parameter})"
    for have, lack in ((mine, theirs), (theirs, mine)):
        if lack.functions and set(lack.functions) - set(have.functions):
            return f"{agree}: look at the backward of {_functions(have, lack)}" + f"; {summand}" * bool(
                summand
            )
    if summand:
        return f"{agree}: {'a detached term; ' * ('has no gradient' in summand)}{summand}"
    return (
        f"{agree}: a term without a gradient, or another function with the same value, "
        f"in {labels[1]} or {labels[0]}"
    )


def _of_the_summands(
    mine: Update, theirs: Update, a: Update, b: Update, limit: float, labels: tuple[str, str]
) -> str:
    """Name the summand of the loss that differs; empty if the loss is no sum or no single one explains it."""
    names = [name for name in mine.gradients if name in theirs.gradients]
    totals = [stacked(update.gradients, names) for update in (mine, theirs)]
    columns: list[list[tuple[str, Tensor]]] = []
    for update, total in zip((a, b), totals, strict=True):
        lines = [(line, _over(gradient, names, mine.gradients)) for line, gradient in update.terms]
        size = max(float(total.norm()), 1e-300)
        if lines and (torch.stack([g for _, g in lines]).sum(0) - total).norm() > 1e-5 * size:
            lines = []
        columns.append([(line, gradient) for line, gradient in lines if gradient.norm() > 1e-9 * size])
    for side in (0, 1):
        own, target = columns[side], totals[1 - side]
        if len(own) < 2:
            continue
        matrix = torch.stack([gradient for _, gradient in own], dim=1)
        weights = least_squares(matrix, target)
        if (matrix @ weights - target).norm() > 100 * limit * target.norm():
            continue
        odd = [(line, float(w)) for (line, _), w in zip(own, weights, strict=True) if abs(w - 1) > 1e-5]
        if not odd or len(odd) == len(own):
            continue
        (line, weight), rest = odd[0], "; so does another one" * (len(odd) > 1)
        if abs(weight) < 1e-5:
            text = f"the term of the loss at {line} of {labels[side]} has no gradient in {labels[1 - side]}"
            return text + "; nor has another one" * (len(odd) > 1)
        return f"the term of the loss at {line} weighs {weight:.4g} times as much in {labels[1 - side]}{rest}"
    left = [list(column) for column in columns]
    for one in columns[0]:
        partner = next((t for t in left[1] if (t[1] - one[1]).norm() <= 100 * limit * one[1].norm()), None)
        if partner is not None:
            left[0] = [t for t in left[0] if t is not one]
            left[1] = [t for t in left[1] if t is not partner]
    if len(left[0]) == len(left[1]) == 1 < len(columns[1]):
        agree = "the other one agrees" if len(columns[1]) == 2 else f"the other {len(columns[1]) - 1} agree"
        return f"only the term of the loss at {left[1][0][0]} differs ({left[0][0][0]} before); {agree}"
    return ""


def _over(gradient: dict[str, Sketch], names: list[str], like: dict[str, Sketch]) -> Tensor:
    parts = (gradient[n].projection if n in gradient else torch.zeros_like(like[n].projection) for n in names)
    return torch.cat(list(itertools.chain(parts)))


def _of_the_values(mine: list[Value], theirs: list[Value], labels: tuple[str, str]) -> str:
    """Say up to which line two forwards agree; empty without a value in common."""
    difference = first_difference(mine, theirs)
    if difference is None or difference[0] is None:
        return ""
    last, own, partner = difference
    assert last is not None
    text = f"both compute the same values up to {last.op} at {last.line}; then {own.op} at {own.line} differs"
    if partner is None:
        return text
    if (partner.op, partner.size) != (own.op, own.size):
        return f"{text}, where {labels[0]} computes {partner.op} at {partner.line}"
    text += f" from {partner.line}"
    if len(partner.others) == len(own.others) and partner.others != own.others:
        return f"{text}, with other constants (a mask, weights, targets or positions)"
    if own.size == 1 and partner.norm:
        return f"{text}: {own.norm / partner.norm:.4g} times as large"
    return text
