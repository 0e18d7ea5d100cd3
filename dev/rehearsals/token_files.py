"""Token files for both rehearsals of record 74: lengths and frequencies as in web text, no meaning.

Tokens follow Zipf's law and are independent, so pairs repeat less often than in text: an exchange of the rows
that bigrams touched is priced with too many rows rather than too few.
"""

from pathlib import Path

import torch

from recipes.speedrun.data import write_shard

BOS, TOKENS = 50_256, 1 << 22


def write_tokens(folder: Path) -> None:
    """Two shards `*train*.bin` and one `*val*.bin`: documents of 365 tokens (median), lognormal."""
    generator = torch.Generator().manual_seed(0)
    frequency = 1 / (torch.arange(BOS, dtype=torch.float64) + 2.7)
    # A uniform number finds its token in the distribution function.
    steps = frequency.cumsum(0).div_(frequency.sum())
    tokens = torch.searchsorted(steps, torch.rand(TOKENS, dtype=torch.float64, generator=generator))
    lengths = torch.empty(TOKENS // 300).log_normal_(5.9, 1.0, generator=generator).clamp_(20, 20_000)
    starts = lengths.long().cumsum(0)
    tokens[starts[starts < TOKENS]] = BOS
    tokens[0] = BOS
    for number in range(2):
        write_shard(folder / f"fineweb_train_{number}.bin", tokens)
    write_shard(folder / "fineweb_val_0.bin", tokens[: 1 << 20])
