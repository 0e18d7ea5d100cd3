"""Preference pairs, targets of entries, and sampling of both.

B samples · C variants per sample · N pair candidates per sample · P pairs · V contexts · W padded length
T tokens · L coarsest level · b block size. Shapes are static, and the host reads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leanstep.lens.batch import LensBatch
from leanstep.lens.lens_config import LensConfig

# Above this many bytes a binary search in the sorted positions replaces the dense table.
TABLE_LIMIT_BYTES = 1 << 30


@dataclass(frozen=True)
class Pairs:
    """P pairs in processing order.

    Equivalent to, for a pair k of one sample:
        delta = loss_of[pairs.worse[k]] - loss_of[pairs.better[k]]          # pairs.delta[k]

    Args:
        better, worse: [P] int64, contexts (rows of the score tensor).
        delta: [P] loss of the worse minus loss of the better, in the losses' dtype; 0 where not valid.
        live: [P] bool, whether the slot holds a pair with delta > 0: only these can have targets.
        valid: [P] bool, whether the slot holds a pair.
    """

    better: Tensor
    worse: Tensor
    delta: Tensor
    live: Tensor
    valid: Tensor


def pairs_per_sample(num_variants: int, config: LensConfig) -> int:
    return min(config.sampling.max_pairs, math.comb(num_variants, 2))


def build_pairs(
    loss: Tensor,
    row: Tensor,
    config: LensConfig,
    *,
    order: Tensor | torch.Generator | None = None,
) -> Pairs:
    """Build the pairs of every sample from its variants' losses.

    Variants are sorted by loss (stable). Pairs with the best variant come first, then all others, each list
    by delta descending (stable). `hard_negative_ratio` shortens the second list, `max_pairs` the combined
    one.

    Equivalent to, for sample s (`reference_pairs` in reference.py):
        listed = reference_pairs(batch.loss[s], config, s)       # (sample, better, worse, delta)

    Args:
        loss: [B, C]; NaN excludes a variant.
        row: [B, C] int64, the context of each variant.
        order: a permutation of the P slots, or a generator that shuffles the pairs inside each sample.
            None: the order above, samples ascending.

    Returns:
        Pairs with P = B * min(max_pairs, C * (C - 1) / 2) slots.

    Host syncs: none. Cost: two sorts of [B, C] and [B, N].
    """
    if loss.dim() != 2 or row.shape != loss.shape:
        raise ValueError(
            f"loss, row: expected two tensors of shape (B, C), got {tuple(loss.shape)} and {tuple(row.shape)}"
        )
    num_samples, num_variants = loss.shape
    slots = pairs_per_sample(num_variants, config)
    # All i < j in sorted order, those with i = 0 first: the i of every pair, then the j.
    first_and_second = torch.triu_indices(num_variants, num_variants, 1, device=loss.device).view(-1)
    # NaN sorts last, after every number.
    sorted_loss_BC, rank_BC = torch.sort(loss, dim=1, stable=True)
    first_BN, second_BN = sorted_loss_BC.index_select(1, first_and_second).chunk(2, 1)
    # Minus delta: ascending order is delta descending, and pairs with a missing loss (NaN) are last.
    gap_BN = first_BN - second_BN
    num_primary = max(num_variants - 1, 0)
    gap, pick = torch.sort(gap_BN[:, :num_primary], dim=1, stable=True)
    if num_variants == 3:
        # A single pair needs no sort, and the quota is at least one.
        gap = torch.cat([gap, gap_BN[:, 2:]], 1)
        pick = torch.cat([pick, pick.new_full((num_samples, 1), 2)], 1)
    elif num_variants > 3:
        late_gap, late_pick = torch.sort(gap_BN[:, num_primary:], dim=1, stable=True)
        if config.sampling.hard_negative_ratio < 1:
            num_scored = (sorted_loss_BC == sorted_loss_BC).sum(1, keepdim=True)
            num_late = ((num_scored - 1) * (num_scored - 2) // 2).clamp(min=0)
            quota = (num_late.double() * config.sampling.hard_negative_ratio).ceil().clamp(min=1)
            position = torch.arange(late_gap.shape[1], device=loss.device)
            late_gap = torch.where(position < quota, late_gap, torch.nan)
        gap, pick = torch.cat([gap, late_gap], 1), torch.cat([pick, late_pick + num_primary], 1)
        # With more than three variants, a sample with missing losses has gaps between the two lists.
        whole = torch.argsort((gap != gap).to(torch.int8), dim=1, stable=True)
        gap, pick = gap.gather(1, whole), pick.gather(1, whole)
    gap, pick = gap[:, :slots], pick[:, :slots]
    context_BC = row.gather(1, rank_BC)
    context_B2N = context_BC.index_select(1, first_and_second).view(num_samples, 2, -1)
    chosen = context_B2N.gather(2, pick[:, None, :].expand(num_samples, 2, slots))
    better, worse = chosen.unbind(1)
    delta = -gap
    valid = delta == delta
    if isinstance(order, torch.Generator):
        shuffle = (
            torch.rand(num_samples, slots, generator=order, device=order.device).argsort(1).to(loss.device)
        )
        better, worse, delta, valid = (t.gather(1, shuffle) for t in (better, worse, delta, valid))
        order = None
    better, worse, delta, valid = (t.reshape(-1) for t in (better, worse, delta, valid))
    if order is not None:
        if tuple(order.shape) != tuple(valid.shape):
            raise ValueError(
                f"pair_order: expected a permutation of shape {tuple(valid.shape)}, got {tuple(order.shape)}"
            )
        better, worse, delta, valid = (t.index_select(0, order) for t in (better, worse, delta, valid))
    # False for NaN as well.
    live = delta > 0
    return Pairs(better, worse, torch.where(live, delta, 0.0), live, valid)


def sample_pairs(pairs: Pairs, config: LensConfig, generator: torch.Generator | None) -> Pairs:
    """Sample the pairs: those not chosen are no longer live and do not count.

    `pairs_per_variant` selects the largest deltas of each worse context, which is biased on purpose.
    `pair_sampling="random"` draws `pairs_sampled` of the live pairs uniformly: their mean is an unbiased
    estimate of the mean over all pairs if every live pair has a target.
    """
    live = pairs.live
    if config.sampling.pairs_per_variant is not None:
        # Rank among the live pairs with the same worse context: the number that precede by (delta, slot).
        slot = torch.arange(live.shape[0], device=live.device)
        same = (pairs.worse[:, None] == pairs.worse[None, :]) & live[None, :]
        ahead = (pairs.delta[None, :] > pairs.delta[:, None]) | (
            (pairs.delta[None, :] == pairs.delta[:, None]) & (slot[None, :] < slot[:, None])
        )
        live = live & ((same & ahead).sum(1) < config.sampling.pairs_per_variant)
    if config.sampling.pair_sampling == "random":
        assert config.sampling.pairs_sampled is not None
        device = generator.device if generator is not None else live.device
        key = torch.rand(live.shape[0], generator=generator, device=device).to(live.device)
        rank = torch.where(live, key, 2.0).argsort().argsort()
        live = live & (rank < config.sampling.pairs_sampled)
    if live is pairs.live:
        return pairs
    return Pairs(pairs.better, pairs.worse, pairs.delta, live, pairs.valid)


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
    counts = list(counts)
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


def pair_factors(pairs: Pairs, config: LensConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scale s = max(1, delta) / tau and strength a = max(tanh(delta), 1e-6) of each pair, [P]."""
    # In the losses' dtype first: delta may be far below the float32 resolution at the size of a loss.
    scale = pairs.delta.clamp(min=1).to(dtype)
    if config.objective.tau != 1:
        scale = scale / config.objective.tau
    strength = torch.tanh(pairs.delta).clamp(min=1e-6).to(dtype)
    return scale, strength


def span_table(config: LensConfig, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the tokens per entry by LOD [L + 1], computed on the device."""
    return torch.pow(config.block_size, torch.arange(config.max_lod + 1, device=device)).to(dtype)


def build_lod_table(batch: LensBatch) -> Tensor:
    """Return [V, T + 1] int8: LOD of the entry that starts at a token, -1 for none. Column T is for padding.

    It is built once per micro-batch and used by every pair.

    Equivalent to:
        table = torch.full((batch.num_contexts, batch.num_tokens + 1), -1, dtype=torch.int8)
        for v in range(batch.num_contexts):
            table[v, batch.pos[v][batch.valid[v]]] = batch.lod[v][batch.valid[v]]
    """
    table = torch.full(
        (batch.num_contexts, batch.num_tokens + 1), -1, dtype=torch.int8, device=batch.pos.device
    )
    table = table.scatter(1, batch.pos, batch.lod)
    table[:, batch.num_tokens] = -1
    return table


def desired_lods(batch: LensBatch, pairs: Pairs, *, lookup: str = "auto") -> Tensor:
    """Return [P, W] int8: LOD of the better context's entry with the same start, -1 if there is none."""
    if lookup not in ("auto", "table", "search"):
        raise ValueError(f"lookup: expected auto, table or search, got {lookup!r}")
    if lookup == "auto":
        fits = batch.num_contexts * (batch.num_tokens + 1) <= TABLE_LIMIT_BYTES
        lookup = "table" if fits else "search"
    pos_PW = batch.pos.index_select(0, pairs.worse)
    if lookup == "table":
        return build_lod_table(batch).index_select(0, pairs.better).gather(1, pos_PW)
    # Left padding contains T: map it below every position so that rows stay sorted.
    padding_first = torch.where(
        batch.valid, batch.pos, torch.where(batch.valid.cumsum(1) == 0, -1, batch.num_tokens)
    )
    key_PW = padding_first.index_select(0, pairs.better)
    slot = torch.searchsorted(key_PW, pos_PW).clamp_(max=max(key_PW.shape[1] - 1, 0))
    matches = (key_PW.gather(1, slot) == pos_PW) & (pos_PW < batch.num_tokens)
    return torch.where(matches, batch.lod.index_select(0, pairs.better).gather(1, slot), -1).to(torch.int8)


def build_targets(batch: LensBatch, pairs: Pairs, config: LensConfig, *, lookup: str = "auto") -> Tensor:
    """Return the sign of the target of every entry of the worse context: +1 expand, -1 collapse, 0 none.

    A collapse request applies to every entry of the same LOD in the same aligned parent block and takes
    precedence over expand. The target itself is sign * tanh(delta) of the pair.

    Equivalent to, for pair k (contexts as lists of (position, lod); `reference_targets` in reference.py):
        row = torch.tensor(reference_targets(better, worse, float(pairs.delta[k]), config)).sign()

    Args:
        lookup: table (V (T + 1) bytes), search (binary search in the sorted positions), auto (by size).

    Returns:
        [P, W] int8.

    Host syncs: none. Cost: O(V T + P W).
    """
    want_PW = desired_lods(batch, pairs, lookup=lookup)
    lod_PW = batch.lod.index_select(0, pairs.worse)
    pos_PW = batch.pos.index_select(0, pairs.worse)
    entry_PW = batch.valid.index_select(0, pairs.worse) & pairs.live[:, None]
    matched_PW = entry_PW & (want_PW >= 0)
    expand_PW = matched_PW & (want_PW < lod_PW)
    request_PW = matched_PW & (want_PW > lod_PW) & (lod_PW < config.max_lod)

    block_PW, num_blocks = block_ids(pos_PW, lod_PW, batch.num_tokens, config)
    slot_PW = torch.where(request_PW, block_PW, num_blocks)
    hits = torch.zeros(pos_PW.shape[0], num_blocks + 1, dtype=torch.int8, device=pos_PW.device)
    hits = hits.scatter(1, slot_PW, 1)
    # Every request writes the same 1 and all others write to a spare slot, so no write is lost.
    reached_PW = hits.gather(1, block_PW.clamp(max=max(num_blocks - 1, 0))) > 0
    collapse_PW = reached_PW & entry_PW & (lod_PW < config.max_lod)
    return torch.where(collapse_PW, -1, expand_PW.to(torch.int8)).to(torch.int8)


def block_ids(pos: Tensor, lod: Tensor, num_tokens: int, config: LensConfig) -> tuple[Tensor, int]:
    """Return the index of each entry's parent block, distinct across levels, and the number of indices."""
    parents = [config.block_size ** (level + 1) for level in range(config.max_lod)]
    offsets = [0]
    for parent in parents:
        offsets.append(offsets[-1] + math.ceil((num_tokens + 1) / parent))
    ids = torch.full_like(pos, offsets[-1])
    for level, parent in enumerate(parents):
        ids = torch.where(lod == level, pos // parent + offsets[level], ids)
    return ids, offsets[-1]


def lod_histogram(batch: LensBatch, config: LensConfig) -> Tensor:
    """Return the number of entries per level, [V, L + 1] int64."""
    counts = torch.zeros(batch.num_contexts, config.max_lod + 1, dtype=torch.int64, device=batch.lod.device)
    return counts.scatter_add(1, batch.lod.long(), batch.valid.long())


def sample_spans(
    scores: Tensor, sign: Tensor, pairs: Pairs, config: LensConfig, generator: torch.Generator | None
) -> tuple[Tensor, Tensor | None] | None:
    """Return weights of the masked entries after span sampling; None without sampling.

    `topk` selects the `span_k` entries with the steepest preference cost (ties: lowest index) and averages
    over them. It is biased on purpose, towards mistakes. `random` draws `span_k` entries uniformly without
    replacement; `stride` selects every `span_stride`-th masked entry from a random start. With both, the
    expectation of the preference term equals the full term exactly.

    Returns:
        share [P, W]: weight in the preference term, instead of 1 / n.
        weight [P, W] or None: weight in the sums of rank and budget (Horvitz-Thompson), None = all entries.
    """
    if config.sampling.span_sampling == "none":
        return None
    dtype = scores.dtype
    masked = sign != 0
    num_masked = masked.sum(1, keepdim=True)
    device = generator.device if generator is not None else sign.device
    if config.sampling.span_sampling == "stride":
        phase = torch.randint(
            config.sampling.span_stride, (sign.shape[0], 1), generator=generator, device=device
        )
        index = masked.cumsum(1) - 1
        chosen = masked & ((index - phase.to(sign.device)) % config.sampling.span_stride == 0)
        factor = torch.full_like(num_masked, config.sampling.span_stride, dtype=dtype)
    else:
        if config.sampling.span_sampling == "topk":
            x = scores.detach().index_select(0, pairs.worse)
            scale, _ = pair_factors(pairs, config, dtype)
            aligned = torch.where(masked, sign.to(dtype) * x * scale[:, None], 0)
            if config.objective.form == "logistic":
                key = torch.sigmoid(-aligned)
            else:
                key = torch.relu(config.objective.hinge_margin - aligned)
            key = torch.where(sign < 0, key * config.objective.collapse_weight, key)
        else:
            key = torch.rand(sign.shape, generator=generator, device=device).to(sign.device)
        rank = torch.argsort(torch.where(masked, key, -1), dim=1, descending=True, stable=True).argsort(1)
        chosen = masked & (rank < config.sampling.span_k)
        factor = num_masked.to(dtype) / num_masked.clamp(min=1, max=config.sampling.span_k)
    weight = torch.where(chosen, factor, 0)
    share = weight / num_masked.clamp(min=1)
    return share, None if config.sampling.aux_on_full else weight
