"""Working contexts kept on disk: train the controller later, without the base model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .batch import LensBatch, Variant
from .config import LensConfig

FORMAT = "leanstep-contexts-1"


@dataclass(frozen=True)
class CachedBatch:
    """A micro-batch from the cache: the batch, whose sequences they are, and what was stored beside them."""

    batch: LensBatch
    sequence_ids: list[int]
    extras: list[Tensor | None]


class ContextCache:
    """Append-only records: sequence id, variants with losses, one optional tensor per sequence.

    Positions are int32, lods int8, losses float32, in flat tensors with offsets. A batch from the cache
    gives the same loss, bit for bit, as the live one whose losses were float32.
    """

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._records)

    def append(
        self, sequence_id: int, variants: Sequence[Variant], num_tokens: int, *, extra: Tensor | None = None
    ) -> None:
        """Add a sequence. `extra`: token ids or embeddings; kept as given, on the host."""
        if not variants:
            raise ValueError(f"variants: sequence {sequence_id} has none")
        losses = [torch.nan if v.loss is None else float(v.loss) for v in variants]
        self._records.append(
            {
                "id": int(sequence_id),
                "num_tokens": int(num_tokens),
                "positions": [torch.as_tensor(v.positions, device="cpu").to(torch.int32) for v in variants],
                "lods": [torch.as_tensor(v.lods, device="cpu").to(torch.int8) for v in variants],
                "losses": torch.tensor(losses, dtype=torch.float32),
                "baseline": torch.tensor([v.is_baseline for v in variants]),
                "extra": None if extra is None else extra.detach().cpu(),
            }
        )

    def batch(
        self, indices: Sequence[int], config: LensConfig, *, device: torch.device | str | None = None
    ) -> CachedBatch:
        """The records with these indices as one micro-batch."""
        records = [self._records[i] for i in indices]
        samples = []
        for r in records:
            rows = zip(r["positions"], r["lods"], r["losses"], r["baseline"].tolist(), strict=True)
            samples.append(
                [Variant(p, lod, None if loss.isnan() else loss, base) for p, lod, loss, base in rows]
            )
        made = LensBatch.from_variants(
            samples,
            config,
            num_tokens=[r["num_tokens"] for r in records],
            device=device,
            loss_dtype=torch.float32,
        )
        return CachedBatch(made, [r["id"] for r in records], [r["extra"] for r in records])

    def batches(
        self,
        batch_size: int,
        config: LensConfig,
        *,
        seed: int = 0,
        epoch: int = 0,
        device: torch.device | str | None = None,
    ) -> Iterator[CachedBatch]:
        """One shuffled epoch; the order depends on seed and epoch only."""
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(self), generator=generator).tolist()
        for begin in range(0, len(order), batch_size):
            yield self.batch(order[begin : begin + batch_size], config, device=device)

    def save(self, path: str | Path) -> None:
        """Write flat tensors; the file holds no code and loads with `weights_only`."""
        records = self._records
        flat = [(p, lod) for r in records for p, lod in zip(r["positions"], r["lods"], strict=True)]
        extras = {str(i): r["extra"] for i, r in enumerate(records) if r["extra"] is not None}
        empty = torch.zeros(0)
        torch.save(
            {
                "format": FORMAT,
                "ids": torch.tensor([r["id"] for r in records], dtype=torch.int64),
                "num_tokens": torch.tensor([r["num_tokens"] for r in records], dtype=torch.int64),
                "counts": torch.tensor([len(r["positions"]) for r in records], dtype=torch.int64),
                "lengths": torch.tensor([len(p) for p, _ in flat], dtype=torch.int64),
                "positions": torch.cat([p for p, _ in flat]) if flat else empty.to(torch.int32),
                "lods": torch.cat([lod for _, lod in flat]) if flat else empty.to(torch.int8),
                "losses": torch.cat([r["losses"] for r in records]) if records else empty,
                "baseline": torch.cat([r["baseline"] for r in records]) if records else empty.bool(),
                "extras": extras,
            },
            path,
        )

    @classmethod
    def load(cls, path: str | Path) -> ContextCache:
        """Read a saved cache; only tensors are accepted."""
        data = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"path: {path} is not a context cache ({FORMAT})")
        cache = cls()
        lengths, counts = data["lengths"].tolist(), data["counts"].tolist()
        positions, lods = data["positions"].split(lengths), data["lods"].split(lengths)
        losses, baseline = data["losses"].split(counts), data["baseline"].split(counts)
        first = 0
        for i, (sequence_id, num_tokens, count) in enumerate(
            zip(data["ids"].tolist(), data["num_tokens"].tolist(), counts, strict=True)
        ):
            cache._records.append(
                {
                    "id": sequence_id,
                    "num_tokens": num_tokens,
                    "positions": list(positions[first : first + count]),
                    "lods": list(lods[first : first + count]),
                    "losses": losses[i],
                    "baseline": baseline[i],
                    "extra": data["extras"].get(str(i)),
                }
            )
            first += count
        return cache
