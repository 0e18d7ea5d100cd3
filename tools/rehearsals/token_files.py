"""Token files whose tokens mean nothing, for both rehearsals of record 74."""

from pathlib import Path

import torch

from leanstep.gpt.data import write_shard

BOS, TOKENS = 50_256, 1 << 22


def write_tokens(folder: Path) -> None:
    """Two shards `*train*.bin` and one `*val*.bin`: documents of 20 to 2,000 tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(BOS, (TOKENS,), generator=generator)
    lengths = torch.randint(20, 2000, (TOKENS // 500,), generator=generator)
    starts = lengths.cumsum(0)
    tokens[starts[starts < TOKENS]] = BOS
    tokens[0] = BOS
    for number in range(2):
        write_shard(folder / f"fineweb_train_{number}.bin", tokens)
    write_shard(folder / "fineweb_val_0.bin", tokens[: 1 << 20])
