"""MegaContext's lens loss by leanstep: the controller is a stand-in with upstream's names.

With LEANSTEP_MEGACONTEXT=checkout, dev/megacontext.py compares with upstream's own code.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import random
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from leanstep.integrations import megacontext
from leanstep.lens import (
    AsyncLens,
    GateConfig,
    LensBatch,
    SamplingConfig,
    Variant,
    lens_loss,
    lens_loss_reference,
)

WIDTH = 6


@dataclass
class WorkingContext:
    tensor: torch.Tensor
    positions: torch.Tensor
    lods: torch.Tensor

    @property
    def length(self):
        return self.tensor.shape[1]

    def to_tensor(self):
        return self.tensor

    def get_positions(self):
        return self.positions

    def get_lod_tensor(self):
        return self.lods

    def get_positional_encodings(self):
        angle = self.positions[..., None].double() / 7
        return angle.cos()[..., None], angle.sin()[..., None], None


@dataclass
class ContextVariant:
    working_context: WorkingContext
    token_loss_value: torch.Tensor | None = None
    policy_scores: torch.Tensor | None = None


class KeywordLens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(WIDTH, 1, dtype=torch.float64)
        self.calls = 0

    def forward(self, working_context=None, *, embeddings, positions, lods, cos, sin):
        self.calls += 1
        features = self.project(embeddings).squeeze(-1) + 0.3 * lods + (cos * sin).flatten(2).mean(-1)
        return torch.tanh(features)


class MCController:
    """The members of upstream's controller that the adapter uses, as upstream has them."""

    def __init__(self, seed=0, **changes):
        defaults = {
            "block_size": 4,
            "max_lod": 2,
            "num_random_variants": 3,
            "max_lens_pairs": 8,
            "lens_rank_weight": 0.5,
            "lens_margin": 0.1,
            "lens_budget_weight": 0.1,
            "lens_budget_smooth_weight": 0.0,
            "lens_budget_smooth_beta": 0.6,
            "lens_temperature": 0.7,
            "lens_collapse_weight": 1.3,
            "lens_hard_negative_ratio": 1.0,
        }
        self.config = types.SimpleNamespace(**(defaults | changes))
        self.device, self._target_dtype = torch.device("cpu"), torch.float64
        self._rng = random.Random(seed)
        self._budget_mass_ema = 0.25
        self._last_lens_forward_ms = 0.0
        self.last_timings, self.last_batch_profile = {}, None
        torch.manual_seed(seed)
        self.lensnet = KeywordLens()

    def _compute_lens_losses(self, batch_states):
        raise AssertionError("stock code")

    def _stack_working_contexts(self, variants):
        lengths = [v.working_context.length for v in variants]
        width = max(lengths)

        def left(rows):
            out = rows[0].new_zeros(len(rows), width, *rows[0].shape[2:])
            for i, row in enumerate(rows):
                out[i, width - row.shape[1] :] = row[0]
            return out

        contexts = [v.working_context for v in variants]
        cos, sin, _ = zip(*(wc.get_positional_encodings() for wc in contexts), strict=True)
        return {
            "embeddings": left([wc.tensor for wc in contexts]),
            "positions": left([wc.positions for wc in contexts]),
            "lods": left([wc.lods for wc in contexts]),
            "cos": left(cos),
            "sin": left(sin),
        }, lengths

    def _run_lensnet_batched(self, stacked):
        return self.lensnet(None, **stacked)

    def _batch_variant_scores(self, variants):
        for variant in variants:
            if variant.policy_scores is None:
                stacked, _ = self._stack_working_contexts([variant])
                variant.policy_scores = self._run_lensnet_batched(stacked)
        return {id(v): v.policy_scores for v in variants}


def draw_context(generator, tokens, baseline, start):
    positions, lods, p = [], [], start
    while p < tokens:
        level = 0 if baseline else [0, 0, 0, 0, 1, 2][int(torch.randint(6, (), generator=generator))]
        if p + 4**level <= tokens:
            positions.append(p)
            lods.append(level)
            p += 4**level
    embeddings = torch.randn(1, len(positions), WIDTH, generator=generator, dtype=torch.float64)
    return WorkingContext(embeddings, torch.tensor([positions]), torch.tensor([lods]))


def equal_context(generator, tokens, j):
    """One coarse cell in another place in each variant: all are equally long."""
    positions = [p for p in range(tokens) if not 4 * j < p < 4 * j + 4]
    lods = [int(p == 4 * j) for p in positions]
    embeddings = torch.randn(1, len(positions), WIDTH, generator=generator, dtype=torch.float64)
    return WorkingContext(embeddings, torch.tensor([positions]), torch.tensor([lods]))


def draw_states(seed, *, samples=4, tokens=40, equal_lengths=False):
    """Ragged contexts and missing losses; or four equally long variants per sample, all with a loss."""
    generator = torch.Generator().manual_seed(seed)
    states = []
    for _ in range(samples):
        variants = []
        for j in range(4 if equal_lengths else 1 + int(torch.randint(4, (), generator=generator))):
            if equal_lengths:
                context = equal_context(generator, tokens, j)
            else:
                context = draw_context(generator, tokens, j == 0, j)
            loss = torch.round(2 + torch.rand((), generator=generator, dtype=torch.float64), decimals=1)
            missing = int(torch.randint(6, (), generator=generator)) == 0
            variants.append(ContextVariant(context, None if missing and not equal_lengths else loss))
        tree = types.SimpleNamespace(num_tokens=lambda: tokens)
        states.append(types.SimpleNamespace(variants=variants, tree=tree))
    return states


def reference(controller, states, ema):
    """Loss, EMA and scores by the loops, on a batch from the host door, pairs in upstream's order."""
    config = megacontext.lens_config(controller)
    samples = [
        [
            Variant(v.working_context.positions[0], v.working_context.lods[0], v.token_loss_value, j == 0)
            for j, v in enumerate(s.variants)
        ]
        for s in states
    ]
    batch = LensBatch.from_variants(samples, config, num_tokens=states[0].tree.num_tokens())
    rows = []
    for v in (v for s in states for v in s.variants):
        stacked, _ = controller._stack_working_contexts([v])
        rows.append(controller.lensnet(None, **stacked)[0])
    scores = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    slots = lens_loss(scores, batch, config).kept.shape[0] // len(states)
    rng, order = random.Random(0), []
    rng.setstate(controller._rng.getstate())
    for i, sample in enumerate(states):
        scored = sum(v.token_loss_value is not None for v in sample.variants)
        # Upstream shuffles a sample's pairs if it has any; of those without the baseline it takes a share.
        late = (scored - 1) * (scored - 2) // 2
        count = scored - 1 + math.ceil(late * controller.config.lens_hard_negative_ratio)
        pairs = [i * slots + k for k in range(min(controller.config.max_lens_pairs, max(count, 0)))]
        if pairs:
            rng.shuffle(pairs)
        order += pairs + [i * slots + k for k in range(len(pairs), slots)]
    state = torch.tensor(ema, dtype=torch.float64)
    result = lens_loss_reference(scores, batch, config, state=state, pair_order=torch.tensor(order))
    return result, scores, batch, rng.getstate()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("smooth", "equal_lengths"), [(0.0, False), (0.4, False), (0.4, True)])
def test_loss_gradient_and_telemetry_equal_the_loops(seed, smooth, equal_lengths):
    options = {"lens_budget_smooth_weight": smooth, "lens_hard_negative_ratio": 0.5 if equal_lengths else 1.0}
    controller = MCController(seed, **options)
    states = draw_states(seed, equal_lengths=equal_lengths)
    truth, scores, batch, rng = reference(controller, states, 0.25)
    truth.loss.backward()
    expected = controller.lensnet.project.weight.grad.clone()
    controller.lensnet.zero_grad()
    calls = controller.lensnet.calls
    loss = megacontext.compute_lens_losses(controller, states)
    loss.backward()
    assert controller.lensnet.calls == calls + 1
    torch.testing.assert_close(loss, truth.loss, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(controller.lensnet.project.weight.grad, expected, rtol=1e-9, atol=1e-13)
    assert controller._rng.getstate() == rng
    assert controller._budget_mass_ema == pytest.approx(truth.state.item() if smooth else 0.25, rel=1e-12)
    metrics = lens_loss(scores.detach(), batch, megacontext.lens_config(controller)).metrics.read()
    assert controller._last_preference_agreement == pytest.approx(metrics["mc/preference_agreement"])
    assert controller._last_span_score_corr == pytest.approx(metrics["mc/pref_span_corr"], rel=1e-6)
    stats = controller._last_policy_stats
    assert stats["score_abs_mean"] == pytest.approx(metrics["mc/policy_score_abs_mean"], rel=1e-6)
    assert stats["score_std_mean"] == pytest.approx(metrics["mc/policy_score_std_mean"], rel=1e-6)
    for variant in (v for s in states for v in s.variants):
        assert variant.policy_scores.shape == (1, variant.working_context.length)
        assert not variant.policy_scores.requires_grad


def test_scores_that_exist_are_used_again():
    controller, states = MCController(), draw_states(3)
    first = megacontext.compute_lens_losses(controller, states)
    calls = controller.lensnet.calls
    second = megacontext.compute_lens_losses(controller, states)
    assert controller.lensnet.calls == calls and not second.requires_grad
    torch.testing.assert_close(first.detach(), second)


def test_without_pairs_the_loss_is_zero_and_without_variants_none():
    controller, states = MCController(), draw_states(1, samples=2)
    for variant in (v for s in states for v in s.variants):
        variant.token_loss_value = None
    before = controller._rng.getstate()
    assert megacontext.compute_lens_losses(controller, states).item() == 0
    assert controller._rng.getstate() == before and controller._last_policy_stats == {}
    assert controller._last_preference_agreement is None
    assert megacontext.compute_lens_losses(controller, []).item() == 0
    assert megacontext.compute_lens_losses(MCController(num_random_variants=0), states) is None


@pytest.mark.parametrize("door", ["module", "class", "controller"])
def test_apply_replaces_the_loss(door):
    class Patched(MCController):
        pass

    controller = Patched()
    runtime = {
        "module": types.SimpleNamespace(MCController=Patched),
        "class": Patched,
        "controller": controller,
    }
    assert megacontext.apply_leanstep(runtime[door]) is runtime[door]
    assert controller._compute_lens_losses(draw_states(0)).requires_grad


def test_a_controller_has_its_own_settings_and_so_has_its_copy():
    class Patched(MCController):
        pass

    lean, stock = Patched(), Patched()
    megacontext.apply_leanstep(lean, sampling=SamplingConfig(span_sampling="topk", span_k=3))
    duplicate = copy.deepcopy(lean)
    with torch.no_grad():
        lean.lensnet.project.weight.mul_(5.0)
    loss = duplicate._compute_lens_losses(draw_states(0))
    loss.backward()
    assert lean.lensnet.project.weight.grad is None
    assert duplicate.lensnet.project.weight.grad.any()
    assert lean._compute_lens_losses(draw_states(0)).item() != loss.item()
    with pytest.raises(AssertionError, match="stock code"):
        stock._compute_lens_losses(draw_states(0))


def test_sampling_reaches_the_loss():
    """Like `lens_loss` with the same entries; upstream's number of pairs is kept."""
    sampling = SamplingConfig(span_sampling="topk", span_k=4)
    found = []
    for by_adapter in (True, False):
        controller, states = MCController(1, max_lens_pairs=5), draw_states(1)
        controller.__class__ = type("Own", (MCController,), {})
        megacontext.apply_leanstep(controller, sampling=sampling)
        config = megacontext.lens_config(controller)
        assert config.sampling == dataclasses.replace(sampling, max_pairs=5)
        if by_adapter:
            loss = controller._compute_lens_losses(states)
        else:
            _, scores, batch, _ = reference(controller, states, 0.25)
            loss = lens_loss(scores, batch, config).loss
        loss.backward()
        found.append((loss.detach(), controller.lensnet.project.weight.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)
    full = megacontext.compute_lens_losses(MCController(1, max_lens_pairs=5), draw_states(1))
    assert found[0][0].item() != full.item()


@pytest.mark.parametrize(("mode", "factor"), [("skip", 1.0), ("scale", 3.0)])
def test_the_gate_runs_lensnet_on_every_third_call(mode, factor):
    controller = MCController()
    controller.__class__ = type("Own", (MCController,), {})
    megacontext.apply_leanstep(controller, gate=GateConfig(every=3, mode=mode))
    losses, calls = [], []
    for _ in range(6):
        losses.append(controller._compute_lens_losses(draw_states(0)))
        calls.append(controller.lensnet.calls)
    assert calls == [1, 1, 1, 2, 2, 2]
    full = megacontext.compute_lens_losses(MCController(), draw_states(0))
    assert [x.requires_grad for x in losses] == [True, False, False, True, False, False]
    assert losses[0].item() == pytest.approx(factor * full.item(), rel=1e-12)
    assert losses[1].item() == 0.0


def test_a_gate_that_upstream_cannot_follow_is_refused():
    for gate in (GateConfig(every=2, mode="accumulate"), GateConfig(every=2, unit="step")):
        with pytest.raises(ValueError, match='gate: expected mode "skip" or "scale" and unit "micro"'):
            megacontext.apply_leanstep(MCController(), gate=gate)


def test_something_else_is_refused():
    with pytest.raises(ValueError, match=r"runtime: expected mc.runtime, .* got math without _compute_lens"):
        megacontext.apply_leanstep(math)


def test_metrics_have_upstreams_names():
    controller, states = MCController(), draw_states(2)
    megacontext.compute_lens_losses(controller, states)
    controller.last_timings |= {"lens_loss_ms": 3.0, "lens_forward_ms": 2.0, "lens_ms": 3.0}
    controller.last_batch_profile = {"total_variants": 9}
    read = megacontext.read_metrics(controller)
    assert read["mc/lens_loss_ms"] == 3.0 and read["mc/lens_forward_ms"] == 2.0
    assert read["mc/variants_total"] == 9 and "mc/peak_lens_mb" not in read  # no allocator counters on a CPU


@pytest.mark.parametrize("equal_lengths", [True, False])
def test_a_batch_on_a_device_is_built_without_a_read(equal_lengths):
    """Meta tensors have no values: a read, or a copy to the host, raises."""
    controller, states = MCController(), draw_states(4, equal_lengths=equal_lengths)
    config = megacontext.lens_config(controller)
    for variant in (v for s in states for v in s.variants):
        wc = variant.working_context
        variant.working_context = WorkingContext(wc.tensor, wc.positions.to("meta"), wc.lods.to("meta"))
        if variant.token_loss_value is not None:
            variant.token_loss_value = variant.token_loss_value.to("meta")
    contexts = [v.working_context for s in states for v in s.variants]
    lengths = [wc.length for wc in contexts]
    pos = megacontext.pad_rows([wc.positions for wc in contexts], 0, lengths)
    lod = megacontext.pad_rows([wc.lods for wc in contexts], 0, lengths)
    batch = megacontext.make_batch(states, config, pos, lod, megacontext.real_cells(lengths, pos.device))
    assert batch.pos.is_meta and batch.loss.is_meta and batch.row.is_meta
    samples = [
        [
            Variant(v.working_context.positions[0], v.working_context.lods[0], v.token_loss_value)
            for v in s.variants
        ]
        for s in states
    ]
    from_variants = LensBatch.from_variants(samples, config, num_tokens=40)
    assert from_variants.pos.is_meta and from_variants.pos.shape == batch.pos.shape


def test_background_training_takes_keyword_inputs():
    states = draw_states(5)
    weights = []
    config = megacontext.lens_config(MCController(1))

    def objective(scores, batch):
        return lens_loss(scores, batch, config).loss

    for background in (False, True):
        controller = MCController(1)
        optimizer = torch.optim.SGD(controller.lensnet.parameters(), lr=0.1)
        batch, inputs = megacontext.lens_batch(controller, states)
        with AsyncLens(controller.lensnet, objective, max_staleness=0) as worker:
            if background:
                worker.submit(batch, inputs)
                assert worker.apply_ready(optimizer) == 1
            else:
                objective(controller.lensnet(None, **inputs), batch).backward()
        weights.append(controller.lensnet.project.weight.grad)
    assert weights[0].equal(weights[1]) and weights[0].any()
    shared = torch.optim.SGD([*controller.lensnet.parameters(), torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with (
        AsyncLens(controller.lensnet, objective) as worker,
        pytest.raises(ValueError, match="separate optimizer or group"),
    ):
        worker.apply_ready(shared)


@pytest.mark.skipif("LEANSTEP_MEGACONTEXT" not in os.environ, reason="LEANSTEP_MEGACONTEXT names no checkout")
@pytest.mark.parametrize("dtype", [[], ["--float64"]])
def test_upstreams_own_code_agrees(dtype):
    tool = Path(__file__).parents[2] / "dev" / "megacontext.py"
    command = [sys.executable, tool, "equal", os.environ["LEANSTEP_MEGACONTEXT"], "--settings", "20"]
    result = subprocess.run([*command, *dtype], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
