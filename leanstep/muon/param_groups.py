"""Parameter groups and their options, and how a parameter is divided into matrices.

[R, C]                     one matrix
[..., R, C]                a bank: one matrix per leading index
flatten="conv"             [O, I, kh, kw] is one O x (I kh kw) matrix
split=(q, k, v)            parts along `split_dim` (0 rows, 1 columns), each orthogonalised separately
heads=n or (n_q, n_k, ..)  each part divided further into n equal matrices along `split_dim`

All of these are views. `Entry` holds what depends on shape and options only, computed once per parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from leanstep.cpu import cpu_bfloat16_speedup
from leanstep.muon.polar import EPS_MODES, METHODS, MIN_HALF_SPEEDUP, PolarPlan, plan_polar
from leanstep.muon.reference import shape_factor, variance_axis

Group = dict[str, Any]
Rule = Callable[[str, nn.Parameter, nn.Module], str | None]

ALGORITHMS = ("normuon", "muon", "adam")
LR_RULES = ("shape", "spectral", "rms", "none")
# The record trains its matrices at 0.023 and the rest at 0.008; one `lr` sets both with this ratio.
ADAM_LR_SHARE = 0.008 / 0.023

# Options of a Muon group; the defaults are those of `NorMuon`.
MATRIX_OPTIONS = (
    "momentum",
    "nesterov",
    "beta2",
    "variance",
    "weight_decay",
    "decay",
    "lr_mul",
    "wd_mul",
    "lr_rule",
    "layout",
    "flatten",
    "split",
    "split_dim",
    "heads",
    "coefficients",
    "eps_mode",
    "method",
    "restart",
    "panels",
    "compute_dtype",
    "residual",
    "every",
    "phase",
)
ADAM_DEFAULTS: Group = {
    "betas": (0.9, 0.99),
    "eps": 1e-10,
    "weight_decay": 0.005,
    "decay": "cautious",
    "lr_mul": 1.0,
    "wd_mul": 1.0,
    "residual": "nearest",
    "every": 1,
    "phase": 0,
    "sparse_rows": False,
}
# Set by torch, by schedulers and by this optimizer; valid in any group.
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
# Options that determine the matrices of a parameter, their plans and rates.
_SHAPING = (
    "algorithm",
    "flatten",
    "split",
    "split_dim",
    "heads",
    "variance",
    "lr_rule",
    "layout",
    "method",
    "restart",
    "panels",
    "compute_dtype",
    "cpu_half",
)


def fill_group(group: Group, lr: float, options: Group, adam: Group) -> Group:
    """Return the group with every option present; raise a ValueError for an unknown or invalid option.

    Args:
        lr, options: defaults of a Muon group.
        adam: defaults of an Adam group, including its `lr`.
    """
    algorithm = group.get("algorithm", "normuon")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: expected one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    known = tuple(ADAM_DEFAULTS) if algorithm == "adam" else MATRIX_OPTIONS
    unknown = sorted(set(group) - set(known) - _BOOKKEEPING)
    if unknown:
        raise ValueError(
            f"{unknown[0]}: unknown option for algorithm {algorithm!r}; expected one of {', '.join(known)}"
        )
    defaults = {**ADAM_DEFAULTS, **adam} if algorithm == "adam" else {"lr": lr, **options}
    if algorithm == "muon":
        defaults["variance"] = "off"
    filled = {**defaults, **group, "algorithm": algorithm}
    check_group(filled)
    return filled


def check_group(group: Group) -> None:
    """Raise a ValueError for a missing or invalid option in a group of the user or of a checkpoint."""
    needed = ADAM_DEFAULTS if group["algorithm"] == "adam" else MATRIX_OPTIONS
    missing = [key for key in ("lr", *needed) if key not in group]
    if missing:
        raise ValueError(f"{missing[0]}: expected a value for algorithm {group['algorithm']!r}, got none")
    _check_numbers(group)
    _check_choices(group)


def check_adam(adam: Group) -> Group:
    """Return `adam` as a new dict; raise for an option that Adam does not have."""
    unknown = sorted(set(adam) - {"lr", *ADAM_DEFAULTS})
    if unknown:
        raise ValueError(f"adam: expected lr, {', '.join(ADAM_DEFAULTS)}, got {unknown[0]!r}")
    return dict(adam)


def _check_numbers(group: Group) -> None:
    for key in ("lr", "weight_decay", "wd_mul", "eps"):
        if key in group and not 0 <= float(group[key]) < math.inf:
            raise ValueError(f"{key}: expected a finite non-negative number, got {group[key]!r}")
    multipliers = group["lr_mul"] if isinstance(group["lr_mul"], Sequence) else [group["lr_mul"]]
    if not all(math.isfinite(factor) for factor in multipliers):
        raise ValueError(f"lr_mul: expected finite numbers, got {group['lr_mul']!r}")
    for key in ("momentum", "beta2"):
        if key in group and not 0 <= group[key] < 1:
            raise ValueError(f"{key}: expected 0 <= {key} < 1, got {group[key]!r}")
    if "betas" in group and not (len(group["betas"]) == 2 and all(0 <= b < 1 for b in group["betas"])):
        raise ValueError(f"betas: expected two numbers in [0, 1), got {group['betas']!r}")
    if not isinstance(group["every"], int) or group["every"] < 1:
        raise ValueError(f"every: expected a positive int, got {group['every']!r}")
    if not isinstance(group["phase"], int) or not 0 <= group["phase"] < group["every"]:
        raise ValueError(f"phase: expected an int in [0, {group['every']}), got {group['phase']!r}")


def _check_choices(group: Group) -> None:
    choices = {
        "decay": ("cautious", "decoupled"),
        "residual": ("nearest", "truncate", "none"),
        "variance": ("long", "row", "off"),
        "eps_mode": EPS_MODES,
        "method": METHODS,
        "layout": ("out_in", "in_out"),
    }
    for key, allowed in choices.items():
        if key in group and group[key] not in allowed:
            raise ValueError(f"{key}: expected one of {', '.join(allowed)}, got {group[key]!r}")
    if not isinstance(group.get("sparse_rows", False), bool):
        raise ValueError(f"sparse_rows: expected True or False, got {group['sparse_rows']!r}")
    dtype = group.get("compute_dtype", "auto")
    if dtype != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"compute_dtype: expected 'auto' or a floating-point dtype, got {dtype!r}")
    rule = group.get("lr_rule", "none")
    if not callable(rule) and rule not in LR_RULES:
        raise ValueError(f"lr_rule: expected one of {', '.join(LR_RULES)} or a callable, got {rule!r}")
    for triple in group.get("coefficients", ()):
        if len(triple) != 3 or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in triple):
            raise ValueError(f"coefficients: expected finite (a, b, c) per step, got {triple!r}")


def check_params(group: Group, names: list[str]) -> None:
    """Raise unless the group's algorithm can step every parameter of the group."""
    if not group["params"]:
        raise ValueError("params: expected at least one parameter in every group, got an empty group")
    for name, param in zip(names, group["params"], strict=True):
        if not isinstance(param, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(param).__name__}")
        if not param.is_floating_point() or param.layout != torch.strided:
            raise ValueError(
                f"{name}: expected a dense real floating tensor, got {param.dtype} {param.layout}"
            )
        if group.get("sparse_rows") and param.ndim < 2:
            raise ValueError(
                f"sparse_rows: expected tables [rows, ...], got {name} of shape {tuple(param.shape)}"
            )
        if group["algorithm"] != "adam":
            check_cut(name, param.shape, group_cut(group))
            _check_multipliers(name, param, group)


def _check_multipliers(name: str, param: Tensor, group: Group) -> None:
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


@dataclass(frozen=True)
class Cut:
    """How `matrix_views` divides a parameter into matrices; the default leaves it whole."""

    flatten: str | None = None
    split: tuple[int, ...] | None = None
    split_dim: int = 0
    heads: int | tuple[int, ...] | None = None

    @property
    def whole(self) -> bool:
        return self.split is None and self.heads is None


def make_cut(
    flatten: str | None = None,
    split: Sequence[int] | None = None,
    split_dim: int = 0,
    heads: int | Sequence[int] | None = None,
) -> Cut:
    """Check the options and return a Cut; sequences become tuples."""
    if flatten not in (None, "conv"):
        raise ValueError(f"flatten: expected None or 'conv', got {flatten!r}")
    if split_dim not in (0, 1):
        raise ValueError(f"split_dim: expected 0 (rows) or 1 (columns), got {split_dim!r}")
    parts = None if split is None else tuple(int(size) for size in split)
    if parts is not None and (not parts or min(parts) < 1):
        raise ValueError(f"split: expected positive sizes, got {list(parts)}")
    counts = heads if heads is None or isinstance(heads, int) else tuple(int(n) for n in heads)
    if isinstance(counts, tuple) and len(counts) != len(parts or (0,)):
        raise ValueError(
            f"heads: expected one count per split part ({len(parts or (0,))}), got {len(counts)}"
        )
    return Cut(flatten, parts, split_dim, counts)


def group_cut(group: Group) -> Cut:
    """Return the Cut of a Muon group."""
    return make_cut(group["flatten"], group["split"], group["split_dim"], group["heads"])


def check_cut(name: str, shape: Sequence[int], cut: Cut) -> None:
    """Raise a ValueError that names the parameter if it cannot be divided this way."""
    shape = tuple(shape)
    if len(shape) < 2:
        raise ValueError(
            f"{name}: expected at least two dimensions for a Muon group, got shape {shape}; use an adam group"
        )
    if 0 in shape:
        raise ValueError(f"{name}: expected elements in a Muon group, got shape {shape}; use an adam group")
    if cut.flatten == "conv":
        shape = (shape[0], torch.Size(shape[1:]).numel())
    length = shape[-2 + cut.split_dim]
    if cut.split is not None and sum(cut.split) != length:
        raise ValueError(
            f"{name}: expected split sizes that add up to {length} (dimension {cut.split_dim} of {shape}), "
            f"got {list(cut.split)} = {sum(cut.split)}"
        )
    parts = cut.split or (length,)
    for part, count in zip(parts, _head_counts(cut, len(parts)), strict=True):
        if count < 1 or part % count:
            raise ValueError(f"{name}: expected heads that divide {part}, got {count}")


def _head_counts(cut: Cut, num_parts: int) -> tuple[int, ...]:
    if isinstance(cut.heads, tuple):
        return cut.heads
    return (cut.heads or 1,) * num_parts


def matrix_views(tensor: Tensor, cut: Cut) -> list[Tensor]:
    """Return views of `tensor`, each [B, R, C], that together cover it exactly once."""
    if cut.flatten == "conv":
        tensor = tensor.view(tensor.size(0), -1)
    bank = tensor.unsqueeze(0) if tensor.ndim == 2 else tensor.view(-1, *tensor.shape[-2:])
    if cut.whole:
        return [bank]
    dim = 1 + cut.split_dim
    parts = bank.split(cut.split, dim) if cut.split else (bank,)
    views = []
    for part, count in zip(parts, _head_counts(cut, len(parts)), strict=True):
        if count == 1:
            views.append(part)
            continue
        # One view per bank entry: entries and heads of a split part have no common stride.
        for matrix in part:
            heads = matrix.unflatten(cut.split_dim, (count, -1))
            views.append(heads if cut.split_dim == 0 else heads.movedim(1, 0))
    return views


def second_shape(shape: Sequence[int], cut: Cut, per: str) -> tuple[int, ...]:
    """Return the shape of the variance state: [..., R, 1] or [..., 1, C]; flat for a divided parameter."""
    if cut.flatten == "conv":
        shape = (shape[0], torch.Size(shape[1:]).numel())
    if cut.whole:
        reduced = list(shape)
        reduced[variance_axis(shape[-2], shape[-1], per)] = 1
        return tuple(reduced)
    views = matrix_views(_on_meta(shape), Cut(None, cut.split, cut.split_dim, cut.heads))
    return (sum(_lines(view, per) for view in views),)


def _lines(view: Tensor, per: str) -> int:
    batch, rows, cols = view.shape
    return batch * (rows if variance_axis(rows, cols, per) == -1 else cols)


def second_views(second: Tensor, views: list[Tensor], cut: Cut, per: str) -> list[Tensor]:
    """Return the variance state of each matrix view, [B, R, 1] or [B, 1, C]."""
    if cut.whole:
        return [second.view(-1, *second.shape[-2:])]
    parts = second.split([_lines(view, per) for view in views])
    shaped = []
    for part, (batch, rows, cols) in zip(parts, (view.shape for view in views), strict=True):
        last = variance_axis(rows, cols, per) == -1
        shaped.append(part.view(batch, rows, 1) if last else part.view(batch, 1, cols))
    return shaped


@dataclass(frozen=True)
class Form:
    """Properties shared by the matrices of one shape in a parameter."""

    count: int
    plan: PolarPlan
    rate: float


@dataclass(frozen=True)
class Entry:
    """A parameter in its group, with values derived from shape and options once instead of every step.

    Args:
        key: shape and options of this entry; a different key needs a new entry.
        cut: how the parameter is divided into matrices. None for Adam, like the next two.
        forms: (rows, cols) -> number of such matrices, their polar plan, their learning-rate factor.
        second_shape: shape of the variance state; None without one. constants: cached small device tensors.
    """

    name: str
    group: Group
    param: Tensor
    key: tuple
    cut: Cut | None = None
    forms: dict[tuple[int, int], Form] | None = None
    second_shape: tuple[int, ...] | None = None
    constants: dict[Any, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_adam(self) -> bool:
        return self.forms is None

    def flops(self) -> float:
        """Return the operations of one step, for assigning work; Adam counts as 12 per element."""
        if self.forms is None:
            return 12.0 * self.param.numel()
        steps = len(self.group["coefficients"])
        return sum(form.count * form.plan.flops(steps) for form in self.forms.values())


def entry_key(group: Group, param: Tensor) -> tuple:
    """Return everything an `Entry` depends on. Lists become tuples, so that in-place changes are noticed."""
    options = [tuple(v) if isinstance(v, list) else v for v in map(group.get, _SHAPING)]
    return (*options, param.shape, param.dtype, param.device)


def make_entry(name: str, group: Group, param: Tensor) -> Entry:
    """Compute the matrices, plans and rates of a parameter."""
    if group["algorithm"] == "adam":
        return Entry(name, group, param, entry_key(group, param))
    # Measured once and saved with the group: a resumed run must use the same arithmetic.
    if group["compute_dtype"] == "auto" and param.device.type == "cpu" and "cpu_half" not in group:
        group["cpu_half"] = cpu_bfloat16_speedup() > MIN_HALF_SPEEDUP
    cut, forms = group_cut(group), {}
    for count, rows, cols in (view.shape for view in matrix_views(_on_meta(param.shape), cut)):
        if (rows, cols) in forms:
            known = forms[rows, cols]
            forms[rows, cols] = Form(known.count + count, known.plan, known.rate)
            continue
        forced = {key: group[key] for key in ("method", "restart", "panels", "compute_dtype")}
        half = group.get("cpu_half")
        plan = plan_polar(rows, cols, device=param.device, dtype=param.dtype, cpu_half=half, **forced)
        forms[rows, cols] = Form(count, plan, _rate_factor(group, rows, cols))
    second = None if group["variance"] == "off" else second_shape(param.shape, cut, group["variance"])
    return Entry(name, group, param, entry_key(group, param), cut, forms, second)


def _rate_factor(group: Group, rows: int, cols: int) -> float:
    if group["layout"] == "in_out":
        rows, cols = cols, rows
    rule = group["lr_rule"]
    if isinstance(rule, str):
        return shape_factor(rows, cols, rule)
    factor = float(rule(rows, cols))
    if not math.isfinite(factor):
        raise ValueError(f"lr_rule: expected a finite factor for {rows} x {cols}, got {factor}")
    return factor


def _on_meta(shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), device="meta")


@dataclass(frozen=True)
class Choice:
    """One row of the table that `ParamSplit` prints."""

    name: str
    shape: tuple[int, ...]
    algorithm: str
    reason: str


class ParamSplit(list):
    """Parameter groups for `NorMuon`, a list of dicts; `print` it to see the group of each parameter and why.

    Example:
        matrices = [c.name for c in split_params(model).choices if c.algorithm == "normuon"]   # [R, C] each
    """

    def __init__(self, groups: Iterable[dict[str, Any]], choices: Iterable[Choice]) -> None:
        super().__init__(groups)
        self.choices = tuple(choices)

    def __str__(self) -> str:
        name = max([4, *(len(c.name) for c in self.choices)])
        shape = max([5, *(len("x".join(map(str, c.shape))) for c in self.choices)])
        lines = [f"{'name':{name}}  {'shape':{shape}}  algorithm  reason"]
        for c in self.choices:
            lines.append(
                f"{c.name:{name}}  {'x'.join(map(str, c.shape)):{shape}}  {c.algorithm:9}  {c.reason}"
            )
        return "\n".join(lines)


def split_params(
    model: nn.Module,
    rule: Rule | None = None,
    *,
    muon: dict[str, Any] | None = None,
    adam: dict[str, Any] | None = None,
    algorithm: str = "normuon",
) -> ParamSplit:
    """Sort the trainable parameters of `model` into a Muon group and an Adam group.

    Parameter names are not used. A parameter is a matrix for Muon if it has two or more dimensions and is
    neither an embedding table nor the output head (a layer with as many outputs as an embedding has entries).

    Example:
        groups = split_params(model, muon={"momentum": 0.9})
        optimizer = NorMuon(groups, lr=0.02)                # [R, C] and [..., R, C]: Muon; the rest: Adam

    Args:
        rule: (name, parameter, owning module) -> "normuon", "muon", "adam", or None for the default.
        muon, adam: options of the two groups, e.g. muon={"momentum": 0.9}.
        algorithm: default algorithm of matrices, normuon or muon.

    Returns:
        A list of groups for `NorMuon`; tied parameters appear once, frozen parameters do not appear.
    """
    if algorithm not in ("normuon", "muon"):
        raise ValueError(f"algorithm: expected 'normuon' or 'muon', got {algorithm!r}")
    # Reversed: if several modules share a parameter, the first one is its owner.
    modules = reversed(list(model.modules()))
    owners = {id(p): module for module in modules for p in module.parameters(recurse=False)}
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    choices, groups = [], {"normuon": [], "muon": [], "adam": []}
    for name, param in model.named_parameters():
        owner = owners[id(param)]
        asked = rule(name, param, owner) if rule and param.requires_grad else None
        if asked is None:
            kind, reason = _default_choice(param, owner, tables, algorithm)
        elif asked in groups:
            kind, reason = asked, "chosen by the rule"
        else:
            raise ValueError(f"rule: expected normuon, muon, adam or None for {name}, got {asked!r}")
        choices.append(Choice(name, tuple(param.shape), kind, reason))
        if kind in groups:
            groups[kind].append((name, param))
    if not any(groups.values()):
        raise ValueError("model: expected at least one trainable parameter, got none")
    options = {"normuon": muon or {}, "muon": muon or {}, "adam": adam or {}}
    return ParamSplit(
        ({"params": params, "algorithm": kind, **options[kind]} for kind, params in groups.items() if params),
        choices,
    )


def _default_choice(
    param: Tensor, owner: nn.Module, tables: Sequence[nn.Embedding | nn.EmbeddingBag], algorithm: str
) -> tuple[str, str]:
    """Return (algorithm, reason) for a parameter without a rule."""
    if not param.requires_grad:
        return "frozen", "does not require a gradient"
    if param.ndim < 2:
        return "adam", f"{param.ndim}-D"
    if param.numel() == 0:
        return "adam", "no elements"
    if any(param is table.weight for table in tables):
        return "adam", "embedding table"
    if isinstance(owner, nn.Linear) and any(owner.out_features == table.num_embeddings for table in tables):
        return "adam", f"output head: {owner.out_features} outputs, as many as an embedding has entries"
    if param.ndim == 2:
        return algorithm, f"matrix of {type(owner).__name__}"
    if isinstance(owner, nn.modules.conv._ConvNd):
        return "adam", "convolution; a group with flatten='conv' steps it as a matrix"
    return algorithm, f"bank of {param.numel() // (param.size(-1) * param.size(-2))} matrices"
