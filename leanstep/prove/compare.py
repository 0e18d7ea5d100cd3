"""Check that two scripts make the same update, by their distance from an fp64 run of the first script.

    error(after, truth) <= k * error(before, truth) + floor        k = 2, or 3 in half precision

This holds for the loss, every parameter's gradient and every parameter's change, step by step. It is the rule
of `leanstep.measure.parity`, in the 2-norm because sketches preserve that norm. A small tensor can be exact
by chance, so the reference error is at least the median error over the parameters of the step. Errors are
relative to the tensor's norm, or to a tenth of the norm it would have if all gradients were equally large:
the gradient of a key bias is zero except for rounding, and an error relative to that means nothing.

An optimizer amplifies the rounding of its gradients (Adam divides by their size, Muon by their singular
values), so a change has its own floor. From the second step on, the weights of the scripts differ slightly:
what the bounds of earlier steps allow, scaled by how far an update moves the weights, is added to the bound.

Nothing is accepted blindly: a script that is itself far from fp64, or a bound that a tensor of zeros would
satisfy, gives no verdict.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from leanstep import units
from leanstep.measure.drift import CONFIDENCE, first_divergence, paired_shift
from leanstep.measure.parity import FACTOR, FLOOR
from leanstep.prove.capture import Captured, Update
from leanstep.prove.captured import same_tokens
from leanstep.prove.difference import CERTAIN, of_the_gradient, of_the_optimizer
from leanstep.prove.script_jobs import Job, run_job
from leanstep.prove.sketches import Sketch, distance

# Reference errors above this come from half precision, whatever the dtype of the gradients (autocast).
HALF_ERROR = 1e-4
# A script further than this from fp64 is no standard to judge another one by.
UNSURE = 0.05
# A gradient this much smaller than an average one, in units of the floor, is rounding noise.
NOISE = 10
# A gradient above this fraction of an average one is not zero, although it may be rounding noise.
ZERO = 1e-6
# How much further a relative error of the weights can move a gradient.
SENSITIVE = 10
# Initial weights that differ by more than this are different weights, not rounded ones.
OTHER_WEIGHTS = 2e-2
# Errors are relative to at least this fraction of an average tensor's norm.
SMALL = 0.1
# The floor of a change: larger than an optimizer's rounding, smaller than its mistakes.
CHANGE_FLOOR = 1e-4
_KINDS = ("gradients", "clipped", "changes")
_WORDS = {"gradients": "gradient", "clipped": "clipped gradient", "changes": "update", "loss": "loss"}


class NotComparable(Exception):
    """The two runs cannot be compared; the message says why, in one line."""


@dataclass(frozen=True)
class UpdateRow:
    """One tensor of one step; `what`: loss, gradient, clipped gradient or update.

    `sure` False: the script before is too far from fp64, or the bound would accept zeros.
    """

    step: int
    what: str
    parameter: str
    error: float
    reference_error: float
    bound: float
    ok: bool
    sure: bool = True


@dataclass
class PairProof:
    """The result of `prove before.py after.py`."""

    before: str
    after: str
    rows: list[UpdateRow] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)
    steps: int = 0
    iterations: int = 0
    parameters: int = 0
    notes: list[str] = field(default_factory=list)
    problem: str | None = None
    kind: str = ""
    kind_name: str = ""
    other_data: str = ""
    drift: dict[str, Any] | None = None

    @property
    def failed(self) -> list[UpdateRow]:
        return [row for row in self.rows if not row.ok and row.sure]

    @property
    def ok(self) -> bool:
        return self.problem is None and bool(self.rows) and not self.failed

    @property
    def first(self) -> UpdateRow | None:
        """The first failing row: by step, then gradient before update, then forward order of parameters."""
        return self.failed[0] if self.failed else None

    def sentence(self) -> str:
        """The verdict in one line."""
        if self.problem is not None:
            return self.problem
        first = self.first
        if first is None:
            return (
                f"the same update: {len(self.rows)} checks over "
                f"{units.steps(self.steps, self.iterations)} and {self.parameters} parameters hold"
            )
        where = "" if first.what == "loss" else f" of {first.parameter}"
        same_step = [row for row in self.failed if row.step == first.step and row.what == first.what]
        named = next((row for row in self.failed if row.what != "loss"), None)
        others = len(same_step) - 1
        more = f", {others} more parameter{'s' * (others > 1)}" if others else ""
        also = ""
        if first.what == "loss" and named is not None:
            also = f"; first parameter: {named.parameter} ({named.what}, step {named.step})"
        return (
            f"not the same update: first at step {first.step}, the {first.what}{where}{more}: "
            f"{first.error:.2g} from fp64, {first.reference_error:.2g} before, bound {first.bound:.2g}{also}"
            + f". {self.kind[:1].upper()}{self.kind[1:]}"
            * bool(self.kind)
        )

    def to_json(self) -> dict[str, Any]:
        first = self.first
        return {
            "before": self.before,
            "after": self.after,
            "ok": self.ok,
            "verdict": self.sentence(),
            "problem": self.problem,
            "kind": self.kind,
            "kind_name": self.kind_name,
            "first": asdict(first) if first else None,
            "steps": self.steps,
            "iterations": self.iterations,
            "parameters": self.parameters,
            "losses": self.losses,
            "notes": self.notes,
            "drift": self.drift,
            "rows": [asdict(row) for row in self.rows],
        }


def prove_scripts(before: Job, after: Job, *, fork: bool = False, report: Any = None) -> PairProof:
    """Run both scripts, and the first one in fp64, then judge. `problem` says why they cannot be compared."""
    say = report or (lambda what: None)
    proof = PairProof(before.label, after.label)
    runs: dict[str, Captured] = {}
    reference = replace(before, twin=True)
    try:
        for name, job in (("before", before), ("after", after), ("truth", reference)):
            say(f"{Path(job.script).name} ({name if name != 'truth' else 'before, in fp64'})")
            runs[name] = _of_ranks(run_job(job, fork=fork))
    except KeyboardInterrupt as error:
        error.proof = proof  # type: ignore[attr-defined]
        for captured in getattr(error, "captured", [])[:1]:
            runs[name] = captured
        proof.problem = "interrupted"
        _keep_losses(proof, runs)
        raise
    judge(proof, runs["before"], runs["after"], runs["truth"])
    if proof.ok and before.path != after.path and not (runs["before"].overlaid or runs["after"].overlaid):
        script = Path(before.script).name
        proof.problem = (
            f"cannot judge: {script} loads no module that --with brings: both runs are the same program"
        )
    first = proof.first
    if first is None or (proof.problem is not None and not proof.other_data):
        return proof
    mine, theirs = (runs[name].updates[first.step - 1] for name in ("before", "after"))
    failed = {row.what for row in proof.failed if row.step == first.step}
    if "gradient" in failed:
        say("classifying the difference")
        run = lambda job: run_job(job, fork=fork)  # noqa: E731
        proof.kind_name, proof.kind = of_the_gradient(
            before, after, first.step, run, same_loss="loss" not in failed
        )
        # Scripts that count different tokens may read the same data: a factor shows it.
        if proof.kind_name in CERTAIN:
            proof.problem = None
        if proof.kind_name == "random":
            proof.problem = f"cannot judge: {proof.kind}"
    else:
        names = [row.parameter for row in proof.failed if row.step == first.step]
        proof.kind_name, proof.kind = "optimizer", of_the_optimizer(mine, theirs, names, first.step)
    return proof


def _of_ranks(captured: list[Captured]) -> Captured:
    """Return the capture of a rank that failed, else rank 0's, whose gradients are gathered or averaged."""
    return next((run for run in captured if run.error is not None), captured[0])


def _keep_losses(proof: PairProof, runs: dict[str, Captured]) -> None:
    for name, captured in runs.items():
        proof.losses[name] = [update.loss for update in captured.updates]
        proof.notes += [note for note in captured.notes if note not in proof.notes]


def judge(proof: PairProof, before: Captured, after: Captured, truth: Captured) -> PairProof:
    """Fill `proof` with rows; a problem ends the comparison and leaves the rows so far."""
    _keep_losses(proof, {"before": before, "after": after, "truth": truth})
    steps = min(len(run.updates) for run in (before, after, truth))
    proof.steps, proof.iterations = steps, before.iterations
    names = {"before": (proof.before, before), "after": (proof.after, after)}
    names["truth"] = (f"the fp64 run of {proof.before}", truth)
    try:
        for label, run in names.values():
            if not run.updates:
                raise NotComparable(_no_update(label, run))
        renamed = _match(proof, before, after)
        drifted = 0.0
        for index in range(steps):
            drifted += _judge_step(proof, index, (before, after, truth), renamed, drifted)
            if proof.failed:
                break
        proof.notes += _of_the_clipping(proof, before, after)
        for label, run in names.values():
            if run.error is not None:
                raise NotComparable(_no_update(label, run))
        if len(before.updates) != len(after.updates):
            raise NotComparable(
                f"{proof.before} made {len(before.updates)} updates, {proof.after} {len(after.updates)}"
            )
        if proof.failed:
            proof.other_data = _other_data(before, after, proof.failed[0].step - 1)
            if proof.other_data:
                raise NotComparable(proof.other_data)
        elif unsure := next((row for row in proof.rows if not row.sure), None):
            raise NotComparable(_cannot_judge(proof, unsure))
        elif proof.rows and not any(
            sketch.norm for update in truth.updates for sketch in update.gradients.values()
        ):
            raise NotComparable("cannot judge: every gradient is zero")
    except NotComparable as error:
        proof.problem = str(error)
    return proof


def _of_the_clipping(proof: PairProof, before: Captured, after: Captured) -> list[str]:
    """Say which script clips without an effect; a failing row says what an effect is."""
    sides = ((proof.before, before), (proof.after, after))
    texts = [
        f"{label} clips after the optimizer's step, which does not change that step"
        for label, run in sides
        if run.clips_late
    ]
    clipping = [
        (label, updates)
        for label, run in sides
        if (updates := [update for update in run.updates[: proof.steps] if update.clipped])
    ]
    if len(clipping) == 1 and not proof.failed:
        ((label, updates),) = clipping
        pairs = [
            (update.gradients.get(name), new) for update in updates for name, new in update.clipped.items()
        ]
        if all(
            old is not None and distance(new, old) <= FLOOR[torch.float32] * old.norm for old, new in pairs
        ):
            texts.append(f"only {label} clips; its clipping changed no gradient in these steps")
        else:
            texts.append(f"only {label} calls torch's clipping; the optimizers see the same gradients")
    return list(dict.fromkeys(texts))


def _no_update(label: str, run: Captured) -> str:
    if run.is_lost:
        return f"{label} {run.error}" + f"; its last line: {run.said}" * bool(run.said)
    if run.error is not None:
        done = len(run.updates)
        when = f"after {done} update{'s' * (done != 1)}" if done else "before its first update"
        return f"{label} ended with {run.error} {when}: {run.said}"
    return f"{label} never calls optimizer.step(): there is no update to compare"


def _cannot_judge(proof: PairProof, row: UpdateRow) -> str:
    where = f"step {row.step}, the {row.what}" + f" of {row.parameter}" * bool(row.parameter)
    if row.reference_error > UNSURE:
        why = f"is itself {row.reference_error:.2g} from fp64 ({where}): no standard to judge by"
    else:
        why = f"is too small or too imprecise ({where}): the bound, {row.bound:.2g}, would accept zeros"
    return f"cannot judge: {proof.before} {why}"


def _match(proof: PairProof, before: Captured, after: Captured) -> dict[str, str]:
    """Map parameter names of `before` to those of `after`; by order and shape if they share no name."""
    mine, theirs = before.initial, after.initial
    proof.parameters = len(mine)
    if set(mine) == set(theirs):
        renamed = {name: name for name in mine}
    elif not set(mine) & set(theirs) and [s.shape for s in mine.values()] == [
        s.shape for s in theirs.values()
    ]:
        renamed = dict(zip(mine, theirs, strict=True))
        proof.notes.append("the scripts share no parameter name: parameters are matched by order and shape")
    else:
        gone, came = [n for n in mine if n not in theirs], [n for n in theirs if n not in mine]
        parts = [
            f"only in {script}: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
            for script, names in ((proof.before, gone), (proof.after, came))
            if names
        ]
        raise NotComparable("the scripts train different parameters; " + "; ".join(parts))
    for name, other in renamed.items():
        if mine[name].shape != theirs[other].shape:
            shapes = f"{list(mine[name].shape)} and {list(theirs[other].shape)}"
            raise NotComparable(f"the scripts train different parameters; {name} has shapes {shapes}")
        difference = distance(theirs[other], mine[name]) / max(mine[name].norm, 1e-30)
        if difference > OTHER_WEIGHTS:
            raise NotComparable(
                f"the scripts start from different weights: {name} differs by {difference:.2g} of its norm; "
                "expected the same seed and the same order of initialisation"
            )
    return renamed


def _other_data(before: Captured, after: Captured, index: int) -> str:
    """Say that the scripts read different data in a step that differs; empty if they do not."""
    mine, theirs = before.updates[index], after.updates[index]
    step = index + 1
    changed = {i for i in mine.ids | theirs.ids if mine.ids[i] != theirs.ids[i]}
    # One id may differ: one of the scripts may leave out the padding. One of them may detach a forward.
    if mine.ids and theirs.ids and len(changed) > 1 and not same_tokens(mine.read, theirs.read):
        return (
            f"the scripts read different data: {len(changed)} token ids occur a different number of times "
            f"in step {step} ({mine.tokens:,} and {theirs.tokens:,} tokens)"
        )
    if mine.ids or theirs.ids or mine.first_input is None or theirs.first_input is None:
        return ""
    (size, total), (other_size, other_total) = mine.first_input, theirs.first_input
    if size == other_size and abs(total - other_total) > 1e-2 * max(abs(total), 1e-2 * size):
        return (
            f"the scripts read different data: the first layer's input in step {step} sums to "
            f"{total:.6g} and {other_total:.6g}"
        )
    return ""


def _judge_step(
    proof: PairProof,
    index: int,
    runs: tuple[Captured, Captured, Captured],
    renamed: dict[str, str],
    drifted: float,
) -> float:
    """Add the rows of a step; return how far this step may move the gradients of the next ones apart."""
    before, _, truth = runs
    plain, own, exact = updates = tuple(run.updates[index] for run in runs)
    step = index + 1
    for label, update in ((proof.before, plain), (proof.after, own)):
        if not math.isfinite(update.loss):
            raise NotComparable(
                f"{label} has a loss of {update.loss} in step {step}: nothing can be compared"
            )
    if exact.draws != plain.draws:
        note = f"from step {step} on, the fp64 run draws different random numbers than {proof.before}"
        if not any(known.startswith("from step") for known in proof.notes):
            proof.notes.append(note)
    order = {name: number for number, name in enumerate(truth.order)}
    names = sorted(renamed, key=lambda name: order.get(name, len(order)))
    rows: list[UpdateRow] = []
    noise: set[str] = set()
    kinds: tuple[str, ...] = _KINDS
    if bool(plain.clipped) != bool(own.clipped):
        # One of the scripts may clip with code of its own: what the optimizers see decides.
        updates = tuple(replace(u, clipped={**u.gradients, **u.clipped}) for u in updates)
        seen = _rows(step, "clipped", names, renamed, updates, before.initial, drifted, noise)
        kinds = _KINDS[1:] if all(row.ok for row in seen) else _KINDS
    for kind in kinds:
        rows += _rows(step, kind, names, renamed, updates, before.initial, drifted, noise)
    gradient_error = [row.reference_error for row in rows if row.what == _WORDS[kinds[0]]]
    typical = statistics.median(gradient_error) if gradient_error else 0.0
    k = FACTOR[torch.bfloat16 if typical > HALF_ERROR else torch.float32]
    # In the first step GRPO's loss is zero except for rounding: losses are compared on a scale of at least
    # one.
    scale = max(abs(exact.loss), 1.0)
    error, reference = abs(own.loss - exact.loss) / scale, abs(plain.loss - exact.loss) / scale
    bound = k * max(reference, typical) + FLOOR[torch.float32] + drifted
    if error > bound and rows and all(row.ok and row.sure for row in rows):
        proof.notes.append(
            f"step {step}: the losses differ, {plain.loss:.6g} and {own.loss:.6g}, and the gradients agree: "
            "a scaled loss, a constant term or a value for the log"
        )
    else:
        proof.rows.append(
            UpdateRow(step, "loss", "", error, reference, bound, error <= bound, reference <= UNSURE)
        )
    proof.rows += rows
    moved = [
        row.bound
        * min(1.0, SENSITIVE * exact.changes[row.parameter].norm / before.initial[row.parameter].norm)
        for row in rows
        if row.what == "update" and before.initial[row.parameter].norm > 0
    ]
    return max(moved, default=0.0)


def _rows(
    step: int,
    kind: str,
    names: list[str],
    renamed: dict[str, str],
    updates: tuple[Update, ...],
    initial: dict[str, Sketch],
    drifted: float,
    noise: set[str],
) -> list[UpdateRow]:
    """Judge one kind of tensor of a step; `noise` collects parameters whose gradient is only rounding."""
    plain, own, exact = updates
    plains, owns, exacts = getattr(plain, kind), getattr(own, kind), getattr(exact, kind)
    present = [name for name in names if name in exacts and name in plains]
    total = sum(math.prod(initial[name].shape) for name in present)
    level = math.sqrt(sum(exacts[name].norm ** 2 for name in present) / max(total, 1))
    errors: list[tuple[str, float, float, float]] = []
    sizes: dict[str, float] = {}
    for name in present:
        truth = exacts[name]
        scale = max(truth.norm, SMALL * level * math.sqrt(math.prod(truth.shape)))
        if scale == 0.0:
            scale = 1.0
        reference = distance(plains[name], truth) / scale
        other = owns.get(renamed[name])
        error = distance(other, truth) / scale if other is not None else truth.norm / scale
        floor = FLOOR[getattr(torch, plains[name].dtype)]
        if kind == "changes":
            # Writing the new value rounds the parameter itself.
            floor = max(floor, CHANGE_FLOOR)
            floor += torch.finfo(getattr(torch, plains[name].dtype)).eps * initial[name].norm / scale
        errors.append((name, error, reference, floor))
        sizes[name] = truth.norm / scale
    typical = statistics.median([reference for _, _, reference, _ in errors]) if errors else 0.0
    k = FACTOR[torch.bfloat16 if typical > HALF_ERROR else torch.float32]
    rows = []
    for name, error, reference, floor in errors:
        size, bound = sizes[name], k * max(reference, typical) + floor + drifted
        is_precise = reference <= UNSURE * size
        # Where the script before is precise, a bound must not accept a gradient that is half wrong.
        bound = min(bound, max(size / 2, k * reference)) if kind != "changes" and is_precise else bound
        if kind != "changes" and size <= NOISE * floor:
            noise.add(name)
        is_noise = name in noise or size <= NOISE * floor
        sure = is_noise or (bound < size and (kind == "changes" or is_precise or size < 1))
        other = owns.get(renamed[name])
        # A gradient of exactly zero is no rounding, whatever the bound.
        vanished = (
            size > ZERO and plains[name].norm > 0 and (other is None or other.norm == 0) and kind != "changes"
        )
        ok = bool(error <= bound) and not vanished
        rows.append(UpdateRow(step, _WORDS[kind], name, error, reference, bound, ok, sure or vanished))
    for name in names if kind == "gradients" else []:
        other = owns.get(renamed[name])
        if name not in plains and name not in exacts and other is not None and other.norm > 0:
            # Only the script after trains this parameter.
            rows.append(UpdateRow(step, _WORDS[kind], name, 1.0, 0.0, 0.0, False))
    return rows


def prove_drift(before: Job, after: Job, *, runs: int, fork: bool = False) -> dict[str, Any]:
    """Test whether the loss of the last step is shifted, over pairs of runs that share a seed.

    Every pair adds a different offset to the seeds that the scripts set.
    """
    pairs: list[tuple[list[float], list[float]]] = []
    for seed in range(1, runs + 1):
        losses = []
        for job in (before, after):
            captured = _of_ranks(run_job(replace(job, seed=1000 * seed), fork=fork))
            if captured.error is not None or not captured.updates:
                raise NotComparable(_no_update(job.label, captured))
            losses.append([update.loss for update in captured.updates])
        pairs.append((losses[0], losses[1]))
    finals = [[curves[side][-1] for curves in pairs if all(curves)] for side in (0, 1)]
    shift = paired_shift(finals[0], finals[1])
    diverged = [first_divergence(a, b) for a, b in pairs if len(a) == len(b)]
    seen = [step for step in diverged if step is not None]
    worse = shift["p_value"] < 1 - CONFIDENCE and shift["shift"] > 0
    return {
        "runs": runs,
        # A script may end before the requested number of steps.
        "steps": max((len(losses) for curves in pairs for losses in curves), default=0),
        "first_divergence": min(seen) if seen else None,
        "ok": not worse,
        **shift,
    }
