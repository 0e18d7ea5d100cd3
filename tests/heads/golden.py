"""Reads the stored outputs of the upstream project: the `core` vectors as tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "vectors" / "logprob"
# (atol, rtol) that exact mathematics meets, by dtype of the logits.
VALUE_TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (5e-6, 2e-6), torch.bfloat16: (5e-6, 2e-6)}
GRAD_TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (5e-6, 5e-6), torch.bfloat16: (5e-3, 1e-2)}


def core_cases() -> list[tuple[str, dict[str, Any]]]:
    cases = []
    for path in sorted(FOLDER.glob("core_*.json")):
        cases += [(f"{path.stem}:{case['name']}", case) for case in json.loads(path.read_text())["cases"]]
    return cases


def numbers(values: Any) -> Tensor:
    """Convert nested lists, with "inf" and "nan" as strings, to fp64."""
    if isinstance(values, list):
        return torch.stack([numbers(v) for v in values]) if values else torch.zeros(0, dtype=torch.float64)
    return torch.tensor(float(values), dtype=torch.float64)


def dtype_of(case: dict[str, Any]) -> torch.dtype:
    return getattr(torch, case["dtype"].removeprefix("torch."))


def ragged(lists: list[list[int]] | None) -> tuple[Tensor, Tensor] | None:
    if lists is None:
        return None
    ids = torch.tensor([i for one in lists for i in one], dtype=torch.int64)
    return ids, torch.tensor([0] + [len(one) for one in lists]).cumsum(0)


def expected_runs(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs to compare with; where upstream is wrong, its values are replaced by exact ones."""
    runs = []
    for run in case["runs"]:
        run = dict(run)
        if case["expect"] == "exact":
            run.update({k: v for k, v in case["exact"].items() if k in run and run[k] is not None})
        runs.append(run)
    return runs
