"""The walks of a distillation over one chunk of rows: statistics, terms, gradients.

    1  logits of every head, their running maximum and sum
    2  log-probs; this tile's part of D, and S (divergences.py), which overwrites the teacher's logits
    3  du = S - p sum(S), pushed into the gradients of hidden and weight

Over vocabulary shards each walk ends in one exchange: maxima, then sums, after the first; the sums of D and S
after the second.
"""

# R rows of a chunk · D model · V local vocabulary · W columns of a tile

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from leanstep.logprob.engine.lm_head import Head, HeadSums, RowSource
from leanstep.logprob.engine.softmax import EXPONENT_FLOOR, RowStatistics, exponentials, tile_ids
from leanstep.logprob.engine.tiles import GPU_ALIGNMENT, Scratch, even_slices, on_gpu
from leanstep.objectives.divergences import Divergence, log_probs_, tile_terms_
from leanstep.objectives.teachers import GivenTiles, HeadTiles

# A tile and its work area stay in a cache; on a GPU they fill it.
CPU_COLUMNS, GPU_COLUMNS = 1024, 8192


@dataclass
class Problem:
    """Everything constant about one call."""

    head: Head
    source: RowSource
    low: RowSource | None
    teachers: list[tuple[HeadTiles | GivenTiles, float]]
    kind: Divergence
    weights: Tensor
    targets: Tensor | None
    hard_weight: float
    chunk_rows: int
    group: Any
    reduce_grad: Any
    wants_grad: bool

    def __post_init__(self) -> None:
        gpu = on_gpu(self.source.hidden.device)
        self.multiple = GPU_ALIGNMENT if gpu else 1
        self.columns = even_slices(self.head.columns, GPU_COLUMNS if gpu else CPU_COLUMNS, self.multiple)
        self.chunks = even_slices(self.source.num_rows, self.chunk_rows)


class Chunk:
    """One chunk of rows: the three walks."""

    def __init__(self, problem: Problem, part: slice, buffers: list[Tensor], scratch: Scratch) -> None:
        self.problem, self.part, self.scratch = problem, part, scratch
        size = part.stop - part.start
        self.buffers = [b[:size] for b in buffers]
        dtype = problem.head.operand_dtype
        self.h = problem.source.chunk(part, dtype)
        self.low_h = None if problem.low is None else problem.low.chunk(part, dtype)

    def run(self, sums: HeadSums | None) -> Tensor:
        """Divergence, cross-entropy of the labels and entropy of the rows, [3, R]; gradients go to `sums`."""
        shifts, log_sums, hard = self._statistics()
        found, slope_sum = self._terms(shifts, log_sums, hard, sums is not None)
        if sums is not None:
            self._push(slope_sum, found[0], sums)
        return found

    def _statistics(self) -> tuple[list[Tensor], list[Tensor], tuple[Tensor, Tensor] | None]:
        """Walk 1: logits of every head; max and log-sum of the student and of each teacher that has logits.

        The student's softmax at temperature 1, for hard labels, has its own sum: its maximum is known.
        """
        problem, head, part = self.problem, self.problem.head, self.part
        heads = [None, *(tiles for tiles, _ in problem.teachers)]
        size = part.stop - part.start
        stats = [
            RowStatistics.empty(size, dtype=head.dtype, device=self.h.device)
            for one in heads
            if one is None or one.has_logits
        ]
        for columns in problem.columns:
            number = 0
            for one, buffer in zip(heads, self.buffers, strict=True):
                z = buffer[:, columns]
                if one is None:
                    head.logits(self.h, self.low_h, head.weight_tile(columns), part, columns, z)
                else:
                    one.tile(part, columns, z)
                if one is None or one.has_logits:
                    work = self.scratch.tile(0, size, columns.stop - columns.start)
                    stats[number].update_(z, [work])
                    number += 1
        maxima = torch.stack([s.max for s in stats])
        all_reduce_(maxima, problem.group, dist.ReduceOp.MAX)
        hard_sum, target = self._hard_statistics(maxima[0])
        packed = [s.sums_under(maxima[i : i + 1])[0] for i, s in enumerate(stats)]
        packed = torch.stack([*packed, *(x for x in (hard_sum, target) if x is not None)])
        all_reduce_(packed, problem.group, dist.ReduceOp.SUM)
        finals = [RowStatistics(maxima[i], packed[i], None, packed[i]).final() for i in range(len(stats))]
        hard = None
        if hard_sum is not None:
            hard = (packed[-2], packed[-1])
        return [f.max for f in finals], [f.log_sum for f in finals], hard

    def _hard_statistics(self, maximum: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """sum e^(t (z - m)) with temperature t, and the target's z: [R] each, of this shard."""
        problem, head = self.problem, self.problem.head
        if problem.targets is None:
            return None, None
        shift = torch.where(maximum == -torch.inf, 0.0, maximum).unsqueeze(-1)
        total, target = torch.zeros_like(maximum), torch.zeros_like(maximum)
        for columns in problem.columns:
            z = self.buffers[0][:, columns]
            work = self.scratch.tile(0, len(z), z.shape[1])
            x = torch.sub(z, shift, out=work).mul_(head.temperature)
            total += exponentials(x, x).sum(-1)
            local, held = tile_ids(problem.targets[self.part], head.shard.start + columns.start, z.shape[1])
            target = torch.where(held, z.gather(1, local.unsqueeze(-1)).squeeze(-1), target)
        return total, target

    def _terms(
        self, shifts: list[Tensor], log_sums: list[Tensor], hard: tuple[Tensor, Tensor] | None, slopes: bool
    ) -> tuple[Tensor, Tensor]:
        """Walk 2: D, label cross-entropy and entropy [3, R], and the row sums of S.

        The first teacher's logits become S, those of the student p, both times what du needs of the head.
        """
        problem, head, part = self.problem, self.problem.head, self.part
        size = part.stop - part.start
        found = torch.zeros((3, size), dtype=head.dtype, device=self.h.device)
        slope_sum = torch.zeros_like(found[0])
        soft_factor = problem.weights[part] * (1.0 - problem.hard_weight) * head.row_slope(part)
        hard_factor = problem.weights[part] * problem.hard_weight * head.scale
        for columns in problem.columns:
            z = self.buffers[0][:, columns]
            tiles = self.scratch.tiles(5, len(z), z.shape[1])
            cap = None
            if head.softcap is not None and slopes:
                cap = head.cap_slope(z, part)
            extra = None
            if hard is not None and slopes:
                extra = self._hard_slope(z, shifts[0], hard[0], columns)
            log_p, p = log_probs_(z, shifts[0], log_sums[0], tiles[0], tiles[1])
            finite = torch.clamp(log_p, min=EXPONENT_FLOOR[p.dtype], out=tiles[2])
            found[2] -= torch.linalg.vecdot(finite, p)
            total: Tensor | None = None
            number = 1
            for (one, factor), buffer in zip(problem.teachers, self.buffers[1:], strict=True):
                y = buffer[:, columns]
                log_q: Tensor | None = y
                if one.has_logits:
                    log_q, q = log_probs_(y, shifts[number], log_sums[number], y, z)
                    number += 1
                elif getattr(one, "is_probability", False):
                    log_q, q = None, y
                else:
                    q = torch.exp(y, out=z)
                value, slope = tile_terms_(problem.kind, log_p, p, log_q, q, tiles[2:])
                found[0].add_(value, alpha=factor)
                if slopes:
                    if total is None:
                        # The first teacher's logits are not needed again.
                        total = torch.mul(slope, factor, out=self.buffers[1][:, columns])
                    else:
                        total.add_(slope, alpha=factor)
            if total is not None:
                slope_sum += total.sum(-1)
                total.mul_(soft_factor.unsqueeze(-1))
                torch.mul(p, soft_factor.unsqueeze(-1), out=z)
                if extra is not None:
                    total.addcmul_(extra, hard_factor.unsqueeze(-1))
                if cap is not None:
                    total.mul_(cap)
                    z.mul_(cap)
        packed = torch.cat([found, slope_sum.unsqueeze(0)])
        all_reduce_(packed, problem.group, dist.ReduceOp.SUM)
        if hard is not None:
            # Everything at temperature 1: t (z - m) - log s1.
            packed[1] = hard[0].log() - (hard[1] - shifts[0]) * head.temperature
        return packed[:3], packed[3]

    def _hard_slope(self, z: Tensor, shift: Tensor, total: Tensor, columns: slice) -> Tensor:
        """p - 1[target] at temperature 1."""
        problem, head = self.problem, self.problem.head
        x = torch.sub(z, shift.unsqueeze(-1)).mul_(head.temperature)
        p = exponentials(x, x).div_(total.unsqueeze(-1))
        assert problem.targets is not None
        local, held = tile_ids(problem.targets[self.part], head.shard.start + columns.start, z.shape[1])
        return p.scatter_add_(1, local.unsqueeze(-1), -held.to(p.dtype).unsqueeze(-1))

    def _push(self, slope_sum: Tensor, values: Tensor, sums: HeadSums) -> None:
        """Walk 3: du = S - p sum(S), tile by tile into the gradients."""
        problem, head = self.problem, self.problem.head
        # Infinite divergences have no gradient.
        infinite = values.isfinite().logical_not_().unsqueeze(-1)
        for columns in problem.columns:
            p, total = self.buffers[0][:, columns], self.buffers[1][:, columns]
            total.addcmul_(p, slope_sum.unsqueeze(-1), value=-1.0)
            du = total.masked_fill_(infinite, 0.0)
            if head.operand_dtype != head.dtype:
                du = self.scratch.tile(0, len(du), du.shape[1], head.operand_dtype).copy_(total)
            sums.add(du, self.h, self.low_h, head.weight_tile(columns), self.part, columns)


def all_reduce_(values: Tensor, group: Any, op: Any) -> None:
    """Combine over ranks in place; nothing to do without a group."""
    if group is not None:
        dist.all_reduce(values, op, group=group)
