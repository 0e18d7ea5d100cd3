"""Cross-entropy of padded labels from hidden states: the loss of a supervised training step.

The semantics are those of torch.nn.functional.linear_cross_entropy (torch 2.13), including `reduction`, class
weights, label smoothing and probability targets. In addition, it takes [B, T, D] hidden states with the
labels of a data loader, does not project ignored rows, and holds one tile of logits at a time.
"""

# B sequences · T positions · N = B T rows · R rows with a label · D model · V vocabulary

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
    """Compute the cross-entropy of the LM head on all labels but `ignore_index`.

    Equivalent to, for [N, D]; for [B, T, D] the same after flattening hidden[:, :-1] and labels[:, 1:]:
        logits = torch.nn.functional.linear(hidden, weight).float()
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="mean")

    Args:
        hidden: [B, T, D] or [N, D].
        weight: [V, D], or any head that `linear_logprobs` accepts.
        labels: [B, T] or [N] ids, `ignore_index` for ignored rows; or probabilities [N, V]. If the labels are
            on the host and `hidden` is on a GPU, selecting the rows needs no host sync.
        shift: the row at position t scores labels[t + shift]. None: 1 for [B, T, D], as in transformers
            models, and 0 for [N, D], as in torch. Larger than 1 for heads that predict further ahead.
        reduction: "mean" over the rows that are not ignored (weighted by class, as in torch; NaN if all rows
            are ignored), "sum", or "none": shaped like labels ([N] for probabilities, without softcap and
            shards), 0 for ignored rows.
        label_smoothing: 0 <= eps < 1.
        class_weights: [V]; with label smoothing, neither softcap nor shards are supported.
        rows: the rows to project. None: all rows that are not ignored; with labels on a GPU this takes one
            host sync for their number, also inside torch.compile. [R] int64 (rows of the flattened hidden):
            these rows, no sync. "all": every row, no sync; ignored rows are projected and get gradient 0.
        transform: `Transform(scale, softcap)`.
        shards, tuning: as in `linear_logprobs`.

    Returns:
        A scalar, or a tensor shaped like `labels`; fp32 (fp64 for fp64 input).

    Peak extra memory, GEMMs: those of `linear_logprobs` on R rows; probabilities: those of
        `linear_distill_loss`, and with "none" those of `linear_logprobs` plus 2 GEMMs.
    Collectives: 2 forward, 1 backward with a group; probabilities: 3 per row chunk, 1 at the end; otherwise
        none.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing: expected 0 <= value < 1, got {label_smoothing}")
    if transform is not None and transform.label_smoothing:
        raise ValueError("transform: expected label_smoothing as a separate argument, got it in Transform")
    _check_tensors(hidden, labels)
    flat = hidden.flatten(0, -2)
    if labels.is_floating_point():
        soft = {"transform": transform, "shards": shards, "tuning": tuning}
        return _soft_targets(flat, weight, labels, shift, reduction, label_smoothing, class_weights, soft)
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
    # An ignored row may hold any value: select, do not multiply.
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
    """Compute sum_k factors[k] CE_k for heads that predict ahead; head k predicts labels shifted by k + 1.

    Equivalent to:
        losses = [linear_cross_entropy(hidden, w, labels, shift=k + 1) for k, w in enumerate(weights)]
        loss = sum(factor * one for factor, one in zip(factors, losses))

    Args:
        hiddens: [B, T, D] shared by all heads, or one tensor per head.
        weights: one head per distance; the first predicts the next token.
        labels: [B, T].
        factors: one per head; None: all 1.
        options: those of `linear_cross_entropy`, except shift.

    Collectives: those of `linear_cross_entropy`, per head.
    """
    if "shift" in options:
        raise ValueError("shift: not supported here (head k predicts k + 1 tokens ahead)")
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
    """Return the target of each row, [N]: labels[t + shift] of its sequence, `ignore_index` past the end."""
    if isinstance(shift, bool) or shift < 0:
        raise ValueError(f"shift: expected a number of positions >= 0, got {shift!r}")
    labels = labels.long()
    if shift:
        shift = min(shift, labels.shape[-1])
        labels = torch.nn.functional.pad(labels[..., shift:], (0, shift), value=ignore_index)
    return labels.reshape(-1)


def selects_in_graph(shards: VocabShards | None, tuning: Tuning | None) -> bool:
    """Whether a compiled region selects the rows inside its op (`counted_logprobs`)."""
    return torch.compiler.is_compiling() and shards is None and (tuning is None or tuning.main_grad is None)


def counting_rows(targets: Tensor, ignore_index: int, device: torch.device) -> Tensor:
    """Return the rows whose target is not ignored, [R] int64 on `device`. One host sync for GPU targets."""
    if torch.compiler.is_compiling():
        # A number that depends on the labels cannot be a size in a graph.
        torch._dynamo.graph_break(msg="rows: expected row indices with fullgraph=True here, got None")
    return to_device((targets != ignore_index).nonzero().flatten(), device)


def _selected(
    targets: Tensor, ignore_index: int, rows: Tensor | str | None, device: torch.device
) -> Tensor | None:
    if rows is None:
        return counting_rows(targets, ignore_index, device)
    if isinstance(rows, str):
        if rows != "all":
            raise ValueError(f'rows: expected row indices, "all" or None, got {rows!r}')
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
    """Return mean_v -w_v log p_v, [R]."""
    if transform.softcap is not None or shards is not None:
        raise ValueError("class_weights: expected neither softcap nor shards with label_smoothing")
    selected = hidden if rows is None else hidden.index_select(0, rows)
    total = transform.scale * _weighted_logits(selected, weight, class_weights, lse.dtype)
    return (class_weights.sum() * lse - total) / class_weights.shape[0]


def _weighted_logits(hidden: Tensor, weight: Any, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return sum_v factors_v (h W^T + b)_v, [R], with factors [V] or [R, V]; needs no logits."""
    tensor, bias, lora = unpack_head(weight)
    with torch.autocast(hidden.device.type, enabled=False):
        row = factors @ tensor.to(dtype)
        if lora is not None:
            row = row + lora.scaling * ((factors @ lora.up.to(dtype)) @ lora.down.to(dtype))
        total = (hidden.to(dtype) * row).sum(-1)
        if bias is not None:
            # A class with factor 0 contributes nothing, even if its bias is -inf.
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
    """Handle probability targets [..., V] with the tile loop of the forward KL, without q log q."""
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
    result = linear_distill_loss(
        flat,
        weight,
        teacher,
        divergence="cross_entropy",
        normalizer=num_rows if reduction == "mean" else 1,
        **options,
    )
    return result.loss


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
    """Return -sum_v q_v log p_v = sum(q) lse - sum q z of every row, [N], each with its own gradient."""
    scale = 1.0 if transform is None else transform.scale
    if shards is not None or (transform is not None and transform.softcap is not None):
        raise ValueError('reduction: expected no softcap or shards with "none" and probability targets')
    vocab = unpack_head(weight)[0].shape[0]
    if probabilities.shape[1] != vocab:
        raise ValueError(f"labels: expected [..., {vocab}] probabilities, got {tuple(probabilities.shape)}")
    unused_targets = torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device)
    lse = linear_logprobs(
        flat, weight, unused_targets, outputs=("lse",), transform=Transform(scale), tuning=tuning
    ).lse
    assert lse is not None
    q = probabilities.detach().to(flat.device, lse.dtype)
    if label_smoothing:
        q = q * (1.0 - label_smoothing) + label_smoothing / vocab
    if class_weights is not None:
        q = q * class_weights.to(q.device, q.dtype)
    return q.sum(-1) * lse - scale * _weighted_logits(flat, weight, q, lse.dtype)
