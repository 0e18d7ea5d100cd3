"""The objectives in plain torch with full [N, V] tensors; in fp64, the reference of all tests."""

from __future__ import annotations

import torch
from torch import Tensor

from leanstep.objectives.divergences import divergence


def reference_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Return the [N, V] logits of a head."""
    logits = scale * torch.nn.functional.linear(hidden, weight, bias)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def reference_distill(
    logits: Tensor,
    teacher_logits: Tensor,
    kind: str | tuple[str, float],
    *,
    temperature: float = 1.0,
    targets: Tensor | None = None,
    hard_weight: float = 0.0,
) -> Tensor:
    """Return (1 - hard_weight) D(teacher, student) at `temperature` + hard_weight CE(targets) at 1, [N]."""
    log_p = torch.log_softmax(logits / temperature, -1)
    log_q = torch.log_softmax(teacher_logits / temperature, -1)
    soft = divergence(log_p, log_q, kind)
    if targets is None:
        return soft
    hard = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return (1.0 - hard_weight) * soft + hard_weight * hard


def reference_top_k(log_p: Tensor, ids: Tensor, log_q: Tensor, kind: str | tuple[str, float]) -> Tensor:
    """Return D over the k listed outcomes and the tail, [N]; the tails are summed over their columns."""
    inside = torch.zeros_like(log_p, dtype=torch.bool).scatter(1, ids, True)
    tail_p = torch.logsumexp(log_p.masked_fill(inside, -torch.inf), -1, keepdim=True)
    tail_q = torch.log1p(-log_q.exp().sum(-1, keepdim=True))
    return divergence(torch.cat([log_p.gather(1, ids), tail_p], 1), torch.cat([log_q, tail_q], 1), kind)


def reference_masked(
    logits: Tensor, targets: Tensor, allowed: list[list[int]], ref_logits: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log-prob, entropy and KL to a reference, [N] each, over the allowed ids and the target."""
    mask = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, targets.unsqueeze(-1), True)
    for row, ids in enumerate(allowed):
        mask[row, ids] = True
    log_p = torch.log_softmax(logits.masked_fill(~mask, -torch.inf), -1)
    logp = log_p.gather(1, targets.unsqueeze(-1)).squeeze(-1)
    p, finite = log_p.exp(), log_p.masked_fill(~mask, 0.0)
    if ref_logits is None:
        return logp, -(p * finite).sum(-1), None
    log_q = torch.log_softmax(ref_logits.masked_fill(~mask, -torch.inf), -1).masked_fill(~mask, 0.0)
    return logp, -(p * finite).sum(-1), (p * (finite - log_q)).sum(-1)
