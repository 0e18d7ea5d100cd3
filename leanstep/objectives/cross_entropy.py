"""Cross-entropy of padded labels straight from hidden states: the call that a supervised step makes.

The meaning is that of torch.nn.functional.linear_cross_entropy (torch 2.13), `reduction`, class weights,
label smoothing and probability targets included. On top of it: [B, T, D] hidden states with the labels of a
data loader, rows that do not count never enter the head, and logits exist one tile at a time.
"""

# B sequences · T positions · N = B T rows · R rows that count · D model · V vocabulary

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leanstep.logprob import Transform, Tuning, VocabShards, linear_logprobs
from leanstep.logprob.checks import check_float
from leanstep.logprob.inputs import unpack_head
from leanstep.logprob.layout import to_device
from leanstep.logprob.linear import counted_logprobs
from leanstep.objectives.distill import linear_distill_loss
from leanstep.objectives.teachers import SoftLabels

REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Any,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    shift: int | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
    rows: Tensor | str | None = None,
    transform: Transform | None = None,
    shards: VocabShards | None = None,
    tuning: Tuning | None = None,
) -> Tensor:
    """Cross-entropy of the LM head on the labels that count.

    Equivalent to, for [N, D]; for [B, T, D] the same after flattening hidden[:, :-1] and labels[:, 1:]:
        logits = torch.nn.functional.linear(hidden, weight).float()
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="mean")

    Args:
        hidden: [B, T, D] or [N, D].
        weight: [V, D], or any head that `linear_logprobs` takes.
        labels: [B, T] or [N] ids, `ignore_index` where a row does not count; or probabilities [N, V]. Labels
            on the host while `hidden` is on a GPU: the rows are found without a host read.
        shift: the row at position t scores labels[t + shift]. None: 1 for [B, T, D], as models of
            transformers do it, and 0 for [N, D], as torch does it. More than 1 for heads that predict ahead.
        reduction: "mean" over the rows that count (by their class weights, as in torch; NaN if none does),
            "sum", or "none": shaped like labels (of probabilities [N], and neither softcap nor shards), 0
            where a row does not count.
        label_smoothing: 0 <= eps < 1.
        class_weights: [V]; with label smoothing neither softcap nor shards.
        rows: what is projected. None: the rows that count, found here, with labels on a GPU by one host read
            of their number, also inside torch.compile. [R] int64 (rows of the flattened hidden): these, and
            no read. "all": every row, and no read; rows that do not count cost their products and get
            gradient 0.
        transform: `Transform(scale, softcap)`.
        shards, tuning: as in `linear_logprobs`.

    Returns:
        A scalar, or a tensor shaped like `labels`; fp32 (fp64 for fp64 input).

    Peak extra memory, GEMMs: those of `linear_logprobs` on R rows; probabilities: `linear_distill_loss`, and
        with "none" those of `linear_logprobs` and 2 GEMMs more.
    Collectives: 2 forward, 1 backward with a group; probabilities: 3 per row chunk, 1 at the end; else none.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing: expected 0 <= value < 1, got {label_smoothing}")
    if transform is not None and transform.label_smoothing:
        raise ValueError("transform: expected label_smoothing as an argument of its own, got it in Transform")
    _check_tensors(hidden, labels)
    flat = hidden.flatten(0, -2)
    if labels.is_floating_point():
        given = {"transform": transform, "shards": shards, "tuning": tuning}
        return _soft_targets(flat, weight, labels, shift, reduction, label_smoothing, class_weights, given)
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels: expected {tuple(hidden.shape[:-1])}, got {tuple(labels.shape)}")
    targets = align_labels(labels, hidden.dim() - 2 if shift is None else shift, ignore_index)
    in_graph = rows is None and selects_in_graph(shards, tuning)
    where = None if in_graph else _selected(targets, ignore_index, rows, hidden.device)
    targets = to_device(targets, hidden.device)
    if where is not None:
        targets = targets.index_select(0, where)
    counts = targets != ignore_index
    targets = torch.where(counts, targets, 0)
    smoothing = label_smoothing if class_weights is None else 0.0
    base = Transform() if transform is None else transform
    options: dict[str, Any] = {"transform": Transform(base.scale, base.softcap, smoothing), "tuning": tuning}
    options["outputs"] = ("lse",) if class_weights is not None and label_smoothing else ()
    if in_graph:
        out = counted_logprobs(flat, weight, targets, counts, **options)
    else:
        out = linear_logprobs(flat, weight, targets, rows=where, shards=shards, **options)
    losses, weights = -out.logp, counts.to(out.logp.dtype)
    if class_weights is not None:
        class_weights = _checked_classes(class_weights, weight, shards).to(hidden.device, losses.dtype)
        own = class_weights[targets]
        losses, weights = losses * own, weights * own
        if label_smoothing:
            assert out.lse is not None
            spread = _smoothed(flat, weight, where, class_weights, base, shards, out.lse)
            losses = (1.0 - label_smoothing) * losses + label_smoothing * spread
    # A row that does not count may hold anything: select, do not multiply.
    losses = torch.where(counts, losses, 0.0)
    if reduction == "sum":
        return losses.sum()
    if reduction == "mean":
        return losses.sum() / weights.sum()
    if where is None:
        return losses.view(labels.shape)
    return losses.new_zeros(labels.numel()).index_add(0, where, losses).view(labels.shape)


def linear_ahead_cross_entropy(
    hiddens: Sequence[Tensor] | Tensor,
    weights: Sequence[Any],
    labels: Tensor,
    *,
    factors: Sequence[float] | None = None,
    **options: Any,
) -> Tensor:
    """Heads that predict several tokens ahead: sum_k factors[k] CE of head k on labels shifted by k + 1.

    Equivalent to:
        losses = [linear_cross_entropy(hidden, w, labels, shift=k + 1) for k, w in enumerate(weights)]
        loss = sum(factor * one for factor, one in zip(factors, losses))

    Args:
        hiddens: [B, T, D] for all heads (several weights, one hidden), or one tensor per head.
        weights: one head per distance: the first predicts the next token.
        labels: [B, T].
        factors: one per head; None: all 1.
        options: of `linear_cross_entropy`, except shift.

    Collectives: those of `linear_cross_entropy`, per head.
    """
    if "shift" in options:
        raise ValueError("shift: expected none here (head k predicts k + 1 tokens ahead)")
    each = [hiddens] * len(weights) if isinstance(hiddens, Tensor) else list(hiddens)
    factors = [1.0] * len(weights) if factors is None else list(factors)
    if not len(each) == len(weights) == len(factors) or not weights:
        got = f"{len(each)} hiddens, {len(weights)} weights, {len(factors)} factors"
        raise ValueError(f"weights: expected one hidden, weight and factor per head, got {got}")
    losses = [
        factor * linear_cross_entropy(hidden, weight, labels, shift=ahead, **options)
        for ahead, (hidden, weight, factor) in enumerate(zip(each, weights, factors, strict=True), 1)
    ]
    return torch.stack(losses).sum(0)


def _check_tensors(hidden: Any, labels: Any) -> None:
    if not isinstance(hidden, Tensor) or hidden.dim() not in (2, 3):
        got = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise ValueError(f"hidden: expected [B, T, D] or [N, D], got {got}")
    if not isinstance(labels, Tensor):
        raise ValueError(f"labels: expected a tensor, got {type(labels).__name__}")


def align_labels(labels: Tensor, shift: int, ignore_index: int) -> Tensor:
    """[N]: what each row scores, labels[t + shift] of its sequence; `ignore_index` beyond the end."""
    if isinstance(shift, bool) or shift < 0:
        raise ValueError(f"shift: expected a number of positions >= 0, got {shift!r}")
    labels = labels.long()
    if shift:
        shift = min(shift, labels.shape[-1])
        labels = torch.nn.functional.pad(labels[..., shift:], (0, shift), value=ignore_index)
    return labels.reshape(-1)


def selects_in_graph(shards: VocabShards | None, tuning: Tuning | None) -> bool:
    """Whether a compiled region selects the rows that count inside its op (`counted_logprobs`)."""
    return torch.compiler.is_compiling() and shards is None and (tuning is None or tuning.main_grad is None)


def counting_rows(targets: Tensor, ignore_index: int, device: torch.device) -> Tensor:
    """[R] int64 on `device`: rows whose target counts. One host read if `targets` are on a GPU."""
    if torch.compiler.is_compiling():
        # A number that only the labels know is no size of a graph.
        torch._dynamo.graph_break(msg="rows: expected row numbers with fullgraph=True here, got None")
    return to_device((targets != ignore_index).nonzero().flatten(), device)


def _selected(
    targets: Tensor, ignore_index: int, rows: Tensor | str | None, device: torch.device
) -> Tensor | None:
    if rows is None:
        return counting_rows(targets, ignore_index, device)
    if isinstance(rows, str):
        if rows != "all":
            raise ValueError(f'rows: expected row numbers, "all" or None, got {rows!r}')
        return None
    return rows


def _checked_classes(class_weights: Tensor, weight: Any, shards: VocabShards | None) -> Tensor:
    total = None if shards is None else shards.total
    if total is None and (shards is None or shards.group is None):
        total = unpack_head(weight)[0].shape[0]
    if class_weights.dim() != 1 or (total is not None and len(class_weights) != total):
        expected = "[V]" if total is None else f"[{total}]"
        raise ValueError(f"class_weights: expected {expected}, got {tuple(class_weights.shape)}")
    if class_weights.requires_grad:
        raise ValueError("class_weights: expected a constant, got a tensor that requires grad")
    return class_weights


def _smoothed(
    hidden: Tensor,
    weight: Any,
    rows: Tensor | None,
    class_weights: Tensor,
    transform: Transform,
    shards: VocabShards | None,
    lse: Tensor,
) -> Tensor:
    """mean_v -w_v log p_v, [R]."""
    if transform.softcap is not None or shards is not None:
        raise ValueError("class_weights: expected neither softcap nor shards with label_smoothing")
    selected = hidden if rows is None else hidden.index_select(0, rows)
    total = transform.scale * _weighted_logits(selected, weight, class_weights, lse.dtype)
    return (class_weights.sum() * lse - total) / class_weights.shape[0]


def _weighted_logits(hidden: Tensor, weight: Any, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """sum_v factors_v (h W^T + b)_v, [R], with factors [V] or [R, V]: linear in hidden, so no logits."""
    tensor, bias, lora = unpack_head(weight)
    with torch.autocast(hidden.device.type, enabled=False):
        row = factors @ tensor.to(dtype)
        if lora is not None:
            row = row + lora.scaling * ((factors @ lora.up.to(dtype)) @ lora.down.to(dtype))
        total = (hidden.to(dtype) * row).sum(-1)
        if bias is not None:
            # A class that cannot occur and is not wanted adds nothing.
            total = total + torch.where(factors == 0, 0.0, factors * bias.to(dtype)).sum(-1)
    return total


def _soft_targets(
    flat: Tensor,
    weight: Any,
    labels: Tensor,
    shift: int | None,
    reduction: str,
    label_smoothing: float,
    class_weights: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Probability targets [..., V]: the forward KL's tile loop without the teacher's entropy."""
    if shift:
        raise ValueError(f"shift: expected 0 or None with probability targets, got {shift}")
    if labels.dim() < 2:
        raise ValueError(f"labels: expected ids, or probabilities [..., V], got {tuple(labels.shape)}")
    probabilities = labels.flatten(0, -2)
    check_float("labels", probabilities, 2)
    num_rows = flat.shape[0]
    if probabilities.shape[0] != num_rows:
        raise ValueError(f"labels: expected {num_rows} rows of probabilities, got {probabilities.shape[0]}")
    if class_weights is not None:
        class_weights = _checked_classes(class_weights, weight, options["shards"])
    if reduction == "none":
        losses = _soft_losses(flat, weight, probabilities, label_smoothing, class_weights, **options)
        return losses.view(labels.shape[:-1])
    teacher = SoftLabels(probabilities, label_smoothing, class_weights)
    found = linear_distill_loss(
        flat,
        weight,
        teacher,
        divergence="cross_entropy",
        normalizer=num_rows if reduction == "mean" else 1,
        **options,
    )
    return found.loss


def _soft_losses(
    flat: Tensor,
    weight: Any,
    probabilities: Tensor,
    label_smoothing: float,
    class_weights: Tensor | None,
    transform: Transform | None,
    shards: VocabShards | None,
    tuning: Tuning | None,
) -> Tensor:
    """-sum_v q_v log p_v of every row, [N], each with a gradient of its own: sum(q) lse - sum q z."""
    scale = 1.0 if transform is None else transform.scale
    if shards is not None or (transform is not None and transform.softcap is not None):
        raise ValueError('reduction: expected no softcap and no shards with "none" of probability targets')
    vocab = unpack_head(weight)[0].shape[0]
    if probabilities.shape[1] != vocab:
        raise ValueError(f"labels: expected [..., {vocab}] probabilities, got {tuple(probabilities.shape)}")
    nothing = torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device)
    lse = linear_logprobs(
        flat, weight, nothing, outputs=("lse",), transform=Transform(scale), tuning=tuning
    ).lse
    assert lse is not None
    q = probabilities.detach().to(flat.device, lse.dtype)
    if label_smoothing:
        q = q * (1.0 - label_smoothing) + label_smoothing / vocab
    if class_weights is not None:
        q = q * class_weights.to(q.device, q.dtype)
    return q.sum(-1) * lse - scale * _weighted_logits(flat, weight, q, lse.dtype)
