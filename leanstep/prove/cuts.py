"""Check that the update does not depend on how the batch is split, and classify the difference if it does.

A split, called a cut in the code, distributes a batch over micro-batches, ranks, packed rows and padding.
Gradients are compared in fp64, where correct splits agree to ten digits. Sketches are linear, so the gradient
of one split is a weighted sum of the gradients that the backward calls of another split added. The weights
are the solution of a least-squares problem with a thousand equations per parameter, and they are the
diagnosis:

- equal weights: a constant factor;
- weights proportional to token counts: a mean of means instead of a mean over tokens;
- no solution: the gradient of a sample itself changed, through padding, its neighbours or different data.
  Token counts tell which.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from leanstep.prove.capture import Captured, Recorder, Update
from leanstep.prove.captured import same_tokens
from leanstep.prove.script_jobs import Job, seeded
from leanstep.prove.sketches import Sketch
from leanstep.prove.twin import Twin

# Relative distance up to which two fp64 gradients count as the same; the second if some ops ran in fp32.
SAME, SAME_FP32 = 1e-7, 1e-4
# How much further the changes that the optimizers make of them may be apart, and how much further changed
# weights can move the gradients of the next step.
SENSITIVE = 10
# A gradient below this fraction of an average one is zero except for rounding, in fp64.
NOTHING = 1e-12
# Changes are relative to at least this fraction of an average parameter's change.
SMALL_CHANGE = 1e-3
# Relative tolerance for weights that are proportional to token counts.
FOLLOWS = 1e-5

KINDS = {
    "same": "the same update",
    "factor": "a constant factor",
    "token-weights": "a weight per micro-batch that is proportional to its tokens",
    "weights": "a weight per micro-batch",
    "lost": "a lost gradient",
    "padding": "padding changes the gradient",
    "mixing": "samples influence each other",
    "random": "random numbers depend on how the batch is split",
    "order": "different samples",
    "missing": "parameters without a gradient",
    "optimizer": "the same gradients, another update",
    "nothing": "every gradient is zero",
    "shapes": "different parameters",
}
# Kinds that give no verdict.
NO_VERDICT = ("random", "nothing", "shapes")


@dataclass
class CutRow:
    """Comparison of one split with the first one; `kind` is a key of `KINDS`.

    `step`: the first that differs, or the last; `distance` and `change_distance`: the largest of the
    gradients and of the parameters' changes.
    """

    cut: str
    against: str
    same: bool
    kind: str
    sentence: str
    distance: float
    change_distance: float = 0.0
    step: int = 1
    factor: float | None = None
    weights: list[float] = field(default_factory=list)
    parameter: str = ""
    losses: list[float] = field(default_factory=list)
    backward_calls: int = 0
    ranks: int = 1
    is_split: bool = True


@dataclass
class CutsProof:
    """The result of `prove train.py --args A --args B`; all runs are compared with the first one."""

    script: str
    rows: list[CutRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problem: str | None = None
    drift: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        return self.problem is None and bool(self.rows) and all(row.same for row in self.rows)

    @property
    def are_splits(self) -> bool:
        """Whether the runs differ in backward calls or ranks; otherwise they are two values of a flag."""
        return any(row.is_split for row in self.rows)

    def closed(self) -> CutsProof:
        """Give no verdict if all differences are of a kind that allows none."""
        bad = [row for row in self.rows if not row.same]
        if self.problem is None and bad and all(row.kind in NO_VERDICT for row in bad):
            self.problem = f"cannot judge: {bad[0].cut} and {bad[0].against}: {bad[0].sentence}"
        return self

    def sentence(self) -> str:
        if self.problem is not None:
            return self.problem
        bad = [row for row in self.rows if not row.same]
        if not bad:
            what = "splits of the batch" if self.are_splits else "runs"
            return f"the same update for {len(self.rows) + 1} {what}"
        where = f"in step {bad[0].step}, " if bad[0].step > 1 else ""
        return f"{bad[0].cut} does not make the update of {bad[0].against}: {where}{bad[0].sentence}"

    def to_json(self) -> dict[str, Any]:
        return {
            "script": self.script,
            "ok": self.ok,
            "verdict": self.sentence(),
            "problem": self.problem,
            "notes": self.notes,
            "drift": self.drift,
            "rows": [asdict(row) for row in self.rows],
        }


def in_fp64(job: Job) -> Job:
    """The run of a split: in fp64, without dropout."""
    return replace(job, twin=True, dropout=False, parts=True)


def cut_label(job: Job) -> str:
    ranks = f" on {job.ranks} rank{'s' * (job.ranks != 1)}" if job.ranks else ""
    return (" ".join(job.argv) or job.label) + ranks


def same_update(step: Callable[[Any], object], cuts: Sequence[Any], *, dropout: bool = False) -> CutsProof:
    """Check that `step(cut)` makes the same update, or updates, for every split of the batch.

        def step(micro_batches):
            torch.manual_seed(0)
            model, optimizer = ...              # create both here: every split starts from the same weights
            for part in batch.chunk(micro_batches):
                loss_fn(model, part).backward()
            optimizer.step()

        proof = leanstep.prove.same_update(step, [1, 2, 4])
        assert proof.ok, proof.sentence()

    Args:
        step: makes one update or more, in any precision; it runs in fp64.
        cuts: passed to `step` one at a time; all updates are compared with that of the first.
        dropout: run with dropout. Off by default: its masks usually depend on how the batch is split.
    """
    if len(cuts) < 2:
        raise ValueError(f"cuts: expected at least 2 to compare, got {len(cuts)}")
    proof = CutsProof(getattr(step, "__name__", "step"))
    runs: list[tuple[str, list[Captured]]] = []
    for cut in cuts:
        recorder = Recorder(parts=True)
        twin = Twin(dropout=dropout, count=recorder.count, note_draw=recorder.note_draw)
        with seeded(0), recorder as captured, twin:
            step(cut)
        if not captured.updates:
            raise ValueError(f"step: made no update for {cut!r}; expected a call of optimizer.step()")
        runs.append((str(cut), [captured]))
        if len(runs) > 1:
            proof.rows.append(compare_runs(*runs[0], *runs[-1]))
    return proof.closed()


def from_step(runs: list[Captured], step: int) -> list[Captured]:
    return [replace(each, updates=each.updates[step - 1 :]) for each in runs]


def compare_runs(name: str, first: list[Captured], other_name: str, other: list[Captured]) -> CutRow:
    """Compare the gradients and changes of all updates; `first` and `other` list the ranks of two runs."""
    steps = min(len(each.updates) for each in (*first, *other))
    limit, moved, largest, largest_change = limit_of(first, other), 0.0, 0.0, 0.0
    for step in range(1, steps + 1):
        mine, theirs = (from_step(runs, step) for runs in (first, other))
        row = compare_cuts(name, mine, other_name, theirs, moved)
        row.step = step
        if row.same:
            differing = _changes_apart(row, mine[0].updates[0], theirs[0].updates[0], limit)
            if differing:
                row.same, row.parameter = False, differing[0]
                _classified(row, "optimizer", f"first at {differing[0]}, {row.change_distance:.2g} of it")
        if not row.same:
            break
        largest = row.distance = max(largest, row.distance)
        largest_change = row.change_distance = max(largest_change, row.change_distance)
        # What the accepted distance of the weights may do to the gradients of the next step.
        moved = SENSITIVE * largest_change
    return row


def _changes_apart(row: CutRow, mine: Update, theirs: Update, limit: float) -> list[str]:
    """Return the parameters whose changes differ; set the largest distance in `row`."""
    names = [name for name in mine.changes if name in theirs.changes and name in mine.gradients]
    numel = {name: max(math.prod(mine.changes[name].shape), 1) for name in names}
    # Optimizers amplify a gradient that is only rounding to a change of full size.
    level = _level(mine.gradients, names)
    least = {name: NOTHING / SAME * limit * level * numel[name] ** 0.5 for name in names}
    names = [n for n in names if not any(0 < u.gradients[n].norm <= least[n] for u in (mine, theirs))]
    level = SMALL_CHANGE * _level(mine.changes, names)
    differing = []
    for name in names:
        a, b = mine.changes[name], theirs.changes[name]
        distance = a.minus(b).norm / max(a.norm, level * numel[name] ** 0.5, 1e-300)
        row.change_distance = max(row.change_distance, distance)
        if not distance <= SENSITIVE * limit:
            differing.append(name)
    return differing


def _level(sketches: dict[str, Sketch], names: list[str]) -> float:
    """Return the root mean square of the entries of all tensors."""
    total = sum(math.prod(sketches[name].shape) for name in names)
    return math.sqrt(sum(sketches[name].norm ** 2 for name in names) / max(total, 1))


def compare_cuts(
    name: str, first: list[Captured], other_name: str, other: list[Captured], moved: float = 0.0
) -> CutRow:
    """Classify the difference between the gradients of the first updates of two splits.

    moved: added to the limit.
    """
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
        is_split=(mine.backward_calls, len(first)) != (theirs.backward_calls, len(other)),
    )
    lacking = sorted(set(mine.gradients) ^ set(theirs.gradients))
    if lacking:
        return _classified(row, "missing", f"{lacking[0]} has a gradient in only one of them")
    names = list(mine.gradients)
    for name in names:
        shapes = [list(update.gradients[name].shape) for update in (mine, theirs)]
        if shapes[0] != shapes[1]:
            return _classified(row, "shapes", f"{name} has shapes {shapes[0]} and {shapes[1]}")
    a, b = stacked(mine.gradients, names), stacked(theirs.gradients, names)
    size = max(float(a.norm()), 1e-300)
    row.distance = float((a - b).norm()) / size
    if not math.isfinite(row.distance):
        return _classified(row, "mixing", "a gradient is not finite")
    limit = limit_of(first, other) + moved
    if not float(a.norm()) and not float(b.norm()):
        return _classified(row, "nothing", "no loss reaches a parameter in either run")
    if row.distance <= limit:
        row.same = True
        return row
    order = first[0].order
    differing = [n for n in names if _relative_distance(mine.gradients[n], theirs.gradients[n]) > limit]
    row.parameter = min(differing, key=lambda n: order.index(n) if n in order else len(order), default="")
    row.factor = float(a @ b) / size**2
    if (b - row.factor * a).norm() <= limit * b.norm():
        return _classified(row, "factor", _factor_name(row.factor, first, other))
    return _by_weights(row, first, other, names, limit) or _by_data(row, first, other)


def limit_of(first: list[Captured], other: list[Captured]) -> float:
    """Return the distance up to which two gradients of these runs count as the same."""
    notes = [note for captured in (*first, *other) for note in captured.notes]
    return SAME_FP32 if any("ran in fp32" in note for note in notes) else SAME


def _classified(row: CutRow, kind: str, detail: str) -> CutRow:
    row.kind, row.sentence = kind, f"{KINDS[kind]}: {detail}"
    return row


def stacked(sketches: dict[str, Sketch], names: list[str]) -> Tensor:
    parts = [sketches[name].projection if name in sketches else None for name in names]
    assert all(part is not None for part in parts)
    return torch.cat([part for part in parts if part is not None])


def _relative_distance(a: Sketch, b: Sketch) -> float:
    return a.minus(b).norm / max(a.norm, 1e-300)


def _factor_name(factor: float, first: list[Captured], other: list[Captured]) -> str:
    """Explain a factor, for example `2 = accumulation steps`, by a ratio in which the splits differ."""
    calls = other[0].updates[0].backward_calls / max(first[0].updates[0].backward_calls, 1)
    ranks = len(other) / len(first)
    known = (
        (calls, "accumulation steps: each loss is not divided by their number"),
        (1 / calls, "1 / accumulation steps: the loss is divided by their number twice"),
        (ranks, "world size: gradients are summed over ranks but should be averaged"),
        (1 / ranks, "1 / world size: gradients are averaged over ranks but should be summed"),
        (calls * ranks, "accumulation steps x world size"),
        (1 / (calls * ranks), "1 / (accumulation steps x world size)"),
    )
    exponent = math.log2(factor) if factor > 0 else 0.0
    if exponent >= 8 and math.isclose(exponent, round(exponent), abs_tol=1e-6):
        return f"{factor:.6g} = 2 ** {exponent:.0f}, a loss scale: the gradients are not unscaled"
    own = other[0].updates[0].backward_calls
    if calls == ranks == 1:
        known = (
            (own, "backward calls of an update: each loss is not divided by their number"),
            (1 / own, "1 / backward calls of an update: the loss is divided by their number twice"),
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
            return f"{factor:.6g} = {numbers}: a mean over a different number of tokens"
    for name, value in counts.items():
        if value != 1 and math.isclose(factor, value, rel_tol=1e-6):
            return f"{factor:.6g} = {name}: a sum instead of a mean"
        if value != 1 and math.isclose(factor, 1 / value, rel_tol=1e-6):
            return f"{factor:.6g} = 1 / {name}: a mean instead of a sum, or divided twice"
    return f"{factor:.6g}"


def _total_counts(update: Update) -> dict[str, float]:
    """Return the program's token counts by name, summed over all backward calls."""
    totals: dict[str, float] = {}
    for counts in update.counts:
        for name, value in counts.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def least_squares(matrix: Tensor, target: Tensor) -> Tensor:
    """The smallest of the best solutions: parts may be equal, and then the matrix has no full rank."""
    return torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]


def _by_weights(
    row: CutRow, first: list[Captured], other: list[Captured], names: list[str], limit: float
) -> CutRow | None:
    """Write the gradient of one split as a weighted sum of the other's parts; None if that is impossible."""
    for whole, split in ((first, other), (other, first)):
        updates = [captured.updates[0] for captured in split]
        parts = [(u, k) for u in updates for k in range(len(u.parts)) if set(u.parts[k]) >= set(names)]
        if len(parts) < 2 or len(parts) < sum(len(u.parts) for u in updates):
            continue
        matrix = torch.stack([stacked(u.parts[k], names) for u, k in parts], dim=1)
        target = stacked(whole[0].updates[0].gradients, names)
        weights = least_squares(matrix, target)
        if (matrix @ weights - target).norm() > 10 * limit * target.norm():
            continue
        own = stacked(updates[0].gradients, names)
        base = least_squares(matrix, own)
        if lost := _lost_parts(row, matrix, weights, base, whole is first):
            return _classified(row, "lost", lost)
        row.weights = [float(w) for w in weights / base.where(base != 0, 1.0)]
        shown = ", ".join(f"{weight:.3g}" for weight in row.weights[:8])
        groups = sum(len(captured.updates[0].parts) for captured in whole)
        count = _followed(row.weights, [u.counts[k] for u, k in parts], groups)
        where = (
            f"the parts of {row.cut if split is other else row.against} should weigh {shown} times as much"
        )
        if count is None:
            return _classified(row, "weights", f"{where}; no recorded number of tokens explains it")
        detail = f"{where}, in proportion to {count}: a mean of means, not a mean over tokens"
        # Weights of a mean of means average to one; a sum of means needs weights that add up to one.
        factor = len(row.weights) / sum(row.weights)
        steps = len(row.weights) / groups
        if steps > 1 and math.isclose(factor, steps, rel_tol=1e-6):
            detail = (
                f"{where}, in proportion to {count}: two errors, a mean of means instead of a mean over "
                f"tokens, and their sum: each loss is not divided by the {steps:g} accumulation steps"
            )
        return _classified(row, "token-weights", detail)
    return None


def _lost_parts(row: CutRow, matrix: Tensor, weights: Tensor, base: Tensor, split_is_other: bool) -> str:
    """Say that the gradients of some backward calls do not reach the optimizer; empty if all do."""
    split, whole = (row.cut, row.against) if split_is_other else (row.against, row.cut)
    for values, label, why in (
        (base, split, "zero_grad() comes between backward calls"),
        (weights, whole, f"its optimizer steps after fewer of them than {split} makes"),
    ):
        small = (values.abs() <= 1e-6 * values.abs().max()) & (matrix.norm(dim=0) > 1e-6 * matrix.norm())
        lost = [k for k, is_lost in enumerate(small, 1) if is_lost]
        if lost and len(lost) < len(values):
            calls = f"call{'s' * (len(lost) > 1)} {', '.join(f'{k}' for k in lost[:8])} of {len(values)}"
            return f"{label} lacks the gradient of backward {calls}: {why}"
    return ""


def _followed(weights: list[float], counts: list[dict[str, float]], groups: int) -> str | None:
    """Return the count that the weights are proportional to, within each of `groups` groups; None if none."""
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
    """Classify gradients that differ per sample: different data, padding, randomness or neighbours."""
    mine, theirs = (sum((captured.updates[0].ids for captured in runs), Counter()) for runs in (first, other))
    changed = [i for i in mine | theirs if mine[i] != theirs[i]]
    where = f"first at {row.parameter}, {row.distance:.2g} of the gradient"
    read = [sum((captured.updates[0].read for captured in runs), Counter()) for runs in (first, other)]
    if same_tokens(*read):
        changed = []
    if len(changed) > 1:
        return _classified(row, "order", f"{len(changed)} token ids occur a different number of times")
    if changed:
        (pad,) = changed
        return _classified(row, "padding", f"token {pad} occurs {theirs[pad] - mine[pad]:+d} times; {where}")
    drawn = [line for captured in (*first, *other) for line in captured.updates[0].drawn]
    if drawn:
        return _classified(row, "random", f"drawn at {drawn[0]}, in the forward pass")
    if first[0].updates[0].draws != other[0].updates[0].draws:
        detail = f"the generators have different states when the optimizer steps; {where}"
        return _classified(row, "random", detail)
    return _classified(row, "mixing", f"the same tokens but different gradients; {where}")
