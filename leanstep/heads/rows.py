"""Which logit rows of a local micro-batch are needed, and for which tokens, for every data layout.

A sample has L tokens: a prompt of P = L - R >= 1 tokens, then a response of R tokens. Row i scores token
i + 1, so rows [P - 1, L - 1) of the sample score the response, and row P - 1 + j scores response token j.
Selection, targets, masks, per-sample extraction and scattering are all intersections of the layout's spans
(`layout.py`) with that window, so they cannot disagree.

Everything is computed from Python integers on the host; a plan costs one host-to-device copy and no sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from leanstep.heads.layout import (
    Layout,
    Masks,
    Span,
    checked_lengths,
    checked_masks,
    local_spans,
    to_device,
)

Select = Literal["all", "response", "loss_mask"]


@dataclass(frozen=True)
class RowPlan:
    """The rows to compute, and how to map results back to samples.

    With `select="response"` or `"loss_mask"` there is one entry per computed row, ordered by sample and by
    response position within a sample. With `"all"`, `rows` is None (compute every row, no gather).

    Attributes:
        rows: [T'] int64 local row indices, or None for all rows.
        targets_index: [T'] int64 into the concatenation of all samples' tokens (prompt and response).
        resp_index: [T'] int64 position within the sample's response; -1 outside it (`"all"` only).
        splits: number of response positions per sample on this rank, i.e. the lengths that `split` returns.
        T_local: local rows with padding.
        slots: [T'] position of each computed row in the concatenation of local parts (`"loss_mask"`), or
            [sum(splits)] source row of each entry of the parts (`"all"`); None if the two coincide.
        weights: [sum(splits)] float64 mask / max(mask total of the whole sample, 1); None without masks.
        rows_host: `rows` on the host (None for all rows), for plans that other ranks need.
        response_host: [T'] on the host, each row's position in the concatenation of all responses, or -1.
        spans: response-window spans on this rank, in extraction order.
    """

    rows: Tensor | None
    targets_index: Tensor
    resp_index: Tensor
    splits: tuple[int, ...]
    T_local: int
    select: Select
    slots: Tensor | None
    weights: Tensor | None
    rows_host: Tensor | None
    response_host: Tensor
    spans: tuple[Span, ...]
    prompt_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    cp_size: int
    cp_rank: int
    layout: Layout

    @property
    def num_rows(self) -> int:
        return self.T_local if self.rows is None else self.rows.numel()

    @property
    def num_tokens(self) -> int:
        return sum(self.prompt_lengths) + sum(self.response_lengths)

    def targets(self, tokens: Tensor | Sequence[Tensor]) -> Tensor:
        """Return the target of each computed row from the samples' tokens (concatenated, or a list)."""
        stream = _one_row(tokens, self.targets_index)
        if stream.ndim != 1 or stream.numel() != self.num_tokens:
            got = tuple(stream.shape)
            raise ValueError(
                f"tokens: expected all samples' {self.num_tokens} tokens as a 1-D tensor, got {got}"
            )
        return stream.index_select(0, self.targets_index)

    def local_parts(self, values: Tensor) -> Tensor:
        """Convert per-row results to the concatenation of all samples' local response parts."""
        if values.shape[:1] != (self.num_rows,):
            raise ValueError(f"values: expected {self.num_rows} rows, got shape {tuple(values.shape)}")
        if self.slots is None:
            return values
        if self.select == "all":
            return values.index_select(0, self.slots)
        return values.new_zeros((sum(self.splits), *values.shape[1:])).index_copy(0, self.slots, values)

    def split(self, values: Tensor) -> list[Tensor]:
        """Return each sample's local response part (possibly empty); unselected positions are exactly 0."""
        return list(self.local_parts(values).split(list(self.splits)))

    def scatter(self, values: Tensor, length: int | None = None) -> Tensor:
        """Return a [length] vector aligned with local rows, with zeros for rows that were not computed."""
        length = self.T_local if length is None else length
        if length < self.T_local:
            raise ValueError(f"length: {length} is less than the {self.T_local} local rows")
        if values.shape[:1] != (self.num_rows,):
            raise ValueError(f"values: expected {self.num_rows} rows, got shape {tuple(values.shape)}")
        full = values.new_zeros((length, *values.shape[1:]))
        if self.rows is None:
            return torch.cat((values, full[self.T_local :])) if length > self.T_local else values
        return full.index_copy(0, self.rows, values)

    def response_ranges(self) -> list[tuple[int, int, int]]:
        """Return (sample, start, stop) of the response positions on this rank, in extraction order."""
        starts = [p - 1 for p in self.prompt_lengths]
        return [
            (s.sample, s.start - starts[s.sample], s.stop - starts[s.sample]) for s in self.spans if len(s)
        ]

    def returned(self) -> RowPlan:
        """Return the plan that results are split by: the zigzag plan for allgather, otherwise this one."""
        if self.layout != "allgather" or self.cp_size == 1:
            return self
        totals = [p + r for p, r in zip(self.prompt_lengths, self.response_lengths, strict=True)]
        return plan_rows(
            totals,
            self.response_lengths,
            layout="zigzag",
            cp_size=self.cp_size,
            cp_rank=self.cp_rank,
            device=self.targets_index.device,
        )


def select_rows(response_only: bool = False, loss_mask_only: bool = False) -> Select:
    """Convert two flags of a trainer's configuration to `select`; mask-only requires response-only.

    Equivalent to:
        select = ("all", "response", "loss_mask")[response_only + loss_mask_only]
    """
    if loss_mask_only and not response_only:
        raise ValueError("loss_mask_only: needs response_only=True, got response_only=False")
    return "loss_mask" if loss_mask_only else "response" if response_only else "all"


def plan_rows(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    layout: Layout = "thd",
    cp_size: int = 1,
    cp_rank: int = 0,
    local_len: int | None = None,
    max_seq_len: int | None = None,
    pad_multiple: int = 1,
    loss_masks: Masks | None = None,
    select: Select = "response",
    device: torch.device | str = "cpu",
) -> RowPlan:
    """Select the logit rows that this rank has to compute.

    Equivalent to, for one sample of L tokens with R response tokens (layout "thd", select "response"):
        rows = torch.arange(L - R - 1, L - 1)
        targets = tokens[L - R :]

    Args:
        total_lengths: tokens per sample, prompt and response.
        response_lengths: response tokens per sample; may be 0. The prompt must have at least one token.
        layout: "thd" (concatenated), "bshd" (padded to max_seq_len), "zigzag" and "bshd_zigzag" (each sample
            in 2 * cp_size chunks, rank r holds chunks r and 2 * cp_size - 1 - r), "allgather" (one
            concatenated stream split into cp_size equal pieces).
        local_len: rows of the local tensor; None: the smallest multiple of `pad_multiple` that fits.
        loss_masks: per sample, R values 0 or 1 (sequences or CPU tensors).
        select: "all": every row; "response": rows that score the response; "loss_mask": response rows whose
            mask is 1. "loss_mask" returns 0.0 for masked positions: use it for the policy loss only, never
            for stored old or reference log-probs.
        device: device of the indices.
    """
    if select not in ("all", "response", "loss_mask"):
        raise ValueError(f"select: got {select!r}, expected all, response or loss_mask")
    totals, responses, prompts = checked_lengths(total_lengths, response_lengths)
    masks = None if loss_masks is None else checked_masks(loss_masks, responses)
    if select == "loss_mask" and masks is None:
        raise ValueError("loss_masks: select='loss_mask' needs one mask per sample, got None")
    spans, T_local = local_spans(
        totals,
        layout=layout,
        cp_size=cp_size,
        cp_rank=cp_rank,
        max_seq_len=max_seq_len,
        local_len=local_len,
        pad_multiple=pad_multiple,
    )
    windows = [s.clip(prompts[s.sample] - 1, totals[s.sample] - 1) for s in spans]
    mask, weights = (None, None) if masks is None else _local_masks(masks, windows, prompts)
    index = _response_index(windows, totals, prompts, responses)
    if select == "loss_mask" and mask is not None:
        index = _masked_index(index, mask)
    elif select == "all":
        index = _every_row_index(index, spans, totals, T_local)
    splits = [0] * len(totals)
    for window in windows:
        splits[window.sample] += len(window)
    # One copy for everything: the float64 weights are copied as int64 bits.
    bits = None if weights is None else weights.view(torch.int64)
    rows, resp, targets, slots, bits = _to_device_at_once(
        [index.rows, index.resp, index.targets, index.slots, bits], device
    )
    assert resp is not None and targets is not None
    return RowPlan(
        rows=rows,
        targets_index=targets,
        resp_index=resp,
        splits=tuple(splits),
        T_local=T_local,
        select=select,
        slots=slots,
        weights=None if bits is None else bits.view(torch.float64),
        rows_host=index.rows,
        response_host=index.places,
        spans=tuple(windows),
        prompt_lengths=tuple(prompts),
        response_lengths=tuple(responses),
        cp_size=cp_size,
        cp_rank=cp_rank,
        layout=layout,
    )


@dataclass(frozen=True)
class _HostIndex:
    """The index vectors of a plan on the host, one entry per computed row; None as in `RowPlan`.

    `targets` and `resp` are the plan's targets_index and resp_index, `places` its response_host.
    """

    rows: Tensor | None
    targets: Tensor
    resp: Tensor
    places: Tensor
    slots: Tensor | None = None


def _response_index(
    windows: list[Span], totals: list[int], prompts: list[int], responses: list[int]
) -> _HostIndex:
    """Return the index of the rows that score a response token."""
    token_starts, response_starts = _starts(totals), _starts(responses)

    def positions(starts: list[int]) -> Tensor:
        """Return the positions of all windows, offset by the start of their sample."""
        return _ranges((starts[w.sample] + w.start, starts[w.sample] + w.stop) for w in windows)

    # Position x of a sample scores its token x + 1, which is response token x - (P - 1).
    return _HostIndex(
        rows=_ranges((w.base, w.base + len(w)) for w in windows),
        targets=positions([start + 1 for start in token_starts]),
        resp=positions([1 - prompt for prompt in prompts]),
        places=positions([start + 1 - p for start, p in zip(response_starts, prompts, strict=True)]),
    )


def _masked_index(index: _HostIndex, mask: Tensor) -> _HostIndex:
    """Select the response rows where `mask`, one value per row, is 1."""
    slots = mask.nonzero().flatten()
    assert index.rows is not None
    return _HostIndex(index.rows[slots], index.targets[slots], index.resp[slots], index.places[slots], slots)


def _every_row_index(index: _HostIndex, spans: list[Span], totals: list[int], T_local: int) -> _HostIndex:
    """Return the index of all local rows; rows outside a response score their next token, padding token 0."""
    targets, token_starts = torch.zeros(T_local, dtype=torch.int64), _starts(totals)
    for span in spans:
        scoring = span.clip(0, totals[span.sample] - 1)
        first = token_starts[span.sample] + 1 + scoring.start
        targets[scoring.base : scoring.base + len(scoring)] = torch.arange(first, first + len(scoring))
    response_rows = index.rows
    assert response_rows is not None
    outside = torch.full((T_local,), -1)
    return _HostIndex(
        rows=None,
        targets=targets,
        resp=outside.index_copy(0, response_rows, index.resp),
        places=outside.index_copy(0, response_rows, index.places),
        slots=response_rows,
    )


def _local_masks(masks: list[Tensor], windows: list[Span], prompts: list[int]) -> tuple[Tensor, Tensor]:
    """Return the masks of the local response rows and mask / max(mask total of the sample, 1) in float64."""
    scale = [1.0 / max(int(mask.sum()), 1) for mask in masks]
    pieces, weights = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.float64)]
    for window in windows:
        first = prompts[window.sample] - 1
        piece = masks[window.sample][window.start - first : window.stop - first]
        pieces.append(piece)
        weights.append(piece.double() * scale[window.sample])
    return torch.cat(pieces), torch.cat(weights)


def _to_device_at_once(vectors: list[Tensor | None], device: torch.device | str) -> list[Tensor | None]:
    """Copy int64 vectors to `device` in one copy."""
    present = [vector for vector in vectors if vector is not None]
    copied = iter(to_device(torch.cat(present), device).split([vector.numel() for vector in present]))
    return [None if vector is None else next(copied) for vector in vectors]


def full_loss_mask(
    loss_masks: Masks,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    **layout_arguments: Any,
) -> Tensor:
    """Return the masks aligned with local logit rows: [T_local] int64, 1 where the scored token's mask is 1.

    Equivalent to, for one sample of L tokens with R response tokens:
        full = torch.cat((torch.zeros(L - R - 1), mask, torch.zeros(1))).long()

    The other arguments are those of `plan_rows` that describe the layout.
    """
    totals, responses, prompts = checked_lengths(total_lengths, response_lengths)
    masks = checked_masks(loss_masks, responses)
    spans, T_local = local_spans(totals, **layout_arguments)
    full = torch.zeros(T_local, dtype=torch.int64)
    for span in spans:
        first = prompts[span.sample] - 1
        window = span.clip(first, totals[span.sample] - 1)
        local_mask = masks[span.sample][window.start - first : window.stop - first]
        full[window.base : window.base + len(window)] = local_mask
    return to_device(full, device)


def slice_response(responses: Sequence[Tensor], plan: RowPlan) -> list[Tensor]:
    """Slice one [R] tensor per sample into this rank's parts, in the order of `plan.split`.

    Equivalent to:
        held = [[x[a:b] for k, a, b in plan.response_ranges() if k == s] for s, x in enumerate(responses)]
        parts = [torch.cat(pieces) for pieces in held]
    """
    if len(responses) != len(plan.response_lengths):
        raise ValueError(f"responses: expected {len(plan.response_lengths)} samples, got {len(responses)}")
    for k, (x, length) in enumerate(zip(responses, plan.response_lengths, strict=True)):
        if x.shape[:1] != (length,):
            raise ValueError(f"responses[{k}]: expected length {length}, got shape {tuple(x.shape)}")
    pieces: list[list[Tensor]] = [[] for _ in responses]
    for sample, start, stop in plan.response_ranges():
        pieces[sample].append(responses[sample][start:stop])
    return [_join(p, x) for p, x in zip(pieces, responses, strict=True)]


def place_response(parts: Sequence[Tensor], plan: RowPlan) -> list[Tensor]:
    """Expand this rank's parts to one [R] tensor per sample, with zeros where other ranks hold the values."""
    if len(parts) != len(plan.splits):
        raise ValueError(f"parts: expected {len(plan.splits)} samples, got {len(parts)}")
    for k, (x, length) in enumerate(zip(parts, plan.splits, strict=True)):
        if x.shape[:1] != (length,):
            raise ValueError(f"parts[{k}]: expected length {length}, got shape {tuple(x.shape)}")
    ranges: list[list[tuple[int, int]]] = [[] for _ in parts]
    for sample, start, stop in plan.response_ranges():
        ranges[sample].append((start, stop))
    placed = []
    for part, held, length in zip(parts, ranges, plan.response_lengths, strict=True):
        pieces, done, taken = [], 0, 0
        for start, stop in held:
            pieces.append(part.new_zeros((start - done, *part.shape[1:])))
            pieces.append(part[taken : taken + stop - start])
            done, taken = stop, taken + stop - start
        pieces.append(part.new_zeros((length - done, *part.shape[1:])))
        # Concatenate empty parts too: they keep this rank in the graph, so that it also runs backward.
        placed.append(torch.cat([*pieces, part[:0]]))
    return placed


def select_allowed(
    ids: Sequence[Sequence[int] | Tensor], offsets: Sequence[Sequence[int] | Tensor], plan: RowPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Convert allowed ids per response token (top-p replay) to (ids, offsets, has_set) of the computed rows.

    `ids[k]` is the concatenation of sample k's lists, `offsets[k]` their R + 1 bounds; both on the host.
    Returns [M] ids, [T' + 1] offsets and [T'] bool.

    Equivalent to, for one sample and select "response":
        allowed = torch.as_tensor(ids[0]), torch.as_tensor(offsets[0]), torch.ones(R, dtype=torch.bool)
    """
    for name, lists in (("ids", ids), ("offsets", offsets)):
        if len(lists) != len(plan.response_lengths):
            raise ValueError(f"{name}: expected {len(plan.response_lengths)} samples, got {len(lists)}")
    flat, starts, sizes, done = [torch.zeros(0, dtype=torch.int64)], [], [], 0
    for k, (some, bounds, length) in enumerate(zip(ids, offsets, plan.response_lengths, strict=True)):
        some, bounds = torch.as_tensor(some).long(), torch.as_tensor(bounds).long()
        if bounds.shape != (length + 1,) or int(bounds[-1]) != some.numel():
            raise ValueError(f"offsets[{k}]: expected {length + 1} bounds up to {some.numel()} ids")
        flat.append(some)
        starts.append(bounds[:-1] + done)
        sizes.append(bounds.diff())
        done += some.numel()
    has_set = plan.response_host >= 0
    place = plan.response_host.clamp(min=0)
    # One spare entry: rows outside every response index it, and a batch may have no response at all.
    spare = torch.zeros(1, dtype=torch.int64)
    start, size = (torch.cat([*x, spare])[place] for x in (starts, sizes))
    size = torch.where(has_set, size, 0)
    ends = size.cumsum(0)
    within = torch.arange(int(size.sum())) - (ends - size).repeat_interleave(size)
    chosen = torch.cat(flat)[start.repeat_interleave(size) + within]
    # The op reads the offsets on the host, so they stay there.
    device = plan.targets_index.device
    return chosen.to(device), torch.cat((spare, ends)), has_set.to(device)


def next_token_targets(tokens: Tensor, *, ignore_index: int | None = None) -> tuple[Tensor, Tensor]:
    """Return rows and targets for plain language modeling, where every position scores the next token.

    Equivalent to, for tokens [B, S] without `ignore_index`:
        rows = torch.arange(B * S).view(B, S)[:, :-1].flatten()
        targets = tokens[:, 1:].flatten()

    The alignment matches cut-cross-entropy's `shift=True`: pass hidden states and tokens unshifted; the last
    position of a sequence scores nothing.

        rows, targets = next_token_targets(tokens)
        logp = linear_logprobs(hidden.flatten(0, -2), weight, targets, rows=rows).logp

    Args:
        tokens: [S] or [B, S] ids (or labels), aligned with hidden [S, D] or [B, S, D].
        ignore_index: positions with this label, usually -100, are not scored. One host sync on a GPU.

    Returns:
        rows [T'] int64 into the flattened positions, targets [T']. Packed or padded samples: `plan_rows`.
    """
    if tokens.dim() not in (1, 2) or tokens.is_floating_point():
        got = f"{tokens.dtype} {tuple(tokens.shape)}"
        raise ValueError(f"tokens: expected integers [S] or [B, S], got {got}")
    rows = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)[..., :-1].flatten()
    targets = tokens[..., 1:].flatten()
    if ignore_index is not None:
        scored = targets != ignore_index
        rows, targets = rows[scored], targets[scored]
    return rows, targets


def sample_mean(values: Tensor | Sequence[Tensor], plan: RowPlan) -> Tensor:
    """Return this rank's share of the sum over samples of sum(x * mask) / max(mask total, 1), a scalar.

    Equivalent to, on one rank, for `values` in parts:
        share = sum((x * m).sum() / max(m.sum(), 1) for x, m in zip(values, loss_masks))

    The mask total is the whole sample's, so the shares of all context-parallel ranks add up to the
    unsharded value. `values`: the parts of `plan.split`, or their concatenation.
    """
    if plan.weights is None:
        raise ValueError("plan: sample_mean needs a plan built with loss_masks")
    flat = _one_row(values, plan.weights)
    if flat.shape != plan.weights.shape:
        raise ValueError(f"values: expected {plan.weights.numel()} entries, got shape {tuple(flat.shape)}")
    return (flat * plan.weights.to(flat.dtype)).sum()


def _one_row(values: Any, like: Tensor) -> Tensor:
    """Return a tensor unchanged and concatenate a list of tensors; an empty list gives an empty tensor."""
    if isinstance(values, Tensor):
        return values
    return torch.cat(list(values)) if len(values) else like.new_zeros(0)


def _ranges(bounds: Iterable[tuple[int, int]]) -> Tensor:
    pieces = [torch.arange(start, stop) for start, stop in bounds if start < stop]
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.int64)


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)][: len(lengths)]


def _join(pieces: list[Tensor], like: Tensor) -> Tensor:
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(pieces) if pieces else like[:0]
