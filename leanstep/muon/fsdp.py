"""NorMuon for FSDP2: parameters are DTensors sharded along dimension 0.

Momentum and the weight write are elementwise and run on the shards. The polar factor needs whole matrices.
For all matrices of one shape:

    1. every rank writes the updates of its rows into one buffer
    2. one all-to-all sends each matrix to its owner
    3. owners orthogonalise and scale; a second all-to-all sends the rows back

One shape is exchanged while another is orthogonalised. On a GPU updates and factors are sent in the dtype of
the products (bfloat16), on a CPU in float32. The shards of a bank sharded along dimension 0 are whole
matrices: a bank needs no collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros

from leanstep.muon.groups import Group, layout_of, matrix_views, rate_and_decay, second_views
from leanstep.muon.polar import product_dtype, stack_limit
from leanstep.muon.sharded import Ranks, assign
from leanstep.muon.step import momentum_updates, scaled_factors, write_all
from leanstep.muon.update import State, Work, matrix_options, new_state, run, update

FACTOR_OPTIONS = ("beta2", "variance", "dtype", "eps_mode", "coefficients")


class RowShards(Ranks):
    """Steps a model under `fully_shard`; FSDP2 has already averaged the gradients.

    Momentum, Adam moments and low bits are DTensors like their parameter, so `torch.distributed.checkpoint`
    saves and reshards them; the variance state of a sharded matrix is small and saved in full.

    Args:
        names: names of all parameters; DTensors must be sharded along dimension 0 or replicated.

    Collectives per step: two per shape of matrices, and one of three numbers for the finite check.
    """

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self.group: Any = None
        self.owner: dict[Tensor, int] | None = None
        for param, name in names.items():
            for dim, placement in enumerate(getattr(param, "placements", ())):
                if placement == Shard(0):
                    self.group = param.device_mesh.get_group(dim)  # type: ignore[attr-defined]
                elif not isinstance(placement, Replicate):
                    got = param.placements  # type: ignore[attr-defined]
                    raise ValueError(f"{name}: expected a DTensor sharded along dimension 0, got {got}")

    @property
    def assigned(self) -> bool:
        return self.owner is not None

    def assign(self, entries: Sequence[tuple[Group, str, Tensor]]) -> None:
        """Decide which rank orthogonalises which matrix."""
        if self.group is None:
            raise ValueError("params: expected DTensors from fully_shard, got replicated ones only")
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device = _local(entries[0][2]).device
        costs = {}
        for group, name, param in entries:
            if _has_split_rows(group, param):
                rows, cols = param.size(0), param.numel() // param.size(0)
                costs[name] = (param.numel(), float(rows) * cols * min(rows, cols))
        owner = assign(costs, [0.0] * self.world)
        self.owner = {param: owner[name] for _, name, param in entries if name in owner}

    def finite(self, grads: Sequence[Tensor], on_device: bool) -> bool | Tensor:
        return super().finite([_local(grad) for grad in grads], on_device)

    def new_state(self, group: Group, param: Tensor) -> State:
        shape = () if group["algorithm"] == "adam" else layout_of(param.shape, group).second_shape
        state = new_state(group, param.detach(), shape)
        if isinstance(param, DTensor) and not _has_split_rows(group, param) and "second_momentum" in state:
            # The variance of a bank is sharded like the bank itself.
            mesh, placements, dtype = param.device_mesh, param.placements, state["second_momentum"].dtype
            state["second_momentum"] = zeros(shape, dtype=dtype, device_mesh=mesh, placements=placements)
        return state

    def own_state(self, group: Group, param: Tensor, full: State) -> State:
        return full

    def full_state(self, group: Group, param: Tensor, state: State) -> State:
        """Return the state with the variance that only its owner advanced; DTensors stay as they are."""
        if not _has_split_rows(group, param) or "second_momentum" not in state:
            return state
        assert self.owner is not None
        # All ranks but the owner add zeros, so the sum is exact.
        second = state["second_momentum"] * float(self.owner[param] == self.rank)
        dist.all_reduce(second, group=self.group)
        return {**state, "second_momentum": second}

    def update(self, work: Sequence[Work], go: Tensor | None = None) -> None:
        """Step Adam parameters and banks on the shards; step matrices with sharded rows through owners."""
        shards, batches = [], {}
        for item in work:
            group, param = item.group, item.weight
            if _has_split_rows(group, param):
                key = (id(group), param.size(0), param.numel() // param.size(0), param.dtype, item.grad.dtype)
                batches.setdefault(key, []).append(item)
                continue
            multipliers = item.multipliers
            if multipliers is not None and isinstance(param, DTensor) and Shard(0) in param.placements:
                per = len(multipliers) // param.size(0)
                begin, end = chunk(param.size(0), self.rank, self.world)
                multipliers = multipliers[begin * per : end * per]
            shards.append(
                Work(group, _local(param), _local(item.grad), _local_state(item.state), multipliers)
            )
        update(shards, go)
        sent = back = None
        # Both all-to-alls overlap with compute: while one batch is orthogonalised, the next one is sent to
        # its owners, and the factors of the previous one are sent back.
        for items in (*batches.values(), None, None):
            arriving = None if items is None else self._send(items, go)
            leaving = None if sent is None else self._factor(sent, go)
            if back is not None:
                self._write(back, go)
            sent, back = arriving, leaving

    def _send(self, items: Sequence[Work], go: Tensor | None) -> _Exchange:
        """Start sending the updates of this rank's rows of equal matrices to their owners."""
        assert self.owner is not None
        owner = self.owner
        items = sorted(items, key=lambda item: owner[item.weight])
        num_rows, num_cols = items[0].weight.size(0), items[0].weight.numel() // items[0].weight.size(0)
        counts = [sum(owner[item.weight] == rank for item in items) for rank in range(self.world)]
        heights = [
            end - begin for begin, end in (chunk(num_rows, rank, self.world) for rank in range(self.world))
        ]
        mine = heights[self.rank] * num_cols
        shape = (1, heights[self.rank], num_cols)
        columns = [[_local(item.grad).reshape(shape) for item in items]]
        columns += [[_local(item.state["momentum_buffer"]).view(shape) for item in items]]
        group = items[0].group
        options = {"momentum": float(group["momentum"]), "nesterov": group["nesterov"]}
        dtype = product_dtype(columns[1][0], group["compute_dtype"], group.get("cpu_half"))
        updates = run(momentum_updates, columns, go, dtype=dtype, **options)
        sizes = ([count * mine for count in counts], [counts[self.rank] * h * num_cols for h in heights])
        send = updates.reshape(-1)
        return self._all_to_all(
            _Exchange(items, (num_rows, num_cols), heights, sizes, send), send, back=False
        )

    def _all_to_all(self, exchange: _Exchange, send: Tensor, back: bool) -> _Exchange:
        out_sizes, in_sizes = exchange.sizes[::-1] if back else exchange.sizes
        out = send.new_empty(sum(in_sizes))
        pending = dist.all_to_all_single(out, send, in_sizes, out_sizes, group=self.group, async_op=True)
        return exchange._replace(tensor=out, sent=send, pending=pending)

    def _factor(self, exchange: _Exchange, go: Tensor | None) -> _Exchange:
        """Orthogonalise and scale the matrices that this rank owns; start sending them back to the shards."""
        assert self.owner is not None
        received, num_cols = exchange.wait(), exchange.shape[1]
        mine = [item for item in exchange.items if self.owner[item.weight] == self.rank]
        if mine:
            heights = exchange.heights
            pieces = [
                part.view(len(mine), height, num_cols)
                for part, height in zip(received.split(exchange.sizes[1]), heights, strict=True)
            ]
            whole = torch.cat(pieces, 1)
            layout = layout_of(whole.shape, {**mine[0].group, "flatten": None})
            views, states = matrix_views(whole, layout), [item.state.get("second_momentum") for item in mine]
            second = None if states[0] is None else torch.stack(states)  # type: ignore[arg-type]
            seconds: list[Any] = [None] * len(views) if second is None else second_views(second, layout)
            for view, lines in zip(views, seconds, strict=True):
                options = matrix_options(mine[0].group, view)
                options = {name: options[name] for name in FACTOR_OPTIONS}
                limit = stack_limit(view.size(1), view.size(2), view.device)
                for begin in range(0, view.size(0), limit):
                    part = slice(begin, begin + limit)
                    columns = [[view[part]], [None if lines is None else lines[part]]]
                    (view[part],) = run(scaled_factors, columns, go, **options)
            if second is not None:
                torch._foreach_copy_(states, list(second))  # type: ignore[arg-type]
            received = torch.cat([part.reshape(-1) for part in whole.split(heights, 1)])
        return self._all_to_all(exchange, received, back=True)

    def _write(self, exchange: _Exchange, go: Tensor | None) -> None:
        """Step this rank's rows of equal matrices by the scaled factors."""
        items, group = exchange.items, exchange.items[0].group
        shape = (1, exchange.heights[self.rank], exchange.shape[1])
        factors = exchange.wait().view(len(items), *shape).unbind(0)
        if not factors[0].numel():
            return
        parts = layout_of(items[0].weight.shape, group).parts
        rates = {rate_and_decay(group, part.rows, part.cols) for part in parts}
        if len(rates) > 1:
            raise ValueError(f"lr_rule: expected one rate for all split parts under FSDP2, got {len(rates)}")
        ((rate, decay),) = rates
        rate *= 1.0 if items[0].multipliers is None else items[0].multipliers[0]
        low = [item.state.get("residual") for item in items]
        columns: list[list[Any]] = [[_local(item.weight).view(shape) for item in items], list(factors)]
        columns += [[None if residual is None else _local(residual).view(shape) for residual in low]]
        cautious = group["decay"] == "cautious"
        run(write_all, columns, go, rate=rate, decay=decay, cautious=cautious, mode=group["residual"])


class _Exchange(NamedTuple):
    """Equal matrices on the way to their owners or back; keeps the sent tensor until it has arrived."""

    items: Sequence[Work]  # in the order of their owners
    shape: tuple[int, int]
    heights: list[int]  # rows of a matrix on each rank
    sizes: tuple[
        list[int], list[int]
    ]  # elements sent to and received from each rank, on the way to the owners
    tensor: Tensor
    sent: Tensor | None = None
    pending: Any = None

    def wait(self) -> Tensor:
        self.pending.wait()
        return self.tensor


def chunk(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return (begin, end) of a rank's rows as DTensor shards them: equal parts, the last shorter or empty."""
    size = -(-length // world_size)
    return min(length, rank * size), min(length, (rank + 1) * size)


def _has_split_rows(group: Group, param: Tensor) -> bool:
    """Return whether the rows of one matrix are distributed over several ranks."""
    if group["algorithm"] == "adam" or not isinstance(param, DTensor) or Shard(0) not in param.placements:
        return False
    return param.ndim == 2 or group["flatten"] is not None


def _local(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_state(state: State) -> State:
    return {key: _local(value) for key, value in state.items()}
