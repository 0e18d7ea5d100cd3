"""FLOPs of a training step and MFU, with one convention for all commands.

`diagnose`, the trainer callbacks and `rehearse` count with the functions below and report the same MFU:

- A product of [m, k] and [k, n] counts 2mkn in any op: matmul, attention, grouped product, convolution.
  Elementwise work and reductions count zero.
- Fused attention counts the pairs of query and key that its mask allows: T(T + 1) / 2 under a causal mask.
- A mixture of experts counts the tokens that its experts receive.
- The numerator is the model's forward and backward (`StepFlops.model`). Recomputation (checkpoints, the
  scores of a fused attention backward, logits that a tiled head computes again) is `recomputed`; products of
  the optimizer are `optimizer`. Neither is in the numerator.
- Each product is compared with the peak of its own operand type.

`torch.utils.flop_counter` agrees on matmuls and plain convolutions. It counts the full square of causal
attention, the repeated scores of its backward, and the weight gradient of a grouped convolution `groups`
times, so the formulas are written out here. They use only shapes; torch is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from leanstep.units import seconds as in_words

PARTS = ("forward", "backward", "recompute", "optimizer")

# Matmul -> argument positions of its two factors.
MATMULS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "addmm_": (1, 2),
    "baddbmm": (1, 2),
    "baddbmm_": (1, 2),
    "addbmm": (1, 2),
    "linear": (0, 1),
    "mv": (0, 1),
    "addmv": (1, 2),
    "_addmm_activation": (1, 2),
    "_scaled_mm": (0, 1),
}
GROUPED = ("_grouped_mm", "_scaled_grouped_mm")
CONVOLUTIONS = ("convolution", "convolution_overrideable", "convolution_backward")


# Shapes to FLOPs


class MatmulSizes(NamedTuple):
    """`batch` products of [rows, inner] and [inner, columns]."""

    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        return 2 * math.prod(self)


def matmul_sizes(name: str, a: Sequence[int], b: Sequence[int]) -> MatmulSizes:
    """Return the sizes of a matmul or grouped product from the shapes of its factors.

    If one factor of a grouped product has two dimensions, the groups share its rows or columns.
    """
    inner = a[-1]
    if name == "linear":
        return MatmulSizes(1, math.prod(a[:-1]), inner, b[0])
    batch = a[0] if len(a) == len(b) == 3 else 1
    return MatmulSizes(batch, a[-2], inner, 1 if len(b) == 1 else b[-1])


def num_pairs(queries: int, keys: int, causal: bool, window: int | None = None) -> int:
    """Return the pairs of query and key under a mask: row i sees keys 0 to i, at most window + 1 of them."""
    if not causal:
        return queries * keys
    reach = keys if window is None else min(keys, window + 1)
    growing = min(queries, reach)
    return growing * (growing + 1) // 2 + (queries - growing) * reach


class AttentionFlops(NamedTuple):
    """FLOPs of the model, and of the scores that a fused backward recomputes."""

    model: float
    repeated: float


def attention_flops(pairs: float, score_dim: int, value_dim: int, *, backward: bool) -> AttentionFlops:
    """Return the FLOPs of fused attention. pairs: query-key pairs over all heads and sequences."""
    scores, mixed = 2 * pairs * score_dim, 2 * pairs * value_dim
    if backward:
        return AttentionFlops(2 * (scores + mixed), scores)
    return AttentionFlops(scores + mixed, 0)


def convolution_flops(positions: int, weight: Sequence[int]) -> int:
    """Return the FLOPs of a convolution, or of one of its gradients.

    positions: elements of the output (for a transposed convolution, of the input); each uses one filter.
    """
    return 2 * positions * (math.prod(weight) // max(1, weight[0]))


# Calls to FLOPs


@dataclass(frozen=True)
class Counted:
    """FLOPs of one call and the dtype of its factors; `repeated` of them repeat work of the forward."""

    dtype: Any
    flops: int
    repeated: int = 0


CountCall = Callable[[tuple[Any, ...], "dict[str, Any] | None", Any], "Counted | None"]


def counter_of(schema: Any) -> CountCall | None:
    """Return a function (args, kwargs, outputs) -> Counted for an op; None for an op without products.

    schema: schema of an ATen op. Arguments may be real, meta or fake tensors.
    """
    namespace, _, name = schema.name.partition("::")
    if namespace != "aten":
        return None
    if name in MATMULS:
        first, second = MATMULS[name]

        def count_matmul(args: tuple[Any, ...], kwargs: dict[str, Any] | None, outs: Any) -> Counted:
            a, b = args[first], args[second]
            return Counted(a.dtype, matmul_sizes(name, a.shape, b.shape).flops)

        return count_matmul
    fused = FusedProducts.of(schema)
    return None if fused is None else fused.count


class FusedProducts:
    """Counts attention, grouped products and convolutions. `of` returns None for other ops."""

    __slots__ = ("backward", "kind", "name", "places", "rows_first")

    def __init__(self, kind: str, name: str, places: dict[str, int]) -> None:
        self.kind, self.name, self.places = kind, name, places
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
        """Count a call; None for attention over packed sequences, whose lengths only the device knows."""
        arguments = _Arguments(self.places, args, kwargs)
        if self.kind == "attention":
            return self._attention(arguments)
        if self.kind == "grouped":
            a, b = arguments["self"], arguments["mat2"]
            return Counted(a.dtype, matmul_sizes(self.name, a.shape, b.shape).flops)
        return self._convolution(arguments, outs)

    def _attention(self, arguments: _Arguments) -> Counted | None:
        query, key, value = arguments["query"], arguments["key"], arguments["value"]
        packed = self.rows_first and arguments["cu_seqlens_q"] is not None
        if query.ndim != 4 or packed:
            return None
        heads, rows = (2, 1) if self.rows_first else (1, 2)
        causal = bool(arguments["is_causal"] or arguments["custom_mask_type"])
        window = arguments["window_size_left"]
        window = window if window is not None and window > 0 else None
        pairs = num_pairs(query.shape[rows], key.shape[rows], causal, window)
        pairs *= query.shape[0] * query.shape[heads]
        flops = attention_flops(pairs, query.shape[-1], value.shape[-1], backward=self.backward)
        return Counted(query.dtype, int(flops.model), int(flops.repeated))

    def _convolution(self, arguments: _Arguments, outs: Any) -> Counted:
        weight = arguments["weight"]
        grid = outs[0]
        if arguments["transposed"]:
            grid = arguments["input"]
        elif self.backward:
            grid = arguments["grad_output"]
        # One product in the forward, and one per gradient.
        products = sum(arguments["output_mask"][:2]) if self.backward else 1
        return Counted(weight.dtype, products * convolution_flops(grid.numel(), weight.shape))


class _Arguments:
    """A call's arguments by their names in the schema; None for omitted ones."""

    __slots__ = ("args", "kwargs", "places")

    def __init__(self, places: dict[str, int], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self.places, self.args, self.kwargs = places, args, kwargs or {}

    def __getitem__(self, name: str) -> Any:
        place = self.places.get(name, len(self.args))
        return self.args[place] if place < len(self.args) else self.kwargs.get(name)


# FLOPs of a step


def operand_type(dtype: Any, tf32: bool = False) -> str:
    """Return the key of a product's peak: "bfloat16", ..., "float8" for all float8 types, "tf32" if used.

    dtype: a torch dtype or its name. tf32: float32 products may use TF32.
    """
    name = str(dtype).removeprefix("torch.")
    if name.startswith("float8"):
        return "float8"
    return "tf32" if tf32 and name == "float32" else name


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one training step by operand type ("bfloat16"), in four parts."""

    forward: Mapping[str, int] = field(default_factory=dict)
    backward: Mapping[str, int] = field(default_factory=dict)
    recomputed: Mapping[str, int] = field(default_factory=dict)
    optimizer: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, products: Mapping[tuple[str, str], int]) -> StepFlops:
        """Build from the FLOPs of a step by (one of PARTS, operand type).

        The backward of a product is two products of its size. If a custom backward multiplies more than twice
        the forward, the excess counts as recomputed.
        """
        parts: dict[str, dict[str, int]] = {part: {} for part in PARTS}
        for (part, name), flops in products.items():
            parts[part][name] = parts[part].get(name, 0) + flops
        forward, backward, recomputed, optimizer = parts.values()
        allowed, done = 2 * sum(forward.values()), sum(backward.values())
        if done > allowed:
            for name, flops in backward.items():
                own = flops * allowed // done
                recomputed[name] = recomputed.get(name, 0) + flops - own
                backward[name] = own
        return cls(forward, backward, recomputed, optimizer)

    @property
    def model(self) -> int:
        """Forward and backward: the numerator of MFU."""
        return sum(self.by_type.values())

    @property
    def by_type(self) -> dict[str, int]:
        """`model` by operand type."""
        names = {**self.forward, **self.backward}
        return {name: self.forward.get(name, 0) + self.backward.get(name, 0) for name in names}

    @property
    def all(self) -> int:
        return self.model + sum(self.recomputed.values()) + sum(self.optimizer.values())

    def seconds_at(self, peak: Callable[[str], float] | float) -> float:
        """Return the seconds of the model's products at a peak in FLOP/s, by operand type or one for all."""
        if callable(peak):
            return sum(count / peak(name) for name, count in self.by_type.items())
        return self.model / peak


def utilisation(
    flops: StepFlops, seconds: float, peak: Callable[[str], float] | float, device: str = "the device"
) -> float:
    """Return the MFU, 0 to 1: the model's share of the FLOPs that the device could do in the step's time.

    Args:
        seconds: duration of one whole, unrecorded step.
        peak: FLOP/s by operand type (`leanstep.rehearse.devices.device_named("h100").flops`), or one figure.

    Raises:
        ValueError: if the result exceeds 1, with the counted FLOPs: a device cannot exceed its peak.
    """
    if not seconds > 0:
        raise ValueError(f"seconds: expected the time of one step, got {seconds!r}")
    share = flops.seconds_at(peak) / seconds
    if share > 1:
        raise ValueError(
            f"mfu: {flops.model:.3g} FLOPs in {in_words(seconds)} are {share:.0%} of the peak of {device}: "
            "the time is not that of a whole step, or the device is not this one"
        )
    return share
