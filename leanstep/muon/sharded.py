"""NorMuon over the ranks of a mesh, for plain tensors: each rank steps its share and has the state of it.

    reduce-scatter   the mean gradient of every share to the rank that owns it (nothing is sent after DDP)
    step             the share: whole matrices, or a piece of one of Adam's parameters
    all-gather       the new weights to all ranks

Matrices are the items of a parameter that ranks may share: a bank is divided among the ranks, a single matrix
has one owner, chosen by the work it costs, the same way on every rank, without communication. Adam's items
are elements. A large parameter that divides evenly has two collectives of its own, without copies, which run
while other parameters are stepped. All others share two collectives per dtype. `leanstep.muon.fsdp` handles
FSDP2's DTensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from leanstep.muon.checks import finite
from leanstep.muon.groups import Group, layout_of
from leanstep.muon.update import State, Work, new_state, update

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Below this size two collectives cost more than copying into the shared ones.
MIN_OWN_ELEMENTS = 1 << 16


def assign(costs: Mapping[str, tuple[int, float]], loads: Sequence[float]) -> dict[str, int]:
    """Return the owner of each parameter: largest first, each to the least loaded rank, ties to the lowest.

    Args:
        costs: name -> (number of elements, FLOPs). loads: of each rank at the start.
    """
    owner, loads = {}, list(loads)
    for name in sorted(costs, key=lambda name: (-costs[name][0], name)):
        owner[name] = loads.index(min(loads))
        loads[owner[name]] += costs[name][1]
    return owner


class Ranks:
    """A process group whose ranks take or skip a step together."""

    group: Any
    device: torch.device
    _num_grads: int | None = None

    def finite(self, grads: Sequence[Tensor], on_device: bool) -> bool | Tensor:
        """Return whether all ranks have finite gradients: a tensor if `on_device`, else a bool.

        Raises if the ranks have different numbers of gradients. With `on_device` a rank reads this only when
        its own number has changed; the other ranks then skip the step.
        """
        count = len(grads)
        flags = torch.full((3,), float(count), device=self.device)
        flags[0] = finite(grads, on_device)
        flags[2].neg_()
        dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=self.group)
        if on_device and count == self._num_grads:
            return flags[0] * (flags[1] == -flags[2])
        self._num_grads = count
        everywhere, fewest, most = flags.tolist()
        if fewest != -most:
            raise ValueError(
                f"gradients: expected the same parameters with a gradient on every rank, "
                f"got between {int(fewest)} and {int(-most)}"
            )
        return flags[0] if on_device else bool(everywhere)


class Owners(Ranks):
    """Shares the work on plain tensors among ranks; each rank has the gradients of its own batch.

    Args:
        mesh: a 1-D DeviceMesh, or a process group.
        averaged: gradients are already the same on every rank (DDP): nothing is reduced.

    Every rank must hold the same parameters in the same order. Collectives per step: two per dtype, two per
    large parameter, and one of three numbers, so that all ranks skip a step whose gradients are not finite.
    """

    def __init__(self, mesh: Any, averaged: bool) -> None:
        if getattr(mesh, "ndim", 1) != 1:
            raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}; select one with mesh['name']")
        self.group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.averaged = averaged
        # Parameter -> first item of each rank, and the number of items at the end.
        self.edges: dict[Tensor, list[int]] = {}

    @property
    def assigned(self) -> bool:
        return bool(self.edges)

    def assign(self, entries: Sequence[tuple[Group, str, Tensor]]) -> None:
        """Decide which rank owns which items of each parameter."""
        self.device = entries[0][2].device
        loads, alone = [0.0] * self.world, {}
        for group, name, param in entries:
            if not param.is_contiguous():
                raise ValueError(
                    f"{name}: expected a contiguous parameter with a mesh, got strides {param.stride()}"
                )
            count, cost = _items(group, param)
            self.edges[param] = [count * rank // self.world for rank in range(self.world + 1)]
            if count == 1 and group["algorithm"] != "adam":
                alone[name] = (param, cost)
            else:
                widths = torch.tensor(self.edges[param]).diff().tolist()
                loads = [load + width * cost for load, width in zip(loads, widths, strict=True)]
        owner = assign({name: (param.numel(), cost) for name, (param, cost) in alone.items()}, loads)
        for name, (param, _) in alone.items():
            self.edges[param] = [int(rank > owner[name]) for rank in range(self.world + 1)]

    def share(self, param: Tensor, flat: Tensor, rank: int | None = None) -> Tensor:
        """Return a rank's part of a tensor that belongs to this parameter: its values, state or gradient."""
        edges, rank = self.edges[param], self.rank if rank is None else rank
        per_item = flat.numel() // max(1, edges[-1])
        return flat.reshape(-1)[edges[rank] * per_item : edges[rank + 1] * per_item]

    def new_state(self, group: Group, param: Tensor) -> State:
        lines: tuple[int, ...] = ()
        if group["algorithm"] != "adam":
            full = torch.empty(layout_of(param.shape, group).second_shape, device="meta")
            lines = tuple(self.share(param, full).shape)
        return new_state(group, self.share(param, param.detach()), lines)

    def own_state(self, group: Group, param: Tensor, full: State) -> State:
        """Return this rank's share of a full state."""
        return {k: v if k == "step" else self.share(param, v).clone() for k, v in full.items()}

    def full_state(self, group: Group, param: Tensor, state: State) -> State:
        """Return the state of all shares on every rank; one collective per tensor."""
        edges, full = self.edges[param], dict(state)
        for key, part in state.items():
            if key == "step":
                continue
            second = key == "second_momentum"
            shape = layout_of(param.shape, group).second_shape if second else tuple(param.shape)
            per_item = math.prod(shape) // max(1, edges[-1])
            sizes = [(end - begin) * per_item for begin, end in itertools.pairwise(edges)]
            padded = part.new_zeros(max(sizes))
            padded[: part.numel()] = part
            gathered = part.new_empty(self.world * max(sizes))
            # Neither gloo nor NCCL supports 16-bit integers.
            all_gather(gathered.view(torch.uint8), padded.view(torch.uint8), group=self.group)
            parts = [row[:size] for row, size in zip(gathered.view(self.world, -1), sizes, strict=True)]
            full[key] = torch.cat(parts).view(shape)
        return full

    def update(self, work: Sequence[Work], go: Tensor | None = None) -> None:
        """Reduce gradients to their owners, step there, and gather the weights on all ranks."""
        together: dict[tuple, list[Work]] = {}
        exchanges: list[_Exchange] = []
        for item in work:
            numel = item.weight.numel()
            if numel >= MIN_OWN_ELEMENTS and self.edges[item.weight][-1] % self.world == 0:
                exchanges.append(_Exchange(self, [item]))
            elif numel:
                kind = (item.weight.dtype, item.grad.dtype, item.weight.device)
                together.setdefault(kind, []).append(item)
        exchanges += [_Exchange(self, items) for items in together.values()]
        # Matrices first: polar factors are computed while tables are reduced.
        exchanges.sort(key=lambda exchange: exchange.items[0].group["algorithm"] == "adam")
        for exchange in exchanges:
            exchange.reduce()
        groups: dict[tuple, Group] = {}
        for exchange in exchanges:
            update(exchange.shares(groups), go)
            exchange.gather()
        for exchange in exchanges:
            exchange.finish()


def _items(group: Group, param: Tensor) -> tuple[int, float]:
    """Return the number of items of a parameter that ranks may share, and the cost of one in FLOPs."""
    if group["algorithm"] == "adam":
        return param.numel(), 12.0
    layout = layout_of(param.shape, group)
    flops = sum(4.0 * part.count * part.rows * part.cols * min(part.rows, part.cols) for part in layout.parts)
    return math.prod(layout.lead) * layout.pieces, flops * len(group["coefficients"]) / layout.pieces


class _Exchange:
    """The reduce-scatter and the all-gather of one large parameter, or of many in one buffer."""

    def __init__(self, ranks: Owners, items: Sequence[Work]) -> None:
        self.ranks, self.items, self.pending = ranks, items, None
        self.even = len(items) == 1 and ranks.edges[items[0].weight][-1] % ranks.world == 0

    def reduce(self) -> None:
        """Start sending gradients to their owners."""
        ranks, grads = self.ranks, [item.grad.contiguous() for item in self.items]
        if ranks.averaged:
            self.grads = [ranks.share(item.weight, g) for item, g in zip(self.items, grads, strict=True)]
            return
        if self.even:
            send = grads[0].view(-1)
            self.sizes = [send.numel() // ranks.world]
        else:
            send, self.sizes = self._rows(grads)
        self.mean = send.new_empty(send.numel() // ranks.world)
        self.pending = reduce_scatter(self.mean, send.view(-1), group=ranks.group, async_op=True)
        self.grads = self.mean[: sum(self.sizes)].split(self.sizes)

    def _rows(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """Return [world, length], a zero-padded row of shares for each rank, and the sizes of this rank's."""
        ranks = self.ranks
        shares = [
            [ranks.share(item.weight, tensor, rank) for item, tensor in zip(self.items, tensors, strict=True)]
            for rank in range(ranks.world)
        ]
        rows = tensors[0].new_zeros(ranks.world, max(sum(s.numel() for s in row) for row in shares))
        for row, parts in zip(rows, shares, strict=True):
            torch.cat(parts, out=row[: sum(part.numel() for part in parts)])
        return rows, [share.numel() for share in shares[ranks.rank]]

    def shares(self, groups: dict[tuple, Group]) -> list[Work]:
        """Wait for the mean gradients; return this rank's shares as work. `groups`: of all shares."""
        ranks, work = self.ranks, []
        if self.pending is not None:
            self.pending.wait()
            # A sum divided by the number of ranks: gloo has no mean before torch 2.13, and for a power of two
            # the result has the same bits.
            self.mean.div_(ranks.world)
        for item, grad in zip(self.items, self.grads, strict=True):
            group, multipliers, weight = item.group, item.multipliers, ranks.share(item.weight, item.weight)
            if group["algorithm"] != "adam":
                layout = layout_of(item.weight.shape, group)
                pieces = layout.pieces
                whole = {"flatten": None} | ({"split": None, "heads": None} if pieces > 1 else {})
                group = groups.setdefault((id(group), pieces > 1), {**group, **whole})
                weight = weight.view(-1, layout.rows // pieces, layout.cols)
                edges = ranks.edges[item.weight]
                multipliers = multipliers and multipliers[edges[ranks.rank] : edges[ranks.rank + 1]]
            work.append(Work(group, weight, grad, item.state, multipliers))
        return work

    def gather(self) -> None:
        """Start sending this rank's weights to all ranks."""
        ranks = self.ranks
        mine = [ranks.share(item.weight, item.weight) for item in self.items]
        if self.even:
            # gloo reads its input while it writes the output; NCCL reads the share where it is.
            sent = mine[0].clone() if mine[0].device.type == "cpu" else mine[0]
            self.rows = self.items[0].weight.view(-1)
        else:
            lengths = [
                sum(ranks.share(i.weight, i.weight, r).numel() for i in self.items)
                for r in range(ranks.world)
            ]
            sent = mine[0].new_zeros(max(lengths))
            torch.cat(mine, out=sent[: lengths[ranks.rank]])
            self.rows = mine[0].new_empty(ranks.world * max(lengths))
        self.pending = all_gather(self.rows, sent, group=ranks.group, async_op=True)

    def finish(self) -> None:
        """Wait for all ranks' weights, and write them to the parameters."""
        assert self.pending is not None
        self.pending.wait()
        if self.even:
            return
        targets, sources = [], []
        for rank, row in enumerate(self.rows.view(self.ranks.world, -1)):
            parts = [self.ranks.share(item.weight, item.weight, rank) for item in self.items]
            sizes = [part.numel() for part in parts]
            targets += parts
            sources += row[: sum(sizes)].split(sizes)
        torch._foreach_copy_(targets, list(sources))
