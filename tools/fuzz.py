"""Seeded random cases of the public losses and of NorMuon, each held against the fp64 rule.

    python tools/fuzz.py --cases 2000 --seed 1 policy distill
    python tools/fuzz.py --only policy:17            one case again

A case draws shapes, dtypes, options, masks and extreme values from its seed alone. Outputs and gradients of
the fast path may be at most `FACTOR` times as far from plain fp64 code as plain code in the same dtype, plus
a floor (leanstep/measure/parity.py). Prints one line per violation; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.logprob import (
    OBJECTIVES,
    Allowed,
    LMHead,
    PolicyBatch,
    ReferenceHead,
    Transform,
    Tuning,
    linear_logprobs,
    linear_policy_loss,
    policy_loss,
)
from leanstep.logprob.reference import reference_linear_logprobs
from leanstep.measure.parity import FACTOR, FLOOR, dtype_name, relative_error
from leanstep.muon import NorMuon, split_params
from leanstep.muon.reference import normuon
from leanstep.objectives import (
    TeacherHead,
    TeacherLogProbs,
    TeacherTopK,
    divergence,
    linear_cross_entropy,
    linear_distill_loss,
    linear_masked_logprobs,
    linear_preference_loss,
)
from leanstep.objectives.pairwise import PREFERENCES, pair_losses
from leanstep.objectives.reference import (
    reference_distill,
    reference_logits,
    reference_masked,
    reference_top_k,
)

Outputs = dict[str, Tensor]
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass
class Trial:
    """One case: leaves in fp64, and the same function of them computed fast and plainly."""

    leaves: Outputs
    fast: Callable[[Outputs], Outputs]
    plain: Callable[[Outputs], Outputs]
    dtype: torch.dtype
    text: str


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
        return scale * torch.randn(*shape, generator=self.torch, dtype=torch.float64)

    def ids(self, stop: int, *shape: int) -> Tensor:
        return torch.randint(stop, shape, generator=self.torch)

    def rows(self, count: int) -> Tensor | None:
        """None for all of them, or some in any order, repeats included."""
        if self.pick(True, False):
            return None
        return self.ids(count, max(1, self.python.randint(1, count) - (count > 1)))

    def tuning(self, columns: int, **options: Any) -> Tuning | None:
        if self.pick(True, False):
            return None
        return Tuning(budget=self.python.randint(1, 64 * columns), **options)

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


def with_bias(leaves: Outputs) -> Any:
    return LMHead(leaves["weight"], leaves["bias"]) if "bias" in leaves else leaves["weight"]


def logits_of(leaves: Outputs, transform: dict[str, Any]) -> Tensor:
    return reference_logits(leaves["hidden"], leaves["weight"], leaves.get("bias"), **transform)


def draw_logprobs(draw: Draw) -> Trial:
    leaves, transform = draw.head()
    rows, columns = draw.rows(len(leaves["hidden"])), len(leaves["weight"])
    count = len(leaves["hidden"]) if rows is None else len(rows)
    targets, entropy = draw.ids(columns, count), draw.pick("none", "metric", "grad")
    temperature = draw.pick(1.0, 0.4, 1.9, 0.3 + torch.rand(count, generator=draw.torch, dtype=torch.float64))
    factor, tuning = draw.normal(count), draw.tuning(columns, invariant=draw.pick(False, False, True))
    if tuning is not None and tuning.invariant:
        tuning = Tuning(invariant=True)

    def fast(t: Outputs) -> Outputs:
        out = linear_logprobs(
            t["hidden"], with_bias(t), targets, rows=rows, entropy=entropy, tuning=tuning,
            temperature=temperature, transform=Transform(**transform),
        )  # fmt: skip
        return _summed(out.logp, out.entropy if entropy == "grad" else None, factor)

    def plain(t: Outputs) -> Outputs:
        logp, entropies = reference_linear_logprobs(
            t["hidden"], t["weight"], targets, bias=t.get("bias"), rows=rows, temperature=temperature,
            **transform,
        )  # fmt: skip
        return _summed(logp, entropies if entropy == "grad" else None, factor)

    return Trial(leaves, fast, plain, draw.pick(*DTYPES), f"entropy {entropy}, {transform}, {tuning}")


def _summed(logp: Tensor, entropy: Tensor | None, factor: Tensor) -> Outputs:
    outputs = {"logp": logp, "loss": (logp * factor.to(logp.dtype)).sum()}
    if entropy is not None:
        outputs["entropy"] = entropy
        outputs["loss"] = outputs["loss"] + (entropy * factor.flip(0).to(entropy.dtype)).sum()
    return outputs


def draw_cross_entropy(draw: Draw) -> Trial:
    leaves, transform = draw.head()
    columns, smoothing = len(leaves["weight"]), draw.pick(0.0, 0.0, 0.1)
    labels = draw.ids(columns, len(leaves["hidden"]))
    labels[torch.rand(len(labels), generator=draw.torch) < draw.pick(0.0, 0.3)] = -100
    labels[0] = max(int(labels[0]), 0)
    reduction, tuning = draw.pick("mean", "sum"), draw.tuning(columns)

    def fast(t: Outputs) -> Outputs:
        return {
            "loss": linear_cross_entropy(
                t["hidden"], with_bias(t), labels, reduction=reduction, label_smoothing=smoothing,
                transform=Transform(**transform), tuning=tuning,
            )
        }  # fmt: skip

    def plain(t: Outputs) -> Outputs:
        loss = torch.nn.functional.cross_entropy(
            logits_of(t, transform), labels, reduction=reduction, label_smoothing=smoothing
        )
        return {"loss": loss}

    return Trial(leaves, fast, plain, draw.pick(*DTYPES), f"{reduction}, smoothing {smoothing}, {transform}")


def draw_distill(draw: Draw) -> Trial:
    leaves, transform = draw.head()
    columns, num_rows = len(leaves["weight"]), len(leaves["hidden"])
    kinds = ("forward_kl", "reverse_kl", ("jsd", 0.3), ("skew_kl", 0.1), "cross_entropy")
    kind, who = draw.pick(*kinds), draw.pick("head", "given", "top k")
    teacher_logits = draw.normal(num_rows, columns, scale=draw.pick(0.5, 3.0))
    far, wide = draw.normal(num_rows, 5), draw.normal(columns, 5)
    log_q = torch.log_softmax(teacher_logits, -1)
    top, ids = log_q.topk(min(draw.size(8), columns - 1), -1)
    tuning = draw.tuning(columns)

    def fast(t: Outputs) -> Outputs:
        dtype = t["hidden"].dtype
        teacher = {
            "head": lambda: TeacherHead(far.to(dtype), wide.to(dtype)),
            "given": lambda: TeacherLogProbs(log_q.to(dtype)),
            "top k": lambda: TeacherTopK(ids, top.to(dtype)),
        }[who]()
        out = linear_distill_loss(
            t["hidden"], with_bias(t), teacher, divergence=kind, transform=Transform(**transform),
            tuning=tuning,
        )  # fmt: skip
        return {"loss": out.loss}

    def plain(t: Outputs) -> Outputs:
        logits = logits_of(t, transform)
        dtype = logits.dtype
        # The teacher's numbers are constants: rounded once to the case's dtype, exact from there on.
        if who == "top k":
            given = top.to(trial.dtype).to(dtype)
            rows = reference_top_k(torch.log_softmax(logits, -1), ids, given, kind)
        elif who == "head":
            far_logits = far.to(trial.dtype).to(dtype) @ wide.to(trial.dtype).to(dtype).T
            rows = reference_distill(logits, far_logits, kind)
        else:
            given = log_q.to(trial.dtype).to(dtype)
            rows = _given_divergence(logits, given, kind)
        return {"loss": rows.mean()}

    trial = Trial(leaves, fast, plain, draw.pick(torch.float32, torch.float64), f"{who}, {kind}, {transform}")
    return trial


def _given_divergence(logits: Tensor, log_q: Tensor, kind: Any) -> Tensor:
    return divergence(torch.log_softmax(logits, -1), log_q, kind)


def draw_masked(draw: Draw) -> Trial:
    leaves, transform = draw.head()
    columns, num_rows = len(leaves["weight"]), len(leaves["hidden"])
    targets = draw.ids(columns, num_rows)
    kept = [sorted(set(draw.ids(columns, draw.size(12)).tolist())) for _ in range(num_rows)]
    offsets = torch.tensor([0, *(len(ids) for ids in kept)]).cumsum(0)
    sets = Allowed(torch.tensor([i for ids in kept for i in ids]), offsets)
    far, wide = draw.normal(num_rows, 5), draw.normal(columns, 5)
    factor, with_kl = draw.normal(num_rows), draw.pick(True, False)

    def fast(t: Outputs) -> Outputs:
        dtype = t["hidden"].dtype
        reference = ReferenceHead(wide.to(dtype), far.to(dtype)) if with_kl else None
        out = linear_masked_logprobs(
            t["hidden"], with_bias(t), targets, sets, entropy="grad", reference=reference,
            transform=Transform(**transform),
        )  # fmt: skip
        return _masked_sum(out.logp, out.entropy, out.kl, factor)

    def plain(t: Outputs) -> Outputs:
        logits = logits_of(t, transform)
        far_logits = None
        if with_kl:
            far_logits = far.to(trial.dtype).to(logits.dtype) @ wide.to(trial.dtype).to(logits.dtype).T
            far_logits = reference_logits_like(far_logits, transform)
        return _masked_sum(*reference_masked(logits, targets, kept, far_logits), factor)

    trial = Trial(leaves, fast, plain, draw.pick(torch.float32, torch.float64), f"kl {with_kl}, {transform}")
    return trial


def reference_logits_like(logits: Tensor, transform: dict[str, Any]) -> Tensor:
    """A reference head has the student's scale and softcap."""
    scaled = logits * transform.get("scale", 1.0)
    cap = transform.get("softcap")
    return scaled if cap is None else cap * torch.tanh(scaled / cap)


def _masked_sum(logp: Tensor, entropy: Tensor | None, kl: Tensor | None, factor: Tensor) -> Outputs:
    outputs = _summed(logp, entropy, factor)
    if kl is not None:
        outputs["loss"] = outputs["loss"] + (kl * factor.to(kl.dtype)).sum()
    return outputs


def draw_policy(draw: Draw) -> Trial:
    leaves, transform = draw.head()
    columns, num_rows = len(leaves["weight"]), len(leaves["hidden"])
    targets, name = draw.ids(columns, num_rows), draw.pick(*OBJECTIVES)
    lengths = _lengths(draw, num_rows)
    # No mask, a random one (never empty), or one whose masked rows hold NaN or infinity.
    mask = None
    bad = draw.pick(None, None, math.nan, math.inf, -math.inf)
    if bad is not None or draw.pick(True, False):
        mask = (torch.rand(num_rows, generator=draw.torch) < 0.6).double()
        mask[draw.python.randrange(num_rows)] = 1.0
    old, advantages = draw.normal(num_rows) - 3.0, draw.normal(num_rows)
    with torch.no_grad():
        near = torch.log_softmax(logits_of(leaves, transform), -1).gather(1, targets[:, None])[:, 0]
    old = near + 0.3 * draw.normal(num_rows) if draw.pick(True, True, False) else old
    if bad is not None and mask is not None:
        old = torch.where(mask == 0, bad, old)
        advantages = torch.where(mask == 0, bad, advantages)
    normalizer = draw.pick("token_mean", "sequence_mean", "sequence_sum", "sum", 7.0)
    options = {"objective": name, "normalizer": normalizer}
    tuning = draw.tuning(columns)

    def fast(t: Outputs) -> Outputs:
        dtype = torch.promote_types(t["hidden"].dtype, torch.float32)
        batch = PolicyBatch(
            old.to(dtype), advantages.to(dtype), None if mask is None else mask.to(dtype),
            sequence_lengths=lengths,
        )  # fmt: skip
        transformed = Transform(**transform)
        out = linear_policy_loss(
            t["hidden"], with_bias(t), targets, batch, transform=transformed, tuning=tuning, **options
        )
        return {"loss": out.loss}

    def plain(t: Outputs) -> Outputs:
        logits = logits_of(t, transform)
        logp = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
        logp = logp.gather(1, targets[:, None])[:, 0]
        dtype = torch.promote_types(trial.dtype, torch.float32)
        given = [None if x is None else x.to(dtype).to(logp.dtype) for x in (old, advantages, mask)]
        out = policy_loss(logp, given[0], given[1], mask=given[2], sequence_lengths=lengths, **options)
        return {"loss": out.loss}

    trial = Trial(leaves, fast, plain, draw.pick(torch.float32, torch.float64), f"{options}, bad {bad}")
    return trial


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
    name = draw.pick("dpo", "robust", "hinge", "ipo", "cpo", "simpo", "orpo")
    sums = draw.normal(2 * pairs, scale=3.0) if name in ("dpo", "robust", "hinge", "ipo") else None

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

    trial = Trial(leaves, fast, plain, draw.pick(torch.float32, torch.float64), name)
    return trial


def _plain_pairs(name: str, total: Tensor, lengths: Tensor, reference: Tensor | None) -> Tensor:
    chosen, rejected = total.chunk(2)
    sizes = lengths.chunk(2)
    references = (None, None) if reference is None else reference.chunk(2)
    losses = pair_losses(
        name, chosen, rejected, ref_chosen=references[0], ref_rejected=references[1],
        chosen_lengths=sizes[0], rejected_lengths=sizes[1],
    ).losses.mean()  # fmt: skip
    coefficient = PREFERENCES[name].nll_coef
    return losses - coefficient * chosen.sum() / sizes[0].sum() if coefficient else losses


def draw_normuon(draw: Draw) -> Trial:
    rows, columns = 1 + draw.size(40), 1 + draw.size(40)
    rank = draw.pick(0, 0, 1, 2)
    gradient = draw.normal(rows, columns)
    if rank:
        gradient = draw.normal(rows, rank) @ draw.normal(rank, columns)
    leaves = {"weight": draw.normal(rows, columns)}
    gradient = gradient * 10.0 ** draw.pick(-12, -3, 0, 6)
    decay = draw.pick(0.0, 1.2)

    def fast(t: Outputs) -> Outputs:
        model = torch.nn.Module()
        model.matrix = torch.nn.Parameter(t["weight"].detach().clone())
        optimizer = NorMuon(split_params(model), lr=0.02, weight_decay=decay, compute_dtype=t["weight"].dtype)
        model.matrix.grad = gradient.to(t["weight"].dtype)
        optimizer.step()
        return {"change": model.matrix.detach() - t["weight"].detach()}

    def plain(t: Outputs) -> Outputs:
        weight = t["weight"].detach()
        grad = gradient.to(trial.dtype).to(weight.dtype)
        second = torch.zeros_like(weight.sum(-1 if rows >= columns else -2, keepdim=True))
        after = normuon(weight, grad, torch.zeros_like(weight), second, lr=0.02, weight_decay=decay)[0]
        return {"change": after - weight}

    trial = Trial(leaves, fast, plain, torch.float32, f"[{rows}, {columns}] rank {rank or 'full'}, {decay}")
    return trial


FAMILIES: dict[str, Callable[[Draw], Trial]] = {
    "logprobs": draw_logprobs,
    "cross_entropy": draw_cross_entropy,
    "distill": draw_distill,
    "masked": draw_masked,
    "policy": draw_policy,
    "preference": draw_preference,
    "normuon": draw_normuon,
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


def violations(trial: Trial) -> list[str]:
    """What breaks the rule, a line for each output or gradient."""
    rounded = {name: value.to(trial.dtype) for name, value in trial.leaves.items()}
    truth = evaluate(trial.plain, {name: value.double() for name, value in rounded.items()})
    plain = evaluate(trial.plain, rounded)
    fast = evaluate(trial.fast, rounded)
    lines = []
    for name, exact in truth.items():
        if name not in fast:
            lines.append(f"{name}: missing")
            continue
        error = relative_error(fast[name].double(), exact)
        own = relative_error(plain[name].double(), exact)
        bound = FACTOR[trial.dtype] * own + FLOOR[trial.dtype]
        if not error <= bound and not (math.isnan(own) or not bool(torch.isfinite(exact).all())):
            lines.append(f"{name}: error {error:.2e}, plain {own:.2e}, bound {bound:.2e}")
    return lines


def fuzz(family: str, seed: int, number: int) -> list[str]:
    name = f"{family}:{seed}:{number}"
    trial = FAMILIES[family](Draw(name))
    shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in trial.leaves.items())
    return [
        f"{name} ({dtype_name(trial.dtype)}; {shapes}; {trial.text}) {line}" for line in violations(trial)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
        lines = fuzz(family, int(seed), int(number))
        print("\n".join(lines) or "within the rule")
        return int(bool(lines))
    total = 0
    for family in options.families or FAMILIES:
        broken = 0
        for number in range(options.cases):
            lines = fuzz(family, options.seed, number)
            broken += bool(lines)
            if lines:
                print("\n".join(lines), flush=True)
        print(f"{family}: {options.cases} cases, {broken} break the rule", flush=True)
        total += broken
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
