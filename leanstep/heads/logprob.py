"""Log-probs and entropy of selected rows of an LM head, without the [T, V] logits.

`HeadLoops` has two loops over the same tiles of logits: blocks of rows, which are gathered one at a time,
then columns, then rows of the block. `statistics` has one product and the pass `stats` per tile. `gradients`
has the logits again, the pass `grads`, and two products: dh, summed in fp32 until the block ends, and the dW
of the tile's columns. A recomputed logit has the forward's bits, so that maximum and log-sum belong to the
same logits. If the logits of a tile's rows fit the memory of dW, the forward allocates it and keeps the first
rows' logits there until the backward writes dW. `token_logprobs` runs the same passes on existing logits.
passes.py has the passes.
"""

# T rows · N selected rows · D model · V local columns of the vocabulary · r low rank

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from leanstep.cpu import num_threads, run_on_cores
from leanstep.heads import passes
from leanstep.heads.allowed import AllowedPairs, check_allowed
from leanstep.heads.head import (
    Head,
    check_matrix,
    check_rows,
    check_targets,
    compute_dtype,
    inverse_temperature,
    open_head,
)
from leanstep.heads.parallel import all_gather, first_order_only, gather_hidden_rows, resolve_group
from leanstep.output_buffers import check_output_buffer

Entropy = Literal["none", "metric", "grad"]

# Bytes of a tile of logits. On a CPU there is one per core, and it stays in the core's cache. On a GPU, it is
# a quarter as large for fp32 products, which are slower than its memory.
CPU_TILE_BYTES, GPU_TILE_BYTES = 1 << 20, 752 << 20
# Rows per block on a CPU; dW is read and written once per block.
CPU_BLOCK_ROWS = 4096
# Multiply-adds per core, from which on a part of the columns per core is faster than torch's threads.
CORE_WORK = 1 << 28
# Widths of tiles are multiples of this many columns.
COLUMN_BLOCK = 128
# The largest fp16 gradient of a logit before the sums, which are in fp32: a loss of 1 / N must not underflow.
FP16_LARGEST = 1024.0


class LogProbs(NamedTuple):
    """One value per selected row, [N]; fp32, or fp64 for fp64 input.

    logp, lse (log-sum-exp of the logits): differentiable. entropy: None if not requested. argmax: the lowest
    id in a tie; no gradient.
    """

    logp: Tensor
    entropy: Tensor | None
    lse: Tensor
    argmax: Tensor


def outside_graph(function: Any) -> Any:
    """Make a function end the graph of `torch.compile`, for any number of rows."""
    return torch.compiler.disable(function, reason=f"{function.__name__} ends a graph; remove fullgraph=True")


@outside_graph
def linear_logprobs(
    hidden: Tensor,
    head: Any,
    targets: Tensor,
    *,
    rows: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: Entropy = "none",
    allowed: tuple[Tensor, ...] | None = None,
    group: Any = None,
    vocab_total: int | None = None,
    sequence_parallel: bool = False,
    main_grad: Tensor | None = None,
    chunk_rows: int | None = None,
) -> LogProbs:
    """Compute the targets' log-probs under the LM head, and its entropy, one tile of logits at a time.

    Equivalent to, for a weight:
        log_p = torch.log_softmax(hidden[rows].float() @ weight.float().T / temperature, -1)
        logp = log_p.gather(1, targets[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)

    Row i of a language model scores token i + 1: `targets` are the predicted tokens, not the input tokens.
    `plan_rows(...).targets(tokens)` and `next_token_targets(tokens)` align them.

    Args:
        hidden: [T, D], fp64, fp32, bf16 or fp16; with a group the same on every rank.
        head: weight [V, D], an nn.Linear, a PEFT LoRA layer, or `Head(weight, bias, lora, scale, softcap)`.
        targets: [N] ids of the whole vocabulary, or [T].
        rows: [N] int64, rows to score, in any order, also repeated; None: all rows. Other rows are never
            read and get zero gradient.
        temperature: > 0, a float or one per row; also affects the entropy.
        entropy: "none"; "metric": a value without gradient; "grad".
        allowed: (ids, offsets) or (ids, offsets, has_set): row i's log-prob is that of the softmax over
            ids[offsets[i] : offsets[i + 1]] and its target only; rows without a set over all ids. Entropy
            and lse cover the whole vocabulary.
        group: the process group over which the columns are sharded, equally many per rank.
        vocab_total: ids from here on are padding and excluded; None: padded columns count.
        sequence_parallel: hidden is [T / ranks, D]; `rows` are global and on the host.
        main_grad: [V, D]; the weight's gradient is added to it and not returned.
        chunk_rows: at most this many rows per tile of logits; None: chosen.

    Peak extra memory: one tile (1 MiB per core on a CPU; 752 MiB on a GPU, a quarter for fp32 products); a
        block of rows (4,096 on a CPU) and its gradient in fp32, once per core; dW from the forward on. For
        16-bit weights all N rows are one block, or dW is summed in fp32, whichever is smaller.
    Products (2 N D V FLOPs each): 3 for the rows whose logits fit the memory of dW, 4 for the others; 1
        without gradients.
    Collectives: with a group 1 gather forward and 1 all-reduce backward; otherwise none.
    Use something else when: V < 1,000 and all rows are scored; the plain version is as fast.
    """
    check_entropy(entropy)
    check_matrix("hidden", hidden)
    ranks = resolve_group(group)
    gathers = sequence_parallel and ranks is not None
    total = len(hidden) * ranks.size() if gathers else len(hidden)  # type: ignore[union-attr]
    if not gathers:
        check_rows(rows, hidden)
    product, opened, index, tensors = open_rows(hidden, head, rows, ranks if gathers else None)
    acc, weight = accumulation_dtype(hidden.dtype, tensors[1].dtype), tensors[1]
    if main_grad is not None:
        inputs = (hidden, weight, opened.bias)
        check_output_buffer("main_grad", main_grad, shape=weight.shape, device=hidden.device, inputs=inputs)
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected at least 1, got {chunk_rows}")
    first_id, real, vocab = local_columns(len(weight), ranks, vocab_total)
    targets = check_targets(targets, rows, total, vocab)
    k = inverse_temperature(temperature, rows, total, hidden, acc)
    # Without a softcap, the scale is part of the factor of a row's logits.
    k = k if opened.softcap is not None else k * opened.scale
    sets = check_allowed(allowed, targets, vocab)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    settings = Settings(
        opened.scale, opened.softcap, product, real, first_id, ranks, not gathers,
        chunk_rows, entropy, main_grad, needs_grad,
    )  # fmt: skip
    with torch.autocast(hidden.device.type, enabled=False):
        outputs = _LinearLogProbs.apply(settings, targets, k, sets, index, *tensors)
    logp, value, lse, argmax = outputs  # type: ignore[misc]
    return LogProbs(logp, None if entropy == "none" else value, lse, argmax)


def open_rows(
    hidden: Tensor, head: Any, rows: Tensor | None, gathers_from: dist.ProcessGroup | None = None
) -> tuple[torch.dtype, Head, Tensor | None, tuple[Any, ...]]:
    """Do what autograd can do: gather shards, multiply by LoRA's `down`.

    Returns the dtype of the products' operands, the checked head, the rows of hidden that are still to be
    selected, and (hidden, weight, bias, low [N, r], up), where logits have the term low @ up.T.
    """
    narrow = compute_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        opened = open_head(head, hidden)
        acc = accumulation_dtype(hidden.dtype, opened.weight.dtype)
        # On a GPU, products have 16-bit operands where autocast or hidden has; a CPU widens them.
        product = (
            narrow if passes.on_gpu(hidden.device) and narrow.itemsize == 2 and acc == torch.float32 else acc
        )
        low = up = None
        if gathers_from is not None:
            if opened.lora is not None:
                raise ValueError("head.lora: expected None with sequence_parallel; merge the adapter first")
            hidden, rows = gather_hidden_rows(hidden.to(product), rows, gathers_from), None
        elif opened.lora is not None:
            down, up, scaling = opened.lora
            # `low` needs the selected rows anyway.
            hidden = hidden.to(product) if product.itemsize == 2 else hidden
            hidden, rows = hidden if rows is None else hidden.index_select(0, rows), None
            low = torch.nn.functional.linear(hidden, down.to(hidden.dtype)) * scaling
    return product, opened, rows, (hidden, opened.weight, opened.bias, low, up)


class Settings(NamedTuple):
    """The constants of a call; `reduces`: the hidden gradient is summed over the ranks of `group`."""

    scale: float
    softcap: float | None
    product: torch.dtype
    real: int
    first_id: int
    group: dist.ProcessGroup | None
    reduces: bool
    chunk_rows: int | None
    entropy: str
    main_grad: Tensor | None
    needs_grad: bool


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, settings, ids, k, sets, index, hidden, weight, bias, low, up):  # type: ignore[override]
        trains = settings.needs_grad and ctx.needs_input_grad[6]
        fit = rows_in_gradient(weight, k.dtype) if trains and settings.main_grad is None else 0
        of_weight = weight if settings.main_grad is None else settings.main_grad
        size = len(ids), hidden.shape[1], settings.real
        narrow = (of_weight if trains else hidden).dtype != k.dtype
        tiles = choose_tiles(*size, fit, settings, hidden.device, narrow)
        # Several blocks add to dW, which must then have the dtype of the sums.
        holds = tiles.high <= fit and (len(tiles.blocks) == 1 or weight.dtype == k.dtype)
        dw = torch.empty_like(weight, memory_format=torch.contiguous_format) if holds else None
        loops = HeadLoops(settings, tiles, hidden, index, weight, bias, low, up, ids, k)
        pairs = None if sets is None else AllowedPairs(sets, ids, k, settings.first_id, settings.real, tiles)
        table = loops.statistics(None if dw is None else (dw.view(-1).view(k.dtype), fit), pairs)
        logp, entropy, lse, argmax, softmax = row_outputs(table, k, sets)
        ctx.save_for_backward(hidden, index, weight, bias, low, up, ids, k, *softmax)
        ctx.settings, ctx.tiles, ctx.pairs, ctx.dw = settings, tiles, pairs, dw
        ctx.mark_non_differentiable(argmax, *([] if settings.entropy == "grad" else [entropy]))
        ctx.set_materialize_grads(False)
        return logp, entropy, lse, argmax

    @staticmethod
    @first_order_only
    def backward(ctx, g_logp, g_entropy, g_lse, _):
        hidden, index, weight, bias, low, up, ids, k, *softmax = ctx.saved_tensors
        settings, needs = ctx.settings, ctx.needs_input_grad[5:]
        # dW overwrites the logits in its memory and is returned; a second backward recomputes them.
        dw, ctx.dw = ctx.dw, None
        memory = None if dw is None else (dw.view(-1).view(k.dtype), rows_in_gradient(weight, k.dtype))
        if needs[1] and settings.main_grad is not None:
            dw = settings.main_grad
        elif needs[1] and dw is None:
            dtype = weight.dtype if len(ctx.tiles.blocks) == 1 else k.dtype
            dw = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        loops = HeadLoops(settings, ctx.tiles, hidden, index, weight, bias, low, up, ids, k)
        sums = new_sums(settings, needs, dw, k, hidden, index, weight, low, up)
        factors = row_factors(k, settings, softmax, ctx.pairs, g_logp, g_entropy, g_lse)
        loops.gradients(factors, memory, ctx.pairs, sums)
        if settings.main_grad is not None and needs[1]:
            dw = main_grad_mark(weight)
        return *[None] * 5, *input_gradients(sums, dw, (hidden, weight, bias, low, up))


class Tiles(NamedTuple):
    """The tiles of a call, the same in forward and backward. rows: slices, `block` of them per block of rows.

    cols: slices, per core.
    """

    rows: list[slice]
    block: int
    cols: list[list[slice]]
    high: int
    wide: int

    @property
    def blocks(self) -> list[list[slice]]:
        return [self.rows[i : i + self.block] for i in range(0, len(self.rows), self.block)]


def choose_tiles(
    n: int, width: int, vocab: int, fit: int, settings: Any, device: torch.device, narrow: bool
) -> Tiles:
    """Cut n rows and `vocab` columns into tiles.

    `fit`: rows of logits that the memory of dW holds. `narrow`: dW, or dh of a frozen head, has 16 bits.
    """
    on_gpu = passes.on_gpu(device)
    size = (GPU_TILE_BYTES // (settings.product.itemsize // 2) ** 2 if on_gpu else CPU_TILE_BYTES) // 4
    if on_gpu:
        # Four times as wide as high, because a block of rows is copied. Sizes fill whole thread blocks.
        high = fit if n <= fit else max(int(size**0.5) // 512 * 256, 1)
        high = -(-n // max(-(-n // high), 1)) if high < n else n
        high = min(-(-high // 128) * 128, max(n, 1))
    else:
        # As many rows as dW's memory holds; fewer than 256 cost more in slow products than the recomputing.
        high = min(fit, 4096) if fit >= min(n, 256) else 1024
    high = max(1, min(high, n, settings.chunk_rows or n))
    wide = max(COLUMN_BLOCK, size // high // COLUMN_BLOCK * COLUMN_BLOCK)
    wide = max(1, min(wide, vocab))
    if on_gpu and vocab:
        # Even widths in whole thread blocks. Few rows do not need a wide tile to fill the device.
        wide = min(wide, 1 << 15)
        wide = -(-vocab // -(-vocab // wide))
        wide = min(-(-wide // COLUMN_BLOCK) * COLUMN_BLOCK, vocab)
    # Zero rows: one empty tile, which writes zeros to dW.
    rows = [slice(i, min(i + high, n)) for i in range(0, max(n, 1), high)]
    one = narrow and (is_one_block(n, vocab) or settings.main_grad is not None)
    block = len(rows) if one else 1 if on_gpu else max(CPU_BLOCK_ROWS // high, 1)
    cols = [slice(i, min(i + wide, vocab)) for i in range(0, vocab, wide)]
    threads = 1 if on_gpu else num_threads()
    cores = min(threads, len(cols)) if n * vocab * width >= threads * CORE_WORK else 1
    share = max(-(-len(cols) // cores), 1) if cols else 1
    return Tiles(rows, block, [cols[i : i + share] for i in range(0, len(cols), share)], high, wide)


def is_one_block(n: int, vocab: int) -> bool:
    """Whether n rows are one block for a 16-bit dW: fp32 sums of dh, [n, D], take less than those of dW."""
    return 2 * n <= 3 * vocab


class RowGradient:
    """The gradient of x [T, D] at its selected rows, summed in fp32 one block at a time; other rows are 0.

    total: the gradient; with ranks to add, the sums of the selected rows [N, D] until `reduce_over_ranks`.
    """

    def __init__(
        self, x: Tensor, index: Tensor | None, acc: torch.dtype, group: Any, total: Tensor | None = None
    ) -> None:
        self.x, self.index, self.acc, self.group, self.total = x, index, acc, group, total
        # The sums of a block then are a part of `total`.
        self.in_place = group is not None or (index is None and x.dtype == acc)

    def whole(self) -> Tensor:
        if self.total is None:
            n = len(self.x if self.index is None else self.index)
            shape = (n, self.x.shape[1]) if self.in_place else self.x.shape
            self.total = self.x.new_zeros(shape, dtype=self.acc if self.in_place else self.x.dtype)
        return self.total

    def part(self, rows: slice) -> RowGradient:
        """Return the gradient of some rows of x, of which all are selected, in the same memory."""
        return RowGradient(self.x[rows], None, self.acc, self.group, self.whole()[rows])

    def begin(self, rows: slice, cores: int) -> list[Tensor]:
        """Return zeros for the sums of some rows, [n, D] per core."""
        first = [self.whole()[rows]] if self.in_place else []
        shape = (cores - len(first), rows.stop - rows.start, self.x.shape[1])
        return [*first, *self.x.new_zeros(shape, dtype=self.acc)]

    def add(self, rows: slice, sums: list[Tensor], unit: Tensor | None) -> None:
        """Add the cores' sums of some rows, in multiples of `unit`; empties the list."""
        summed = sums[0]
        for other in sums[1:]:
            summed += other
        if unit is not None:
            summed *= unit
        sums.clear()
        if self.in_place:
            return
        # Sums in fp32 are freed before the gradient of all rows is allocated.
        summed = summed.to(self.x.dtype)
        if self.index is None:
            self.whole()[rows] = summed
        else:
            self.whole().index_add_(0, self.index[rows], summed)


class Sums(NamedTuple):
    """Sums of a call's gradients; None where not needed. weight is written, or added to with `accumulate`."""

    hidden: RowGradient | None
    weight: Tensor | None
    accumulate: bool
    bias: Tensor | None
    low: RowGradient | None
    up: Tensor | None


def new_sums(
    settings: Settings,
    needs: Any,
    dw: Tensor | None,
    k: Tensor,
    hidden: Tensor,
    index: Tensor | None,
    weight: Tensor,
    low: Any,
    up: Any,
) -> Sums:
    """Return sums of zeros; `needs`: whether hidden, weight, bias, low and up need a gradient."""
    accumulate = dw is not None and dw is settings.main_grad
    if dw is not None and not accumulate:
        dw[settings.real :].zero_()
    group = settings.group if settings.reduces else None
    return Sums(
        RowGradient(hidden, index, k.dtype, group) if needs[0] else None,
        dw,
        accumulate,
        k.new_zeros(len(weight)) if needs[2] else None,
        RowGradient(low, None, k.dtype, group) if needs[3] else None,
        k.new_zeros(up.shape) if needs[4] else None,
    )


class HeadLoops:
    """The two loops over the tiles of a head's logits.

    Logits are without temperature, and without `scale` if there is no softcap: k, a factor per row, has both.
    """

    def __init__(self, settings: Any, tiles: Tiles, hidden, index, weight, bias, low, up, ids, k) -> None:  # type: ignore[no-untyped-def]
        self.tiles, self.hidden, self.index, self.weight = tiles, hidden, index, weight
        self.bias, self.low, self.up, self.ids, self.k = bias, low, up, ids, k
        self.scale, self.softcap, self.group = settings.scale, settings.softcap, settings.group
        self.first_id, self.real = settings.first_id, settings.real
        self.product, self.acc = settings.product, k.dtype
        self.passes = passes.passes_for(hidden, self.acc, len(k) * self.real)

    def operands(self, block: list[slice]) -> tuple[slice, list[tuple[slice, Tensor, Tensor | None]]]:
        """Select the rows of a block; return them and, per tile, its rows, hidden and low."""
        first, last = block[0].start, block[-1].stop
        whole = slice(first, last)
        h = self.hidden[whole] if self.index is None else self.hidden.index_select(0, self.index[whole])
        h = h.to(self.product).contiguous()
        low = None if self.low is None else self.low[whole].to(self.product)
        inner = [slice(rows.start - first, rows.stop - first) for rows in block]
        return whole, [
            (rows, h[i], None if low is None else low[i]) for rows, i in zip(block, inner, strict=True)
        ]

    def statistics(self, memory: tuple[Tensor, int] | None, pairs: AllowedPairs | None) -> Tensor:
        """Return the table of the rows' statistics over all ranks, [5 or 7, N].

        Rows 0 to 4 are the outputs of the pass `stats`; 5 and 6 the maximum and sum over the allowed ids.
        `memory`: (flat tensor, rows per column) that the logits of the first rows are left in.
        """
        tiles, parts = self.tiles, []
        for block in tiles.blocks:
            whole, operands = self.operands(block)
            tables = self.k.new_empty(max(-(-self.real // tiles.wide), 1), 5, whole.stop - whole.start)
            if not self.real:
                tables.copy_(self.k.new_tensor([-torch.inf, 0, 0, -torch.inf, 0])[None, :, None])

            def job(core: int, whole=whole, operands=operands, tables=tables) -> None:  # type: ignore[no-untyped-def]
                scratch = self.k.new_empty(tiles.high * _aligned(tiles.wide))
                for cols in tiles.cols[core]:
                    of_cols = self.columns(cols)
                    finish = self.finish(of_cols, pairs)
                    for rows, h, low in operands:
                        out = _held(memory, rows, cols)
                        out = _view(scratch, rows, cols) if out is None else out
                        z = self.logits(h, low, of_cols, out, finished=not finish)
                        table = tables[cols.start // tiles.wide]
                        table = table[:, rows.start - whole.start : rows.stop - whole.start]
                        vectors = (self.k[rows], *table)
                        self.passes.stats(z, self.ids[rows], self.first_id + cols.start, *vectors, **finish)
                        if pairs is not None:
                            pairs.read(z, rows, cols)

            on_cores(job, tiles)
            del job, operands
            parts.append(join(tables, self.k[whole], tiles.wide))
        table = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        if pairs is not None:
            table = torch.cat([table, pairs.statistics(self.k)])
        return join_ranks(table, self.k, len(self.weight), self.group)

    def gradients(
        self,
        factors: tuple[Any, ...],
        memory: tuple[Tensor, int] | None,
        pairs: AllowedPairs | None,
        sums: Sums,
        in_place: bool = False,
    ) -> None:
        """Add to the sums. `factors`: from `row_factors`. `in_place`: logits in `memory` are overwritten."""
        tiles, acc = self.tiles, self.acc
        vectors, own, unit = factors
        inv_cap = 0.0 if self.softcap is None else 1 / self.softcap
        cores = max(len(tiles.cols), 1)
        dw = sums.weight
        # 16-bit gradients are summed in fp32 and rounded once; one product does that by itself.
        once = len(tiles.rows) == 1 and not sums.accumulate
        # Products go into dw[cols]; otherwise into fp32 scratch, which is added to it once per block.
        writes = dw is not None and unit is None
        writes = writes and (dw.dtype == acc or (once and dw.dtype == self.product))  # type: ignore[union-attr]
        for number, block in enumerate(tiles.blocks):
            whole, operands = self.operands(block)
            adds = sums.accumulate or number > 0
            dhs, dlows = ([] if g is None else g.begin(whole, cores) for g in (sums.hidden, sums.low))

            def job(core: int, operands=operands, adds=adds, dhs=dhs, dlows=dlows, whole=whole) -> None:  # type: ignore[no-untyped-def]
                scratch = self.k.new_empty(tiles.high * _aligned(tiles.wide))
                for cols in tiles.cols[core]:
                    w, _, up = of_cols = self.columns(cols)
                    finish = self.finish(of_cols, pairs)
                    dw_cols = None
                    if dw is not None:
                        dw_cols = dw[cols] if writes else self.k.new_empty(w.shape)
                    for rows, h, low in operands:
                        z, tile = _held(memory, rows, cols), _view(scratch, rows, cols)
                        if z is None:
                            z = self.logits(h, low, of_cols, tile, finished=not finish)
                        elif in_place:
                            tile = z
                        # 16-bit gradients take the first half of the memory of each row's logits.
                        du = tile if self.product == acc else _narrowed(tile, self.product)
                        of_allowed = None if pairs is None else pairs.gradients(z, rows, cols, own, inv_cap)
                        first = self.first_id + cols.start
                        of_rows = [v[rows] for v in vectors]
                        self.passes.grads(z, du, self.ids[rows], first, *of_rows, inv_cap, **finish)
                        if of_allowed is not None:
                            pairs.add(du, rows, cols, of_allowed)  # type: ignore[union-attr]
                        inner = slice(rows.start - whole.start, rows.stop - whole.start)
                        if dhs:
                            multiply_(dhs[core][inner], du, w, add=True)
                        if dw_cols is not None:
                            multiply_(dw_cols, du.t(), h, add=rows.start > whole.start or (writes and adds))
                        if sums.bias is not None:
                            column_sums = du.sum(0, dtype=acc)
                            sums.bias[cols] += column_sums if unit is None else column_sums * unit
                        if dlows:
                            multiply_(dlows[core][inner], du, up, add=True)
                        if sums.up is not None:
                            product = multiply_(torch.empty_like(sums.up[cols]), du.t(), low)
                            sums.up[cols] += product if unit is None else product * unit
                    if dw_cols is not None and not writes:
                        dw_cols = dw_cols if unit is None else dw_cols.mul_(unit)
                        dw[cols] = dw[cols] + dw_cols if adds else dw_cols  # type: ignore[index]

            on_cores(job, tiles)
            del job, operands
            for gradient, parts in ((sums.hidden, dhs), (sums.low, dlows)):
                if gradient is not None:
                    gradient.add(whole, parts, unit)

    def columns(self, cols: slice) -> tuple[Any, Any, Any]:
        """Return weight, bias and up of some columns in the dtype of the products."""
        bias = None if self.bias is None else self.bias[cols].to(self.acc)
        up = None if self.up is None else self.up[cols].to(self.product)
        return self.weight[cols].to(self.product), bias, up

    def finish(self, operands: tuple[Any, Any, Any], pairs: AllowedPairs | None) -> dict[str, Any]:
        """Return options that let Triton's passes add the bias and cap the products that they read."""
        in_triton = self.passes is not passes.TORCH and not isinstance(self.passes, passes.Native)
        if not in_triton or pairs is not None or (operands[1] is None and self.softcap is None):
            return {}
        inner = 1.0 if self.softcap is None else self.scale / self.softcap
        return {"finish": (operands[1], inner, self.softcap)}

    def logits(
        self, h: Tensor, low: Tensor | None, of_cols: tuple[Any, Any, Any], out: Tensor, finished: bool = True
    ) -> Tensor:
        """Write a tile's logits to `out`; without `finished`, the products only."""
        w, bias, up = of_cols
        if not finished or bias is None or w.dtype != out.dtype:
            z = multiply_(out, h, w.t())
            z = z.add_(bias) if finished and bias is not None else z
        else:
            z = torch.addmm(bias, h, w.t(), out=out)
        if low is not None:
            multiply_(z, low, up.t(), add=True)
        if not finished or self.softcap is None:
            return z
        return z.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)


def on_cores(job: Any, tiles: Tiles) -> None:
    """Call job(core) for every core's columns, with one torch thread per core if there are several."""
    if len(tiles.cols) > 1:
        run_on_cores([lambda _, core=core: job(core) for core in range(len(tiles.cols))], len(tiles.cols))
    elif tiles.cols:
        job(0)


def _aligned(width: int) -> int:
    """Return the length of a row of a tile: a multiple of 8 numbers, so that every row is aligned."""
    return -(-width // 8) * 8


def _view(memory: Tensor, rows: slice, cols: slice) -> Tensor:
    high, wide = rows.stop - rows.start, _aligned(cols.stop - cols.start)
    return memory[: high * wide].view(high, wide)[:, : cols.stop - cols.start]


def aligned_tile(rows: int, width: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized [rows, width] tile with aligned rows."""
    return torch.empty((rows, _aligned(width)), dtype=dtype or like.dtype, device=like.device)[:, :width]


def _narrowed(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a 16-bit tile in the first half of the memory of each row of an fp32 one."""
    rows, width = tile.shape
    whole = tile.as_strided((rows, tile.stride(0)), (tile.stride(0), 1))
    return whole.view(dtype)[:, :width]


def _held(memory: tuple[Tensor, int] | None, rows: slice, cols: slice) -> Tensor | None:
    """Return the tile kept in the memory that outlives the forward, or None if it was not kept."""
    if memory is None or rows.start or rows.stop > memory[1]:
        return None
    flat, fit = memory
    width = cols.stop - cols.start
    # Aligned rows of the last tile may need more than its columns' memory.
    if rows.stop * _aligned(width) > width * fit:
        return None
    return _view(flat[cols.start * fit :], rows, cols)


def rows_in_gradient(weight: Tensor, acc: torch.dtype) -> int:
    """Return how many rows of logits fit the memory of the weight's gradient."""
    fit, rest = divmod(weight.shape[1] * weight.element_size(), acc.itemsize)
    return 0 if rest else fit


def multiply_(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> Tensor:
    """Write a @ b to `out`, or add it; 16-bit operands are summed in the dtype of `out`."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    if _sums_in_fp32(a.dtype, out.dtype, out.device):
        if add:
            return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    a, b = a.to(out.dtype), b.to(out.dtype)
    return torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)


@functools.cache
def _sums_in_fp32(operands: torch.dtype, result: torch.dtype, device: torch.device) -> bool:
    """Whether this torch multiplies 16-bit operands into fp32 sums; otherwise operands are widened."""
    a, sums = (torch.ones((8, 8), dtype=dtype, device=device) for dtype in (operands, result))
    try:
        torch.addmm(sums, a, a, out_dtype=result, out=sums)
        torch.mm(a, a, out_dtype=result, out=sums)
        return True
    except (RuntimeError, TypeError):
        return False


def join(tables: Tensor, k: Tensor, step: int) -> Tensor:
    """Return the table of all columns from tables [C, 5 or 7, N] of C neighbors, `step` columns apart."""
    max_, sum_, sum_x, target, argmax, *allowed = tables.unbind(1)
    m = max_.amax(0)
    first = (max_ == m).int().argmax(0)  # the lowest neighbor that holds the maximum
    # Ids are exact in fp32 up to 16 million columns.
    argmax = argmax.gather(0, first[None])[0] + first * step

    def weight(maxima: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
        # A neighbor (or a whole row) of -inf has sum 0; its clamped shift is finite, so it adds nothing.
        shift = ((maxima - top.masked_fill(top == -torch.inf, 0)) * k).clamp_(min=-800)
        return shift, shift.exp()

    shift, e = weight(max_, m)
    results = [m, (sum_ * e).sum(0), ((sum_x + shift * sum_) * e).sum(0), target.amax(0), argmax]
    if allowed:
        top = allowed[0].amax(0)
        results += [top, (allowed[1] * weight(allowed[0], top)[1]).sum(0)]
    return torch.stack(results)


def join_ranks(table: Tensor, k: Tensor, width: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the table of the whole vocabulary from that of this rank's columns. Collectives: 1."""
    if group is None:
        return table
    return join(all_gather(table, group).unflatten(0, (group.size(), -1)), k, width)


def row_outputs(table: Tensor, k: Tensor, sets: Any) -> tuple[Any, ...]:
    """Return log-prob, entropy, lse and argmax, [N] each, and what the gradients need of the softmax.

    Maximum and log-sum stay apart: at logits near 1e6, their sum would lose the digits of e^(z - lse).
    """
    m, s, t, target, argmax, *allowed = table
    log_s = s.log().masked_fill(s == 0, 0)
    entropy = (log_s - t / s).masked_fill(s == 0, 0)
    own_m, own_log_s, softmax = m, log_s, (m, log_s, entropy)
    if sets is not None:
        own_m = torch.where(sets.has_set, allowed[0], m)
        own_log_s = torch.where(sets.has_set, allowed[1].log().masked_fill(allowed[1] == 0, 0), log_s)
        softmax = (*softmax, own_m, own_log_s)
    finite = own_m.masked_fill(own_m == -torch.inf, 0)
    logp = (target - finite) * k - own_log_s
    return logp, entropy, m * k + log_s, argmax.long(), softmax


def row_factors(
    k: Tensor, settings: Any, softmax: Any, pairs: Any, g_logp: Any, g_entropy: Any, g_lse: Any
) -> tuple[Any, ...]:
    """Return the vectors of the pass `grads`, those of the allowed ids, and the unit of fp16 gradients.

    du = factor slope (g onehot - p (a + b (log p + H))) with a = g - g_lse and b = g_H; factor is scale /
    temperature, and a row of -inf gets no gradient.
    """
    m, log_s, entropy, *allowed = softmax
    dead = m == -torch.inf
    factor = (k if settings.softcap is None else k * settings.scale).masked_fill(dead, 0)
    g, b, g_lse = (torch.zeros_like(k) if x is None else x * factor for x in (g_logp, g_entropy, g_lse))
    a, own = g - g_lse, None
    if pairs is not None:
        a = torch.where(pairs.has_set, -g_lse, a)
        own_m, own_log_s = allowed
        own = (k, own_m.masked_fill(own_m == -torch.inf, 0), own_log_s, g)
    unit = None
    if settings.product == torch.float16:
        largest = torch.stack([a, b, g]).abs().amax() if len(k) else k.new_zeros(())
        unit = (largest / FP16_LARGEST).clamp(min=torch.finfo(k.dtype).tiny)
        a, b, g = a / unit, b / unit, g / unit
        own = None if own is None else (*own[:3], g)
    return (k, m.masked_fill(dead, 0), log_s, entropy, a, b, g), own, unit


def reduce_over_ranks(*gradients: RowGradient | None) -> list[Tensor | None]:
    """Return complete gradients; those of shards are added over the ranks. Collectives: 1 with a group."""
    present = [g for g in gradients if g is not None]
    if not present or present[0].group is None:
        return [None if g is None else g.total for g in gradients]
    totals = [g.whole() for g in present]
    both = torch.cat(totals, 1) if len(totals) == 2 else totals[0]
    dist.all_reduce(both, group=present[0].group)
    split = iter(both.split([g.x.shape[1] for g in present], 1))
    results: list[Tensor | None] = []
    for g in gradients:
        summed = None if g is None else next(split).to(g.x.dtype)
        if summed is not None and g.index is not None:  # type: ignore[union-attr]
            summed = torch.zeros_like(g.x).index_add_(0, g.index, summed)  # type: ignore[union-attr]
        results.append(summed)
    return results


def input_gradients(sums: Sums, dw: Tensor | None, inputs: tuple[Any, ...]) -> list[Tensor | None]:
    """Return the gradients of hidden, weight, bias, low and up over all ranks, in the inputs' dtypes."""
    dh, dlow = reduce_over_ranks(sums.hidden, sums.low)
    grads = (dh, dw, sums.bias, dlow, sums.up)
    return [None if g is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)]


def main_grad_mark(weight: Any) -> Tensor | None:
    """Return the gradient for autograd after the real one was added to main_grad: None, or Megatron's mark.

    Megatron's reducers wait for a gradient; the mark tells them not to read it. They do read that of a shared
    embedding (`zero_out_wgrad`), because autograd has added the embedding's own gradient to it.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    is_read = getattr(weight, "zero_out_wgrad", False)
    return torch.zeros_like(weight) if is_read else torch.empty_like(weight)


def local_columns(width: int, group: Any, vocab_total: int | None) -> tuple[int, int, int]:
    """Return this rank's first id, its number of columns that are not padding, and the vocabulary's size."""
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    if vocab_total is not None and not 1 <= vocab_total <= width * size:
        raise ValueError(f"vocab_total: expected 1 to {width * size} columns, got {vocab_total}")
    vocab = width * size if vocab_total is None else vocab_total
    return rank * width, min(max(vocab - rank * width, 0), width), vocab


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return fp64 if any dtype is fp64, otherwise fp32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def check_entropy(entropy: str) -> None:
    if entropy not in ("none", "metric", "grad"):
        raise ValueError(f"entropy: expected none, metric or grad, got {entropy!r}")


@outside_graph
def token_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    rows: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: Entropy = "none",
    allowed: tuple[Tensor, ...] | None = None,
    group: Any = None,
    vocab_total: int | None = None,
    chunk_rows: int | None = None,
    reuse_buffer: bool = False,
) -> LogProbs:
    """Return the log-prob of one target per row of existing logits, and the row's entropy.

    Equivalent to:
        log_p = torch.log_softmax(logits.float() / temperature, -1)
        logp = log_p.gather(1, targets[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)

    Args:
        logits: [T, V], any float dtype and strides; not modified unless `reuse_buffer`. They may be -inf; a
            row of -inf has logp -inf and entropy 0.
        targets, rows, temperature, entropy, allowed, group, vocab_total, chunk_rows: as in `linear_logprobs`.
        reuse_buffer: the backward pass writes the gradient over `logits`. Only for contiguous fp32 or fp64
            logits that are not a leaf, without `rows`, and for a single backward pass.

    Peak extra memory: the gradient and one tile; saved for backward: `logits` and vectors.
    Collectives: with a group 1 gather forward; otherwise none.
    Use something else when: a second derivative is needed (`reference.reference_logprobs`).
    """
    check_entropy(entropy)
    check_matrix("logits", logits)
    check_rows(rows, logits)
    ranks = resolve_group(group)
    acc = accumulation_dtype(logits.dtype)
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected at least 1, got {chunk_rows}")
    first_id, real, vocab = local_columns(logits.shape[1], ranks, vocab_total)
    targets = check_targets(targets, rows, len(logits), vocab)
    k = inverse_temperature(temperature, rows, len(logits), logits, acc)
    sets = check_allowed(allowed, targets, vocab)
    if reuse_buffer:
        base = logits if logits._base is None else logits._base
        fits = logits.is_contiguous() and logits.dtype == acc and rows is None
        if not fits or logits.is_leaf or base.is_leaf:
            expected = "contiguous fp32 or fp64 logits that are not a leaf, and no rows"
            raise ValueError(f"reuse_buffer: expected {expected}, got {logits.dtype} {tuple(logits.shape)}")
    settings = Settings(
        1.0, None, acc, real, first_id, ranks, False, chunk_rows, entropy, None, torch.is_grad_enabled()
    )
    outputs = _TokenLogProbs.apply(settings, targets, k, sets, rows, reuse_buffer, logits)
    logp, value, lse, argmax = outputs  # type: ignore[misc]
    return LogProbs(logp, None if entropy == "none" else value, lse, argmax)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, settings, ids, k, sets, index, reuse, logits):  # type: ignore[override]
        tiles = _tiles_of_logits(len(ids), settings.real, settings.chunk_rows, logits.device, index)
        pairs = None if sets is None else AllowedPairs(sets, ids, k, settings.first_id, settings.real, tiles)
        tables = k.new_empty(max(len(range(0, settings.real, tiles.wide)), 1), 5, len(ids))
        if not settings.real:
            tables.copy_(k.new_tensor([-torch.inf, 0, 0, -torch.inf, 0])[None, :, None])
        body = passes.passes_for(logits, k.dtype, len(ids) * settings.real)

        def job(core: int) -> None:
            for cols in tiles.cols[core]:
                table = tables[cols.start // tiles.wide]
                for rows in tiles.rows:
                    z = _existing(logits, index, rows, cols, k.dtype)
                    body.stats(z, ids[rows], settings.first_id + cols.start, k[rows], *table[:, rows])
                    if pairs is not None:
                        pairs.read(z, rows, cols)

        on_cores(job, tiles)
        table = join(tables, k, tiles.wide)
        if pairs is not None:
            table = torch.cat([table, pairs.statistics(k)])
        table = join_ranks(table, k, logits.shape[1], settings.group)
        logp, entropy, lse, argmax, softmax = row_outputs(table, k, sets)
        ctx.save_for_backward(logits, ids, k, *softmax)
        ctx.index, ctx.reuse, ctx.settings, ctx.tiles, ctx.pairs = index, reuse, settings, tiles, pairs
        ctx.mark_non_differentiable(argmax, *([] if settings.entropy == "grad" else [entropy]))
        ctx.set_materialize_grads(False)
        return logp, entropy, lse, argmax

    @staticmethod
    @first_order_only
    def backward(ctx, g_logp, g_entropy, g_lse, _):
        if ctx.reuse is None:
            raise RuntimeError("reuse_buffer: the first backward pass has overwritten the logits")
        logits, ids, k, *softmax = ctx.saved_tensors
        settings, tiles, pairs, index = ctx.settings, ctx.tiles, ctx.pairs, ctx.index
        vectors, own, _ = row_factors(k, settings, softmax, pairs, g_logp, g_entropy, g_lse)
        if ctx.reuse:
            grad, ctx.reuse = logits.detach(), None
        elif index is None:
            grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        else:
            grad = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        grad[:, settings.real :] = 0
        body = passes.passes_for(logits, k.dtype, len(ids) * settings.real)
        # Gradients go straight to their place if the pass can write there.
        direct = index is None and (grad.dtype == k.dtype or passes.on_gpu(grad.device))

        def job(core: int) -> None:
            scratch = None if direct else k.new_empty(tiles.high * _aligned(tiles.wide))
            for cols in tiles.cols[core]:
                for rows in tiles.rows:
                    z = _existing(logits, index, rows, cols, k.dtype)
                    du = grad[rows, cols] if scratch is None else _view(scratch, rows, cols)
                    of_allowed = None if pairs is None else pairs.gradients(z, rows, cols, own, 0.0)
                    first = settings.first_id + cols.start
                    body.grads(z, du, ids[rows], first, *[v[rows] for v in vectors], 0.0)
                    if of_allowed is not None:
                        pairs.add(du, rows, cols, of_allowed)  # type: ignore[union-attr]
                    if index is not None:
                        # Each core has its own columns, so that repeated rows add up in a fixed order.
                        grad[:, cols].index_add_(0, index[rows], du.to(grad.dtype))
                    elif not direct:
                        grad[rows, cols] = du

        on_cores(job, tiles)
        return None, None, None, None, None, None, grad


def _tiles_of_logits(
    n: int, vocab: int, chunk_rows: int | None, device: torch.device, index: Tensor | None
) -> Tiles:
    """Cut existing logits: whole rows, or a part of every row per core."""
    on_gpu = passes.on_gpu(device)
    cores = 1 if on_gpu or n * vocab < num_threads() << 18 else num_threads()
    wide = max(-(-vocab // cores), 1)
    high = max((GPU_TILE_BYTES if on_gpu else CPU_TILE_BYTES) // 4 // wide, 1)
    # On a GPU, the passes read and write the caller's tensors: there is no tile to bound.
    high = n if on_gpu and index is None else high
    high = max(1, min(high, n, chunk_rows or n))
    rows = [slice(i, min(i + high, n)) for i in range(0, max(n, 1), high)]
    cols = [[slice(i, min(i + wide, vocab))] for i in range(0, vocab, wide)]
    return Tiles(rows, len(rows), cols, high, wide)


def _existing(logits: Tensor, index: Tensor | None, rows: slice, cols: slice, acc: torch.dtype) -> Tensor:
    """Return a tile of given logits, a view where a pass can read one."""
    if index is not None:
        return logits[:, cols].index_select(0, index[rows]).to(acc)
    z = logits[rows, cols]
    in_place = z.stride(1) == 1 or z.shape[1] == 1
    if passes.on_gpu(z.device):
        return z if in_place else z.contiguous()
    return z if in_place and z.dtype == acc else z.to(acc).contiguous()
