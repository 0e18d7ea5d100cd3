"""Loss and gradient in closed form, without autograd.

Rows have two layouts. Dense: all W entries of the worse context. Compact: a flat list of the entries that can
have a target, which are the worse context's gists and the blocks under the better context's gists. A raw
token has a target only if the better context has a gist in its block, and gists are few: at 2,048 tokens and
1,831 entries there are 7, so 231 entries per pair are read instead of 1,831. Binary search finds the blocks:
the starts inside an aligned block are consecutive entries.

V contexts · W padded length · P pairs · G gists per context · b block size · M entries read per pair
(W, or G + G * b)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leanstep.lens.batch import GIST_STEP, LensBatch
from leanstep.lens.lens_config import LensConfig
from leanstep.lens.lens_terms import LossCall, coverage_gradient, smooth_budget, total_of
from leanstep.lens.pairs import Pairs, build_targets, pair_factors, span_table


@dataclass
class ClosedForm:
    """Loss, terms per pair, which pairs have a target, state, and d loss / d scores (None if not needed).

    `entries`: [P, M] scores and signs of the entries that were read, for metrics; None from a kernel.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    has_target: Tensor
    state: Tensor
    grad: Tensor | None
    entries: tuple[Tensor, Tensor] | None = None


class AttachGradient(torch.autograd.Function):
    """Attach a gradient that is already known to a loss."""

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


def closed_form_loss(call: LossCall) -> ClosedForm:
    """Compute loss and gradient of one micro-batch in torch operations; scores detached, in compute dtype."""
    scores, batch, pairs, config = call.scores, call.batch, call.pairs, call.config
    entries: CompactEntries | None = None
    sign = call.sign
    if sign is None and can_compact(batch, config):
        entries = compact_entries(scores, batch, pairs, config)
        x, sign_PM, span = entries.x, entries.sign, entries.span
    else:
        sign = build_targets(batch, pairs, config) if sign is None else sign
        # Padding may contain any value, including NaN.
        x = torch.where(sign != 0, scores.index_select(0, pairs.worse), 0)
        sign_PM = sign.to(scores.dtype)
        span = None
        if "budget" in call.active or "smooth" in call.active:
            spans = span_table(config, scores.device, scores.dtype)
            span = spans[batch.lod.long()].index_select(0, pairs.worse)
    call.built()
    rows = row_terms(call, x, sign_PM, span)
    grad = None
    if rows.grad is not None and entries is not None:
        grad = entries.scatter_back(rows.grad, scores.shape)
    elif rows.grad is not None:
        grad = torch.zeros_like(scores).index_add_(0, pairs.worse, rows.grad)
    context_terms(call, scores, rows.terms, rows.has_target, rows.factor, grad)
    total = total_of(rows.terms, config)
    loss = scores.new_zeros(()) if total is None else torch.dot(total, rows.factor)
    return ClosedForm(loss, rows.terms, rows.has_target, rows.state, grad, (x, sign_PM))


@dataclass
class RowTerms:
    """Terms that are sums over M entries of each pair, and their gradient; every `add_` method adds to both.

    Args:
        call: the call of the objective.
        x: [P, M] scores, 0 where an entry has no target. `add_budget` overwrites it.
        sign: [P, M] float, +1 expand, -1 collapse, 0 none.
        sides: [2, P, M] 1 where an entry should expand ([0]) or collapse ([1]). Both sides share one tensor,
            so that an operation on them is one call.
        up, down: [P, M] the two sides.
        counts: [2, P] entries per side.
        num_masked: [P] entries of both sides.
        has_target: [P] bool, whether the pair has a target.
        factor: [P] weight of the pair in the loss: 1/K for the K pairs with a target, else 0.
        state: moving average of the budget imbalance.
        terms: [P] each, by name.
        grad: [P, M] d loss / d x, None before the first term or if it is not needed.
    """

    call: LossCall
    x: Tensor
    sign: Tensor
    sides: Tensor
    up: Tensor
    down: Tensor
    counts: Tensor
    num_masked: Tensor
    has_target: Tensor
    factor: Tensor
    state: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)
    grad: Tensor | None = None

    def add_preference(self, aligned: Tensor) -> None:
        """Add the cost of scores with the wrong sign; overwrites `aligned` = sign * x."""
        objective, dtype = self.call.config.objective, self.x.dtype
        share = None if self.call.span_weights is None else self.call.span_weights[0]
        scale, strength = pair_factors(self.call.pairs, self.call.config, dtype)
        downhill = -scale
        wrong = aligned.mul_(downhill[:, None])
        amount = strength if share is not None else strength / self.num_masked.clamp(min=1)
        # Without weights the mass of an entry is 1, and 1 * sign is sign.
        plain = share is None and objective.collapse_weight == 1
        mass = self.up + self.down if share is None else share
        if objective.collapse_weight != 1:
            mass = mass * torch.add(1, self.down, alpha=objective.collapse_weight - 1)
        hinge = None
        if objective.form == "logistic":
            cost = torch.nn.functional.softplus(wrong)
        else:
            hinge = torch.relu(wrong + objective.hinge_margin)
            cost = hinge if objective.form == "hinge" else hinge * hinge
        self.terms["pref"] = torch.linalg.vecdot(cost, mass).mul_(amount)
        if self.call.need_grad:
            if hinge is None:
                slope = torch.sigmoid_(wrong)
            else:
                slope = (hinge > 0).to(dtype) if objective.form == "hinge" else 2 * hinge
            slope = slope.mul_(self.sign) if plain else slope.mul_(mass).mul_(self.sign)
            self._add_gradient(slope.mul_((downhill * amount).mul_(self.factor)[:, None]))

    def add_rank(self) -> None:
        """Add the shortfall of (mean score to expand - mean score to collapse) from `margin`."""
        objective = self.call.config.objective
        weight = None if self.call.span_weights is None else self.call.span_weights[1]
        shares = self.counts.clamp(min=1).reciprocal_()
        means = torch.linalg.vecdot(self.sides, self.x if weight is None else self.x * weight).mul_(shares)
        # 1 if both signs occur, else 0.
        both = torch.minimum(self.counts[0], self.counts[1]).clamp_(max=1)
        shortfall = torch.relu((means[1] - means[0]).add_(objective.margin)).mul_(both)
        self.terms["rank"] = shortfall
        if self.call.need_grad:
            push = (shortfall > 0) * self.factor * objective.rank_weight
            rates = shares.mul_(push).unsqueeze(2)
            if weight is None:
                self.grad = torch.zeros_like(self.x) if self.grad is None else self.grad
                self.grad.addcmul_(self.up, rates[0], value=-1).addcmul_(self.down, rates[1])
            else:
                slope = (self.down * rates[1]).addcmul_(self.up, rates[0], value=-1)
                self._add_gradient(slope.mul_(weight))

    def add_budget(self, span: Tensor) -> None:
        """Add the imbalance of the requested tokens and its distance from the moving average; overwrites `x`.

        Args:
            span: tokens per entry for the first columns; the other entries span 1 token.
        """
        objective, active, wide = self.call.config.objective, self.call.active, span.shape[1]
        weight = None if self.call.span_weights is None else self.call.span_weights[1]
        mass = self.x if weight is None else self.x * weight
        mass[:, :wide].mul_(span)
        signed = mass.sum(1)
        size = torch.linalg.vector_norm(mass, 1, dim=1).add_(1e-6)
        imbalance = signed / size
        pull = None
        if "budget" in active:
            self.terms["budget"] = imbalance * imbalance
            pull = imbalance * (2 * objective.budget_weight)
        if "smooth" in active:
            averages, self.state = smooth_budget(
                imbalance, self.has_target, self.state, objective.budget_smooth_beta
            )
            offset = torch.where(self.has_target, imbalance - averages, 0)
            self.terms["smooth"] = offset * offset
            extra = offset * (2 * objective.budget_smooth_weight)
            pull = extra if pull is None else pull + extra
        if self.call.need_grad:
            assert pull is not None
            # d'_j = span (1 - d sign(x)) / D for x != 0 covers both cases of the derivation.
            pull = pull * self.factor / size
            side = mass.sign_()
            slope = torch.addcmul(pull[:, None], side, (imbalance * pull)[:, None], value=-1)
            slope.mul_(side).mul_(side)
            slope[:, :wide].mul_(span)
            if weight is not None:
                slope *= weight
            self._add_gradient(slope)

    def _add_gradient(self, slope: Tensor) -> None:
        self.grad = slope if self.grad is None else self.grad.add_(slope)


def row_terms(call: LossCall, x: Tensor, sign: Tensor, span: Tensor | None) -> RowTerms:
    """Compute the row terms and d(loss)/d(x) of M entries per pair.

    Args:
        x: [P, M] finite scores; ignored where `sign` is 0.
        sign: [P, M] float, +1 expand, -1 collapse, 0 none.
        span: tokens per entry for the first columns (the others span 1), or None if no term needs it.
    """
    sides = sign.new_empty(2, *sign.shape)
    up = torch.clamp(sign, min=0, out=sides[0])
    down = torch.sub(up, sign, out=sides[1])
    counts = sides.sum(2)
    num_masked = counts[0] + counts[1]
    has_target = num_masked > 0
    factor = has_target / call.denominator(has_target).to(x.dtype)
    aligned = sign * x
    rows = RowTerms(
        call=call,
        x=aligned * sign,
        sign=sign,
        sides=sides,
        up=up,
        down=down,
        counts=counts,
        num_masked=num_masked,
        has_target=has_target,
        factor=factor,
        state=call.state,
    )
    if "pref" in call.active:
        rows.add_preference(aligned)
    if "rank" in call.active:
        rows.add_rank()
    if "budget" in call.active or "smooth" in call.active:
        assert span is not None
        rows.add_budget(span)
    if call.need_grad and rows.grad is None:
        rows.grad = torch.zeros_like(x)
    return rows


def context_terms(
    call: LossCall,
    scores: Tensor,
    terms: dict[str, Tensor],
    has_target: Tensor,
    factor: Tensor,
    grad: Tensor | None,
) -> None:
    """Add KL and coverage, computed per context, to the pairs; updates `terms` and `grad` in place."""
    batch, pairs, config, active = call.batch, call.pairs, call.config, call.active
    prev_scores, prev_valid = call.prev_scores, call.prev_valid
    if not (("kl" in active and prev_scores is not None) or "coverage" in active):
        return
    scores = scores.to(factor.dtype)
    # The weight of each context in the loss: the sum of 1/K over its pairs.
    load_V1 = scores.new_zeros(scores.shape[0]).index_add_(0, pairs.worse, factor)[:, None]
    if "kl" in active and prev_scores is not None:
        tau = config.objective.tau
        x = torch.where(batch.valid, scores, 0)
        before = torch.where(batch.valid, prev_scores.detach().to(scores.dtype), 0)
        q, difference = torch.sigmoid(x / tau), (x - before) / tau
        step = q - torch.sigmoid(before / tau)
        count = batch.valid.sum(1).clamp(min=1)
        mean = 0.5 * (step * difference).sum(1) / count
        usable = torch.ones_like(count, dtype=torch.bool) if prev_valid is None else prev_valid
        terms["kl"] = torch.where(has_target, torch.where(usable, mean, 0).index_select(0, pairs.worse), 0)
        if grad is not None:
            slope = (step + q * (1 - q) * difference) * (0.5 / tau) / count[:, None]
            grad += torch.where(usable[:, None] & batch.valid, slope, 0) * (
                load_V1 * config.objective.kl_weight
            )
    if "coverage" in active:
        penalty, slope = coverage_gradient(scores, batch, config)
        terms["coverage"] = torch.where(has_target, penalty.index_select(0, pairs.worse), 0)
        if grad is not None:
            grad += slope * (load_V1 * config.objective.coverage_weight)


@dataclass
class CompactEntries:
    """M candidate entries of each pair.

    Args:
        cell: [P, M] int64 index into the flattened [V, W] scores.
        x: [P, M] their scores, 0 where an entry has no target.
        sign: [P, M] +1 expand, -1 collapse, 0 none, in the scores' dtype.
        span: [P, G] tokens under the first G columns; the others are raw tokens.
    """

    cell: Tensor
    x: Tensor
    sign: Tensor
    span: Tensor

    def scatter_back(self, grad: Tensor, shape: torch.Size) -> Tensor:
        """Sum [P, M] over pairs to [V, W], in a fixed order."""
        flat = grad.new_zeros(shape.numel())
        return flat.scatter_add_(0, self.cell.view(-1), grad.view(-1)).view(shape)


def can_compact(batch: LensBatch, config: LensConfig) -> bool:
    """Return whether the gist lists are known and short enough to save time."""
    if batch.gists is None:
        return False
    return batch.gists.rows.shape[2] * (config.block_size + 1) <= batch.pos.shape[1] // 2


def compact_entries(scores: Tensor, batch: LensBatch, pairs: Pairs, config: LensConfig) -> CompactEntries:
    """Return the candidates of every pair with their signs; contexts must not overlap (see `list_gists`)."""
    gists = batch.gists
    assert gists is not None
    # numpy: for a few hundred numbers the overhead of a torch call exceeds its work.
    all_rows, key = gists.rows.numpy(), gists.key.numpy()
    worse, better, live = (t.numpy() for t in (pairs.worse, pairs.better, pairs.live))
    b, num_pairs, num_gists = config.block_size, len(worse), all_rows.shape[2]
    block = b * GIST_STEP
    # A context compared with itself has no target, which removes pairs that are not live.
    both = np.stack([worse, np.where(live, better, worse)])
    mine = all_rows.take(both, axis=0)  # [2, P, 4, G]
    lod_worse = mine[0, :, 2]
    # [0]: the worse context's gists looked up in the better context; [1]: the reverse.
    query = mine[:, :, 1] + both[::-1, :, None] * gists.stride
    block_at = query[1] - query[1] % block
    slot = np.searchsorted(key, np.concatenate([query.reshape(-1), block_at.reshape(-1)]))
    slot = slot.reshape(3, num_pairs, num_gists)
    # Key minus query is the LOD if an entry starts exactly there, and at least 8 otherwise.
    lod_there = key.take(slot[:2]) - query
    # A block without a request is compared with a distant start, which matches nothing.
    compare_at = np.where(lod_there[1] == 0, block_at, -(1 << 60))
    cell_block = np.minimum(slot[2], scores.numel() - b)[:, :, None] + np.arange(b)
    offset = key.take(cell_block) - compare_at[:, :, None]
    if b & (b - 1) == 0:
        raw = (offset & ~(block - GIST_STEP)) == 0
    else:
        raw = (offset >= 0) & (offset < block) & (offset % GIST_STEP == 0)
    # Gists expand, raw tokens collapse.
    sign = np.empty((num_pairs, num_gists * (1 + b)), dtype=np.int8)
    sign[:, :num_gists] = lod_there[0] < lod_worse
    np.negative(
        raw.reshape(num_pairs, num_gists * b), out=sign[:, num_gists:], dtype=np.int8, casting="unsafe"
    )
    for level in range(1, min(config.max_lod, gists.top_level)):
        _collapse_gists(sign[:, :num_gists], mine[0], mine[1], level, b)
    cell = torch.from_numpy(np.concatenate([mine[0, :, 0], cell_block.reshape(num_pairs, num_gists * b)], 1))
    x = scores.reshape(-1).index_select(0, cell.view(-1)).view(cell.shape)
    return CompactEntries(
        cell=cell,
        # A block may extend into padding, which may contain any value, including NaN.
        x=x.masked_fill_(torch.from_numpy(sign == 0), 0),
        sign=torch.from_numpy(sign).to(scores.dtype),
        span=torch.from_numpy(mine[0, :, 3]).to(scores.dtype),
    )


def _collapse_gists(sign: Any, worse: Any, better: Any, level: int, block_size: int) -> None:
    """Mark gists of `level` to collapse if the better context is coarser there."""
    start_worse, lod_worse, start_better, lod_better = worse[:, 1], worse[:, 2], better[:, 1], better[:, 2]
    parent = block_size ** (level + 1) * GIST_STEP
    at_level = lod_worse == level
    if not at_level.any() or not (lod_better > level).any():
        return
    same_start = start_worse[:, :, None] == start_better[:, None, :]
    asks = (same_start & at_level[:, :, None]).any(1) & (lod_better > level)
    same_parent = (start_worse // parent)[:, :, None] == (start_better // parent)[:, None, :]
    sign[(same_parent & asks[:, None, :]).any(2) & at_level] = -1
