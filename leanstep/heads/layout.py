"""The positions of each sample's tokens on one rank, for every data layout.

A `Span` states that local rows `[base, base + stop - start)` hold positions `[start, stop)` of one sample.
All row indices are computed from spans: this is the only file that depends on the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["thd", "bshd", "zigzag", "bshd_zigzag", "allgather"]
LAYOUTS: tuple[Layout, ...] = ("thd", "bshd", "zigzag", "bshd_zigzag", "allgather")
Masks = Sequence[Sequence[int] | Tensor]


@dataclass(frozen=True)
class Span:
    """Local rows from `base` on hold positions [start, stop) of sample `sample`."""

    sample: int
    base: int
    start: int
    stop: int

    def clip(self, start: int, stop: int) -> Span:
        """Return the part within positions [start, stop); an empty part has start == stop."""
        low = max(self.start, start)
        high = max(min(self.stop, stop), low)
        return Span(self.sample, self.base + low - self.start, low, high)

    def __len__(self) -> int:
        return self.stop - self.start


def local_spans(
    total_lengths: Sequence[int],
    *,
    layout: Layout = "thd",
    cp_size: int = 1,
    cp_rank: int = 0,
    max_seq_len: int | None = None,
    local_len: int | None = None,
    pad_multiple: int = 1,
) -> tuple[list[Span], int]:
    """Return the spans of all samples on this rank and the number of local rows including padding.

    thd, bshd and allgather have one span per sample; zigzag has two (first and mirrored chunk).
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, expected one of {', '.join(LAYOUTS)}")
    if cp_size < 1 or not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank: expected 0 <= cp_rank < cp_size, got rank {cp_rank} of {cp_size}")
    if layout in ("thd", "bshd") and cp_size != 1:
        raise ValueError(f"layout: {layout!r} has no context parallelism, got cp_size {cp_size}")
    if pad_multiple < 1:
        raise ValueError(f"pad_multiple: expected at least 1, got {pad_multiple}")
    padded_batch = layout in ("bshd", "bshd_zigzag")
    if padded_batch:
        if max_seq_len is None:
            raise ValueError(f"max_seq_len: layout {layout!r} needs the common row length, got None")
        for k, length in enumerate(total_lengths):
            if length > max_seq_len:
                raise ValueError(f"total_lengths[{k}]: {length} is more than max_seq_len {max_seq_len}")

    spans: list[Span] = []
    if layout == "allgather":
        stream = sum(total_lengths)
        block = cp_size * pad_multiple
        rows = -(-stream // block) * pad_multiple if local_len is None else local_len
        if rows * cp_size < stream:
            raise ValueError(f"local_len: {cp_size} ranks of {rows} rows cannot hold {stream} tokens")
        offset = -cp_rank * rows
        for k, length in enumerate(total_lengths):
            low = min(max(0, -offset), length)
            high = max(min(length, rows - offset), low)
            spans.append(Span(k, max(offset, 0), low, high))
            offset += length
        return spans, rows

    position = 0
    for k, length in enumerate(total_lengths):
        held = max_seq_len if padded_batch and max_seq_len is not None else length
        if layout in ("thd", "bshd"):
            spans.append(Span(k, position, 0, length))
            position += held
            continue
        chunk = -(-held // (2 * cp_size))
        for base, index in ((position, cp_rank), (position + chunk, 2 * cp_size - 1 - cp_rank)):
            low = min(index * chunk, length)
            spans.append(Span(k, base, low, max(min((index + 1) * chunk, length), low)))
        position += 2 * chunk
    rows = -(-position // pad_multiple) * pad_multiple if local_len is None else local_len
    if rows < position:
        raise ValueError(f"local_len: {rows} rows cannot hold the {position} rows of this micro-batch")
    return spans, rows


def checked_lengths(
    total_lengths: Sequence[int], response_lengths: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    for name, lengths in (("total_lengths", total_lengths), ("response_lengths", response_lengths)):
        if isinstance(lengths, Tensor):
            raise ValueError(
                f"{name}: expected Python integers (a tensor would need a device sync), got a tensor"
            )
    totals, responses = [int(x) for x in total_lengths], [int(x) for x in response_lengths]
    if len(totals) != len(responses):
        raise ValueError(f"response_lengths: expected one per sample ({len(totals)}), got {len(responses)}")
    for k, (total, response) in enumerate(zip(totals, responses, strict=True)):
        if response < 0:
            raise ValueError(f"response_lengths[{k}]: expected 0 or more, got {response}")
        if total - response < 1:
            raise ValueError(
                f"response_lengths[{k}]: sample {k} has {total} tokens and {response} response tokens; "
                "expected at least one prompt token, whose row scores the first response token"
            )
    return totals, responses, [t - r for t, r in zip(totals, responses, strict=True)]


def checked_masks(loss_masks: Masks, responses: list[int]) -> list[Tensor]:
    if len(loss_masks) != len(responses):
        raise ValueError(f"loss_masks: expected one per sample ({len(responses)}), got {len(loss_masks)}")
    masks = []
    for k, (mask, length) in enumerate(zip(loss_masks, responses, strict=True)):
        host = torch.as_tensor(mask)
        if host.device.type != "cpu":
            raise ValueError(f"loss_masks[{k}]: expected host values, got a tensor on {host.device}")
        if host.shape != (length,):
            raise ValueError(f"loss_masks[{k}]: expected length {length}, got shape {tuple(host.shape)}")
        if not bool(((host == 0) | (host == 1)).all()):
            raise ValueError(f"loss_masks[{k}]: expected only 0 and 1, got other values")
        masks.append(host.to(torch.int64))
    return masks


def to_device(values: Tensor, device: torch.device | str) -> Tensor:
    """Copy `values` to `device` without a host sync. Pins host memory: copies from pageable memory block."""
    if values.device.type == "cpu" and torch.device(device).type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
