"""Two-stage training: contexts on disk, from which the controller is trained before the base model's run.

    cache.append(...) during a run of the base model; cache.save(path)
    for batch, inputs in cache.batches(...): lens_loss(controller(**inputs), batch, config).loss.backward()
    objective.set_stage("frozen", controller)        # in the main run the loss is 0

V contexts · W padded length
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from leanstep.lens.batch import LensBatch, Variant
from leanstep.lens.config import LensConfig

FORMAT = "leanstep-contexts-3"


class ContextCache:
    """Records of sequences: their variants with losses, and the controller's inputs for each variant.

    Example:
        cache = ContextCache()
        for variants in samples:
            cache.append(variants, num_tokens=64)
        for cached, inputs in cache.batches(2, config, seed=0, epoch=1):
            lens_loss(torch.zeros(cached.pos.shape), cached, config)       # scores [V, W]

    A batch from the cache has bitwise the loss of the live one.
    """

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._records)

    def append(
        self,
        variants: Sequence[Variant],
        num_tokens: int,
        *,
        inputs: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Add a sequence; tensors are copied to the host.

        Args:
            inputs: per variant, the controller's arguments by name, [W, ...] each (embeddings, encodings).
        """
        if not variants:
            raise ValueError("variants: expected at least one, got none")
        if inputs is not None and len(inputs) != len(variants):
            raise ValueError(f"inputs: expected one per variant, {len(variants)}, got {len(inputs)}")
        for variant, row in zip(variants, inputs or (), strict=False):
            for name, tensor in row.items():
                if tensor.shape[:1] != (len(variant.positions),):
                    expected = len(variant.positions)
                    raise ValueError(f"inputs: expected {expected} rows, got {name} {tuple(tensor.shape)}")
        self._records.append(
            {
                "num_tokens": num_tokens,
                "positions": [torch.as_tensor(v.positions).to("cpu", torch.int32) for v in variants],
                "lods": [torch.as_tensor(v.lods).to("cpu", torch.int8) for v in variants],
                "losses": [v.loss.detach().cpu() if isinstance(v.loss, Tensor) else v.loss for v in variants],
                "is_baseline": [v.is_baseline for v in variants],
                "inputs": [{name: x.detach().cpu() for name, x in row.items()} for row in inputs or ()],
            }
        )

    def batch(
        self, indices: Sequence[int], config: LensConfig, *, device: torch.device | str | None = None
    ) -> tuple[LensBatch, dict[str, Tensor]]:
        """Return these records as one micro-batch; its inputs by name, [V, W, ...] right-padded with 0."""
        records = [self._records[i] for i in indices]
        names = ("positions", "lods", "losses", "is_baseline")
        samples = [[Variant(*row) for row in zip(*(r[n] for n in names), strict=True)] for r in records]
        num_tokens = [r["num_tokens"] for r in records]
        batch = LensBatch.from_variants(samples, config, num_tokens=num_tokens, device=device)
        rows = [row for r in records for row in r["inputs"]]
        if rows and len(rows) != batch.num_contexts:
            raise ValueError(f"indices: expected inputs of all {batch.num_contexts} variants or of none")
        padded = {
            n: pad_sequence([row[n] for row in rows], batch_first=True) for n in (rows[0] if rows else ())
        }
        return batch, {name: tensor.to(batch.pos.device) for name, tensor in padded.items()}

    def batches(
        self,
        batch_size: int,
        config: LensConfig,
        *,
        seed: int = 0,
        epoch: int = 0,
        device: torch.device | str | None = None,
    ) -> Iterator[tuple[LensBatch, dict[str, Tensor]]]:
        """Yield one shuffled epoch; the order depends only on seed and epoch."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        for indices in torch.randperm(len(self), generator=generator).split(batch_size):
            yield self.batch(indices.tolist(), config, device=device)

    def save(self, path: str | Path) -> None:
        torch.save({"format": FORMAT, "records": self._records}, path)

    @classmethod
    def load(cls, path: str | Path) -> ContextCache:
        """Read a saved cache; only data is accepted, no code."""
        data = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"path: {path} is not a context cache ({FORMAT})")
        cache = cls()
        cache._records = data["records"]
        return cache
