"""flex_attention: a fused kernel over the blocks that its mask admits.

The number of blocks is the sum of the block mask's counts. A program that builds its mask outside compiled
functions has known counts; `create_block_mask` gets them from a few positions per block, without the
[Q_LEN, KV_LEN] mask.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leanstep.rehearse.answers.attention import RULES, attention_by_values, fused_attention
from leanstep.rehearse.tape import Tape

BLOCK = 128
# Assumed share of scores that an unknown mask admits: that of a causal mask.
ASSUMED_DENSITY = 0.5
KERNEL, LAYOUT = "flex_attention", "bhtd"


def install(tape: Tape) -> None:
    """Replace flex_attention and create_block_mask."""
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
        """Record a fused kernel over the blocks that the mask admits."""
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if block_mask is None:
            out, lse = fused_attention(KERNEL, query, key, value, 1.0, LAYOUT)
        else:
            counts, blocks = _counts(block_mask)
            out, lse = attention_by_values(tape, KERNEL, query, key, value, counts, [blocks], LAYOUT)
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
        """Build a block mask without the [Q_LEN, KV_LEN] mask: a compiler evaluates it block by block."""
        size = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
        rows, columns = -(-Q_LEN // size[0]), -(-KV_LEN // size[1])
        if torch.compiler.is_compiling():
            counts = _count_blocks(mask_mod, Q_LEN, KV_LEN, size, device)
        else:
            counts = _count_aside(tape, mask_mod, Q_LEN, KV_LEN, size, device)
        counts = counts.expand(B or 1, H or 1, rows).contiguous()
        indices = torch.empty(B or 1, H or 1, rows, columns, dtype=torch.int32, device=device)
        return flex.BlockMask.from_kv_blocks(
            counts, indices, torch.zeros_like(counts), indices.clone(), size, mask_mod=mask_mod
        )

    attention._when_compiled = attention  # pyright: ignore[reportFunctionMemberAccess]
    plain_mask = flex.create_block_mask

    @functools.wraps(plain_mask)
    def create_block_mask(*args: Any, _compile: bool = False, **kwargs: Any) -> Any:
        return block_mask(*args, **kwargs) if _compile else plain_mask(*args, **kwargs)

    create_block_mask._when_compiled = block_mask  # pyright: ignore[reportAttributeAccessIssue]
    flex.flex_attention = attention
    flex.create_block_mask = create_block_mask


def _counts(block_mask: Any) -> tuple[Tensor, int]:
    """Return the blocks that each row of blocks visits, and the total number of blocks."""
    counts, full = block_mask.kv_num_blocks, getattr(block_mask, "full_kv_num_blocks", None)
    return counts if full is None else counts + full, block_mask.kv_indices.numel()


def _density(tape: Tape, counts: Tensor, numbers: Sequence[int]) -> float:
    """Return the share of blocks that a mask admits. numbers: all blocks."""
    (blocks,) = numbers
    known = tape.shadows.get(counts)
    if known is not None:
        return float(known.sum()) / max(1, blocks)
    tape.shadows.assume(tape.lines.place().line, "density of a block mask", ASSUMED_DENSITY)
    return ASSUMED_DENSITY


RULES[KERNEL] = _density


def _positions(length: int, block: int) -> Tensor:
    """Return the first, middle and last position of each block, [blocks, 3]."""
    starts = torch.arange(0, length, block, device="cpu")
    return torch.stack([starts, starts + block // 2, starts + block - 1], 1).clamp_max(length - 1)


def _count_blocks(mask_mod: Any, q_len: int, kv_len: int, size: Any, device: Any) -> Tensor:
    """Count the blocks with a position that the mask admits, for each row of blocks.

    Three pairs per block are tested: the last query with the first key (causal masks), the first query with
    the last key (windows), and the middle ones.
    """
    rows, columns = _positions(q_len, size[0]).to(device), _positions(kv_len, size[1]).to(device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    visited = [mask_mod(zero, zero, rows[:, i, None], columns[None, :, 2 - i]) for i in range(3)]
    shape = (rows.shape[0], columns.shape[0])
    return functools.reduce(torch.logical_or, visited).expand(shape).sum(1, dtype=torch.int32)


def _count_aside(tape: Tape, mask_mod: Any, q_len: int, kv_len: int, size: Any, device: Any) -> Tensor:
    """Count blocks without recording work of the program. Unknown if the mask cannot be evaluated."""
    with tape.aside(), torch.no_grad():
        try:
            return _count_blocks(mask_mod, q_len, kv_len, size, device)
        except Exception:  # a mask that only works under vmap
            return torch.empty(-(-q_len // size[0]), dtype=torch.int32, device=device)
