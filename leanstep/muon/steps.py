"""Run the Muon update of a list of matrices: momentum, polar factor, variance, write.

The list may mix shapes and parameters. Small equal shapes are stacked into one batched product, large ones
go one by one through the same scratch memory. Single-process and sharded optimizers both end up here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from leanstep.muon.polar import PolarPlan, iterate, normalize_into
from leanstep.muon.reference import POLAR_EXPRESS, Triples, shape_factor
from leanstep.muon.side_by_side import run_side_by_side
from leanstep.muon.update import fill_update, variance_scale, write_weight
from leanstep.muon.workspace import Workspace

LR_RULES = ("shape", "spectral", "rms", "none")
LrRule = str | Callable[[int, int], float]


@dataclass(frozen=True)
class MatrixItem:
    """Matrices [B, R, C] of one shape, one rate, and their state; all of it is updated in place."""

    weight: Tensor
    grad: Tensor
    buffer: Tensor
    second: Tensor | None
    residual: Tensor | None
    plan: PolarPlan
    lr: float
    decay: float


@dataclass(frozen=True)
class MatrixOptions:
    """What all items of one call have in common."""

    momentum: float = 0.95
    nesterov: bool = True
    beta2: float = 0.95
    variance: str = "long"
    cautious: bool = True
    residual: str = "nearest"
    eps_mode: str = "relative"
    coefficients: Triples = field(default=POLAR_EXPRESS)
    max_batch_elements: int = 1 << 26


def rate_factor(rule: LrRule, rows: int, cols: int, layout: str) -> float:
    """The learning-rate factor of a matrix; `layout` says whether its rows are the outputs."""
    if layout == "in_out":
        rows, cols = cols, rows
    return float(rule(rows, cols)) if callable(rule) else shape_factor(rows, cols, rule)


def run_items(items: Sequence[MatrixItem], options: MatrixOptions, workspace: Workspace) -> None:
    """Update every item; the order of items does not change any result."""
    alone = []
    for plan, group in _by_plan(items).items():
        if not plan.batched:
            alone += [_pick(item, index) for item in group for index in range(item.weight.size(0))]
            continue
        chunk: list[MatrixItem] = []
        size, limit = 0, max(1, options.max_batch_elements // (plan.rows * plan.cols))
        for item in group:
            if chunk and size + item.weight.size(0) > limit:
                _run(chunk, plan, options, workspace)
                chunk, size = [], 0
            chunk.append(item)
            size += item.weight.size(0)
        _run(chunk, plan, options, workspace)
    # Biggest first: the last jobs to finish are then short ones.
    alone.sort(key=lambda item: -item.plan.flops())
    run_side_by_side([functools.partial(_run, [item], item.plan, options) for item in alone], workspace)


def _by_plan(items: Sequence[MatrixItem]) -> dict[PolarPlan, list[MatrixItem]]:
    groups: dict[PolarPlan, list[MatrixItem]] = {}
    for item in items:
        if item.weight.numel():
            groups.setdefault(item.plan, []).append(item)
    return groups


def _pick(item: MatrixItem, index: int) -> MatrixItem:
    def at(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[index : index + 1]

    return MatrixItem(
        item.weight[index : index + 1],
        item.grad[index : index + 1],
        item.buffer[index : index + 1],
        at(item.second),
        at(item.residual),
        item.plan,
        item.lr,
        item.decay,
    )


def _run(items: list[MatrixItem], plan: PolarPlan, options: MatrixOptions, workspace: Workspace) -> None:
    sizes = [item.weight.size(0) for item in items]
    update = workspace.take("update", (sum(sizes), plan.rows, plan.cols), items[0].buffer)
    for item, part in zip(items, update.split(sizes), strict=True):
        fill_update(item.grad, item.buffer, options.momentum, part, nesterov=options.nesterov)
    factor = orthogonalise(update, plan, options, workspace)
    for item, part in zip(items, factor.split(sizes), strict=True):
        scale = None
        if item.second is not None:
            scale = variance_scale(part, item.second, options.beta2, options.variance)
        write_weight(
            item.weight,
            part,
            lr=item.lr,
            decay=item.decay,
            scale=scale,
            residual=item.residual,
            mode=options.residual,
            cautious=options.cautious,
        )


def orthogonalise(update: Tensor, plan: PolarPlan, options: MatrixOptions, workspace: Workspace) -> Tensor:
    """The polar factor of `update` [B, R, C] in the plan's dtype; `update` is scratch afterwards."""
    shape = (update.size(0), plan.rows, plan.cols)
    x = update if plan.dtype == update.dtype else workspace.take("input", shape, update, plan.dtype)
    normalize_into(update, x, options.eps_mode)
    # A single matrix as [R, C]: symmetric panels and in-place products work on plain matrices.
    factor = iterate(x[0] if shape[0] == 1 else x, plan, options.coefficients, workspace)
    return factor.view(shape)
