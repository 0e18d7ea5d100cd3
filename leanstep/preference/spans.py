"""Looking at fewer masked entries per pair.

P pairs · W padded length
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import LensConfig
from .pairs import Pairs
from .terms import pair_factors


def sample_spans(
    scores: Tensor, sign: Tensor, pairs: Pairs, config: LensConfig, generator: torch.Generator | None
) -> tuple[Tensor, Tensor | None] | None:
    """Weights of the masked entries after span sampling; None without sampling.

    `topk` keeps the `span_k` entries with the steepest preference cost (ties: lowest index) and averages
    over them. That is biased on purpose: it looks at the mistakes only. `random` keeps `span_k` entries
    uniformly without replacement; `stride` keeps every `span_stride`-th masked entry from a random start.
    The expectation of the preference term under both equals the full term exactly.

    Returns:
        share [P, W]: weight in the preference term, in place of 1 / n.
        weight [P, W] or None: weight in the sums of rank and budget (Horvitz-Thompson), None = all entries.
    """
    if config.span_sampling == "none":
        return None
    dtype = scores.dtype
    masked = sign != 0
    num_masked = masked.sum(1, keepdim=True)
    device = generator.device if generator is not None else sign.device
    if config.span_sampling == "stride":
        phase = torch.randint(config.span_stride, (sign.shape[0], 1), generator=generator, device=device)
        index = masked.cumsum(1) - 1
        chosen = masked & ((index - phase.to(sign.device)) % config.span_stride == 0)
        factor = torch.full_like(num_masked, config.span_stride, dtype=dtype)
    else:
        if config.span_sampling == "topk":
            x = scores.detach().index_select(0, pairs.worse)
            scale, _ = pair_factors(pairs, config, dtype)
            aligned = torch.where(masked, sign.to(dtype) * x * scale[:, None], 0)
            if config.form == "logistic":
                key = torch.sigmoid(-aligned)
            else:
                key = torch.relu(config.hinge_margin - aligned)
            key = torch.where(sign < 0, key * config.collapse_weight, key)
        else:
            key = torch.rand(sign.shape, generator=generator, device=device).to(sign.device)
        rank = torch.argsort(torch.where(masked, key, -1), dim=1, descending=True, stable=True).argsort(1)
        chosen = masked & (rank < config.span_k)
        factor = num_masked.to(dtype) / num_masked.clamp(min=1, max=config.span_k)
    weight = torch.where(chosen, factor, 0)
    share = weight / num_masked.clamp(min=1)
    return share, None if config.aux_on_full else weight
