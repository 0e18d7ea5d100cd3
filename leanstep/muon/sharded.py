"""NorMuon over several ranks: replicated, sharded (ZeRO) or by owner, for plain parameters.

    replicated   one all-reduce of all gradients; every rank updates everything
    sharded      banks and Adam tensors cut along dimension 0: reduce-scatter, update the own rows,
                 all-gather; single matrices by owner, tensors too small to cut replicated
    owner        whole parameters dealt out by FLOPs: one reduce-scatter of all gradients, one all-gather
                 of all weights, however many matrices there are

Collectives are launched first and waited for one by one, Adam's tensors before the matrices, so that polar
work covers the gathers. FSDP2 models use `leanstep.muon.fsdp.FsdpNorMuon`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from leanstep.muon.assignment import Assignment, assign
from leanstep.muon.collectives import (
    Pending,
    agree,
    all_gather,
    all_reduce_mean,
    broadcast,
    chunk,
    reduce_scatter_mean,
)
from leanstep.muon.groups import group_cut
from leanstep.muon.matrices import matrix_views
from leanstep.muon.optimizer import NorMuon
from leanstep.muon.parameters import (
    adam_item,
    grads_are_finite,
    matrix_options,
    new_adam_state,
    new_matrix_state,
)
from leanstep.muon.steps import run_items

COMMS = ("replicated", "sharded", "owner")
# Cutting a vector of this size would cost more in latency than it saves.
MIN_SHARDED_ELEMENTS = 4096

Group = dict[str, Any]


@dataclass
class _Unit:
    """One parameter in one step: where its gradient comes from and where its weight goes."""

    group: Group
    param: Tensor
    name: str
    kind: str


class ShardedNorMuon(NorMuon):
    """NorMuon on a process group; each rank brings the gradient of its own batch.

    Args:
        params, lr, options: as for `NorMuon`.
        comms: replicated, sharded or owner.
        process_group: default: all ranks.
        averaged: gradients are already the same on every rank (DDP): nothing is reduced.

    Every rank must hold the same parameters in the same order and call `step`, `state_dict` and
    `load_state_dict` together. The state dict holds full tensors: it loads into any number of ranks, and into
    a plain `NorMuon`.

    Collectives per step: replicated 1 per dtype; owner 2 per dtype; sharded 2 per cut tensor. One more, of
    three numbers, makes all ranks skip a step whose gradients are not finite.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        *,
        comms: str = "replicated",
        process_group: Any = None,
        averaged: bool = False,
        **options: Any,
    ) -> None:
        if comms not in COMMS:
            raise ValueError(f"comms: expected one of {', '.join(COMMS)}, got {comms!r}")
        self._comms = comms
        self._group = process_group
        self._averaged = averaged
        self._rank, self._world = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._owners: Assignment | None = None
        super().__init__(params, lr, **options)

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        self._owners = None

    def assignment(self) -> Assignment:
        """Which rank owns which parameter; printable."""
        if self._owners is None:
            costs = {}
            for group in self.param_groups:
                for param in group["params"]:
                    if self._kind(group, param) == "owner":
                        costs[self._name_of(group, param)] = (param.numel(), self._flops(group, param))
            self._owners = assign(costs, self._world)
        return self._owners

    def _flops(self, group: Group, param: Tensor) -> float:
        if group["algorithm"] == "adam":
            return 12.0 * param.numel()
        views = matrix_views(torch.empty(param.shape, device="meta"), group_cut(group))
        cost = 0.0
        for view in views:
            like = torch.empty(0, *view.shape[1:], dtype=param.dtype, device=param.device)
            cost += view.size(0) * self.plan(group, like).flops(len(group["coefficients"]))
        return cost

    def _kind(self, group: Group, param: Tensor) -> str:
        if self._comms != "sharded":
            return self._comms
        if group["algorithm"] == "adam":
            return "sharded" if param.ndim and param.numel() >= MIN_SHARDED_ELEMENTS else "replicated"
        return "sharded" if param.ndim > 2 and group_cut(group).whole and not group["flatten"] else "owner"

    def _all_finite(self, grads: list[Tensor]) -> bool:
        device = self.param_groups[0]["params"][0].device
        return agree(grads_are_finite(grads), len(grads), device, self._group)

    def _check_state(self, group: Group, param: Tensor) -> None:
        if self._kind(group, param) == "replicated":
            super()._check_state(group, param)

    def _new_state(self, group: Group, param: Tensor) -> None:
        # What a rank keeps depends on the mode: it appears with the first step.
        return

    def _run(self, work: list[tuple[Group, list[Tensor]]]) -> None:
        units = [
            _Unit(group, param, self._name_of(group, param), self._kind(group, param))
            for group, params in work
            for param in params
        ]
        by_kind = {kind: [unit for unit in units if unit.kind == kind] for kind in COMMS}
        replicated = self._launch_replicated(by_kind["replicated"])
        owned = self._launch_owned(by_kind["owner"])
        # Adam first: its gathers run while the matrices are orthogonalised.
        cut = sorted(by_kind["sharded"], key=lambda unit: unit.group["algorithm"] != "adam")
        rows = [(unit, self._launch_rows(unit)) for unit in cut]
        self._finish_replicated(by_kind["replicated"], replicated)
        gathers = [(unit, self._finish_rows(unit, pending)) for unit, pending in rows]
        self._finish_owned(owned)
        for unit, gather in gathers:
            unit.param.detach().copy_(gather.wait()[: unit.param.size(0)])

    # replicated: one flat buffer per dtype

    def _launch_replicated(self, units: list[_Unit]) -> list[tuple[list[_Unit], Pending]]:
        launched = []
        for members in _by_dtype(units):
            flat = torch.cat([_grad(unit).reshape(-1) for unit in members])
            pending = Pending(None, flat) if self._averaged else all_reduce_mean(flat, self._group)
            launched.append((members, pending))
        return launched

    def _finish_replicated(self, units: list[_Unit], launched: list[tuple[list[_Unit], Pending]]) -> None:
        for members, pending in launched:
            parts = pending.wait().split([unit.param.numel() for unit in members])
            grads = {unit.param: part.view_as(unit.param) for unit, part in zip(members, parts, strict=True)}
            self._update_local(members, grads)

    # sharded: own rows of dimension 0

    def _launch_rows(self, unit: _Unit) -> Pending:
        begin, end = chunk(unit.param.size(0), self._rank, self._world)
        grad = _grad(unit)
        if self._averaged:
            return Pending(None, grad[begin:end])
        size = -(-unit.param.size(0) // self._world)
        padded = grad
        if size * self._world != unit.param.size(0):
            padded = grad.new_zeros(size * self._world, *grad.shape[1:])
            padded[: grad.size(0)] = grad
        return reduce_scatter_mean(padded.contiguous(), self._group)

    def _finish_rows(self, unit: _Unit, pending: Pending) -> Pending:
        begin, end = chunk(unit.param.size(0), self._rank, self._world)
        weight = unit.param.detach()[begin:end]
        grad = pending.wait()[: end - begin]
        state = self.state[unit.param]
        adam = unit.group["algorithm"] == "adam"
        if not state:
            state.update((new_adam_state if adam else new_matrix_state)(unit.group, weight))
        if adam:
            state["step"] += 1
            adam_item(unit.group, weight, grad, state)
        elif end > begin:
            group = unit.group
            if not isinstance(group["lr_mul"], int | float):
                leading = unit.param[0].numel() // (unit.param.size(-1) * unit.param.size(-2))
                group = {**group, "lr_mul": list(group["lr_mul"])[begin * leading : end * leading]}
            run_items(self.matrix_items(group, weight, grad, state), matrix_options(group), self._workspace)
        size = -(-unit.param.size(0) // self._world)
        if size != end - begin:
            padded = weight.new_zeros(size, *weight.shape[1:])
            padded[: end - begin] = weight
            weight = padded
        return all_gather(weight, self._group)

    # owner: all gradients to their owners in one flat reduce-scatter, all weights back in one all-gather

    def _launch_owned(self, units: list[_Unit]) -> list[tuple[list[list[_Unit]], Pending]]:
        launched = []
        for members in _by_dtype(units):
            owner = self.assignment().owner
            buckets = [[u for u in members if owner[u.name] == rank] for rank in range(self._world)]
            if self._averaged:
                mine = [_grad(unit).reshape(-1) for unit in buckets[self._rank]]
                pending = Pending(None, torch.cat(mine) if mine else _grad(members[0]).new_empty(0))
            else:
                flat = _pack([[_grad(unit) for unit in bucket] for bucket in buckets], _grad(members[0]))
                pending = reduce_scatter_mean(flat, self._group)
            launched.append((buckets, pending))
        return launched

    def _finish_owned(self, launched: list[tuple[list[list[_Unit]], Pending]]) -> None:
        for buckets, pending in launched:
            mine = buckets[self._rank]
            sizes = [unit.param.numel() for unit in mine]
            parts = pending.wait()[: sum(sizes)].split(sizes)
            grads = {unit.param: part.view_as(unit.param) for unit, part in zip(mine, parts, strict=True)}
            self._update_local(mine, grads)
            for bucket in buckets:
                for unit in bucket:
                    # On the other ranks the state is empty but for Adam's step, which every rank counts: it
                    # lies on the host, and a group of devices could not send it.
                    state = self.state[unit.param]
                    if unit.group["algorithm"] == "adam" and bucket is not mine:
                        state["step"] = state.get("step", torch.tensor(0.0)) + 1
            like = next(unit.param for bucket in buckets for unit in bucket)
            weights = [[unit.param.detach() for unit in bucket] for bucket in buckets]
            length = max(sum(w.numel() for w in bucket) for bucket in weights)
            flat = like.new_zeros(length)
            if mine:
                torch.cat([w.reshape(-1) for w in weights[self._rank]], out=flat[: sum(sizes)])
            gathered = all_gather(flat, self._group).wait().view(self._world, length)
            for bucket, row in zip(weights, gathered, strict=True):
                begin = 0
                for weight in bucket:
                    weight.copy_(row[begin : begin + weight.numel()].view_as(weight))
                    begin += weight.numel()

    def _update_local(self, units: list[_Unit], grads: dict[Tensor, Tensor]) -> None:
        for unit in units:
            if unit.group["algorithm"] == "adam":
                state = self.state[unit.param]
                if not state:
                    state.update(new_adam_state(unit.group, unit.param))
                state["step"] += 1
                adam_item(unit.group, unit.param.detach(), grads[unit.param], state)
        matrices: dict[int, list[_Unit]] = {}
        for unit in units:
            if unit.group["algorithm"] != "adam":
                matrices.setdefault(id(unit.group), []).append(unit)
        for members in matrices.values():
            items = []
            for unit in members:
                state = self._matrix_state(unit.group, unit.param)
                items += self.matrix_items(unit.group, unit.param, grads[unit.param], state)
            run_items(items, matrix_options(members[0].group), self._workspace)

    # the state dict holds full tensors

    def state_dict(self) -> dict[str, Any]:
        """Full tensors, the same on every rank; all ranks must call it together."""
        local = dict(self.state)
        try:
            for group in self.param_groups:
                for param in group["params"]:
                    if param in local:
                        self.state[param] = self._full_state(group, param, local[param])
            return super().state_dict()
        finally:
            for param, state in local.items():
                self.state[param] = state

    def _full_state(self, group: Group, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        kind = self._kind(group, param)
        if kind == "replicated":
            return state
        full = {}
        if kind == "sharded":
            size = -(-param.size(0) // self._world)
            for key, value in state.items():
                if key == "step":
                    full[key] = value
                    continue
                padded = value.new_zeros(size, *value.shape[1:])
                padded[: value.size(0)] = value
                full[key] = all_gather(padded, self._group).wait()[: param.size(0)]
            return full
        source = self.assignment().owner[self._name_of(group, param)]
        full = (new_adam_state if group["algorithm"] == "adam" else new_matrix_state)(group, param)
        for key, value in full.items():
            if key == "step" or source == self._rank:
                value.copy_(state[key])
            if key != "step":
                broadcast(value, source, self._group)
        return full

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what this rank needs of a full state dict; saved by any number of ranks."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for param in group["params"]:
                if param not in self.state:
                    continue
                state, kind = self.state[param], self._kind(group, param)
                if kind == "owner" and self.assignment().owner[self._name_of(group, param)] != self._rank:
                    self.state[param] = {"step": state["step"]} if "step" in state else {}
                elif kind == "sharded":
                    begin, end = chunk(param.size(0), self._rank, self._world)
                    self.state[param] = {
                        key: value if key == "step" else value[begin:end].clone()
                        for key, value in state.items()
                    }

    def explain(self) -> str:
        """As `NorMuon.explain`, with the ranks that own whole matrices."""
        text = f"{super().explain()}\n{self._comms} over {self._world} ranks"
        return f"{text}\n{self.assignment()}" if self.assignment().owner else text


def _grad(unit: _Unit) -> Tensor:
    assert unit.param.grad is not None
    return unit.param.grad


def _by_dtype(units: list[_Unit]) -> list[list[_Unit]]:
    # Weights travel in the parameter's dtype, gradients in their own: one bucket for each pair.
    groups: dict[tuple, list[_Unit]] = {}
    for unit in units:
        groups.setdefault((unit.param.dtype, _grad(unit).dtype, unit.param.device), []).append(unit)
    return list(groups.values())


def _pack(buckets: list[list[Tensor]], like: Tensor) -> Tensor:
    """The buckets as rows of one zero-padded matrix, flattened: what reduce-scatter takes."""
    length = max(sum(t.numel() for t in bucket) for bucket in buckets)
    rows = like.new_zeros(len(buckets), length)
    for row, bucket in zip(rows, buckets, strict=True):
        if bucket:
            torch.cat([t.reshape(-1) for t in bucket], out=row[: sum(t.numel() for t in bucket)])
    return rows.view(-1)
