"""Weights, gradients, optimizer state and scratch per rank, for AdamW and NorMuon."""

from __future__ import annotations

from typing import Literal

import torch

Sharding = Literal["replicated", "ZeRO-1", "ZeRO-2"]
SHARDINGS: tuple[Sharding, ...] = ("replicated", "ZeRO-1", "ZeRO-2")


def layer_matrices(layers: int, dim: int, hidden: int) -> list[tuple[int, int]]:
    """Four attention matrices and two of the MLP per layer."""
    return [*[(dim, dim)] * (4 * layers), *[(hidden, dim)] * (2 * layers)]


def plan_optimizer(
    optimizer: str,
    sharding: Sharding,
    world: int,
    layers: int,
    dim: int,
    hidden: int,
    vocab: int,
    dtype: torch.dtype,
    scratch_bytes: int | None,
) -> dict[str, int]:
    """Bytes on the fullest rank, by what they hold.

    ZeRO-1 shards the state, ZeRO-2 the gradients as well. Muon needs whole matrices, so they are dealt out
    whole: the fullest rank has ceil(count / world) of each shape. Adam's tensors are cut evenly.
    """
    size = dtype.itemsize
    matrices = layer_matrices(layers, dim, hidden)
    elements = sum(r * c for r, c in matrices)
    tables = 2 * vocab * dim
    # A bfloat16 weight keeps 16 more bits, so that the pair is a float32 master.
    master = 2 if dtype == torch.bfloat16 else 0
    share = world if sharding != "replicated" else 1
    owned = [
        (-(-count // share), shape)
        for shape, count in {s: matrices.count(s) for s in dict.fromkeys(matrices)}.items()
    ]
    table_share = -(-tables // share)
    if optimizer == "adamw":
        # torch's AdamW on bf16 weights is usually given fp32 masters: 4 bytes, not 2.
        held = -(-elements // share) + table_share
        state = held * (8 + (4 if master else 0))
        scratch = 0
    else:
        lines = sum(n * max(shape) for n, shape in owned)
        state = sum(n * shape[0] * shape[1] for n, shape in owned) * (4 + master) + 4 * lines
        state += table_share * (8 + master)
        largest = max(r * c for r, c in matrices)
        # Without a simulation: the normalised update, its next iterate and three square products.
        scratch = (
            scratch_bytes if scratch_bytes is not None else largest * (4 + 2 * size) + 3 * dim * dim * size
        )
    grads = (elements + tables) * size
    if sharding == "ZeRO-2":
        grads = sum(n * shape[0] * shape[1] for n, shape in owned) * size + table_share * size
    return {
        "weights": (elements + tables) * size,
        "gradients": grads,
        "state": state,
        "scratch": scratch,
    }


def simulate_scratch(dim: int, hidden: int, dtype: torch.dtype) -> int:
    """Scratch of one real step over one matrix of each shape: what appears beyond the state."""
    from leanstep.commands.plan_workloads import simulate_optimizer

    shapes = list(dict.fromkeys([(dim, dim), (hidden, dim)]))
    peak = simulate_optimizer(shapes, [], dtype, dtype)
    return peak.extra_bytes
