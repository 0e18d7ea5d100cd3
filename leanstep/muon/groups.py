"""Parameter groups and their options, and how a parameter is divided into matrices.

[R, C]                     one matrix
[..., R, C]                a bank: one matrix per leading index
flatten="conv"             [O, I, kh, kw] is one O x (I kh kw) matrix
split=(q, k, v)            parts along `split_dim` (0 rows, 1 columns), each orthogonalised separately
heads=n or (n_q, n_k, ..)  each part divided further into n equal matrices along `split_dim`

All of these are views of a bank [B, R, C], which every parameter is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leanstep.muon.polar import check_polar_options
from leanstep.muon.reference import shape_factor, variance_axis

Group = dict[str, Any]
Rule = Callable[[str, nn.Parameter, nn.Module], str | None]

# The record trains its matrices at 0.023 and the rest at 0.008; one `lr` sets both with this ratio.
ADAM_LR_SHARE = 0.008 / 0.023
# Options of a Muon group; the defaults are those of `NorMuon`.
MATRIX_OPTIONS = (
    "momentum", "nesterov", "beta2", "variance", "weight_decay", "decay", "lr_mul", "wd_mul", "lr_rule",
    "layout", "flatten", "split", "split_dim", "heads", "coefficients", "eps_mode", "compute_dtype",
    "residual",
)  # fmt: skip
ADAM_DEFAULTS: Group = {
    "betas": (0.9, 0.99),
    "eps": 1e-10,
    "weight_decay": 0.005,
    "decay": "cautious",
    "lr_mul": 1.0,
    "wd_mul": 1.0,
    "residual": "nearest",
}
CHOICES = {
    "algorithm": ("normuon", "muon", "adam"),
    "decay": ("cautious", "decoupled"),
    "residual": ("nearest", "truncate", "none"),
    "variance": ("long", "row", "off"),
    "layout": ("out_in", "in_out"),
    "flatten": (None, "conv"),
    "split_dim": (0, 1),
}
# Set by torch, by schedulers and by this optimizer; valid in any group.
_BOOKKEEPING = {
    "params", "param_names", "algorithm", "lr", "initial_lr", "skipped_steps", "format", "cpu_half"
}  # fmt: skip


def fill_group(group: Group, lr: float, options: Group, adam: Group) -> Group:
    """Return the group with every option present; raise a ValueError for an unknown or invalid option.

    Args:
        lr, options: defaults of a Muon group.
        adam: defaults of an Adam group, including its `lr`.
    """
    filled = {"algorithm": "normuon", **group}
    _check_choice("algorithm", filled["algorithm"])
    known = tuple(ADAM_DEFAULTS) if filled["algorithm"] == "adam" else MATRIX_OPTIONS
    for key in sorted(set(group) - set(known) - _BOOKKEEPING):
        expected = f"expected one of {', '.join(known)}"
        raise ValueError(f"{key}: unknown option for algorithm {filled['algorithm']!r}; {expected}")
    defaults = {**ADAM_DEFAULTS, **adam} if filled["algorithm"] == "adam" else {"lr": lr, **options}
    if filled["algorithm"] == "muon":
        defaults["variance"] = "off"
    filled = {**defaults, **filled}
    check_group(filled)
    return filled


def check_group(group: Group) -> None:
    """Raise a ValueError for a missing or invalid option in a group of the user or of a checkpoint."""
    for key in ("lr", *(ADAM_DEFAULTS if group["algorithm"] == "adam" else MATRIX_OPTIONS)):
        if key not in group:
            raise ValueError(f"{key}: expected a value for algorithm {group['algorithm']!r}, got none")
        if key in CHOICES:
            _check_choice(key, group[key])
    for key in ("lr", "weight_decay", "wd_mul", "eps"):
        if key in group and not 0 <= float(group[key]) < math.inf:
            raise ValueError(f"{key}: expected a finite non-negative number, got {group[key]!r}")
    multipliers = group["lr_mul"] if isinstance(group["lr_mul"], Sequence) else [group["lr_mul"]]
    if not all(math.isfinite(factor) for factor in multipliers):
        raise ValueError(f"lr_mul: expected finite numbers, got {group['lr_mul']!r}")
    if group["algorithm"] == "adam":
        if not (len(group["betas"]) == 2 and all(0 <= b < 1 for b in group["betas"])):
            raise ValueError(f"betas: expected two numbers in [0, 1), got {group['betas']!r}")
        return
    for key in ("momentum", "beta2"):
        if not 0 <= group[key] < 1:
            raise ValueError(f"{key}: expected 0 <= {key} < 1, got {group[key]!r}")
    check_polar_options(group["eps_mode"], group["compute_dtype"])
    rules, rule = ("shape", "spectral", "rms", "none"), group["lr_rule"]
    if not callable(rule) and rule not in rules:
        raise ValueError(f"lr_rule: expected one of {', '.join(rules)} or a callable, got {rule!r}")
    for triple in group["coefficients"]:
        if len(triple) != 3 or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in triple):
            raise ValueError(f"coefficients: expected finite (a, b, c) per step, got {triple!r}")
    split, heads = group["split"], group["heads"]
    if split is not None and (not split or min(split) < 1):
        raise ValueError(f"split: expected positive sizes, got {list(split)}")
    if isinstance(heads, Sequence) and len(heads) != len(split or (0,)):
        parts = len(split or (0,))
        raise ValueError(f"heads: expected one count per split part ({parts}), got {len(heads)}")


def _check_choice(key: str, value: Any) -> None:
    if value not in CHOICES[key]:
        raise ValueError(f"{key}: expected one of {', '.join(map(str, CHOICES[key]))}, got {value!r}")


def check_adam(adam: Group) -> Group:
    """Return `adam` as a new dict; raise for an option that Adam does not have."""
    for key in sorted(set(adam) - {"lr", *ADAM_DEFAULTS}):
        raise ValueError(f"adam: expected lr, {', '.join(ADAM_DEFAULTS)}, got {key!r}")
    return dict(adam)


def check_param(name: str, param: Any, group: Group) -> None:
    """Raise unless the group's algorithm can step this parameter."""
    if not isinstance(param, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(param).__name__}")
    if not param.is_floating_point() or param.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense real floating tensor, got {param.dtype} {param.layout}")
    if group["algorithm"] == "adam":
        return
    shape, dim, sizes = tuple(param.shape), group["split_dim"], group["split"]
    if len(shape) < 2 or 0 in shape:
        expected = "elements" if 0 in shape else "at least two dimensions"
        raise ValueError(f"{name}: expected {expected} in a Muon group, got shape {shape}; use an adam group")
    matrix = (shape[0], math.prod(shape[1:])) if group["flatten"] else shape[-2:]
    if sizes is not None and sum(sizes) != matrix[dim]:
        raise ValueError(
            f"{name}: expected split sizes that add up to {matrix[dim]} (dimension {dim} of {matrix}), "
            f"got {list(sizes)} = {sum(sizes)}"
        )
    heads, multipliers = group["heads"], group["lr_mul"]
    counts = heads if isinstance(heads, Sequence) else [heads or 1] * len(sizes or (0,))
    for size, count in zip(sizes or (matrix[dim],), counts, strict=True):
        if count < 1 or size % count:
            raise ValueError(f"{name}: expected heads that divide {size}, got {count}")
    if isinstance(multipliers, Sequence):
        if sizes is not None or heads is not None:
            raise ValueError(f"lr_mul: expected one number for the split {name}, got {list(multipliers)}")
        bank = param.numel() // math.prod(matrix)
        if len(multipliers) != bank:
            expected = f"a number or one per matrix of {name} ({bank})"
            raise ValueError(f"lr_mul: expected {expected}, got {len(multipliers)}")
    if not param.is_contiguous() and len(shape) > 2:
        got = f"shape {shape}, strides {param.stride()}"
        raise ValueError(f"{name}: expected a contiguous parameter, whose matrices are views, got {got}")


class Part(NamedTuple):
    """Matrices [rows, cols] of an entry of a bank: `count` pieces of `size` along `split_dim`."""

    size: int
    count: int
    rows: int
    cols: int
    axis: int  # over which the variance is averaged
    lines: int  # of the variance, per matrix


class Layout(NamedTuple):
    """How a parameter is a bank [lead..., rows, cols] whose entries have `parts`."""

    lead: tuple[int, ...]
    rows: int
    cols: int
    dim: int
    parts: tuple[Part, ...]

    @property
    def pieces(self) -> int:
        """Number of matrices that follow each other in the memory of an entry; 1 if they do not."""
        return self.parts[0].count if len(self.parts) == 1 and self.dim == 0 else 1

    @property
    def second_shape(self) -> tuple[int, ...]:
        """Shape of the variance state: [lead..., lines of all matrices of an entry]."""
        return (*self.lead, sum(part.count * part.lines for part in self.parts))


def layout_of(shape: Sequence[int], group: Group) -> Layout:
    """Return the layout of a parameter of a Muon group."""
    split, heads = group["split"], group["heads"]
    return _layout(
        tuple(shape),
        group["flatten"] is not None,
        split if split is None else tuple(split),
        group["split_dim"],
        tuple(heads) if isinstance(heads, Sequence) else heads,
        group["variance"],
    )


@functools.lru_cache(maxsize=1024)
def _layout(
    shape: tuple[int, ...], conv: bool, split: tuple[int, ...] | None, dim: int,
    heads: int | tuple[int, ...] | None, variance: str,
) -> Layout:  # fmt: skip
    lead, rows, cols = ((), shape[0], math.prod(shape[1:])) if conv else (shape[:-2], shape[-2], shape[-1])
    sizes = split or ((rows, cols)[dim],)
    counts = heads if isinstance(heads, tuple) else (heads or 1,) * len(sizes)
    pairs = list(zip(sizes, counts, strict=True))
    # Equal parts of the rows are one part: they are a bank in memory.
    if dim == 0 and len({size // count for size, count in pairs}) == 1:
        pairs = [(rows, sum(counts))]
    parts = []
    for size, count in pairs:
        r, c = (size // count, cols) if dim == 0 else (rows, size // count)
        axis = variance_axis(r, c, variance)
        parts.append(Part(size, count, r, c, axis, r if axis == -1 else c))
    return Layout(lead, rows, cols, dim, tuple(parts))


def matrix_views(tensor: Tensor, layout: Layout) -> list[Tensor]:
    """Return views [b, r, c] of a parameter, or of a tensor like it, that cover it exactly once."""
    bank = tensor.unsqueeze(0) if tensor.ndim == 2 else tensor.view(-1, layout.rows, layout.cols)
    if len(layout.parts) == 1 and (layout.dim == 0 or layout.parts[0].count == 1):
        return [bank if layout.pieces == 1 else bank.view(-1, layout.parts[0].rows, layout.cols)]
    views = []
    for part, piece in zip(
        layout.parts, bank.split([p.size for p in layout.parts], 1 + layout.dim), strict=True
    ):
        if part.count == 1:
            views.append(piece)
            continue
        # One view per entry: entries and heads of a split part have no common stride.
        for entry in piece:
            heads = entry.unflatten(layout.dim, (part.count, -1))
            views.append(heads if layout.dim == 0 else heads.movedim(1, 0))
    return views


def second_views(second: Tensor, layout: Layout) -> list[Tensor]:
    """Return the variance state of each of `matrix_views`: [b, r, 1] or [b, 1, c]."""
    parts, views = layout.parts, []
    if len(parts) == 1 and (layout.dim == 0 or parts[0].count == 1):
        return [second.view(-1, parts[0].lines).unsqueeze(parts[0].axis)]
    flat = second.view(-1, layout.second_shape[-1])
    for part, piece in zip(parts, flat.split([part.count * part.lines for part in parts], 1), strict=True):
        if part.count == 1:
            views.append(piece.unsqueeze(part.axis))
        else:
            views += [entry.view(part.count, part.lines).unsqueeze(part.axis) for entry in piece]
    return views


def rate_and_decay(group: Group, rows: int, cols: int) -> tuple[float, float]:
    """Return (rate, decay) of matrices [rows, cols] for `step.write`, without a list of multipliers."""
    lr, multiplier, rule = float(group["lr"]), group["lr_mul"], group["lr_rule"]
    if group["layout"] == "in_out":
        rows, cols = cols, rows
    factor = shape_factor(rows, cols, rule) if isinstance(rule, str) else float(rule(rows, cols))
    if not math.isfinite(factor):
        raise ValueError(f"lr_rule: expected a finite factor for {rows} x {cols}, got {factor}")
    rate = lr * factor * (1.0 if isinstance(multiplier, Sequence) else multiplier)
    return rate, float(group["weight_decay"]) * group["wd_mul"] * lr


def adam_lr_and_decay(group: Group) -> tuple[float, float]:
    """Return (rate, decay factor) of an Adam group; cautious decay scales with the square of the rate."""
    base = float(group["lr"])
    lr = base * float(group["lr_mul"])
    strength = float(group["weight_decay"]) * group["wd_mul"]
    return lr, (lr * lr if group["decay"] == "cautious" else base) * strength


@dataclass(frozen=True)
class Choice:
    """One row of the table that `ParamSplit` prints."""

    name: str
    shape: tuple[int, ...]
    algorithm: str
    reason: str


class ParamSplit(list):
    """Parameter groups for `NorMuon`, a list of dicts; `print` shows the group of each parameter and why."""

    def __init__(self, groups: Iterable[dict[str, Any]], choices: Iterable[Choice]) -> None:
        super().__init__(groups)
        self.choices = tuple(choices)

    def __str__(self) -> str:
        name = max([4, *(len(c.name) for c in self.choices)])
        shape = max([5, *(len("x".join(map(str, c.shape))) for c in self.choices)])
        lines = [f"{'name':{name}}  {'shape':{shape}}  algorithm  reason"]
        for c in self.choices:
            size = "x".join(map(str, c.shape))
            lines.append(f"{c.name:{name}}  {size:{shape}}  {c.algorithm:9}  {c.reason}")
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
