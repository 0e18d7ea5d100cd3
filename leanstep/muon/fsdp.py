"""NorMuon for FSDP2: parameters are DTensors cut along dimension 0.

Momentum and the weight write are elementwise and stay on the shards. The polar factor needs whole matrices:

    1. every rank writes the update of its rows of all matrices into one buffer
    2. one all-to-all brings each matrix to its owner
    3. owners orthogonalise and scale; a second all-to-all takes the rows back

Two collectives for all matrices of a step, where running Muon on DTensors gathers three times per polynomial
step and matrix. A bank cut along dimension 0 already lies in whole matrices: it needs none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from leanstep.muon.assignment import Assignment, assign
from leanstep.muon.collectives import agree, all_to_all, chunk
from leanstep.muon.groups import group_cut
from leanstep.muon.matrices import matrix_views, second_shape, second_views
from leanstep.muon.optimizer import NorMuon
from leanstep.muon.parameters import (
    adam_item,
    grads_are_finite,
    matrix_options,
    matrix_rates,
    new_adam_state,
    new_matrix_state,
)
from leanstep.muon.steps import orthogonalise, run_items
from leanstep.muon.update import fill_update, variance_scale, write_weight

Group = dict[str, Any]


@dataclass
class _Row:
    """One matrix parameter cut over the ranks."""

    group: Group
    param: DTensor
    name: str
    owner: int
    num_rows: int
    num_cols: int

    def rows_of(self, rank: int, world: int) -> tuple[int, int]:
        return chunk(self.num_rows, rank, world)


class FsdpNorMuon(NorMuon):
    """NorMuon for models under `fully_shard`; build it after sharding, from `split_params(model)`.

    Momentum, Adam moments and low bits are DTensors like their parameter, so `torch.distributed.checkpoint`
    saves and reshards them; the variance state is small and saved whole. Gradients are FSDP2's own means.

    Args:
        params, lr, options: as for `NorMuon`.
        max_elements: matrices are exchanged in batches of at most this many elements (memory bound).

    Collectives per step: two per batch of matrices, and one of three numbers for the finite check. All ranks
    must call `step` and `state_dict` together.
    """

    takes_shards = True

    def __init__(
        self, params: Iterable[Any], lr: float = 0.02, *, max_elements: int = 1 << 28, **options: Any
    ) -> None:
        self._max_elements = max_elements
        self._owners: Assignment | None = None
        super().__init__(params, lr, **options)
        self._process_group = self._find_group()
        self._rank, self._world = dist.get_rank(self._process_group), dist.get_world_size(self._process_group)

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        self._owners = None
        group = self.param_groups[-1]
        for param in group["params"]:
            if isinstance(param, DTensor):
                for placement in param.placements:
                    if not isinstance(placement, Replicate) and placement != Shard(0):
                        raise ValueError(
                            f"{self._name_of(group, param)}: expected a DTensor cut along dimension 0, "
                            f"got {param.placements}"
                        )

    def _find_group(self) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if isinstance(param, DTensor):
                    for dim, placement in enumerate(param.placements):
                        if placement == Shard(0):
                            return param.device_mesh.get_group(dim)
        raise ValueError(
            "params: expected DTensors from fully_shard, got none; use NorMuon or ShardedNorMuon"
        )

    def _is_cut(self, group: Group, param: Tensor) -> bool:
        """Whether the rows of single matrices lie on several ranks."""
        if not isinstance(param, DTensor) or Shard(0) not in param.placements:
            return False
        return group["algorithm"] != "adam" and (param.ndim == 2 or group["flatten"] is not None)

    def assignment(self) -> Assignment:
        """Which rank orthogonalises which matrix; printable."""
        if self._owners is None:
            costs = {}
            for group in self.param_groups:
                for param in group["params"]:
                    if self._is_cut(group, param):
                        flops = 0.0
                        for view in matrix_views(torch.empty(param.shape, device="meta"), group_cut(group)):
                            like = torch.empty(0, *view.shape[1:], dtype=param.dtype, device=param.device)
                            flops += view.size(0) * self.plan(group, like).flops(len(group["coefficients"]))
                        costs[self._name_of(group, param)] = (param.numel(), flops)
            self._owners = assign(costs, self._world)
        return self._owners

    def _all_finite(self, grads: list[Tensor]) -> bool:
        local = [_local(grad) for grad in grads]
        device = _local(self.param_groups[0]["params"][0]).device
        return agree(grads_are_finite(local), len(local), device, self._process_group)

    def _new_state(self, group: Group, param: Tensor) -> None:
        self._state_of(group, param)

    def _run(self, work: list[tuple[Group, list[Tensor]]]) -> None:
        rows: list[_Row] = []
        for group, params in work:
            for param in params:
                state = self._state_of(group, param)
                if group["algorithm"] == "adam":
                    state["step"] += 1
                    if _local(param).numel():
                        adam_item(group, _local(param), _local(param.grad), _local_state(state))
                elif isinstance(param, DTensor) and self._is_cut(group, param):
                    name = self._name_of(group, param)
                    cols = param.numel() // max(1, param.size(0))
                    rows.append(_Row(group, param, name, self.assignment().owner[name], param.size(0), cols))
                else:
                    self._step_bank(group, param, state)
        for batch in self._batches(rows):
            self._exchange(batch)

    def _state_of(self, group: Group, param: Tensor) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            if group["algorithm"] == "adam":
                state.update(new_adam_state(group, param))
            else:
                state.update(new_matrix_state(group, param))
                if (
                    isinstance(param, DTensor)
                    and not self._is_cut(group, param)
                    and "second_momentum" in state
                ):
                    state["second_momentum"] = _bank_second(group, param)
        return state

    def _step_bank(self, group: Group, param: Tensor, state: dict[str, Any]) -> None:
        local = _local(param)
        if not local.numel():
            return
        if isinstance(param, DTensor) and not isinstance(group["lr_mul"], int | float):
            begin, _ = chunk(param.size(0), self._rank, self._world)
            per = local[0].numel() // (local.size(-1) * local.size(-2))
            multipliers = list(group["lr_mul"])[begin * per : (begin + local.size(0)) * per]
            group = {**group, "lr_mul": multipliers}
        items = self.matrix_items(group, local, _local(param.grad), _local_state(state))
        run_items(items, matrix_options(group), self._workspace)

    def _batches(self, rows: list[_Row]) -> list[list[_Row]]:
        batches: list[list[_Row]] = []
        size = 0
        for row in rows:
            dtype = torch.promote_types(row.param.dtype, torch.float32)
            fresh = not batches or size + row.param.numel() > self._max_elements
            if fresh or torch.promote_types(batches[-1][0].param.dtype, torch.float32) != dtype:
                batches.append([])
                size = 0
            batches[-1].append(row)
            size += row.param.numel()
        return batches

    def _exchange(self, batch: list[_Row]) -> None:
        """Updates to their owners, scaled polar factors back, weights written where they live."""
        dtype = torch.promote_types(batch[0].param.dtype, torch.float32)
        device = _local(batch[0].param).device
        by_owner = sorted(batch, key=lambda row: row.owner)
        mine = [row for row in by_owner if row.owner == self._rank]
        send_sizes, receive_sizes = [0] * self._world, [0] * self._world
        for row in by_owner:
            begin, end = row.rows_of(self._rank, self._world)
            send_sizes[row.owner] += (end - begin) * row.num_cols
        for row in mine:
            for rank in range(self._world):
                begin, end = row.rows_of(rank, self._world)
                receive_sizes[rank] += (end - begin) * row.num_cols

        send = torch.empty(sum(send_sizes), dtype=dtype, device=device)
        for row, part in zip(by_owner, _cut(send, by_owner, self._rank, self._world), strict=True):
            if part.numel():
                state = _local_state(self.state[row.param])
                grad, buffer = _local(row.param.grad), state["momentum_buffer"]
                options = matrix_options(row.group)
                fill_update(
                    grad.reshape(part.shape),
                    buffer.view(part.shape),
                    options.momentum,
                    part,
                    nesterov=options.nesterov,
                )
        received = all_to_all(send, send_sizes, receive_sizes, self._process_group)
        pieces = received.split(receive_sizes)
        shards = [_cut(piece, mine, rank, self._world) for rank, piece in enumerate(pieces)]
        for index, row in enumerate(mine):
            whole = torch.cat([shard[index] for shard in shards])
            self._orthogonalise_cut(row, whole)
            for rank, shard in enumerate(shards):
                begin, end = row.rows_of(rank, self._world)
                shard[index].copy_(whole[begin:end])
        back = all_to_all(received, receive_sizes, send_sizes, self._process_group)
        for row, part in zip(by_owner, _cut(back, by_owner, self._rank, self._world), strict=True):
            if part.numel():
                self._write(row, part)

    def _orthogonalise_cut(self, row: _Row, whole: Tensor) -> None:
        """Replace the gathered update by the scaled polar factor of its matrices."""
        group, options = row.group, matrix_options(row.group)
        cut = group_cut({**group, "flatten": None})
        views = matrix_views(whole, cut)
        seconds: list[Tensor | None] = [None] * len(views)
        if group["variance"] != "off":
            second = self.state[row.param]["second_momentum"]
            seconds = [*second_views(second, views, cut, group["variance"])]
        for view, second in zip(views, seconds, strict=True):
            plan = self.plan(group, view)
            # One by one, as a single process would: stacking changes the products' last bits.
            indices = (
                [slice(0, view.size(0))] if plan.batched else [slice(i, i + 1) for i in range(view.size(0))]
            )
            for index in indices:
                factor = orthogonalise(view[index].clone(), plan, options, self._workspace)
                if second is None:
                    view[index] = factor
                else:
                    scale = variance_scale(factor, second[index], options.beta2, options.variance)
                    torch.mul(factor.to(whole.dtype), scale, out=view[index])

    def _write(self, row: _Row, update: Tensor) -> None:
        group = row.group
        meta = torch.empty(row.num_rows, row.num_cols, device="meta")
        shapes = {tuple(view.shape[1:]) for view in matrix_views(meta, group_cut({**group, "flatten": None}))}
        multiplier = group["lr_mul"]
        multiplier = float(multiplier if isinstance(multiplier, int | float) else multiplier[0])
        rates = {matrix_rates(group, rows, cols, multiplier) for rows, cols in shapes}
        if len(rates) > 1:
            raise ValueError(
                f"{row.name}: expected split parts of one learning rate under FSDP2, got {len(rates)}"
            )
        lr, decay = rates.pop()
        state = _local_state(self.state[row.param])
        low = state.get("residual")
        write_weight(
            _local(row.param).view(update.shape),
            update,
            lr=lr,
            decay=decay,
            residual=None if low is None else low.view(update.shape),
            mode=group["residual"],
            cautious=group["decay"] == "cautious",
        )

    def state_dict(self) -> dict[str, Any]:
        """DTensor state as it is; the owners' variance state is shared first, so all ranks must call it."""
        owned = []
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state.get(param, {})
                if self._is_cut(group, param) and "second_momentum" in state:
                    owner = self.assignment().owner[self._name_of(group, param)]
                    owned.append((state["second_momentum"], owner))
        if owned:
            dtype = owned[0][0].dtype
            # Everybody adds zeros but the owner: one collective, exact.
            flat = torch.cat(
                [
                    (t if owner == self._rank else torch.zeros_like(t)).reshape(-1).to(dtype)
                    for t, owner in owned
                ]
            )
            dist.all_reduce(flat, group=self._process_group)
            for (second, _), part in zip(owned, flat.split([t.numel() for t, _ in owned]), strict=True):
                second.copy_(part.view_as(second))
        return super().state_dict()

    def explain(self) -> str:
        """As `NorMuon.explain`, with the rank that orthogonalises each matrix."""
        return f"{super().explain()}\nfsdp2 over {self._world} ranks\n{self.assignment()}"


def _local(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_state(state: dict[str, Any]) -> dict[str, Any]:
    return {key: _local(value) if isinstance(value, Tensor) else value for key, value in state.items()}


def _cut(flat: Tensor, rows: list[_Row], rank: int, world: int) -> list[Tensor]:
    """The parts of a flat buffer that hold `rank`'s rows of each matrix, as [rows, cols] views."""
    parts, begin = [], 0
    for row in rows:
        low, high = row.rows_of(rank, world)
        size = (high - low) * row.num_cols
        parts.append(flat[begin : begin + size].view(high - low, row.num_cols))
        begin += size
    return parts


def _bank_second(group: Group, param: DTensor) -> Tensor:
    """Zero variance state of a bank, cut over the ranks as the bank is."""
    shape = second_shape(param.shape, group_cut(group), group["variance"])
    dtype = torch.promote_types(param.dtype, torch.float32)
    like = torch.zeros_like(param, dtype=dtype)
    return like.amax(-1, keepdim=True) if shape[-1] == 1 else like.amax(-2, keepdim=True)
