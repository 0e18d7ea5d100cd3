"""Hashed bigrams: one table row per (previous token, token), collisions accepted."""

from __future__ import annotations

import torch
from torch import Tensor

# Odd multipliers of the record; products wrap around in 32 bits.
TOKEN_FACTOR = 36313
PREVIOUS_FACTOR = 27191


def _wrap(x: Tensor) -> Tensor:
    """The low 32 bits as a signed number; exact, because both factors stay far below 63 bits."""
    return ((x + 2**31) & (2**32 - 1)) - 2**31


def bigram_hash(tokens: Tensor, table_size: int, starts: Tensor | None = None) -> Tensor:
    """Row ids [T] of the bigram table for tokens [T].

    Position 0 takes the last row. Position 1 takes the last row's number for its predecessor, as the record
    does (it overwrites slot 0 before hashing). Documents are ignored unless `starts` is given.

    Args:
        tokens: [T] integers.
        table_size: rows of the table; ids are within 0..table_size - 1.
        starts: [T] bool, True at the first token of each document; those take the last row.
    """
    if tokens.dim() != 1 or tokens.is_floating_point():
        raise ValueError(f"tokens: expected [T] integers, got {tokens.dtype} {tuple(tokens.shape)}")
    if table_size < 2:
        raise ValueError(f"table_size: expected at least 2, got {table_size}")
    last = table_size - 1
    current = tokens.long()
    if current.numel() == 0:
        return current
    previous = torch.cat([current.new_full((1,), last), current[:-1]])
    if starts is None:
        previous[1:2] = last
    mixed = torch.bitwise_xor(_wrap(TOKEN_FACTOR * current), _wrap(PREVIOUS_FACTOR * previous))
    ids = torch.remainder(mixed, last)
    ids[:1] = last
    if starts is not None:
        ids.masked_fill_(starts, last)
    return ids
