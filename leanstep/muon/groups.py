"""Parameter groups: which options exist, their defaults, and checks that name the bad one."""

from __future__ import annotations

from typing import Any

import torch

from leanstep.muon.matrices import Cut, check_cut, make_cut
from leanstep.muon.polar import EPS_MODES, METHODS
from leanstep.muon.reference import POLAR_EXPRESS
from leanstep.muon.residual import MODES
from leanstep.muon.steps import LR_RULES

ALGORITHMS = ("normuon", "muon", "adam")
# The record trains its matrices at 0.023 and the rest at 0.008; one `lr` sets both in this proportion.
ADAM_LR_SHARE = 0.008 / 0.023

_SHARED: dict[str, Any] = {
    "lr_mul": 1.0,
    "wd_mul": 1.0,
    "decay": "cautious",
    "residual": "nearest",
    "every": 1,
    "phase": 0,
}
MATRIX_DEFAULTS: dict[str, Any] = {
    **_SHARED,
    "weight_decay": 1.2,
    "momentum": 0.95,
    "nesterov": True,
    "beta2": 0.95,
    "variance": "long",
    "coefficients": POLAR_EXPRESS,
    "eps_mode": "relative",
    "method": "auto",
    "restart": "auto",
    "panels": "auto",
    "compute_dtype": "auto",
    "lr_rule": "shape",
    "layout": "out_in",
    "flatten": None,
    "split": None,
    "split_dim": 0,
    "heads": None,
}
ADAM_DEFAULTS: dict[str, Any] = {**_SHARED, "weight_decay": 0.005, "betas": (0.9, 0.99), "eps": 1e-10}
# Kept by torch, by schedulers and by this optimizer; valid in any group.
_BOOKKEEPING = {
    "params",
    "param_names",
    "algorithm",
    "lr",
    "initial_lr",
    "calls",
    "skipped_steps",
    "format",
    "cpu_half",
}


def fill_group(group: dict[str, Any], lr: float, adam_lr: float, overrides: dict[str, Any]) -> dict[str, Any]:
    """The group with every option present; raises a ValueError for an unknown or impossible one."""
    algorithm = group.get("algorithm", "normuon")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: expected one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    known = ADAM_DEFAULTS if algorithm == "adam" else MATRIX_DEFAULTS
    unknown = sorted(set(group) - set(known) - _BOOKKEEPING)
    if unknown:
        raise ValueError(
            f"{unknown[0]}: no such option for algorithm {algorithm!r}; it takes {', '.join(known)}"
        )
    defaults = known | ({} if algorithm == "adam" else overrides)
    if algorithm == "muon" and "variance" not in group:
        defaults = defaults | {"variance": "off"}
    filled = {**defaults, "lr": adam_lr if algorithm == "adam" else lr, **group, "algorithm": algorithm}
    _check_numbers(filled)
    _check_choices(filled)
    return filled


def _check_numbers(group: dict[str, Any]) -> None:
    for key in ("lr", "weight_decay", "wd_mul", "eps"):
        if key in group and not float(group[key]) >= 0:
            raise ValueError(f"{key}: expected a number that is not negative, got {group[key]!r}")
    for key in ("momentum", "beta2"):
        if key in group and not 0 <= group[key] < 1:
            raise ValueError(f"{key}: expected 0 <= {key} < 1, got {group[key]!r}")
    if "betas" in group and not (len(group["betas"]) == 2 and all(0 <= b < 1 for b in group["betas"])):
        raise ValueError(f"betas: expected two numbers in [0, 1), got {group['betas']!r}")
    if not isinstance(group["every"], int) or group["every"] < 1:
        raise ValueError(f"every: expected a positive int, got {group['every']!r}")
    if not isinstance(group["phase"], int) or not 0 <= group["phase"] < group["every"]:
        raise ValueError(f"phase: expected an int in [0, {group['every']}), got {group['phase']!r}")


def _check_choices(group: dict[str, Any]) -> None:
    choices = {
        "decay": ("cautious", "decoupled"),
        "residual": MODES,
        "variance": ("long", "row", "off"),
        "eps_mode": EPS_MODES,
        "method": METHODS,
        "layout": ("out_in", "in_out"),
    }
    for key, allowed in choices.items():
        if key in group and group[key] not in allowed:
            raise ValueError(f"{key}: expected one of {', '.join(allowed)}, got {group[key]!r}")
    rule = group.get("lr_rule", "none")
    if not callable(rule) and rule not in LR_RULES:
        raise ValueError(f"lr_rule: expected one of {', '.join(LR_RULES)} or a callable, got {rule!r}")
    for triple in group.get("coefficients", ()):
        if len(triple) != 3:
            raise ValueError(f"coefficients: expected (a, b, c) per step, got {triple!r}")


def group_cut(group: dict[str, Any]) -> Cut:
    return make_cut(group["flatten"], group["split"], group["split_dim"], group["heads"])


def check_params(group: dict[str, Any], names: list[str]) -> None:
    """Every parameter of the group can be stepped by its algorithm."""
    if not group["params"]:
        raise ValueError("params: expected at least one parameter in every group, got an empty group")
    for name, param in zip(names, group["params"], strict=True):
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(param).__name__}")
        if not param.is_floating_point() or param.layout != torch.strided:
            raise ValueError(
                f"{name}: expected a dense real floating tensor, got {param.dtype} {param.layout}"
            )
        if group["algorithm"] != "adam":
            check_cut(name, param.shape, group_cut(group))
            _check_multipliers(name, param, group)


def _check_multipliers(name: str, param: torch.Tensor, group: dict[str, Any]) -> None:
    multipliers = group["lr_mul"]
    if isinstance(multipliers, int | float):
        return
    bank = 1 if group["flatten"] else param.numel() // max(1, param.shape[-1] * param.shape[-2])
    if len(multipliers) != bank:
        raise ValueError(
            f"lr_mul: expected a number or one per matrix of {name} ({bank}), got {len(multipliers)}"
        )
    if not group_cut(group).whole and len(set(multipliers)) > 1:
        raise ValueError(
            f"lr_mul: expected one number for the split parameter {name}, got {list(multipliers)}"
        )
