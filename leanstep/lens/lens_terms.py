"""The terms of the objective as differentiable row operations: readable, and what torch.compile sees.

V contexts · W padded length · P pairs; row sums run over the masked entries of the worse context
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leanstep.lens.batch import LensBatch
from leanstep.lens.lens_config import LensConfig
from leanstep.lens.pairs import Pairs, build_pairs, build_targets, pair_factors, span_table

KINDS = ("l2", "hinge", "distill")
Denominator = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LossCall:
    """One call of the objective once its pairs are known: what every implementation reads.

    Args:
        scores: [V, W] in the compute dtype (the kernel takes any).
        batch, pairs, config: the contexts, what is compared, and how.
        active: names of the terms to compute, in order.
        state: 0-d moving average of the budget imbalance before this call.
        prev_scores, prev_valid: [V, W] and [V] of a previous policy, or None.
        denominator: kept [P] -> the number of pairs to divide by.
        sign: [P, W] int8 from `build_targets`; None lets the closed form choose its layout.
        span_weights: weight of each masked entry in the preference term (replacing 1 / n) and in the sums of
            rank and budget (replacing 1), both [P, W]; from `sample_spans`.
        need_grad: whether the closed form also gives d loss / d scores.
        on_built: called when the targets are there.
    """

    scores: Tensor
    batch: LensBatch
    pairs: Pairs
    config: LensConfig
    active: tuple[str, ...]
    state: Tensor
    prev_scores: Tensor | None
    prev_valid: Tensor | None
    denominator: Denominator
    sign: Tensor | None = None
    span_weights: tuple[Tensor, Tensor | None] | None = None
    need_grad: bool = True
    on_built: Callable[[], None] | None = None

    def built(self) -> None:
        if self.on_built is not None:
            self.on_built()


def compute_dtype(scores: Tensor) -> torch.dtype:
    """Half-precision scores are summed in float32: spans reach 1024 and rows have hundreds of terms."""
    return scores.dtype if scores.dtype in (torch.float32, torch.float64) else torch.float32


def preference_cost(aligned: Tensor, config: LensConfig) -> Tensor:
    """Cost of `aligned` = sign * score * scale: low when the score points the right way, strongly."""
    if config.objective.form == "logistic":
        return torch.nn.functional.softplus(-aligned)
    hinge = torch.relu(config.objective.hinge_margin - aligned)
    return hinge if config.objective.form == "hinge" else hinge * hinge


def smooth_budget(imbalance: Tensor, kept: Tensor, state: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Moving average of the imbalance after each kept pair [P], and after the last one, in closed form.

    E_k = beta^k E_0 + (1 - beta) sum_{i <= k} beta^(k - i) d_i, with k counting kept pairs only: one
    lower-triangular product instead of a scan.
    """
    count = kept.to(imbalance.dtype).cumsum(0)
    gap = count[:, None] - count[None, :]
    # exp(k log beta) in the working dtype; the clamp keeps the upper triangle from overflowing.
    weight = torch.exp(gap.clamp(min=0) * math.log(beta)) * (1 - beta)
    slot = torch.arange(kept.shape[0], device=kept.device)
    weight = torch.where((slot[:, None] >= slot[None, :]) & kept[None, :], weight, 0)
    averages = torch.exp(count * math.log(beta)) * state + weight @ torch.where(kept, imbalance, 0)
    last = averages[-1] if averages.shape[0] else state
    return averages, last


def divergence(
    scores: Tensor, previous: Tensor, previous_valid: Tensor | None, batch: LensBatch, tau: float
) -> Tensor:
    """[V] symmetric KL between the Bernoulli policies sigmoid(x / tau) of two score tensors, mean over
    entries.
    """
    x = torch.where(batch.valid, scores, 0)
    before = torch.where(batch.valid, previous.detach().to(scores.dtype), 0)
    pointwise = 0.5 * (torch.sigmoid(x / tau) - torch.sigmoid(before / tau)) * (x - before) / tau
    mean = pointwise.sum(1) / batch.valid.sum(1).clamp(min=1)
    return mean if previous_valid is None else torch.where(previous_valid, mean, 0)


def eager_terms(call: LossCall) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Every active term of every pair, differentiable in `call.scores`; needs `call.sign`.

    Returns:
        terms [P] each, kept [P], state after the last kept pair.
    """
    scores, sign, batch, pairs, config = call.scores, call.sign, call.batch, call.pairs, call.config
    active, state, span_weights = call.active, call.state, call.span_weights
    assert sign is not None
    dtype = scores.dtype
    x = scores.index_select(0, pairs.worse)
    up, down = sign > 0, sign < 0
    masked = sign != 0
    x = torch.where(masked, x, 0)
    num_masked = masked.sum(1)
    kept = num_masked > 0
    scale, strength = pair_factors(pairs, config, dtype)
    if span_weights is None:
        share, weight = masked.to(dtype) / num_masked.clamp(min=1)[:, None], None
    else:
        share, weight = span_weights
    terms: dict[str, Tensor] = {}
    if "pref" in active:
        aligned = sign.to(dtype) * x * scale[:, None]
        cost = preference_cost(aligned, config) * share
        if config.objective.collapse_weight != 1:
            # A Python number inside torch.where would become float32.
            cost = torch.where(down, cost * config.objective.collapse_weight, cost)
        terms["pref"] = torch.where(masked, cost, 0).sum(1) * strength
    if "rank" in active:
        num_up, num_down = up.sum(1), down.sum(1)
        x_weighted = x if weight is None else x * weight
        mean_up = torch.where(up, x_weighted, 0).sum(1) / num_up.clamp(min=1)
        mean_down = torch.where(down, x_weighted, 0).sum(1) / num_down.clamp(min=1)
        gap = torch.relu(config.objective.margin - (mean_up - mean_down))
        terms["rank"] = torch.where((num_up > 0) & (num_down > 0), gap, 0)
    if "budget" in active or "smooth" in active:
        spans = span_table(config, scores.device, dtype)
        span = spans[batch.lod.index_select(0, pairs.worse).long()]
        if weight is not None:
            span = span * weight
        positive = (span * torch.relu(x)).sum(1)
        negative = (span * torch.relu(-x)).sum(1)
        imbalance = (positive - negative) / (positive + negative + 1e-6)
        if "budget" in active:
            terms["budget"] = imbalance * imbalance
        if "smooth" in active:
            averages, state = smooth_budget(
                imbalance.detach(), kept, state, config.objective.budget_smooth_beta
            )
            terms["smooth"] = torch.where(kept, (imbalance - averages) ** 2, 0)
    if "kl" in active and call.prev_scores is not None:
        per_context = divergence(scores, call.prev_scores, call.prev_valid, batch, config.objective.tau)
        terms["kl"] = torch.where(kept, per_context.index_select(0, pairs.worse), 0)
    if "coverage" in active:
        terms["coverage"] = torch.where(kept, coverage(scores, batch, config).index_select(0, pairs.worse), 0)
    return terms, kept, state


def total_of(terms: dict[str, Tensor], config: LensConfig) -> Tensor | None:
    """Weighted sum of the terms, [P], in the fixed order of the names."""
    total, weights = None, config.objective.weights
    for name, value in terms.items():
        if total is None:
            total = value if weights[name] == 1 else value * weights[name]
        else:
            total = torch.add(total, value, alpha=weights[name])
    return total


def owned_tokens(batch: LensBatch, config: LensConfig) -> Tensor:
    """[V, W] int64: tokens that each entry is the first to cover; a row sums to the distinct tokens."""
    spans = span_table(config, batch.pos.device, torch.int64)
    stop_VW = torch.minimum(batch.pos + spans[batch.lod.long()], batch.tokens[:, None])
    stop_VW = torch.where(batch.valid, stop_VW, 0)
    reach_VW = stop_VW.cummax(1).values if stop_VW.numel() else stop_VW
    before_VW = torch.nn.functional.pad(reach_VW, (1, 0))[:, :-1]
    return torch.where(batch.valid, (stop_VW - torch.maximum(batch.pos, before_VW)).clamp(min=0), 0)


def expected_lengths(scores: Tensor, batch: LensBatch, config: LensConfig) -> Tensor:
    """[V, W]: entries that each entry becomes, 1/b (full collapse) to b (full expansion); 0 for padding."""
    b = config.block_size
    expand = torch.relu(scores).clamp(max=1) * (batch.lod > 0)
    collapse = torch.relu(-scores).clamp(max=1) * (batch.lod < config.max_lod)
    return torch.where(batch.valid, 1 + (b - 1) * expand - (1 - 1 / b) * collapse, 0)


def _surviving_shares(
    scores: Tensor, batch: LensBatch, config: LensConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """[V, W]: share of each entry that stays after the edits (not clamped), its length, the tokens it owns.
    [V]: tokens of the sequence, coverage to keep.
    """
    length_VW = expected_lengths(scores, batch, config)
    behind_VW = length_VW.flip(1).cumsum(1).flip(1) - length_VW
    if config.objective.coverage_capacity is None:
        capacity = batch.valid.sum(1, keepdim=True).to(scores.dtype)
    else:
        capacity = torch.full_like(scores[:, :1], config.objective.coverage_capacity)
    safe_VW = torch.where(batch.valid, length_VW, 1)
    own_VW = owned_tokens(batch, config).to(scores.dtype)
    tokens = batch.tokens.to(scores.dtype)
    covered = (own_VW.sum(1) / tokens).clamp(max=config.objective.coverage_target)
    return (capacity - behind_VW) / safe_VW, safe_VW, own_VW, tokens, covered


def coverage(scores: Tensor, batch: LensBatch, config: LensConfig) -> Tensor:
    """[V] share of the sequence that the edits would push out beyond what `coverage_target` allows.

    The newest entries stay; the oldest are pushed out first once the expected length exceeds the capacity.
    Zero at scores of zero and for pure collapse, unless the capacity is below the present length.

    Equivalent to, for one context (see `reference_coverage` in reference.py):
        reference_coverage(list(scores[v]), list(zip(pos[v].tolist(), lod[v].tolist())), num_tokens, config)

    Args:
        scores: [V, W], any float dtype.

    Cost: O(V W). Differentiable in the scores.
    """
    scores = torch.where(batch.valid, scores, 0)
    share_VW, _, own_VW, tokens, covered = _surviving_shares(scores, batch, config)
    # Only an entry that is partly pushed out carries a gradient.
    inside = (share_VW > 0) & (share_VW < 1)
    share_VW = torch.where(inside, share_VW, share_VW.detach().clamp(0, 1))
    return torch.relu(covered - (own_VW * share_VW).sum(1) / tokens)


def coverage_gradient(scores: Tensor, batch: LensBatch, config: LensConfig) -> tuple[Tensor, Tensor]:
    """The penalty [V] and its gradient [V, W] in closed form."""
    b = config.block_size
    scores = torch.where(batch.valid, scores, 0)
    share_VW, safe_VW, own_VW, tokens, covered = _surviving_shares(scores, batch, config)
    penalty = torch.relu(covered - (own_VW * share_VW.clamp(0, 1)).sum(1) / tokens)
    edge_VW = (share_VW > 0) & (share_VW < 1) & batch.valid
    rate_VW = torch.where(edge_VW, own_VW / (safe_VW * tokens[:, None]), 0)
    # An entry costs every partly pushed out one before it, and itself by its own share.
    slope_VW = rate_VW.cumsum(1) - rate_VW + rate_VW * share_VW
    up = (scores > 0) & (scores <= 1) & (batch.lod > 0)
    down = (scores < 0) & (scores >= -1) & (batch.lod < config.max_lod)
    growth_VW = (b - 1) * up.to(scores.dtype) + (1 - 1 / b) * down.to(scores.dtype)
    alive = (penalty > 0).to(scores.dtype)[:, None]
    return penalty, alive * slope_VW * growth_VW * batch.valid


def aggregate_targets(
    batch: LensBatch, config: LensConfig, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Mean target of each entry over the kept pairs that mask it [V, W], and whether any does [V, W].

    Equivalent to, for context v:
        pairs = build_pairs(batch.loss, batch.row, config)
        target = build_targets(batch, pairs, config) * torch.tanh(pairs.delta)[:, None]
        mine = target[pairs.worse == v].float()
        mean = mine.sum(0) / (mine != 0).sum(0).clamp(min=1)
    """
    pairs = build_pairs(batch.loss, batch.row, config)
    sign = build_targets(batch, pairs, config)
    strength = torch.tanh(pairs.delta).to(dtype)[:, None]
    zeros = torch.zeros(batch.pos.shape, dtype=dtype, device=batch.pos.device)
    total = zeros.index_add(0, pairs.worse, sign.to(dtype) * strength)
    count = zeros.index_add(0, pairs.worse, (sign != 0).to(dtype))
    return total / count.clamp(min=1), count > 0


class ProxyLoss(nn.Module):
    """A pointwise loss in place of the pairwise one.

    `l2`: (x - t)^2 against the aggregated target t of the masked entries. `hinge`: relu(|t| - sign(t) x).
    `distill`: (x - teacher)^2 over all valid entries. With `entries_per_context`, only that many entries of
    each context, drawn uniformly. Mean inside each context, then over the contexts that have entries.

    Equivalent to, for kind "l2":
        target, masked = aggregate_targets(batch, config)        # [V, W] both
        square = torch.where(masked, (scores - target) ** 2, 0).sum(1) / masked.sum(1).clamp(min=1)
        loss = square[masked.any(1)].mean()
    """

    def __init__(
        self, config: LensConfig, kind: str = "l2", *, entries_per_context: int | None = None
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        if entries_per_context is not None and entries_per_context < 1:
            raise ValueError(f"entries_per_context: expected at least 1, got {entries_per_context}")
        self.config, self.kind, self.entries_per_context = config, kind, entries_per_context

    def forward(
        self,
        scores: Tensor,
        batch: LensBatch,
        *,
        teacher: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Scalar loss from scores [V, W]; `teacher` [V, W] for `distill`, without gradient."""
        if tuple(scores.shape) != tuple(batch.pos.shape):
            raise ValueError(f"scores: expected shape {tuple(batch.pos.shape)}, got {tuple(scores.shape)}")
        x = scores.to(compute_dtype(scores))
        with torch.no_grad():
            if self.kind == "distill":
                if teacher is None or teacher.shape != scores.shape:
                    raise ValueError(f"teacher: expected scores of shape {tuple(scores.shape)} for distill")
                target, chosen = teacher.detach().to(x.dtype), batch.valid
            else:
                target, chosen = aggregate_targets(batch, self.config, x.dtype)
            if self.entries_per_context is not None:
                device = generator.device if generator is not None else x.device
                key = torch.rand(x.shape, generator=generator, device=device).to(x.device)
                rank = torch.where(chosen, key, 2.0).argsort(1).argsort(1)
                chosen = chosen & (rank < self.entries_per_context)
        difference = torch.where(chosen, x, 0) - torch.where(chosen, target, 0)
        if self.kind == "hinge":
            cost = torch.relu(target.abs() - torch.sign(target) * torch.where(chosen, x, 0))
        else:
            cost = difference * difference
        count = chosen.sum(1)
        per_context = torch.where(chosen, cost, 0).sum(1) / count.clamp(min=1)
        return per_context.sum() / (count > 0).sum().clamp(min=1)


class LaggedPolicy:
    """An exponential moving average of the controller; it scores the same batch under no_grad.

    Example:
        policy = LaggedPolicy(lensnet, decay=0.99)
        previous = policy.scores(*inputs)                        # [V, W], for lens_loss(prev_scores=...)
        policy.update(lensnet)                                   # after the optimizer step
    """

    def __init__(self, controller: nn.Module, decay: float = 0.99) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay: expected 0..1, got {decay}")
        self.decay = decay
        self.model = copy.deepcopy(controller).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, controller: nn.Module) -> None:
        for mine, theirs in zip(self.model.parameters(), controller.parameters(), strict=True):
            mine.lerp_(theirs.detach(), 1 - self.decay)

    @torch.no_grad()
    def scores(self, *inputs: Any) -> Tensor:
        return self.model(*inputs)

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)


def content_key(sequence_id: int | str, positions: Tensor, lods: Tensor) -> str:
    """A name for a context that depends on its content only: positions and lods [W] of any device.

    >>> content_key(7, torch.tensor([0, 4]), torch.tensor([1, 0]))[:8]
    'bbf5788e'
    """
    digest = hashlib.blake2b(str(sequence_id).encode() + b"|", digest_size=16)
    digest.update(positions.to("cpu", torch.int32).contiguous().numpy().tobytes())
    digest.update(b"|")
    digest.update(lods.to("cpu", torch.int8).contiguous().numpy().tobytes())
    return digest.hexdigest()


class ScoreStore:
    """Scores of the previous epoch by content key, the oldest dropped beyond `capacity` contexts.

    Example:
        keys = [content_key(v, batch.pos[v], batch.lod[v]) for v in range(batch.num_contexts)]
        store = ScoreStore()
        store.put(keys, scores, batch)                           # [V, W]; reads the scores on the host
        prev_scores, prev_valid = store.get(keys, batch)         # [V, W] and [V], for lens_loss
    """

    def __init__(self, capacity: int = 10_000) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: expected at least 1, got {capacity}")
        self.capacity = capacity
        self._scores: OrderedDict[str, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scores)

    def put(self, keys: Sequence[str], scores: Tensor, batch: LensBatch) -> None:
        """Remember the valid scores of each context [V, W]."""
        if len(keys) != batch.num_contexts or scores.shape != batch.pos.shape:
            raise ValueError(
                f"keys, scores: expected {batch.num_contexts} contexts, "
                f"got {len(keys)}, {tuple(scores.shape)}"
            )
        host = scores.detach().float().cpu()
        valid = batch.valid.cpu()
        for key, row, mask in zip(keys, host, valid, strict=True):
            self._scores[key] = row[mask].clone()
            self._scores.move_to_end(key)
        while len(self._scores) > self.capacity:
            self._scores.popitem(last=False)

    def get(self, keys: Sequence[str], batch: LensBatch) -> tuple[Tensor, Tensor]:
        """prev_scores [V, W] and prev_valid [V] for `lens_loss`."""
        valid = batch.valid.cpu()
        scores = torch.zeros(batch.pos.shape)
        found = torch.zeros(len(keys), dtype=torch.bool)
        for v, key in enumerate(keys):
            stored = self._scores.get(key)
            if stored is not None and len(stored) == int(valid[v].sum()):
                scores[v, valid[v]] = stored
                found[v] = True
        return scores.to(batch.pos.device), found.to(batch.pos.device)
