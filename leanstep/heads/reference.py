"""Log-probs, entropy and losses in plain torch with full [N, V] tensors: in fp64, the reference of tests."""

from __future__ import annotations

import torch
from torch import Tensor

from leanstep.heads.losses import row_divergence


def reference_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperature: float | Tensor = 1.0,
    allowed: list[list[int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of `targets` [N] and the entropy of softmax(logits / temperature), [N] each.

    `allowed` restricts the softmax of each row's log-prob to the listed ids and the target; the entropy
    covers the whole vocabulary. A logit of -inf makes the entropy NaN.
    """
    if isinstance(temperature, Tensor):
        temperature = temperature.to(logits.dtype).unsqueeze(-1)
    z = logits / temperature
    log_p = torch.log_softmax(z, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    if allowed is not None:
        inside = torch.zeros_like(z, dtype=torch.bool).scatter_(1, targets.unsqueeze(-1), True)
        for row, ids in enumerate(allowed):
            inside[row, ids] = True
        log_p = torch.log_softmax(z.masked_fill(~inside, -torch.inf), -1)
    return log_p.gather(1, targets.unsqueeze(-1)).squeeze(-1), entropy


def reference_linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    rows: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the same two values from hidden [T, D] and weight [V, D]: project all rows, select `rows`."""
    logits = scale * torch.nn.functional.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if rows is not None:
        logits = logits.index_select(0, rows)
    return reference_logprobs(logits, targets, temperature)


def reference_masked_token_logprobs(
    hidden: Tensor, weight: Tensor, tokens: Tensor, mask: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return token log-probs and entropies of a padded batch, [B, T - 1] each, 0 where `mask` [B, T] is 0."""
    logits = torch.nn.functional.linear(hidden[:, : tokens.shape[1] - 1], weight)
    scored = mask[:, 1:].bool()
    targets = torch.where(scored, tokens[:, 1:], 0)
    logp, entropy = reference_logprobs(logits.flatten(0, 1), targets.flatten(), temperature)
    return torch.where(scored, logp.view(scored.shape), 0), torch.where(scored, entropy.view(scored.shape), 0)


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
) -> Tensor:
    """Return D(teacher, student) at `temperature`, [N]."""
    log_p = torch.log_softmax(logits / temperature, -1)
    log_q = torch.log_softmax(teacher_logits / temperature, -1)
    return row_divergence(log_p, log_q, kind)


def reference_top_k(log_p: Tensor, ids: Tensor, log_q: Tensor, kind: str | tuple[str, float]) -> Tensor:
    """Return D over the k listed outcomes and the tail, [N]; the tails are summed over their columns."""
    inside = torch.zeros_like(log_p, dtype=torch.bool).scatter(1, ids, True)
    tail_p = torch.logsumexp(log_p.masked_fill(inside, -torch.inf), -1, keepdim=True)
    tail_q = torch.log1p(-log_q.exp().sum(-1, keepdim=True))
    return row_divergence(torch.cat([log_p.gather(1, ids), tail_p], 1), torch.cat([log_q, tail_q], 1), kind)
