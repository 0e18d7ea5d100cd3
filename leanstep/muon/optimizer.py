"""NorMuon: Muon for matrices and Adam for the rest in one torch optimizer, on one rank or many.

    optimizer = NorMuon(split_params(model), lr=0.02)

Gradients and state are checked before the first weight changes: bad input raises and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from leanstep.muon.checks import FORMAT, check_grad, check_loadable, finite
from leanstep.muon.groups import (
    ADAM_LR_SHARE,
    MATRIX_OPTIONS,
    Group,
    check_adam,
    check_param,
    fill_group,
    layout_of,
)
from leanstep.muon.polar import cpu_prefers_half
from leanstep.muon.reference import POLAR_EXPRESS, Triples
from leanstep.muon.residual import from_master, to_master
from leanstep.muon.sharded import Owners
from leanstep.muon.update import State, Work, compiles, new_state, update

# Options that reproduce the steps of published optimizers, by name.
PRESETS: dict[str, dict[str, Any]] = {
    # `NorMuonAndAdam` of record 74. Pass its betas and multipliers per parameter in the groups.
    "modded-nanogpt": {
        "lr": 0.023,
        "residual": "truncate",
        "eps_mode": "absolute",
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
        flatten, split, split_dim, heads: how a parameter becomes matrices, see `leanstep.muon.groups`.
        coefficients, eps_mode, compute_dtype: options of the iteration, see `polar`.
        residual: how the low bits of a bfloat16 weight are stored: nearest, truncate or none.
        nonfinite: "skip" leaves weights and state unchanged if a gradient contains NaN or infinity and counts
            the step in `skipped_steps`; on a GPU the compiled step decides, without a host read. "ignore"
            skips the check.
        adam: defaults of the Adam groups: lr (default 0.35 * lr, the record's ratio), betas, eps,
            weight_decay, decay, lr_mul, wd_mul, residual.
        mesh: a 1-D DeviceMesh or process group whose ranks share the work on plain tensors: gradients are
            reduced to the rank that owns a matrix, which steps it and sends the weight to the others.
            None: this rank steps everything (one rank, or DDP). DTensors (FSDP2) bring their own mesh.
        averaged: with `mesh`, gradients are already the same on every rank (DDP): nothing is reduced.

    Every group has its own `lr`. A loop `for group in optimizer.param_groups: group["lr"] = lr` would give
    the Adam groups the rate of the matrices; multiply each group's initial value instead, as schedulers do.

    State, per matrix: momentum in float32, one variance per index of the longer side, and for a bfloat16
    weight the int16 residual that completes it to float32. With a mesh a rank has the state of its share.
    Collectives per step: none without a mesh; see `leanstep.muon.sharded` and `leanstep.muon.fsdp`. All ranks
    must call `step`, `state_dict` and `load_state_dict` together.
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
        compute_dtype: torch.dtype | str = "auto",
        residual: str = "nearest",
        nonfinite: str = "skip",
        adam: dict[str, Any] | None = None,
        mesh: Any = None,
        averaged: bool = False,
    ) -> None:
        arguments = locals()
        if nonfinite not in ("skip", "ignore"):
            raise ValueError(f"nonfinite: expected 'skip' or 'ignore', got {nonfinite!r}")
        self._adam = {"lr": ADAM_LR_SHARE * float(lr), **check_adam(adam or {})}
        self._lr, self._options = lr, {key: arguments[key] for key in MATRIX_OPTIONS}
        self._nonfinite, self._mesh, self._averaged = nonfinite, mesh, averaged
        self._names: dict[Tensor, str] = {}
        self._ranks: Any = None
        # Steps that the device skipped, not yet read.
        self._skipped: Tensor | None = None
        super().__init__(params, {"lr": lr})

    @classmethod
    def preset(cls, name: str, params: Iterable[Any], **options: Any) -> NorMuon:
        """Return an optimizer that makes the steps of a published one.

        Equivalent to, for "modded-nanogpt":
            adam = dict(lr=0.008, eps=1e-10, weight_decay=0.005, residual="none")
            optimizer = NorMuon(
                params, lr=0.023, residual="truncate", eps_mode="absolute", compute_dtype=torch.bfloat16,
                adam=adam,
            )

        Args:
            name: "modded-nanogpt": `NorMuonAndAdam` of record 74.
            params: as for NorMuon.
            options: as for NorMuon; they override the preset's. `adam` is merged key by key.
        """
        if name not in PRESETS:
            raise ValueError(f"name: expected one of {', '.join(PRESETS)}, got {name!r}")
        chosen = PRESETS[name]
        return cls(params, **{**chosen, **options, "adam": {**chosen["adam"], **(options.get("adam") or {})}})

    def __getstate__(self) -> dict[str, Any]:
        """Return torch's state plus what later steps need, for copies and pickles."""
        if self._ranks is not None:
            raise TypeError("NorMuon: cannot copy or pickle an optimizer with a mesh; use state_dict()")
        own = ("_adam", "_lr", "_options", "_nonfinite", "_mesh", "_averaged", "_names", "_ranks", "_skipped")
        return {**super().__getstate__(), **{key: getattr(self, key) for key in own}}

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; raise for unknown options, duplicates and parameters its algorithm cannot step."""
        group = fill_group(dict(param_group), self._lr, self._options, self._adam)
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        if not params:
            raise ValueError("params: expected at least one parameter in every group, got an empty group")
        group["params"] = params
        first, named = len(self._names), isinstance(params[0], tuple)
        for i, entry in enumerate(params):
            name, param = entry if isinstance(entry, tuple) else (f"param_{first + i}", entry)
            check_param(str(name), param, group)
            if param in self._names:
                raise ValueError(f"{name}: expected every parameter once, got it twice")
            self._names[param] = str(name)
        super().add_param_group(group)
        group = self.param_groups[-1]
        group.setdefault("skipped_steps", 0)
        group.setdefault("format", FORMAT)
        if not named:
            group.pop("param_names", None)
        if any(hasattr(param, "placements") for param in self._names):
            from leanstep.muon.fsdp import RowShards

            self._ranks = RowShards(self._names)
        elif self._mesh is not None:
            self._ranks = Owners(self._mesh, self._averaged)

    def _group_of(self, param: Tensor) -> Group:
        return next(g for g in self.param_groups if any(p is param for p in g["params"]))

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because a gradient was not finite; a host sync on a GPU."""
        if self._skipped is not None:
            self._count_skip(int(self._skipped))
            self._skipped = None
        return max(group["skipped_steps"] for group in self.param_groups)

    def _count_skip(self, number: int = 1) -> None:
        for group in self.param_groups:
            group["skipped_steps"] += number

    def _assigned_ranks(self) -> Any:
        """Return the ranks with their shares assigned; None for one rank."""
        if self._ranks is not None and not self._ranks.assigned:
            self._ranks.assign([(g, self._names[p], p) for g in self.param_groups for p in g["params"]])
        return self._ranks

    def _new_state(self, group: Group, param: Tensor) -> State:
        ranks = self._assigned_ranks()
        if ranks is not None:
            return ranks.new_state(group, param)
        second = () if group["algorithm"] == "adam" else layout_of(param.shape, group).second_shape
        return new_state(group, param, second)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ranks = self._assigned_ranks()
        pairs = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        for _, param in pairs:
            check_grad(self._names[param], param)
        go: Tensor | bool | None = None
        if self._nonfinite == "skip" and (pairs or ranks is not None):
            grads = [param.grad for _, param in pairs]
            on_device = bool(pairs) and all(param.is_cuda for _, param in pairs) and compiles(pairs[0][1])
            go = finite(grads, on_device) if ranks is None else ranks.finite(grads, on_device)
            if go is False:
                self._count_skip()
                return loss
            if isinstance(go, Tensor):
                self._skipped = 1 - go if self._skipped is None else self._skipped + (1 - go)
        work = []
        for group, param in pairs:
            if (
                group.get("compute_dtype") == "auto"
                and "cpu_half" not in group
                and param.device.type == "cpu"
            ):
                # Measured once and saved with the group: a resumed run must use the same arithmetic.
                group["cpu_half"] = cpu_prefers_half()
            if not self.state[param]:
                self.state[param].update(self._new_state(group, param))
            multipliers = group["lr_mul"] if isinstance(group["lr_mul"], Sequence) else None
            work.append(Work(group, param, param.grad, self.state[param], multipliers))
        (update if ranks is None else ranks.update)(work, go if isinstance(go, Tensor) else None)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's layout, without callables: `torch.load(weights_only=True)` reads it.

        With a mesh: full tensors, the same on every rank, for any number of ranks. FSDP2: DTensors.
        """
        _ = self.skipped_steps
        local, ranks = dict(self.state), self._assigned_ranks()
        try:
            if ranks is not None:
                for param, state in local.items():
                    self.state[param] = ranks.full_state(self._group_of(param), param, state)
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
        self._skipped = None
        ranks = self._assigned_ranks()
        for group, old, theirs in zip(self.param_groups, before, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in old.items() if callable(value)})
            for param, key in zip(group["params"], theirs["params"], strict=True):
                state = self.state.get(param)
                if not state:
                    continue
                for name, value in state_dict["state"][key].items():
                    if isinstance(value, Tensor):
                        device = "cpu" if name == "step" and not compiles(param) else param.device
                        state[name] = value.detach().to(device, copy=True)
                _convert(param, state, group["residual"], old["residual"])
                if ranks is not None:
                    self.state[param] = ranks.own_state(group, param, state)
            group["residual"] = old["residual"]


@torch.no_grad()
def _convert(weight: Tensor, state: State, source: str, target: str) -> None:
    """Convert the low bits in a state from one mode to another, including `none`, in place.

    The parameter takes the rounding of `target`; the float32 weight has the same bits as before.
    """
    if "residual" not in state:
        if target != "none" and weight.dtype == torch.bfloat16:
            state["residual"] = torch.zeros_like(weight, dtype=torch.int16)
    elif target == "none":
        del state["residual"]
    elif source != target:
        high, low = from_master(to_master(weight.detach(), state["residual"], source), target)
        weight.copy_(high)
        state["residual"] = low
