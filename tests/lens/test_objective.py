"""The objective between calls: gate, stage, state, telemetry, sampling."""

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
)
from leanstep.lens import objective as objective_module
from leanstep.lens.loss import build_pairs, sample_pairs
from leanstep.lens.metrics import peak_memory

from .test_loss import random_batch, target_signs


@pytest.fixture(autouse=True)
def no_slow_warning(monkeypatch):
    """A busy machine may exceed the limit of the warning, and warnings are errors here."""
    monkeypatch.setattr(objective_module, "SLOW_MS", math.inf)


def scored(seed=2):
    batch = random_batch(seed=seed)
    return batch, torch.randn(batch.pos.shape, generator=torch.Generator().manual_seed(seed)).tanh()


@pytest.mark.parametrize("mode", ["skip", "scale"])
def test_gate_runs_on_counters_and_skips_the_controller(mode):
    batch, x = scored()
    config = LensConfig(block_size=4, gate=GateConfig(every=3, mode=mode))
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
    assert active == [True, False, False, True, False, False, True] and len(calls) == 3
    value = LensObjective(config)(controller, batch).loss
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
    config = LensConfig(block_size=4, gate=GateConfig(every=3, mode="accumulate"))
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
    first.set_stage("frozen")
    second = LensObjective(config)
    second.load_state_dict(first.state_dict())
    assert second.stage == "frozen" and second.budget_ema.equal(first.budget_ema) and second.budget_ema != 0
    for resumed in (first, second):
        resumed.set_stage("joint")
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
    assert read["mc/lens_loss_ms"] > 0 and read["mc/lens_forward_ms"] >= 0
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

    def counters(current, peak, allocated, allocations):
        stats = {"allocated_bytes.all.allocated": allocated * 2**20, "allocation.all.allocated": allocations}
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: current * 2**20)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak * 2**20)

    for peak_after, expected in ((130, 30.0), (900, 50.0)):
        read = {}
        counters(100, 120, 1000, 10)
        with peak_memory(torch.device("cuda"), read):
            counters(110, peak_after, 1050, 17)
        assert read == {"peak_lens_mb": expected, "lens_allocs": 7}
    batch, x = scored()
    module = LensObjective(LensConfig(block_size=4))
    module(x, batch)
    assert module.read_metrics()["mc/peak_lens_mb"] is None  # a CPU's allocator has no counters


def test_inputs_go_to_the_controller_by_position_or_by_name():
    batch, x = scored()
    weight = torch.tensor(1.1, requires_grad=True)
    gate = GateConfig(every=2, mode="accumulate")
    losses = []
    for inputs in ((x, weight), {"raw": x, "factor": weight}):
        module = LensObjective(LensConfig(block_size=4, gate=gate))
        module(lambda raw, factor: raw * factor, batch, inputs=inputs)
        losses.append(module(lambda raw, factor: raw * factor, batch, inputs=inputs).loss)
    assert losses[0].equal(losses[1]) and losses[0].requires_grad and losses[0] != 0


def test_slow_objective_warns_once(monkeypatch):
    monkeypatch.setattr(objective_module, "SLOW_MS", 0.0)
    batch, x = scored()
    objective = LensObjective(LensConfig(block_size=4))
    objective(x, batch)
    with pytest.warns(UserWarning, match="span_sampling or pair_sampling"):
        objective.read_metrics()
    objective(x, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objective.read_metrics()


def many_entries():
    batch = random_batch(seed=1, tokens=60)
    x = torch.randn(batch.pos.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tanh()
    return batch, x


@pytest.mark.parametrize("aux_on_full", [True, False])
@pytest.mark.parametrize(
    "how", [{"span_sampling": "random", "span_k": 4}, {"span_sampling": "stride", "span_stride": 3}]
)
def test_sampled_spans_are_unbiased(how, aux_on_full):
    batch, x = many_entries()
    objective = ObjectiveConfig(collapse_weight=1.7, rank_weight=1.0, margin=10.0)  # the rank term is linear
    whole = lens_loss(x, batch, LensConfig(block_size=4, objective=objective), terms={"pref", "rank"})
    assert whole.kept.sum() >= 2
    sampling = SamplingConfig(**how, aux_on_full=aux_on_full)
    sampled = LensConfig(block_size=4, objective=objective, sampling=sampling)
    # 4,000 independent draws in one call: the same samples repeated.
    many = replace(batch, loss=batch.loss.repeat(4000, 1), row=batch.row.repeat(4000, 1))
    generator = torch.Generator().manual_seed(1)
    drawn = lens_loss(x, many, sampled, terms={"pref", "rank"}, generator=generator)
    assert drawn.kept.view(4000, -1)[7].equal(whole.kept)
    for name in ("pref", "rank"):
        draws = drawn.terms[name].view(4000, -1)
        error = draws.std(0) / math.sqrt(4000)
        assert ((draws.mean(0) - whole.terms[name]).abs() <= 4 * error + 1e-12).all()
        assert whole.terms[name].any()
        assert bool(draws.std(0).max() > 1e-6) == (name == "pref" or not aux_on_full)


@pytest.mark.parametrize("form", ["logistic", "hinge"])
def test_topk_spans_take_the_steepest(form):
    batch, x = many_entries()
    sampling = SamplingConfig(span_sampling="topk", span_k=3)
    config = LensConfig(block_size=4, sampling=sampling, objective=ObjectiveConfig(form=form))
    sampled = lens_loss(x, batch, config).terms["pref"]
    whole = lens_loss(x, batch, replace(config, sampling=SamplingConfig())).terms["pref"]
    assert (sampled >= whole - 1e-12).all() and (sampled > whole).any()
    large = replace(config, sampling=replace(config.sampling, span_k=10_000))
    torch.testing.assert_close(lens_loss(x, batch, large).terms["pref"], whole, rtol=1e-12, atol=0)
    # By hand: the mean over the three largest costs; both forms order cost and slope alike.
    pairs = lens_loss(x, batch, config).pairs
    k = int(sampled.argmax())
    sign = target_signs(batch, pairs, config)[k]
    s, a = pairs.delta[k].clamp(min=1), pairs.delta[k].tanh()
    wrong = (-sign * x[pairs.worse[k]] * s)[sign != 0]
    cost = torch.nn.functional.softplus(wrong) if form == "logistic" else torch.relu(wrong + 1)
    torch.testing.assert_close(sampled[k], cost.topk(3).values.mean() * a)


def test_sampled_pairs_are_unbiased_and_capped():
    batch, x = scored(seed=12)
    x = x.double()
    config = LensConfig(block_size=4, sampling=SamplingConfig(pair_sampling="random", pairs_sampled=2))
    whole = lens_loss(x, batch, LensConfig(block_size=4))
    live = whole.pairs.delta > 0
    assert live.equal(whole.kept) and live.sum() > 2
    generator = torch.Generator().manual_seed(3)
    totals = sum(LensConfig().objective.weights[n] * v for n, v in whole.terms.items())
    assert lens_loss(x, batch, config, generator=generator).kept.sum() == 2

    draws = []
    for _ in range(4000):
        drawn = sample_pairs(whole.pairs, config, generator).delta > 0
        draws.append(totals[drawn].mean())
    draws = torch.stack(draws)
    assert abs(draws.mean() - whole.loss) < 4 * draws.std() / math.sqrt(4000)
    capped = lens_loss(x, batch, LensConfig(block_size=4, sampling=SamplingConfig(pairs_per_variant=1)))
    worse = capped.pairs.worse[capped.kept]
    assert len(worse.unique()) == len(worse)
    every = build_pairs(batch.loss, batch.row, config)
    for v in worse.tolist():
        assert (
            capped.pairs.delta[capped.kept & (capped.pairs.worse == v)].item()
            == every.delta[every.worse == v].max()
        )
