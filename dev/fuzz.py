"""Seeded random cases of the public losses and of NorMuon, each held against the fp64 rule.

    python dev/fuzz.py --cases 2000 --seed 1 policy distill
    python dev/fuzz.py --only policy:1:17          one case again

A case draws shapes, dtypes, options, masks and extreme values from its seed alone. Outputs and gradients of
the fast path may be at most `FACTOR` times as far from plain fp64 code as plain code in the same dtype, plus
a floor (leanstep/measure/parity.py).

Plain code's own error is one draw of its roundings. In small cases it can be 0 by chance, and in fp64 it is
always 0, because the reference is the same computation. So a case that exceeds the bound is judged again by
the largest error of `ROUNDINGS` runs of plain code in which every operation rounds at random (Monte Carlo
arithmetic, Parker 1997). A case within that bound is counted as *lucky*; one beyond it breaks the rule.

`invariant` compares bits instead. `abuse` passes NorMuon what it must refuse or survive. Prints one line per
violation; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode

from leanstep.heads import (
    OBJECTIVES,
    Head,
    TeacherHead,
    TeacherLogProbs,
    TeacherTopK,
    linear_cross_entropy,
    linear_distill_loss,
    linear_logprobs,
    linear_policy_loss,
    linear_preference_loss,
    logprob,
    losses,
    passes,
    policy_loss,
    token_logprobs,
)
from leanstep.heads.losses import PREFERENCES, pair_losses, row_divergence
from leanstep.heads.reference import (
    reference_distill,
    reference_linear_logprobs,
    reference_logits,
    reference_logprobs,
    reference_top_k,
)
from leanstep.measure.parity import FACTOR, FLOOR, dtype_name, relative_error, same_bits
from leanstep.muon import NorMuon
from leanstep.muon.reference import normuon

Outputs = dict[str, Tensor]
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Runs of plain code with random roundings, for a case that exceeds the bound.
ROUNDINGS = 16


@dataclass
class Verdict:
    """What breaks the rule, a line for each; `lucky` says that plain code's own error was small by chance."""

    lines: list[str]
    lucky: bool = False


@dataclass
class Trial:
    """One case: leaves in fp64, and the same function of them computed fast and plainly.

    `native`: small tiles go through the C++ passes, too, which otherwise begin at 2^18 logits.
    """

    leaves: Outputs
    fast: Callable[[Outputs], Outputs]
    plain: Callable[[Outputs], Outputs]
    dtype: torch.dtype
    text: str
    native: bool = False

    def __str__(self) -> str:
        shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in self.leaves.items())
        return f"{dtype_name(self.dtype)}; {shapes}; {self.text}{'; C++' if self.native else ''}"

    def judge(self) -> Verdict:
        rounded = {name: value.to(self.dtype) for name, value in self.leaves.items()}
        truth = evaluate(self.plain, {name: value.double() for name, value in rounded.items()})
        with small_native_tiles(self.native):
            fast = evaluate(self.fast, rounded)
        first = _beyond(fast, truth, [evaluate(self.plain, rounded)], self.dtype)
        if not first:
            return Verdict([])
        runs = []
        for seed in range(ROUNDINGS):
            with RandomRounding(seed, self.dtype):
                runs.append(evaluate(self.plain, rounded))
        second = _beyond(fast, truth, runs, self.dtype)
        return Verdict(second, lucky=not second)


@dataclass
class Check:
    """One case whose judgement is yes or no."""

    text: str
    run: Callable[[], list[str]]

    def __str__(self) -> str:
        return self.text

    def judge(self) -> Verdict:
        return Verdict(self.run())


@contextlib.contextmanager
def small_native_tiles(wanted: bool) -> Iterator[None]:
    """Run C++ on tiles of 300 logits, blocks and chunks of some rows, and a part of the columns per core."""
    changes: list[tuple[Any, str, Any]] = []
    if wanted:
        rowwise = sys.modules["leanstep.heads.rowwise"]
        changes = [
            (passes, "NATIVE_LOGITS", 1), (logprob, "CPU_TILE_BYTES", 1200), (logprob, "COLUMN_BLOCK", 8),
            (logprob, "CORE_WORK", 0), (logprob, "num_threads", lambda: 2), (losses, "FEWEST_ROWS", 3),
            (losses, "CPU_CHUNK_BYTES", 1), (rowwise, "FEWEST_ROWS", 3), (rowwise, "CPU_BLOCK_BYTES", 1),
        ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _beyond(fast: Outputs, truth: Outputs, plains: list[Outputs], dtype: torch.dtype) -> list[str]:
    """A line for each output or gradient that is further from the truth than the worst of `plains` allows."""
    lines = []
    for name, exact in truth.items():
        if name not in fast:
            lines.append(f"{name}: missing")
            continue
        if not bool(torch.isfinite(exact).all()):
            continue
        error = relative_error(fast[name].double(), exact)
        errors = [relative_error(plain[name].double(), exact) for plain in plains]
        # Where plain code alone overflows there is nothing to compare with.
        own = max((error for error in errors if math.isfinite(error)), default=math.inf)
        bound = FACTOR[dtype] * own + FLOOR[dtype]
        if not error <= bound:
            lines.append(f"{name}: error {error:.2e}, plain {own:.2e}, bound {bound:.2e}")
    return lines


class RandomRounding(TorchDispatchMode):
    """Adds a random relative error of one unit in the last place of `dtype` to the result of every operation.

    Sums and matrix products get it in proportion to the sum of absolute values. Operations with more than one
    rounding inside are decomposed.
    """

    aten = torch.ops.aten
    decomposed = get_decompositions(
        [
            aten._log_softmax, aten._log_softmax_backward_data, aten._softmax, aten._softmax_backward_data,
            aten.tanh_backward, aten.nll_loss_forward, aten.nll_loss_backward, aten.logaddexp, aten.logsumexp,
            aten.log_sigmoid_forward, aten.log_sigmoid_backward, aten.softplus, aten.softplus_backward,
            aten.sigmoid_backward, aten.addmm, aten.mean, aten.addcmul, aten.addcdiv,
        ]
    )  # fmt: skip
    rounding = frozenset(
        "add add_ sub sub_ rsub mul mul_ div div_ exp exp_ expm1 log log1p tanh sigmoid sqrt rsqrt "
        "reciprocal pow square linalg_vector_norm mm bmm sum cumsum sin cos erf".split()
    )

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        self.epsilon = torch.finfo(dtype).eps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.decomposed:
            with self:
                return self.decomposed[func](*args, **kwargs)
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if name not in self.rounding or not out.is_floating_point():
            return out
        size = out.abs()
        if name in ("mm", "bmm"):
            size = func(args[0].abs(), args[1].abs())
        elif name == "sum":
            size = func(args[0].abs(), *args[1:], **kwargs)
        draw = torch.rand(out.shape, generator=self.generator, dtype=torch.float64).to(out.dtype)
        error = torch.where(size.isfinite(), size, 0.0) * (2 * draw - 1) * self.epsilon
        return out.add_(error) if name.endswith("_") else out + error


class Draw:
    """Random choices of one case."""

    def __init__(self, seed: str) -> None:
        self.python = random.Random(seed)
        self.torch = torch.Generator().manual_seed(self.python.randrange(1 << 40))

    def pick(self, *values: Any) -> Any:
        return self.python.choice(values)

    def size(self, most: int) -> int:
        """Small sizes and odd ones often."""
        return self.pick(1, 2, 3, self.python.randint(1, most), self.python.randint(1, most))

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=self.torch, dtype=torch.float64)

    def ids(self, stop: int, *shape: int) -> Tensor:
        return torch.randint(stop, shape, generator=self.torch)

    def rows(self, count: int) -> Tensor | None:
        """None for all of them, or some in any order, repeats included."""
        if self.pick(True, False):
            return None
        return self.ids(count, max(1, self.python.randint(1, count) - (count > 1)))

    def native(self) -> bool:
        return self.pick(False, False, True)

    def head(self) -> tuple[Outputs, dict[str, Any]]:
        """hidden, weight, sometimes a bias, and a transform."""
        rows, columns, width = self.size(40), 1 + self.size(400), self.size(48)
        # Logits up to some hundreds: a student that is sure.
        scale = self.pick(0.3, 1.0, 1.0, 6.0)
        leaves = {"hidden": self.normal(rows, width, scale=scale), "weight": self.normal(columns, width)}
        if self.pick(True, False):
            leaves["bias"] = self.normal(columns)
        transform = self.pick({}, {}, {"scale": 0.37}, {"softcap": 9.0}, {"scale": 1.7, "softcap": 15.0})
        return leaves, transform


def head_of(leaves: Outputs, transform: dict[str, Any]) -> Head:
    return Head(leaves["weight"], leaves.get("bias"), **transform)


def logits_of(leaves: Outputs, transform: dict[str, Any]) -> Tensor:
    return reference_logits(leaves["hidden"], leaves["weight"], leaves.get("bias"), **transform)


def draw_logprobs(draw: Draw) -> Trial:
    leaves, transform = draw.head()
    rows, columns = draw.rows(len(leaves["hidden"])), len(leaves["weight"])
    count = len(leaves["hidden"]) if rows is None else len(rows)
    targets, entropy = draw.ids(columns, count), draw.pick("none", "metric", "grad")
    temperature = draw.pick(1.0, 0.4, 1.9, 0.3 + torch.rand(count, generator=draw.torch, dtype=torch.float64))
    factor, second = draw.normal(count), draw.normal(count)
    chunk = draw.pick(None, 1, 5)

    def fast(t: Outputs) -> Outputs:
        out = linear_logprobs(
            t["hidden"], head_of(t, transform), targets, rows=rows, entropy=entropy, chunk_rows=chunk,
            temperature=temperature,
        )  # fmt: skip
        return _summed(out.logp, out.entropy if entropy == "grad" else None, factor, second)

    def plain(t: Outputs) -> Outputs:
        logp, entropies = reference_linear_logprobs(
            t["hidden"], t["weight"], targets, bias=t.get("bias"), rows=rows, temperature=temperature,
            **transform,
        )  # fmt: skip
        return _summed(logp, entropies if entropy == "grad" else None, factor, second)

    text = f"entropy {entropy}, {transform}, chunk {chunk}"
    return Trial(leaves, fast, plain, draw.pick(*DTYPES), text, draw.native())


def _summed(logp: Tensor, entropy: Tensor | None, factor: Tensor, second: Tensor) -> Outputs:
    outputs = {"logp": logp, "loss": (logp * factor.to(logp.dtype)).sum()}
    if entropy is not None:
        outputs["entropy"] = entropy
        outputs["loss"] = outputs["loss"] + (entropy * second.to(entropy.dtype)).sum()
    return outputs


def draw_tokens(draw: Draw) -> Trial:
    count, columns = draw.size(40), draw.size(400)
    leaves = {"logits": draw.normal(count, columns, scale=draw.pick(0.5, 3.0, 30.0))}
    if draw.pick(False, False, True):
        # Some ids are ruled out; the row's first never.
        closed = torch.rand(count, columns, generator=draw.torch) < 0.5
        leaves["logits"][closed] = -1e4
    rows, entropy = draw.rows(count), draw.pick("none", "metric", "grad")
    count = count if rows is None else len(rows)
    targets, temperature = draw.ids(columns, count), draw.pick(1.0, 0.05, 20.0)
    factor, second, chunk = draw.normal(count), draw.normal(count), draw.pick(None, 1, 5)

    def fast(t: Outputs) -> Outputs:
        out = token_logprobs(
            t["logits"], targets, rows=rows, entropy=entropy, temperature=temperature, chunk_rows=chunk
        )
        return _summed(out.logp, out.entropy if entropy == "grad" else None, factor, second)

    def plain(t: Outputs) -> Outputs:
        logits = t["logits"] if rows is None else t["logits"].index_select(0, rows)
        # Log-probs are fp32 at least, as the function says.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logp, entropies = reference_logprobs(logits, targets, temperature)
        return _summed(logp, entropies if entropy == "grad" else None, factor, second)

    text = f"entropy {entropy}, temperature {temperature}, chunk {chunk}"
    return Trial(leaves, fast, plain, draw.pick(*DTYPES), text, draw.native())


def draw_cross_entropy(draw: Draw) -> Trial:
    leaves, transform = draw.head()
    columns, smoothing = len(leaves["weight"]), draw.pick(0.0, 0.0, 0.1)
    labels = draw.ids(columns, len(leaves["hidden"]))
    labels[torch.rand(len(labels), generator=draw.torch) < draw.pick(0.0, 0.3)] = -100
    labels[0] = max(int(labels[0]), 0)
    reduction = draw.pick("mean", "sum")

    def fast(t: Outputs) -> Outputs:
        return {
            "loss": linear_cross_entropy(
                t["hidden"], head_of(t, transform), labels, reduction=reduction, label_smoothing=smoothing
            )
        }

    def plain(t: Outputs) -> Outputs:
        loss = torch.nn.functional.cross_entropy(
            logits_of(t, transform), labels, reduction=reduction, label_smoothing=smoothing
        )
        return {"loss": loss}

    text = f"{reduction}, smoothing {smoothing}, {transform}"
    return Trial(leaves, fast, plain, draw.pick(*DTYPES), text, draw.native())


def draw_distill(draw: Draw) -> Trial:
    leaves, transform = draw.head()
    columns, num_rows = len(leaves["weight"]), len(leaves["hidden"])
    kinds = ("forward_kl", "reverse_kl", ("jsd", 0.3), ("skew_kl", 0.1))
    kind, who = draw.pick(*kinds), draw.pick("head", "given", "top k")
    teacher_logits = draw.normal(num_rows, columns, scale=draw.pick(0.5, 3.0))
    far, wide = draw.normal(num_rows, 5), draw.normal(columns, 5)
    log_q = torch.log_softmax(teacher_logits, -1)
    top, ids = log_q.topk(min(draw.size(8), columns - 1), -1)

    def fast(t: Outputs) -> Outputs:
        dtype = t["hidden"].dtype
        teacher = {
            "head": lambda: TeacherHead(far.to(dtype), wide.to(dtype)),
            "given": lambda: TeacherLogProbs(log_q.to(dtype)),
            "top k": lambda: TeacherTopK(ids, top.to(dtype)),
        }[who]()
        out = linear_distill_loss(t["hidden"], head_of(t, transform), teacher, divergence=kind)
        return {"loss": out.loss}

    def plain(t: Outputs) -> Outputs:
        logits = logits_of(t, transform)
        dtype = logits.dtype
        # The teacher's numbers are constants: rounded once to the case's dtype, exact from there on.
        if who == "top k":
            log_q_given = top.to(trial.dtype).to(dtype)
            rows = reference_top_k(torch.log_softmax(logits, -1), ids, log_q_given, kind)
        elif who == "head":
            far_logits = far.to(trial.dtype).to(dtype) @ wide.to(trial.dtype).to(dtype).T
            rows = reference_distill(logits, far_logits, kind)
        else:
            log_q_given = log_q.to(trial.dtype).to(dtype)
            rows = _given_divergence(logits, log_q_given, kind)
        return {"loss": rows.mean()}

    dtype, text = draw.pick(torch.float32, torch.float64), f"{who}, {kind}, {transform}"
    trial = Trial(leaves, fast, plain, dtype, text, draw.native())
    return trial


def _given_divergence(logits: Tensor, log_q: Tensor, kind: Any) -> Tensor:
    return row_divergence(torch.log_softmax(logits, -1), log_q, kind)


def draw_allowed(draw: Draw) -> Trial:
    leaves, transform = draw.head()
    columns, num_rows = len(leaves["weight"]), len(leaves["hidden"])
    targets = draw.ids(columns, num_rows)
    allowed_ids = [draw.ids(columns, draw.size(12)).tolist() for _ in range(num_rows)]
    offsets = torch.tensor([0, *(len(ids) for ids in allowed_ids)]).cumsum(0)
    sets = torch.tensor([i for ids in allowed_ids for i in ids]), offsets
    factor, second = draw.normal(num_rows), draw.normal(num_rows)

    def fast(t: Outputs) -> Outputs:
        out = linear_logprobs(t["hidden"], head_of(t, transform), targets, allowed=sets, entropy="grad")
        return _summed(out.logp, out.entropy, factor, second)

    def plain(t: Outputs) -> Outputs:
        logits = logits_of(t, transform)
        logp, entropy = reference_logprobs(logits, targets, allowed=allowed_ids)
        return _summed(logp, entropy, factor, second)

    dtype = draw.pick(torch.float32, torch.float64)
    return Trial(leaves, fast, plain, dtype, str(transform), draw.native())


def draw_policy(draw: Draw) -> Trial:
    leaves, transform = draw.head()
    columns, num_rows = len(leaves["weight"]), len(leaves["hidden"])
    targets, name = draw.ids(columns, num_rows), draw.pick(*OBJECTIVES)
    lengths = _lengths(draw, num_rows)
    # No mask, a random one (sometimes empty), or one whose masked rows hold NaN or infinity.
    mask = None
    bad = draw.pick(None, None, math.nan, math.inf, -math.inf)
    if bad is not None or draw.pick(True, False):
        mask = (torch.rand(num_rows, generator=draw.torch) < draw.pick(0.6, 0.6, 0.1, 0.0)).double()
    old, advantages = draw.normal(num_rows) - 3.0, draw.normal(num_rows)
    with torch.no_grad():
        near = torch.log_softmax(logits_of(leaves, transform), -1).gather(1, targets[:, None])[:, 0]
    old = near + 0.3 * draw.normal(num_rows) if draw.pick(True, True, False) else old
    if bad is not None and mask is not None:
        old = torch.where(mask == 0, bad, old)
        advantages = torch.where(mask == 0, bad, advantages)
    normalizer = draw.pick("token_mean", "sequence_mean", "sequence_sum", "sum", 7.0)
    ref, options = draw.normal(num_rows) - 3.0, {"objective": name, **_terms(draw, name)}
    if bad is not None and mask is not None:
        ref = torch.where(mask == 0, bad, ref)
    options["normalizer"] = normalizer

    def fast(t: Outputs) -> Outputs:
        dtype = torch.promote_types(t["hidden"].dtype, torch.float32)
        out = linear_policy_loss(
            t["hidden"], head_of(t, transform), targets, old.to(dtype), advantages.to(dtype),
            mask=None if mask is None else mask.to(draw_mask), ref_logp=ref.to(dtype),
            sequence_lengths=lengths, **options,
        )  # fmt: skip
        return {"loss": out.loss}

    def plain(t: Outputs) -> Outputs:
        logits = logits_of(t, transform)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logp, entropies = reference_logprobs(logits, targets)
        dtype = torch.promote_types(trial.dtype, torch.float32)
        was, gain, other = (x.to(dtype).to(logp.dtype) for x in (old, advantages, ref))
        out = policy_loss(
            logp, was, gain, mask=None if mask is None else mask.to(logp.dtype), ref_logp=other,
            sequence_lengths=lengths, entropy=entropies, **options,
        )  # fmt: skip
        return {"loss": out.loss}

    draw_mask = draw.pick(torch.bool, torch.int64, torch.float32)
    text = f"{options}, {transform}, bad {bad}, mask {_count(mask)}"
    trial = Trial(leaves, fast, plain, draw.pick(*DTYPES[:4]), text, draw.native())
    return trial


def _count(mask: Tensor | None) -> str:
    return "none" if mask is None else f"{int(mask.sum())} of {len(mask)}"


def _terms(draw: Draw, name: str) -> dict[str, Any]:
    """Sometimes a KL term, an entropy bonus, a dual clip."""
    terms: dict[str, Any] = {}
    if draw.pick(False, False, True):
        terms |= {"kl": draw.pick("k1", "k2", "k3"), "kl_coef": 0.1}
    if draw.pick(False, False, True):
        terms["entropy_coef"] = 0.05
    if name not in ("cispo", "gspo") and draw.pick(False, True):
        terms["dual_clip"] = 3.0
    return terms


def _lengths(draw: Draw, num_rows: int) -> list[int]:
    lengths = []
    while num_rows:
        lengths.append(draw.python.randint(1, num_rows))
        num_rows -= lengths[-1]
    return lengths


def draw_preference(draw: Draw) -> Trial:
    pairs, length, columns, width = draw.size(3), 1 + draw.size(6), 1 + draw.size(200), draw.size(24)
    leaves = {
        "hidden": draw.normal(2 * pairs, length, width),
        "weight": draw.normal(columns, width, scale=draw.pick(0.3, 1.0, 3.0)),
    }
    labels = draw.ids(columns, 2 * pairs, length)
    labels[torch.rand(labels.shape, generator=draw.torch) < 0.3] = -100
    labels[:, 1] = labels[:, 1].clamp(min=0)
    name = draw.pick("dpo", "ipo", "cpo", "simpo", "orpo")
    sums = draw.normal(2 * pairs, scale=3.0) if name in ("dpo", "ipo") else None

    def fast(t: Outputs) -> Outputs:
        reference = None if sums is None else sums.to(t["hidden"].dtype)
        return {
            "loss": linear_preference_loss(
                t["hidden"], t["weight"], labels, objective=name, reference=reference
            ).loss
        }

    def plain(t: Outputs) -> Outputs:
        log_p = torch.log_softmax(t["hidden"][:, :-1] @ t["weight"].T, -1)
        wanted = labels[:, 1:]
        picked = log_p.gather(2, wanted.clamp(min=0)[..., None])[..., 0]
        total = torch.where(wanted != -100, picked, 0.0).sum(1)
        lengths = (wanted != -100).sum(1)
        reference = None if sums is None else sums.to(trial.dtype).to(total.dtype)
        return {"loss": _plain_pairs(name, total, lengths, reference)}

    trial = Trial(leaves, fast, plain, draw.pick(torch.float32, torch.float64), name, draw.native())
    return trial


def _plain_pairs(name: str, total: Tensor, lengths: Tensor, reference: Tensor | None) -> Tensor:
    chosen, rejected = total.chunk(2)
    sizes = lengths.chunk(2)
    if reference is not None:
        chosen, rejected = (x - r for x, r in zip((chosen, rejected), reference.chunk(2), strict=True))
    beta, gamma, coefficient = PREFERENCES[name]
    loss = pair_losses(name, chosen, rejected, *sizes, beta=beta, gamma=gamma)[0].mean()
    return loss - coefficient * chosen.sum() / sizes[0].sum() if coefficient else loss


def draw_normuon(draw: Draw) -> Trial:
    """One step, with a momentum from before or without: all forms of the iteration, odd gradients."""
    rows, columns = draw.size(40), draw.size(40)
    bank = draw.pick((), (), (2,), (3,))
    rank = draw.pick(0, 0, 1, 2)
    gradient = draw.normal(*bank, rows, columns)
    if rank:
        gradient = draw.normal(*bank, rows, rank) @ draw.normal(*bank, rank, columns)
    if draw.pick(False, False, False, True):
        gradient = gradient * (torch.rand(gradient.shape, generator=draw.torch) < 0.1)
    leaves = {
        "weight": draw.normal(*bank, rows, columns),
        "gradient": gradient * 10.0 ** draw.pick(-12, -3, 0, 6),
    }
    leaves["momentum"] = leaves["gradient"] * draw.pick(0.0, 0.0, 0.3)
    lr, decay = draw.pick(0.02, 1e-4), draw.pick(0.0, 1.2)
    strided = draw.pick(False, True)

    def fast(t: Outputs) -> Outputs:
        dtype = t["weight"].dtype
        parameter = torch.nn.Parameter(t["weight"].detach().clone())
        optimizer = NorMuon([parameter], lr=lr, weight_decay=decay, compute_dtype=dtype)
        grad = t["gradient"].detach()
        parameter.grad = grad.mT.contiguous().mT if strided else grad
        if bool(leaves["momentum"].any()):
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            with torch.no_grad():
                optimizer.state[parameter]["momentum_buffer"].copy_(t["momentum"])
                parameter.copy_(t["weight"])
                parameter.grad.copy_(grad)
        optimizer.step()
        return {"change": parameter.detach() - t["weight"].detach()}

    def plain(t: Outputs) -> Outputs:
        weight, grad, momentum = (t[name].detach() for name in ("weight", "gradient", "momentum"))
        second = torch.zeros_like(weight.sum(-1 if rows >= columns else -2, keepdim=True))
        after = normuon(weight, grad, momentum, second, lr=lr, weight_decay=decay)[0]
        return {"change": after - weight}

    text = f"rank {rank or 'full'}, lr {lr}, decay {decay}"
    return Trial(leaves, fast, plain, draw.pick(torch.float32, torch.float32, torch.float64), text)


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return (hidden @ weight.T).detach()


def draw_abuse(draw: Draw) -> Check:
    """NorMuon with invalid arguments: it refuses in one line and moves nothing, or stays finite."""
    nan, inf = math.nan, math.inf
    shape = draw.pick(
        (4, 6), (1, 1), (1, 9), (9, 1), (3, 4, 5), (2, 1, 3), (4, 0), (0, 4), (2, 0, 3), (5,), ()
    )
    options: dict[str, Any] = {}
    values: dict[str, tuple[Any, ...]] = {
        "lr": (nan, inf, -1.0, 0.0, 1e30, "x", None, 1e-45),
        "momentum": (nan, inf, 1.0, 7.0, -0.1, "x", None),
        "beta2": (nan, 1.0, -1.0, 0.0, None),
        "weight_decay": (nan, inf, -1.0, 1e30, "x"),
        "lr_mul": (nan, inf, [1.0, nan], [], [2.0, 3.0], "x", None, -1.0),
        "wd_mul": (nan, -1.0, "x"),
        "lr_rule": ("unknown", 3, lambda rows, cols: nan, lambda rows, cols: "x", None),
        "coefficients": ((), ((1.0, 2.0),), ((nan, 1.0, 1.0),), 3, ((3.4, -4.7, 2.0),)),
        "eps_mode": ("unknown", None),
        "compute_dtype": (torch.int32, torch.complex64, "float32", torch.bool, torch.float64, None),
        "residual": ("unknown", None),
        "nonfinite": ("unknown", "skip", None),
        "split": ([0], [-1], [99], "x", [1, 3], [nan]),
        "heads": (0, -1, 3, 1.5, "x", [1, 2]),
        "flatten": ("conv", "unknown", 3),
        "variance": ("off", "row", "unknown", None),
        "decay": ("decoupled", "unknown", None),
    }
    for name in draw.python.sample(sorted(values), draw.pick(0, 1, 1, 2)):
        options[name] = draw.pick(*values[name])
    gradient = draw.pick(
        "normal", "zero", "huge", "tiny", "nan", "inf", "-inf", "rank 1", "strided", "expanded", "none",
        "negative zero", "subnormal",
    )  # fmt: skip
    dtype = draw.pick(torch.float32, torch.float32, torch.float64, torch.bfloat16)
    load = draw.pick(
        None, None, "nan", "shape", "missing", "momentum 7", "no lr", "extra", "text", "int", "empty", "self"
    )

    def run() -> list[str]:
        parameter = torch.nn.Parameter(draw.normal(*shape).to(dtype))
        before = parameter.detach().clone()
        try:
            optimizer = NorMuon([parameter], **options)
            parameter.grad = _odd_gradient(draw, gradient, parameter)
            if load is not None:
                twin = NorMuon([torch.nn.Parameter(before.clone())], **options)
                twin.param_groups[0]["params"][0].grad = torch.ones_like(before)
                twin.step()
                optimizer.load_state_dict(_odd_state(load, twin.state_dict()))
            for _ in range(2):
                optimizer.step()
        except (ValueError, TypeError) as refusal:
            lines = [] if str(refusal).strip() and "\n" not in str(refusal) else [f"refused by {refusal!r}"]
            moved = not same_bits(parameter.detach(), before)
            return [*lines, *([f"moved a weight before it refused: {refusal}"] if moved else [])]
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
        large = max(float(options.get(key, 0.0) or 0.0) for key in ("lr", "weight_decay")) > 1e20
        if not bool(torch.isfinite(parameter).all()) and not large:
            return ["weights that are not finite"]
        return []

    text = {key: value if not callable(value) else "callable" for key, value in options.items()}
    return Check(f"{list(shape)} {dtype_name(dtype)}, gradient {gradient}, state {load}, {text}", run)


def _odd_gradient(draw: Draw, kind: str, parameter: Tensor) -> Tensor | None:
    shape, normal = parameter.shape, draw.normal(*parameter.shape).to(parameter.dtype)
    scales = {"huge": 1e30, "tiny": 1e-30, "subnormal": 1e-40, "zero": 0.0, "negative zero": -0.0}
    if kind in scales:
        return normal * scales[kind]
    if kind in ("nan", "inf", "-inf"):
        bad = normal.clone()
        bad.view(-1)[:1] = float(kind)
        return bad
    if kind == "rank 1" and len(shape) > 1:
        return normal[..., :1, :].expand(shape).clone()
    if kind == "strided" and len(shape) > 1:
        return normal.mT.contiguous().mT
    if kind == "expanded" and len(shape) > 0:
        return normal[..., :1].expand(shape) if shape[-1] else normal
    # torch itself refuses a gradient of another shape or dtype when it is assigned.
    return None if kind == "none" else normal


def _odd_state(kind: str, state: dict[str, Any]) -> dict[str, Any]:
    first = next(iter(state["state"].values()), {})
    tensors = [key for key, value in first.items() if isinstance(value, Tensor)]
    if kind == "nan" and tensors:
        first[tensors[0]] = torch.full_like(first[tensors[0]].float(), math.nan)
    if kind == "shape" and tensors:
        first[tensors[0]] = torch.zeros(7, 7)
    if kind == "text" and tensors:
        first[tensors[0]] = "x"
    if kind == "int" and tensors:
        first[tensors[0]] = first[tensors[0]].long()
    if kind == "missing":
        first.clear()
    if kind == "empty":
        return {}
    if kind == "momentum 7":
        state["param_groups"][0]["momentum"] = 7.0
    if kind == "no lr":
        state["param_groups"][0].pop("lr", None)
    if kind == "extra":
        state["param_groups"][0]["something"] = object()
    return state


Case = Trial | Check
FAMILIES: dict[str, Callable[[Draw], Case]] = {
    "logprobs": draw_logprobs,
    "tokens": draw_tokens,
    "cross_entropy": draw_cross_entropy,
    "distill": draw_distill,
    "allowed": draw_allowed,
    "policy": draw_policy,
    "preference": draw_preference,
    "normuon": draw_normuon,
    "abuse": draw_abuse,
}


def evaluate(function: Callable[[Outputs], Outputs], leaves: Outputs) -> Outputs:
    """Outputs, and the gradients of a loss where there is one."""
    inputs = {name: value.detach().clone().requires_grad_() for name, value in leaves.items()}
    outputs = function(inputs)
    loss = outputs.get("loss")
    if loss is not None and loss.requires_grad:
        loss.backward()
    values = {name: value.detach() for name, value in outputs.items()}
    gradients = {f"d{name}": leaf.grad for name, leaf in inputs.items() if leaf.grad is not None}
    return {**values, **gradients}


def fuzz(family: str, seed: int, number: int) -> Verdict:
    name = f"{family}:{seed}:{number}"
    case = FAMILIES[family](Draw(name))
    try:
        verdict = case.judge()
    except Exception as error:
        verdict = Verdict([f"{type(error).__name__}: {error}"])
    return replace(verdict, lines=[f"{name} ({case}) {line}" for line in verdict.lines])


def run(families: list[str], seed: int, cases: int) -> int:
    """A line per family; how many cases break the rule."""
    total = 0
    for family in families:
        started, broken, lucky = time.monotonic(), 0, 0
        for number in range(cases):
            verdict = fuzz(family, seed, number)
            broken, lucky = broken + bool(verdict.lines), lucky + verdict.lucky
            for line in verdict.lines:
                print(line, flush=True)
        seconds = time.monotonic() - started
        words = (
            f"{family}: {cases} cases of seed {seed}, {broken} break the rule, {lucky} lucky, {seconds:.0f} s"
        )
        print(words, flush=True)
        total += broken
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", default=[], help=", ".join(FAMILIES))
    parser.add_argument("--cases", type=int, default=200, help="per family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="family:seed:number of one case")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    unknown = [name for name in options.families if name not in FAMILIES]
    if unknown:
        parser.error(f"families: expected {', '.join(FAMILIES)}, got {unknown[0]}")
    if options.only:
        family, seed, number = options.only.split(":")
        verdict = fuzz(family, int(seed), int(number))
        print("\n".join(verdict.lines) or f"within the rule{', lucky' if verdict.lucky else ''}")
        return int(bool(verdict.lines))
    return int(run(options.families or list(FAMILIES), options.seed, options.cases) > 0)


if __name__ == "__main__":
    sys.exit(main())
