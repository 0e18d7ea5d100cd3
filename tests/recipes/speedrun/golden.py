"""Reads the speedrun vectors and makes their pseudo-random fills."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.speedrun.data import bigram_hash
from recipes.speedrun.train import GPT, TINY_SHAPE, Settings, Shape

# The model of the vectors.
VECTORS = Shape(
    model_dim=64, num_heads=4, mlp_hidden=256, window_block=4, bigram_vocab_size=640,
    dtype=torch.float32, bank_dtype=torch.float32,
)  # fmt: skip
# A model of odd sizes, every feature on.
TINY = replace(TINY_SHAPE, bigram_vocab_size=301, window_block=7)

FOLDER = Path(__file__).parents[2] / "vectors" / "speedrun"


@cache
def load(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def array(entry: dict) -> Tensor:
    kind = "uint16" if entry["dtype"] == "bfloat16_bits" else entry["dtype"]
    raw = np.frombuffer(base64.b64decode(entry["b64"]), dtype=kind).copy()
    return torch.from_numpy(raw).reshape(entry["shape"])


def fill(salt: int, shape: tuple[int, ...] | list[int], scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """The vectors' own generator: a 32-bit integer hash of the flat index."""
    mask = np.uint64(0xFFFFFFFF)
    x = (
        np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64((0x9E3779B9 * (salt + 1)) & 0xFFFFFFFF)
    ) & mask
    x ^= x >> np.uint64(16)
    x = (x * np.uint64(0x21F0AAAD)) & mask
    x ^= x >> np.uint64(15)
    x = (x * np.uint64(0x735A2D97)) & mask
    x ^= x >> np.uint64(15)
    value = shift + scale * (2 * (x.astype(np.float64) + 0.5) / 2**32 - 1)
    return torch.from_numpy(value.astype(np.float32)).reshape(tuple(shape))


@torch.no_grad()
def fill_parameters(model: GPT, params: dict) -> None:
    """Give a model the parameters that a vector file describes."""
    for name, about in params.items():
        parameter = getattr(model, name.removesuffix(".weight"))
        if "values" in about:
            value = torch.tensor(about["values"])
        else:
            value = fill(about["salt"], about["shape"], about["scale"], about["shift"])
        assert parameter.shape == value.shape, name
        parameter.copy_(value)


@torch.no_grad()
def scramble(model: GPT, seed: int = 0) -> GPT:
    """Move every parameter off its initial value: zeros would hide most gradients."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        spread = 0.3 if parameter.dim() <= 2 or "gate" in name else 1.5 / parameter.shape[-1] ** 0.5
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * spread
        parameter.add_(noise.to(parameter.dtype))
    return model


def make(build, shape: Shape = TINY, vocab_size: int = 200, windows=(1, 2), **switches) -> GPT:
    model = build(
        Settings(vocab_size=vocab_size, **switches), shape, generator=torch.Generator().manual_seed(0)
    )
    model.windows = windows
    return model


def hidden(model: GPT, tokens: Tensor, cu: Tensor) -> Tensor:
    """Final states of packed tokens."""
    ids = bigram_hash(tokens, model.shape.bigram_vocab_size)
    return model(tokens, ids, model.documents(cu, len(tokens)))


def loss(model: GPT, tokens: Tensor, targets: Tensor, cu: Tensor, mtp=(1.0, 0.5, 0.25)) -> Tensor:
    ids = bigram_hash(tokens, model.shape.bigram_vocab_size)
    return model.loss(tokens, targets, ids, model.documents(cu, len(tokens)), mtp)


def batch(vocab_size: int = 200, length: int = 83, documents: tuple[int, ...] = (0, 20, 21, 21, 60)):
    generator = torch.Generator().manual_seed(5)
    tokens, targets = torch.randint(0, vocab_size, (2, length), generator=generator)
    bounds = [b for b in documents if b < length] + [length]
    return tokens, targets, torch.tensor(bounds, dtype=torch.int32)
