"""one micro-step of a small base model with its controller: 1 + 2 variants per sample

python -m benchmarks.lens_step --help
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness import (
    Benchmark,
    Outputs,
    Params,
    Row,
    Step,
    Workload,
    main,
)
from benchmarks.lens_workloads import LOSS_TINY, batch_of, batch_tensors, constants, make_batch
from leanstep.lens import LensConfig, lens_loss, lens_loss_reference
from recipes.lens.contexts import ContextReader, LensNet


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
    return Workload(tensors, {**constants(batch, config), "sizes": sizes, "blocks": params["layers"]})


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


_STEP_TINY = {**LOSS_TINY, "samples": 2, "width": 16, "vocab": 32, "layers": 1}


_STEP_LARGE = {
    **_STEP_TINY,
    "samples": 13,
    "tokens": 2048,
    "block": 32,
    "width": 256,
    "vocab": 4096,
    "layers": 4,
}


BENCHMARK = Benchmark(
    name="lens-step",
    summary="one micro-step of a small base model with its controller: 1 + 2 variants per sample",
    make=_make_step,
    rows=(
        Row("plain", "reference", _training_step("reference"), note="the objective as loops"),
        Row("leanstep", "fast", _training_step("fast")),
        Row(
            "plain-step",
            "peer",
            _training_step("plain"),
            note="the base model on the baseline only, no controller",
        ),
        Row("limit", "limit", _training_step("limit"), note="scores.sum() instead of the objective"),
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

if __name__ == "__main__":
    main(BENCHMARK)
