"""torch.compile: the region runs eagerly, its launches are marked, so that a fusion model can merge them.

A backward launch belongs to the region in which its forward call was made. What a compiler would fuse is
decided later, from the marked launches; the figure of the eager run stays beside it. Memory is that of the
eager run: what a compiler recomputes instead of saving is not known.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from leanstep.rehearse.answers.stand_ins import FusedAttention
from leanstep.rehearse.events import Region
from leanstep.rehearse.tape import Tape

NOTE = "torch.compile: the region ran eagerly, its launches are merged by a fusion model"
BLOCK = 128
# Part of the scores that a mask which the host does not know lets through: a causal one's.
ASSUMED_DENSITY = 0.5


def install(tape: Tape, *, capture: bool) -> None:
    """Answer torch.compile and flex attention. Without `capture` launches stay unmarked."""
    regions = _Regions(tape, capture)
    torch.compile = regions.compile  # pyright: ignore[reportAttributeAccessIssue]
    torch.nn.Module.compile = lambda self, *args, **kwargs: regions.compile_module(self)
    with contextlib.suppress(ImportError):
        _install_flex(tape)


class _Regions:
    def __init__(self, tape: Tape, capture: bool):
        self.tape, self.capture = tape, capture

    def compile(self, model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: self.compile(function, **options)
        self.tape.notes[NOTE if self.capture else "torch.compile ran eagerly"] += 1
        stand_in = getattr(model, "_when_compiled", None)
        if stand_in is not None:
            return stand_in
        if isinstance(model, torch.nn.Module):
            return CompiledModule(model, self._marked(type(model).__name__, model))
        return self._marked(getattr(model, "__name__", type(model).__name__), model)

    def compile_module(self, module: torch.nn.Module) -> None:
        self.tape.notes[NOTE if self.capture else "torch.compile ran eagerly"] += 1
        module._compiled_call_impl = self._marked(type(module).__name__, module._call_impl)

    def _marked(self, name: str, function: Any) -> Any:
        if not self.capture:
            return function
        lines, regions = self.tape.lines, self.tape.recording.regions
        number = len(regions) + 1
        regions[number] = Region(number, name, lines.here(), 0)

        @functools.wraps(function)
        def region(*args: Any, **kwargs: Any) -> Any:
            outer, lines.region = lines.region, lines.region or number
            regions[number] = regions[number]._replace(calls=regions[number].calls + 1)
            try:
                return function(*args, **kwargs)
            finally:
                lines.region = outer

        return region


class CompiledModule(torch.nn.Module):
    """What torch.compile(module) returns: the module behind a marked call; its names carry `_orig_mod.`."""

    def __init__(self, module: torch.nn.Module, call: Any):
        super().__init__()
        self._orig_mod = module
        self.__dict__["_marked_call"] = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_marked_call"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_orig_mod":
            return self._modules["_orig_mod"]
        return getattr(self._modules["_orig_mod"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_orig_mod" or name not in dir(type(self._modules.get("_orig_mod", self))):
            super().__setattr__(name, value)
        else:
            setattr(self._orig_mod, name, value)


def _install_flex(tape: Tape) -> None:
    from torch.nn.attention import flex_attention as flex

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        **options: Any,
    ) -> Any:
        """A fused kernel over the blocks that the mask lets through."""
        density = _density(tape, block_mask)
        out, lse = FusedAttention.apply(tape, "flex_attention", query, key, value, density, "bhtd")
        return (out, lse) if return_lse or options.get("return_aux") is not None else out

    def block_mask(
        mask_mod: Any,
        B: int | None,
        H: int | None,
        Q_LEN: int,
        KV_LEN: int,
        device: Any = "cuda",
        BLOCK_SIZE: Any = BLOCK,
        **_: Any,
    ) -> Any:
        """A block mask without the [Q_LEN, KV_LEN] mask: a compiler evaluates it block by block."""
        size = BLOCK_SIZE
        rows_block, columns_block = (size, size) if isinstance(size, int) else size
        rows, columns = -(-Q_LEN // rows_block), -(-KV_LEN // columns_block)
        counts = torch.empty(B or 1, H or 1, rows, dtype=torch.int32, device=device)
        indices = torch.empty(B or 1, H or 1, rows, columns, dtype=torch.int32, device=device)
        made: Any = flex.BlockMask.from_kv_blocks(
            counts, indices, counts.clone(), indices.clone(), (rows_block, columns_block), mask_mod=mask_mod
        )
        made._density = _sampled_density(tape, mask_mod, Q_LEN, KV_LEN, rows_block, columns_block, device)
        return made

    attention._when_compiled = attention  # pyright: ignore[reportFunctionMemberAccess]
    plain_mask = flex.create_block_mask

    @functools.wraps(plain_mask)
    def create_block_mask(*args: Any, _compile: bool = False, **kwargs: Any) -> Any:
        return block_mask(*args, **kwargs) if _compile else plain_mask(*args, **kwargs)

    create_block_mask._when_compiled = block_mask  # pyright: ignore[reportAttributeAccessIssue]
    flex.flex_attention = attention
    flex.create_block_mask = create_block_mask


def _sampled_density(
    tape: Tape, mask_mod: Any, q_len: int, kv_len: int, rows_block: int, columns_block: int, device: Any
) -> float | None:
    """Share of blocks with a sampled position that the mask lets through, from values that the host knows."""

    def samples(length: int, block: int) -> Tensor:
        starts = torch.arange(0, length, block)
        return (
            torch.stack([starts, starts + block // 2, starts + block - 1], 1).clamp_max(length - 1).flatten()
        )

    rows, columns = samples(q_len, rows_block), samples(kv_len, columns_block)
    if rows.numel() * columns.numel() > 1 << 20:
        return None
    zero = torch.zeros((), dtype=torch.int64)
    with tape.aside():
        try:
            with torch.no_grad():
                found = mask_mod(*(t.to(device) for t in (zero, zero, rows[:, None], columns[None, :])))
            known = tape.shadows.get(found)
        except Exception:  # a mask that only works under vmap
            return None
        found = None
    if known is None:
        return None
    known = known.expand(rows.numel(), columns.numel())
    return float(known.reshape(-1, 3, columns.numel() // 3, 3).any(3).any(1).float().mean())


def _density(tape: Tape, block_mask: Any) -> float:
    if block_mask is None:
        return 1.0
    density = getattr(block_mask, "_density", None)
    if density is None:
        counts, indices = block_mask.kv_num_blocks, block_mask.kv_indices
        known = tape.shadows.get(counts)
        full = getattr(block_mask, "full_kv_num_blocks", None)
        more = tape.shadows.get(full) if full is not None else None
        if known is not None:
            total = known.sum() + (more.sum() if more is not None else 0)
            density = float(total) / max(1, indices.numel())
    if density is None:
        line = tape.lines.here()
        tape.shadows.assume(line, "density of a block mask", ASSUMED_DENSITY)
        return ASSUMED_DENSITY
    return density
