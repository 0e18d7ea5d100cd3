"""The objective between calls: gate, stages, state, telemetry, sampling."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch

from leanstep.lens import (
    GateConfig,
    LensConfig,
    LensObjective,
    ObjectiveConfig,
    SamplingConfig,
    lens_loss,
    lens_objective,
)

from .test_closed_form import random_batch


@pytest.fixture(autouse=True)
def no_slow_warning(monkeypatch):
    """A busy machine may exceed the limit of the warning, and warnings are errors here."""
    monkeypatch.setattr(lens_objective, "SLOW_MS", math.inf)


def scored(seed=2):
    batch = random_batch(seed=seed)
    return batch, torch.randn(batch.pos.shape, generator=torch.Generator().manual_seed(seed)).tanh()


def test_gate_every_one_is_no_gate():
    batch, x = scored()
    config = LensConfig(block_size=4, objective=ObjectiveConfig(budget_smooth_weight=0.2))
    objective = LensObjective(config)
    state = None
    for _ in range(3):
        direct = lens_loss(x, batch, config, state=state)
        state = direct.state
        assert objective(x, batch).loss.equal(direct.loss)


@pytest.mark.parametrize("mode", ["skip", "scale"])
def test_gate_runs_on_counters_and_skips_the_controller(mode):
    batch, x = scored()
    config = LensConfig(block_size=4, gate=GateConfig(every=3, phase=1, mode=mode))
    objective = LensObjective(config)
    calls, active = [], []

    def controller():
        calls.append(1)
        return x

    for _ in range(7):
        result = objective(controller, batch)
        active.append(result.active)
        if not result.active:
            assert result.loss.item() == 0 and not result.loss.requires_grad
    assert active == [False, True, False, False, True, False, False] and len(calls) == 2
    value = LensObjective(replace(config, gate=replace(config.gate, phase=0)))(controller, batch).loss
    expected = lens_loss(x, batch, config).loss * (3 if mode == "scale" else 1)
    assert value.equal(expected)


def test_gate_by_optimizer_steps():
    batch, x = scored()
    objective = LensObjective(LensConfig(block_size=4, gate=GateConfig(every=2, unit="step")))
    active = []
    for _ in range(4):
        active += [objective(x, batch).active for _ in range(2)]
        objective.optimizer_step()
    assert active == [True, True, False, False] * 2


def test_accumulate_averages_the_skipped_micro_steps():
    batches = [scored(seed) for seed in (2, 5, 8)]
    config = LensConfig(block_size=4, gate=GateConfig(every=3, phase=2, mode="accumulate"))
    objective = LensObjective(config)
    weight = torch.tensor(1.1, requires_grad=True)

    def controller(raw):
        return torch.tanh(weight * raw)

    results = [objective(controller, batch, inputs=(x,)) for batch, x in batches]
    assert [r.active for r in results] == [False, False, True]
    expected = torch.stack([lens_loss(controller(x), batch, config).loss for batch, x in batches]).mean()
    (a,) = torch.autograd.grad(results[-1].loss, weight)
    (b,) = torch.autograd.grad(expected, weight)
    torch.testing.assert_close(results[-1].loss, expected)
    torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="accumulate"):
        LensObjective(config)(batches[0][1], batches[0][0])


def test_frozen_stage_gives_scores_and_no_loss():
    batch, x = scored()
    layer = torch.nn.Linear(1, 1)
    objective = LensObjective(LensConfig(block_size=4))
    objective.set_stage("frozen", layer)
    assert not any(p.requires_grad for p in layer.parameters())
    result = objective(lambda: layer(x[..., None])[..., 0], batch)
    assert not result.active and result.loss.item() == 0 and result.scores.shape == x.shape
    objective.set_stage("joint", layer)
    assert all(p.requires_grad for p in layer.parameters()) and objective(x, batch).active
    with pytest.raises(ValueError, match="stage: expected"):
        objective.set_stage("thawed")


def test_state_dict_resumes_moving_average_counters_and_stage():
    batch, x = scored()
    config = LensConfig(
        block_size=4, objective=ObjectiveConfig(budget_smooth_weight=0.2), gate=GateConfig(every=2)
    )
    first = LensObjective(config)
    first(x, batch)
    first.set_stage("offline")
    second = LensObjective(config)
    second.load_state_dict(first.state_dict())
    assert second.stage == "offline" and second.budget_ema.equal(first.budget_ema) and second.budget_ema != 0
    for _ in range(3):
        a, b = first(x, batch), second(x, batch)
        assert a.active == b.active and a.loss.equal(b.loss)


def test_telemetry_is_read_once_and_averages_active_steps():
    batch, x = scored()
    config = LensConfig(block_size=4, gate=GateConfig(every=2))
    objective = LensObjective(config)
    values = [objective(lambda k=k: x * (0.2 + 0.1 * k), batch).loss.item() for k in range(4)]
    assert objective.log_due(4) and not objective.log_due(3)
    read = objective.read_metrics(base_forward_ms=12.0, grad_accum_steps=5)
    assert read["mc/lens_loss"] == pytest.approx((values[0] + values[2]) / 2)
    assert read["mc/variants_total_step"] == 4 * sum(batch.counts) and read["mc/variants_total"] == sum(
        batch.counts
    )
    assert read["mc/lens_loss_ms"] > read["mc/lens_build_ms"] > 0 and read["mc/lens_forward_ms"] >= 0
    assert read["mc/lens_ms"] == read["mc/lens_loss_ms"] and read["mc/base_forward_ms"] == 12.0
    assert read["mc/lens_allocs"] is None and read["mc/grad_accum_steps"] == 5
    counts = sum(read[f"mc/lod_count/{level}"] for level in range(3))
    assert counts == int(batch.valid.sum())
    assert objective.read_metrics()["mc/lens_active"] == 0


def test_memory_is_measured_without_resetting_the_peak(monkeypatch):
    def refuse(*device):
        raise AssertionError("the peak statistics belong to the user")

    for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 130 * 2**20)
    objective, device = LensObjective(LensConfig(block_size=4)), torch.device("cuda")

    def counters(current, peak, allocated, allocations):
        numbers = {"current": current, "peak": peak, "allocated": allocated}
        stats = {f"allocated_bytes.all.{name}": value * 2**20 for name, value in numbers.items()}
        stats["allocation.all.allocated"] = allocations
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)

    for peak_after, expected in ((130, 30.0), (900, 50.0)):
        counters(100, 120, 1000, 10)
        with objective._memory.watch(device, ()):
            counters(110, peak_after, 1050, 17)
        read = objective.read_metrics()
        assert read["mc/peak_lens_mb"] == expected and read["mc/lens_allocs"] == 7


def test_peak_memory_on_a_cpu_counts_tensors_that_live_together():
    from leanstep.lens.telemetry import LiveBytes

    x = torch.ones(1000)
    with LiveBytes() as live:
        x.add_(1)  # there before
        for _ in range(5):
            y = x * 2  # the next one replaces it
        z = y.view(10, 100)[:2] + 1
    assert live.peak_bytes == 2 * 4000 and z.shape == (2, 100)

    batch, scores = scored()
    objective = LensObjective(LensConfig(block_size=4))
    objective(scores.requires_grad_(), batch)
    first = objective.read_metrics()["mc/peak_lens_mb"]
    assert first is not None and first * 2**20 >= scores.nbytes
    objective(scores, batch)
    assert objective.read_metrics()["mc/peak_lens_mb"] == first


def test_slow_objective_warns_once(monkeypatch):
    monkeypatch.setattr(lens_objective, "SLOW_MS", 0.0)
    batch, x = scored()
    objective = LensObjective(LensConfig(block_size=4))
    objective(x, batch)
    with pytest.warns(UserWarning, match="span_sampling or pair_sampling"):
        objective.read_metrics()
    objective(x, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objective.read_metrics()


def unbiased(draw, truth, count=4000):
    values = torch.tensor([draw() for _ in range(count)], dtype=torch.float64)
    error = values.std() / math.sqrt(count)
    assert abs(values.mean() - truth) < 4 * error + 1e-12


def many_entries():
    batch = random_batch(seed=12, tokens=60)
    x = torch.randn(batch.pos.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tanh()
    return batch, x


@pytest.mark.parametrize(
    "how", [{"span_sampling": "random", "span_k": 4}, {"span_sampling": "stride", "span_stride": 3}]
)
def test_sampled_spans_are_unbiased(how):
    batch, x = many_entries()
    full = LensConfig(block_size=4)
    sampled = LensConfig(
        block_size=4, objective=ObjectiveConfig(collapse_weight=1.0), sampling=SamplingConfig(**how)
    )
    whole = lens_loss(x, batch, full)
    assert whole.kept.sum() >= 2
    from leanstep.lens.lens_terms import LossCall, eager_terms
    from leanstep.lens.pairs import build_pairs, build_targets, sample_spans

    # 4,000 independent draws at once: the same pairs repeated.
    pairs = build_pairs(batch.loss, batch.row, full)
    many = type(pairs)(
        *(getattr(pairs, f).repeat(4000) for f in ("better", "worse", "delta", "live", "valid"))
    )
    sign = build_targets(batch, many, full)
    weights = sample_spans(x, sign, many, sampled, torch.Generator().manual_seed(1))
    zero = torch.zeros((), dtype=x.dtype)
    call = LossCall(
        scores=x,
        batch=batch,
        pairs=many,
        config=sampled,
        active=("pref", "rank"),
        state=zero,
        prev_scores=None,
        prev_valid=None,
        denominator=torch.sum,
        sign=sign,
        span_weights=weights,
    )
    terms, has_target, _ = eager_terms(call)
    draws = terms["pref"].view(4000, -1)
    error = draws.std(0) / math.sqrt(4000)
    assert ((draws.mean(0) - whole.terms["pref"]).abs() <= 4 * error + 1e-12).all()
    torch.testing.assert_close(terms["rank"].view(4000, -1)[7], whole.terms["rank"])
    assert has_target.view(4000, -1)[0].equal(whole.kept)


def test_topk_spans_take_the_steepest():
    batch, x = many_entries()
    config = LensConfig(block_size=4, sampling=SamplingConfig(span_sampling="topk", span_k=3))
    sampled = lens_loss(x, batch, config, backend="eager").terms["pref"]
    whole = lens_loss(x, batch, LensConfig(block_size=4)).terms["pref"]
    assert (sampled >= whole - 1e-12).all() and (sampled > whole).any()
    assert lens_loss(x, batch, config, backend="fused").terms["pref"].allclose(sampled, rtol=1e-12)
    large = replace(config, sampling=replace(config.sampling, span_k=10_000))
    torch.testing.assert_close(lens_loss(x, batch, large).terms["pref"], whole, rtol=1e-12, atol=0)


def test_sampled_pairs_are_unbiased_and_capped():
    batch, x = scored(seed=12)
    batch, x = batch, x.double()
    config = LensConfig(block_size=4, sampling=SamplingConfig(pair_sampling="random", pairs_sampled=2))
    whole = lens_loss(x, batch, LensConfig(block_size=4))
    live = whole.pairs.live
    assert live.equal(whole.kept) and live.sum() > 2
    generator = torch.Generator().manual_seed(3)
    totals = sum(LensConfig().objective.weights[n] * v for n, v in whole.terms.items())
    from leanstep.lens.pairs import sample_pairs

    def draw():
        drawn = sample_pairs(whole.pairs, config, generator).live
        assert int(drawn.sum()) == 2
        return float(totals[drawn].mean())

    unbiased(draw, whole.loss.item())
    capped = lens_loss(x, batch, LensConfig(block_size=4, sampling=SamplingConfig(pairs_per_variant=1)))
    worse = capped.pairs.worse[capped.pairs.live]
    assert len(worse.unique()) == len(worse)
    for v in worse.tolist():
        best = whole.pairs.delta[(whole.pairs.worse == v) & live].max()
        assert capped.pairs.delta[capped.pairs.live & (capped.pairs.worse == v)].item() == best
