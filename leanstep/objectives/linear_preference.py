"""Preference optimization on hidden states: log-probs of completions from selected rows, in one pass.

Prompt and padding rows are not projected. Chosen and rejected completions are in one batch, as trainers
collate them, and one call of `linear_logprobs` computes their log-probs. The reference's log-probs come from
a frozen head without a graph, or are passed by the caller.
"""

# S sequences, the first half chosen · P = S / 2 pairs · T positions · R scored rows · D model · V vocabulary

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from leanstep.logprob import LMHead, ReferenceHead, Transform, Tuning, VocabShards, linear_logprobs
from leanstep.logprob.layout import to_device
from leanstep.logprob.linear import counted_logprobs
from leanstep.objectives.cross_entropy import align_labels, counting_rows, selects_in_graph
from leanstep.objectives.pairwise import (
    PreferenceObjective,
    checked_preference,
    kto_losses,
    pair_losses,
    preference_metrics,
)


class PreferenceLoss(NamedTuple):
    """`loss` is differentiable; the rest is detached.

    logps: [S] sums of the completions' log-probs. ref_logps: [S] or None. metrics: 0-dimensional tensors.
    """

    loss: Tensor
    logps: Tensor
    ref_logps: Tensor | None
    metrics: dict[str, Tensor]


class SequenceLogProbs(NamedTuple):
    """sums: [S], differentiable. lengths: [S] scored tokens. rows: [R]. tokens: [R] log-probs of the rows."""

    sums: Tensor
    lengths: Tensor
    rows: Tensor
    tokens: Tensor


def linear_sequence_logprobs(
    hidden: Tensor,
    weight: Any,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    transform: Transform | None = None,
    shards: VocabShards | None = None,
    tuning: Tuning | None = None,
) -> SequenceLogProbs:
    """Return the sum of token log-probs per sequence over the rows with a label.

    Equivalent to:
        log_p = torch.log_softmax(hidden[:, :-1] @ weight.T, -1)
        picked = log_p.gather(2, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        sums = torch.where(labels[:, 1:] != -100, picked, 0.0).sum(1)

    Args:
        hidden: [S, T, D].
        weight: [V, D], or any head that `linear_logprobs` accepts.
        labels: [S, T] unshifted ids (row t scores labels[t + 1]), `ignore_index` on prompts and padding. If
            they are on the host, there is no host sync for the number of rows.
        rows: [R] int64, rows of the flattened hidden to score, if the caller knows them.
        temperature, transform, shards, tuning: as in `linear_logprobs`.

    Collectives: 2 forward, 1 backward with a group; otherwise none.
    """
    targets = _checked_targets(hidden, labels, ignore_index)
    where = counting_rows(targets, ignore_index, hidden.device) if rows is None else rows
    targets = to_device(targets, hidden.device).index_select(0, where)
    out = linear_logprobs(
        hidden.flatten(0, 1),
        weight,
        targets,
        rows=where,
        temperature=temperature,
        transform=transform,
        shards=shards,
        tuning=tuning,
    )
    sums, lengths = _per_sequence(out.logp, where, hidden.shape)
    return SequenceLogProbs(sums, lengths, where, out.logp)


def linear_preference_loss(
    hidden: Tensor,
    weight: Any,
    labels: Tensor,
    *,
    objective: PreferenceObjective | str = "dpo",
    reference: ReferenceHead | Tensor | None = None,
    desirable: Tensor | None = None,
    kl: Tensor | float = 0.0,
    nll_labels: Tensor | None = None,
    ignore_index: int = -100,
    transform: Transform | None = None,
    shards: VocabShards | None = None,
    tuning: Tuning | None = None,
) -> PreferenceLoss:
    """Compute a preference objective from hidden states: the mean over pairs (kto: over sequences).

    Equivalent to, for "dpo" with reference sums:
        logprobs = linear_sequence_logprobs(hidden, weight, labels)
        chosen, rejected = (logprobs.sums - reference).chunk(2)
        loss = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()

    Args:
        hidden: [S, T, D]; pairs: chosen completions first, then the rejected ones in the same order.
        weight: [V, D], or any head that `linear_logprobs` accepts.
        labels: [S, T] unshifted ids, `ignore_index` on prompts and padding.
        objective: a `PreferenceObjective`, or dpo, robust, hinge, ipo, kto, cpo, simpo, orpo.
        reference: [S] sums of log-probs; `ReferenceHead(weight, hidden)` with hidden [S, T, D'], evaluated
            without a graph on the same rows; None: reference-free (not for kto).
        desirable: [S] bool, for kto only. kl: kto's constant KL estimate.
        nll_labels: [P, T], labels of the chosen completions' nll if they differ from `labels`: ORPO's include
            the prompt. Rows of both are projected once.
        ignore_index, transform, shards, tuning: as in `linear_cross_entropy`.

    Returns:
        PreferenceLoss; metrics have the names that TRL's trainers log. A pair without tokens has log-prob 0.

    GEMMs (2 R D V FLOPs each): those of `linear_logprobs`, and 1 for a reference head.
    Collectives: 2 forward, 1 backward with a group, 2 more for a reference head; otherwise none.
    """
    objective = checked_preference(objective)
    is_pairs = objective.kind != "kto"
    targets = _checked_targets(hidden, labels, ignore_index)
    if is_pairs == (desirable is not None):
        raise ValueError(f"desirable: expected bool [{len(hidden)}] for kto and None for the others")
    if is_pairs and len(hidden) % 2:
        raise ValueError(f"hidden: expected chosen then rejected sequences, got an odd number: {len(hidden)}")
    if not is_pairs and reference is None:
        raise ValueError("reference: expected log-probs or a ReferenceHead for kto, got None")
    if not is_pairs and objective.nll_coef:
        raise ValueError(f"nll_coef: expected 0 for kto, got {objective.nll_coef}")
    targets, scored, in_nll = _with_nll(targets, nll_labels, hidden.shape, ignore_index, objective)
    rows = _ScoredRows(targets, hidden, ignore_index, transform, shards, tuning)
    counted, of_nll = rows.pick(scored), rows.pick(in_nll)
    logp = rows.logp(hidden.flatten(0, 1), weight)
    sums, lengths = _per_sequence(logp, rows.where, hidden.shape, counted)
    ref_sums = None
    if isinstance(reference, Tensor):
        if reference.shape != sums.shape:
            raise ValueError(f"reference: expected [{len(hidden)}] sums, got {tuple(reference.shape)}")
        ref_sums = reference.detach().to(sums)
    elif reference is not None:
        ref_sums = _reference_sums(reference, rows, hidden, weight, counted)
    if not is_pairs:
        assert desirable is not None and ref_sums is not None
        return _kto(objective, sums, ref_sums, desirable.to(sums.device), kl)
    chosen, rejected = sums.chunk(2)
    options: dict[str, Any] = {}
    if ref_sums is not None:
        options["ref_chosen"], options["ref_rejected"] = ref_sums.chunk(2)
    options["chosen_lengths"], options["rejected_lengths"] = lengths.chunk(2)
    pairs = pair_losses(objective, chosen, rejected, **options)
    loss, metrics = pairs.losses.mean(), preference_metrics(pairs, chosen, rejected)
    if objective.nll_coef:
        nll = -torch.where(of_nll, logp, 0.0).sum() / of_nll.sum().clamp(min=1)
        loss, metrics["nll_loss"] = loss + objective.nll_coef * nll, nll.detach()
    return PreferenceLoss(loss, sums.detach(), ref_sums, metrics)


def _checked_targets(hidden: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    if not isinstance(hidden, Tensor) or hidden.dim() != 3:
        got = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise ValueError(f"hidden: expected [S, T, D], got {got}")
    if labels.shape != hidden.shape[:2] or labels.is_floating_point():
        expected = f"ids {tuple(hidden.shape[:2])}"
        raise ValueError(f"labels: expected {expected}, got {labels.dtype} {tuple(labels.shape)}")
    return align_labels(labels, 1, ignore_index)


def _with_nll(
    targets: Tensor,
    nll_labels: Tensor | None,
    shape: torch.Size,
    ignore_index: int,
    objective: PreferenceObjective,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the targets of all rows, and masks of the rows of completions and of the chosen nll."""
    scored = targets != ignore_index
    half = shape[0] // 2 * shape[1]
    in_nll = torch.arange(targets.shape[0], device=targets.device) < half
    if nll_labels is None or not objective.nll_coef:
        return targets, scored, in_nll & scored
    if nll_labels.shape != (shape[0] // 2, shape[1]):
        expected = (shape[0] // 2, shape[1])
        raise ValueError(f"nll_labels: expected {expected}, got {tuple(nll_labels.shape)}")
    more = align_labels(nll_labels, 1, ignore_index)
    more = torch.nn.functional.pad(more, (0, targets.shape[0] - half), value=ignore_index)
    return torch.where(scored, targets, more), scored, more != ignore_index


def _per_sequence(
    logp: Tensor, rows: Tensor | None, shape: torch.Size, counted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return sums [S] over each sequence's rows (None: all of them), and the number of counted rows."""
    if rows is None:
        rows = torch.arange(logp.shape[0], device=logp.device)
    sequence_of = rows.div(max(shape[1], 1), rounding_mode="floor")
    ones = torch.ones_like(logp) if counted is None else counted.to(logp.dtype)
    values = logp if counted is None else torch.where(counted, logp, 0.0)
    sums = logp.new_zeros(shape[0]).index_add(0, sequence_of, values)
    return sums, logp.new_zeros(shape[0]).index_add(0, sequence_of, ones)


class _ScoredRows:
    """The rows that are projected, and their options.

    Inside torch.compile, their number is not a size in the graph: `where` is None, and every row has an
    entry.
    """

    def __init__(
        self,
        targets: Tensor,
        hidden: Tensor,
        ignore_index: int,
        transform: Transform | None,
        shards: VocabShards | None,
        tuning: Tuning | None,
    ) -> None:
        self.transform, self.shards, self.tuning = transform, shards, tuning
        self.device, self.where, self.counts = hidden.device, None, None
        if selects_in_graph(shards, tuning):
            self.counts = to_device(targets != ignore_index, hidden.device)
        else:
            self.where = counting_rows(targets, ignore_index, hidden.device)
        self.targets = self.pick(targets)

    def pick(self, values: Tensor) -> Tensor:
        """Select the rows' entries of a tensor with one entry per position."""
        values = to_device(values, self.device)
        return values if self.where is None else values.index_select(0, self.where)

    def logp(self, flat: Tensor, head: Any, *, tuned: bool = True) -> Tensor:
        """Return the log-probs of the targets, one per entry; `tuned`: use the caller's tuning."""
        tuning = self.tuning if tuned else None
        if self.counts is not None:
            options: dict[str, Any] = {"transform": self.transform, "tuning": tuning}
            return counted_logprobs(flat, head, self.targets, self.counts, **options).logp
        options = {"transform": self.transform, "shards": self.shards, "tuning": tuning}
        return linear_logprobs(flat, head, self.targets, rows=self.where, **options).logp


def _reference_sums(
    reference: ReferenceHead, rows: _ScoredRows, hidden: Tensor, weight: Any, counted: Tensor
) -> Tensor:
    if reference.weight is None and reference.hidden is None:
        raise ValueError("reference: expected a ReferenceHead with weight or hidden, got neither")
    head = weight if reference.weight is None else LMHead(reference.weight, reference.bias)
    flat = (hidden if reference.hidden is None else reference.hidden).flatten(0, -2)
    num_rows = hidden.shape[0] * hidden.shape[1]
    if flat.shape[0] != num_rows:
        raise ValueError(f"reference.hidden: expected {num_rows} rows, got {flat.shape[0]}")
    with torch.no_grad():
        logp = rows.logp(flat, head, tuned=False)
        return _per_sequence(logp, rows.where, hidden.shape, counted)[0]


def _kto(
    objective: PreferenceObjective, sums: Tensor, ref_sums: Tensor, desirable: Tensor, kl: Tensor | float
) -> PreferenceLoss:
    losses, rewards = kto_losses(objective, sums, ref_sums, desirable, kl)

    def mean(values: Tensor, which: Tensor) -> Tensor:
        return torch.where(which, values, 0.0).sum() / which.sum()

    # Fill a tensor on the device with the number: copying it there would block the host.
    point = kl.detach().to(sums) if isinstance(kl, Tensor) else torch.full_like(sums[0], kl)
    metrics = {"kl": point.clamp(min=0.0)}
    for name, which in (("chosen", desirable), ("rejected", ~desirable)):
        metrics[f"rewards/{name}"] = mean(rewards, which)
        metrics[f"logps/{name}"] = mean(sums.detach(), which)
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return PreferenceLoss(losses.mean(), sums.detach(), ref_sums, metrics)
