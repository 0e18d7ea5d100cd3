"""NorMuon for FSDP2: parameters are DTensors sharded along dimension 0.

Momentum and the weight write are elementwise and run on the shards. The polar factor needs whole matrices:

    1. every rank writes the updates of its rows of all matrices into one buffer
    2. one all-to-all sends each matrix to its owner
    3. owners orthogonalise and scale; a second all-to-all sends the rows back

On a GPU updates and factors are sent in the dtype of the products (bfloat16), shape by shape: equal shapes
form one batch of products, and one shape is exchanged while another is orthogonalised. On a CPU they are sent
in float32 and orthogonalised one at a time, with the bits of a single process.

This takes two collectives per step for all matrices (per shape on a GPU). Running Muon on DTensors directly
gathers three times per polynomial step and matrix. The shards of a bank sharded along dimension 0 are whole
matrices: a bank needs no collective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from leanstep.muon.param_groups import Entry, group_cut, matrix_views, second_views
from leanstep.muon.polar import Workspace
from leanstep.muon.sharded import Agreement, Assignment, Work, assign
from leanstep.muon.state import Stack, State, fuses, new_state
from leanstep.muon.update import (
    States,
    fill_update,
    fused_passes,
    matrix_rates,
    orthogonalise,
    stacks_of,
    step_adams,
    update_matrices,
    variance_scale,
    write_weight,
)


@dataclass(frozen=True)
class _Rows:
    """One matrix parameter whose rows are sharded over the ranks, in one step."""

    entry: Entry
    grad: Tensor
    state: State
    owner: int
    num_rows: int
    num_cols: int

    def of(self, rank: int, world: int) -> tuple[int, int]:
        """Return (begin, end) of a rank's rows."""
        return chunk(self.num_rows, rank, world)

    @property
    def kind(self) -> tuple:
        """The key that matrices of one batch share."""
        return (self.owner, self.num_rows, self.num_cols, id(self.entry.group))

    def stack(self, rows: int, second: bool = False) -> Stack:
        """Return this rank's `rows` rows as a stack of one; `second` adds the whole matrix's variance."""
        entry, state = self.entry, self.state
        lr, decay = _rates(entry)
        local, grad, low = _local(entry.param), self.grad, state.get("residual")
        shape = (1, rows, self.num_cols)
        lines = state["second_momentum"].view(1, -1) if second else None
        assert entry.forms is not None
        plan = next(iter(entry.forms.values())).plan
        views = (local.view(shape), grad.reshape(shape), state["momentum_buffer"].view(shape))
        return Stack(*views, lines, None if low is None else low.view(shape), plan, lr, decay)


@dataclass
class _Exchange:
    """An all-to-all in flight; it references the sent tensor until the exchange has finished."""

    work: Any
    received: Tensor
    sent: Tensor
    rows: list[_Rows]
    sizes: tuple[list[int], list[int]]

    def wait(self) -> Tensor:
        self.work.wait()
        return self.received


class RowShards:
    """Steps a model under `fully_shard`; FSDP2 has already averaged the gradients.

    Momentum, Adam moments and low bits are DTensors like their parameter, so `torch.distributed.checkpoint`
    saves and reshards them; the variance state of a sharded matrix is small and saved in full.

    Args:
        names: names of all parameters; DTensors must be sharded along dimension 0 or replicated.
        max_elements: matrices are exchanged in batches of at most this many elements (bounds memory).

    Collectives per step: two per batch of matrices, and one of three numbers for the finite check.
    """

    def __init__(self, names: Mapping[Tensor, str], max_elements: int) -> None:
        self.max_elements = max_elements
        self.assignment: Assignment | None = None
        self.agreement = Agreement()
        self.group: Any = None
        for param, name in names.items():
            if not isinstance(param, DTensor):
                continue
            for dim, placement in enumerate(param.placements):
                if placement == Shard(0):
                    self.group = param.device_mesh.get_group(dim)
                elif not isinstance(placement, Replicate):
                    raise ValueError(
                        f"{name}: expected a DTensor sharded along dimension 0, got {param.placements}"
                    )

    def assign_owners(self, entries: Sequence[Entry]) -> None:
        """Decide which rank orthogonalises which matrix."""
        if self.group is None:
            raise ValueError("params: expected DTensors from fully_shard, got replicated ones only")
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device = _local(entries[0].param).device
        costs = {e.name: (e.param.numel(), e.flops()) for e in entries if _has_split_rows(e)}
        self.assignment = assign(costs, self.world)

    def owner(self, entry: Entry) -> int:
        assert self.assignment is not None
        return self.assignment.owner[entry.name]

    def owns(self, entry: Entry) -> bool:
        """Return True: every rank has the state of its own rows."""
        return True

    def average(self, grads: Sequence[Tensor]) -> None:
        """Do nothing: FSDP2 has averaged the gradients."""

    def grads_are_finite(self, grads: Sequence[Tensor], on_device: bool) -> bool | Tensor:
        return self.agreement.on([_local(grad) for grad in grads], on_device, self.device, self.group)

    def new_state(self, entry: Entry) -> State:
        state, param = new_state(entry), entry.param
        if isinstance(param, DTensor) and not _has_split_rows(entry) and entry.second_shape is not None:
            # The variance of a bank is sharded like the bank itself.
            like = torch.zeros_like(param, dtype=state["second_momentum"].dtype)
            state["second_momentum"] = like.amax(-1 if entry.second_shape[-1] == 1 else -2, keepdim=True)
        return state

    def own_state(self, entry: Entry, state: State) -> State:
        return state

    def full_state(self, entry: Entry, state: State) -> State:
        return state

    def full_states(self, entries: Sequence[Entry], states: States) -> dict[Tensor, State]:
        """Share the variance that only its owner advanced; DTensors stay as they are."""
        owned = [
            (states[e.param]["second_momentum"], self.owner(e))
            for e in entries
            if _has_split_rows(e) and "second_momentum" in states.get(e.param, {})
        ]
        if owned:
            dtype = owned[0][0].dtype
            # All ranks but the owner add zeros: one collective, and the sum is exact.
            parts = [second if owner == self.rank else torch.zeros_like(second) for second, owner in owned]
            flat = torch.cat([part.reshape(-1).to(dtype) for part in parts])
            dist.all_reduce(flat, group=self.group)
            for (second, _), part in zip(owned, flat.split([t.numel() for t, _ in owned]), strict=True):
                second.copy_(part.view_as(second))
        return {}

    def explain(self) -> str:
        return f"fsdp2 over {self.world} ranks\n{self.assignment}"

    def update(self, work: Work, states: States, workspace: Workspace, go: Tensor | None = None) -> None:
        """Step Adam parameters and banks on the shards; step matrices with sharded rows through owners."""
        rows: list[_Rows] = []
        adam = []
        for entry, grad in work:
            state = states[entry.param]
            if not state:
                state.update(self.new_state(entry))
            if entry.is_adam:
                adam.append((entry.group, _local(entry.param), _local(grad), _local_state(state)))
            elif _has_split_rows(entry):
                shape = entry.param.shape
                cols = entry.param.numel() // max(1, shape[0])
                owner = self.owner(entry)
                rows.append(_Rows(entry, _local(grad), _local_state(state), owner, shape[0], cols))
            else:
                self._step_bank(entry, _local(grad), _local_state(state), workspace, go)
        step_adams(adam, go)
        sent = back = None
        # Both all-to-alls overlap with compute: while one batch is orthogonalised, the next one is sent to
        # its owners and the factors of the previous one are sent back.
        for batch in (*self._batches(rows), None, None):
            arriving = None if batch is None else self._send(batch, workspace, go)
            leaving = None if sent is None else self._factor(sent, workspace, go)
            if back is not None:
                for part, updates in _runs(back.wait(), back.rows, self.rank, self.world):
                    if updates.numel():
                        _write(part, updates, workspace, go)
            sent, back = arriving, leaving

    def _step_bank(
        self, entry: Entry, grad: Tensor, state: State, workspace: Workspace, go: Tensor | None
    ) -> None:
        """Step a bank sharded along dimension 0, of which this rank has whole matrices."""
        local, multipliers = _local(entry.param), entry.group["lr_mul"]
        if not local.numel():
            return
        if isinstance(entry.param, DTensor) and not isinstance(multipliers, int | float):
            begin, _ = chunk(entry.param.size(0), self.rank, self.world)
            per = local[0].numel() // (local.size(-1) * local.size(-2))
            multipliers = list(multipliers)[begin * per : (begin + local.size(0)) * per]
        update_matrices(stacks_of(entry, local, grad, state, multipliers), entry.group, workspace, go)

    def _batches(self, rows: list[_Rows]) -> list[list[_Rows]]:
        """Group rows that are exchanged together: as many as fit; on a GPU one shape per exchange."""
        batches: list[list[_Rows]] = []
        if rows and fuses(_local(rows[0].entry.param)):
            rows = sorted(rows, key=lambda row: (row.num_rows, row.num_cols))
        size = 0
        for row in rows:
            fresh = not batches or size + row.entry.param.numel() > self.max_elements
            if fresh or _exchange_key(batches[-1][0]) != _exchange_key(row):
                batches.append([])
                size = 0
            batches[-1].append(row)
            size += row.entry.param.numel()
        return batches

    def _send(self, batch: list[_Rows], workspace: Workspace, go: Tensor | None) -> _Exchange:
        """Start sending the updates of this rank's rows to their owners."""
        by_owner = sorted(batch, key=lambda row: row.kind[:3])
        mine = [row for row in by_owner if row.owner == self.rank]
        send_sizes, receive_sizes = [0] * self.world, [0] * self.world
        for row in by_owner:
            begin, end = row.of(self.rank, self.world)
            send_sizes[row.owner] += (end - begin) * row.num_cols
        for row in mine:
            for rank in range(self.world):
                begin, end = row.of(rank, self.world)
                receive_sizes[rank] += (end - begin) * row.num_cols

        send = torch.empty(sum(send_sizes), dtype=_wire(batch[0]), device=self.device)
        for rows, part in _runs(send, by_owner, self.rank, self.world):
            if part.numel():
                _fill(rows, part, workspace, go)
        return self._all_to_all(send, send_sizes, receive_sizes, by_owner)

    def _factor(self, arrived: _Exchange, workspace: Workspace, go: Tensor | None) -> _Exchange:
        """Orthogonalise the matrices that this rank owns; start sending the scaled factors to the shards."""
        received, sizes = arrived.wait(), arrived.sizes
        mine = [row for row in arrived.rows if row.owner == self.rank]
        shards = [_runs(piece, mine, rank, self.world) for rank, piece in enumerate(received.split(sizes[1]))]
        for parts in zip(*shards, strict=True):
            rows, pieces = parts[0][0], [part for _, part in parts]
            whole = torch.cat(pieces, 1)
            _orthogonalise_whole(rows, whole, workspace, go)
            torch._foreach_copy_(pieces, list(whole.split([part.size(1) for part in pieces], 1)))
        return self._all_to_all(received, sizes[1], sizes[0], arrived.rows)

    def _all_to_all(
        self, send: Tensor, send_sizes: list[int], receive_sizes: list[int], rows: list[_Rows]
    ) -> _Exchange:
        """Send `send_sizes[r]` elements to each rank r; received elements are in rank order."""
        out = send.new_empty(sum(receive_sizes))
        work = dist.all_to_all_single(out, send, receive_sizes, send_sizes, group=self.group, async_op=True)
        return _Exchange(work, out, send, rows, (send_sizes, receive_sizes))


def chunk(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return (begin, end) of a rank's rows as DTensor shards them: equal parts, the last shorter or empty."""
    size = -(-length // world_size)
    return min(length, rank * size), min(length, (rank + 1) * size)


def _has_split_rows(entry: Entry) -> bool:
    """Return whether the rows of one matrix are distributed over several ranks."""
    param = entry.param
    if entry.is_adam or not isinstance(param, DTensor) or Shard(0) not in param.placements:
        return False
    return param.ndim == 2 or entry.group["flatten"] is not None


def _fill(rows: list[_Rows], out: Tensor, workspace: Workspace, go: Tensor | None) -> None:
    """Advance the momentum of this rank's rows of equal matrices; write updates to `out` [B, rows, cols]."""
    group = rows[0].entry.group
    if fuses(out):
        stacks, copies = fused_passes().in_order([row.stack(out.size(1)) for row in rows])
        fused_passes().fill_updates(stacks, out, group, go, workspace)
        fused_passes().give_back(copies)
        return
    for row, part in zip(rows, out, strict=True):
        grad, buffer = row.grad.reshape(part.shape), row.state["momentum_buffer"].view(part.shape)
        fill_update(grad, buffer, float(group["momentum"]), part, nesterov=group["nesterov"])


def _orthogonalise_whole(rows: list[_Rows], whole: Tensor, workspace: Workspace, go: Tensor | None) -> None:
    """Replace the gathered updates [B, R, C] by the scaled polar factors of their matrices."""
    group = rows[0].entry.group
    cut = group_cut({**group, "flatten": None})
    if fuses(whole) and cut.whole:
        plan = rows[0].stack(rows[0].grad.numel() // rows[0].num_cols).plan
        factor = orthogonalise(whole.clone(), plan, group, workspace)
        if group["variance"] != "off":
            seconds = [row.state["second_momentum"].view(1, -1) for row in rows]
            factor = fused_passes().scaled_factor(seconds, factor, group, workspace, go)
        whole.copy_(factor)
        return
    for row, matrix in zip(rows, whole, strict=True):
        _orthogonalise_views(row, matrix, workspace, go)


def _orthogonalise_views(row: _Rows, whole: Tensor, workspace: Workspace, go: Tensor | None) -> None:
    """Do the same for one parameter, whose parts may be separate matrices."""
    entry, group = row.entry, row.entry.group
    assert entry.forms is not None
    cut = group_cut({**group, "flatten": None})
    views = matrix_views(whole, cut)
    seconds: list[Any] = [None] * len(views)
    if group["variance"] != "off":
        seconds = second_views(row.state["second_momentum"], views, cut, group["variance"])
    for view, second in zip(views, seconds, strict=True):
        count, plan = view.size(0), entry.forms[view.size(1), view.size(2)].plan
        # One at a time, as in a single process: stacking changes the last bits of the products.
        parts = [slice(0, count)] if plan.batched else [slice(i, i + 1) for i in range(count)]
        for part in parts:
            factor = orthogonalise(view[part].clone(), plan, group, workspace)
            if second is None:
                view[part] = factor
                continue
            old = second[part].clone() if go is not None else None
            scale = variance_scale(factor, second[part], group["beta2"], group["variance"])
            if old is not None:
                second[part] = torch.where(go != 0, second[part], old)
            view[part] = factor.to(scale.dtype) * scale


def _rates(entry: Entry) -> tuple[float, float]:
    """Return (rate, decay factor) of a matrix whose rows are sharded over the ranks."""
    group = entry.group
    assert entry.forms is not None
    multiplier = group["lr_mul"]
    multiplier = float(multiplier if isinstance(multiplier, int | float) else multiplier[0])
    rates = {matrix_rates(group, form.rate, multiplier) for form in entry.forms.values()}
    if len(rates) > 1:
        raise ValueError(
            f"{entry.name}: expected one learning rate for all split parts under FSDP2, got {len(rates)}"
        )
    return rates.pop()


def _write(rows: list[_Rows], updates: Tensor, workspace: Workspace, go: Tensor | None) -> None:
    """Step this rank's rows of equal matrices by `updates` [B, rows, cols]."""
    group = rows[0].entry.group
    if fuses(updates):
        stacks, copies = fused_passes().in_order([row.stack(updates.size(1)) for row in rows])
        fused_passes().write_stacks(stacks, updates, group, workspace, go)
        fused_passes().give_back(copies)
        return
    for row, update in zip(rows, updates, strict=True):
        lr, decay = _rates(row.entry)
        low = row.state.get("residual")
        write_weight(
            _local(row.entry.param).view(update.shape),
            update,
            lr=lr,
            decay=decay,
            residual=None if low is None else low.view(update.shape),
            mode=group["residual"],
            cautious=group["decay"] == "cautious",
        )


def _exchange_key(row: _Rows) -> tuple:
    """Return the key that matrices of one exchange share."""
    shape = (row.num_rows, row.num_cols) if fuses(_local(row.entry.param)) else ()
    return (_wire(row), *shape)


def _wire(row: _Rows) -> torch.dtype:
    """Return the dtype in which updates and factors are sent: on a GPU that of the products."""
    entry = row.entry
    wide = torch.promote_types(entry.param.dtype, torch.float32)
    dtypes = {form.plan.dtype for form in (entry.forms or {}).values()}
    return dtypes.pop() if fuses(_local(entry.param)) and len(dtypes) == 1 else wide


def _local(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_state(state: State) -> State:
    return {key: _local(value) if isinstance(value, Tensor) else value for key, value in state.items()}


def _runs(flat: Tensor, rows: list[_Rows], rank: int, world: int) -> list[tuple[list[_Rows], Tensor]]:
    """Group neighbours of one kind, each with its view [B, rows, cols] of `rank`'s rows in a flat buffer."""
    runs, begin = [], 0
    for _, members in itertools.groupby(rows, key=lambda row: row.kind):
        run = list(members)
        low, high = run[0].of(rank, world)
        shape = (len(run), high - low, run[0].num_cols)
        size = math.prod(shape)
        runs.append((run, flat[begin : begin + size].view(shape)))
        begin += size
    return runs
