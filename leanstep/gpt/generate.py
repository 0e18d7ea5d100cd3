"""Continue prompts token by token: enough for samples and for small RL recipes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def generate(
    model: Any,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    generator: torch.Generator | None = None,
    temperature: float = 1.0,
    stop: int | None = None,
) -> Tensor:
    """Sample continuations; the prompts of a batch are packed as documents of one sequence.

    Every new token runs the whole sequence again: right for short sequences, wasteful for long ones. With a
    model whose smear, key offset or bigrams cross documents, a row's first token sees its neighbour;
    `respect_docs` prevents that.

    Args:
        tokens: [T] one prompt, or [B, T] prompts of equal length, T >= 1.
        max_new_tokens: how many tokens to add.
        generator: for sampling, on the model's device.
        temperature: softmax temperature; 0 takes the most likely token.
        stop: once a row has produced this token, it only repeats it.

    Returns:
        [T + new] or [B, T + new] int64, prompts included. Padding ids of the vocabulary never come.
    """
    if tokens.dim() not in (1, 2) or tokens.is_floating_point() or tokens.shape[-1] < 1:
        raise ValueError(f"tokens: expected [T] or [B, T] integers, got {tokens.dtype} {tuple(tokens.shape)}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: expected 0 or more, got {max_new_tokens}")
    if temperature < 0:
        raise ValueError(f"temperature: expected 0 or more, got {temperature}")
    rows = tokens.long() if tokens.dim() == 2 else tokens.long()[None]
    count, vocab = rows.shape[0], model.config.vocab_size
    done = torch.zeros(count, dtype=torch.bool, device=rows.device)
    for _ in range(max_new_tokens):
        length = rows.shape[1]
        bounds = torch.arange(0, count * length + 1, length, dtype=torch.int32)
        states = model.hidden(rows.reshape(-1), bounds)[length - 1 :: length]
        logits = model.logits(states)[:, :vocab].float()
        if temperature == 0:
            new = logits.argmax(-1)
        else:
            new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        if stop is not None:
            new = torch.where(done, stop, new)
            done |= new == stop
        rows = torch.cat([rows, new[:, None]], dim=1)
    return rows if tokens.dim() == 2 else rows[0]
