"""Workloads and rows that several benchmarks of this family share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import (
    Params,
)
from leanstep.lens import LensBatch, LensConfig, SamplingConfig
from recipes.lens.contexts import reachable_length, sample_variants

BATCH_TENSORS = ("pos", "lod", "valid", "loss", "row", "tokens", "baseline")


def make_batch(
    params: Params, generator: torch.Generator, device: torch.device
) -> tuple[LensBatch, LensConfig]:
    """Return variants of random sequences with random losses, drawn as in training."""
    config = LensConfig(
        block_size=params["block"],
        max_lod=params["max_lod"],
        sampling=SamplingConfig(max_pairs=params["max_pairs"], num_random_variants=params["variants"] - 1),
    )
    tokens = params["tokens"]
    target = reachable_length(tokens, int(0.9 * tokens), config.block_size)
    samples = []
    for _ in range(params["samples"]):
        variants = sample_variants(
            tokens,
            config.block_size,
            config.max_lod,
            config.sampling.num_random_variants,
            target,
            generator,
            recent_tokens=min(128, tokens // 8),
        )
        losses = 2.5 + 0.2 * torch.randn(len(variants), generator=generator)
        samples.append([replace(v, loss=x) for v, x in zip(variants, losses.tolist(), strict=True)])
    batch = LensBatch.from_variants(samples, config, num_tokens=tokens, loss_dtype=torch.float32)
    return batch.to(device), config


def batch_tensors(batch: LensBatch) -> dict[str, Tensor]:
    return {name: getattr(batch, name) for name in BATCH_TENSORS}


def batch_of(tensors: dict[str, Tensor], constants: dict[str, Any]) -> LensBatch:
    """Rebuild the batch from the tensors of a workload, without computation."""
    names = {name: tensors[name] for name in BATCH_TENSORS}
    return LensBatch(**names, num_tokens=constants["num_tokens"])  # type: ignore[arg-type]


def constants(batch: LensBatch, config: LensConfig) -> dict[str, Any]:
    return {"config": config, "num_tokens": batch.num_tokens}


LOSS_TINY = {"samples": 3, "variants": 3, "tokens": 96, "block": 4, "max_lod": 2, "max_pairs": 8}
