"""Generalized JSD between a student's and a wider teacher's head, from hidden states.

python -m benchmarks.distill --help
"""

# T rows · R selected rows · S sequences · D model · V vocabulary

from __future__ import annotations

import torch
from torch.nn.functional import linear

from benchmarks import objectives_peers as peers
from benchmarks.harness import (
    Benchmark,
    Params,
    Row,
    Step,
    Workload,
    main,
)
from benchmarks.objectives_workloads import DTYPES, Constants, Tensors, four_products, gradient_row, normal
from leanstep.heads import TeacherHead, linear_distill_loss
from leanstep.heads.reference import reference_distill


def make_distill(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    tokens, width, teacher_width, vocab = (params[k] for k in ("tokens", "hidden", "teacher", "vocab"))
    rows = torch.arange(tokens)[-max(round(params["response_frac"] * tokens), 1) :]
    tensors = {
        "hidden": normal(generator, tokens, width),
        "weight": normal(generator, vocab, width, scale=2.0 / width**0.5),
        "teacher_hidden": normal(generator, tokens, teacher_width),
        "teacher_weight": normal(generator, vocab, teacher_width, scale=2.0 / teacher_width**0.5),
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
    return four_products(teacher, t["teacher_weight"], hidden, t["weight"])


def _distill_size(tokens: int, hidden: int, teacher: int, vocab: int, response_frac: float) -> Params:
    return {
        "tokens": tokens,
        "hidden": hidden,
        "teacher": teacher,
        "vocab": vocab,
        "response_frac": response_frac,
        "beta": 0.5,
    }


BENCHMARK = Benchmark(
    name="distill",
    summary="Generalized JSD between a student's and a wider teacher's head, from hidden states.",
    make=make_distill,
    rows=(
        gradient_row("plain", "reference", _distill_plain, "all rows of both heads, then the selected ones"),
        gradient_row("leanstep", "fast", _distill_fast, "6 GEMMs, one block of rows at a time"),
        gradient_row("trl-chunked", "peer", peers.trl_divergence, "same rows", requires=("trl",)),
        gradient_row("liger-jsd", "peer", peers.liger_jsd, "same rows", requires=("liger_kernel",)),
        Row("limit", "limit", _distill_gemms, note="4 bare GEMMs on the selected rows"),
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

if __name__ == "__main__":
    main(BENCHMARK)
