"""Any function of a row's logits, one block of rows at a time, with exact gradients.

Write your own objective as the textbook formula; `linear_distill_loss` and label smoothing are written so:

    def token_loss(logits, targets, weights):
        logp = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        return -weights * logp

    loss = rowwise(token_loss, hidden, model.lm_head, targets, weights).sum()
"""

# T rows · N selected rows · n rows of a block · D model · V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from leanstep.heads.head import check_matrix, check_rows
from leanstep.heads.logprob import (
    HeadLoops,
    Settings,
    Tiles,
    accumulation_dtype,
    aligned_tile,
    input_gradients,
    multiply_,
    new_sums,
    open_rows,
    outside_graph,
)
from leanstep.heads.parallel import first_order_only

# Bytes of a block of logits; fewer rows than 16 make slow products.
CPU_BLOCK_BYTES, GPU_BLOCK_BYTES, FEWEST_ROWS = 64 << 20, 256 << 20, 16


@outside_graph
def rowwise(
    fn: Callable[..., Any], hidden: Tensor, head: Any, *per_row: Tensor, rows: Tensor | None = None
) -> Any:
    """Apply a function of logits to selected rows of a head, without the [N, V] logits.

    Equivalent to, for a weight:
        values = fn((hidden[rows] @ weight.T).float(), *per_row)

    Args:
        fn: fn(logits [n, V], *per_row [n, ...]) -> a tensor, or a tuple of tensors, with one entry per row.
            Each row's result may depend on that row only. It runs once per block in the forward and again in
            the backward, under the forward's autocast and random state.
        hidden: [T, D].
        head: as in `linear_logprobs`. Logits have its scale and softcap; they are fp32 (fp64 for fp64 input).
        per_row: constants [N, ...], aligned with the result.
        rows: [N] int64, rows to select; None: all rows.

    Gradients flow to `hidden` and `head`. Tensors in `per_row` that require grad, and parameters that `fn`
    uses, are an error.

    Peak extra memory: one block of logits (64 MiB on a CPU, 256 MiB on a GPU) and what `fn` makes of it; the
        sums of the gradients. Products (2 N D V FLOPs each): 4. Collectives: none; it takes no process group.
    """
    return apply_rowwise(fn, None, hidden, head, per_row, rows)


def apply_rowwise(
    fn: Callable[..., Any],
    gradient: Callable[..., Tensor] | None,
    hidden: Tensor,
    head: Any,
    per_row: Sequence[Tensor],
    rows: Tensor | None,
) -> Any:
    """Do what `rowwise` does; `gradient` replaces autograd.

    gradient(logits, upstream, *per_row) returns the gradient of the logits from those of fn's results, which
    are tensors or None.
    """
    check_matrix("hidden", hidden)
    check_rows(rows, hidden)
    product, opened, index, tensors = open_rows(hidden, head, rows)
    n = len(tensors[0]) if index is None else len(index)
    for i, values in enumerate(per_row):
        if values.requires_grad:
            raise ValueError(f"per_row[{i}]: expected a constant; gradients flow to hidden and head only")
        if values.shape[:1] != (n,):
            raise ValueError(f"per_row[{i}]: expected {n} entries, got shape {tuple(values.shape)}")
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    settings = Settings(
        opened.scale,
        opened.softcap,
        product,
        len(opened.weight),
        0,
        None,
        False,
        None,
        "none",
        None,
        needs_grad,
    )
    single: list[bool] = []
    results = _Rowwise.apply(fn, gradient, settings, single, per_row, index, *tensors)
    return results[0] if single[0] else results  # type: ignore[index]


class _Rowwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, gradient, settings, single, per_row, index, hidden, weight, bias, low, up):  # type: ignore[override]
        device = hidden.device.type
        ctx.fn, ctx.gradient, ctx.settings, ctx.per_row = fn, gradient, settings, per_row
        ctx.rng = torch.get_rng_state(), torch.cuda.get_rng_state(hidden.device) if hidden.is_cuda else None
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.save_for_backward(index, hidden, weight, bias, low, up)
        loops = _loops(settings, index, hidden, weight, bias, low, up)
        parts: list[list[Tensor]] = []
        differentiable: list[bool] | None = None
        of_cols = loops.columns(slice(0, len(weight)))
        for block in loops.tiles.blocks:
            rows, [(_, h, of_lora)] = loops.operands(block)
            z = _logits(loops, h, of_lora, of_cols)
            del h, of_lora
            # The first block shows what the results depend on.
            traces = settings.needs_grad and differentiable is None and gradient is None
            with torch.set_grad_enabled(traces):
                outs = fn(z.requires_grad_(torch.is_grad_enabled()), *[x[rows] for x in per_row])
            single[:] = [isinstance(outs, Tensor)]
            outs = (outs,) if single[0] else tuple(outs)
            if any(len(out) != len(z) for out in outs):
                raise ValueError(f"fn: expected {len(z)} entries per result, got {[len(o) for o in outs]}")
            if differentiable is None:
                _refuse_other_leaves(outs, z)
                differentiable = [out.requires_grad or gradient is not None for out in outs]
            parts.append([out.detach() for out in outs])
        results = tuple(torch.cat(part) for part in zip(*parts, strict=True))
        flags = differentiable or []
        ctx.mark_non_differentiable(*[r for r, flag in zip(results, flags, strict=True) if not flag])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @first_order_only
    def backward(ctx, *upstream):
        index, hidden, weight, bias, low, up = ctx.saved_tensors
        needs, settings, (device, dtype, enabled) = ctx.needs_input_grad[6:], ctx.settings, ctx.autocast
        loops = _loops(settings, index, hidden, weight, bias, low, up)
        w, _, of_up = of_cols = loops.columns(slice(0, len(weight)))
        dw = loops.k.new_zeros(weight.shape) if needs[1] else None
        sums = new_sums(settings, needs, dw, loops.k, hidden, index, weight, low, up)
        # 16-bit gradients of logits for 16-bit products; in fp16 they could underflow.
        narrow = loops.acc if loops.product == torch.float16 else loops.product
        devices = [hidden.device] if hidden.is_cuda else []
        with torch.random.fork_rng(devices=devices), torch.autocast(device, dtype, enabled):
            torch.set_rng_state(ctx.rng[0])
            if hidden.is_cuda:
                torch.cuda.set_rng_state(ctx.rng[1], hidden.device)
            for block in loops.tiles.blocks:
                rows, [(_, h, of_lora)] = loops.operands(block)
                z = _logits(loops, h, of_lora, of_cols)
                of_rows = [x[rows] for x in ctx.per_row]
                of_results = tuple(None if g is None else g[rows] for g in upstream)
                if all(g is None for g in of_results):
                    continue
                if ctx.gradient is None:
                    dz = _differentiate(ctx.fn, z, of_results, of_rows)
                else:
                    with torch.no_grad():
                        dz = ctx.gradient(z, of_results, *of_rows)
                if dz is None:
                    continue
                with torch.no_grad(), torch.autocast(device, enabled=False):
                    if settings.softcap is not None:
                        t = z.detach() / settings.softcap
                        dz = dz * (1 - t) * (1 + t)
                    du = aligned_tile(*dz.shape, dz, narrow).copy_(dz)
                    du = du.mul_(settings.scale) if settings.scale != 1 else du
                    h, of_lora = (None if x is None else x.to(narrow) for x in (h, of_lora))
                    for gradient, factor in ((sums.hidden, w), (sums.low, of_up)):
                        if gradient is not None:
                            parts = gradient.begin(rows, 1)
                            multiply_(parts[0], du, factor.to(narrow), add=True)
                            gradient.add(rows, parts, None)
                    if dw is not None:
                        multiply_(dw, du.t(), h, add=True)  # type: ignore[arg-type]
                    if sums.bias is not None:
                        sums.bias.add_(du.sum(0, dtype=loops.acc))
                    if sums.up is not None:
                        multiply_(sums.up, du.t(), of_lora, add=True)  # type: ignore[arg-type]
        return *[None] * 6, *input_gradients(sums, dw, (hidden, weight, bias, low, up))


def _differentiate(
    fn: Callable[..., Any], z: Tensor, upstream: tuple[Tensor | None, ...], per_row: list[Tensor]
) -> Tensor | None:
    """Return the gradient of a block's logits by autograd; None if no result with a gradient has a graph."""
    with torch.enable_grad():
        outs = fn(z.requires_grad_(), *per_row)
    outs = (outs,) if isinstance(outs, Tensor) else outs
    pairs = [(out, g) for out, g in zip(outs, upstream, strict=True) if g is not None and out.requires_grad]
    if not pairs:
        return None
    results, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(results, z, gradients)[0]


def _loops(settings: Settings, index, hidden, weight, bias, low, up) -> HeadLoops:  # type: ignore[no-untyped-def]
    """Return the blocks of rows, and what computes their logits."""
    n, vocab = len(hidden) if index is None else len(index), len(weight)
    acc = accumulation_dtype(hidden.dtype, weight.dtype)
    size = GPU_BLOCK_BYTES if hidden.device.type != "cpu" else CPU_BLOCK_BYTES
    high = max(size // (vocab * acc.itemsize), FEWEST_ROWS) if vocab else n
    rows = [slice(i, min(i + high, n)) for i in range(0, max(n, 1), max(high, 1))]
    like = torch.empty(0, dtype=acc, device=hidden.device)
    tiles = Tiles(rows, 1, [[slice(0, vocab)]], high, vocab)
    return HeadLoops(settings, tiles, hidden, index, weight, bias, low, up, None, like)


def _logits(loops: HeadLoops, h: Tensor, low: Tensor | None, of_cols: Any) -> Tensor:
    """Return the logits of some rows, [n, V]."""
    z = loops.logits(h, low, of_cols, aligned_tile(len(h), len(loops.weight), loops.k))
    return z.mul_(loops.scale) if loops.softcap is None and loops.scale != 1 else z


def _refuse_other_leaves(outs: tuple[Tensor, ...], z: Tensor) -> None:
    """Raise if the graph of `outs` ends in a tensor other than `z`: its gradient would be lost."""
    todo, seen = [o.grad_fn for o in outs if o.grad_fn is not None], set()
    while todo:
        node = todo.pop()
        leaf: Any = getattr(node, "variable", None)
        if leaf is not None and leaf is not z:
            expected = "only hidden and head may require grad"
            raise ValueError(f"fn: it uses a tensor {tuple(leaf.shape)} that requires grad; {expected}")
        seen.add(node)
        todo += [n for n, _ in node.next_functions if n is not None and n not in seen]
