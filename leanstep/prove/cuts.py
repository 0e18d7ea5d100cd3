"""The same update under different cuts: micro-batches, ranks, packing, padding. If not, what differs.

Gradients are compared in fp64, where an honest cut agrees to ten digits. Sketches are linear, so the gradient
of one cut can be written as a sum of the parts that another cut's backward calls added, with unknown weights:
a least-squares problem with a thousand equations per parameter. Its answer is the diagnosis. Weights that are
all the same: a constant factor. Weights that follow the number of tokens: a mean of means where a mean over
tokens was meant. No weights at all: a sample's own gradient has changed, by padding, by its neighbours or by
other data; token counts tell which.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from leanstep.prove.capture import Captured, Recorder, Update
from leanstep.prove.script_jobs import Job, run_job, seeded
from leanstep.prove.sketches import Sketch
from leanstep.prove.twin import Twin

# Relative distance up to which two fp64 gradients are the same; with ops that ran in fp32, the other one.
SAME, SAME_FP32 = 1e-7, 1e-4
# How exactly weights must follow token counts.
FOLLOWS = 1e-5

KINDS = {
    "same": "the same update",
    "factor": "a constant factor",
    "token-weights": "a weight per micro-batch that follows its tokens",
    "weights": "a weight per micro-batch",
    "padding": "padding reaches the gradient",
    "mixing": "samples influence each other",
    "random": "random numbers depend on the cut",
    "order": "other samples",
    "missing": "parameters without a gradient",
}


@dataclass
class CutRow:
    """One cut against the first one; `kind` is a key of `KINDS`."""

    cut: str
    against: str
    same: bool
    kind: str
    sentence: str
    distance: float
    factor: float | None = None
    weights: list[float] = field(default_factory=list)
    parameter: str = ""
    losses: list[float] = field(default_factory=list)
    backward_calls: int = 0
    ranks: int = 1


@dataclass
class CutsProof:
    """The result of `prove train.py --same A --same B`; the first cut is what the others are held against."""

    script: str
    rows: list[CutRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.problem is None and bool(self.rows) and all(row.same for row in self.rows)

    def sentence(self) -> str:
        if self.problem is not None:
            return self.problem
        bad = [row for row in self.rows if not row.same]
        if not bad:
            return f"the same update under {len(self.rows) + 1} cuts"
        return f"{bad[0].cut} is not the update of {bad[0].against}: {bad[0].sentence}"

    def to_json(self) -> dict[str, Any]:
        return {
            "script": self.script,
            "ok": self.ok,
            "verdict": self.sentence(),
            "problem": self.problem,
            "notes": self.notes,
            "rows": [asdict(row) for row in self.rows],
        }


def prove_cuts(
    script: str, cuts: Sequence[Job], *, fork: bool = False, report: Callable[[str], None] | None = None
) -> CutsProof:
    """Run the fp64 twin of every cut and hold each against the first."""
    proof = CutsProof(script)
    runs: list[tuple[str, list[Captured]]] = []
    for job in cuts:
        label = cut_label(job)
        if report:
            report(label)
        captured = run_job(job, fork=fork)
        for each in captured:
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
        runs.append((label, captured))
        if len(runs) > 1:
            proof.rows.append(compare_cuts(*runs[0], *runs[-1]))
    return proof


def cut_label(job: Job) -> str:
    ranks = f" on {job.ranks} rank{'s' * (job.ranks != 1)}" if job.ranks else ""
    return (" ".join(job.argv) or "no arguments") + ranks


def same_update(step: Callable[[Any], object], cuts: Sequence[Any], *, dropout: bool = False) -> CutsProof:
    """Does `step(cut)` make the same update for every cut?

        def step(micro_batches):
            torch.manual_seed(0)
            model, optimizer = ...              # fresh each time: every cut starts from the same weights
            for part in batch.chunk(micro_batches):
                loss_fn(model, part).backward()
            optimizer.step()

        proof = leanstep.prove.same_update(step, [1, 2, 4])
        assert proof.ok, proof.sentence()

    Args:
        step: makes one update, in whatever precision; it is run in fp64.
        cuts: passed to `step` one by one; the first is what the others are held against.
        dropout: keep dropout; its masks usually depend on the cut, so it is off by default.
    """
    if len(cuts) < 2:
        raise ValueError(f"cuts: expected at least 2 to compare, got {len(cuts)}")
    proof = CutsProof(getattr(step, "__name__", "step"))
    runs: list[tuple[str, list[Captured]]] = []
    for cut in cuts:
        recorder = Recorder(parts=True)
        with seeded(0), recorder as captured, Twin(dropout=dropout, count=recorder.count):
            step(cut)
        if not captured.updates:
            raise ValueError(f"step: made no update for {cut!r}; expected a call of optimizer.step()")
        runs.append((str(cut), [captured]))
        if len(runs) > 1:
            proof.rows.append(compare_cuts(*runs[0], *runs[-1]))
    return proof


def compare_cuts(name: str, first: list[Captured], other_name: str, other: list[Captured]) -> CutRow:
    """The kind of difference between the first updates of two cuts, each given rank by rank."""
    mine, theirs = first[0].updates[0], other[0].updates[0]
    row = CutRow(
        cut=other_name,
        against=name,
        same=False,
        kind="same",
        sentence=KINDS["same"],
        distance=0.0,
        losses=[update.loss for update in other[0].updates],
        backward_calls=theirs.backward_calls,
        ranks=len(other),
    )
    lacking = sorted(set(mine.gradients) ^ set(theirs.gradients))
    if lacking:
        return _said(row, "missing", f"{lacking[0]} has a gradient in only one of them")
    names = list(mine.gradients)
    a, b = stacked(mine.gradients, names), stacked(theirs.gradients, names)
    size = max(float(a.norm()), 1e-300)
    row.distance = float((a - b).norm()) / size
    if not math.isfinite(row.distance):
        return _said(row, "mixing", "a gradient is not finite")
    notes = [note for captured in (*first, *other) for note in captured.notes]
    limit = SAME_FP32 if any("ran in fp32" in note for note in notes) else SAME
    if row.distance <= limit:
        row.same = True
        return row
    order = first[0].order
    apart = [n for n in names if _apart(mine.gradients[n], theirs.gradients[n]) > limit]
    row.parameter = min(apart, key=lambda n: order.index(n) if n in order else len(order), default="")
    row.factor = float(a @ b) / size**2
    if (b - row.factor * a).norm() <= limit * b.norm():
        return _said(row, "factor", _factor_name(row.factor, first, other))
    return _by_weights(row, first, other, names, limit) or _by_data(row, first, other)


def _said(row: CutRow, kind: str, detail: str) -> CutRow:
    row.kind, row.sentence = kind, f"{KINDS[kind]}: {detail}"
    return row


def stacked(sketches: dict[str, Sketch], names: list[str]) -> Tensor:
    parts = [sketches[name].projection if name in sketches else None for name in names]
    assert all(part is not None for part in parts)
    return torch.cat([part for part in parts if part is not None])


def _apart(a: Sketch, b: Sketch) -> float:
    return a.minus(b).norm / max(a.norm, 1e-300)


def _factor_name(factor: float, first: list[Captured], other: list[Captured]) -> str:
    """`2 = accumulation steps`: the ratio of what the cuts themselves differ in, or of its inverse."""
    calls = other[0].updates[0].backward_calls / max(first[0].updates[0].backward_calls, 1)
    ranks = len(other) / len(first)
    known = (
        (calls, "accumulation steps: each loss is not divided by their number"),
        (1 / calls, "1 / accumulation steps: the loss is divided by them twice"),
        (ranks, "world size: gradients are added over ranks where they should be averaged"),
        (1 / ranks, "1 / world size: gradients are averaged over ranks where they should be added"),
        (calls * ranks, "accumulation steps x world size"),
        (1 / (calls * ranks), "1 / (accumulation steps x world size)"),
    )
    for value, meaning in known:
        if value != 1 and math.isclose(factor, value, rel_tol=1e-6):
            return f"{factor:.6g} = {meaning}"
    counts = {
        name: value
        for captured in (*first, *other)
        for name, value in _total_counts(captured.updates[0]).items()
        if value > 0
    }
    for (name, value), (other_name, other_value) in itertools.permutations(counts.items(), 2):
        if value != other_value and math.isclose(factor, value / other_value, rel_tol=1e-6):
            numbers = f"{value:g} {name} / {other_value:g} {other_name}"
            return f"{factor:.6g} = {numbers}: a mean over another number of tokens"
    return f"{factor:.6g}"


def _total_counts(update: Update) -> dict[str, float]:
    """What the program counted in all of its backward calls, by name."""
    totals: dict[str, float] = {}
    for counts in update.counts:
        for name, value in counts.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def _least_squares(matrix: Tensor, target: Tensor) -> Tensor:
    """The smallest of the best solutions: parts may be equal, and then the matrix has no full rank."""
    return torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]


def _by_weights(
    row: CutRow, first: list[Captured], other: list[Captured], names: list[str], limit: float
) -> CutRow | None:
    """Is the gradient of one cut a weighted sum of the other's parts?"""
    for whole, split in ((first, other), (other, first)):
        updates = [captured.updates[0] for captured in split]
        parts = [(u, k) for u in updates for k in range(len(u.parts)) if set(u.parts[k]) >= set(names)]
        if len(parts) < 2 or len(parts) < sum(len(u.parts) for u in updates):
            continue
        matrix = torch.stack([stacked(u.parts[k], names) for u, k in parts], dim=1)
        target = stacked(whole[0].updates[0].gradients, names)
        weights = _least_squares(matrix, target)
        if (matrix @ weights - target).norm() > 10 * limit * target.norm():
            continue
        own = stacked(updates[0].gradients, names)
        base = _least_squares(matrix, own)
        row.weights = [float(w) for w in weights / base.where(base != 0, 1.0)]
        shown = ", ".join(f"{weight:.3g}" for weight in row.weights[:8])
        groups = sum(len(captured.updates[0].parts) for captured in whole)
        count = _followed(row.weights, [u.counts[k] for u, k in parts], groups)
        where = (
            f"the parts of {row.cut if split is other else row.against} should weigh {shown} times as much"
        )
        if count is None:
            return _said(row, "weights", f"{where}; no number of tokens that was seen explains it")
        return _said(
            row, "token-weights", f"{where}, in proportion to {count}: a mean of means, not over tokens"
        )
    return None


def _followed(weights: list[float], counts: list[dict[str, float]], groups: int) -> str | None:
    """The count that the weights are proportional to, within each of `groups` groups."""
    shared = set(counts[0]).intersection(*counts[1:]) if counts else set()
    for name in sorted(shared):
        values = [count[name] for count in counts]
        if min(values) <= 0 or len(set(values)) == 1:
            continue
        rates = sorted(weight / value for weight, value in zip(weights, values, strict=True))
        distinct = 1 + sum(b - a > FOLLOWS * abs(b) for a, b in itertools.pairwise(rates))
        if distinct <= max(1, min(groups, len(weights) - 1)):
            listed = ", ".join(f"{value:g}" for value in values[:8])
            return f"{name} ({listed})"
    return None


def _by_data(row: CutRow, first: list[Captured], other: list[Captured]) -> CutRow:
    """The samples' own gradients differ: other data, padding, randomness or neighbours."""
    mine, theirs = (_ids([captured.updates[0] for captured in runs]) for runs in (first, other))
    changed = [i for i in mine | theirs if mine[i] != theirs[i]]
    where = f"first at {row.parameter}, {row.distance:.2g} of the gradient"
    if len(changed) > 1:
        return _said(row, "order", f"{len(changed)} token ids occur a different number of times")
    if changed:
        (pad,) = changed
        return _said(row, "padding", f"token {pad} occurs {theirs[pad] - mine[pad]:+d} times; {where}")
    if first[0].updates[0].draws != other[0].updates[0].draws:
        return _said(row, "random", f"the generators are in other states when the optimizer steps; {where}")
    return _said(row, "mixing", f"the same tokens, other gradients; {where}")


def _ids(updates: list[Update]) -> Counter[int]:
    total: Counter[int] = Counter()
    for update in updates:
        total.update(update.ids)
    return total
