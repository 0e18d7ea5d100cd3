"""MegaContext: compute its lens loss with `leanstep.lens`, on its own working contexts, LensNet and
configuration.

    import mc.runtime
    from leanstep.integrations.megacontext import apply_leanstep

    apply_leanstep(mc.runtime)          # before or after the controllers are made
    apply_leanstep(mc.runtime, sampling=SamplingConfig(span_sampling="random"), gate=GateConfig(every=4))

Values and gradients equal upstream's code to rounding, random numbers are drawn as upstream draws them, and
the metrics it logs keep their names.

V contexts · W padded length · B samples · C variants per sample · P pairs
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leanstep.lens import (
    GateConfig,
    LensBatch,
    LensConfig,
    LensMetrics,
    ObjectiveConfig,
    SamplingConfig,
    lens_loss,
)
from leanstep.lens.batch import pad_rows, real_cells, row_table
from leanstep.lens.loss import pairs_per_sample
from leanstep.lens.metrics import peak_memory

__all__ = ["apply_leanstep", "lens_batch", "lens_config", "read_metrics"]
METHOD = "_compute_lens_losses"
TIMINGS = ("lens_loss_ms", "lens_forward_ms", "lens_ms")
# What the replacement calls or sets on a controller.
USED = ("_stack_working_contexts", "_run_lensnet_batched", "_batch_variant_scores")


def apply_leanstep(
    runtime: Any, *, sampling: SamplingConfig | None = None, gate: GateConfig | None = None
) -> Any:
    """Replace the lens loss of MegaContext and return `runtime`.

    Args:
        runtime: the module `mc.runtime`, its class `MCController`, or one controller.
        sampling: pairs and entries that the loss uses; `max_pairs` and `hard_negative_ratio` remain
            upstream's. None: every entry of every pair.
        gate: how often the loss is computed; LensNet does not run on skipped calls. Modes "skip" and
            "scale", counted in calls (unit "micro"). None: every call.

    A class or a module holds the settings for all its controllers; a controller for itself and its copies.
    """
    target = getattr(runtime, "MCController", runtime)
    missing = [name for name in (METHOD, *USED) if not callable(getattr(target, name, None))]
    if missing:
        name = getattr(runtime, "__name__", type(runtime).__name__)
        raise ValueError(
            f"runtime: expected mc.runtime, MCController or a controller, got {name} without {missing[0]}"
        )
    if gate is not None and gate.every > 1 and (gate.mode == "accumulate" or gate.unit != "micro"):
        raise ValueError(
            'gate: expected mode "skip" or "scale" and unit "micro" (upstream builds its variants anew in '
            f"every micro-step), got mode {gate.mode!r}, unit {gate.unit!r}"
        )
    owner = target if isinstance(target, type) else type(target)
    if not hasattr(getattr(owner, METHOD), "leanstep_stock"):
        setattr(owner, METHOD, _settings_or_stock(getattr(owner, METHOD)))
    target._leanstep_lens = (sampling, gate)
    return runtime


def _settings_or_stock(stock: Any) -> Any:
    """Return a method for the class: leanstep's for controllers with settings, else `stock`."""

    @functools.wraps(stock)
    def compute(controller: Any, batch_states: Sequence[Any]) -> Any:
        if getattr(controller, "_leanstep_lens", None) is None:
            return stock(controller, batch_states)
        return compute_lens_losses(controller, batch_states)

    compute.leanstep_stock = stock  # type: ignore[attr-defined]
    return compute


def is_due(controller: Any) -> bool:
    """Count the call and return whether the gate computes the loss in it."""
    _, gate = getattr(controller, "_leanstep_lens", (None, None))
    calls = vars(controller).get("_leanstep_calls", 0)
    controller._leanstep_calls = calls + 1
    return gate is None or gate.runs(calls)


def compute_lens_losses(controller: Any, batch_states: Sequence[Any]) -> Tensor | None:
    """`MCController._compute_lens_losses`: the loss of a micro-batch, with the telemetry upstream reads.

    Host syncs: one, for the telemetry.
    """
    if controller.config.num_random_variants <= 0:
        return None
    controller._last_preference_agreement = None
    controller._last_policy_stats = {}
    controller._last_span_score_corr = None
    if not is_due(controller):
        return torch.zeros((), device=controller.device, dtype=controller._target_dtype)
    variants = [variant for sample in batch_states for variant in sample.variants]
    scored = [[v.token_loss_value is not None for v in sample.variants] for sample in batch_states]
    config = lens_config(controller)
    order = draw_pair_order(controller, scored, config)
    if not variants:
        return torch.zeros((), device=controller.device, dtype=controller._target_dtype)
    scores, pos, lod, valid = score_contexts(controller, variants)
    if not order:
        return torch.zeros((), device=controller.device, dtype=controller._target_dtype)
    batch = make_batch(batch_states, config, pos, lod, valid)
    smooth = config.objective.budget_smooth_weight > 0
    state = scores.new_full((), controller._budget_mass_ema, dtype=torch.float64) if smooth else None
    with peak_memory(pos.device, vars(controller).setdefault("_leanstep_memory", {})):
        result = lens_loss(
            scores,
            batch,
            config,
            state=state,
            pair_order=torch.tensor(order).to(pos.device, non_blocking=True) if smooth else None,
        )
    assert result.metrics is not None
    read_telemetry(controller, result.metrics, None if valid is None else batch.valid)
    gate = config.gate
    return result.loss * gate.every if gate.mode == "scale" and gate.every > 1 else result.loss


def read_metrics(controller: Any) -> dict[str, float]:
    """Metrics of the last micro-step that upstream's script does not log, by upstream's naming.

    `mc/lens_loss_ms`, `mc/lens_forward_ms` and `mc/lens_ms` are upstream's own (`last_timings`), as is
    `mc/variants_total` (`last_batch_profile`); `mc/peak_lens_mb` is the peak memory of the loss on a GPU.
    """
    timings = {f"mc/{name}": controller.last_timings.get(name) for name in TIMINGS}
    profile = controller.last_batch_profile or {}
    memory = vars(controller).get("_leanstep_memory", {})
    values = {
        **timings,
        "mc/variants_total": profile.get("total_variants"),
        "mc/peak_lens_mb": memory.get("peak_lens_mb"),
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def make_batch(
    batch_states: Sequence[Any], config: LensConfig, pos: Tensor, lod: Tensor, valid: Tensor | None
) -> LensBatch:
    """Return upstream's variants with their losses, built on the contexts' device without host reads."""
    counts = tuple(len(sample.variants) for sample in batch_states)
    return LensBatch.from_tensors(
        pos,
        lod,
        loss_table(batch_states, pos.device),
        row_table(counts).to(pos.device, non_blocking=True),
        num_tokens=max(sample.tree.num_tokens() for sample in batch_states),
        valid=valid,
        counts=counts,
    )


def lens_batch(controller: Any, batch_states: Sequence[Any]) -> tuple[LensBatch, dict[str, Tensor]]:
    """Return the batch of a micro-step and LensNet's keyword inputs, for `AsyncLens` and `ContextCache`."""
    variants = [variant for sample in batch_states for variant in sample.variants]
    inputs, lengths = stack_contexts(controller, variants)
    pos, lod = inputs["positions"], inputs["lods"]
    return make_batch(batch_states, lens_config(controller), pos, lod, left_padded(lengths, pos)), inputs


def left_padded(lengths: Sequence[int], pos: Tensor) -> Tensor | None:
    """[V, W] bool: real cells of contexts that upstream padded on the left; None when all are real."""
    width = pos.shape[1]
    if min(lengths) == width:
        return None
    first = torch.tensor([width - length for length in lengths]).to(pos.device, non_blocking=True)
    return torch.arange(width, device=pos.device) >= first[:, None]


def lens_config(controller: Any) -> LensConfig:
    """Return upstream's settings as a `LensConfig`.

    `lens_kl_weight` is not among them: upstream stores a context's scores before it compares them with the
    stored ones, so its term is 0 with gradient 0.
    """
    config = controller.config
    return _lens_config(
        config.block_size,
        config.max_lod,
        float(config.lens_rank_weight),
        float(config.lens_margin),
        float(config.lens_budget_weight),
        float(config.lens_budget_smooth_weight),
        float(config.lens_budget_smooth_beta),
        float(config.lens_temperature),
        float(config.lens_collapse_weight),
        max(1, config.max_lens_pairs),
        float(config.lens_hard_negative_ratio),
        *getattr(controller, "_leanstep_lens", (None, None)),
    )


@functools.lru_cache(maxsize=16)
def _lens_config(
    block_size: int,
    max_lod: int,
    rank_weight: float,
    margin: float,
    budget_weight: float,
    budget_smooth_weight: float,
    budget_smooth_beta: float,
    temperature: float,
    collapse_weight: float,
    max_pairs: int,
    hard_negative_ratio: float,
    sampling: SamplingConfig | None,
    gate: GateConfig | None,
) -> LensConfig:
    own = {"max_pairs": max_pairs, "hard_negative_ratio": hard_negative_ratio}
    return LensConfig(
        block_size=block_size,
        max_lod=max_lod,
        objective=ObjectiveConfig(
            rank_weight=rank_weight,
            margin=margin,
            budget_weight=budget_weight,
            budget_smooth_weight=budget_smooth_weight,
            budget_smooth_beta=budget_smooth_beta,
            temperature=temperature,
            collapse_weight=collapse_weight,
        ),
        sampling=dataclasses.replace(sampling or SamplingConfig(), **own),
        gate=gate or GateConfig(),
    )


def draw_pair_order(controller: Any, scored: Sequence[Sequence[bool]], config: LensConfig) -> list[int]:
    """Return the order in which upstream visits the P pairs; empty if no sample has two losses.

    Upstream shuffles each sample's pairs with the controller's generator, which also draws later variants:
    the draws happen here whether or not the order matters.
    """
    slots = pairs_per_sample(max((len(sample) for sample in scored), default=1), config)
    order: list[int] = []
    some = False
    for i, sample in enumerate(scored):
        num_pairs = count_pairs(sum(sample), config)
        mine = list(range(i * slots, i * slots + num_pairs))
        if num_pairs:
            controller._rng.shuffle(mine)
            some = True
        order += [*mine, *range(i * slots + num_pairs, (i + 1) * slots)]
    return order if some else []


def count_pairs(num_scored: int, config: LensConfig) -> int:
    """Return the pairs of a sample with this many losses, as `build_pairs` builds them."""
    if num_scored < 2:
        return 0
    primary = num_scored - 1
    late = math.comb(num_scored, 2) - primary
    if late and config.sampling.hard_negative_ratio < 1:
        late = max(1, math.ceil(late * config.sampling.hard_negative_ratio))
    return min(primary + late, config.sampling.max_pairs)


def score_contexts(controller: Any, variants: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return LensNet's scores, positions, LODs and real cells (None = all) of all contexts, [V, W] each.

    As upstream does, contexts that have scores keep them (without a gradient) and the others are scored in
    one call; every variant has its `policy_scores` afterwards.
    """
    contexts = [variant.working_context for variant in variants]
    if any(variant.policy_scores is not None for variant in variants):
        cache = controller._batch_variant_scores(list(variants))
        lengths = [wc.length for wc in contexts]
        scores = pad_rows([cache[id(variant)] for variant in variants], 0, lengths)
        pos = pad_rows([wc.get_positions() for wc in contexts], 0, lengths)
        lod = pad_rows([wc.get_lod_tensor() for wc in contexts], 0, lengths)
        device = scores.device
        return scores, pos.to(device), lod.to(device), real_cells(lengths, device)
    start = time.time()
    stacked, lengths = stack_contexts(controller, variants)
    packed = time.time()
    scores = controller._run_lensnet_batched(stacked)
    controller.last_timings["variant_pack_ms"] = (packed - start) * 1000.0
    controller._last_lens_forward_ms += (time.time() - packed) * 1000.0
    pos, lod = stacked["positions"], stacked["lods"]
    scores = scores.reshape(pos.shape)
    width = pos.shape[1]
    for row, variant, length in zip(scores.detach().split(1), variants, lengths, strict=True):
        variant.policy_scores = row if length == width else row[:, width - length :]
    return scores, pos, lod, left_padded(lengths, pos)


def stack_contexts(controller: Any, variants: Sequence[Any]) -> tuple[dict[str, Tensor], list[int]]:
    """Return LensNet's inputs: `_stack_working_contexts`, in five copies if all contexts are equally long."""
    contexts = [variant.working_context for variant in variants]
    lengths = [wc.length for wc in contexts]
    if min(lengths) != max(lengths):
        return controller._stack_working_contexts(list(variants))
    cos, sin = zip(*(wc.get_positional_encodings()[:2] for wc in contexts), strict=True)
    device, dtype = controller.device, controller._target_dtype
    encodings = [torch.cat(rows).to(device, dtype) for rows in (cos, sin)]
    encodings = [rows.unsqueeze(2) if rows.dim() == 3 else rows for rows in encodings]
    return {
        "embeddings": torch.cat([wc.to_tensor() for wc in contexts]).to(device, dtype),
        "positions": torch.cat([wc.get_positions() for wc in contexts]).to(device, torch.int64),
        "lods": torch.cat([wc.get_lod_tensor() for wc in contexts]).to(device, torch.int64),
        "cos": encodings[0],
        "sin": encodings[1],
    }, lengths


@torch.no_grad()
def loss_table(batch_states: Sequence[Any], device: torch.device) -> Tensor:
    """Return [B, C] float64 token losses, NaN where a variant has none, without host reads."""
    losses = [[variant.token_loss_value for variant in sample.variants] for sample in batch_states]
    width = max(len(row) for row in losses)
    known = [loss for row in losses for loss in row if loss is not None]
    values = torch.stack(known).to(device, torch.float64) if known else torch.zeros(0, dtype=torch.float64)
    if len(known) == len(losses) * width:
        return values.view(-1, width)
    cells = [i * width + j for i, row in enumerate(losses) for j, x in enumerate(row) if x is not None]
    table = torch.full((len(losses) * width,), torch.nan, dtype=torch.float64, device=device)
    return table.index_copy_(0, torch.tensor(cells, dtype=torch.int64).to(device), values).view(-1, width)


@torch.no_grad()
def read_telemetry(controller: Any, metrics: LensMetrics, valid: Tensor | None) -> None:
    """Store upstream's telemetry in one read: agreement, span correlation, score statistics, EMA."""
    absolute, spread = score_statistics(metrics.scores.float(), valid)
    sums, delta, score_abs, score_std, ema = read_together(
        metrics.target_sums(), metrics.pairs.delta, absolute, spread, metrics.state
    )
    sums = sums.reshape(-1, 9)
    num_kept = np.count_nonzero(sums[:, 4])
    controller._last_span_score_corr = span_correlation(sums, np.tanh(delta))
    if num_kept:
        controller._last_preference_agreement = float(np.count_nonzero(sums[:, 1] > 0) / num_kept)
        controller._last_policy_stats = {
            "score_abs_mean": float(score_abs),
            "score_std_mean": float(score_std),
        }
    if metrics.config.objective.budget_smooth_weight > 0:
        controller._budget_mass_ema = float(ema)


def read_together(*tensors: Tensor) -> list[np.ndarray]:
    """Return the tensors' values on the host, in one transfer."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    joined = torch.cat([tensor.double().reshape(-1) for tensor in tensors]).cpu().numpy()
    ends = np.cumsum([tensor.numel() for tensor in tensors])[:-1]
    parts = np.split(joined, ends)
    return [part.reshape(tuple(tensor.shape)) for part, tensor in zip(parts, tensors, strict=True)]


def span_correlation(sums: np.ndarray, target: np.ndarray) -> float | None:
    """Return the Pearson correlation of scores with targets over all entries that have one; None if
    undefined.

    Args:
        sums: [P, 9] of `LensMetrics.target_sums`.
        target: [P] size of a pair's targets.
    """
    square_x, aligned, sum_x = sums[:, 0].sum(), sums[:, 1], sums[:, 2].sum()
    num_masked, balance = sums[:, 4], sums[:, 5]
    count = num_masked.sum()
    if count < 2:
        return None
    sum_t, square_t = target @ balance, target**2 @ num_masked
    spread_x, spread_t = square_x - sum_x**2 / count, square_t - sum_t**2 / count
    # Rounding noise in a constant column is not variation.
    if spread_x <= 1e-13 * square_x or spread_t <= 1e-13 * square_t:
        return None
    return float((target @ aligned - sum_x * sum_t / count) / (spread_x * spread_t) ** 0.5)


def score_statistics(scores: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the means over contexts of mean |score| and of the population standard deviation."""
    if valid is None:
        deviation = scores - scores.mean(1, keepdim=True)
        return scores.abs().mean(), torch.linalg.vector_norm(deviation, dim=1).mean() / scores.shape[1] ** 0.5
    x = torch.where(valid, scores, 0)
    length = valid.sum(1)
    deviation = torch.where(valid, x - (x.sum(1) / length)[:, None], 0)
    spread = torch.linalg.vector_norm(deviation, dim=1) / length.sqrt()
    return (x.abs().sum(1) / length).mean(), spread.mean()
