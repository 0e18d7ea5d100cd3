"""NorMuon: Muon for matrices and Adam for the rest in one torch optimizer, on one rank or many.

    optimizer = NorMuon(split_params(model), lr=0.02)

Gradients and state are checked before the first weight changes: bad input raises and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from leanstep.muon.param_groups import (
    ADAM_LR_SHARE,
    MATRIX_OPTIONS,
    Entry,
    Group,
    check_adam,
    check_params,
    entry_key,
    fill_group,
    make_entry,
)
from leanstep.muon.polar import Workspace
from leanstep.muon.reference import POLAR_EXPRESS, Triples
from leanstep.muon.sharded import Assignment, Owners, assign
from leanstep.muon.sparse_rows import TouchedRows, check_rows
from leanstep.muon.state import (
    FORMAT,
    State,
    check_grad,
    check_loadable,
    check_state,
    convert_state,
    finite_on_device,
    from_master,
    fuses,
    grads_are_finite,
    new_state,
    to_master,
)
from leanstep.muon.update import update_parameters

# Options that reproduce the steps of published optimizers, by name.
PRESETS: dict[str, dict[str, Any]] = {
    # `NorMuonAndAdam` of record 74. Pass its betas and multipliers per parameter in the groups.
    "modded-nanogpt": {
        "lr": 0.023,
        "residual": "truncate",
        "eps_mode": "absolute",
        "method": "standard",
        "compute_dtype": torch.bfloat16,
        "adam": {"lr": 0.008, "eps": 1e-10, "weight_decay": 0.005, "residual": "none"},
    },
}


class NorMuon(torch.optim.Optimizer):
    """Polar Express Muon with NorMuon variance reduction and cautious decay; Adam for all other parameters.

    Equivalent to, for each matrix [R, C]:
        weight, momentum, second = reference.normuon(weight, grad, momentum, second, lr=lr, weight_decay=1.2)

    Args:
        params: groups from `split_params`, your own groups (key `algorithm`: normuon, muon or adam), or
            plain parameters, which must all be matrices. A group may override every option below.
        lr: learning rate of the Muon groups.
        momentum, nesterov, beta2: decay of the momentum, look-ahead, decay of the variance.
        variance: "long" (one value per index of the longer side), "row" or "off".
        weight_decay, decay: "cautious" w -= [update * w >= 0] * w * (weight_decay * lr) * rate, which scales
            with lr^2; "decoupled" is AdamW's w -= lr * weight_decay * w.
        lr_mul, wd_mul: multipliers of rate and decay; lr_mul may be a list, one per matrix of a bank.
        lr_rule: learning-rate factor by shape: shape, spectral, rms, none, or callable(rows, cols).
        layout: out_in (rows are outputs) or in_out, for lr_rule.
        flatten, split, split_dim, heads: how a parameter becomes matrices, see `leanstep.muon.param_groups`.
        coefficients, eps_mode, method, restart, panels, compute_dtype: options of the iteration, see `polar`.
        residual: how the low bits of a bfloat16 weight are stored: nearest, truncate or none.
        every, phase: a group steps when call number % every == phase.
        nonfinite: "skip" leaves weights and state unchanged if a gradient contains NaN or infinity and counts
            the step in `skipped_steps`; on a GPU the kernels decide, without a host read. "ignore" skips the
            check.
        adam: defaults of the Adam groups: lr (default 0.35 * lr, the record's ratio), betas, eps,
            weight_decay, decay, lr_mul, wd_mul, residual, every, phase, sparse_rows (with a mesh, only rows
            named by `note_rows` are sent to their owners).
        mesh: a 1-D DeviceMesh or process group whose ranks share the work on plain tensors: gradients are
            reduced to the rank that owns a parameter, which steps it and sends the weight to the others.
            Banks and large tables are cut into a piece for each rank where they can be.
            None: this rank steps everything (one rank, or DDP). DTensors (FSDP2) bring their own mesh.
        averaged: with `mesh`, gradients are already the same on every rank (DDP): nothing is reduced.
        max_elements: FSDP2 matrices are exchanged in batches of at most this many elements.

    Every group has its own `lr`. A loop `for group in optimizer.param_groups: group["lr"] = lr` would give
    the Adam groups the rate of the matrices; multiply each group's initial value instead, as schedulers do.

    State, per matrix: momentum in float32, one variance per index of the longer side, and for a bfloat16
    weight the int16 residual that completes it to float32. With a mesh only the owner has the state.
    Collectives per step: none without a mesh; see `leanstep.muon.sharded` and `leanstep.muon.fsdp`. All ranks
    must call `step`, `state_dict`, `load_state_dict` and `copy_state` together.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        beta2: float = 0.95,
        variance: str = "long",
        weight_decay: float = 1.2,
        decay: str = "cautious",
        lr_mul: float | Sequence[float] = 1.0,
        wd_mul: float = 1.0,
        lr_rule: str | Callable[[int, int], float] = "shape",
        layout: str = "out_in",
        flatten: str | None = None,
        split: Sequence[int] | None = None,
        split_dim: int = 0,
        heads: int | Sequence[int] | None = None,
        coefficients: Triples = POLAR_EXPRESS,
        eps_mode: str = "relative",
        method: str = "auto",
        restart: int | str | None = "auto",
        panels: int | str = "auto",
        compute_dtype: torch.dtype | str = "auto",
        residual: str = "nearest",
        every: int = 1,
        phase: int = 0,
        nonfinite: str = "skip",
        adam: dict[str, Any] | None = None,
        mesh: Any = None,
        averaged: bool = False,
        max_elements: int = 1 << 28,
    ) -> None:
        arguments = locals()
        if nonfinite not in ("skip", "ignore"):
            raise ValueError(f"nonfinite: expected 'skip' or 'ignore', got {nonfinite!r}")
        self._adam = check_adam(adam or {})
        self._adam.setdefault("lr", ADAM_LR_SHARE * float(lr))
        self._lr, self._options = lr, {key: arguments[key] for key in MATRIX_OPTIONS}
        self._nonfinite, self._mesh, self._averaged = nonfinite, mesh, averaged
        self._max_elements = max_elements
        self._names: dict[Tensor, str] = {}
        self._start_empty()
        super().__init__(params, {"lr": lr})

    @classmethod
    def preset(cls, name: str, params: Iterable[Any], **options: Any) -> NorMuon:
        """Return an optimizer that makes the steps of a published one.

        Equivalent to, for "modded-nanogpt":
            adam = dict(lr=0.008, eps=1e-10, weight_decay=0.005, residual="none")
            optimizer = NorMuon(
                params, lr=0.023, residual="truncate", eps_mode="absolute", method="standard",
                compute_dtype=torch.bfloat16, adam=adam,
            )

        Args:
            name: "modded-nanogpt": `NorMuonAndAdam` of record 74.
            params: as for NorMuon.
            options: as for NorMuon; they override the preset's. `adam` is merged key by key.
        """
        if name not in PRESETS:
            raise ValueError(f"name: expected one of {', '.join(PRESETS)}, got {name!r}")
        chosen = PRESETS[name]
        merged = {**chosen, **options, "adam": {**chosen["adam"], **(options.get("adam") or {})}}
        return cls(params, **merged)

    def __getstate__(self) -> dict[str, Any]:
        """Return torch's state plus the options and names that later steps need, for copies and pickles."""
        if self._ranks is not None:
            raise TypeError("NorMuon: cannot copy or pickle an optimizer with a mesh; use state_dict()")
        self._count_skipped()
        names = [self._names[param] for group in self.param_groups for param in group["params"]]
        constants = ("_adam", "_lr", "_options", "_nonfinite", "_mesh", "_averaged", "_max_elements")
        own = {key: getattr(self, key) for key in constants}
        return {**super().__getstate__(), **own, "names": names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = state.pop("names", None)
        super().__setstate__(state)
        if names is None:
            # Called by torch's load_state_dict on an optimizer that already has its names.
            return
        params = [param for group in self.param_groups for param in group["params"]]
        self._names = dict(zip(params, names, strict=True))
        self._start_empty()

    def _start_empty(self) -> None:
        """Reset everything that steps build up."""
        self._workspace = Workspace()
        self._entries: dict[Tensor, Entry] = {}
        self._ranks: Any = None
        self._stepped: list[Group] = []
        # Steps for which the device decided, and how many of them it took (a tensor on the device).
        self._tried = 0
        self._taken: Tensor | None = None

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; raise for unknown options, duplicates and parameters its algorithm cannot step."""
        group = fill_group(dict(param_group), self._lr, self._options, self._adam)
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        group["params"] = params
        named = bool(params) and isinstance(params[0], tuple)
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
        first = sum(len(g["params"]) for g in self.param_groups)
        names = [str(p[0]) if isinstance(p, tuple) else f"param_{first + i}" for i, p in enumerate(params)]
        check_params({**group, "params": tensors}, names)
        taken = {id(p) for g in self.param_groups for p in g["params"]}
        for name, tensor in zip(names, tensors, strict=True):
            if id(tensor) in taken:
                raise ValueError(f"{name}: expected every parameter once, got it twice")
            taken.add(id(tensor))
        super().add_param_group(group)
        group = self.param_groups[-1]
        for key, value in (("calls", 0), ("skipped_steps", 0), ("format", FORMAT)):
            group.setdefault(key, value)
        if not named:
            group.pop("param_names", None)
        self._names.update(zip(tensors, names, strict=True))
        self._choose_ranks()

    def _choose_ranks(self) -> None:
        """Choose what this rank steps: everything (None), the plain tensors it owns, or FSDP2 shards."""
        if any(hasattr(param, "placements") for param in self._names):
            from leanstep.muon.fsdp import RowShards

            self._ranks = RowShards(self._names, self._max_elements)
        elif self._mesh is not None:
            self._ranks = Owners(self._mesh, self._averaged)

    def _scheme(self) -> Any:
        """Return the ranks with their owners assigned; None for one rank."""
        if self._ranks is not None and self._ranks.assignment is None:
            self._ranks.assign_owners(self._all_entries())
        return self._ranks

    def _entry(self, group: Group, param: Tensor) -> Entry:
        entry = self._entries.get(param)
        if entry is None or entry.group is not group or entry.key != entry_key(group, param):
            entry = self._entries[param] = make_entry(self._names[param], group, param)
        return entry

    def _all_entries(self) -> list[Entry]:
        return [self._entry(group, param) for group in self.param_groups for param in group["params"]]

    def _new_state(self, entry: Entry) -> State:
        ranks = self._scheme()
        return new_state(entry) if ranks is None else ranks.new_state(entry)

    def _entry_of(self, param: Tensor) -> Entry:
        for group in self.param_groups if param in self._names else ():
            if any(p is param for p in group["params"]):
                return self._entry(group, param)
        raise ValueError(
            f"param: expected a parameter of this optimizer, got one of shape {tuple(param.shape)}"
        )

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because a gradient was not finite; a host sync on a GPU."""
        self._count_skipped()
        return max(group["skipped_steps"] for group in self.param_groups)

    def assignment(self) -> Assignment:
        """Return which rank steps (plain tensors) or orthogonalises (FSDP2) which parameter; printable."""
        ranks = self._scheme()
        if ranks is None:
            return assign({e.name: (e.param.numel(), e.flops()) for e in self._all_entries()}, 1)
        return ranks.assignment

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, do_adam: bool | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient and whose group is due.

        A group is due on every call, or when call number % every == phase. `do_adam` overrides that for the
        Adam groups. Groups that were not due keep their gradients; `zero_stepped_grads` clears the others.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        due = [group for group in self.param_groups if _is_due(group, do_adam)]
        work = [(self._entry(g, p), p.grad) for g in due for p in g["params"] if p.grad is not None]
        ranks = self._scheme()
        for entry, _ in work:
            check_grad(entry.name, entry.param)
            if ranks is None or ranks.owns(entry):
                state = self.state.get(entry.param)
                check_state(entry.name, entry.param, state, entry.group, entry.second_shape)
        for group in self.param_groups:
            group["calls"] += 1
        self._stepped = due
        go = None
        if self._nonfinite == "skip":
            on_device = bool(work) and all(fuses(entry.param) for entry, _ in work)
            look = _look if ranks is None else ranks.grads_are_finite
            go = look([grad for _, grad in work], on_device)
            if go is False:
                for group in self.param_groups:
                    group["skipped_steps"] += 1
                return loss
        update = update_parameters if ranks is None else ranks.update
        try:
            update(work, self.state, self._workspace, self._counted(go))
        finally:
            # Free the scratch memory for the next forward and backward.
            self._workspace.clear()
        self._prepare_others(due)
        return loss

    def _counted(self, go: Tensor | bool | None) -> Tensor | None:
        """Return `go` if it is a tensor, and add it to the count of steps taken; else None."""
        if not isinstance(go, Tensor):
            return None
        if self._taken is None:
            self._taken = torch.zeros_like(go)
        self._taken += go
        self._tried += 1
        return go

    def _count_skipped(self) -> None:
        """Add the steps that the device skipped to the groups' counters; one host read."""
        if self._taken is not None:
            skipped, self._tried, self._taken = self._tried - int(self._taken), 0, None
            for group in self.param_groups:
                group["skipped_steps"] += skipped

    def _prepare_others(self, due: list[Group]) -> None:
        """Create zero state, which checkpoints expect, and average gradients for groups that are not due."""
        others = [group for group in self.param_groups if not any(group is other for other in due)]
        entries = [self._entry(g, p) for g in others for p in g["params"] if p.grad is not None]
        for entry in entries:
            if entry.param not in self.state:
                self.state[entry.param] = self._new_state(entry)
        if entries and self._ranks is not None:
            self._ranks.average([entry.param.grad for entry in entries if not self._is_cut(entry)])

    def _is_cut(self, entry: Entry) -> bool:
        """Whether every rank steps a piece of the parameter."""
        ranks = self._scheme()
        return isinstance(ranks, Owners) and ranks.is_cut(entry)

    @torch.no_grad()
    def average_waiting(self) -> None:
        """Gradients that wait for their turn become means over the ranks, for a checkpoint; a collective.

        Those of parameters that are cut are each rank's own until their step.
        """
        grads = [e.param.grad for e in self._all_entries() if e.param.grad is not None and self._is_cut(e)]
        if grads:
            self._ranks.average(grads)
        for touched in self._touched_rows(self.param_groups, with_gradient=True):
            touched.add_all()

    def note_rows(self, param: Tensor, rows: Tensor) -> None:
        """Name the rows of a table that the next backward on this rank may give a gradient; no host sync.

            optimizer.note_rows(model.embed.weight, tokens)      # the same tokens on the host
            model(tokens.to(device)).backward()

        For a parameter of a group with `sparse_rows`. Rows are collected over all calls until `zero_grad` or
        `zero_stepped_grads` clears the gradient. Too many rows change only the bytes that are sent; the owner
        of a missing row does not get its gradient, for which `step` raises in the first exchange. All rows
        are sent if a rank has named none, and if the ranks have touched so many that this is faster.

        Args:
            param: a table [rows, ...].
            rows: integers on the CPU, any shape, with or without duplicates; empty: no row has a gradient.
        """
        entry = self._entry_of(param)
        if not entry.group.get("sparse_rows"):
            raise ValueError(f"{entry.name}: expected a parameter of an Adam group with sparse_rows=True")
        check_rows(rows, param.shape[0])
        ranks = self._scheme()
        if isinstance(ranks, Owners) and entry.name in ranks.rows.tables:
            ranks.rows.tables[entry.name].add(rows)

    def _touched_rows(self, groups: list[Group], *, with_gradient: bool = False) -> list[TouchedRows]:
        """Return the touched rows of the groups' tables that are exchanged by rows."""
        tables = self._ranks.rows.tables if isinstance(self._ranks, Owners) else {}
        params = [p for group in groups for p in group["params"] if p.grad is not None or not with_gradient]
        return [tables[self._names[p]] for p in params if self._names[p] in tables]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, and the rows that `note_rows` has named."""
        super().zero_grad(set_to_none)
        for touched in self._touched_rows(self.param_groups):
            touched.clear()

    def zero_stepped_grads(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the groups that the last `step` updated; the others keep accumulating."""
        for group in self._stepped:
            for param in group["params"]:
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.zero_()
        for touched in self._touched_rows(self._stepped):
            touched.clear()

    def explain(self) -> str:
        """Describe how each parameter is stepped: the form of the iteration, the reason, and the rank."""
        lines = []
        for group in self.param_groups:
            lines.append(
                f"{group['algorithm']} (lr {float(group['lr']):.4g}, {len(group['params'])} parameters)"
            )
            plans: dict[str, int] = {}
            for param in group["params"]:
                for form in (self._entry(group, param).forms or {}).values():
                    plans[str(form.plan)] = plans.get(str(form.plan), 0) + form.count
            lines += [f"  {count} of " + text.replace("\n", "\n  ") for text, count in plans.items()]
        ranks = self._scheme()
        return "\n".join(lines if ranks is None else [*lines, ranks.explain()])

    def _refuse_cut(self, param: Tensor) -> None:
        if param.dtype == torch.bfloat16 and self._mesh is not None and self._is_cut(self._entry_of(param)):
            raise ValueError(
                f"{self._names[param]}: expected a parameter with one owner, got one that the ranks share; "
                f"state_dict() has all of its low bits"
            )

    def master(self, param: Tensor) -> Tensor:
        """Return the float32 weight of a bfloat16 parameter (a copy of any other parameter).

        With a mesh only the rank that owns the parameter has the low bits; other ranks raise.
        """
        self._refuse_cut(param)
        low = self.state.get(param, {}).get("residual")
        if low is not None:
            return to_master(param.detach(), low, self._entry_of(param).group["residual"])
        ranks = self._scheme()
        if ranks is not None and param.dtype == torch.bfloat16:
            entry = self._entry_of(param)
            if entry.group["residual"] != "none" and not ranks.owns(entry):
                raise ValueError(f"{entry.name}: expected the call on its owner, rank {ranks.owner(entry)}")
        return param.detach().to(torch.promote_types(param.dtype, torch.float32), copy=True)

    @torch.no_grad()
    def set_master(self, param: Tensor, master: Tensor) -> None:
        """Set a parameter to the float32 value `master`, including the low bits of a bfloat16 parameter."""
        if master.shape != param.shape:
            raise ValueError(f"master: expected shape {tuple(param.shape)}, got {tuple(master.shape)}")
        self._refuse_cut(param)
        entry = self._entry_of(param)
        if not self.state[param]:
            self.state[param] = self._new_state(entry)
        if param.dtype != torch.bfloat16 or entry.group["residual"] == "none":
            param.copy_(master)
            return
        high, low = from_master(master.float(), entry.group["residual"])
        param.copy_(high)
        if "residual" in self.state[param]:
            self.state[param]["residual"].copy_(low)

    @torch.no_grad()
    def copy_state(self, source: Tensor, target: Tensor, *, transpose: bool = False) -> None:
        """Copy the state of `source` to `target` (to untie a head from its embedding: transpose=True)."""
        if source not in self.state:
            raise ValueError("source: expected a parameter with state, got one that was never stepped")
        entry, state = self._entry_of(target), self.state[source]
        ranks = self._scheme()
        if ranks is not None:
            state = ranks.full_state(self._entry_of(source), state)
        copied = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim >= 2 and transpose:
                value = value.mT.contiguous()
            copied[key] = value.clone() if isinstance(value, Tensor) else value
            if key in ("exp_avg", "exp_avg_sq", "momentum_buffer") and copied[key].shape != target.shape:
                raise ValueError(
                    f"target: expected shape {tuple(copied[key].shape)}, got {tuple(target.shape)}"
                )
        self.state[target] = copied if ranks is None else ranks.own_state(entry, copied)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's layout, without callables: `torch.load(weights_only=True)` reads it.

        With a mesh: full tensors, the same on every rank, for any number of ranks. FSDP2: DTensors.
        """
        self._count_skipped()
        local, ranks = dict(self.state), self._scheme()
        try:
            if ranks is not None:
                self.state.update(ranks.full_states(self._all_entries(), local))
            saved = super().state_dict()
        finally:
            self.state.update(local)
        groups = [{k: v for k, v in group.items() if not callable(v)} for group in saved["param_groups"]]
        return {**saved, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and state in the saved dtypes; raise before any change if they do not fit.

        torch casts floating-point state to the parameter's dtype, which would turn the float32 moments of a
        bfloat16 weight into bfloat16; here they keep the saved dtype.
        """
        check_loadable(self.param_groups, state_dict)
        before = [dict(group) for group in self.param_groups]
        super().load_state_dict(state_dict)
        self._tried, self._taken = 0, None
        for group, old, theirs in zip(self.param_groups, before, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in old.items() if callable(value)})
            for param, key in zip(group["params"], theirs["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    if isinstance(value, Tensor):
                        device = "cpu" if name == "step" and not fuses(param) else param.device
                        self.state[param][name] = value.detach().to(device, copy=True)
                if param in self.state:
                    convert_state(param, self.state[param], group["residual"], old["residual"])
            group["residual"] = old["residual"]
        ranks = self._scheme()
        if ranks is not None:
            for entry in self._all_entries():
                if entry.param in self.state:
                    self.state[entry.param] = ranks.own_state(entry, self.state[entry.param])
        # Gradients that were saved with the state are means of all ranks' rows.
        for touched in self._touched_rows(self.param_groups):
            touched.clear()
        for touched in self._touched_rows(self.param_groups, with_gradient=True):
            touched.add_all()


def _look(grads: Sequence[Tensor], on_device: bool) -> Tensor | bool:
    return finite_on_device(grads, grads[0].device) if on_device else grads_are_finite(grads)


def _is_due(group: Group, do_adam: bool | None) -> bool:
    if group["algorithm"] == "adam" and do_adam is not None:
        return do_adam
    return group["calls"] % group["every"] == group["phase"]
