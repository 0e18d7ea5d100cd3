"""Golden vectors as batches: outputs of the original project, read from tests/vectors/lens."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from leanstep.lens.batch import LensBatch, Variant
from leanstep.lens.config import LensConfig, ObjectiveConfig, SamplingConfig

FOLDER = Path(__file__).parent.parent / "vectors" / "lens"
NAMES = sorted(p.stem for p in FOLDER.glob("*.json"))


@cache
def load(name: str) -> dict[str, Any]:
    data = json.loads((FOLDER / f"{name}.json").read_text())
    running = 0
    for sample in data["samples"]:
        for variant in sample["variants"]:
            if "runs" in variant:
                expand_runs(variant, data["config"]["block_size"], running)
            running += 1
    return data


def expand_runs(variant: dict[str, Any], block: int, running: int) -> None:
    variant["positions"] = [
        start + k * block**lod for start, lod, count in variant["runs"] for k in range(count)
    ]
    variant["lods"] = [lod for _, lod, count in variant["runs"] for _ in range(count)]
    assert len(variant["positions"]) == variant["length"]
    variant["scores"] = [
        math.tanh(1.2 * math.sin(0.37 * j + 1.91 * running) + 0.4 * math.cos(0.011 * j * (running + 1)))
        for j in range(variant["length"])
    ]


def config_of(data: dict[str, Any], **changes: Any) -> LensConfig:
    """Return the flat configuration of a vector file, with `changes`, as records."""
    values = {k: v for k, v in data["config"].items() if k != "ema_in"} | changes

    def take(record: type) -> Any:
        return record(**{f.name: values.pop(f.name) for f in fields(record) if f.name in values})

    objective, sampling = take(ObjectiveConfig), take(SamplingConfig)
    return LensConfig(**values, objective=objective, sampling=sampling)


def batch_of(data: dict[str, Any]) -> LensBatch:
    samples = [
        [Variant(v["positions"], v["lods"], v["loss"], v["is_baseline"]) for v in sample["variants"]]
        for sample in data["samples"]
    ]
    return LensBatch.from_variants(
        samples, config_of(data), num_tokens=[s["seq_tokens"] for s in data["samples"]]
    )


def scores_of(data: dict[str, Any], batch: LensBatch, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return scores as [V, W]; padded entries have a value that would be noticed if it were read."""
    scores = torch.full(batch.pos.shape, 37.0, dtype=torch.float64)
    flat = [v["scores"] for sample in data["samples"] for v in sample["variants"]]
    for row, values in enumerate(flat):
        scores[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
    return scores.to(dtype)


def canonical_slots(data: dict[str, Any], batch: LensBatch) -> list[tuple[int, int, int] | None]:
    """Return the static list of pair slots: the canonical pairs of each sample, then empty slots."""
    width = batch.loss.shape[1]
    per_sample = min(data["config"]["max_pairs"], math.comb(width, 2))
    slots: list[tuple[int, int, int] | None] = []
    for sample in range(len(data["samples"])):
        pairs: list[tuple[int, int, int] | None] = [
            (s, b, w) for s, b, w, _ in data["pairs_canonical"] if s == sample
        ]
        slots += [*pairs, *[None] * (per_sample - len(pairs))]
    return slots


def pair_order_of(data: dict[str, Any], batch: LensBatch) -> torch.Tensor:
    """Return the permutation of the static slots that restores the processing order of the pairs."""
    slots = canonical_slots(data, batch)
    processed = [slots.index((p["sample"], p["better"], p["worse"])) for p in data["pairs"]]
    rest = [k for k in range(len(slots)) if k not in processed]
    return torch.tensor([*processed, *rest], dtype=torch.int64)


def assert_gradient(
    data: dict[str, Any], batch: LensBatch, grad: torch.Tensor, rtol: float, atol: float
) -> None:
    outputs = data["outputs"]
    row = 0
    if "grad" in outputs:
        for sample in outputs["grad"]:
            for expected in sample:
                torch.testing.assert_close(
                    grad[row, : len(expected)].double(),
                    torch.tensor(expected, dtype=torch.float64),
                    rtol=rtol,
                    atol=atol,
                )
                row += 1
    else:
        for sample in outputs["grad_summary"]:
            for expected in sample:
                g = grad[row].double()
                j = torch.arange(len(g), dtype=torch.float64)
                got = torch.stack([g.sum(), g.abs().sum(), (g * j.cos()).sum()])
                torch.testing.assert_close(
                    got, torch.tensor(expected, dtype=torch.float64), rtol=rtol, atol=10 * atol
                )
                row += 1
    assert (grad[~batch.valid] == 0).all()
