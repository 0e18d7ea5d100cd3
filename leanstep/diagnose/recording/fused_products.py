"""What an op multiplies besides a plain matmul: fused attention, grouped products, convolutions.

Counted is what the kernel does, not what a formula says: half of the square under a causal mask, the tokens
that an expert got. The scores that a fused backward makes a second time are kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

GROUPED = ("_grouped_mm", "_scaled_grouped_mm")
CONVOLUTIONS = ("convolution", "convolution_overrideable", "convolution_backward")


@dataclass(frozen=True)
class Counted:
    """FLOPs of one call by the type of its factors; `repeated` of them a forward has done before."""

    dtype: torch.dtype
    flops: int
    repeated: int = 0


class FusedProducts:
    """The static half: which arguments of an op are which. `of` gives None for ops that multiply nothing."""

    __slots__ = ("backward", "kind", "places", "rows_first")

    def __init__(self, kind: str, name: str, places: dict[str, int]) -> None:
        self.kind, self.places = kind, places
        self.backward = name.endswith("_backward")
        # [B, T, H, D]; the public attention ops have heads first.
        self.rows_first = not name.startswith("_scaled_dot_product")

    @classmethod
    def of(cls, schema: Any) -> FusedProducts | None:
        name = schema.name.partition("::")[2]
        places = {argument.name: i for i, argument in enumerate(schema.arguments)}
        if "attention" in name and {"query", "key", "value"} <= places.keys():
            return cls("attention", name, places)
        if name in GROUPED:
            return cls("grouped", name, places)
        return cls("convolution", name, places) if name in CONVOLUTIONS else None

    def count(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, outs: Any) -> Counted | None:
        """None where only the device knows: attention over packed sequences of any length."""
        if self.kind == "attention":
            return self._attention(args, kwargs)
        if self.kind == "grouped":
            a, b = self._given("self", args, kwargs), self._given("mat2", args, kwargs)
            groups = a.shape[0] if a.ndim == b.ndim == 3 else 1
            return Counted(a.dtype, 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1])
        weight = self._given("weight", args, kwargs)
        grid = outs[0]
        if self._given("transposed", args, kwargs):
            grid = self._given("input", args, kwargs)
        elif self.backward:
            grid = self._given("grad_output", args, kwargs)
        # Each element of the grid meets one filter, forward and once more for each gradient.
        times = sum(self._given("output_mask", args, kwargs)[:2]) if self.backward else 1
        return Counted(weight.dtype, times * 2 * grid.numel() * (weight.numel() // weight.shape[0]))

    def _attention(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Counted | None:
        query, key, value = (self._given(name, args, kwargs) for name in ("query", "key", "value"))
        packed = self.rows_first and self._given("cu_seqlens_q", args, kwargs) is not None
        if query.ndim != 4 or packed:
            return None
        heads, rows = (2, 1) if self.rows_first else (1, 2)
        causal = self._given("is_causal", args, kwargs) or self._given("custom_mask_type", args, kwargs)
        window = self._given("window_size_left", args, kwargs)
        pairs = num_pairs(
            query.shape[rows], key.shape[rows], bool(causal), window if (window or -1) >= 0 else None
        )
        one = 2 * query.shape[0] * query.shape[heads] * pairs
        scores, mixed = one * query.shape[-1], one * value.shape[-1]
        if self.backward:
            return Counted(query.dtype, 2 * (scores + mixed), scores)
        return Counted(query.dtype, scores + mixed)

    def _given(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        place = self.places.get(name, len(args))
        return args[place] if place < len(args) else (kwargs or {}).get(name)


def num_pairs(queries: int, keys: int, causal: bool, window: int | None = None) -> int:
    """Pairs of query and key that a kernel multiplies: row i sees keys 0 to i, at most window + 1."""
    if not causal:
        return queries * keys
    reach = keys if window is None else min(keys, window + 1)
    growing = min(queries, reach)
    return growing * (growing + 1) // 2 + (queries - growing) * reach
