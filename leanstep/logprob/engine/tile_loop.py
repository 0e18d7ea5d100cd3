"""The tile loop of the fused LM head: forward statistics, backward logits and gradients.

Each pass holds one tile of logits at a time, apart from tiles that fit in `SavedLogits`, which are not
recomputed. The backward loop is ordered so that the larger gradient is written once: with fewer rows than
vocabulary entries, each weight tile is visited once and dW is written tile by tile; a loop over row chunks
would rewrite all of dW for every chunk (2 to 3 times slower at small chunks). The tile order is fixed and
there are no atomics, so two runs give the same bits.

On a CPU with several threads, the vocabulary is split into one part per core. Each part has its own
statistics and hidden gradient, which are joined in a fixed order at the end: cores synchronize once per loop,
not after every operation on a tile.
"""

# R rows of a chunk · W columns of a tile · T' selected rows · D model · V local vocabulary

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from leanstep.cpu import one_thread_each, run_on_cores
from leanstep.logprob.engine.invariant import RowBlocks, merged
from leanstep.logprob.engine.kl_topk import TopK, add_kl_gradient_, update_pair_
from leanstep.logprob.engine.lm_head import Head, HeadSums, RowSource
from leanstep.logprob.engine.pass_interface import Passes
from leanstep.logprob.engine.passes import finishes_logits
from leanstep.logprob.engine.softmax import (
    FinalStatistics,
    RowFactors,
    RowGradients,
    RowStatistics,
    logit_gradient,
    merge,
)
from leanstep.logprob.engine.tiles import (
    LogitsInGradient,
    SavedLogits,
    Scratch,
    Tiles,
    column_parts,
    even_slices,
    laid_over,
    on_gpu,
    tile_slices,
)
from leanstep.logprob.engine.vocab_subset import AllowedIds, RestOfVocabulary

# Returns the hidden rows of a chunk, and those of the LoRA branch.
ReadRows = Callable[[slice], tuple[Tensor, Tensor | None]]


@dataclass
class Call:
    """Everything constant about one call of `linear_logprobs` or `linear_policy_loss`.

    Args:
        head, source: the LM head and the selected rows of hidden; `low` are those of the LoRA branch.
        targets: [T'] or [T', K].
        entropy: "none", "metric" or "grad".
        smoothing: label smoothing.
        reference: the KL's head and its hidden rows; `kl` and `reverse_kl` select the direction.
        tiles, cores, kernels: chosen by `arrange`.
        in_gradient, save_bytes: where logits may be saved for the backward pass.
        gradient_scale: logit gradients are multiplied by it, and the sums computed from them are divided by
            it.
        round_logits: tiles of logits have the dtype of 16-bit products, if only kernels read them.
        blocks: the row layout of a batch-invariant call; None otherwise.
    """

    head: Head
    source: RowSource
    low: RowSource | None
    targets: Tensor
    tiles: Tiles
    cores: int = 1
    kernels: Passes | None = None
    entropy: str = "none"
    lse: bool = False
    allowed: AllowedIds | RestOfVocabulary | None = None
    smoothing: float = 0.0
    top_k: int = 0
    reference: tuple[Head, RowSource] | None = None
    kl: bool = False
    reverse_kl: bool = False
    group: Any = None
    reduce_grad: Any = "all_reduce"
    main_grad: Tensor | None = None
    in_gradient: bool = False
    save_bytes: int = 0
    gradient_scale: float = 1.0
    round_logits: bool = False
    blocks: RowBlocks | None = None

    def __post_init__(self) -> None:
        self.num_rows = self.source.num_rows
        # The entropy is computed from t, the moment in the statistics.
        self.moment = self.entropy != "none"
        self.two_softmaxes = self.allowed is not None and self.moment and self.allowed.whole_entropy
        # Whether kernels convert products to logits and to 16-bit gradients; then only they read a tile.
        others = (self.allowed, self.reference, self.smoothing or None, self.top_k or None)
        self.fused = finishes_logits(self.kernels) and type(self.head) is Head
        self.fused = self.fused and self.targets.dim() == 1 and all(other is None for other in others)
        rounds = self.fused and self.round_logits
        self.logit_dtype = self.head.operand_dtype if rounds else self.head.dtype
        device = self.source.hidden.device
        if self.blocks is not None:
            self.row_slices = even_slices(self.num_rows, self.tiles.rows, self.blocks.step)
            self.column_parts = self.blocks.column_parts(self.head.columns, device)
            return
        self.row_slices = tile_slices(self.num_rows, self.tiles.rows, device)
        self.column_parts = column_parts(self.head.columns, self.tiles.columns, self.cores, device)

    def rows(self, part: slice) -> Call:
        """Return the call for a slice of its rows; its hidden gradient stays local, the caller reduces it."""
        temperature = self.head.temperature
        some = temperature[part] if isinstance(temperature, Tensor) else temperature
        return replace(
            self,
            head=replace(self.head, temperature=some),
            source=self.source.part(part),
            low=None if self.low is None else self.low.part(part),
            targets=self.targets[part],
            reduce_grad="none",
        )

    def chunks(self, part: slice) -> tuple[Tensor, Tensor | None]:
        h = self.source.chunk(part, self.head.operand_dtype)
        return h, None if self.low is None else self.low.chunk(part, self.head.operand_dtype)

    def one_thread(self) -> contextlib.AbstractContextManager[None]:
        """Return a context with one thread per core, for calls on several cores and invariant calls.

        Vector loops that are split over threads have remainders, which change bits.
        """
        is_alone = self.cores == 1 and self.blocks is None
        return contextlib.nullcontext() if is_alone else one_thread_each()

    def scratch(self) -> Scratch:
        """Return tiles for one part of the vocabulary."""
        return Scratch(self.source.hidden, self.head.dtype, self.tiles.rows, self.tiles.columns)

    def head_sums(self, wanted: Sequence[bool], early: LogitsInGradient | None = None) -> HeadSums:
        """Return accumulators for the `wanted` gradients of hidden, weight, bias and the LoRA branch."""
        return HeadSums(
            self.head,
            self.source,
            self.low,
            self.tiles,
            wanted,
            reduce=(self.group, self.reduce_grad),
            main_grad=self.main_grad,
            early=early,
            factor=1.0 / self.gradient_scale,
        )


def forward_tiles(call: Call, saved: SavedLogits) -> tuple[RowStatistics, TopK | None]:
    """Return the selected rows' statistics over this shard's columns; tiles that fit stay in `saved`."""
    hidden, dtype = call.source.hidden, call.head.dtype
    best = TopK.empty(call.num_rows, call.top_k, dtype, hidden.device) if call.top_k else None
    every_column = [columns for part in call.column_parts for columns in part]
    saved.reserve([(rows, columns) for rows in call.row_slices for columns in every_column])
    jobs, parts = [], []
    for columns in call.column_parts:
        parts.append(
            RowStatistics.empty(
                call.num_rows,
                dtype=dtype,
                device=hidden.device,
                moment=call.moment,
                num_targets=None if call.targets.dim() == 1 else call.targets.shape[1],
                total=call.smoothing > 0,
                allowed=call.two_softmaxes,
                reference=call.kl,
                reverse=call.reverse_kl,
            )
        )
        jobs.append(functools.partial(_forward_part, call, columns, parts[-1], best, saved))
    _run_parts(call, jobs)
    if call.blocks is not None:
        return merged(parts, call.group, -(-call.head.weight.shape[0] // call.blocks.part_columns)), None
    return functools.reduce(merge, parts), best


def _forward_part(
    call: Call,
    column_slices: list[slice],
    stats: RowStatistics,
    best: TopK | None,
    saved: SavedLogits,
    read: ReadRows,
) -> None:
    head, scratch = call.head, call.scratch()
    needed = 0 if call.kernels is not None else 1 + call.moment
    for rows in call.row_slices:
        h, low_h = read(rows)
        size, targets = rows.stop - rows.start, call.targets[rows]
        part = stats.rows(rows.start, rows.stop)
        for columns in column_slices:
            width, first = columns.stop - columns.start, head.shard.start + columns.start
            z = saved.tile(rows, columns)
            z = scratch.tile(0, size, width, call.logit_dtype) if z is None else z
            work = scratch.tiles(needed, size, width)
            if call.fused:
                head.product_tile(h, low_h, head.weight_tile(columns), columns, z)
                finish = head.finish(rows, columns)
                part.update_(z, work, targets, first, kernels=call.kernels, finish=finish)
                continue
            # A saved tile holds `bounded`, from which the backward pass computes the slope of the softcap.
            head.bounded(h, low_h, head.weight_tile(columns), rows, columns, z)
            if head.has_tanh:
                z = head.logits_of(z, rows, scratch.tile(0, size, width))
            if part.total is not None:
                part.total.add_(z.sum(-1))
            if best is not None:
                best.update_(z, rows, first)
            if call.reference is not None:
                update_pair_(part, z, _reference_logits(call.reference, rows, columns))
            if call.allowed is not None:
                subset = call.allowed.restrict(z, rows, targets, first)
                if call.two_softmaxes:
                    part.allowed_part().update_(subset, [subset], kernels=call.kernels)
                else:
                    z = subset
            part.update_(z, work, targets, first, kernels=call.kernels)


def backward_tiles(
    call: Call,
    final: FinalStatistics | None,
    allowed_final: FinalStatistics | None,
    gradients: RowGradients | RowFactors,
    sums: HeadSums,
    saved: SavedLogits,
    *,
    first_row: int = 0,
    divergences: Sequence[Tensor | None] = (),
) -> None:
    """Propagate the row gradients through every tile of logits into `sums`; recompute tiles not in `saved`.

    Supports any function of the row outputs: `gradients` are its derivatives, one number per row, or the
    factors of its logit gradients, which need no `final`.

    Args:
        allowed_final: statistics of the restricted softmax, if `call.allowed` is set.
        saved: tiles that are not recomputed; they are read and not changed.
        first_row: the first of these rows among the rows of `sums`.
        divergences: kl, reverse_kl, reference max and log-sum per row, if there is a KL gradient.
    """
    sums.bias_is_added = call.fused
    # One part per core at a time, which bounds the number of hidden-row sums.
    for start in range(0, len(call.column_parts), call.cores):
        jobs, forks = [], []
        for columns in call.column_parts[start : start + call.cores]:
            forks.append(sums.fork() if forks or start else sums)
            gradient = TileGradient(call, final, allowed_final, gradients, divergences, sums.bias)
            jobs.append(
                functools.partial(_backward_part, call, columns, gradient, forks[-1], first_row, saved)
            )
        _run_parts(call, jobs)
        for fork in forks:
            if fork is not sums:
                sums.join(fork)


def _backward_part(
    call: Call,
    column_slices: list[slice],
    gradient: TileGradient,
    sums: HeadSums,
    first_row: int,
    saved: SavedLogits,
    read: ReadRows,
) -> None:
    head, scratch = call.head, call.scratch()
    h = low_h = weight_tile = None
    last_rows = last_columns = None
    if call.tiles.order == "rows":
        order = [(rows, columns) for rows in call.row_slices for columns in column_slices]
    else:
        order = [(rows, columns) for columns in column_slices for rows in call.row_slices]
    for rows, columns in order:
        if rows is not last_rows:
            h, low_h = read(rows)
        if columns is not last_columns:
            weight_tile = head.weight_tile(columns)
        last_rows, last_columns = rows, columns
        assert h is not None and weight_tile is not None
        z, shape = saved.tile(rows, columns), (rows.stop - rows.start, columns.stop - columns.start)
        if call.fused:
            overwrites = z is None or saved.is_read_once
            if z is None:
                tile = scratch.tile(0, *shape, call.logit_dtype)
                z = head.product_tile(h, low_h, weight_tile, columns, tile)
            # The kernel that sums the bias gradient reads a tile by columns and cannot overwrite it.
            if overwrites and (sums.bias is None or z.dtype == head.operand_dtype):
                tile = laid_over(z, head.operand_dtype)
            else:
                tile = scratch.tile(0, *shape, head.operand_dtype)
                overwrites = False
            du = gradient.product_tile(z, tile, rows, columns, overlaps=overwrites and tile is not z)
        else:
            tiles = scratch.tiles(gradient.scratch_tiles, *shape)
            if z is None:
                z = head.bounded(h, low_h, weight_tile, rows, columns, tiles[0])
            du = gradient.tile(z, tiles, rows, columns)
        placed = slice(rows.start + first_row, rows.stop + first_row)
        sums.add(du, h, low_h, weight_tile, placed, columns)


def _run_parts(call: Call, parts: Sequence[Callable[[ReadRows], None]]) -> None:
    """Run the parts of a loop, in parallel if there are several; each gets a function to read row chunks."""
    read = call.chunks
    if call.num_rows <= call.tiles.rows:
        whole = call.chunks(slice(0, call.num_rows))

        def read(part: slice) -> tuple[Tensor, Tensor | None]:
            return whole

    if len(parts) == 1 or on_gpu(call.source.hidden.device):
        for part in parts:
            part(read)
    else:
        run_on_cores([lambda _worker, part=part: part(read) for part in parts], call.cores)


class TileGradient:
    """Convert gradients of the row outputs to the gradient of a tile of u = h W^T + b.

    Values shared by all tiles of a row are computed once, for all rows.

    Args:
        allowed_final: statistics of the restricted softmax, if `call.allowed` is set.
        divergences: kl, reverse_kl, reference max and log-sum per row, if there is a KL gradient.
        bias: [V], the bias gradient, if needed.
    """

    def __init__(
        self,
        call: Call,
        final: FinalStatistics | None,
        allowed_final: FinalStatistics | None,
        gradients: RowGradients | RowFactors,
        divergences: Sequence[Tensor | None] = (),
        bias: Tensor | None = None,
    ) -> None:
        self.call, self.final, self.divergences, self.bias = call, final, divergences, bias
        self._rows: slice | None = None
        self.restricts, self.second, self.kl = False, None, None
        if isinstance(gradients, RowFactors):
            self.main = self._part = gradients
            self.scratch_tiles = 1
            return
        assert final is not None
        everything = slice(0, call.num_rows)
        some = gradients.rows(everything, call.head.row_slope(everything) * call.gradient_scale)
        self.kl = some if some.kl is not None or some.reverse_kl is not None else None
        # An entropy over the whole vocabulary needs a second softmax.
        one_softmax = some.entropy is None or not call.two_softmaxes
        if call.allowed is not None and allowed_final is not None and (one_softmax or some.logp is not None):
            self.restricts = True
            if one_softmax:
                final = allowed_final
            else:
                self.second = RowFactors.of(allowed_final, RowGradients(some.logp))
                some = RowGradients(None, some.entropy, some.lse)
        self.main = RowFactors.of(final, some)
        self.scratch_tiles = 2 if self.main.slope is not None and call.kernels is None else 1
        self._part = self.main

    def product_tile(
        self, u: Tensor, out: Tensor, rows: slice, columns: slice, *, overlaps: bool = False
    ) -> Tensor:
        """Compute the gradient for a tile of products [R, W] into `out`, and the bias's, in one pass."""
        call, head = self.call, self.call.head
        if rows is not self._rows:
            self._rows, self._part = rows, self.main.rows(rows)
        return logit_gradient(
            u,
            [out],
            self._part,
            call.targets[rows],
            head.shard.start + columns.start,
            kernels=call.kernels,
            finish=head.finish(rows, columns),
            column_sums=None if self.bias is None else self.bias[columns],
            overlaps=overlaps,
        )

    def tile(self, bounded: Tensor, scratch: Sequence[Tensor], rows: slice, columns: slice) -> Tensor:
        """Compute the gradient for a tile of `Head.bounded` [R, W] into the first tile of `scratch`."""
        call, head = self.call, self.call.head
        if rows is not self._rows:
            self._rows, self._part = rows, self.main.rows(rows)
        cap = None if head.softcap is None else head.cap_slope(bounded)
        z = head.logits_of(bounded, rows, scratch[0])
        targets, first = call.targets[rows], head.shard.start + columns.start
        addition = None
        if self.kl is not None and call.reference is not None and self.final is not None:
            addition = torch.zeros_like(z)
            q = _reference_logits(call.reference, rows, columns)
            saved = [None if d is None else d[rows] for d in self.divergences]
            add_kl_gradient_(addition, z, q, self.final.rows(rows), self.kl.rows(rows, 1.0), saved)
        if self.restricts and call.allowed is not None:
            subset = call.allowed.restrict(z, rows, targets, first)
            if self.second is None:
                z = subset
            else:
                factors = self.second.rows(rows)
                addition = logit_gradient(subset, [subset], factors, targets, first, kernels=call.kernels)
        dz = logit_gradient(
            z,
            scratch,
            self._part,
            targets,
            first,
            smoothing=call.smoothing,
            vocabulary=head.vocabulary or 0,
            kernels=call.kernels,
        )
        if addition is not None:
            dz.add_(addition)
        return dz if cap is None else dz.mul_(cap)


def _reference_logits(reference: tuple[Head, RowSource], rows: slice, columns: slice) -> Tensor:
    """Return the tile of the reference head's logits."""
    head, source = reference
    h = source.chunk(rows, head.operand_dtype)
    weight = head.weight_tile(columns)
    # The product also writes the padding columns of the weight tile.
    wide = h.new_empty((len(h), len(weight)), dtype=head.dtype)
    return head.logits(h, None, weight, rows, columns, wide[:, : columns.stop - columns.start])
