"""A table's gradient is exchanged by rows: each rank sends the rows that its batch touched to their owners.

An embedding's gradient is zero except in the rows of the batch's tokens. A reduce-scatter sends all rows.
Here one all-to-all sends the touched ones, and each owner adds what it receives to its own gradient:

    mean of my rows = (my gradient + rows from rank 0 + rows from rank 1 + ...) / ranks

The order of the sum is fixed: a repeated run has the same bits. The user names the touched rows on the host
(`NorMuon.note_rows`), and one collective between the hosts gathers one byte per table row from every rank. So
each host knows the shapes of the exchange without reading the device. A host waits for the other hosts, for
the device only in the first exchange of a table, which is checked for rows that were not named.

Sending only touched rows is an idea of modded-nanogpt's bigram table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Above this share of the rows that a dense exchange sends, selecting and adding rows costs what it saves.
MAX_SHARE = 0.5


class TouchedRows:
    """The rows of one table that may have a gradient on this rank; all of them if nothing is known."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._flags: Tensor | None = None
        self.checked = False

    def add(self, rows: Tensor) -> None:
        if self._flags is None:
            self._flags = torch.zeros(self._num_rows, dtype=torch.bool)
        self._flags[rows.reshape(-1)] = True

    def add_all(self) -> None:
        self._flags = torch.ones(self._num_rows, dtype=torch.bool)

    def clear(self) -> None:
        self._flags = None

    def flags(self) -> Tensor:
        """Return [rows] bool."""
        return torch.ones(self._num_rows, dtype=torch.bool) if self._flags is None else self._flags


def check_rows(rows: Any, num_rows: int) -> None:
    """Raise unless `rows` are row numbers of a table on the host."""
    if not isinstance(rows, Tensor) or rows.is_floating_point() or rows.dtype == torch.bool:
        what = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(f"rows: expected a tensor of integers, got {what}")
    if rows.device.type != "cpu":
        raise ValueError(
            f"rows: expected a tensor on the CPU, because a host read would wait for the device; "
            f"got one on {rows.device}"
        )
    if rows.numel() and not (0 <= int(rows.min()) and int(rows.max()) < num_rows):
        raise ValueError(
            f"rows: expected numbers within 0..{num_rows - 1}, got {int(rows.min())}..{int(rows.max())}"
        )


@dataclass(frozen=True)
class RowPlan:
    """What one rank sends and receives for one table.

    Args:
        send_rows: rows of the table, sorted, and so by owner. send_counts: how many of them to each rank.
        receive_rows: what each rank sends here, as rows of this rank's piece.
    """

    send_rows: Tensor
    send_counts: list[int]
    receive_rows: Sequence[Tensor]


def plan_rows(flags: Tensor, rank: int, device: torch.device) -> RowPlan | None:
    """Return the plan of `rank`; None if the ranks touch so many rows that a dense exchange is faster.

    Args:
        flags: [ranks, rows] bool, the touched rows of every rank; rank r owns the r-th of equal pieces.
        device: of the plan's tensors; copied without a host sync.
    """
    ranks = flags.shape[0]
    by_owner = flags.reshape(ranks, ranks, -1)  # sender, owner, row of the owner's piece
    # A rank sends nothing to itself.
    counts = by_owner.sum(2).fill_diagonal_(0)
    busiest = max(int(counts.sum(0).max()), int(counts.sum(1).max()))
    if busiest > MAX_SHARE * (ranks - 1) * by_owner.shape[2]:
        return None
    sent, received = by_owner[rank].clone(), by_owner[:, rank].clone()
    sent[rank] = received[rank] = False
    send_rows, receive_rows = sent.flatten().nonzero().flatten(), received.nonzero()[:, 1]
    rows = torch.cat([send_rows, receive_rows]).to(torch.int32)
    if device.type == "cuda":
        rows = rows.pin_memory()
    here = rows.to(device, non_blocking=True)
    send_counts, receive_counts = counts[rank].tolist(), counts[:, rank].tolist()
    first, *others = here.split([send_rows.numel(), *receive_counts])
    return RowPlan(first, send_counts, others)


class RowExchange:
    """The tables of one optimizer whose gradients are exchanged by rows, and the touched rows of each.

    Args:
        group: the process group of the gradients. rank, world: this rank and the number of ranks.
    """

    def __init__(self, group: Any, rank: int, world: int) -> None:
        self.group, self.rank, self.world = group, rank, world
        self.tables: dict[str, TouchedRows] = {}
        self._hosts: Any = None

    def plan(self, grads: Mapping[str, Tensor]) -> dict[str, RowPlan]:
        """Return the plans of the tables for which an exchange by rows pays, the same tables on every rank.

        Raises on all ranks if one of them has a gradient in a row that was not named. That is checked in the
        first exchange of a table; in every one with TORCH_DISTRIBUTED_DEBUG=DETAIL.

        Collectives: one on the host, of one byte per row and rank; none without tables.
        """
        if not grads:
            return {}
        mine = [self._message(self.tables[name], grad) for name, grad in grads.items()]
        sent = torch.cat(mine)
        gathered = sent.new_empty(self.world, sent.numel())
        all_gather(gathered.view(-1), sent, group=self._host_group())
        plans = {}
        parts = gathered.split([message.numel() for message in mine], 1)
        for (name, grad), part in zip(grads.items(), parts, strict=True):
            incomplete = part[:, -1].nonzero().flatten().tolist()
            if incomplete:
                raise ValueError(
                    f"{name}: expected note_rows for every row with a gradient, "
                    f"got a gradient in other rows on rank {incomplete[0]}"
                )
            plan = plan_rows(part[:, :-1].bool(), self.rank, grad.device)
            if plan is not None:
                plans[name] = plan
        return plans

    def _message(self, touched: TouchedRows, grad: Tensor) -> Tensor:
        """Return [rows + 1] bytes: which rows are touched, and whether a row with a gradient is missing."""
        flags, missing = touched.flags(), False
        due = not touched.checked or dist.get_debug_level() == dist.DebugLevel.DETAIL
        if due and not flags.all():
            missing = bool((grad.flatten(1).ne(0).any(1) & ~flags.to(grad.device)).any())
            touched.checked = True
        return torch.cat([flags, torch.tensor([missing])]).to(torch.uint8)

    def _host_group(self) -> Any:
        """Return a group that sends host tensors, which NCCL's does not; created by all ranks together."""
        if self._hosts is None:
            self._hosts = self.group
            if dist.get_backend(self.group) != "gloo":
                ranks = dist.get_process_group_ranks(self.group)
                self._hosts = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return self._hosts


class PendingRows:
    """An exchange of rows in flight; `wait` returns the mean gradient of this rank's piece.

    Args:
        grad: of the whole table on this rank; not modified.
        piece: the rows that this rank owns.
    """

    def __init__(self, grad: Tensor, piece: slice, plan: RowPlan, group: Any) -> None:
        self._own, self._plan = grad[piece], plan
        self._sent = grad.index_select(0, plan.send_rows)
        counts = [rows.numel() for rows in plan.receive_rows]
        self._received = grad.new_empty((sum(counts), *grad.shape[1:]))
        self._parts = self._received.split(counts)
        self._work: Any = dist.all_to_all_single(
            self._received, self._sent, counts, plan.send_counts, group=group, async_op=True
        )

    def wait(self) -> Tensor:
        self._work.wait()
        total = self._own.clone(memory_format=torch.contiguous_format)
        # One rank after the other: its rows differ, so that no two additions meet in any order.
        for rows, values in zip(self._plan.receive_rows, self._parts, strict=True):
            if rows.numel():
                total.index_add_(0, rows, values)
        return total.div_(len(self._parts))
