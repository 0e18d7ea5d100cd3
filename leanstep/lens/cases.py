"""Cases of this folder: the objective alone, and a training step with a controller."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from leanstep.case import Case, Implementation, Outputs, Params, Step, Workload, register, with_gradients
from leanstep.lens.batch import GistList, LensBatch
from leanstep.lens.contexts import (
    ContextReader,
    LensNet,
    planned_length,
    reachable_length,
    sample_variants,
)
from leanstep.lens.lens_config import LensConfig, SamplingConfig
from leanstep.lens.lens_objective import lens_loss
from leanstep.lens.pairs import block_ids, span_table
from leanstep.lens.reference import lens_loss_reference, reference_pairs

_BATCH_TENSORS = ("pos", "lod", "valid", "loss", "row", "tokens", "baseline")


def make_batch(
    params: Params, generator: torch.Generator, device: torch.device
) -> tuple[LensBatch, LensConfig]:
    """Return variants of random sequences with random losses, drawn as in training."""
    config = LensConfig(
        block_size=params["block"],
        max_lod=params["max_lod"],
        sampling=SamplingConfig(max_pairs=params["max_pairs"], num_random_variants=params["variants"] - 1),
    )
    tokens = params["tokens"]
    target = reachable_length(tokens, planned_length(tokens, 0.0), config.block_size)
    samples = []
    for _ in range(params["samples"]):
        variants = sample_variants(
            tokens,
            config.block_size,
            config.max_lod,
            config.sampling.num_random_variants,
            target,
            generator,
            recent_tokens=min(128, tokens // 8),
        )
        losses = 2.5 + 0.2 * torch.randn(len(variants), generator=generator)
        samples.append([replace(v, loss=x) for v, x in zip(variants, losses.tolist(), strict=True)])
    batch = LensBatch.from_variants(samples, config, num_tokens=tokens, loss_dtype=torch.float32)
    return batch.to(device), config


def batch_tensors(batch: LensBatch) -> dict[str, Tensor]:
    tensors = {name: getattr(batch, name) for name in _BATCH_TENSORS}
    if batch.gists is not None:
        tensors |= {"gist_rows": batch.gists.rows, "gist_key": batch.gists.key}
    return tensors


def batch_of(tensors: dict[str, Tensor], constants: dict[str, Any]) -> LensBatch:
    """Rebuild the batch from the tensors of a workload, without computation."""
    gists = None
    if "gist_rows" in tensors:
        gists = GistList(tensors["gist_rows"], tensors["gist_key"], *constants["gists"])
    names = {name: tensors[name] for name in _BATCH_TENSORS}
    return LensBatch(**names, num_tokens=constants["num_tokens"], gists=gists)  # type: ignore[arg-type]


def _constants(batch: LensBatch, config: LensConfig) -> dict[str, Any]:
    gists = None if batch.gists is None else (batch.gists.stride, batch.gists.top_level)
    return {"config": config, "num_tokens": batch.num_tokens, "gists": gists}


def _make_loss(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    batch, config = make_batch(params, generator, device)
    scores = torch.tanh(torch.randn(batch.pos.shape, generator=generator)).to(device, dtype)
    upstream = torch.tensor(1.7, dtype=torch.float32, device=device)
    tensors = {"scores": scores, "upstream:loss": upstream, **batch_tensors(batch)}
    return Workload(tensors, _constants(batch, config))


def _outputs(result: Any) -> Outputs:
    return {"loss": result.loss, "kept": result.kept, **result.terms}


def _backend(name: str):
    def forward(tensors: dict[str, Tensor], constants: dict[str, Any]) -> Outputs:
        return _outputs(
            lens_loss(tensors["scores"], batch_of(tensors, constants), constants["config"], backend=name)
        )

    return with_gradients(forward, wrt=("scores",))


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

    spans = span_table(config, scores.device, scores.dtype)
    totals = []
    for sample in range(batch.loss.shape[0]):
        for _, better, worse, delta in reference_pairs(batch.loss[sample], config, sample):
            good, bad = int(batch.row[sample, better]), int(batch.row[sample, worse])
            pos, lod, valid = batch.pos[bad], batch.lod[bad], batch.valid[bad]
            want = table_of(good)[pos]
            opinion = valid & (want >= 0)
            expand = opinion & (want < lod)
            request = opinion & (want > lod) & (lod < config.max_lod)
            ids, num_blocks = block_ids(pos, lod, batch.num_tokens, config)
            hits = torch.zeros(num_blocks + 1, dtype=torch.bool, device=scores.device)
            hits[ids[request]] = True
            hits[num_blocks] = False
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


_LOSS_TINY = {"samples": 3, "variants": 3, "tokens": 96, "block": 4, "max_lod": 2, "max_pairs": 8}

register(
    Case(
        name="lens-loss",
        summary="the focus controller's objective over a micro-batch: pairs, targets, terms, gradient",
        make=_make_loss,
        implementations=(
            Implementation(
                "reference",
                "reference",
                with_gradients(_reference, wrt=("scores",)),
                note="one .item() per entry",
            ),
            Implementation(
                "leanstep",
                "fast",
                _backend("auto"),
                note="closed-form gradient in torch operations; reads only blocks under gists",
            ),
            Implementation("eager", "fast", _backend("eager"), note="autograd over dense rows"),
            Implementation(
                "per-pair",
                "peer",
                with_gradients(_per_pair, wrt=("scores",)),
                note="tensor operations, one loop per pair",
            ),
            Implementation("limit", "limit", _streaming_pass, note="copies every input once"),
        ),
        sizes={
            "tiny": _LOSS_TINY,
            "odd": {**_LOSS_TINY, "variants": 5, "tokens": 401, "block": 3, "max_pairs": 6},
            "empty": {**_LOSS_TINY, "variants": 1},
            "cpu": {**_LOSS_TINY, "samples": 8, "tokens": 512, "block": 16},
            "seed": {**_LOSS_TINY, "samples": 13, "tokens": 2048, "block": 32},
            "large": {**_LOSS_TINY, "samples": 64, "tokens": 8192, "block": 32},
            "gpu": {**_LOSS_TINY, "samples": 13, "tokens": 2048, "block": 32},
        },
        prove_sizes=("tiny", "odd", "empty"),
        dtypes=(torch.float32, torch.bfloat16),
    )
)


def _make_step(
    params: Params, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Workload:
    batch, config = make_batch(params, generator, device)
    width, block, top = params["width"], config.block_size, config.max_lod
    tokens = torch.randint(params["vocab"], (params["samples"], params["tokens"]), generator=generator)
    sequence = torch.zeros(batch.num_contexts, dtype=torch.int64)
    counts = batch.counts or ()
    sequence[:] = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    tensors = {"token_ids": tokens.to(device), "sequence": sequence.to(device), **batch_tensors(batch)}
    sizes = {"vocab": params["vocab"], "width": width, "block": block, "top": top, "tokens": params["tokens"]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(1 << 30, (), generator=generator)))
        reader, lens = _models({"sizes": sizes, "blocks": params["layers"]})
        for module in (reader, lens):
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=0.6 * parameter.shape[-1] ** -0.5)
    for prefix, module in (("reader.", reader), ("lens.", lens)):
        tensors |= {
            prefix + name: value.detach().to(device, dtype) for name, value in module.state_dict().items()
        }
    return Workload(tensors, {**_constants(batch, config), "sizes": sizes, "blocks": params["layers"]})


def _models(constants: dict[str, Any]) -> tuple[ContextReader, LensNet]:
    sizes = constants["sizes"]
    geometry = {"block_size": sizes["block"], "max_lod": sizes["top"]}
    reader = ContextReader(
        sizes["vocab"], sizes["width"], max_tokens=sizes["tokens"], num_blocks=constants["blocks"], **geometry
    )
    return reader, LensNet(sizes["width"], 32, **geometry)


def _training_step(objective: str):
    """Build a micro-step: the base model's NLL of each variant, LensNet's scores, the objective, backward."""

    def build(workload: Workload) -> Step:
        tensors, constants = workload.tensors, workload.constants
        config: LensConfig = constants["config"]
        reader, lens = _models(constants)
        for prefix, module in (("reader.", reader), ("lens.", lens)):
            state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            module.to(tensors["pos"].device, next(iter(state.values())).dtype).load_state_dict(state)
        batch = batch_of(tensors, constants)
        ids, sequence = tensors["token_ids"], tensors["sequence"]
        counted = torch.ones_like(ids, dtype=torch.bool)
        first = batch.row[:, 0]
        parameters = [*reader.parameters(), *lens.parameters()]

        def step() -> Outputs:
            pos, lod, valid, which = batch.pos, batch.lod, batch.valid, sequence
            if objective == "plain":
                pos, lod, valid, which = (t.index_select(0, first) for t in (pos, lod, valid, which))
            entries = reader.embed(ids, which, pos, lod)
            losses = reader.losses(entries, pos, lod, valid, ids, which, counted)
            loss = losses.mean()
            outputs: Outputs = {"loss": loss}
            if objective != "plain":
                scores = lens(entries.detach(), pos, lod, valid, batch.num_tokens)
                live = losses.detach().float() if losses.dtype != torch.float64 else losses.detach()
                # Unused slots of ragged samples stay NaN.
                table = torch.where(batch.loss == batch.loss, live[batch.row], torch.nan)
                current = replace(batch, loss=table)
                if objective == "reference":
                    extra = lens_loss_reference(scores, current, config).loss
                elif objective == "fast":
                    extra = lens_loss(scores, current, config).loss
                else:
                    extra = scores.sum()
                outputs["lens_loss"] = extra
                loss = loss + config.objective.lens_loss_weight * extra
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
            if objective in ("plain", "limit"):
                return {}
            # One vector per model: a bias whose gradient cancels to zero has no scale to compare with.
            num_reader = len(list(reader.parameters()))
            for name, part in (("reader", grads[:num_reader]), ("lens", grads[num_reader:])):
                outputs[f"grad:{name}"] = torch.cat([g.reshape(-1) for g in part if g is not None])
            return {name: value.detach() for name, value in outputs.items()}

        return step

    return build


def _annotate_step(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    times = {name: row.get("median_s") for name, row in rows.items()}
    notes = {}
    fast, limit, plain = (times.get(name) for name in ("leanstep", "limit", "plain-step"))
    if fast and limit:
        notes["leanstep"] = f"{fast / limit:.3f}x the limit row"
    if fast and plain:
        notes["leanstep"] = (
            notes.get("leanstep", "") + f"; {fast / plain:.2f}x the plain step without a controller"
        )
    if limit and plain:
        notes["limit"] = f"{limit / plain:.2f}x the plain step: three contexts instead of one, plus LensNet"
    return notes


_STEP_TINY = {**_LOSS_TINY, "samples": 2, "width": 16, "vocab": 32, "layers": 1}
_STEP_LARGE = {
    **_STEP_TINY,
    "samples": 13,
    "tokens": 2048,
    "block": 32,
    "width": 256,
    "vocab": 4096,
    "layers": 4,
}

register(
    Case(
        name="lens-step",
        summary="one micro-step of a small base model with its controller: 1 + 2 variants per sample",
        make=_make_step,
        implementations=(
            Implementation(
                "reference", "reference", _training_step("reference"), note="the objective as loops"
            ),
            Implementation("leanstep", "fast", _training_step("fast")),
            Implementation(
                "plain-step",
                "peer",
                _training_step("plain"),
                note="the base model on the baseline only, no controller",
            ),
            Implementation(
                "limit", "limit", _training_step("limit"), note="scores.sum() instead of the objective"
            ),
        ),
        sizes={
            "tiny": _STEP_TINY,
            "cpu": {
                **_STEP_TINY,
                "samples": 4,
                "tokens": 512,
                "block": 32,
                "width": 128,
                "vocab": 512,
                "layers": 2,
            },
            "large": _STEP_LARGE,
            "gpu": _STEP_LARGE,
        },
        dtypes=(torch.float32, torch.bfloat16),
        annotate=_annotate_step,
    )
)
