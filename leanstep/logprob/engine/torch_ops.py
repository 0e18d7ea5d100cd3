"""The three doors as torch.library ops: torch.compile(fullgraph=True) traces a model that ends in one.

Dynamo cannot look into a tile loop (threads, C++, launches), and need not: inside a compiled region a door
calls its op, which a graph holds as one node, and the op calls the door when it runs. Forward and backward
are ops of their own; the forward hands its row statistics on (`Remembered`), and the backward starts from
them. What a node cannot describe (process groups, a KL head, allowed ids, main_grad) takes the ordinary way
and breaks the graph.

An op takes and returns tensors and plain numbers: 0 stands for "not given" among the numbers, an empty tensor
for None among the results.
"""

# T rows · T' selected rows · D model · V vocabulary · r low rank

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from leanstep.logprob.engine.softmax import RowStatistics
from leanstep.logprob.inputs import LMHead, LogProbs, LoRA, Transform, Tuning, unpack_head
from leanstep.logprob.objective import CovarianceChoice, PolicyBatch, PolicyLoss, PolicyObjective

Tensors = Sequence[Tensor | None]
NUM_STATISTICS = 5  # that an op hands on: max, sum, moment, target, total


class Remembered:
    """Row statistics of a forward pass whose backward runs apart from it."""

    def __init__(self, vectors: Sequence[Tensor] | None = None) -> None:
        self.vectors: list[Tensor | None] | None = None if vectors is None else [_or_none(v) for v in vectors]

    def keep(self, stats: RowStatistics) -> None:
        # Clones: they share a storage, and an op's results may not.
        found = (stats.max, stats.sum, stats.moment, stats.target, stats.total)
        self.vectors = [None if vector is None else vector.clone() for vector in found]

    def statistics(self) -> RowStatistics | None:
        return None if self.vectors is None else RowStatistics(*self.vectors)  # type: ignore[arg-type]


# What the op around a door's call wants remembered, or remembers; None outside of ops.
REMEMBERED: ContextVar[Remembered | None] = ContextVar("leanstep.remembered", default=None)


@contextlib.contextmanager
def _remembering(vectors: Sequence[Tensor] | None = None) -> Iterator[Remembered]:
    token = REMEMBERED.set(memory := Remembered(vectors))
    try:
        yield memory
    finally:
        REMEMBERED.reset(token)


@contextlib.contextmanager
def _recording(wanted: bool = True) -> Iterator[None]:
    """Autograd, as a door expects it: an op runs below, where nothing is recorded."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "ADInplaceOrView"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.set_grad_enabled(wanted):
        yield


def _or_none(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.numel() else None


def _or_empty(tensors: Tensors, like: Tensor) -> list[Tensor]:
    return [like.new_empty(0) if t is None else t for t in tensors]


def _leaves(tensors: Tensors, needed: Sequence[bool]) -> list[Tensor | None]:
    """The same tensors, those that need a gradient as leaves of a graph of their own."""
    pairs = zip(tensors, needed, strict=True)
    return [None if t is None else t.detach().requires_grad_(need) for t, need in pairs]


def _gradients(outputs: Tensors, upstream: Sequence[Tensor], leaves: Tensors) -> list[Tensor]:
    """The leaves' gradients, empty where none is needed."""
    pairs = [(out, g) for out, g in zip(outputs, upstream, strict=True) if out is not None and g.numel()]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    if pairs:
        grads = torch.autograd.grad([out for out, _ in pairs], wanted, [g.to(out.dtype) for out, g in pairs])
    else:
        grads = tuple(torch.zeros_like(leaf) for leaf in wanted)
    found = iter(grads)
    some = [next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
    return _or_empty(some, upstream[0])


def _fake_gradients(tensors: Tensors, needed: Sequence[bool], like: Tensor) -> list[Tensor]:
    pairs = zip(tensors, needed, strict=True)
    some = [torch.empty_like(t, memory_format=torch.contiguous_format) if n else None for t, n in pairs]  # type: ignore[arg-type]
    return _or_empty(some, like)


def _under(autocast: torch.dtype | None, tensor: Tensor) -> Any:
    if autocast is None:
        return contextlib.nullcontext()
    return torch.autocast(tensor.device.type, dtype=autocast)


def _traced_head(weight: Any, temperature: float | Tensor, hidden: Tensor) -> Any:
    """What the ops want to know of a head: tensors, temperatures, numbers, the dtype of autocast."""
    tensor, bias, lora = unpack_head(weight)
    adapter, scaling = (None, None), 1.0
    if lora is not None:
        adapter, scaling = (lora.down, lora.up), float(lora.scaling)
    per_row = temperature if isinstance(temperature, Tensor) else None
    number = 1.0 if per_row is not None else float(temperature)  # type: ignore[arg-type]
    kind = hidden.device.type
    # A traced graph forgets the autocast around it.
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (tensor, bias, *adapter), per_row, [number, scaling], autocast


def _own_head(weight: Tensor, bias: Tensor | None, down: Any, up: Any, scaling: float) -> LMHead:
    return LMHead(weight, bias, None if down is None else LoRA(down, up, scaling))


def _sum_dtype(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


# linear_logprobs. numbers: temperature, LoRA's scaling, scale, softcap, smoothing; counts: lse, top_k,
# budget, rows and columns of a tile, round_logits.


def _call_linear(
    tensors: Sequence[Any], targets: Tensor, rows: Any, temperatures: Any, numbers: Sequence[float],
    counts: Sequence[int], entropy: Any, autocast: torch.dtype | None,
) -> LogProbs:  # fmt: skip
    from leanstep.logprob.linear import linear_logprobs

    hidden, *head = tensors
    lse, top_k, budget, tile_rows, tile_columns, rounds = counts
    with _under(autocast, hidden):
        return linear_logprobs(
            hidden,
            _own_head(*head, numbers[1]),  # type: ignore[arg-type]
            targets,
            rows=rows,
            entropy=entropy,
            temperature=numbers[0] if temperatures is None else temperatures,
            transform=Transform(numbers[2], numbers[3] or None, numbers[4]),
            outputs=[*(["lse"] if lse else []), *([("top_k", top_k)] if top_k else [])],
            tuning=Tuning(
                budget or None,
                (tile_rows, tile_columns) if tile_rows else None,
                "none",
                round_logits=bool(rounds),
            ),
        )


@torch.library.custom_op("leanstep::linear_logprobs", mutates_args=())
def _linear_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None, up: Tensor | None,
    targets: Tensor, rows: Tensor | None, temperatures: Tensor | None, numbers: list[float],
    counts: list[int], entropy: str, autocast: torch.dtype | None,
) -> list[Tensor]:  # fmt: skip
    """logp, entropy, lse, top-k values and ids, and the statistics: [T'] each."""
    constants = (targets, rows, temperatures, numbers, counts, entropy, autocast)
    with torch.no_grad(), _remembering() as memory:
        out = _call_linear((hidden, weight, bias, down, up), *constants)
    assert memory.vectors is not None
    return _or_empty(
        [out.logp, out.entropy, out.lse, *(out.top_k or (None, None)), *memory.vectors], out.logp
    )


@_linear_op.register_fake
def _(hidden, weight, bias, down, up, targets, rows, temperatures, numbers, counts, entropy, autocast):
    dtype, num_rows = _sum_dtype(hidden, weight), len(hidden) if rows is None else len(rows)
    lse, k, *_ = counts
    moment, row, several = entropy != "none", (num_rows,), (num_rows, *targets.shape[1:])
    shapes = [several, row if moment else 0, row if lse else 0, (num_rows, k) if k else 0]
    ids = hidden.new_empty((num_rows, k), dtype=torch.int64) if k else hidden.new_empty(0, dtype=dtype)
    statistics = [row, row, row if moment else 0, several, row if numbers[4] else 0]
    made = [hidden.new_empty(shape, dtype=dtype) for shape in (*shapes, *statistics)]
    return [*made[:4], ids, *made[4:]]


@torch.library.custom_op("leanstep::linear_logprobs_backward", mutates_args=())
def _linear_backward_op(
    upstream: list[Tensor], statistics: list[Tensor], needed: list[bool],
    hidden: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None, up: Tensor | None,
    targets: Tensor, rows: Tensor | None, temperatures: Tensor | None, numbers: list[float],
    counts: list[int], entropy: str, autocast: torch.dtype | None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of hidden, weight, bias, down and up."""
    leaves = _leaves((hidden, weight, bias, down, up), needed)
    constants = (targets, rows, temperatures, numbers, [counts[0], 0, *counts[2:]], entropy, autocast)
    with _recording(), _remembering(statistics):
        out = _call_linear(leaves, *constants)
        return _gradients([out.logp, out.entropy if entropy == "grad" else None, out.lse], upstream, leaves)


@_linear_backward_op.register_fake
def _(upstream, statistics, needed, hidden, weight, bias, down, up, *_constants):
    return _fake_gradients((hidden, weight, bias, down, up), needed, upstream[0])


def _save_linear(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.constants = inputs[8:]
    ctx.save_for_backward(*inputs[:8], *output[-NUM_STATISTICS:])
    ctx.mark_non_differentiable(*output[3:], *([output[1]] if inputs[10] != "grad" else []))


def _linear_backward(ctx: Any, upstream: Sequence[Tensor]) -> Any:
    saved, needed = ctx.saved_tensors, list(ctx.needs_input_grad[:5])
    grads = _linear_backward_op(list(upstream[:3]), list(saved[8:]), needed, *saved[:8], *ctx.constants)
    return *(g if need else None for g, need in zip(grads, needed, strict=True)), *(None,) * 7


_linear_op.register_autograd(_linear_backward, setup_context=_save_linear)


def traced_linear(
    hidden: Tensor,
    weight: Any,
    targets: Tensor,
    rows: Tensor | None,
    temperature: float | Tensor,
    transform: Transform | None,
    asked: tuple[str, set[str], int],
    tuning: Tuning,
) -> LogProbs:
    """`linear_logprobs` inside a compiled region; `asked` are entropy, the outputs' names and k of top_k."""
    transform, (entropy, names, top_k) = transform or Transform(), asked
    head, temperatures, numbers, autocast = _traced_head(weight, temperature, hidden)
    numbers += [transform.scale, transform.softcap or 0.0, transform.label_smoothing]
    tile = tuning.tile
    sides = (
        [0, 0]
        if tile is None
        else [tile[0], tile[1]]
        if isinstance(tile, tuple)
        else [tile.rows, tile.columns]
    )
    wants_lse, k = int(bool({"lse", "z_loss"} & names)), max(top_k, int("argmax" in names))
    counts = [wants_lse, k, tuning.budget or 0, *sides, int(tuning.round_logits)]
    out = _linear_op(hidden, *head, targets, rows, temperatures, numbers, counts, entropy, autocast)
    return LogProbs(
        logp=out[0],
        entropy=out[1] if entropy != "none" else None,
        lse=out[2] if "lse" in names else None,
        z_loss=out[2].square() if "z_loss" in names else None,
        argmax=out[4][:, 0] if "argmax" in names else None,
        top_k=(out[3], out[4]) if "top_k" in names else None,
    )


# token_logprobs. counts: lse, budget, rows of a chunk.


def _call_token(
    logits: Tensor, targets: Tensor, rows: Any, temperatures: Any, temperature: float, counts: Sequence[int],
    entropy: Any,
) -> LogProbs:  # fmt: skip
    from leanstep.logprob.logits import token_logprobs

    return token_logprobs(
        logits,
        targets,
        rows=rows,
        entropy=entropy,
        temperature=temperature if temperatures is None else temperatures,
        outputs=("lse",) if counts[0] else (),
        tuning=Tuning(counts[1] or None, (counts[2], None) if counts[2] else None),
    )


@torch.library.custom_op("leanstep::token_logprobs", mutates_args=())
def _token_op(
    logits: Tensor, targets: Tensor, rows: Tensor | None, temperatures: Tensor | None, temperature: float,
    counts: list[int], entropy: str,
) -> list[Tensor]:  # fmt: skip
    """logp, entropy, lse and the statistics: [R] each."""
    with torch.no_grad(), _remembering() as memory:
        out = _call_token(logits, targets, rows, temperatures, temperature, counts, entropy)
    assert memory.vectors is not None
    return _or_empty([out.logp, out.entropy, out.lse, *memory.vectors], out.logp)


@_token_op.register_fake
def _(logits, targets, rows, temperatures, temperature, counts, entropy):
    num_rows, moment = len(logits) if rows is None else len(rows), entropy != "none"
    wanted = (True, moment, bool(counts[0]), True, True, moment, True, False)
    return [logits.new_empty(num_rows if want else 0, dtype=_sum_dtype(logits)) for want in wanted]


@torch.library.custom_op("leanstep::token_logprobs_backward", mutates_args=())
def _token_backward_op(
    upstream: list[Tensor], statistics: list[Tensor], logits: Tensor, targets: Tensor, rows: Tensor | None,
    temperatures: Tensor | None, temperature: float, counts: list[int], entropy: str,
) -> Tensor:  # fmt: skip
    """The gradient of the logits."""
    leaf = logits.detach().requires_grad_()
    with _recording(), _remembering(statistics):
        out = _call_token(leaf, targets, rows, temperatures, temperature, counts, entropy)
        some = [out.logp, out.entropy if entropy == "grad" else None, out.lse]
        return _gradients(some, upstream, [leaf])[0]


@_token_backward_op.register_fake
def _(upstream, statistics, logits, *_constants):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _save_token(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.constants = inputs[4:]
    ctx.save_for_backward(*inputs[:4], *output[-NUM_STATISTICS:])
    ctx.mark_non_differentiable(*output[3:], *([output[1]] if inputs[6] != "grad" else []))


def _token_backward(ctx: Any, upstream: Sequence[Tensor]) -> Any:
    saved = ctx.saved_tensors
    return _token_backward_op(list(upstream[:3]), list(saved[4:]), *saved[:4], *ctx.constants), *(None,) * 6


_token_op.register_autograd(_token_backward, setup_context=_save_token)


def traced_token(
    logits: Tensor,
    targets: Tensor,
    rows: Tensor | None,
    entropy: str,
    temperature: float | Tensor,
    names: set[str],
    tuning: Tuning,
) -> LogProbs:
    """`token_logprobs` inside a compiled region."""
    per_row = temperature if isinstance(temperature, Tensor) else None
    number = 1.0 if isinstance(temperature, Tensor) else float(temperature)
    tile_rows = tuning.tile[0] if isinstance(tuning.tile, tuple) else None
    counts = [int(bool(names)), tuning.budget or 0, tile_rows or 0]
    out = _token_op(logits, targets, rows, per_row, number, counts, entropy)
    lse, z_loss = out[2] if "lse" in names else None, out[2].square() if "z_loss" in names else None
    return LogProbs(out[0], out[1] if entropy != "none" else None, lse, z_loss)


# linear_policy_loss: the forward makes the gradients, backward multiplies them. numbers: temperature, LoRA's
# scaling, scale, softcap, clip_low, clip_high, kl_coef, entropy_coef, dual_clip, temperatures, covariance.


@torch.library.custom_op("leanstep::linear_policy_loss", mutates_args=())
def _policy_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor | None, up: Tensor | None,
    targets: Tensor, rows: Tensor | None, temperatures: Tensor | None, old_logp: Tensor, advantages: Tensor,
    mask: Tensor | None, ref_logp: Tensor | None, normalizer: Tensor | None, lengths: list[int] | None,
    names: str, numbers: list[float], budget: int, autocast: torch.dtype | None, needed: list[bool],
) -> list[Tensor]:  # fmt: skip
    """Loss, logp, entropy, metrics, and the gradients of hidden, weight, bias, down and up."""
    from leanstep.logprob.policy import linear_policy_loss

    kind, kl, norm, entropy, logits = names.split()
    low, high, kl_coef, entropy_coef, dual, *more = numbers[4:]
    choice = (tuple(more[:2]), CovarianceChoice(*more[2:]))
    leaves: list[Any] = _leaves((hidden, weight, bias, down, up), needed)
    with _recording(any(needed)), _under(autocast, hidden):
        out = linear_policy_loss(
            leaves[0],
            _own_head(leaves[1], leaves[2], leaves[3], leaves[4], numbers[1]),
            targets,
            PolicyBatch(old_logp, advantages, mask, ref_logp, lengths),
            objective=PolicyObjective(kind, low, high, dual or None, kl, kl_coef, entropy_coef, *choice),  # type: ignore[arg-type]
            normalizer=norm if normalizer is None else normalizer,  # type: ignore[arg-type]
            rows=rows,
            entropy=entropy,  # type: ignore[arg-type]
            temperature=numbers[0] if temperatures is None else temperatures,
            transform=Transform(numbers[2], numbers[3] or None),
            tuning=Tuning(budget or None, round_logits=logits == "rounded"),
        )
        gradients = _or_empty([None] * 5, hidden)
        if any(needed):
            gradients = _gradients([out.loss], [torch.ones_like(out.loss)], leaves)
    metrics = torch.stack(list(out.metrics.values()))
    return [*_or_empty([out.loss.detach(), out.logp, out.entropy, metrics], hidden), *gradients]


@_policy_op.register_fake
def _(
    hidden, weight, bias, down, up, targets, rows, temperatures, old_logp, advantages, mask, ref_logp,
    normalizer, lengths, names, numbers, budget, autocast, needed,
):  # fmt: skip
    num_rows = len(hidden) if rows is None else len(rows)
    moment = names.split()[3] != "none" or numbers[7] != 0
    shapes = [(), num_rows, num_rows if moment else 0, 3 + moment]
    made = [hidden.new_empty(shape, dtype=_sum_dtype(hidden, weight)) for shape in shapes]
    return [*made, *_fake_gradients((hidden, weight, bias, down, up), needed, hidden)]


def _save_policy(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output[4:])
    ctx.needed, ctx.num_inputs = inputs[-1], len(inputs)
    ctx.mark_non_differentiable(*output[1:])


def _policy_backward(ctx: Any, upstream: Sequence[Tensor]) -> Any:
    pairs = zip(ctx.saved_tensors, ctx.needed, strict=True)
    found = [grad * upstream[0].to(grad.dtype) if need else None for grad, need in pairs]
    return *found, *(None,) * (ctx.num_inputs - len(found))


_policy_op.register_autograd(_policy_backward, setup_context=_save_policy)


def traced_policy(
    hidden: Tensor,
    weight: Any,
    targets: Tensor,
    batch: PolicyBatch,
    objective: PolicyObjective,
    normalizer: Any,
    rows: Tensor | None,
    entropy: str,
    temperature: float | Tensor,
    transform: Transform | None,
    tuning: Tuning,
) -> PolicyLoss:
    """`linear_policy_loss` inside a compiled region."""
    transform = transform or Transform()
    head, temperatures, numbers, autocast = _traced_head(weight, temperature, hidden)
    numbers += [transform.scale, transform.softcap or 0.0, objective.clip_low, objective.clip_high]
    numbers += [objective.kl_coef, objective.entropy_coef, objective.dual_clip or 0.0]
    numbers += [*objective.temperatures, *objective.covariance]
    needed = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, *head)]
    given = (batch.old_logp, batch.advantages, batch.mask, batch.ref_logp)
    lengths = None if batch.sequence_lengths is None else list(batch.sequence_lengths)
    named = normalizer if isinstance(normalizer, str) else "-"
    if isinstance(normalizer, (int, float)):
        normalizer = torch.full((), float(normalizer), device=hidden.device)
    logits = "rounded" if tuning.round_logits else "exact"
    names = f"{objective.kind} {objective.kl} {named} {entropy} {logits}"
    divisor = None if isinstance(normalizer, str) else normalizer
    constants = (lengths, names, numbers, tuning.budget or 0, autocast, needed)
    out = _policy_op(hidden, *head, targets, rows, temperatures, *given, divisor, *constants)
    keys = ["clip_fraction", "mean_ratio", "approx_kl"]
    keys += ["entropy"] if entropy != "none" or objective.entropy_coef else []
    metrics = dict(zip(keys, out[3].unbind(), strict=True))
    return PolicyLoss(out[0], out[1], out[2] if len(keys) == 4 else None, metrics)
