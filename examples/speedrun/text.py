"""Text of the Python standard library as training data: on every machine, no download."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

VOCAB, LENGTH, SEQUENCES = 2048, 128, 2


@functools.cache
def corpus() -> Tensor:
    """Half a million byte pairs, the frequent ones first; all the rare ones are one token."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("[a-h]*.py")))[: 2**20]
    pairs = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().view(-1, 2)
    symbols, counts = (pairs[:, 0] * 256 + pairs[:, 1]).unique(return_inverse=True, return_counts=True)[1:]
    rank = counts.argsort(descending=True, stable=True).argsort()
    return rank[symbols].clamp(max=VOCAB - 1)


def make_batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs and next-token targets, [sequences, length] each."""
    generator = torch.Generator().manual_seed(3000 + step)
    starts = torch.randint(len(corpus()) - LENGTH - 1, (SEQUENCES, 1), generator=generator)
    window = corpus()[starts + torch.arange(LENGTH + 1)]
    return window[:, :-1], window[:, 1:]
