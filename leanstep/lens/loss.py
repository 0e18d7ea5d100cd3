"""The controller objective as one page of torch operations: autograd, static shapes, no host reads.

Contexts are laid out by start token, not by entry. Two contexts then compare elementwise, and an aligned
block is b neighbors: a collapse request reaches its block by a maximum over the last dimension of
[P, T / b, b]. Masks are 0 / 1 numbers: on a CPU, int8 arithmetic is ten times as fast as `where` or a
comparison with a scalar.

V contexts · W padded entries · B samples · C variants per sample · P pairs · b block size · L coarsest level
T tokens per sequence, padded to whole blocks
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from leanstep.lens.batch import LensBatch, owned_tokens
from leanstep.lens.config import LensConfig
from leanstep.lens.metrics import LensMetrics, LensResult


class Pairs(NamedTuple):
    """P pairs of contexts in processing order.

    Equivalent to, for a pair k of one sample:
        delta = loss_of[pairs.worse[k]] - loss_of[pairs.better[k]]          # pairs.delta[k]

    Args:
        better, worse: [P] int64, rows of the scores; equal for a slot without a pair or with delta = 0.
        delta: [P] loss of the worse minus that of the better, in the losses' dtype; 0 without a pair.
        valid: [P] bool, whether the slot holds a pair.
    """

    better: Tensor
    worse: Tensor
    delta: Tensor
    valid: Tensor


def lens_loss(
    scores: Tensor,
    batch: LensBatch,
    config: LensConfig,
    *,
    state: Tensor | None = None,
    prev_scores: Tensor | None = None,
    prev_valid: Tensor | None = None,
    pair_order: Tensor | None = None,
    terms: Iterable[str] | None = None,
    generator: torch.Generator | None = None,
) -> LensResult:
    """Compute the loss of the controller's scores against the base model's preferences.

    The mean over the pairs with a target of pref + rank + budget + smooth + kl + coverage, each with its
    weight.

    Equivalent to:
        lens_loss_reference(scores, batch, config)

    Args:
        scores: [V, W] any float dtype; padded entries are not used. Sums run in float32, float64 for float64.
        batch: the contexts and their losses.
        state: 0-d moving average of the budget imbalance from the previous call; None = 0.
        prev_scores: [V, W] scores of a previous policy on the same contexts; they receive no gradient.
        prev_valid: [V] bool, contexts whose `prev_scores` may be used.
        pair_order: [P] permutation of the pair slots; it matters only to the moving average.
        terms: the terms to compute (of those with a weight above 0); None = all of them.
        generator: for pair and span sampling.

    Returns:
        LensResult; `loss` is 0 with zero gradient if no pair has a target.

    Host syncs: none. Cost: O(V T + P T). Peak extra memory: a few [P, T] tensors. On a GPU, torch.compile.
    Do not use with one variant per sample: there is nothing to compare, and the loss is 0.
    """
    _check(scores, batch, state, prev_scores, prev_valid)
    objective, sampling, b = config.objective, config.sampling, config.block_size
    active, tau = objective.active_terms(terms), objective.tau
    x_VW = scores if scores.dtype == torch.float64 else scores.float()
    state = x_VW.new_zeros(()) if state is None else state.detach().to(x_VW.dtype)
    with torch.no_grad():
        pairs = build_pairs(batch.loss, batch.row, config, pair_order)
        pairs = sample_pairs(pairs, config, generator)
        level_VT = level_grid(batch, config)
        up_PT, down_PT = build_targets(level_VT, pairs, config, x_VW.dtype)
        num_up, num_down = up_PT.sum(1), down_PT.sum(1)
        num = num_up + num_down
        has_target = num > 0
        # In the dtype of the losses first: a delta may be far below the float32 resolution of a loss.
        scale = (pairs.delta.clamp(min=1) / tau).to(x_VW.dtype)
        strength = pairs.delta.tanh().clamp(min=1e-6).to(x_VW.dtype)
    x_PT = token_grid(x_VW, batch, b).index_select(0, pairs.worse)
    wrong_PT = x_PT * ((down_PT - up_PT) * scale[:, None])  # above 0: the score has the wrong sign
    seen = x_PT.detach(), up_PT, down_PT

    weight_PT = torch.add(up_PT, down_PT, alpha=objective.collapse_weight)
    if sampling.span_sampling != "none":
        with torch.no_grad():
            share_PT = sample_spans(wrong_PT, up_PT + down_PT, weight_PT, config, generator)
            weight_PT = weight_PT * share_PT
            if not sampling.aux_on_full:  # sums over the sample estimate sums over all entries
                up_PT, down_PT = up_PT * share_PT, down_PT * share_PT
    values: dict[str, Tensor] = {}
    if "pref" in active:
        if objective.form == "logistic":
            cost_PT = F.softplus(wrong_PT)
        else:
            cost_PT = torch.relu(wrong_PT + objective.hinge_margin)
            cost_PT = cost_PT if objective.form == "hinge" else cost_PT * cost_PT
        values["pref"] = (cost_PT * weight_PT).sum(1) * (strength / num.clamp(min=1))
    if "rank" in active:
        mean_up = (x_PT * up_PT).sum(1) / num_up.clamp(min=1)
        mean_down = (x_PT * down_PT).sum(1) / num_down.clamp(min=1)
        both = torch.minimum(num_up, num_down).clamp(max=1)
        values["rank"] = torch.relu(objective.margin - (mean_up - mean_down)) * both
    if "budget" in active or "smooth" in active:
        with torch.no_grad():
            span_PT = span_grid(level_VT, config, x_VW.dtype).index_select(0, pairs.worse) * (up_PT + down_PT)
        mass_PT = x_PT * span_PT
        # Not mass.sum() / mass.abs().sum(): the same value, but a score of exactly 0 must get no gradient.
        positive, negative = torch.relu(mass_PT).sum(1), torch.relu(-mass_PT).sum(1)
        imbalance = (positive - negative) / (positive + negative + 1e-6)
        if "budget" in active:
            values["budget"] = imbalance * imbalance
        if "smooth" in active:
            average, state = smooth(imbalance.detach(), has_target, state, objective.budget_smooth_beta)
            values["smooth"] = (imbalance - average) ** 2 * has_target
    if "kl" in active and prev_scores is not None:
        # The symmetric divergence of the Bernoulli policies sigmoid(x / tau), mean over a context's entries.
        x, before = x_VW.where(batch.valid, 0), prev_scores.detach().to(x_VW.dtype).where(batch.valid, 0)
        kl_VW = 0.5 * (torch.sigmoid(x / tau) - torch.sigmoid(before / tau)) * (x - before) / tau
        kl = kl_VW.sum(1) / batch.valid.sum(1).clamp(min=1)
        kl = kl if prev_valid is None else kl.where(prev_valid, 0)
        values["kl"] = kl.index_select(0, pairs.worse) * has_target
    if "coverage" in active:
        values["coverage"] = coverage(x_VW, batch, config).index_select(0, pairs.worse) * has_target

    # The empty sum attaches the loss to the scores even if no term is active.
    total = x_VW[:0].sum() + sum(objective.weights[name] * value for name, value in values.items())
    num_kept = has_target.sum()
    if objective.normalize == "global":
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise ValueError('normalize: "global" needs an initialized torch.distributed process group')
        torch.distributed.all_reduce(num_kept)
    loss = total.sum() / num_kept.clamp(min=1)
    if objective.normalize == "global":  # averaging gradients over ranks divides by their number again
        loss = loss * torch.distributed.get_world_size()
    detached = {name: value.detach() for name, value in values.items()}
    metrics = LensMetrics(
        scores.detach(), batch, config, pairs, has_target, seen, detached, loss.detach(), state
    )
    return LensResult(loss, detached, has_target, True, state, pairs, metrics, metrics.scores)


def pairs_per_sample(num_variants: int, config: LensConfig) -> int:
    return min(config.sampling.max_pairs, math.comb(num_variants, 2))


def build_pairs(loss: Tensor, row: Tensor, config: LensConfig, order: Tensor | None = None) -> Pairs:
    """Build the pairs of every sample from its variants' losses.

    Variants are sorted by loss (stable). Pairs with the best variant come first, then all others, each list
    by delta descending (stable). `hard_negative_ratio` shortens the second list, `max_pairs` both together.

    Equivalent to, for sample s (`reference_pairs` in reference.py):
        listed = reference_pairs(batch.loss[s], config, s)       # (sample, better, worse, delta)

    Args:
        loss: [B, C]; NaN excludes a variant.
        row: [B, C] int64, the context of each variant.
        order: [P] permutation of the slots; None = the order above, samples ascending.

    Returns:
        Pairs with P = B * min(max_pairs, C * (C - 1) / 2) slots.
    """
    num_variants = loss.shape[1]
    sorted_loss, rank = loss.sort(dim=1, stable=True)  # NaN last
    first, second = torch.triu_indices(num_variants, num_variants, 1, device=loss.device).unbind(0)
    gap = sorted_loss.index_select(1, first) - sorted_loss.index_select(1, second)  # minus delta; NaN last
    gap, pick = gap.sort(dim=1, stable=True)
    # Pairs with the best variant, then the others, then missing ones.
    group = (pick >= num_variants - 1).to(torch.int8) + 2 * (gap != gap).to(torch.int8)
    by_group = group.sort(dim=1, stable=True).indices
    gap, pick = gap.gather(1, by_group), pick.gather(1, by_group)
    if config.sampling.hard_negative_ratio < 1:
        scored = (loss == loss).sum(1, keepdim=True)
        others = ((scored - 1) * (scored - 2) // 2).double()
        limit = scored - 1 + (others * config.sampling.hard_negative_ratio).ceil().clamp(min=1)
        gap = gap.where(torch.arange(gap.shape[1], device=gap.device) < limit, torch.nan)
    slots = pairs_per_sample(num_variants, config)
    gap, pick, context = gap[:, :slots], pick[:, :slots], row.gather(1, rank)
    better, worse = context.gather(1, first[pick]), context.gather(1, second[pick])
    live = gap < 0  # False for NaN
    better, delta = better.where(live, worse), (-gap).where(live, 0)
    pairs = (better.reshape(-1), worse.reshape(-1), delta.reshape(-1), (gap == gap).reshape(-1))
    if order is None:
        return Pairs(*pairs)
    if order.shape != pairs[0].shape:
        raise ValueError(
            f"pair_order: expected a permutation of shape {tuple(pairs[0].shape)}, got {tuple(order.shape)}"
        )
    return Pairs(*(t.index_select(0, order) for t in pairs))


def sample_pairs(pairs: Pairs, config: LensConfig, generator: torch.Generator | None) -> Pairs:
    """Sample the pairs with delta > 0: the others get delta = 0, which has no targets and does not count.

    `pairs_per_variant` keeps the largest deltas of each worse context, which is biased on purpose.
    `pair_sampling="random"` draws `pairs_sampled` of the pairs uniformly: their mean is an unbiased estimate
    of the mean over all pairs if each of these has a target.
    """
    sampling, live = config.sampling, pairs.delta > 0
    if sampling.pairs_per_variant is None and sampling.pair_sampling == "none":
        return pairs
    if sampling.pairs_per_variant is not None:
        # The pairs of the same worse context that come before by (delta, slot).
        slot = torch.arange(live.shape[0], device=live.device)
        same = (pairs.worse[:, None] == pairs.worse) & live
        tie = (pairs.delta == pairs.delta[:, None]) & (slot < slot[:, None])
        live = live & (
            (same & ((pairs.delta > pairs.delta[:, None]) | tie)).sum(1) < sampling.pairs_per_variant
        )
    if sampling.pair_sampling == "random":
        assert sampling.pairs_sampled is not None
        key = _uniform(live.shape, generator, live.device).where(live, 2.0)
        live = live & (key.argsort().argsort() < sampling.pairs_sampled)
    return Pairs(pairs.better.where(live, pairs.worse), pairs.worse, pairs.delta.where(live, 0), pairs.valid)


def sample_spans(
    wrong_PT: Tensor,
    masked_PT: Tensor,
    weight_PT: Tensor,
    config: LensConfig,
    generator: torch.Generator | None,
) -> Tensor:
    """Return [P, T]: n / K for the K sampled ones of n entries with a target, 0 for the others.

    `topk` takes the `span_k` entries with the steepest preference cost (ties: the first ones). It is biased
    on purpose, towards mistakes. `random` draws `span_k` entries uniformly without replacement; `stride`
    takes every `span_stride`-th entry from a random start. With both, the expectation of the preference term
    equals the full term.

    Args:
        wrong_PT: minus sign * score * scale.
        masked_PT: 1 for an entry with a target, else 0. weight_PT: its weight in the preference term.
    """
    sampling, num, masked_PT = config.sampling, masked_PT.sum(1), masked_PT > 0
    if sampling.span_sampling == "stride":
        phase = (_uniform(num.shape, generator, num.device) * sampling.span_stride).long()
        index = masked_PT.cumsum(1) - 1
        return (masked_PT & ((index - phase[:, None]) % sampling.span_stride == 0)) * float(
            sampling.span_stride
        )
    if sampling.span_sampling == "random":
        key = _uniform(wrong_PT.shape, generator, wrong_PT.device)
    elif config.objective.form == "logistic":
        key = torch.sigmoid(wrong_PT) * weight_PT
    else:
        key = torch.relu(wrong_PT + config.objective.hinge_margin) * weight_PT
    rank = key.where(masked_PT, -1).argsort(dim=1, descending=True, stable=True).argsort(1)
    return (masked_PT & (rank < sampling.span_k)) * (num / num.clamp(1, sampling.span_k))[:, None]


def _uniform(shape: Sequence[int], generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Draw where the generator is; a copy from the host does not wait for the device."""
    drawn = torch.rand(shape, generator=generator, device=device if generator is None else generator.device)
    return drawn.to(device, non_blocking=True)


def token_grid(value_VW: Tensor, batch: LensBatch, block_size: int) -> Tensor:
    """Return [V, T]: the value of the entry that starts at each token, 0 for none."""
    num_tokens = batch.num_tokens
    grid = value_VW.new_zeros(value_VW.shape[0], num_tokens + 1).scatter(1, batch.pos, value_VW)
    return F.pad(grid[:, :num_tokens], (0, -num_tokens % block_size))  # the dropped column holds the padding


def level_grid(batch: LensBatch, config: LensConfig) -> Tensor:
    """Return [V, T] int8: 1 + LOD of the entry that starts at each token, 0 for none."""
    return token_grid(batch.lod + 1, batch, config.block_size)


def span_grid(level_VT: Tensor, config: LensConfig, dtype: torch.dtype) -> Tensor:
    """Return [V, T]: tokens under the entry that starts at each token, 0 for none."""
    span = level_VT.clamp(max=1).to(dtype)
    for lod in range(1, config.max_lod + 1):
        step = config.block_size**lod - config.block_size ** (lod - 1)
        span = torch.add(span, (level_VT - lod).clamp(0, 1).to(dtype), alpha=step)
    return span


def build_targets(
    level_VT: Tensor, pairs: Pairs, config: LensConfig, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return up and down [P, T]: 1 where the entry of the worse context should expand or collapse, else 0.

    A collapse request reaches every entry of the same LOD in its aligned parent block and wins over expand.

    Equivalent to, for pair k (contexts as lists of (position, lod); `reference_targets` in reference.py):
        row = torch.tensor(reference_targets(better, worse, float(pairs.delta[k]), config)).sign()
        same = (up - down)[k].gather(0, batch.pos[pairs.worse[k]])
    """
    b = config.block_size
    want, have = level_VT.index_select(0, pairs.better), level_VT.index_select(0, pairs.worse)
    # +1 the better context is coarser here, -1 finer, 0 equal or no entry in one of the two.
    opinion = (want - have).sign() * want.clamp(max=1) * have.clamp(max=1)
    asks = opinion.clamp(min=0)
    expand = (asks - opinion).to(dtype)
    down = torch.zeros_like(expand)
    for lod in range(config.max_lod):
        at_lod = (have - lod).clamp(0, 1) - (have - lod - 1).clamp(0, 1)
        reached = (asks * at_lod).to(dtype).unflatten(1, (-1, b)).amax(2)  # [P, T / b]
        reached = _spread(reached, min(b**lod, reached.shape[1]))
        down = down + (at_lod.to(dtype).unflatten(1, (-1, b)) * reached[:, :, None]).view_as(down)
    return expand * (1 - down), down


def _spread(flag: Tensor, group: int) -> Tensor:
    """Return the maximum over each aligned group of columns, in every column of the group."""
    if group == 1:
        return flag
    whole = F.pad(flag, (0, -flag.shape[1] % group)).unflatten(1, (-1, group))
    return whole.amax(2, keepdim=True).expand_as(whole).flatten(1)[:, : flag.shape[1]]


def smooth(imbalance: Tensor, has_target: Tensor, state: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the moving average after each pair with a target [P] and after the last one, without a scan."""
    count = has_target.to(imbalance.dtype).cumsum(0)
    # Pairs i <= k with a target have the weight (1 - beta) beta^(count_k - count_i).
    weight = torch.exp((count[:, None] - count).clamp(min=0) * math.log(beta)).tril() * (1 - beta)
    average = torch.exp(count * math.log(beta)) * state + weight @ (imbalance * has_target)
    return average, average[-1] if len(average) else state


def coverage(scores: Tensor, batch: LensBatch, config: LensConfig) -> Tensor:
    """Return the share of the sequence [V] that the edits push out beyond what `coverage_target` allows.

    The oldest entries are pushed out first, once the expected length exceeds the capacity. The penalty is
    zero for zero scores and for pure collapse, unless the capacity is below the current length.

    Equivalent to, for one context (`reference_coverage` in reference.py):
        value = reference_coverage(list(scores[v]), list(zip(pos[v].tolist(), lod[v].tolist())), 64, config)
    """
    b, valid = config.block_size, batch.valid
    x = scores.where(valid, 0)
    own = owned_tokens(batch, config) / batch.tokens[:, None].to(x.dtype)
    expand = torch.relu(x).clamp(max=1) * (batch.lod > 0)
    collapse = torch.relu(-x).clamp(max=1) * (batch.lod < config.max_lod)
    length = (1 + (b - 1) * expand - (1 - 1 / b) * collapse).where(valid, 0)
    newer = length.flip(1).cumsum(1).flip(1) - length
    capacity = config.objective.coverage_capacity
    share = ((valid.sum(1, keepdim=True) if capacity is None else capacity) - newer) / length.where(valid, 1)
    # Only an entry that is partly pushed out has a gradient: clamp alone passes it at the limits too.
    share = share.where((share > 0) & (share < 1), share.detach().clamp(0, 1))
    return torch.relu(own.sum(1).clamp(max=config.objective.coverage_target) - (own * share).sum(1))


def check_variant_counts(
    counts: Sequence[int],
    micro_batch: int,
    n_random: int,
    *,
    max_pairs: int = 8,
    num_pairs: int | None = None,
) -> int:
    """Raise if a micro-step has more variants or pairs than expected; return the number of variants.

    >>> check_variant_counts([3, 1, 2], micro_batch=3, n_random=2, num_pairs=4)
    6

    Args:
        counts: variants per sample, host integers.
        micro_batch: samples per micro-step.
        n_random: random variants per sample; duplicates are dropped, so fewer than 1 + n_random is legal.
        max_pairs: maximum number of pairs per sample.
        num_pairs: actual number of pairs, or None to skip that check.

    Returns:
        The total number of variants: 39 for 13 samples with 1 + 2 variants each.
    """
    if len(counts) != micro_batch:
        raise ValueError(f"counts: expected {micro_batch} samples, got {len(counts)}")
    for sample, count in enumerate(counts):
        if not 1 <= count <= 1 + n_random:
            raise ValueError(f"counts: sample {sample} has {count} variants, expected 1..{1 + n_random}")
    total = sum(counts)
    limit = sum(min(max_pairs, math.comb(count, 2)) for count in counts)
    if num_pairs is not None and num_pairs > limit:
        raise ValueError(f"num_pairs: {num_pairs} pairs from {total} variants, expected at most {limit}")
    return total


def _check(
    scores: Tensor,
    batch: LensBatch,
    state: Tensor | None,
    prev_scores: Tensor | None,
    prev_valid: Tensor | None,
) -> None:
    if not scores.is_floating_point():
        raise ValueError(f"scores: expected a floating dtype, got {scores.dtype}")
    expected = tuple(batch.pos.shape)
    if tuple(scores.shape) != expected:
        raise ValueError(f"scores: expected shape {expected} to match the batch, got {tuple(scores.shape)}")
    if scores.device != batch.pos.device:
        raise ValueError(f"scores: expected the device of the batch, {batch.pos.device}, got {scores.device}")
    if state is not None and state.dim() != 0:
        raise ValueError(f"state: expected a 0-d tensor, got shape {tuple(state.shape)}")
    if prev_scores is not None and tuple(prev_scores.shape) != expected:
        raise ValueError(f"prev_scores: expected shape {expected}, got {tuple(prev_scores.shape)}")
    if prev_valid is not None and (tuple(prev_valid.shape) != expected[:1] or prev_valid.dtype != torch.bool):
        raise ValueError(
            f"prev_valid: expected bool of shape {expected[:1]}, "
            f"got {prev_valid.dtype} {tuple(prev_valid.shape)}"
        )
