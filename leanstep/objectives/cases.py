"""The cases of this folder: distillation of two heads, DPO from hidden states, replayed sampling masks."""

# T rows · R selected rows · S sequences · D model · V vocabulary

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, logsigmoid

from leanstep.case import Case, Implementation, Params, Step, Workload, register, with_gradients
from leanstep.logprob import Allowed, ReferenceHead
from leanstep.objectives import peers
from leanstep.objectives.distill import linear_distill_loss
from leanstep.objectives.linear_preference import linear_preference_loss
from leanstep.objectives.reference import reference_distill
from leanstep.objectives.sampling_masks import linear_masked_logprobs
from leanstep.objectives.teachers import TeacherHead

Tensors = dict[str, Tensor]
Constants = dict[str, Any]


def _normal(generator: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=generator) * scale


def make_distill(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    tokens, width, teacher_width, vocab = (params[k] for k in ("tokens", "hidden", "teacher", "vocab"))
    rows = torch.arange(tokens)[-max(round(params["response_frac"] * tokens), 1) :]
    tensors = {
        "hidden": _normal(generator, tokens, width),
        "weight": _normal(generator, vocab, width, scale=2.0 / width**0.5),
        "teacher_hidden": _normal(generator, tokens, teacher_width),
        "teacher_weight": _normal(generator, vocab, teacher_width, scale=2.0 / teacher_width**0.5),
    }
    tensors = {name: x.to(device, dtype) for name, x in tensors.items()}
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    tensors |= {"rows": rows.to(device), "targets": targets.to(device)}
    return Workload(tensors, {"beta": params["beta"]})


def _distill_plain(t: Tensors, constants: Constants) -> Tensors:
    logits, teacher = linear(t["hidden"], t["weight"]), linear(t["teacher_hidden"], t["teacher_weight"])
    if logits.dtype == torch.bfloat16:
        logits, teacher = logits.float(), teacher.float()
    values = reference_distill(logits[t["rows"]], teacher[t["rows"]], ("jsd", constants["beta"]))
    return {"loss": values.mean()}


def _distill_fast(t: Tensors, constants: Constants) -> Tensors:
    teacher = TeacherHead(t["teacher_hidden"], t["teacher_weight"])
    kind = ("jsd", constants["beta"])
    out = linear_distill_loss(t["hidden"], t["weight"], teacher, divergence=kind, rows=t["rows"])
    return {"loss": out.loss}


def _distill_gemms(workload: Workload) -> Step:
    """Compute both heads' logits, then d hidden and d weight of the student's, on the selected rows."""
    t = workload.tensors
    hidden, teacher = (t[name].index_select(0, t["rows"]) for name in ("hidden", "teacher_hidden"))
    return _four_products(teacher, t["teacher_weight"], hidden, t["weight"])


def _four_products(other: Tensor, other_weight: Tensor, hidden: Tensor, weight: Tensor) -> Step:
    """Compute only the other head's logits, this head's logits, then this head's d hidden and d weight."""
    logits = hidden.new_empty(len(hidden), len(weight))

    def step() -> Tensors:
        torch.mm(other, other_weight.t(), out=logits)
        torch.mm(hidden, weight.t(), out=logits)
        torch.mm(logits, weight)
        torch.mm(logits.t(), hidden)
        return {}

    return step


def make_dpo(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    shape = (2 * params["pairs"], params["tokens"])
    width, vocab = params["hidden"], params["vocab"]
    prompt = shape[1] - round(params["response_frac"] * shape[1])
    labels = torch.randint(0, vocab, shape, generator=generator)
    # Mask the prompts, and end the completion a little earlier in every sequence.
    labels[:, :prompt] = -100
    for row in range(shape[0]):
        labels[row, shape[1] - row % max(shape[1] // 8, 1) :] = -100
    tensors = {
        "hidden": _normal(generator, *shape, width),
        "weight": _normal(generator, vocab, width, scale=2.0 / width**0.5),
        "ref_hidden": _normal(generator, *shape, width),
        "ref_weight": _normal(generator, vocab, width, scale=2.0 / width**0.5),
    }
    tensors = {name: x.to(device, dtype) for name, x in tensors.items()}
    return Workload({**tensors, "labels": labels.to(device)})


def _dpo_plain(t: Tensors, constants: Constants) -> Tensors:
    """Compute all logits of both heads, as a trainer without a fused head does."""

    def sums(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = linear(hidden[:, :-1], weight)
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        labels = t["labels"][:, 1:]
        logp = torch.log_softmax(logits, -1).gather(2, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return torch.where(labels != -100, logp, 0.0).sum(1)

    with torch.no_grad():
        reference = sums(t["ref_hidden"], t["ref_weight"])
    chosen, rejected = (sums(t["hidden"], t["weight"]) - reference).chunk(2)
    return {"loss": -logsigmoid(0.1 * (chosen - rejected)).mean()}


def _dpo_fast(t: Tensors, constants: Constants) -> Tensors:
    reference = ReferenceHead(t["ref_weight"], t["ref_hidden"])
    return {"loss": linear_preference_loss(t["hidden"], t["weight"], t["labels"], reference=reference).loss}


def _dpo_gemms(workload: Workload) -> Step:
    """Compute the logits of reference and policy, then d hidden and d weight, on the completions' rows."""
    t = workload.tensors
    rows = (t["labels"][:, 1:] != -100).sum()
    hidden, ref_hidden = (t[name].flatten(0, 1)[: int(rows)] for name in ("hidden", "ref_hidden"))
    return _four_products(ref_hidden, t["ref_weight"], hidden, t["weight"])


def kept_sizes(num_rows: int, most: int, generator: torch.Generator) -> Tensor:
    """Draw set sizes like those of a trained model under top-p: one id, or log-normally many.

    prime-rl#2979 reports a mean of 8, a median of 2 and a p99 of 82; 46 % of the rows have one id.
    """
    many = torch.exp(1.75 + 1.28 * torch.randn(num_rows, generator=generator)).round().clamp(2, most)
    return torch.where(torch.rand(num_rows, generator=generator) < 0.46, 1.0, many).long()


def make_masked(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    tokens, width, vocab = params["tokens"], params["hidden"], params["vocab"]
    sizes = kept_sizes(tokens, vocab, generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    ids = torch.randint(0, vocab, (int(offsets[-1]),), generator=generator)
    # The sampled token is the first of its set.
    targets = ids[offsets[:-1]]
    tensors = {
        "hidden": _normal(generator, tokens, width).to(device, dtype),
        "weight": _normal(generator, vocab, width, scale=2.0 / width**0.5).to(device, dtype),
        "upstream:logp": _normal(generator, tokens).to(device),
        "upstream:entropy": _normal(generator, tokens, scale=0.1).to(device),
    }
    return Workload({**tensors, "ids": ids, "offsets": offsets, "targets": targets.to(device)})


def _masked_plain(t: Tensors, constants: Constants) -> Tensors:
    """Compute all logits, set those outside the sets to -inf, and take a softmax over the vocabulary."""
    logits = linear(t["hidden"], t["weight"])
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    row_of = torch.repeat_interleave(t["offsets"].diff())
    mask = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    mask[row_of.to(logits.device), t["ids"].to(logits.device)] = True
    log_p = torch.log_softmax(logits.masked_fill(~mask, -torch.inf), -1)
    entropy = -(log_p.exp() * log_p.masked_fill(~mask, 0.0)).sum(-1)
    return {"logp": log_p.gather(1, t["targets"].unsqueeze(-1)).squeeze(-1), "entropy": entropy}


def _masked_fast(t: Tensors, constants: Constants) -> Tensors:
    allowed = Allowed(t["ids"], t["offsets"])
    out = linear_masked_logprobs(t["hidden"], t["weight"], t["targets"], allowed, entropy="grad")
    assert out.entropy is not None
    return {"logp": out.logp, "entropy": out.entropy}


def _row(name: str, kind: Any, function: Any, note: str, **options: Any) -> Implementation:
    return Implementation(name, kind, with_gradients(function, ("hidden", "weight")), note=note, **options)


def _distill_size(tokens: int, hidden: int, teacher: int, vocab: int, response_frac: float) -> Params:
    return {
        "tokens": tokens,
        "hidden": hidden,
        "teacher": teacher,
        "vocab": vocab,
        "response_frac": response_frac,
        "beta": 0.5,
    }


DTYPES = (torch.float32, torch.float64, torch.bfloat16)

register(
    Case(
        name="distill",
        summary="Generalized JSD between a student's and a wider teacher's head, from hidden states.",
        make=make_distill,
        implementations=(
            _row("reference", "reference", _distill_plain, "all rows of both heads, then the selected ones"),
            _row("leanstep", "fast", _distill_fast, "4 GEMMs, one chunk of rows at a time"),
            _row("trl-chunked", "peer", peers.trl_divergence, "same rows", requires=("trl",)),
            _row("liger-jsd", "peer", peers.liger_jsd, "same rows", requires=("liger_kernel",)),
            Implementation("limit", "limit", _distill_gemms, note="4 bare GEMMs on the selected rows"),
        ),
        sizes={
            "tiny": _distill_size(48, 16, 24, 401, 0.5),
            "check": _distill_size(96, 64, 96, 1271, 0.5),
            "cpu": _distill_size(2048, 512, 768, 32000, 0.25),
            "all": _distill_size(1024, 512, 768, 32000, 1.0),
            "gpu": _distill_size(8192, 2560, 4096, 76032, 0.25),
        },
        dtypes=DTYPES,
        # The error of the plain code varies from 4e-7 to 16e-7 between seeds: it is the maximum of few
        # values.
        floor=1e-6,
        truth_size="check",
    )
)

register(
    Case(
        name="dpo",
        summary="DPO from hidden states of policy and reference: a quarter of the positions are completions.",
        make=make_dpo,
        implementations=(
            _row("reference", "reference", _dpo_plain, "all logits of both heads"),
            _row("leanstep", "fast", _dpo_fast, "completion rows, one tile at a time"),
            _row("liger-dpo", "peer", peers.liger_dpo, "all positions", requires=("liger_kernel",)),
            Implementation("limit", "limit", _dpo_gemms, note="4 bare GEMMs on the completions' rows"),
        ),
        sizes={
            "tiny": {"pairs": 3, "tokens": 16, "hidden": 16, "vocab": 401, "response_frac": 0.25},
            "check": {"pairs": 4, "tokens": 32, "hidden": 64, "vocab": 1271, "response_frac": 0.25},
            "cpu": {"pairs": 4, "tokens": 256, "hidden": 512, "vocab": 32000, "response_frac": 0.25},
            "gpu": {"pairs": 4, "tokens": 2048, "hidden": 2560, "vocab": 76032, "response_frac": 0.25},
        },
        dtypes=DTYPES,
        truth_size="check",
    )
)

register(
    Case(
        name="masked-head",
        summary="Log-prob and entropy over replayed sampling masks: mean 8 kept ids per row, 46 % have one.",
        make=make_masked,
        implementations=(
            _row("reference", "reference", _masked_plain, "all logits, masked"),
            _row("leanstep", "fast", _masked_fast, "only kept ids; rows with one id are not projected"),
        ),
        sizes={
            "tiny": {"tokens": 24, "hidden": 16, "vocab": 2003},
            "check": {"tokens": 64, "hidden": 64, "vocab": 4001},
            "cpu": {"tokens": 512, "hidden": 896, "vocab": 151936},
            "gpu": {"tokens": 8192, "hidden": 2560, "vocab": 151936},
        },
        dtypes=DTYPES,
        truth_size="check",
    )
)
