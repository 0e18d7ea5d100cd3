"""Reads the speedrun vectors: arrays are base64 of little-endian bytes, bf16 as bit patterns."""

from __future__ import annotations

import base64
import json
from functools import cache
from pathlib import Path

import numpy as np
import torch

FOLDER = Path(__file__).parent.parent / "vectors" / "speedrun"


@cache
def load(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def array(entry: dict) -> torch.Tensor:
    bits = entry["dtype"] == "bfloat16_bits"
    raw = np.frombuffer(base64.b64decode(entry["b64"]), dtype=np.uint16 if bits else entry["dtype"]).copy()
    tensor = torch.from_numpy(raw.view(np.int16) if bits else raw).reshape(entry["shape"])
    return tensor.view(torch.bfloat16) if bits else tensor


def bits16(values: list[int], shape: list[int]) -> torch.Tensor:
    """Return a list of unsigned 16-bit patterns as int16."""
    return torch.from_numpy(np.array(values, dtype=np.uint16).view(np.int16)).reshape(shape)
