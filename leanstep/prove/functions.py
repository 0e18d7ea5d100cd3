"""Check that two functions compute the same outputs and gradients, on inputs that real bugs needed.

    leanstep prove heads.py:plain heads.py:fused

Inputs come from `inputs()` in the file, or are drawn from the signature. Each is drawn several times:
strided, as a view of a custom Function's result, tiny, confident, extreme, with an odd number of rows, in
bf16, with a NaN. The upstream gradient is random. A result may be five times as far from the fp64 run of the
first function as the first function itself, plus a floor. A draw on which the first function is far from
fp64, or on which the truth is zero, judges nothing. If no draw judges an output or a gradient, there is no
verdict.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import itertools
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from leanstep.files import BadInput
from leanstep.measure.parity import dtype_name
from leanstep.prove.interpret import interpret_kernels
from leanstep.prove.twin import Twin
from leanstep.prove.watch import NoDropout, custom_functions
from leanstep.tape.children import (
    ended_afterwards,
    how_it_ended,
    log_to,
    start,
    temporary_folder,
    wait_all,
    write_result,
)
from leanstep.tape.run import one_line

# A candidate may round more than the rule for scripts allows: kernels sum in other orders, and large or
# confident values amplify it. The bugs that this finds are orders of magnitude larger.
FACTOR = 5.0
FLOORS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}
# The first function must be this close to fp64 on a draw that judges.
UNSURE = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 1e-2, torch.bfloat16: 2e-2}
# How much larger the floor is on tiny, confident and extreme values.
UNUSUAL = 30.0
# No bound exceeds this: the answer would be half wrong.
MOST = 0.5
# Where the truth is zero: a result larger than this, relative to the upstream gradient, is wrong.
NOT_ZERO = 1e-3
ROWS, WIDTH, CLASSES = 24, 16, 37


@dataclass(frozen=True)
class Draw:
    """One way to draw the inputs."""

    layout: str = "contiguous"
    values: str = "normal"
    dtype: torch.dtype | None = None
    odd: bool = False

    @property
    def name(self) -> str:
        words = [self.layout * (self.layout != "contiguous"), self.values * (self.values != "normal")]
        words += ["odd number of rows" * self.odd, dtype_name(self.dtype) if self.dtype else ""]
        return ", ".join(word for word in words if word) or "as given"


BF16 = torch.bfloat16
DRAWS = [
    Draw(),
    Draw("strided"),
    Draw("view"),
    Draw(values="tiny"),
    Draw(values="confident"),
    Draw(values="extreme"),
    Draw(odd=True),
    Draw(dtype=BF16),
    Draw(values="confident", dtype=BF16),
    Draw("strided", dtype=BF16),
    Draw(values="NaN"),
]


@dataclass
class FunctionRow:
    """An output or a gradient on one draw. `sure` False: this draw judges nothing about it."""

    what: str
    draw: str
    error: float
    reference_error: float
    bound: float
    ok: bool
    sure: bool
    words: str = ""


@dataclass
class FunctionsProof:
    """The result of `prove FILE.py:before FILE.py:after`."""

    before: str
    after: str
    rows: list[FunctionRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    draws: bool = False
    problem: str | None = None

    @property
    def failed(self) -> list[FunctionRow]:
        return [row for row in self.rows if not row.ok]

    @property
    def ok(self) -> bool:
        return self.problem is None and bool(self.rows) and not self.failed

    def sentence(self) -> str:
        if self.problem is not None:
            return self.problem
        if not self.failed:
            judged = [row for row in self.rows if row.sure]
            draws = len({row.draw for row in judged})
            return f"the same function: {len(judged)} checks of outputs and gradients over {draws} draws hold"
        first = self.failed[0]
        draws = list(dict.fromkeys(row.draw for row in self.failed if row.what == first.what))
        others = list(dict.fromkeys(row.what for row in self.failed if row.what != first.what))
        judged = {row.draw for row in self.rows if row.what == first.what and (row.sure or not row.ok)}
        where = (
            "on every draw"
            if set(draws) >= judged
            else f"on {len(draws)} of {len(judged)} draws ({'; '.join(draws[:4])})"
        )
        text = f"not the same function: {first.what} {first.words} {where}"
        if others:
            text += f"; also {', '.join(others[:4])}"
        if first.what.startswith("the gradient"):
            at = f" of {', '.join(self.functions[:3])}" if self.functions else ""
            text += f". The outputs agree: look at the backward{at}"
        return text

    def to_json(self) -> dict[str, Any]:
        return {
            "before": self.before,
            "after": self.after,
            "ok": self.ok,
            "verdict": self.sentence(),
            "problem": self.problem,
            "notes": self.notes,
            "rows": [asdict(row) for row in self.rows],
        }


# Drawing.


class _Viewed(torch.autograd.Function):
    """What a fused layer in front of the function returns: a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1]).clone().view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def _strided(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x * 1,
    "strided": lambda x: _strided(x * 1),
    "view": lambda x: _Viewed.apply(x),  # type: ignore[no-any-return]
}


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def drawn(inputs: Callable[[], Any], draw: Draw) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call `inputs` and change a copy of what it returns as `draw` says.

    If some of its tensors require gradients, only those get them; else all do, except masks of zeros and
    ones.
    """
    torch.manual_seed(0)
    arguments = inputs()
    args, kwargs = (), {}
    if isinstance(arguments, dict):
        kwargs = arguments
    else:
        args = tuple(arguments) if isinstance(arguments, (tuple, list)) else (arguments,)
    floats = [t for t in tree_flatten((args, kwargs))[0] if _is_float(t)]
    asked = [t for t in floats if t.requires_grad] or [t for t in floats if not _is_mask(t)]
    chosen = {id(t) for t in asked}

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(id(tensor) in chosen)

    with_flags = tree_map_only(Tensor, copied, (args, kwargs))
    flags = [t.requires_grad for t in tree_flatten(with_flags)[0] if isinstance(t, Tensor)]
    args, kwargs = tree_map_only(Tensor, Tensor.detach, with_flags)
    leaves = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor) and t.dim() > 0]
    floats = [t for t in leaves if t.is_floating_point()]
    if draw.dtype is not None and all(t.dtype is draw.dtype for t in floats) and draw.values == "normal":
        draw = Draw(draw.layout, draw.values, None)
    if draw.odd and leaves:
        rows = leaves[0].shape[0]
        odd = rows - 1 - rows % 2
        cut = lambda t: t[:odd].clone() if t.dim() and t.shape[0] == rows else t  # noqa: E731
        args, kwargs = tree_map_only(Tensor, cut, (args, kwargs))
        leaves = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor) and t.dim() > 0]
        floats = [t for t in leaves if t.is_floating_point()]
    if floats:
        _set_values(floats, [t for t in leaves if t.dtype in (torch.int64, torch.int32)], draw.values)
    if draw.dtype is not None:
        narrow = lambda t: _without_ties(t.to(draw.dtype)) if t.is_floating_point() else t  # noqa: E731
        args, kwargs = tree_map_only(Tensor, narrow, (args, kwargs))
    for tensor, flag in zip(
        [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)], flags, strict=True
    ):
        tensor.requires_grad_(flag)
    return args, kwargs


def _without_ties(tensor: Tensor) -> Tensor:
    """Move equal neighbors of a sorted row to the next bf16 number: a maximum or a top-k is then unique."""
    if tensor.dim() == 0 or tensor.dtype is not BF16 or _is_mask(tensor):
        return tensor
    values, order = tensor.sort(-1)
    for _ in range(8):
        bits = values.contiguous().view(torch.int16)
        ties = (values[..., 1:] == values[..., :-1]).to(torch.int16)
        bits[..., 1:] += ties * torch.where(values[..., 1:] < 0, -1, 1).to(torch.int16)
        values = bits.view(BF16).sort(-1).values
    return torch.empty_like(values).scatter_(-1, order, values)


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dim() > 0 and bool(((tensor == 0) | (tensor == 1)).all())


def _set_values(floats: list[Tensor], ids: list[Tensor], values: str) -> None:
    """Change the first float input in place; `confident`: the class of each id gets a large score."""
    main = next((t for t in floats if not _is_mask(t)), None)
    if main is None:
        return
    floats = [main, *(t for t in floats if t is not main)]
    if values in ("tiny", "extreme"):
        main.mul_(1e-3 if values == "tiny" else 100.0)
    elif values == "NaN":
        main.view(-1)[: main.shape[-1]] = float("nan")
    elif values == "confident":
        index = next((i for i in ids if i.shape == main.shape[:-1]), None)
        scores = (
            index is not None
            and index.numel() > 0
            and 0 <= int(index.min())
            and int(index.max()) < main.shape[-1]
        )
        weight = next((t for t in floats[1:] if t.dim() == 2 and t.shape[1] == main.shape[-1]), None)
        if (
            index is not None
            and weight is not None
            and int(index.min()) >= 0
            and int(index.max()) < len(weight)
        ):
            classes = weight[index]
            main.add_(12.0 * classes / classes.square().sum(-1, keepdim=True).clamp_min(1e-6))
        elif scores and index is not None:
            main.mul_(0.3).scatter_add_(-1, index[..., None].long(), torch.full_like(main, 12.0)[..., :1])
        else:
            main.mul_(12.0)


_IDS = ("id", "ids", "label", "labels", "target", "targets", "token", "tokens", "index", "y", "classes")
_ROW = ("logp", "logprob", "logprobs", "old", "ref", "advantage", "advantages", "reward", "rewards", "value")
_ROW += (
    "values",
    "returns",
    "ratio",
    "old_logp",
    "ref_logp",
    "old_logprobs",
    "ref_logprobs",
    "chosen",
    "rejected",
)


def from_signature(function: Callable[..., Any]) -> Callable[[], Any]:
    """Return an `inputs()` that the function accepts: shapes are guessed from names, then tried.

    Parameters with a default keep it. Raises BadInput if no guess works.
    """
    required = [
        parameter
        for parameter in _signature(function).parameters.values()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    names = [parameter.name for parameter in required]
    by_name = any(parameter.kind is parameter.KEYWORD_ONLY for parameter in required)
    error = "no parameters"
    for batch in ((ROWS,), (4, ROWS // 4)):
        for shapes in itertools.islice(
            itertools.product(*(list(_guesses(name, batch)) for name in names)), 200
        ):

            def make(shapes: tuple[Callable[[], Tensor], ...] = shapes) -> Any:
                drawn = [shape() for shape in shapes]
                return dict(zip(names, drawn, strict=True)) if by_name else tuple(drawn)

            try:
                torch.manual_seed(0)
                values = tree_map_only(Tensor, Tensor.detach, make())
                function(**values) if by_name else function(*values)
                if names:
                    return make
            except Exception as raised:
                error = one_line(raised)
    name = getattr(function, "__name__", "function")
    raise BadInput(
        f"{name}: no inputs fit the signature ({error}); define inputs() in the file, returning its arguments"
    )


def _guesses(name: str, batch: tuple[int, ...]) -> Iterator[Callable[[], Tensor]]:
    low = name.lower()
    if low in _IDS or low.endswith(("_ids", "labels", "targets", "_index")):
        yield lambda: torch.randint(WIDTH, batch)
    elif "mask" in low:
        yield lambda: (torch.rand(batch) > 0.3).float()
        yield lambda: torch.rand(batch) > 0.3
    elif low in ("w", "weight", "head", "lm_head", "weights") or low.endswith("_weight"):
        for shape in ((CLASSES, WIDTH), (WIDTH,), (WIDTH, WIDTH), (WIDTH, CLASSES)):
            yield lambda shape=shape: (torch.randn(shape) / 4).requires_grad_()
    elif low in ("b", "bias") or low.endswith("_bias"):
        for size in (CLASSES, WIDTH):
            yield lambda size=size: torch.randn(size).requires_grad_()
    elif low in _ROW or low.endswith(("logps", "logp", "logprobs")):
        # A reward or an old policy is not trained.
        trained = low.startswith(("logp", "value", "ratio", "chosen", "rejected"))
        yield lambda: torch.randn(batch).requires_grad_(trained)
    else:
        for shape in ((*batch, WIDTH), batch, (WIDTH,), (WIDTH, WIDTH), ()):
            yield lambda shape=shape: torch.randn(shape).requires_grad_()


# Running and judging.


@dataclass
class _Run:
    """Outputs by name, gradients by the name of an argument or parameter, and what else a call showed."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    functions: list[str]
    upstream: float
    changed: list[str]
    draws: bool
    arguments: dict[str, Tensor]


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except ValueError:
        # Functions of torch that are written in C++ have none.
        return inspect.Signature()


def _named(value: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor and number of a result with its name: "", "0", "1", "loss", "1 loss"."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, (bool, int, float)):
        yield place, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    elif isinstance(value, (tuple, list, dict)) or is_dataclass(value):
        fields = value if isinstance(value, (tuple, list, dict)) else vars(value)
        for name, each in fields.items() if isinstance(fields, dict) else enumerate(fields):
            yield from _named(each, f"{place} {name}".strip())
    elif value is not None and not isinstance(value, str):
        raise BadInput(f"returns a {type(value).__name__}; expected tensors, numbers, tuples or dicts")


def _own_tensors(function: Callable[..., Any]) -> dict[str, Tensor]:
    """Return the parameters and buffers that a module, a method or a function with globals computes with."""
    owner = getattr(function, "__self__", function)
    if isinstance(owner, nn.Module):
        return {**dict(owner.named_parameters()), **dict(owner.named_buffers())}
    code, tensors = getattr(function, "__code__", None), {}
    scope = dict(getattr(function, "__globals__", {}))
    if code is not None:
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)  # type: ignore[attr-defined]
        scope |= {name: cell.cell_contents for name, cell in cells}
    for name in (*code.co_names, *code.co_freevars) if code is not None else ():
        value = scope.get(name)
        if isinstance(value, nn.Module):
            tensors |= {f"{name}.{key}": tensor for key, tensor in _own_tensors(value).items()}
        elif isinstance(value, Tensor) and value.is_leaf:
            tensors[name] = value
    return tensors


@contextlib.contextmanager
def _with_values(own: dict[str, Tensor], values: dict[str, Tensor]) -> Iterator[None]:
    """Give a function's own tensors these values, of any dtype; restore values and gradients afterwards."""
    originals = {name: (tensor.data, tensor.grad) for name, tensor in own.items()}
    for name, tensor in own.items():
        tensor.grad, tensor.data = None, values[name].clone()
    try:
        yield
    finally:
        for name, tensor in own.items():
            tensor.grad = None
            tensor.data, tensor.grad = originals[name]


def _run(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    layout: str,
    names: list[str],
    own: dict[str, Tensor],
) -> _Run:
    """Call the function on fresh leaves, and its backward with a random upstream gradient."""
    leaves: dict[str, Tensor] = {}
    used: dict[str, tuple[Tensor, int]] = {}
    named = iter(names)

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        name, value, flag = next(named), value.detach().clone(), value.requires_grad
        if value.is_floating_point():
            if flag:
                leaves[name] = value.requires_grad_()
            value = _LAYOUTS[layout](value) if value.dim() > 1 else value * 1
        used[name] = (value, value._version)
        return value

    args, kwargs = tree_map(leaf, (args, kwargs))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    outputs = dict(_named(function(*args, **kwargs)))
    draws = not torch.equal(state, torch.get_rng_state())
    changed = [name for name, (value, version) in used.items() if value._version != version]
    customs = custom_functions(list(outputs.values()))
    # The same order for every run: the keys of a dict may come in another one.
    moving = [outputs[name] for name in sorted(outputs) if outputs[name].requires_grad]
    if outputs:
        # Without a result, a function that works in place is run for the values, as an optimizer is.
        moving += [used[name][0] for name in changed if used[name][0].requires_grad]
    generator = torch.Generator().manual_seed(2)
    upstream = []
    for tensor in moving:
        # Drawn in fp32 in every run; a loss gets one number near one.
        drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        drawn = drawn.abs() + 0.5 if tensor.dim() == 0 else drawn
        drawn = drawn.to(tensor.device, tensor.dtype)
        upstream.append(_strided(drawn) if layout == "strided" and drawn.dim() > 1 else drawn)
    if moving:
        torch.autograd.backward(moving, upstream)
    size = max((float(g.double().norm()) for g in upstream), default=0.0)
    leaves |= {name: tensor for name, tensor in own.items() if tensor.requires_grad}
    gradients = {name: None if t.grad is None else t.grad.detach() for name, t in leaves.items()}
    results = {name: t.detach() for name, t in outputs.items()}
    arguments = {name: value.detach() for name, (value, _) in used.items()}
    return _Run(results, gradients, customs, size, changed, draws, arguments)


def prove_functions(
    before: Callable[..., Any],
    after: Callable[..., Any],
    inputs: Callable[[], Any] | None = None,
    *,
    device: str = "cpu",
    proof: FunctionsProof | None = None,
) -> FunctionsProof:
    """Compare two functions of the same arguments; both are run on every draw, the first also in fp64.

        inputs = lambda: (torch.randn(64, 32), torch.randn(97, 32))
        proof = leanstep.prove.prove_functions(plain, fused, inputs)
        assert proof.ok, proof.sentence()

    Args:
        before, after: functions, methods or modules. They return tensors, numbers, tuples or dicts, or change
            an argument in place. Parameters that they own are compared by name, from the same values.
        inputs: returns the arguments, a tuple or a dict by name; by default drawn from the signature.
    """
    proof = proof or FunctionsProof(_name(before), _name(after))
    original = inputs or from_signature(before)
    make = lambda: tree_map_only(Tensor, lambda t: t.to(device), original())  # noqa: E731
    _compare(proof, before, after, make)
    if proof.draws and (proof.failed or proof.problem):
        # The functions may draw other random numbers: dropout is no difference.
        plain = FunctionsProof(proof.before, proof.after)
        with NoDropout():
            _compare(plain, before, after, make)
        if plain.draws and plain.failed:
            proof.problem = f"cannot judge: {proof.before} or {proof.after} draws random numbers"
        elif not plain.failed and not plain.problem:
            proof.problem = "cannot judge: the functions draw random numbers; without dropout they agree"
        else:
            proof.rows, proof.problem = plain.rows, plain.problem
            proof.notes = [*plain.notes, "dropout is off"]
    return proof


def _compare(
    proof: FunctionsProof, before: Callable[..., Any], after: Callable[..., Any], make: Callable[[], Any]
) -> None:
    mine, theirs = _own_tensors(before), _own_tensors(after)
    shapes = [{name: list(t.shape) for name, t in own.items()} for own in (mine, theirs)]
    if shapes[0] != shapes[1]:
        other = next(iter({*shapes[0].items()} ^ {*shapes[1].items()}), "")
        proof.problem = f"the functions compute with different parameters: {other}"
        return
    for draw in DRAWS:
        # The fused attention of a CPU returns finite numbers for some NaN.
        attention = sdpa_kernel(SDPBackend.MATH) if draw.values == "NaN" else contextlib.nullcontext()
        with attention:
            if not _compare_on(draw, proof, (before, mine), (after, theirs), make):
                return
    _check_judged(proof)


Owner = tuple[Callable[..., Any], dict[str, Tensor]]


def _compare_on(draw: Draw, proof: FunctionsProof, one: Owner, other: Owner, make: Callable[[], Any]) -> bool:
    """Compare two functions, each with its own tensors, on one draw; False if there is nothing to compare."""
    (before, mine), (after, theirs) = one, other
    parameters = list(_signature(before).parameters)
    narrow = lambda t: t.to(draw.dtype) if draw.dtype and t.is_floating_point() else t  # noqa: E731
    values = {name: narrow(tensor.detach()) for name, tensor in mine.items()}
    try:
        args, kwargs = drawn(make, draw)
        names = _tensor_names(args, kwargs, parameters)
        with _with_values(mine, values):
            plain = _run(before, args, kwargs, draw.layout, names, mine)
        with Twin() as twin:
            with twin.paused():
                wide = tree_map_only(Tensor, twin.widened, (args, kwargs, values))
            with _with_values(mine, wide[2]):
                truth = _run(before, wide[0], wide[1], draw.layout, names, mine)
    except Exception as error:
        if draw == DRAWS[0]:
            proof.problem = f"{proof.before} {_said(error)}"
            return False
        proof.notes.append(f"{draw.name}: skipped, {proof.before} {_said(error)}")
        return True
    try:
        with _with_values(theirs, values):
            own = _run(after, args, kwargs, draw.layout, names, theirs)
    except BadInput as error:
        proof.problem = f"{proof.after} {error}"
        return False
    except Exception as error:
        if draw.dtype is not None or draw.values == "NaN":
            proof.notes.append(f"{draw.name}: skipped, {proof.after} raised {one_line(error)}")
            return True
        row = FunctionRow("the call", draw.name, 1.0, 0.0, 0.0, False, True, f"raised {one_line(error)}")
        proof.rows.append(row)
        return True
    proof.functions = proof.functions or own.functions
    proof.draws = proof.draws or plain.draws or own.draws
    # What the first function changes in place is an output.
    for name in plain.changed:
        for run in (plain, truth, own):
            run.outputs[f"{name} in place"] = run.arguments[name]
    if set(own.outputs) != set(truth.outputs) and len(own.outputs) == len(truth.outputs) == 1:
        # A tuple of one.
        own.outputs = dict(zip(truth.outputs, own.outputs.values(), strict=True))
    if set(own.outputs) != set(truth.outputs):
        shown = [", ".join(f"output {k}" if k else "one tensor" for k in run.outputs) for run in (truth, own)]
        proof.problem = (
            f"{proof.before} returns {shown[0] or 'nothing'}; {proof.after} returns {shown[1] or 'nothing'}"
        )
        return False
    if not truth.outputs:
        proof.problem = f"{proof.before} returns nothing and changes no argument in place"
        return False
    extra = [name for name in own.changed if name not in plain.changed]
    if extra and draw == DRAWS[0]:
        proof.notes.append(f"{proof.after} changes {', '.join(extra)} in place; {proof.before} does not")
    _judge(proof, draw, plain, truth, own)
    return True


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, BadInput) else f"ended with {one_line(error)}"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _tensor_names(args: tuple[Any, ...], kwargs: dict[str, Any], parameters: list[str]) -> list[str]:
    """Name every tensor of the arguments, in the order of the flattened tree."""
    names = []
    named = [
        *zip(parameters, args, strict=False),
        *((f"argument {k}", a) for k, a in enumerate(args[len(parameters) :])),
    ]
    for name, value in [*named, *kwargs.items()]:
        tensors = [t for t in tree_flatten(value)[0] if isinstance(t, Tensor)]
        names += [name if len(tensors) == 1 else f"{name}[{k}]" for k in range(len(tensors))]
    return names


def _judge(proof: FunctionsProof, draw: Draw, plain: _Run, truth: _Run, own: _Run) -> None:
    sizes = [float(t.double().norm()) for t in truth.arguments.values() if t.is_floating_point()]
    scale = max(sizes, default=1.0)
    for name, t in truth.outputs.items():
        p, f = plain.outputs[name], own.outputs[name]
        what = f"output {name}" if name else "the output"
        what = f"{name} (changed)".replace(" in place", "") if name.endswith(" in place") else what
        if t.shape != f.shape:
            words = f"has shape {list(f.shape)}, not {list(t.shape)}"
            proof.rows.append(FunctionRow(what, draw.name, 1.0, 0.0, 0.0, False, True, words))
        elif draw.values == "NaN" and (bool(p.isnan().any()) or not p.is_floating_point()):
            # What becomes of a NaN that the first function does not handle is no part of its result.
            if not torch.equal(p.isnan(), f.isnan()):
                proof.notes.append(f"a NaN in the input reaches other entries of {what} in {proof.after}")
        else:
            proof.rows.append(_row(what, draw, p, t, f, scale))
    if draw.values == "NaN":
        return
    for name, t in truth.gradients.items():
        what = f"the gradient of {name}"
        p, f = plain.gradients[name], own.gradients.get(name)
        if t is None or p is None:
            wrong = f is not None and not float(f.double().norm()) <= NOT_ZERO * own.upstream
            row = FunctionRow(what, draw.name, 0.0, 0.0, 0.0, not wrong, True, "should not exist")
            proof.rows.append(row)
            continue
        proof.rows.append(_row(what, draw, p, t, f, truth.upstream))


def _row(what: str, draw: Draw, p: Tensor, t: Tensor, f: Tensor | None, scale: float) -> FunctionRow:
    """Judge one tensor: `p` the first function's, `t` in fp64, `f` the second function's.

    `scale`: where the truth is zero, the size that a result is compared with.
    """
    width = p.dtype if p.dtype in FLOORS else torch.float64
    t, p64 = t.double(), p.double()
    f64 = torch.zeros_like(t) if f is None else f.double()
    if t.isnan().any() or not torch.equal(p64.isfinite(), t.isfinite()):
        return FunctionRow(what, draw.name, 0.0, 0.0, 0.0, True, False)
    infinite = t.isinf()
    if not torch.equal(f64.where(infinite, 0.0), t.where(infinite, 0.0)):
        return FunctionRow(what, draw.name, 1.0, 0.0, 0.0, False, True, "is not infinite where it should be")
    t, p64, f64 = (value.masked_fill(infinite, 0.0) for value in (t, p64, f64))
    size = float(t.norm())
    if size == 0.0:
        wrong = scale > 0 and not float(f64.norm()) <= NOT_ZERO * scale
        return FunctionRow(
            what, draw.name, float(f64.norm()), 0.0, 0.0, not wrong, bool(infinite.any()), "is not zero"
        )
    reference = float((p64 - t).norm()) / size
    error = float((f64 - t).norm()) / size
    # A fused function may return fp32 where the plain one returns bf16, or the other way round.
    floor = max(FLOORS[width], 0.0 if f is None else FLOORS.get(f.dtype, 0.0))
    if draw.dtype is not None and p.dtype not in FLOORS and error > 0:
        # Rounding to bf16 makes ties: another index is no error.
        return FunctionRow(what, draw.name, error, reference, MOST, True, False)
    if draw.values != "normal":
        # Another formula may cancel where values are tiny, or lose digits where they are large.
        floor *= UNUSUAL
    bound = min(FACTOR * reference + floor, MOST)
    if not reference <= UNSURE[width]:
        return FunctionRow(what, draw.name, error, reference, bound, True, False)
    ok = error <= bound
    return FunctionRow(
        what, draw.name, error, reference, bound, ok, True, "" if ok else _words(t, f, f64, error, reference)
    )


def _words(t: Tensor, f: Tensor | None, f64: Tensor, error: float, reference: float) -> str:
    if f is None:
        return "is missing"
    if not bool(f64.isfinite().all()):
        return "is not finite"
    if float(f64.norm()) == 0.0:
        return "is exactly zero"
    factor = float((f64 * t).sum() / t.square().sum())
    if float((f64 - factor * t).norm()) <= 1e-3 * float(f64.norm()) and abs(factor - 1) > 1e-2:
        return f"is {factor:.4g} times the right one"
    distant = f"is {error:.2g} from fp64 ({reference:.1g} before)"
    if t.dim() > 1:
        rows = (f64 - t).flatten(1).norm(dim=1) > 0.1 * error * t.flatten(1).norm(dim=1)
        if 0 < int(rows.sum()) < len(rows):
            return f"{distant}, in {int(rows.sum())} of {len(rows)} rows"
    return distant


def _check_judged(proof: FunctionsProof) -> None:
    """Give no verdict about an output or a gradient that no draw judges."""
    if proof.failed or proof.problem:
        return
    for what in dict.fromkeys(row.what for row in proof.rows):
        if not any(row.sure for row in proof.rows if row.what == what):
            proof.problem = (
                f"cannot judge: {what} of {proof.before} is zero, or nothing but rounding, on every draw; "
                "a function that returns zeros or a constant would pass"
            )
            return


# Files.


def split_function(word: str) -> tuple[str, str] | None:
    """`heads.py:plain` -> ("heads.py", "plain"); None if the word names no function."""
    file, colon, name = word.rpartition(":")
    is_name = all(part.isidentifier() for part in name.split("."))
    return (file, name) if colon and file.endswith(".py") and is_name else None


def prove_function_files(
    before: str, after: str, *, device: str = "cpu", path: tuple[str, ...] = (), fork: bool = False
) -> FunctionsProof:
    """Load both functions in a process of their own and compare them. `path` replaces sys.path."""
    for word in (before, after):
        split = split_function(word)
        if split is None or not Path(split[0]).is_file():
            raise BadInput(f"prove: expected FILE.py:FUNCTION, got {word}")
    with temporary_folder() as folder:
        child = start(_child, (before, after, device, path, str(folder)), fork=fork)
        with ended_afterwards([child]):
            wait_all([child])
        target = folder / "proof.pickle"
        if not target.exists():
            log = (
                (folder / "log").read_text(errors="replace").strip().splitlines()
                if (folder / "log").exists()
                else []
            )
            said = f": {log[-1].strip()}" if log else ""
            return FunctionsProof(before, after, problem=f"{before} {how_it_ended(child.code)}{said}")
        return pickle.loads(target.read_bytes())


def _child(before: str, after: str, device: str, path: tuple[str, ...], folder: str) -> None:
    with log_to(Path(folder) / "log"):
        proof = FunctionsProof(before, after)
        sys.path[:] = path or sys.path
        interpret_kernels()
        try:
            functions = [_load(word) for word in (before, after)]
            inputs = next((m.inputs for _, m in functions if hasattr(m, "inputs")), None)
            prove_functions(functions[0][0], functions[1][0], inputs, device=device, proof=proof)
        except BadInput as error:
            proof.problem = str(error)
        except Exception as error:
            proof.problem = f"{before} or {after} ended with {one_line(error)}"
    write_result(Path(folder) / "proof.pickle", proof)


_LOADED: dict[str, Any] = {}


def _load(word: str) -> tuple[Callable[..., Any], Any]:
    file, name = split_function(word) or ("", "")
    path = str(Path(file).resolve())
    if path not in _LOADED:
        sys.path.insert(0, str(Path(path).parent))
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        _LOADED[path] = module
    module = _LOADED[path]
    function = functools.reduce(lambda owner, part: getattr(owner, part, None), name.split("."), module)
    if isinstance(function, type) and issubclass(function, nn.Module):
        torch.manual_seed(0)
        function = function()
    if not callable(function):
        raise BadInput(f"prove: {file} has no function {name}")
    return function, module
