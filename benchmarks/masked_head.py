"""Log-prob and entropy over replayed sampling masks: mean 8 kept ids per row, 46 % have one.

python -m benchmarks.masked_head --help
"""

# T rows · R selected rows · S sequences · D model · V vocabulary

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.harness import (
    Benchmark,
    Params,
    Workload,
    main,
)
from benchmarks.objectives_workloads import DTYPES, Constants, Tensors, gradient_row, normal
from leanstep.heads import linear_logprobs


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
        "hidden": normal(generator, tokens, width).to(device, dtype),
        "weight": normal(generator, vocab, width, scale=2.0 / width**0.5).to(device, dtype),
        "upstream:logp": normal(generator, tokens).to(device),
        "upstream:entropy": normal(generator, tokens, scale=0.1).to(device),
    }
    return Workload({**tensors, "ids": ids, "offsets": offsets, "targets": targets.to(device)})


def _masked_plain(t: Tensors, constants: Constants) -> Tensors:
    """Compute all logits; a softmax over the sets for the log-prob, one over the vocabulary for entropy."""
    logits = linear(t["hidden"], t["weight"])
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    row_of = torch.repeat_interleave(t["offsets"].diff())
    mask = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    mask[row_of.to(logits.device), t["ids"].to(logits.device)] = True
    log_p = torch.log_softmax(logits, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    of_sets = torch.log_softmax(logits.masked_fill(~mask, -torch.inf), -1)
    return {"logp": of_sets.gather(1, t["targets"].unsqueeze(-1)).squeeze(-1), "entropy": entropy}


def _masked_fast(t: Tensors, constants: Constants) -> Tensors:
    allowed = t["ids"], t["offsets"]
    out = linear_logprobs(t["hidden"], t["weight"], t["targets"], allowed=allowed, entropy="grad")
    assert out.entropy is not None
    return {"logp": out.logp, "entropy": out.entropy}


BENCHMARK = Benchmark(
    name="masked-head",
    summary="Log-prob over replayed sampling masks, and entropy: mean 8 kept ids per row, 46 % have one.",
    make=make_masked,
    rows=(
        gradient_row("plain", "reference", _masked_plain, "all logits, masked"),
        gradient_row("leanstep", "fast", _masked_fast, "one tile of logits at a time"),
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

if __name__ == "__main__":
    main(BENCHMARK)
