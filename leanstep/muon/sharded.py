"""NorMuon over the ranks of a mesh, for plain tensors: the rank that owns a parameter steps it.

    one reduce-scatter sends the mean gradients to the owners of their parameters (none after DDP)
    owners step their parameters; only they store state
    one all-gather sends the new weights to all ranks

This takes two collectives per dtype for any number of matrices. Parameters are assigned by FLOPs, the same
way on every rank, without communication. A bank whose matrices the ranks can share evenly is cut, and so is a
large table of Adam's by rows: each rank owns a piece, and its two collectives run beside the steps of other
parameters. Of a table with `sparse_rows` only the touched rows are sent (`leanstep.muon.sparse_rows`).
`leanstep.muon.fsdp` handles FSDP2's DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from leanstep.muon.param_groups import Entry, make_entry
from leanstep.muon.polar import Workspace
from leanstep.muon.sparse_rows import PendingRows, RowExchange, RowPlan, TouchedRows, all_gather
from leanstep.muon.state import State, finite_on_device, grads_are_finite, new_state
from leanstep.muon.update import States, advance, update_parameters

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Work = Sequence[tuple[Entry, Tensor]]
# Adam's tables from this size on are cut; two collectives for less are slower than an owner.
MIN_CUT_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Assignment:
    """The owning rank of each parameter by name, and the load of each rank in FLOPs."""

    owner: dict[str, int]
    cost: dict[str, float]
    loads: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """The largest load divided by the mean load; 1 is perfect."""
        mean = sum(self.loads) / len(self.loads)
        return max(self.loads) / mean if mean else 1.0

    def __str__(self) -> str:
        lines = [f"imbalance {self.imbalance:.3f}"]
        for rank, load in enumerate(self.loads):
            names = [name for name, owner in self.owner.items() if owner == rank]
            lines.append(f"rank {rank}: {load / 1e9:.3g} GFLOP, {len(names)} matrices: {', '.join(names)}")
        return "\n".join(lines)


def assign(costs: Mapping[str, tuple[int, float]], world_size: int) -> Assignment:
    """Assign the largest parameter first, each to the least loaded rank; ties go to the lowest rank.

    Args:
        costs: name -> (number of elements, FLOPs). Sorted by (-elements, name) before assigning.
        world_size: number of ranks.
    """
    if world_size < 1:
        raise ValueError(f"world_size: expected at least 1, got {world_size}")
    loads = [0.0] * world_size
    owner: dict[str, int] = {}
    for name in sorted(costs, key=lambda name: (-costs[name][0], name)):
        rank = min(range(world_size), key=lambda r: (loads[r], r))
        owner[name] = rank
        loads[rank] += costs[name][1]
    ordered = {name: owner[name] for name in costs}
    return Assignment(ordered, {name: cost for name, (_, cost) in costs.items()}, tuple(loads))


class Piece:
    """This rank's share of a parameter that is cut: consecutive matrices of a bank, or rows of a table.

    Args:
        entry: of the whole parameter.
        shape: of the parameter as a list of pieces' items: [matrices, R, C], or its own for a table.
    """

    def __init__(self, entry: Entry, shape: tuple[int, ...], rank: int, world: int) -> None:
        self.whole, self.shape, self.world = entry, shape, world
        self.count = shape[0] // world
        self.items = slice(rank * self.count, (rank + 1) * self.count)
        self._group: dict[str, Any] = {}
        self.refresh()
        self.entry = make_entry(entry.name, self._group, self.weight())

    @staticmethod
    def shape_of(entry: Entry, world: int) -> tuple[int, ...] | None:
        """How a parameter is cut; None: one rank owns all of it."""
        param, group = entry.param, entry.group
        if not param.is_contiguous():
            return None
        if entry.is_adam:
            fits = param.numel() >= MIN_CUT_ELEMENTS and param.ndim > 1 and param.shape[0] % world == 0
            return tuple(param.shape) if fits else None
        assert entry.cut is not None and entry.forms is not None
        cut, several = entry.cut, not isinstance(group["lr_mul"], int | float)
        if len(entry.forms) > 1 or cut.flatten or cut.heads or (cut.split and (cut.split_dim or several)):
            return None
        ((rows, cols), form), *_ = entry.forms.items()
        return (form.count, rows, cols) if form.count > 1 and form.count % world == 0 else None

    def refresh(self) -> None:
        """Take over what a schedule has changed in the parameter's group."""
        self._group.update(self.whole.group)
        if self.whole.is_adam:
            return
        self._group["split"] = None
        multipliers = self._group["lr_mul"]
        if not isinstance(multipliers, int | float):
            self._group["lr_mul"] = list(multipliers)[self.items]

    def weight(self) -> Tensor:
        return self.whole.param.detach().view(self.shape)[self.items]

    def of(self, full: State) -> State:
        """This rank's share of a whole parameter's state."""
        return {
            key: value.clone() if key == "step" else self._items(key, value)[self.items].clone()
            for key, value in full.items()
        }

    def _items(self, key: str, value: Tensor) -> Tensor:
        """State of the whole parameter, one item per matrix or row, in the order of its memory."""
        if key != "second_momentum":
            return value.view(self.shape)
        parts = len(self.whole.cut.split) if self.whole.cut is not None and self.whole.cut.split else 1
        # The lines of a split parameter are stored part by part, each over all entries of the bank.
        lines = value.reshape(parts, self.shape[0] // parts, -1).transpose(0, 1).flatten(0, 1)
        return lines.unflatten(1, tuple(self.entry.second_shape or ())[1:])

    def join(self, key: str, parts: Tensor, like: Tensor) -> Tensor:
        """State of the whole parameter from the pieces of all ranks, in rank order."""
        if key != "second_momentum":
            return parts.view(like.shape)
        count = len(self.whole.cut.split) if self.whole.cut is not None and self.whole.cut.split else 1
        lines = parts.reshape(self.shape[0] // count, count, -1).transpose(0, 1)
        return lines.reshape(like.shape)


class Owners:
    """Shares the work on plain tensors among ranks; each rank has the gradients of its own batch.

    Args:
        mesh: a 1-D DeviceMesh, or a process group.
        averaged: gradients are already the same on every rank (DDP): nothing is reduced.

    Every rank must hold the same parameters in the same order. Collectives per step: two per dtype; one of
    three numbers, so that all ranks skip a step whose gradients are not finite; and one per dtype for
    gradients of groups that were not due, so that these are also the same on every rank; two per piece, and
    one between the hosts for all tables with `sparse_rows`. On a GPU the host reads the three numbers only on
    the first step and after the number of gradients changes.
    """

    def __init__(self, mesh: Any, averaged: bool) -> None:
        if getattr(mesh, "ndim", 1) != 1:
            raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}; select one with mesh['name']")
        self.group = mesh.get_group() if hasattr(mesh, "get_group") else mesh
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.averaged = averaged
        self.assignment: Assignment | None = None
        self.agreement = Agreement()
        self.pieces: dict[str, Piece] = {}
        self.rows = RowExchange(self.group, self.rank, self.world)

    def assign_owners(self, entries: Sequence[Entry]) -> None:
        """Decide which rank owns which parameter, or which piece of it."""
        self.device = entries[0].param.device
        shapes = {e.name: Piece.shape_of(e, self.world) for e in entries}
        self.pieces = {
            e.name: Piece(e, shape, self.rank, self.world)
            for e, shape in zip(entries, shapes.values(), strict=True)
            if shape is not None
        }
        if self.world > 1 and not self.averaged:
            sparse = (piece for piece in self.pieces.values() if piece.whole.group.get("sparse_rows"))
            self.rows.tables = {piece.whole.name: TouchedRows(piece.shape[0]) for piece in sparse}
        whole = {e.name: (e.param.numel(), e.flops()) for e in entries if e.name not in self.pieces}
        self.assignment = assign(whole, self.world)

    def is_cut(self, entry: Entry) -> bool:
        """Whether every rank owns a piece of the parameter."""
        return entry.name in self.pieces

    def owner(self, entry: Entry) -> int:
        assert self.assignment is not None
        return self.assignment.owner[entry.name]

    def owns(self, entry: Entry) -> bool:
        """Return whether this rank has the whole state of the parameter."""
        return not self.is_cut(entry) and self.owner(entry) == self.rank

    def grads_are_finite(self, grads: Sequence[Tensor], on_device: bool) -> bool | Tensor:
        return self.agreement.on(grads, on_device, self.device, self.group)

    def average(self, grads: Sequence[Tensor]) -> None:
        """Average gradients over the ranks, in place, unless DDP has done it."""
        if self.averaged:
            return
        for members in _by_kind(grads, lambda grad: (grad.dtype, grad.device)):
            flat = torch.cat([grad.reshape(-1) for grad in members])
            dist.all_reduce(flat, group=self.group)
            parts = flat.div_(self.world).split([grad.numel() for grad in members])
            means = [mean.view_as(grad) for grad, mean in zip(members, parts, strict=True)]
            torch._foreach_copy_(members, means)

    def update(self, work: Work, states: States, workspace: Workspace, go: Tensor | None = None) -> None:
        """Reduce gradients to their owners, step there, and gather the weights on all ranks."""
        # First: it raises for rows that were not named, before anything changes.
        plans = self.rows.plan({e.name: grad for e, grad in work if e.name in self.rows.tables})
        owned = self._launch_owned([pair for pair in work if not self.is_cut(pair[0])])
        cut = [pair for pair in work if self.is_cut(pair[0])]
        # Matrices, dense tables, sparse ones: polar factors run while tables are exchanged, and rows are
        # selected while matrices are exchanged.
        cut.sort(key=lambda pair: (pair[0].name in plans, pair[0].is_adam))
        pending = [
            (self.pieces[entry.name], self._reduce_piece(entry, grad, plans.get(entry.name)))
            for entry, grad in cut
        ]
        gathers = [self._update_piece(piece, part, states, workspace, go) for piece, part in pending]
        self._step_owned(owned, states, workspace, go)
        for gather in gathers:
            gather.wait()

    def _reduce_piece(self, entry: Entry, grad: Tensor, plan: RowPlan | None) -> _Pending | PendingRows:
        piece = self.pieces[entry.name]
        if plan is not None:
            return PendingRows(grad, piece.items, plan, self.group)
        if self.averaged:
            return _Pending(None, grad.reshape(piece.shape)[piece.items].contiguous(), 1)
        out = grad.new_empty((piece.count, *piece.shape[1:]))
        work = _reduce_scatter(out.view(-1), grad.reshape(-1), group=self.group, async_op=True)
        return _Pending(work, out, self.world)

    def _update_piece(
        self,
        piece: Piece,
        reduced: _Pending | PendingRows,
        states: States,
        workspace: Workspace,
        go: Tensor | None,
    ) -> Any:
        """Step this rank's piece; return the collective that gathers all pieces on all ranks."""
        piece.refresh()
        whole, entry = piece.whole.param, piece.entry
        update_parameters([(entry, reduced.wait())], {entry.param: states[whole]}, workspace, go)
        # gloo reads its input while it writes the output; NCCL takes the piece where it lies.
        mine = entry.param.detach().reshape(-1)
        mine = mine.clone() if mine.device.type == "cpu" else mine
        return all_gather(whole.detach().view(-1), mine, group=self.group, async_op=True)

    def _launch_owned(self, work: Work) -> list[tuple[list[list[tuple[Entry, Tensor]]], _Pending]]:
        """Send gradients to the owners of whole parameters: (work by rank, the reduction) per exchange."""
        # Weights are sent in the parameter's dtype, gradients in their own: one exchange per pair of dtypes.
        kinds = _by_kind(work, lambda pair: (pair[0].param.dtype, pair[1].dtype, pair[1].device))
        launched = []
        for members in kinds:
            buckets: list[list[tuple[Entry, Tensor]]] = [[] for _ in range(self.world)]
            for pair in members:
                buckets[self.owner(pair[0])].append(pair)
            launched.append((buckets, self._reduce(buckets)))
        return launched

    def _step_owned(
        self,
        launched: list[tuple[list[list[tuple[Entry, Tensor]]], _Pending]],
        states: States,
        workspace: Workspace,
        go: Tensor | None,
    ) -> None:
        """Step the parameters that this rank owns, and gather the weights on all ranks."""
        for buckets, pending in launched:
            mine = [entry for entry, _ in buckets[self.rank]]
            sizes = [entry.param.numel() for entry in mine]
            parts = pending.wait()[: sum(sizes)].split(sizes)
            means = [part.view_as(entry.param) for entry, part in zip(mine, parts, strict=True)]
            update_parameters(zip(mine, means, strict=True), states, workspace, go)
            others = [e for bucket in buckets if bucket is not buckets[self.rank] for e, _ in bucket]
            for entry in others:
                # Every rank records which parameters have state; only the owner has the tensors.
                if not states[entry.param]:
                    states[entry.param].update(self.new_state(entry))
            advance([states[entry.param] for entry in others if entry.is_adam], go)
            self._spread([[entry.param.detach() for entry, _ in bucket] for bucket in buckets])

    def _reduce(self, buckets: list[list[tuple[Entry, Tensor]]]) -> _Pending:
        grads = [[grad for _, grad in bucket] for bucket in buckets]
        like = next(grad for bucket in grads for grad in bucket)
        if self.averaged:
            mine = [grad.reshape(-1) for grad in grads[self.rank]]
            return _Pending(None, torch.cat(mine) if mine else like.new_empty(0), 1)
        # reduce-scatter needs the buckets as rows of one zero-padded matrix.
        length = max(sum(grad.numel() for grad in bucket) for bucket in grads)
        rows = like.new_zeros(self.world, length)
        for row, bucket in zip(rows, grads, strict=True):
            if bucket:
                torch.cat([g.reshape(-1) for g in bucket], out=row[: sum(g.numel() for g in bucket)])
        out = like.new_empty(length)
        # A sum divided by the number of ranks: gloo has no mean before torch 2.13, and for a power of two
        # the result has the same bits.
        return _Pending(_reduce_scatter(out, rows.view(-1), group=self.group, async_op=True), out, self.world)

    def _spread(self, weights: list[list[Tensor]]) -> None:
        """Gather every owner's weights on all ranks."""
        length = max(sum(weight.numel() for weight in bucket) for bucket in weights)
        like = next(weight for bucket in weights for weight in bucket)
        flat = like.new_zeros(length)
        if weights[self.rank]:
            size = sum(weight.numel() for weight in weights[self.rank])
            torch.cat([weight.reshape(-1) for weight in weights[self.rank]], out=flat[:size])
        gathered = like.new_empty(self.world * length)
        all_gather(gathered, flat, group=self.group)
        targets, sources = [], []
        for bucket, row in zip(weights, gathered.view(self.world, length), strict=True):
            parts = row[: sum(weight.numel() for weight in bucket)].split([w.numel() for w in bucket])
            targets += bucket
            sources += [part.view_as(weight) for part, weight in zip(parts, bucket, strict=True)]
        torch._foreach_copy_(targets, sources)

    # Only the owner has the state; the other ranks count Adam's steps themselves, because a process group for
    # devices only (NCCL) cannot send the count, which is on the host.

    def new_state(self, entry: Entry) -> State:
        if self.is_cut(entry):
            return new_state(self.pieces[entry.name].entry)
        return self.own_state(entry, new_state(entry))

    def own_state(self, entry: Entry, state: State) -> State:
        """Return the part of a full state that this rank stores."""
        if self.is_cut(entry):
            return self.pieces[entry.name].of(state)
        if self.owns(entry):
            return state
        return {"step": state["step"]} if "step" in state else {}

    def full_state(self, entry: Entry, state: State) -> State:
        """Return the owner's state on every rank; a collective."""
        full = new_state(entry)
        if self.is_cut(entry):
            return {key: self._joined(entry, key, state[key], like) for key, like in full.items()}
        for key, value in full.items():
            if key == "step" or self.owns(entry):
                value.copy_(state[key])
            if key != "step":
                # Neither gloo nor NCCL supports 16-bit integers, but a broadcast can send their bytes.
                sent = value.view(torch.uint8) if value.dtype == torch.int16 else value
                dist.broadcast(sent, group=self.group, group_src=self.owner(entry))
        return full

    def _joined(self, entry: Entry, key: str, part: Tensor, like: Tensor) -> Tensor:
        if key == "step":
            return part.clone()
        sent = part.contiguous().view(torch.uint8) if part.dtype == torch.int16 else part.contiguous()
        parts = sent.new_empty(self.world * sent.numel())
        all_gather(parts, sent.view(-1), group=self.group)
        return self.pieces[entry.name].join(key, parts.view(part.dtype), like)

    def full_states(self, entries: Sequence[Entry], states: States) -> dict[Tensor, State]:
        """Return the full state of every parameter that has state, the same on every rank."""
        return {e.param: self.full_state(e, states[e.param]) for e in entries if e.param in states}

    def explain(self) -> str:
        cut = f"\ncut, a piece for each rank: {', '.join(self.pieces)}" if self.pieces else ""
        sparse = (
            f"\ngradients sent by touched rows: {', '.join(self.rows.tables)}" if self.rows.tables else ""
        )
        return f"owner over {self.world} ranks\n{self.assignment}{cut}{sparse}"


class _Pending:
    """A collective in flight; `wait` finishes it and divides the sum to get the mean."""

    def __init__(self, work: Any, result: Tensor, divisor: int) -> None:
        self._work, self._result, self._divisor = work, result, divisor

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._result.div_(self._divisor)
        return self._result


def _by_kind(members: Sequence[Any], kind: Callable[[Any], tuple]) -> list[list[Any]]:
    groups: dict[tuple, list[Any]] = {}
    for member in members:
        groups.setdefault(kind(member), []).append(member)
    return list(groups.values())


class Agreement:
    """Decides whether to take a step, equally on every rank, with one collective of three numbers."""

    def __init__(self) -> None:
        self.num_grads: int | None = None

    def on(self, grads: Sequence[Tensor], on_device: bool, device: torch.device, group: Any) -> bool | Tensor:
        """Return whether all ranks have finite gradients: a device tensor if `on_device`, else a bool.

        Raises if the ranks have different numbers of gradients. With `on_device` a rank checks this only when
        its own number has changed; the other ranks then skip the step.
        """
        count = len(grads)
        if on_device:
            flags = torch.full((3,), float(count), device=device)
            flags[0] = finite_on_device(grads, device)
            flags[2].neg_()
        else:
            flags = torch.tensor([float(grads_are_finite(grads)), count, -count], device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=group)
        if on_device and count == self.num_grads:
            return flags[0] * (flags[1] == -flags[2])
        self.num_grads = count
        everywhere, fewest, most = flags.tolist()
        if fewest != -most:
            raise ValueError(
                f"gradients: expected the same parameters with a gradient on every rank, "
                f"got between {int(fewest)} and {int(-most)}"
            )
        return flags[0] if on_device else bool(everywhere)
