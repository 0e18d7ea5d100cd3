"""What a saved optimizer must survive: a new process, safe loading, another residual mode, a wrong file.

torch.optim.Optimizer.load_state_dict casts every floating state tensor to the dtype of its parameter, which
would turn the float32 moments of a bfloat16 weight into bfloat16. Here dtypes stay as saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leanstep.muon.groups import group_cut
from leanstep.muon.matrices import second_shape
from leanstep.muon.residual import convert

FORMAT = 1
_LIKE_PARAM = ("momentum_buffer", "exp_avg", "exp_avg_sq", "residual")


def portable(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state without callables, which no safe loader would read back."""
    groups = [{k: v for k, v in group.items() if not callable(v)} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def check_state(name: str, param: Tensor, state: dict[str, Any] | None, group: dict[str, Any]) -> None:
    """Raise a ValueError when the state does not belong to a parameter of this shape and algorithm."""
    if not state:
        return
    needed = ("step", "exp_avg", "exp_avg_sq") if group["algorithm"] == "adam" else ("momentum_buffer",)
    for key in needed:
        if key not in state:
            raise ValueError(
                f"{name}: expected state {key!r} for algorithm {group['algorithm']!r}, got {sorted(state)}"
            )
    for key in _LIKE_PARAM:
        if key in state and state[key].shape != param.shape:
            raise ValueError(
                f"{name}: expected state {key!r} of shape {tuple(param.shape)}, got {tuple(state[key].shape)}"
            )
    if group["algorithm"] != "adam" and group["variance"] != "off":
        expected = second_shape(param.shape, group_cut(group), group["variance"])
        got = state.get("second_momentum")
        if got is None or tuple(got.shape) != expected:
            raise ValueError(
                f"{name}: expected state 'second_momentum' of shape {expected}, "
                f"got {None if got is None else tuple(got.shape)}"
            )


def check_loadable(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Compare a state dict with the optimizer it is meant for, before anything changes."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"state_dict: expected keys 'state' and 'param_groups', got {sorted(state_dict)}"
            )
    groups = state_dict["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(f"state_dict: expected {len(optimizer.param_groups)} groups, got {len(groups)}")
    for index, (group, theirs) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        version = theirs.get("format", FORMAT)
        if version != FORMAT:
            raise ValueError(f"state_dict: expected format {FORMAT}, got {version}")
        if len(group["params"]) != len(theirs["params"]):
            raise ValueError(
                f"state_dict: expected {len(group['params'])} parameters in group {index}, "
                f"got {len(theirs['params'])}"
            )
        if theirs.get("algorithm", group["algorithm"]) != group["algorithm"]:
            raise ValueError(
                f"state_dict: expected algorithm {group['algorithm']!r} in group {index}, "
                f"got {theirs['algorithm']!r}"
            )
        mine, names = group.get("param_names"), theirs.get("param_names")
        if mine and names and list(mine) != list(names):
            odd = next((a, b) for a, b in zip(mine, names, strict=True) if a != b)
            raise ValueError(f"state_dict: expected parameter {odd[0]!r} in group {index}, got {odd[1]!r}")
        for position, (param, key) in enumerate(zip(group["params"], theirs["params"], strict=True)):
            name = mine[position] if mine else f"param_{position}"
            check_state(name, param, state_dict["state"].get(key), {**group, **theirs})


def restore_dtypes(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Undo torch's cast: put the saved tensors back in their own dtype, on the parameter's device."""
    for group, theirs in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for param, key in zip(group["params"], theirs["params"], strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor):
                    device = value.device if name == "step" else param.device
                    optimizer.state[param][name] = value.detach().to(device, copy=True)


@torch.no_grad()
def convert_residuals(optimizer: torch.optim.Optimizer, group: dict[str, Any], mode: str) -> None:
    """Bring low bits saved in another mode into `mode`; the live weights move to their own rounding."""
    theirs = group["residual"]
    group["residual"] = mode
    for param in group["params"]:
        state = optimizer.state.get(param, {})
        if "residual" not in state:
            if mode != "none" and param.dtype == torch.bfloat16 and state:
                state["residual"] = torch.zeros_like(param, dtype=torch.int16)
        elif mode == "none":
            del state["residual"]
        elif theirs != mode:
            high, low = convert(param.detach(), state["residual"], theirs, mode)
            param.copy_(high)
            state["residual"] = low
