"""NorMuon: Muon for matrices and Adam for the rest, under one torch optimizer.

    optimizer = NorMuon(split_params(model), lr=0.02)

Every group has `lr`, so any learning-rate scheduler drives both halves. Gradients and state are checked
before the first weight moves: a bad input raises and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from leanstep.muon import state as saved
from leanstep.muon.groups import ADAM_LR_SHARE, MATRIX_DEFAULTS, check_params, fill_group, group_cut
from leanstep.muon.matrices import matrix_views, second_views
from leanstep.muon.parameters import (
    adam_item,
    check_grad,
    grads_are_finite,
    matrix_options,
    matrix_rates,
    new_adam_state,
    new_matrix_state,
)
from leanstep.muon.polar import MIN_HALF_SPEEDUP, PolarPlan, cpu_bfloat16_speedup, plan_polar
from leanstep.muon.residual import from_master, to_master
from leanstep.muon.steps import MatrixItem, run_items
from leanstep.muon.workspace import Workspace


class NorMuon(torch.optim.Optimizer):
    """Polar Express Muon with NorMuon variance reduction and cautious decay; Adam for what is no matrix.

    Args:
        params: groups from `split_params`, your own groups (key `algorithm`: normuon, muon or adam), or
            plain parameters, which must all be matrices.
        lr: rate of the Muon groups. adam_lr: of the Adam groups; default 0.35 * lr, the record's proportion.
        nonfinite: "skip" leaves weights and state alone when a gradient holds NaN or infinity and counts it
            in `skipped_steps` (one host read per step on an accelerator); "ignore" does not look.
        options: defaults for the Muon groups: momentum, beta2, weight_decay, variance (long, row, off),
            lr_rule (shape, spectral, rms, none or callable(rows, cols)), compute_dtype, method, split, heads,
            flatten, residual (nearest, truncate, none), every and phase. A group may override each.

    Weight decay is cautious and scales with lr^2: w -= [update * w >= 0] * w * (weight_decay * lr) * rate.
    decay="decoupled" gives AdamW's w -= lr * weight_decay * w.

    State, per matrix: momentum in float32, one variance per line of the longer side, and for a bfloat16
    weight the int16 residual that completes it to float32.
    """

    # Whether parameters may be DTensors, of which this rank holds a part.
    takes_shards = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        *,
        adam_lr: float | None = None,
        nonfinite: str = "skip",
        **options: Any,
    ) -> None:
        if nonfinite not in ("skip", "ignore"):
            raise ValueError(f"nonfinite: expected 'skip' or 'ignore', got {nonfinite!r}")
        for key in options:
            if key not in MATRIX_DEFAULTS:
                raise ValueError(f"{key}: no such option; NorMuon takes {', '.join(MATRIX_DEFAULTS)}")
        self._lr = lr
        self._adam_lr = ADAM_LR_SHARE * float(lr) if adam_lr is None else adam_lr
        self._overrides = options
        self._nonfinite = nonfinite
        self._workspace = Workspace()
        self._stepped: list[dict[str, Any]] = []
        super().__init__(params, {"lr": lr})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; unknown options, duplicates and parameters its algorithm cannot step raise."""
        group = fill_group(dict(param_group), self._lr, self._adam_lr, self._overrides)
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        group["params"] = params
        named = bool(params) and isinstance(params[0], tuple)
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
        first = sum(len(g["params"]) for g in self.param_groups)
        names = [str(p[0]) if isinstance(p, tuple) else f"param_{first + i}" for i, p in enumerate(params)]
        check_params({**group, "params": tensors}, names)
        sharded = [name for name, t in zip(names, tensors, strict=True) if hasattr(t, "placements")]
        if sharded and not self.takes_shards:
            raise ValueError(
                f"{sharded[0]}: expected a whole tensor, got a DTensor; use leanstep.muon.fsdp.FsdpNorMuon"
            )
        taken = {id(p) for g in self.param_groups for p in g["params"]}
        for name, tensor in zip(names, tensors, strict=True):
            if id(tensor) in taken:
                raise ValueError(f"{name}: expected every parameter once, got it twice")
            taken.add(id(tensor))
        super().add_param_group(group)
        self.param_groups[-1].setdefault("calls", 0)
        self.param_groups[-1].setdefault("skipped_steps", 0)
        self.param_groups[-1].setdefault("format", saved.FORMAT)
        if not named:
            self.param_groups[-1].pop("param_names", None)

    @property
    def skipped_steps(self) -> int:
        """How many steps were left out because a gradient was not finite."""
        return max(group["skipped_steps"] for group in self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, do_adam: bool | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient and whose group is due.

        A group is due on every call, or when call number % every == phase. `do_adam` overrides that for the
        Adam groups. Gradients of groups that were not due stay: `zero_stepped_grads` clears the others.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        due = [group for group in self.param_groups if _is_due(group, do_adam)]
        work = [(group, [p for p in group["params"] if p.grad is not None]) for group in due]
        for group, params in work:
            for param in params:
                check_grad(self._name_of(group, param), param)
                self._check_state(group, param)
        for group in self.param_groups:
            group["calls"] += 1
        self._stepped = due
        if self._nonfinite == "skip" and not self._all_finite([p.grad for _, params in work for p in params]):
            for group in self.param_groups:
                group["skipped_steps"] += 1
            return loss
        try:
            self._run(work)
        finally:
            # Forward and backward need the memory more than the next step needs warm scratch.
            self._workspace.clear()
        for group in self.param_groups:
            # Groups that are not due get their zero state too: checkpoints expect it after the first step.
            for param in group["params"]:
                if param.grad is not None and param not in self.state:
                    self._new_state(group, param)
        return loss

    def _new_state(self, group: dict[str, Any], param: Tensor) -> None:
        make = new_adam_state if group["algorithm"] == "adam" else new_matrix_state
        self.state[param].update(make(group, param))

    def _run(self, work: list[tuple[dict[str, Any], list[Tensor]]]) -> None:
        for group, params in work:
            if group["algorithm"] == "adam":
                self._step_adam(group, params)
            else:
                self._step_matrices(group, params)

    def zero_stepped_grads(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the groups the last `step` ran; the others go on accumulating."""
        for group in self._stepped:
            for param in group["params"]:
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.zero_()

    def _check_state(self, group: dict[str, Any], param: Tensor) -> None:
        saved.check_state(self._name_of(group, param), param, self.state.get(param), group)

    def _all_finite(self, grads: list[Tensor]) -> bool:
        return grads_are_finite(grads)

    def _step_matrices(self, group: dict[str, Any], params: list[Tensor]) -> None:
        items = []
        for param in params:
            state = self._matrix_state(group, param)
            assert param.grad is not None
            items += self.matrix_items(group, param, param.grad, state)
        run_items(items, matrix_options(group), self._workspace)

    def _matrix_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            state.update(new_matrix_state(group, param))
        return state

    def matrix_items(
        self, group: dict[str, Any], weight: Tensor, grad: Tensor, state: dict[str, Any]
    ) -> list[MatrixItem]:
        """The matrices of one parameter, with views of its gradient and state."""
        cut = group_cut(group)
        weights = matrix_views(weight.detach(), cut)
        grads = matrix_views(grad, cut)
        buffers = matrix_views(state["momentum_buffer"], cut)
        per = group["variance"]
        seconds: list[Tensor | None] = [None] * len(weights)
        if per != "off":
            seconds = [*second_views(state["second_momentum"], weights, cut, per)]
        low = state.get("residual")
        residuals = [None] * len(weights) if low is None else matrix_views(low, cut)
        items = []
        for w, g, m, v, r in zip(weights, grads, buffers, seconds, residuals, strict=True):
            plan = self.plan(group, w)
            for begin, end, multiplier in _runs(group["lr_mul"], w.size(0)):
                part = slice(begin, end)
                lr, decay = matrix_rates(group, w.size(1), w.size(2), multiplier)
                second, residual = (None if t is None else t[part] for t in (v, r))
                items.append(MatrixItem(w[part], g[part], m[part], second, residual, plan, lr, decay))
        return items

    def plan(self, group: dict[str, Any], matrix: Tensor) -> PolarPlan:
        """How matrices shaped like `matrix` [..., R, C] in this group are orthogonalised."""
        rows, cols = matrix.shape[-2:]
        # Measured once and saved with the group: a resumed run must not change its arithmetic.
        if group["compute_dtype"] == "auto" and matrix.device.type == "cpu" and "cpu_half" not in group:
            group["cpu_half"] = cpu_bfloat16_speedup() > MIN_HALF_SPEEDUP
        return plan_polar(
            rows,
            cols,
            device=matrix.device,
            dtype=matrix.dtype,
            method=group["method"],
            restart=group["restart"],
            panels=group["panels"],
            compute_dtype=group["compute_dtype"],
            cpu_half=group.get("cpu_half"),
        )

    def _step_adam(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for param in params:
            state = self.state[param]
            if not state:
                state.update(new_adam_state(group, param))
            state["step"] += 1
            assert param.grad is not None
            adam_item(group, param.detach(), param.grad, state)

    def explain(self) -> str:
        """What happens to each parameter: algorithm, shape, form of the polar iteration and why."""
        lines = []
        for group in self.param_groups:
            lines.append(
                f"{group['algorithm']} (lr {float(group['lr']):.4g}, {len(group['params'])} parameters)"
            )
            if group["algorithm"] == "adam":
                continue
            plans: dict[str, int] = {}
            for param in group["params"]:
                for view in matrix_views(_on_meta(param), group_cut(group)):
                    like = torch.empty(0, *view.shape[1:], dtype=param.dtype, device=param.device)
                    text = str(self.plan(group, like))
                    plans[text] = plans.get(text, 0) + view.size(0)
            for text, count in plans.items():
                lines += [f"  {count} of " + text.replace("\n", "\n  ")]
        return "\n".join(lines)

    def master(self, param: Tensor) -> Tensor:
        """The float32 weight behind a bfloat16 parameter (a copy of any other parameter)."""
        low = self.state.get(param, {}).get("residual")
        if low is None:
            return param.detach().to(torch.promote_types(param.dtype, torch.float32), copy=True)
        return to_master(param.detach(), low, self._group_of(param)["residual"])

    @torch.no_grad()
    def set_master(self, param: Tensor, master: Tensor) -> None:
        """Give a bfloat16 parameter its float32 value, low bits included."""
        if master.shape != param.shape:
            raise ValueError(f"master: expected shape {tuple(param.shape)}, got {tuple(master.shape)}")
        group = self._group_of(param)
        state = self.state[param]
        if not state:
            make = new_adam_state if group["algorithm"] == "adam" else new_matrix_state
            state.update(make(group, param))
        if "residual" not in state:
            param.copy_(master)
            return
        high, low = from_master(master.float(), group["residual"])
        param.copy_(high)
        state["residual"].copy_(low)

    @torch.no_grad()
    def copy_state(self, source: Tensor, target: Tensor, *, transpose: bool = False) -> None:
        """Give `target` the state of `source` (untying a head from its embedding: transpose=True)."""
        if source not in self.state:
            raise ValueError("source: expected a parameter with state, got one that was never stepped")
        self._group_of(target)
        copied = {}
        for key, value in self.state[source].items():
            if isinstance(value, Tensor) and value.ndim >= 2 and transpose:
                value = value.mT.contiguous()
            copied[key] = value.clone() if isinstance(value, Tensor) else value
            if key in ("exp_avg", "exp_avg_sq", "momentum_buffer") and copied[key].shape != target.shape:
                raise ValueError(
                    f"target: expected shape {tuple(copied[key].shape)}, got {tuple(target.shape)}"
                )
        self.state[target] = copied

    def state_dict(self) -> dict[str, Any]:
        """Torch's layout; callables are left out, so `torch.load(weights_only=True)` reads it back."""
        return saved.portable(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore groups and state with the dtypes as saved; raises before anything changes on a misfit."""
        saved.check_loadable(self, state_dict)
        kept = [{k: v for k, v in group.items() if callable(v)} for group in self.param_groups]
        modes = [group["residual"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        saved.restore_dtypes(self, state_dict)
        for group, callables, mode in zip(self.param_groups, kept, modes, strict=True):
            for key, value in callables.items():
                group[key] = value
            saved.convert_residuals(self, group, mode)

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(p is param for p in group["params"]):
                return group
        raise ValueError(
            f"param: expected a parameter of this optimizer, got one of shape {tuple(param.shape)}"
        )

    def _name_of(self, group: dict[str, Any], param: Tensor) -> str:
        index = next(i for i, p in enumerate(group["params"]) if p is param)
        if "param_names" in group:
            return group["param_names"][index]
        before = 0
        for other in self.param_groups:
            if other is group:
                break
            before += len(other["params"])
        return f"param_{before + index}"


def _is_due(group: dict[str, Any], do_adam: bool | None) -> bool:
    if group["algorithm"] == "adam" and do_adam is not None:
        return do_adam
    return group["calls"] % group["every"] == group["phase"]


def _runs(multipliers: float | list[float], count: int) -> list[tuple[int, int, float]]:
    if isinstance(multipliers, int | float):
        return [(0, count, float(multipliers))]
    if len(set(multipliers)) == 1:
        return [(0, count, float(multipliers[0]))]
    return [(i, i + 1, float(value)) for i, value in enumerate(multipliers)]


def _on_meta(param: Tensor) -> Tensor:
    return torch.empty(param.shape, device="meta")
