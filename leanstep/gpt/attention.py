"""Windowed causal attention over packed documents: a band of blocks instead of a T x T square.

Queries are split into blocks of B. Block i sees the keys of blocks i - back .. i, which covers the window, so
the work is T * (back + 1) * B instead of T * T. The additive mask of a batch depends on its documents and the
window only: it is built once and shared by all layers and the backward pass.

Positions are a truncated rotary embedding with YaRN: half of each head rotates, adjacent features in pairs.
Tables are complex: a feature pair (even, odd) is one complex number, and rotating it is one multiplication.
The half that does not rotate is multiplied by one, so the whole head is a single contiguous pass. Compiled
code takes cosines and sines instead.
"""

# T tokens · H heads · D head size · P = D/2 feature pairs
# B block · N blocks · S = (back + 1) * B keys per block

from __future__ import annotations

import functools
import importlib
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from leanstep.logprob.layout import to_device

COMPLEX = {torch.float64: torch.complex128}
# Tokens per side of a block of flex attention's sparse mask.
FLEX_BLOCK = 128

# Fields of flex attention's BlockMask: blocks to visit by query and by key, partly masked and full.
_BLOCK_TENSORS = tuple(
    f"{full}{side}_{what}"
    for full in ("", "full_")
    for side in ("kv", "q")
    for what in ("num_blocks", "indices")
)


def check_cu_seqlens(cu_seqlens: Tensor, length: int) -> list[int]:
    """Return cumulative document lengths as ints. They must run from 0 to `length` without decreasing."""
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.numel() < 2:
        raise ValueError(
            f"cu_seqlens: expected [documents + 1] integers, got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length or any(a > b for a, b in pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens: expected a non-decreasing sequence from 0 to {length}, "
            f"got {bounds[:8]}...{bounds[-1]}"
        )
    return bounds


@dataclass(frozen=True)
class BandPlan:
    """Block layout and mask of attention for one (documents, window) pair.

    Args:
        length: T, time slots (twice the tokens for paired heads).
        block: B.
        num_blocks: N.
        back: earlier blocks that a block sees.
        mask: [N, 1, B, S] additive: 0 where allowed, -inf elsewhere. None under flex attention.
        block_mask: flex attention's equivalent of `mask`, for a single block of all tokens.
        first_keys: [T] the earliest key that each token sees, which the block mask reads; None without one.
    """

    length: int
    block: int
    num_blocks: int
    back: int
    mask: Tensor | None
    block_mask: Any = None
    first_keys: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        held = [self.mask, self.first_keys]
        if self.block_mask is not None:
            held += [getattr(self.block_mask, name) for name in _BLOCK_TENSORS]
        return [x for x in held if isinstance(x, Tensor)]

    @property
    def num_bytes(self) -> int:
        """Bytes held by the plan's tensors."""
        return sum(x.nbytes for x in self.tensors)

    def overwrite(self, other: BandPlan) -> bool:
        """Write another plan's values into this plan's tensors; return False if the shapes differ."""
        if [x.shape for x in self.tensors] != [x.shape for x in other.tensors]:
            return False
        for mine, new in zip(self.tensors, other.tensors, strict=True):
            mine.copy_(new)
        return True

    @property
    def front(self) -> int:
        """Empty key slots in front of the first token."""
        return self.back * self.block

    @property
    def padded(self) -> int:
        """Query slots, a multiple of the block."""
        return self.num_blocks * self.block


def _choose_block(window: int, head_dim: int) -> int:
    # Small heads are bound by the masked scores, large ones by the products: 32 and 128 measured best for
    # D = 16 and D = 128, windows 48..384; a block wider than the window only adds masked scores.
    best = 32 if head_dim <= 32 else 64 if head_dim <= 64 else 128
    return max(16, min(best, 1 << (max(window, 1).bit_length() - 1)))


def make_plan(
    bounds: list[int],
    window: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    longest: int | None = None,
) -> BandPlan:
    """Return the plan for cumulative document lengths `bounds`; at most `window` + 1 keys are visible.

    longest: documents of up to this length fit into the band, which has the same shape for all of them;
        None: the longest of `bounds`, for the narrowest band.
    """
    length = bounds[-1]
    needed = max((b - a for a, b in pairwise(bounds)), default=0)
    longest = needed if longest is None else longest
    if longest < needed:
        raise ValueError(f"longest: expected at least {needed}, the longest document, got {longest}")
    # No query sees further than the longest document: short documents make the band narrow.
    window = min(window, max(longest - 1, 0))
    block = _choose_block(window, head_dim)
    back = -(-window // block)
    count = max(-(-length // block), 1)
    cu = torch.tensor(bounds)
    starts = torch.repeat_interleave(cu[:-1], cu.diff())
    query = torch.arange(count * block)
    first = query.clone()
    first[:length] = torch.maximum(starts, query[:length] - window)
    query = query.view(count, block, 1)
    key = torch.arange((back + 1) * block) + (torch.arange(count) - back)[:, None, None] * block
    blocked = (key < first.view(count, block, 1)) | (key > query)
    mask = torch.zeros(blocked.shape, dtype=dtype).masked_fill_(blocked, -math.inf)
    return BandPlan(length, block, count, back, mask[:, None].to(device))


def make_flex_plan(bounds: list[int], window: int, device: torch.device | str) -> BandPlan:
    """Return the plan for flex attention, which skips empty blocks: one block, no padding, no additive mask.

    Equivalent to:
        create_block_mask(visible, None, None, T, T, device=device)
    whose eager version allocates a T x T tensor; here the blocks follow from the bounds and take (T / 128)^2
    memory.

    The backward of flex attention exists on GPUs only (torch 2.13), so `PlanCache` uses it there.
    """
    from torch.nn.attention.flex_attention import BlockMask

    length, size = bounds[-1], FLEX_BLOCK
    count = -(-length // size)
    cu = torch.tensor(bounds)
    block = torch.arange(count)

    def first_key(query: Tensor) -> Tensor:
        """Return the earliest key that a query sees; it never decreases from one query to the next."""
        return torch.maximum(cu[torch.searchsorted(cu, query, right=True) - 1], query - window)

    # The queries of a block see the keys from its first query's first key up to themselves, so the visible
    # key blocks are lowest .. block. Those before the diagonal whose keys even the last query sees are full.
    lowest = first_key(block * size) // size
    last = ((block + 1) * size).clamp(max=length) - 1
    full_from = torch.minimum((first_key(last) + size - 1) // size, block)
    if length % size:
        full_from[-1] = count - 1
    packed = to_device(torch.cat([cu, lowest, full_from]).int(), device)
    cu, lowest, full_from = packed.split([len(bounds), count, count])
    tokens = torch.arange(length, device=device, dtype=torch.int32)
    # This table includes the window: a number in `visible` would be a constant of a compiled graph.
    first_keys = torch.maximum(cu[torch.searchsorted(cu, tokens, right=True) - 1], tokens - window)
    block = torch.arange(count, device=device, dtype=torch.int32)
    num_partial, num_full = full_from - lowest + 1, block - full_from
    # Entry c of a row; entries past a row's count are never read.
    partial = lowest[:, None] + block
    partial = torch.where(partial < full_from[:, None], partial, block[:, None])
    full = (full_from[:, None] + block).clamp(max=count - 1)

    def visible(batch, head, query, key):
        return (key <= query) & (key >= first_keys[query])

    mask = BlockMask.from_kv_blocks(
        num_partial[None, None],
        partial[None, None],
        num_full[None, None],
        full[None, None],
        BLOCK_SIZE=size,
        mask_mod=visible,
        seq_lengths=(length, length),
    )
    return BandPlan(length, length, 1, 0, None, mask, first_keys)


@dataclass(frozen=True)
class PackedPlan:
    """Arguments of FlashAttention for packed documents.

    Args:
        cu_seqlens: [documents + 1, padded] int32 on the device; documents past the last have no tokens.
        window: earlier keys that a query sees.
        longest: no document has more time slots.
        function: `flash_attn_varlen_func` of the installed version.
    """

    cu_seqlens: Tensor
    window: int
    longest: int
    function: Callable[..., Any]

    @property
    def num_bytes(self) -> int:
        return self.cu_seqlens.nbytes

    def overwrite(self, other: PackedPlan) -> bool:
        """Write another plan's documents into this plan's tensor; return False if it is too short."""
        count = other.cu_seqlens.shape[0]
        if count > self.cu_seqlens.shape[0]:
            return False
        self.cu_seqlens[:count] = other.cu_seqlens
        # Documents past the last have no tokens.
        self.cu_seqlens[count:] = other.cu_seqlens[-1]
        return True


def make_packed_plan(
    bounds: list[int], window: int, longest: int | None, device: torch.device, function: Callable[..., Any]
) -> PackedPlan:
    """Return the plan for FlashAttention. Its shape depends on the number of tokens, not on the documents.

    Args:
        longest: longest document that the schedule allows; None: the whole batch. A new value: a new graph.
    """
    length = bounds[-1]
    # Documents average about 400 tokens: allow for more, in multiples of 128 where that is not enough.
    size = -(-max(len(bounds), length // 300 + 1) // 128) * 128
    cu = torch.full((size,), length, dtype=torch.int32)
    cu[: len(bounds)] = torch.tensor(bounds, dtype=torch.int32)
    longest = length if longest is None else min(longest, length)
    return PackedPlan(to_device(cu, device), window, longest, function)


@functools.cache
def flash_attention(device: torch.device) -> Callable[..., Any] | None:
    """Return FlashAttention for packed documents: version 3 on Hopper, else 2; None if not installed."""
    major = torch.cuda.get_device_capability(device)[0]
    for module in ("flash_attn_interface",) * (major == 9) + ("flash_attn",) * (major >= 8):
        try:
            return importlib.import_module(module).flash_attn_varlen_func
        except ImportError:
            continue
    return None


@functools.cache
def _flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    # Eager flex attention allocates the whole score matrix, so only the compiled one is used. With fullgraph,
    # Dynamo raises at its graph limit; without it, Dynamo would fall back to eager.
    return torch.compile(flex_attention, fullgraph=True) if torch.cuda.is_available() else flex_attention


Plan = BandPlan | PackedPlan


class PlanKey(NamedTuple):
    """What a layer's plan depends on, besides the documents.

    Args:
        window: keys that a token sees before itself. paired: the layer has paired heads. head_dim: D.
        compiled: the plan's shape depends on the number of tokens, the window and `longest_document`, not on
            the documents: another batch needs no new graph.
    """

    window: int
    paired: bool
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    compiled: bool = False


class PlanCache:
    """LRU cache of plans by documents and window, limited to `max_bytes`.

    Args:
        max_bytes: of all plans together; the newest plan stays regardless of its size.
        kind: "band" or "flex"; "auto": band on a CPU; on a GPU FlashAttention if it is installed and the
            dtype has 16 bits, else flex.
    """

    def __init__(self, max_bytes: int = 64 * 2**20, *, kind: str = "auto") -> None:
        self.max_bytes, self.kind = max_bytes, kind
        self.longest_document: int | None = None
        self._plans: OrderedDict[tuple, Plan] = OrderedDict()

    def get(self, bounds: list[int], layer: PlanKey) -> Plan:
        """Return the plan for cumulative document lengths `bounds` in tokens."""
        key = (tuple(bounds), layer, self.longest_document)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self.make(bounds, layer)
            while len(self._plans) > 1 and self.num_bytes > self.max_bytes:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return plan

    def make(self, bounds: list[int], layer: PlanKey) -> Plan:
        """Return a new plan; arguments of `get`."""
        slots, longest, device = bounds, self.longest_document, layer.device
        if layer.paired:
            slots, longest = [2 * b for b in bounds], None if longest is None else 2 * longest
        # A plan built during evaluation must also work in a training step.
        with torch.inference_mode(False):
            flash = self._flash(layer.dtype, device)
            if flash is not None:
                return make_packed_plan(slots, layer.window, longest, device, flash)
            if self.kind == "flex" or (self.kind == "auto" and device.type == "cuda"):
                return make_flex_plan(slots, layer.window, device)
            allowed = min(longest or slots[-1], slots[-1]) if layer.compiled else None
            return make_plan(slots, layer.window, layer.head_dim, layer.dtype, device, longest=allowed)

    def _flash(self, dtype: torch.dtype, device: torch.device) -> Callable[..., Any] | None:
        if self.kind != "auto" or device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            return None
        return flash_attention(device)

    @property
    def num_bytes(self) -> int:
        return sum(plan.num_bytes for plan in self._plans.values())

    def clear(self) -> None:
        self._plans.clear()


class FixedPlans:
    """Plans whose tensors stay while the documents change, as a CUDA graph needs them.

    Args:
        source: makes the plans.
    """

    def __init__(self, source: PlanCache) -> None:
        self.source = source
        self._bounds: list[int] = []
        self._plans: dict[PlanKey, Plan] = {}

    def load(self, bounds: list[int]) -> bool:
        """Write the plans of these documents into those in use.

        Returns False if one needs larger tensors; `get` then makes new ones.
        """
        if bounds == self._bounds:
            return True
        self._bounds = bounds
        for layer, plan in self._plans.items():
            new: Any = self.source.get(bounds, layer)
            if not plan.overwrite(new):
                self._plans.clear()
                return False
        return True

    def get(self, bounds: list[int], layer: PlanKey) -> Plan:
        """Return the plan of the documents of the last `load`, which are `bounds`."""
        if layer not in self._plans:
            self._plans[layer] = self.source.make(bounds, layer)
        return self._plans[layer]


def band_view(padded: Tensor, plan: BandPlan) -> Tensor:
    """[front + padded, H, D] as overlapping [N, H, S, D]: no copy."""
    heads, dim = padded.shape[1:]
    row = heads * dim
    size = (plan.num_blocks, heads, plan.front + plan.block, dim)
    return padded.as_strided(size, (plan.block * row, dim, row, 1))


class _Band(torch.autograd.Function):
    """Keys or values [T, H, D] -> overlapping band [N, H, S, D]; the backward sums the overlaps.

    Slices that autograd differentiates would copy the band, and `unfold` has a slower backward.
    """

    @staticmethod
    def forward(ctx, x: Tensor, plan: BandPlan) -> Tensor:
        ctx.plan = plan
        padded = x.new_zeros(plan.front + plan.padded, *x.shape[1:])
        padded[plan.front : plan.front + plan.length] = x
        return band_view(padded, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return sum_band(grad, ctx.plan)[: ctx.plan.length], None


def sum_band(grad_NHSD: Tensor, plan: BandPlan) -> Tensor:
    """Sum the blocks' gradients for each key: [padded, H, D]."""
    count, heads, _, dim = grad_NHSD.shape
    parts = grad_NHSD.transpose(1, 2).unflatten(1, (plan.back + 1, plan.block))
    total = grad_NHSD.new_empty(count, plan.block, heads, dim)
    # The last part is the block itself; part j belongs to the block back - j positions earlier.
    total.copy_(parts[:, plan.back])
    for j in range(plan.back):
        behind = plan.back - j
        if behind < count:
            total[:-behind] += parts[behind:, j]
    return total.view(plan.padded, heads, dim)


def attend(q: Tensor, k: Tensor, v: Tensor, plan: BandPlan, scale: float) -> Tensor:
    """Attention of query blocks [N, H, B, D] over their bands [N, H, S, D]."""
    if plan.block_mask is not None:
        # A scale argument would be a constant of the graph, and YaRN changes it in every stage.
        q = q if scale == 1.0 else q * scale
        if torch.compiler.is_compiling():
            from torch.nn.attention.flex_attention import flex_attention as flex
        else:
            flex = _flex_attention()
        return flex(q, k, v, block_mask=plan.block_mask, scale=1.0)  # type: ignore[return-value]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=plan.mask, scale=scale)


def windowed_attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float) -> Tensor:
    """Return softmax attention of [T, H, D] heads under a plan, [T, H, D].

    Equivalent to:
        mask = causal & same_document & (query - key <= window)
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    Peak extra memory: a copy of keys and values, and the plan's mask; neither under FlashAttention.
    """
    if isinstance(plan, PackedPlan):
        return _packed_attention(q, k, v, plan, scale)
    if q.shape[0] != plan.length:
        raise ValueError(f"q: expected {plan.length} time slots to match the plan, got {q.shape[0]}")
    if plan.block_mask is not None:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return attend(q, k, v, plan, scale)[0].transpose(0, 1)
    padding = plan.padded - plan.length
    if padding:
        q = F.pad(q, (0, 0, 0, 0, 0, padding))
    blocks = q.unflatten(0, (plan.num_blocks, plan.block)).transpose(1, 2)
    k_band, v_band = _Band.apply(k, plan), _Band.apply(v, plan)
    out = attend(blocks, k_band, v_band, plan, scale)
    return out.transpose(1, 2).reshape(plan.padded, *q.shape[1:])[: plan.length]


def _packed_attention(q: Tensor, k: Tensor, v: Tensor, plan: PackedPlan, scale: float) -> Tensor:
    cu, longest, window = plan.cu_seqlens, plan.longest, (plan.window, 0)
    out = plan.function(
        q, k, v, cu, cu, longest, longest, softmax_scale=scale, causal=True, window_size=window
    )
    # Some versions return the log-sum-exp as well.
    return out[0] if isinstance(out, tuple) else out


class Rotary:
    """Frequencies, softmax scale, and tables that grow on demand.

    Plain attributes, not buffers: `model.to(dtype)` must not round the frequencies.
    """

    def __init__(self, head_dim: int, base: float, attention_scale: float) -> None:
        count = head_dim // 4
        exponents = torch.linspace(0, 1, count, dtype=torch.float32)
        self.frequencies = (1.0 / base) ** exponents
        self.head_dim = head_dim
        self.attention_scale = attention_scale
        self._tables: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._real: dict[tuple[int, bool, torch.dtype, torch.device], Tensor] = {}
        self._scales: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    def rescale(self, old_window: int, new_window: int) -> None:
        """Apply one YaRN step for a long window that changes from `old_window` to `new_window` tokens."""
        if old_window < 1 or new_window < 1:
            raise ValueError(f"window: expected positive token counts, got {old_window} -> {new_window}")
        rotations = old_window * self.frequencies / (2 * math.pi)
        # Frequencies with fewer than one turn per window are interpolated; above 32 they are unchanged.
        keep = torch.clamp((rotations - 1) / 31, 0, 1)
        ratio = old_window / new_window
        self.frequencies = self.frequencies * (ratio + keep * (1 - ratio))
        self.attention_scale *= 0.2 * math.log(new_window / old_window) + 1
        self._forget()

    def _forget(self) -> None:
        for cache in (self._tables, self._real, self._scales):
            cache.clear()

    def table(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[length, P] complex, exp(-i * position * frequency), ones in the half that does not rotate."""
        key = (dtype, device)
        cached = self._tables.get(key)
        if cached is None or cached.shape[0] < length:
            rows = max(length, 2 * cached.shape[0] if cached is not None else 0)
            with torch.inference_mode(False):
                cached = to_device(self._make_table(rows, dtype), device)
            self._tables[key] = cached
        return cached[:length]

    def _make_table(self, rows: int, dtype: torch.dtype) -> Tensor:
        angles = torch.arange(rows, dtype=torch.float64)[:, None] * self.frequencies.double()
        turning = torch.polar(torch.ones_like(angles), -angles)
        still = torch.ones_like(turning)
        return torch.cat([turning, still], dim=-1).to(COMPLEX.get(dtype, torch.complex64))

    def head_table(self, length: int, paired: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a table for [T, H, P]: [T, 1, P], or [T, 2, P] by head parity for paired heads.

        A paired head of token t rotates by position 2t + (head mod 2): parity of the head, not of its slot.
        """
        if not paired:
            return self.table(length, dtype, device)[:, None]
        return self.table(2 * length, dtype, device).view(length, 2, self.head_dim // 2)

    def real_table(self, length: int, paired: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
        """cos and sin [2, T, 1 | 2, D/4] of the features that rotate: `head_table` for compiled code.

        Built for one length: a slice of a longer table has other strides, which would be another graph.
        """
        key = (length, paired, dtype, device)
        if key not in self._real:
            with torch.inference_mode(False):
                turning = self.head_table(length, paired, dtype, device)[..., : self.head_dim // 4]
                self._real[key] = torch.stack([turning.real, -turning.imag])
        return self._real[key]

    def scale_on(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the softmax scale as a device tensor: a new value needs no new graph."""
        key = (self.attention_scale, dtype, device)
        if key not in self._scales:
            with torch.inference_mode(False):
                wide = torch.float64 if dtype == torch.float64 else torch.float32
                self._scales[key] = to_device(torch.tensor(self.attention_scale, dtype=wide), device)
        return self._scales[key]

    def state_dict(self) -> dict:
        return {"frequencies": self.frequencies.tolist(), "attention_scale": self.attention_scale}

    def load_state_dict(self, state: dict) -> None:
        frequencies = torch.tensor(state["frequencies"], dtype=torch.float32)
        if frequencies.shape != self.frequencies.shape:
            raise ValueError(
                f"frequencies: expected {self.frequencies.numel()} values, got {frequencies.numel()}"
            )
        self.frequencies = frequencies
        self.attention_scale = float(state["attention_scale"])
        self._forget()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate heads [T, H, D] by a table of `Rotary.head_table` or `Rotary.real_table`.

    Equivalent to (per adjacent pair): even * cos + odd * sin, odd * cos - even * sin.
    """
    if not table.is_complex():
        return _rotate_real(x, table)
    length, heads, dim = x.shape
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    parity = table.shape[1]
    pairs = torch.view_as_complex(wide.reshape(length, heads // parity, parity, dim // 2, 2))
    return torch.view_as_real(pairs * table[:, None]).reshape(length, heads, dim).to(x.dtype)


def _rotate_real(x: Tensor, table: Tensor) -> Tensor:
    """`rotate` without complex numbers, which Inductor does not fuse; eagerly it is six times slower."""
    cos, sin = table[:, :, None].unbind(0)
    turning, still = x.unflatten(1, (-1, table.shape[2])).chunk(2, dim=-1)
    even, odd = turning.unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack([even * cos + odd * sin, odd * cos - even * sin], dim=-1).flatten(-2)
    return torch.cat([pairs, still], dim=-1).flatten(1, 2)
