"""Loss and gradient together, in closed form: nothing is recorded, nothing is run backwards.

P pairs · M entries looked at per pair (all W of them, or the compact list) · V contexts · W padded length
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .batch import LensBatch
from .compact import CompactEntries, can_compact, compact_entries
from .config import LensConfig
from .coverage import coverage_gradient
from .pairs import Pairs
from .targets import build_targets, span_table
from .terms import pair_factors, smooth_budget, total_of

Denominator = Callable[[Tensor], Tensor]


@dataclass
class FusedOutput:
    """Loss, terms per pair, and d loss / d scores (None if not asked for)."""

    loss: Tensor
    terms: dict[str, Tensor]
    kept: Tensor
    state: Tensor
    grad: Tensor | None


class AttachGradient(torch.autograd.Function):
    """Give a loss whose gradient is already known its place in the graph."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, loss: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad, scores)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        grad, scores = ctx.saved_tensors
        scaled = (grad * upstream).to(scores.dtype)
        if torch.is_grad_enabled():
            scaled = _RefuseSecondBackward.apply(scaled, scores)
        return scaled, None, None


class _RefuseSecondBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, scores: Tensor) -> Tensor:
        return grad.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, None]:
        raise RuntimeError('the fused objective has no second derivative; use backend="eager"')


def row_terms(
    x: Tensor,
    sign: Tensor,
    span: Tensor | None,
    pairs: Pairs,
    config: LensConfig,
    active: tuple[str, ...],
    state: Tensor,
    denominator: Denominator,
    *,
    need_grad: bool,
    span_weights: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, Tensor | None]:
    """The row terms and d(loss)/d(x) of M entries per pair.

    Args:
        x: [P, M] finite scores; where `sign` is 0 they count for nothing.
        sign: [P, M] float, +1 expand, -1 collapse, 0 none.
        span: tokens per entry for the first columns (the others span 1), or None when no term needs it.
        denominator: kept [P] -> the number of pairs to divide by.

    Returns:
        terms, kept [P], factor [P] (1/K for kept pairs), state, gradient [P, M] or None.
    """
    dtype, need_rank = x.dtype, "rank" in active
    # Both sides in one tensor: every later operation on them is one call.
    sides = sign.new_empty(2, *sign.shape)
    up = torch.clamp(sign, min=0, out=sides[0])
    down = torch.sub(up, sign, out=sides[1])
    nums = sides.sum(2)
    num = nums[0] + nums[1]
    kept = num > 0
    factor = kept / denominator(kept).to(dtype)
    aligned = sign * x
    x = aligned * sign
    terms: dict[str, Tensor] = {}
    grad: Tensor | None = None
    share, weight = span_weights if span_weights is not None else (None, None)
    if "pref" in active:
        scale, strength = pair_factors(pairs, config, dtype)
        downhill = -scale
        wrong = aligned.mul_(downhill[:, None])
        amount = strength if share is not None else strength / num.clamp(min=1)
        # Without weights the mass of an entry is 1, and 1 * sign is sign.
        plain = share is None and config.collapse_weight == 1
        mass = up + down if share is None else share
        if config.collapse_weight != 1:
            mass = mass * torch.add(1, down, alpha=config.collapse_weight - 1)
        hinge = None
        if config.form == "logistic":
            cost = torch.nn.functional.softplus(wrong)
        else:
            hinge = torch.relu(wrong + config.hinge_margin)
            cost = hinge if config.form == "hinge" else hinge * hinge
        terms["pref"] = torch.linalg.vecdot(cost, mass).mul_(amount)
        if need_grad:
            if hinge is None:
                slope = torch.sigmoid_(wrong)
            else:
                slope = (hinge > 0).to(dtype) if config.form == "hinge" else 2 * hinge
            slope = slope.mul_(sign) if plain else slope.mul_(mass).mul_(sign)
            grad = slope.mul_((downhill * amount).mul_(factor)[:, None])
    if need_rank:
        shares = nums.clamp(min=1).reciprocal_()
        means = torch.linalg.vecdot(sides, x if weight is None else x * weight).mul_(shares)
        # 1 when both signs occur, else 0.
        both = torch.minimum(nums[0], nums[1]).clamp_(max=1)
        shortfall = torch.relu((means[1] - means[0]).add_(config.margin)).mul_(both)
        terms["rank"] = shortfall
        if need_grad:
            push = (shortfall > 0) * factor * config.rank_weight
            rates = shares.mul_(push).unsqueeze(2)
            if weight is None:
                grad = torch.zeros_like(x) if grad is None else grad
                grad.addcmul_(up, rates[0], value=-1).addcmul_(down, rates[1])
            else:
                slope = (down * rates[1]).addcmul_(up, rates[0], value=-1).mul_(weight)
                grad = slope if grad is None else grad.add_(slope)
    if "budget" in active or "smooth" in active:
        assert span is not None
        wide = span.shape[1]
        mass = x if weight is None else x * weight
        mass[:, :wide].mul_(span)
        signed = mass.sum(1)
        size = torch.linalg.vector_norm(mass, 1, dim=1).add_(1e-6)
        imbalance = signed / size
        pull = None
        if "budget" in active:
            terms["budget"] = imbalance * imbalance
            pull = imbalance * (2 * config.budget_weight)
        if "smooth" in active:
            averages, state = smooth_budget(imbalance, kept, state, config.budget_smooth_beta)
            offset = torch.where(kept, imbalance - averages, 0)
            terms["smooth"] = offset * offset
            extra = offset * (2 * config.budget_smooth_weight)
            pull = extra if pull is None else pull + extra
        if need_grad:
            assert pull is not None
            # d'_j = span (1 - d sign(x)) / D for x != 0, which is the two cases of the derivation in one.
            pull = pull * factor / size
            side = mass.sign_()
            slope = (
                torch.addcmul(pull[:, None], side, (imbalance * pull)[:, None], value=-1)
                .mul_(side)
                .mul_(side)
            )
            slope[:, :wide].mul_(span)
            if weight is not None:
                slope *= weight
            grad = slope if grad is None else grad.add_(slope)
    if need_grad and grad is None:
        grad = torch.zeros_like(x)
    return terms, kept, factor, state, grad


def fused_loss(
    scores: Tensor,
    batch: LensBatch,
    pairs: Pairs,
    config: LensConfig,
    active: tuple[str, ...],
    state: Tensor,
    prev_scores: Tensor | None,
    prev_valid: Tensor | None,
    denominator: Denominator,
    *,
    sign: Tensor | None = None,
    span_weights: tuple[Tensor, Tensor | None] | None = None,
    need_grad: bool = True,
    on_built: Callable[[], None] | None = None,
) -> FusedOutput:
    """Loss and gradient of one micro-batch in plain torch operations.

    Args:
        scores: [V, W] in the compute dtype, detached.
        sign: [P, W] from `build_targets`, if it is already there; None lets this function choose a layout.
    """
    entries: CompactEntries | None = None
    if sign is None and can_compact(batch, config):
        entries = compact_entries(scores, batch, pairs, config)
        x, sign_PM, span = entries.x, entries.sign, entries.span
    else:
        sign = build_targets(batch, pairs, config) if sign is None else sign
        # Padding may hold anything, NaN included.
        x = torch.where(sign != 0, scores.index_select(0, pairs.worse), 0)
        sign_PM = sign.to(scores.dtype)
        span = None
        if "budget" in active or "smooth" in active:
            spans = span_table(config.block_size, config.max_lod, scores.device, scores.dtype)
            span = spans[batch.lod.long()].index_select(0, pairs.worse)
    if on_built is not None:
        on_built()
    terms, kept, factor, state, grad_PM = row_terms(
        x,
        sign_PM,
        span,
        pairs,
        config,
        active,
        state,
        denominator,
        need_grad=need_grad,
        span_weights=span_weights,
    )
    grad = None
    if grad_PM is not None and entries is not None:
        grad = entries.scatter_back(grad_PM, scores.shape)
    elif grad_PM is not None:
        grad = torch.zeros_like(scores).index_add_(0, pairs.worse, grad_PM)
    context_terms(scores, batch, pairs, config, active, prev_scores, prev_valid, terms, kept, factor, grad)
    total = total_of(terms, config)
    loss = scores.new_zeros(()) if total is None else torch.dot(total, factor)
    return FusedOutput(loss, terms, kept, state, grad)


def context_terms(
    scores: Tensor,
    batch: LensBatch,
    pairs: Pairs,
    config: LensConfig,
    active: tuple[str, ...],
    prev_scores: Tensor | None,
    prev_valid: Tensor | None,
    terms: dict[str, Tensor],
    kept: Tensor,
    factor: Tensor,
    grad: Tensor | None,
) -> None:
    """KL and coverage: computed per context, spread to pairs; updates `terms` and `grad` in place."""
    if not (("kl" in active and prev_scores is not None) or "coverage" in active):
        return
    # How much of the loss each context carries: the sum of 1/K over its pairs.
    load_V1 = scores.new_zeros(scores.shape[0]).index_add_(0, pairs.worse, factor)[:, None]
    if "kl" in active and prev_scores is not None:
        tau = config.tau
        x = torch.where(batch.valid, scores, 0)
        before = torch.where(batch.valid, prev_scores.detach().to(scores.dtype), 0)
        q, difference = torch.sigmoid(x / tau), (x - before) / tau
        step = q - torch.sigmoid(before / tau)
        count = batch.valid.sum(1).clamp(min=1)
        mean = 0.5 * (step * difference).sum(1) / count
        usable = torch.ones_like(count, dtype=torch.bool) if prev_valid is None else prev_valid
        terms["kl"] = torch.where(kept, torch.where(usable, mean, 0).index_select(0, pairs.worse), 0)
        if grad is not None:
            slope = (step + q * (1 - q) * difference) * (0.5 / tau) / count[:, None]
            grad += torch.where(usable[:, None] & batch.valid, slope, 0) * (load_V1 * config.kl_weight)
    if "coverage" in active:
        penalty, slope = coverage_gradient(scores, batch, config)
        terms["coverage"] = torch.where(kept, penalty.index_select(0, pairs.worse), 0)
        if grad is not None:
            grad += slope * (load_V1 * config.coverage_weight)
