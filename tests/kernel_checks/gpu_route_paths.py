"""Public functions of the head on the GPU code path, each with a plain torch version, for the fuzz test.

A path takes a `Draw` and returns (fast, plain, leaves): two functions of the leaves, which return the same
outputs, the second in plain torch and in any dtype.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.gpt.loss import head_loss
from leanstep.gpt.reference import softcap_loss
from leanstep.logprob import (
    Allowed,
    LMHead,
    PolicyBatch,
    PolicyObjective,
    ReferenceHead,
    Tiles,
    Transform,
    Tuning,
    linear_logprobs,
    linear_policy_loss,
    policy_loss,
    token_logprobs,
)
from leanstep.objectives import (
    TeacherHead,
    linear_cross_entropy,
    linear_distill_loss,
    linear_masked_logprobs,
)

# 1, odd, no multiple of 8, a multiple of 32, more than one tile.
VOCABULARIES = (1, 7, 157, 160, 301)
Path = tuple[Callable[..., Sequence[Tensor]], Callable[..., Sequence[Tensor]], Sequence[Tensor]]


@dataclass
class Draw:
    """Sizes and tensors of one example; the same for the same seed."""

    seed: int
    vocabulary: int

    def __post_init__(self) -> None:
        self.choose = random.Random(self.seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.dtype = self.choose.choice((torch.bfloat16, torch.float32))
        self.rows, self.width = self.choose.choice((1, 5, 13)), self.choose.choice((8, 24, 33))
        self.hidden = self.normal(self.rows, self.width)
        self.weight = self.normal(self.vocabulary, self.width) / 2
        self.bias = self.normal(self.vocabulary)
        self.targets = torch.randint(self.vocabulary, (self.rows,), generator=self.generator)
        self.tile = self.choose.choice((None, Tiles(4, 64, "vocab"), Tiles(16, 41, "vocab")))
        self.softcap = self.choose.choice((None, 3.0))
        self.temperature = self.choose.choice((1.0, 0.7))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return plain logits in fp32 or wider: 16-bit operands and fp32 sums, like the fast paths."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        z = hidden.to(wide) @ weight.to(wide).T + (0.0 if bias is None else bias.to(wide))
        z = z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)
        return z / self.temperature

    @property
    def transform(self) -> Transform:
        return Transform(softcap=self.softcap)


def scores(z: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = z.log_softmax(-1)
    entropy = -torch.where(log_p.isfinite(), log_p.exp() * log_p, 0.0).sum(-1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy


def logprobs(draw: Draw) -> Path:
    def fast(hidden, weight, bias):
        out = linear_logprobs(
            hidden, LMHead(weight, bias), draw.targets, entropy="grad", temperature=draw.temperature,
            transform=draw.transform, tuning=Tuning(tile=draw.tile),
        )  # fmt: skip
        return out.logp, out.entropy

    def plain(hidden, weight, bias):
        return scores(draw.logits(hidden, weight, bias), draw.targets)

    return fast, plain, (draw.hidden, draw.weight, draw.bias)


def kl_to_reference(draw: Draw) -> Path:
    other = draw.normal(draw.vocabulary, draw.width) / 2

    def fast(hidden, weight):
        out = linear_logprobs(
            hidden, weight, draw.targets, outputs=("kl",), reference=ReferenceHead(other),
            temperature=draw.temperature, transform=draw.transform, tuning=Tuning(tile=draw.tile),
        )  # fmt: skip
        return out.logp, out.kl

    def plain(hidden, weight):
        z = draw.logits(hidden, weight)
        log_p, log_q = (
            z.log_softmax(-1),
            draw.logits(draw.hidden.to(hidden.dtype), other.to(hidden.dtype)).log_softmax(-1),
        )
        return scores(z, draw.targets)[0], (log_p.exp() * (log_p - log_q)).sum(-1)

    return fast, plain, (draw.hidden, draw.weight)


def masked_logprobs(draw: Draw) -> Path:
    count = draw.choose.choice((1, min(3, draw.vocabulary), min(20, draw.vocabulary)))
    ids = torch.randint(draw.vocabulary, (draw.rows * count,), generator=draw.generator)
    allowed = Allowed(ids, torch.arange(0, draw.rows * count + 1, count))
    other = draw.normal(draw.vocabulary, draw.width) / 2
    mask = torch.zeros(draw.rows, draw.vocabulary, dtype=torch.bool)
    mask.scatter_(1, ids.view(draw.rows, count), True).scatter_(1, draw.targets[:, None], True)

    def fast(hidden, weight):
        out = linear_masked_logprobs(
            hidden, weight, draw.targets, allowed, entropy="grad", temperature=draw.temperature,
            reference=ReferenceHead(other), transform=draw.transform,
        )  # fmt: skip
        return out.logp, out.entropy, out.kl

    def plain(hidden, weight):
        def over_kept(z):
            # Finite, so that plain code has a gradient; exp of it is 0.
            return z.masked_fill(~mask, -1e4)

        z = over_kept(draw.logits(hidden, weight))
        log_p = z.log_softmax(-1)
        log_q = over_kept(draw.logits(draw.hidden.to(hidden.dtype), other.to(hidden.dtype))).log_softmax(-1)
        return *scores(z, draw.targets), (log_p.exp() * (log_p - log_q)).sum(-1)

    return fast, plain, (draw.hidden, draw.weight)


def policy(draw: Draw) -> Path:
    objective = PolicyObjective(entropy_coef=0.01, kl_coef=0.04)
    logp = scores(draw.logits(draw.hidden, draw.weight), draw.targets)[0].float()
    noise = torch.randn(3, draw.rows, generator=draw.generator)
    old, reference, advantages = logp + 0.2 * noise[0], logp + 0.1 * noise[1], noise[2]

    def fast(hidden, weight):
        batch = PolicyBatch(old, advantages, ref_logp=reference)
        options = {"temperature": draw.temperature, "transform": draw.transform}
        return (linear_policy_loss(hidden, weight, draw.targets, batch, objective=objective, **options).loss,)

    def plain(hidden, weight):
        logp, entropy = scores(draw.logits(hidden, weight), draw.targets)
        values = (old.to(logp.dtype), advantages.to(logp.dtype))
        options = {"entropy": entropy, "ref_logp": reference.to(logp.dtype), "objective": objective}
        return (policy_loss(logp, *values, **options).loss,)

    return fast, plain, (draw.hidden, draw.weight)


def distillation(draw: Draw) -> Path:
    far, wide = draw.normal(draw.rows, 2 * draw.width), draw.normal(draw.vocabulary, 2 * draw.width) / 2
    kind = draw.choose.choice(("forward_kl", "reverse_kl"))
    draw.softcap = None

    def fast(hidden, weight):
        teacher = TeacherHead(far, wide)
        return (
            linear_distill_loss(hidden, weight, teacher, divergence=kind, temperature=draw.temperature).loss,
        )

    def plain(hidden, weight):
        log_p = draw.logits(hidden, weight).log_softmax(-1)
        log_q = draw.logits(far.to(hidden.dtype), wide.to(hidden.dtype)).log_softmax(-1)
        pair = (log_q, log_p) if kind == "forward_kl" else (log_p, log_q)
        return ((pair[0].exp() * (pair[0] - pair[1])).sum(-1).mean(),)

    return fast, plain, (draw.hidden, draw.weight)


def cross_entropy(draw: Draw) -> Path:
    draw.softcap, draw.temperature = None, 1.0
    # The first label of a sequence has no position before it.
    labels = torch.cat([draw.targets[-1:], draw.targets])[: draw.rows]

    def fast(hidden, weight):
        return (linear_cross_entropy(hidden, weight, labels),)

    def plain(hidden, weight):
        return (torch.nn.functional.cross_entropy(draw.logits(hidden, weight), labels),)

    return fast, plain, (draw.hidden, draw.weight)


def gpt_loss(draw: Draw) -> Path:
    softcap, mtp = draw.choose.choice((None, (23.0, 5.0, 7.5))), (1.0, 0.5)
    rows = draw.choose.choice((None, 4))

    def fast(hidden, weight):
        return (
            head_loss(
                hidden, weight, draw.targets, mtp=mtp, softcap=softcap, transposed=False, tile_rows=rows
            ),
        )

    def plain(hidden, weight):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        return (softcap_loss(hidden.to(wide) @ weight.to(wide).T, draw.targets, mtp, softcap).sum(),)

    return fast, plain, (draw.hidden, draw.weight)


def existing_logits(draw: Draw) -> Path:
    logits = draw.normal(draw.rows, draw.vocabulary)

    def fast(z):
        out = token_logprobs(z, draw.targets, entropy="grad", temperature=draw.temperature)
        return out.logp, out.entropy

    def plain(z):
        wide = torch.promote_types(z.dtype, torch.float32)
        return scores(z.to(wide) / draw.temperature, draw.targets)

    return fast, plain, (logits,)


def trainer_scores(draw: Draw) -> Path:
    """The calls of the TRL and transformers adapters, under bf16 autocast, with fp32 weights."""
    from integrations.tiny_models import causal_lm

    from leanstep.integrations.causal_lm import score_labels

    draw.dtype, draw.softcap = torch.float32, None
    family = draw.choose.choice(("llama", "gpt2"))
    model = causal_lm(family, vocab=max(draw.vocabulary, 7), width=32, layers=1)
    labels = torch.randint(draw.vocabulary, (2, 6), generator=draw.generator)
    labels[0, :2] = labels[1, 4:] = -100
    hidden = torch.randn(2, 6, 32, generator=draw.generator)
    weight, mask = model.get_output_embeddings().weight.detach(), labels[:, 1:] != -100

    def fast(h):
        with torch.autocast("cpu", torch.bfloat16):
            out = score_labels(model, h, labels, entropy="grad", temperature=draw.temperature)
        return out.logp, out.entropy

    def plain(h):
        low = torch.bfloat16 if h.dtype == torch.float32 else h.dtype
        z = draw.logits(h[:, :-1].flatten(0, 1).to(low), weight.to(low))
        logp, entropy = scores(z, labels[:, 1:].flatten().clamp(min=0))
        return logp.view(2, 5) * mask, entropy.view(2, 5) * mask

    return fast, plain, (hidden,)


PATHS: dict[str, Callable[[Draw], Any]] = {
    "linear_logprobs": logprobs,
    "linear_logprobs, kl": kl_to_reference,
    "linear_masked_logprobs": masked_logprobs,
    "linear_policy_loss": policy,
    "linear_distill_loss": distillation,
    "linear_cross_entropy": cross_entropy,
    "gpt head_loss": gpt_loss,
    "token_logprobs": existing_logits,
    "transformers, TRL": trainer_scores,
}
