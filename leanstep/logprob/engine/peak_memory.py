"""Closed-form peak memory of every way to get token log-probs, in bytes, by what the bytes hold.

    plan = plan_memory(205280, 76032, 2560, rho=0.25, method="linear")
    plan.total_bytes, plan.parts["tiles"], plan.flops

The formulas count what is alive at the highest point of forward plus backward with both gradients wanted. The
hidden states and the head's weight are inputs and counted apart. Temporaries inside a single kernel and the
allocator's rounding are not counted; `leanstep plan logprob` runs the real code on fake tensors beside them.
"""

# T rows · N kept rows (T' = rho T) · V vocabulary (of one rank) · D model · c x w tile

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

Method = Literal["plain", "gathered-loss", "gathered-step", "logits", "linear", "policy", "frozen", "no-grad"]
METHODS: tuple[Method, ...] = get_args(Method)

DESCRIPTIONS: dict[Method, str] = {
    "plain": "project every row, log_softmax, entropy",
    "gathered-loss": "slime pull 2076: gather kept logit rows, chunked cross-entropy; the loss alone",
    "gathered-step": "the same in a training step, with the [T, V] logits it gathers from",
    "logits": "leanstep.token_logprobs(rows=...) on existing [T, V] logits",
    "linear": "leanstep.linear_logprobs: kept hidden rows, tiles, recompute in backward",
    "policy": "leanstep.linear_policy_loss: gradients formed in the forward pass",
    "frozen": "leanstep.linear_logprobs with a frozen head: backward without a GEMM",
    "no-grad": "leanstep.linear_logprobs under no_grad: old and reference log-probs",
}


@dataclass(frozen=True)
class MemoryPlan:
    """Peak of one method.

    Attributes:
        kept_rows: T' = rho T.
        input_bytes: hidden and weight (for `gathered-loss`, which starts from logits: nothing).
        parts: bytes alive at the peak beyond the inputs, by what they hold.
        flops: multiply-adds counted twice, forward and backward; 0 where the method starts from logits.
    """

    method: Method
    kept_rows: int
    input_bytes: int
    parts: dict[str, int]
    flops: int

    @property
    def extra_bytes(self) -> int:
        """Everything beyond the inputs; the gradients that must be returned are in it."""
        return sum(self.parts.values())

    @property
    def total_bytes(self) -> int:
        return self.input_bytes + self.extra_bytes

    @property
    def largest_part(self) -> tuple[str, int]:
        return max(self.parts.items(), key=lambda item: item[1])


def plan_memory(
    T: int,
    V: int,
    D: int,
    rho: float = 1.0,
    *,
    method: Method = "linear",
    dtype: torch.dtype = torch.bfloat16,
    chunk: int = 1024,
    tile: int | None = None,
    entropy: bool = True,
    kernels: bool = False,
) -> MemoryPlan:
    """Peak bytes and FLOPs of `method` at these shapes.

    Args:
        T: rows of the micro-batch, prompt and padding included.
        V: vocabulary columns of one rank.
        D: hidden width.
        rho: kept fraction of the rows, 0 .. 1.
        method: see `DESCRIPTIONS`.
        dtype: of hidden and weight. Logits and statistics are fp32 (fp64 for fp64).
        chunk: rows of a tile.
        tile: columns of a tile; None = V.
        entropy: whether an entropy gradient flows.
        kernels: whether Triton or C++ makes the passes over a tile: they need no second one.
    """
    for name, value in (
        ("T", T),
        ("V", V),
        ("D", D),
        ("chunk", chunk),
        ("tile", V if tile is None else tile),
    ):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if not 0 <= rho <= 1:
        raise ValueError(f"rho: expected a fraction between 0 and 1, got {rho}")
    if method not in METHODS:
        raise ValueError(f"method: got {method!r}, expected one of {', '.join(METHODS)}")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating dtype, got {dtype}")

    N = round(rho * T)
    c, w = min(chunk, max(N, 1)), min(V if tile is None else tile, V)
    size = dtype.itemsize
    full = max(size, 4)
    hidden_grad, weight_grad = T * D * size, V * D * full
    # A 16-bit weight needs a 16-bit copy of the gradient tile for its GEMMs.
    work, copy = 0 if kernels else full, 2 if size < 4 else 0
    tiles = c * w * (full + work + copy)
    statistics = 5 * full * N + c * D * (full + 2)
    inputs = (T * D + V * D) * size
    rows_flops, all_flops = N * D * V, T * D * V

    if method == "plain":
        # log-probs and probabilities are saved; two gradients and a product are alive while they meet.
        parts = {"log-probs, probabilities, gradients [T, V] x 5": 5 * T * V * full}
        parts |= {"hidden gradient": hidden_grad, "weight gradient": weight_grad}
        return MemoryPlan(method, N, inputs, parts, 6 * all_flops)
    if method == "gathered-loss":
        parts = {
            "kept logits [T', V]": N * V * full,
            "chunk buffers, softmax turned gradient [T', V]": N * V * full,
            "concatenated gradient [T', V]": N * V * full,
        }
        return MemoryPlan(method, N, 0, parts, 0)
    if method == "gathered-step":
        parts = {
            "logits [T, V]": T * V * full,
            "gradient of logits [T, V]": T * V * full,
            "kept logits and their gradient [T', V] x 2": 2 * N * V * full,
        }
        return MemoryPlan(method, N, inputs, parts, 6 * all_flops)
    if method == "logits":
        parts = {
            "logits [T, V]": T * V * full,
            "gradient of logits [T, V]": T * V * full,
            "tiles": 2 * c * V * (full + work),
            "statistics": 5 * full * N,
        }
        return MemoryPlan(method, N, inputs, parts, 6 * all_flops)
    if method == "no-grad":
        parts = {"tiles": c * w * (full + work), "statistics": 4 * full * N}
        return MemoryPlan(method, N, inputs, parts, 2 * rows_flops)
    if method == "frozen":
        # Exponentials beside the logits, kernels or not: both are multiplied with the weight.
        tiles = c * w * (2 * full + copy)
        parts = {"hidden gradient": hidden_grad, "tiles": tiles, "statistics": statistics}
        parts[f"saved directions [T', D] x {2 if entropy else 1}"] = N * D * size * (2 if entropy else 1)
        return MemoryPlan(method, N, inputs, parts, (6 if entropy else 4) * rows_flops)
    if method == "policy":
        tiles = c * V * (full + work + copy)
    parts = {
        "hidden gradient": hidden_grad,
        "weight gradient": weight_grad,
        "tiles": tiles,
        "statistics": statistics,
    }
    return MemoryPlan(method, N, inputs, parts, (6 if method == "policy" else 8) * rows_flops)
