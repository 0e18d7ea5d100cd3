"""DPO from hidden states of policy and reference: a quarter of the positions are completions.

python -m benchmarks.dpo --help
"""

# T rows · R selected rows · S sequences · D model · V vocabulary

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, logsigmoid

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
from leanstep.heads import TeacherHead, linear_preference_loss


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
        "hidden": normal(generator, *shape, width),
        "weight": normal(generator, vocab, width, scale=2.0 / width**0.5),
        "ref_hidden": normal(generator, *shape, width),
        "ref_weight": normal(generator, vocab, width, scale=2.0 / width**0.5),
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
    reference = TeacherHead(t["ref_hidden"], t["ref_weight"])
    return {"loss": linear_preference_loss(t["hidden"], t["weight"], t["labels"], reference=reference).loss}


def _dpo_gemms(workload: Workload) -> Step:
    """Compute the logits of reference and policy, then d hidden and d weight, on the completions' rows."""
    t = workload.tensors
    rows = (t["labels"][:, 1:] != -100).sum()
    hidden, ref_hidden = (t[name].flatten(0, 1)[: int(rows)] for name in ("hidden", "ref_hidden"))
    return four_products(ref_hidden, t["ref_weight"], hidden, t["weight"])


BENCHMARK = Benchmark(
    name="dpo",
    summary="DPO from hidden states of policy and reference: a quarter of the positions are completions.",
    make=make_dpo,
    rows=(
        gradient_row("plain", "reference", _dpo_plain, "all logits of both heads"),
        gradient_row("leanstep", "fast", _dpo_fast, "completion rows, one tile at a time"),
        gradient_row("liger-dpo", "peer", peers.liger_dpo, "all positions", requires=("liger_kernel",)),
        Row("limit", "limit", _dpo_gemms, note="4 bare GEMMs on the completions' rows"),
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

if __name__ == "__main__":
    main(BENCHMARK)
