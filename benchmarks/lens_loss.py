"""the focus controller's objective over a micro-batch: pairs, targets, terms, gradient

python -m benchmarks.lens_loss --help
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import (
    Benchmark,
    Outputs,
    Params,
    Row,
    Step,
    Workload,
    main,
    with_gradients,
)
from benchmarks.lens_workloads import LOSS_TINY, batch_of, batch_tensors, constants, make_batch
from leanstep.lens import LensBatch, LensConfig, lens_loss, lens_loss_reference
from leanstep.lens.reference import reference_pairs


def _make_loss(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    batch, config = make_batch(params, generator, device)
    scores = torch.tanh(torch.randn(batch.pos.shape, generator=generator)).to(device, dtype)
    upstream = torch.tensor(1.7, dtype=torch.float32, device=device)
    tensors = {"scores": scores, "upstream:loss": upstream, **batch_tensors(batch)}
    return Workload(tensors, constants(batch, config))


def _outputs(result: Any) -> Outputs:
    return {"loss": result.loss, "kept": result.kept, **result.terms}


def _fast(tensors: dict[str, Tensor], constants: dict[str, Any]) -> Outputs:
    return _outputs(lens_loss(tensors["scores"], batch_of(tensors, constants), constants["config"]))


def _compiled(workload: Workload) -> Step:
    batch, config = batch_of(workload.tensors, workload.constants), workload.constants["config"]

    @torch.compile(fullgraph=True, dynamic=False)
    def loss_of(scores: Tensor) -> Outputs:
        return _outputs(lens_loss(scores, batch, config))

    return with_gradients(lambda tensors, _: loss_of(tensors["scores"]), wrt=("scores",))(workload)


def _reference(tensors: dict[str, Tensor], constants: dict[str, Any]) -> Outputs:
    return _outputs(lens_loss_reference(tensors["scores"], batch_of(tensors, constants), constants["config"]))


def per_pair_loss(scores: Tensor, batch: LensBatch, config: LensConfig) -> Tensor:
    """Compute the objective (default terms) with tensor operations per pair in a Python loop over pairs."""
    tables: dict[int, Tensor] = {}

    def table_of(context: int) -> Tensor:
        if context not in tables:
            table = torch.full((batch.num_tokens + 1,), -1, dtype=torch.int8, device=scores.device)
            table[batch.pos[context]] = batch.lod[context]
            table[batch.num_tokens] = -1
            tables[context] = table
        return tables[context]

    b, top = config.block_size, config.max_lod
    spans = torch.tensor([b**lod for lod in range(top + 1)], dtype=scores.dtype, device=scores.device)
    totals = []
    for sample in range(batch.loss.shape[0]):
        for _, better, worse, delta in reference_pairs(batch.loss[sample], config, sample):
            good, bad = int(batch.row[sample, better]), int(batch.row[sample, worse])
            pos, lod, valid = batch.pos[bad], batch.lod[bad], batch.valid[bad]
            want = table_of(good)[pos]
            opinion = valid & (want >= 0)
            expand = opinion & (want < lod)
            request = opinion & (want > lod) & (lod < config.max_lod)
            parents = torch.pow(b, lod.long() + 1)
            ids = lod.long() * (batch.num_tokens // b + 1) + pos // parents  # distinct across levels
            hits = torch.zeros(
                (top + 1) * (batch.num_tokens // b + 1), dtype=torch.bool, device=scores.device
            )
            hits[ids[request]] = True
            collapse = hits[ids] & valid
            masked = expand | collapse
            if delta <= 0 or not masked.any():
                continue
            x = scores[bad][masked]
            down = collapse[masked]
            sign = torch.where(down, -1.0, 1.0).to(x.dtype)
            strength = max(math.tanh(delta), 1e-6)
            weight = torch.where(down, config.objective.collapse_weight, 1.0).to(x.dtype)
            scale = max(1.0, delta) / config.objective.tau
            total = (torch.nn.functional.softplus(-sign * x * scale) * strength * weight).mean()
            if down.any() and not down.all():
                gap = x[~down].mean() - x[down].mean()
                total = total + config.objective.rank_weight * torch.relu(config.objective.margin - gap)
            span = spans[lod[masked].long()]
            positive, negative = (span * torch.relu(x)).sum(), (span * torch.relu(-x)).sum()
            total = (
                total
                + config.objective.budget_weight * ((positive - negative) / (positive + negative + 1e-6)) ** 2
            )
            totals.append(total)
    return torch.stack(totals).mean() if totals else scores.sum() * 0


def _per_pair(tensors: dict[str, Tensor], constants: dict[str, Any]) -> Outputs:
    return {"loss": per_pair_loss(tensors["scores"], batch_of(tensors, constants), constants["config"])}


def _streaming_pass(workload: Workload) -> Step:
    names = ("scores", "pos", "lod", "valid")

    def step() -> Outputs:
        # Copying reads every input once; the copy of the scores represents the gradient write.
        for name in names:
            workload.tensors[name].clone()
        return {}

    return step


BENCHMARK = Benchmark(
    name="lens-loss",
    summary="the focus controller's objective over a micro-batch: pairs, targets, terms, gradient",
    make=_make_loss,
    rows=(
        Row(
            "plain",
            "reference",
            with_gradients(_reference, wrt=("scores",)),
            note="one .item() per entry",
        ),
        Row(
            "leanstep",
            "fast",
            with_gradients(_fast, wrt=("scores",)),
            note="one page of torch operations, autograd",
        ),
        Row("compiled", "fast", _compiled, note="the same under torch.compile", on_request=True),
        Row(
            "per-pair",
            "peer",
            with_gradients(_per_pair, wrt=("scores",)),
            note="tensor operations, one loop per pair",
        ),
        Row("limit", "limit", _streaming_pass, note="copies every input once"),
    ),
    sizes={
        "tiny": LOSS_TINY,
        "odd": {**LOSS_TINY, "variants": 5, "tokens": 401, "block": 3, "max_pairs": 6},
        "empty": {**LOSS_TINY, "variants": 1},
        "cpu": {**LOSS_TINY, "samples": 8, "tokens": 512, "block": 16},
        "seed": {**LOSS_TINY, "samples": 13, "tokens": 2048, "block": 32},
        "large": {**LOSS_TINY, "samples": 64, "tokens": 8192, "block": 32},
        "gpu": {**LOSS_TINY, "samples": 13, "tokens": 2048, "block": 32},
    },
    prove_sizes=("tiny", "odd", "empty"),
    dtypes=(torch.float32, torch.bfloat16),
)

if __name__ == "__main__":
    main(BENCHMARK)
