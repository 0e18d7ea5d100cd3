"""Random working contexts of one sequence: what the base model is asked to read beside the baseline."""

from __future__ import annotations

import math

import torch

from .batch import Variant


def planned_length(
    max_len: int, progress: float, *, train_wc_length: int | None = None, num_tokens: int | None = None
) -> int:
    """Entries to aim for: 0.9 * max_len at first, `train_wc_length` (0.75 * max_len) at the end."""
    if not 0 <= progress <= 1:
        raise ValueError(f"progress: expected 0..1, got {progress}")
    start = int(0.9 * max_len)
    end = round(0.75 * max_len) if train_wc_length is None else train_wc_length
    length = round(start + (end - start) * progress)
    return length if num_tokens is None else min(length, num_tokens)


def reachable_length(num_tokens: int, planned: int, block_size: int) -> int:
    """The nearest length at or below `planned` that whole collapses reach.

    >>> reachable_length(2048, 1843, 32)
    1831
    """
    if planned >= num_tokens:
        return planned
    step = block_size - 1
    return max(num_tokens - step * math.ceil((num_tokens - planned) / step), 1)


def baseline_variant(num_tokens: int, target_len: int) -> Variant:
    """The last `target_len` raw tokens."""
    kept = min(num_tokens, target_len)
    positions = torch.arange(num_tokens - kept, num_tokens)
    return Variant(positions, torch.zeros(kept, dtype=torch.int8), None, True)


def sample_variants(
    T: int,
    b: int,
    L: int,
    n_random: int,
    target_len: int,
    generator: torch.Generator | None = None,
    *,
    recent_tokens: int = 128,
    deep_probability: float = 0.1,
) -> list[Variant]:
    """The baseline and up to `n_random` random contexts of one sequence, without losses.

    A random context starts as all T raw tokens and collapses random runs of b entries of the same LOD until
    it has `target_len` entries. Runs start at any entry and never reach into the last `recent_tokens`.
    Level 0 goes first; with probability `deep_probability` a run of level 1 does. Contexts equal to an
    earlier one are dropped.

    Args:
        T: tokens in the sequence.
        b: block size.
        L: coarsest level.
        n_random: random contexts to try.
        target_len: entries wanted; reachable from T (see `reachable_length`), else the nearest one below.
        generator: a CPU generator.

    Returns:
        1 to 1 + n_random variants, the baseline first.
    """
    if T < 1 or target_len < 1:
        raise ValueError(f"T, target_len: expected at least 1, got {T} and {target_len}")
    variants = [baseline_variant(T, target_len)]
    if target_len >= T:
        return variants
    seen = {_content(variants[0])}
    for _ in range(n_random):
        variant = _random_variant(T, b, L, target_len, generator, recent_tokens, deep_probability)
        if (content := _content(variant)) not in seen:
            seen.add(content)
            variants.append(variant)
    return variants


def _content(variant: Variant) -> bytes:
    positions, lods = torch.as_tensor(variant.positions), torch.as_tensor(variant.lods)
    return positions.numpy().tobytes() + b"|" + lods.to(torch.int8).numpy().tobytes()


def _random_variant(
    T: int,
    b: int,
    L: int,
    target_len: int,
    generator: torch.Generator | None,
    recent_tokens: int,
    deep: float,
) -> Variant:
    # A context as runs [start, count, level] of touching entries: a collapse splits one run into three.
    runs: list[list[int]] = [[0, T, 0]]
    length, limit = T, T - recent_tokens
    while length > target_len:
        levels = list(range(L))
        if L > 1 and float(torch.rand((), generator=generator)) < deep:
            levels = [1, 0, *levels[2:]]
        choice = None
        for level in levels:
            # How many entries of each run can start a collapse that ends at or before `limit`.
            starts = [
                max(min(count, (limit - start) // b**level) - b + 1, 0) if lod == level else 0
                for start, count, lod in runs
            ]
            if total := sum(starts):
                choice = int(torch.randint(total, (), generator=generator))
                break
        if choice is None:
            break
        index = 0
        while choice >= starts[index]:
            choice -= starts[index]
            index += 1
        _collapse(runs, index, choice, b)
        length -= b - 1
    positions = torch.cat([torch.arange(start, start + count * b**lod, b**lod) for start, count, lod in runs])
    lods = torch.repeat_interleave(
        torch.tensor([lod for _, _, lod in runs], dtype=torch.int8),
        torch.tensor([count for _, count, _ in runs]),
        output_size=length,
    )
    return Variant(positions, lods, None, False)


def _collapse(runs: list[list[int]], index: int, first: int, b: int) -> None:
    """Replace entries first .. first + b - 1 of a run by one gist, joined to neighbours of its level."""
    start, count, lod = runs[index]
    span = b**lod
    pieces = [
        [start, first, lod],
        [start + first * span, 1, lod + 1],
        [start + (first + b) * span, count - first - b, lod],
    ]
    runs[index : index + 1] = [piece for piece in pieces if piece[1]]
    k = 1
    while k < len(runs):
        if runs[k][2] == runs[k - 1][2]:
            runs[k - 1][1] += runs.pop(k)[1]
        else:
            k += 1
