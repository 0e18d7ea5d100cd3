"""The passes of a distillation over one chunk of rows: statistics, terms, gradients.

    1  logits of every head, their running maximum and sum
    2  each tile's contribution to D and to the sum of S (divergences.py)
    3  du = S - p sum(S), added to the gradients of hidden and weight

With one teacher and the kernels of logprob/engine/passes.py, passes 2 and 3 read the logits of both heads,
and du overwrites the teacher's. Otherwise, in torch, pass 2 overwrites the logits with p and S. On a CPU with
several threads, each core processes a part of the vocabulary. With vocabulary shards, the ranks reduce
maxima, then sums, after pass 1 and the sums of D and S after pass 2.
"""

# R rows of a chunk · D model · V local vocabulary · W columns of a tile

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from leanstep.cpu import run_on_cores
from leanstep.logprob.engine.lm_head import Head, HeadSums, RowSource
from leanstep.logprob.engine.pass_interface import Compared, LabelGradient
from leanstep.logprob.engine.passes import finishes_logits
from leanstep.logprob.engine.softmax import (
    EXPONENT_FLOOR,
    FinalStatistics,
    RowStatistics,
    exponentials,
    merge,
    tile_ids,
)
from leanstep.logprob.engine.tiles import Scratch, TileMemory, Tiles, column_parts
from leanstep.logprob.parallel import all_reduce_
from leanstep.objectives.divergences import Divergence, log_probs_, tile_terms_
from leanstep.objectives.teachers import GivenTiles, HeadTiles

Hard = tuple[Tensor, Tensor]


@dataclass
class Problem:
    """Everything constant about one call; `arrange` chooses `tiles`, `cores` and `kernels`.

    `logit_dtype`: the dtype of the sums, or of 16-bit products with `Tuning(round_logits=True)`.
    `gradient_scale`: logit gradients are multiplied by it, and the sums computed from them are divided by it.
    """

    head: Head
    source: RowSource
    low: RowSource | None
    teachers: list[tuple[HeadTiles | GivenTiles, float]]
    kind: Divergence
    weights: Tensor
    targets: Tensor | None
    hard_weight: float
    chunks: list[slice]
    tiles: Tiles
    cores: int
    kernels: Any
    group: Any
    reduce_grad: Any
    logit_dtype: torch.dtype
    gradient_scale: float = 1.0

    def __post_init__(self) -> None:
        self.column_parts = column_parts(
            self.head.columns, self.tiles.columns, self.cores, self.source.hidden.device
        )
        self.tallest = max((c.stop - c.start for c in self.chunks), default=0)
        self.fused = self.kernels is not None and len(self.teachers) == 1
        self.finishes = finishes_logits(self.kernels) and type(self.head) is Head

    def scratches(self) -> list[Scratch]:
        """Return work tiles, one set per part of the vocabulary."""
        like, columns = self.source.hidden, self.tiles.columns
        return [Scratch(like, self.head.dtype, self.tallest, columns) for _ in self.column_parts]

    def run_parts(self, job: Callable[[int, list[slice]], None]) -> None:
        """Call `job(number, columns)` for every part of the vocabulary, in parallel if there are several."""
        if len(self.column_parts) == 1:
            job(0, self.column_parts[0])
            return
        jobs = [
            lambda _worker, number=number, columns=columns: job(number, columns)
            for number, columns in enumerate(self.column_parts)
        ]
        run_on_cores(jobs, self.cores)


class ChunkPasses:
    """The three passes over one chunk of rows.

    Args:
        memories: memory for the logits of the student and of every teacher.
        scratches: from `Problem.scratches`.
    """

    h: Tensor
    low_h: Tensor | None = None

    def __init__(
        self, problem: Problem, part: slice, memories: Sequence[TileMemory], scratches: list[Scratch]
    ) -> None:
        self.problem, self.part, self.memories, self.scratches = problem, part, memories, scratches
        self.size = part.stop - part.start

    def tile(self, head: int, columns: slice) -> Tensor:
        """Return the logits of the student (0) or of a teacher, [R, W]."""
        tile = self.memories[head].tile(slice(0, self.size), columns)
        assert tile is not None
        return tile

    def run(self, sums: list[HeadSums]) -> Tensor:
        """Return divergence, cross-entropy of the labels and entropy of the rows, [3, R].

        Gradients are added to `sums`, one per part of the vocabulary; if `sums` is empty, none are computed.
        """
        finals, hard = self._statistics()
        terms, hard_values = self._terms(finals, hard, bool(sums))
        if sums:
            self._add_gradients(finals, hard, terms, sums)
        return torch.stack([terms[0], hard_values, terms[2]])

    def _statistics(self) -> tuple[list[FinalStatistics], Hard | None]:
        """Run pass 1: logits of every head; max and log-sum of the student and of each teacher with logits.

        With hard labels, also the log-sum of the student at temperature 1, and the target's logit.
        """
        problem, head, dtype = self.problem, self.problem.head, self.problem.head.operand_dtype
        has_logits = [True, *(one.has_logits for one, _ in problem.teachers)]
        # Teachers first: their rows are freed before the student's are gathered.
        of_teachers = [self._head_statistics(number) for number in range(1, len(has_logits))]
        self.h = problem.source.chunk(self.part, dtype)
        self.low_h = None if problem.low is None else problem.low.chunk(self.part, dtype)
        stats = [self._head_statistics(0), *of_teachers]
        maxima = torch.stack([s.max for s in stats])
        all_reduce_(maxima, problem.group, dist.ReduceOp.MAX)
        packed = [s.sums_under(maxima[i : i + 1]) for i, s in enumerate(stats)]
        own_sum = problem.targets is not None and head.temperature != 1.0
        if own_sum:
            packed.append(self._sum_at_one(maxima[0]).unsqueeze(0))
        packed = torch.cat(packed)
        all_reduce_(packed, problem.group, dist.ReduceOp.SUM)
        nothing = torch.zeros_like(maxima[0])
        finals = [
            s.replaced(maxima[i : i + 1], packed[2 * i : 2 * i + 2]).final()
            if has_logits[i]
            # Precomputed log-probs need no normalization.
            else FinalStatistics(nothing, nothing, None, nothing == 0)
            for i, s in enumerate(stats)
        ]
        hard = None
        if problem.targets is not None:
            hard = (packed[-1].log() if own_sum else finals[0].log_sum, packed[1])
        return finals, hard

    def _head_statistics(self, place: int) -> RowStatistics:
        """Compute the logits of the student (0) or of a teacher; return their statistics on this shard."""
        problem, head = self.problem, self.problem.head
        one = None if place == 0 else problem.teachers[place - 1][0]
        targets = None if one is not None or problem.targets is None else problem.targets[self.part]
        device = problem.source.hidden.device
        parts = [
            RowStatistics.empty(self.size, dtype=head.dtype, device=device) for _ in problem.column_parts
        ]
        if isinstance(one, GivenTiles):

            def copy(_number: int, column_slices: list[slice]) -> None:
                for columns in column_slices:
                    one.tile(self.part, columns, self.tile(place, columns))

            problem.run_parts(copy)
            return parts[0]
        owner, (h, low_h) = (head, (self.h, self.low_h)) if one is None else (one.head, one.read(self.part))

        def process_part(number: int, column_slices: list[slice]) -> None:
            scratch, stats = self.scratches[number], parts[number]
            for columns in column_slices:
                z, weight, finish = self.tile(place, columns), owner.weight_tile(columns), None
                if problem.finishes:
                    owner.product_tile(h, low_h, weight, columns, z)
                    finish = owner.finish(self.part, columns)
                else:
                    owner.logits(h, low_h, weight, self.part, columns, z)
                work = [] if problem.kernels is not None else [scratch.tile(0, len(z), z.shape[1])]
                first = head.shard.start + columns.start
                # The later passes read logits.
                more = {} if finish is None else {"finish": finish, "keep": True}
                stats.update_(z, work, targets, first, kernels=problem.kernels, **more)

        problem.run_parts(process_part)
        return functools.reduce(merge, parts)

    def _sum_at_one(self, maximum: Tensor) -> Tensor:
        """Return sum e^(t (z - m)) with temperature t over this shard, [R]."""
        head = self.problem.head
        shift = torch.where(maximum == -torch.inf, 0.0, maximum).unsqueeze(-1)
        total = torch.zeros_like(maximum)
        for columns in (c for part in self.problem.column_parts for c in part):
            z = self.tile(0, columns)
            work = self.scratches[0].tile(0, len(z), z.shape[1])
            x = torch.sub(z, shift, out=work).mul_(head.temperature)
            total += exponentials(x, x).sum(-1)
        return total

    def _compared(self, finals: list[FinalStatistics]) -> Compared:
        kind, (tiles, factor) = self.problem.kind, self.problem.teachers[0]
        student, teacher = finals
        statistics = (student.max, student.log_sum, teacher.max, teacher.log_sum)
        is_probability = isinstance(tiles, GivenTiles) and tiles.is_probability
        weights = (factor * kind.teacher, factor * kind.student, kind.mix)
        return Compared(statistics, kind.mode(is_probability), *weights)

    def _terms(self, finals: list[FinalStatistics], hard: Hard | None, slopes: bool) -> tuple[Tensor, Tensor]:
        """Run pass 2: D, the sum of S and the entropy, [3, R]; the labels' cross-entropy, [R]."""
        problem, dtype, device = self.problem, self.problem.head.dtype, self.h.device
        parts = torch.zeros((len(problem.column_parts), 3, self.size), dtype=dtype, device=device)
        compared = self._compared(finals) if problem.fused else None

        def process_part(number: int, column_slices: list[slice]) -> None:
            for columns in column_slices:
                if compared is not None:
                    z, y = self.tile(0, columns), self.tile(1, columns)
                    problem.kernels.divergence_sums(z, y, compared, parts[number])
                else:
                    self._plain_terms(columns, finals, hard, slopes, self.scratches[number], parts[number])

        problem.run_parts(process_part)
        terms = parts[0] if len(parts) == 1 else parts.sum(0)
        all_reduce_(terms, problem.group, dist.ReduceOp.SUM)
        hard_values = torch.zeros_like(terms[0])
        if hard is not None:
            # Everything at temperature 1: t (z - m) - log s1.
            hard_values = hard[0] - (hard[1] - finals[0].max) * problem.head.temperature
        return terms, hard_values

    def _factors(self) -> tuple[Tensor, Tensor]:
        """Return the factors of the gradients of D and of the labels' cross-entropy, [R] each."""
        problem, head = self.problem, self.problem.head
        weights = problem.weights[self.part] * problem.gradient_scale
        return (
            weights * (1.0 - problem.hard_weight) * head.row_slope(self.part),
            weights * problem.hard_weight * head.scale,
        )

    def _plain_terms(
        self,
        columns: slice,
        finals: list[FinalStatistics],
        hard: Hard | None,
        slopes: bool,
        scratch: Scratch,
        sums: Tensor,
    ) -> None:
        """Process one tile of pass 2 in torch and add to `sums`, [3, R].

        S overwrites the first teacher's logits and p the student's, both multiplied by the head's derivative.
        """
        problem, head, part = self.problem, self.problem.head, self.part
        z = self.tile(0, columns)
        soft_factor, hard_factor = self._factors()
        tiles = scratch.tiles(5, len(z), z.shape[1])
        cap = None
        if head.softcap is not None and slopes:
            cap = head.cap_slope(z / head.height(part))
        extra = None
        if hard is not None and slopes:
            extra = self._hard_slope(z, finals[0].max, hard[0], columns)
        log_p, p = log_probs_(z, finals[0].max, finals[0].log_sum, tiles[0], tiles[1])
        finite = torch.clamp(log_p, min=EXPONENT_FLOOR[p.dtype], out=tiles[2])
        sums[2] -= torch.linalg.vecdot(finite, p)
        total: Tensor | None = None
        for number, (one, factor) in enumerate(problem.teachers, 1):
            y = self.tile(number, columns)
            log_q: Tensor | None = y
            if one.has_logits:
                log_q, q = log_probs_(y, finals[number].max, finals[number].log_sum, y, z)
            elif getattr(one, "is_probability", False):
                log_q, q = None, y
            else:
                q = torch.exp(y, out=z)
            value, slope = tile_terms_(problem.kind, log_p, p, log_q, q, tiles[2:])
            sums[0].add_(value, alpha=factor)
            if slopes:
                if total is None:
                    # The first teacher's logits are no longer needed.
                    total = torch.mul(slope, factor, out=self.tile(1, columns))
                else:
                    total.add_(slope, alpha=factor)
        if total is not None:
            sums[1] += total.sum(-1)
            total.mul_(soft_factor.unsqueeze(-1))
            torch.mul(p, soft_factor.unsqueeze(-1), out=z)
            if extra is not None:
                total.addcmul_(extra, hard_factor.unsqueeze(-1))
            if cap is not None:
                total.mul_(cap)
                z.mul_(cap)

    def _hard_slope(self, z: Tensor, shift: Tensor, log_sum: Tensor, columns: slice) -> Tensor:
        """Return p - 1[target] at temperature 1."""
        problem, head = self.problem, self.problem.head
        x = torch.sub(z, shift.unsqueeze(-1)).mul_(head.temperature).sub_(log_sum.unsqueeze(-1))
        p = exponentials(x, x)
        assert problem.targets is not None
        local, held = tile_ids(problem.targets[self.part], head.shard.start + columns.start, z.shape[1])
        return p.scatter_add_(1, local.unsqueeze(-1), -held.to(p.dtype).unsqueeze(-1))

    def _add_gradients(
        self, finals: list[FinalStatistics], hard: Hard | None, terms: Tensor, sums: list[HeadSums]
    ) -> None:
        """Run pass 3: add du = S - p sum(S) to the gradients, tile by tile."""
        problem, head = self.problem, self.problem.head
        # Infinite divergences have no gradient.
        finite = terms[0].isfinite()
        slope, factors = terms[1], [torch.where(finite, f, 0.0) for f in self._factors()]
        compared = self._compared(finals) if problem.fused else None
        cap, labels = 0.0, None
        if head.softcap is not None:
            assert not isinstance(head.temperature, Tensor)
            cap = head.softcap / head.temperature
        if hard is not None and problem.targets is not None:
            assert not isinstance(head.temperature, Tensor)
            labels = LabelGradient(problem.targets[self.part], factors[1], hard[0], head.temperature)
        infinite = finite.logical_not().unsqueeze(-1)

        def process_part(number: int, column_slices: list[slice]) -> None:
            scratch = self.scratches[number]
            for columns in column_slices:
                z, y = self.tile(0, columns), self.tile(1, columns)
                du = y
                if y.dtype != head.operand_dtype:
                    du = scratch.tile(0, len(y), y.shape[1], head.operand_dtype)
                if compared is not None:
                    first = head.shard.start + columns.start
                    row_terms = (slope, factors[0], cap, labels)
                    problem.kernels.divergence_gradient(z, y, du, compared, *row_terms, first)
                else:
                    y.addcmul_(z, slope.unsqueeze(-1), value=-1.0).masked_fill_(infinite, 0.0)
                    du = du if du is y else du.copy_(y)
                sums[number].add(du, self.h, self.low_h, head.weight_tile(columns), self.part, columns)

        problem.run_parts(process_part)
