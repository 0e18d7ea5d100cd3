"""The vectorized objective against the original numbers, the loop reference, and itself."""

from __future__ import annotations

import math

import pytest
import torch

from leanstep.lens import (
    LensBatch,
    LensConfig,
    ObjectiveConfig,
    Variant,
    lens_loss,
    lens_loss_reference,
)
from leanstep.lens.loss import build_targets, level_grid

from . import golden


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", golden.NAMES)
def test_golden_vectors(name, dtype):
    data = golden.load(name)
    batch = golden.batch_of(data)
    scores = golden.scores_of(data, batch, dtype).requires_grad_()
    rtol, atol = (1e-9, 1e-15) if dtype == torch.float64 else (1e-4, 2e-8)
    state = torch.tensor(data["config"]["ema_in"], dtype=dtype)
    result = lens_loss(
        scores,
        batch,
        golden.config_of(data),
        state=state,
        pair_order=golden.pair_order_of(data, batch),
    )
    result.loss.backward()
    golden.assert_gradient(data, batch, scores.grad, rtol, atol)
    outputs = data["outputs"]
    assert result.loss.dtype == dtype and result.loss.item() == pytest.approx(outputs["loss"], rel=rtol)
    assert result.state.item() == pytest.approx(outputs["ema_out"], rel=rtol, abs=1e-12)
    assert int(result.kept.sum()) == outputs["num_kept"]
    for k, pair in enumerate(data["pairs"]):
        assert bool(result.kept[k]) == pair["kept"]
        for term, values in result.terms.items():
            expected = pair[term] if pair["kept"] else 0.0
            assert values[k].item() == pytest.approx(expected, rel=rtol, abs=atol), (k, term)


def target_signs(batch, pairs, config):
    """Return [P, W]: +1 expand, -1 collapse, 0 none for the entries of the worse contexts."""
    up, down = build_targets(level_grid(batch, config), pairs, config, torch.float64)
    start = batch.pos.where(batch.valid, 0)[pairs.worse]
    return (up - down).gather(1, start).where(batch.valid[pairs.worse], 0)


@pytest.mark.parametrize("name", golden.NAMES)
def test_telemetry_equals_the_original(name):
    data = golden.load(name)
    batch = golden.batch_of(data)
    result = lens_loss(golden.scores_of(data, batch), batch, golden.config_of(data))
    read = result.metrics.read()
    outputs = data["outputs"]
    for key in ("preference_agreement", "policy_score_abs_mean", "policy_score_std_mean"):
        expected = outputs[key]
        assert read[f"mc/{key}"] == (None if expected is None else pytest.approx(expected, rel=1e-6)), key
    expected = outputs["pref_span_corr"]
    if expected is None or abs(expected) < 1e-6:
        assert read["mc/pref_span_corr"] is None
    else:
        assert read["mc/pref_span_corr"] == pytest.approx(expected, abs=2e-4)
    assert read["mc/preference_pairs"] == outputs["num_pairs"]
    assert read["mc/preference_pairs_kept"] == outputs["num_kept"]
    covered = [v["coverage_tokens"] / s["seq_tokens"] for s in data["samples"] for v in s["variants"]]
    assert read["mc/coverage_mean"] == pytest.approx(sum(covered) / len(covered), rel=1e-12)


def random_batch(num_samples=3, num_variants=4, tokens=96, block=4, max_lod=2, seed=0, drop=0.15):
    """Random non-overlapping contexts with gaps, off-block gists, all levels, ragged counts and missing
    losses.
    """
    g = torch.Generator().manual_seed(seed)

    def draw(n):
        return int(torch.randint(n, (), generator=g))

    samples = []
    for _ in range(num_samples):
        variants = []
        for v in range(1 + draw(num_variants)):
            positions, lods, p = [], [], draw(4)
            while p < tokens:
                lod = [0, 0, 0, 1, 1, 2][draw(6)] if v else 0
                lod = min(lod, max_lod)
                if torch.rand((), generator=g) > drop:
                    positions.append(p)
                    lods.append(lod)
                p += block**lod
            loss = None if draw(8) == 0 else round(2 + float(torch.rand((), generator=g)), 2)
            variants.append(Variant(positions, lods, loss, v == 0))
        samples.append(variants)
    config = LensConfig(block_size=block, max_lod=max_lod)
    return LensBatch.from_variants(samples, config, num_tokens=tokens)


def test_correlations_with_the_advantage_are_torchs_own():
    batch, config = random_batch(seed=3), LensConfig(block_size=4)
    x = torch.randn(batch.pos.shape, dtype=torch.float64).tanh()
    read = lens_loss(x, batch, config).metrics.read()
    scores = x.masked_fill(~batch.valid, torch.nan)
    of_rows = {
        "mean": scores.nanmean(1),
        "max": scores.nan_to_num(-torch.inf).amax(1),
        "min": scores.nan_to_num(torch.inf).amin(1),
    }
    advantage = batch.loss.double() - batch.loss.double().gather(1, batch.baseline[:, None])
    known = ~advantage.isnan()
    assert known.sum() > 4
    for name, values in of_rows.items():
        pairs = torch.stack([values[batch.row][known], advantage[known]])
        expected = torch.corrcoef(pairs)[0, 1].item()
        assert read[f"mc/preference_corr_{name}"] == pytest.approx(expected, rel=1e-9), name


def test_one_context_has_no_advantage_and_is_counted():
    config = LensConfig(block_size=4)
    batch = LensBatch.from_variants([[Variant([0, 1], [0, 0], 1.0, True)]], config, num_tokens=2)
    read = lens_loss(torch.zeros(batch.pos.shape), batch, config).metrics.read()
    assert read["mc/lod_count/0"] == 2 and read["mc/adv_delta_mean"] is None


EVERY_TERM = {
    "budget_smooth_weight": 0.3,
    "kl_weight": 0.7,
    "coverage_weight": 2.0,
    "collapse_weight": 1.7,
    "temperature": 0.6,
    "rank_weight": 0.8,
}


@pytest.mark.parametrize("form", ["logistic", "hinge", "squared_hinge"])
@pytest.mark.parametrize("seed", range(4))
def test_every_term_equals_the_loops(form, seed):
    batch = random_batch(seed=seed, block=(3, 4)[seed % 2])
    config = LensConfig(block_size=(3, 4)[seed % 2], objective=ObjectiveConfig(form=form, **EVERY_TERM))
    # Not contiguous.
    scores = torch.randn(batch.pos.shape[::-1], dtype=torch.float64).tanh().t()
    before = torch.randn(batch.pos.shape, dtype=torch.float64).tanh()
    usable = torch.rand(batch.num_contexts) < 0.8
    state = torch.tensor(0.3, dtype=torch.float64)
    order = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(lens_loss(scores, batch, config).kept), generator=order)
    arguments = {"state": state, "prev_scores": before, "prev_valid": usable, "pair_order": order}
    truth, x = None, scores.clone().requires_grad_()
    truth = lens_loss_reference(x, batch, config, **arguments)
    (3 * truth.loss).backward()
    y = scores.clone()
    y[~batch.valid] = torch.nan
    y.requires_grad_()
    got = lens_loss(y, batch, config, **arguments)
    (3 * got.loss).backward()
    torch.testing.assert_close(got.loss, truth.loss, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(got.state, truth.state, rtol=1e-12, atol=1e-15)
    assert got.kept.equal(truth.kept) and set(got.terms) == set(truth.terms)
    for name, values in truth.terms.items():
        torch.testing.assert_close(
            got.terms[name], values, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_is_as_close_to_the_truth_as_the_loops(dtype):
    batch = random_batch(seed=5, tokens=160)
    config = LensConfig(block_size=4, objective=ObjectiveConfig(budget_smooth_weight=0.2))
    scores = torch.randn(batch.pos.shape).tanh().to(dtype)

    def run(function, x, **options):
        x = x.clone().requires_grad_()
        loss = function(x, batch, config, **options).loss
        loss.backward()
        return loss.detach().double(), x.grad.double()

    truth = run(lens_loss_reference, scores.double())
    plain = run(lens_loss_reference, scores)
    got = run(lens_loss, scores)
    k = 2 if dtype == torch.float32 else 3
    for exact, baseline, candidate in zip(truth, plain, got, strict=True):
        size = exact.abs().max()
        bound = k * (baseline - exact).abs().max() + 4 * torch.finfo(torch.float32).eps * size
        assert (candidate - exact).abs().max() <= bound


def test_switching_a_term_off_leaves_the_others_bitwise():
    batch = random_batch(seed=9)
    config = LensConfig(block_size=4, objective=ObjectiveConfig(**EVERY_TERM))
    x = torch.randn(batch.pos.shape).tanh()
    full = lens_loss(x, batch, config, prev_scores=0.5 * x)
    for off in full.terms:
        rest = set(full.terms) - {off}
        some = lens_loss(x, batch, config, prev_scores=0.5 * x, terms=rest)
        assert set(some.terms) == rest
        assert all(some.terms[name].equal(full.terms[name]) for name in rest)
        assert some.metrics.read()[f"mc/term_{off}"] is None
        if off == "smooth":
            assert some.state.item() == 0
    nothing = lens_loss(x.requires_grad_(), batch, config, terms=set())
    nothing.loss.backward()
    assert nothing.loss.item() == 0 and (x.grad == 0).all()


def test_bad_input_is_named():
    batch = random_batch(seed=1)
    config = LensConfig(block_size=4)
    x = torch.zeros(batch.pos.shape)
    with pytest.raises(ValueError, match=r"scores: expected shape"):
        lens_loss(x[:, :-1], batch, config)
    with pytest.raises(ValueError, match=r"scores: expected a floating dtype"):
        lens_loss(x.long(), batch, config)
    with pytest.raises(ValueError, match=r"prev_valid: expected bool of shape"):
        lens_loss(
            x, batch, config, prev_scores=x, prev_valid=torch.ones(batch.num_contexts, 1, dtype=torch.bool)
        )
    with pytest.raises(ValueError, match=r"state: expected a 0-d"):
        lens_loss(x, batch, config, state=torch.zeros(1))
    with pytest.raises(ValueError, match=r"terms: expected a subset"):
        lens_loss(x, batch, config, terms={"budgets"})
    with pytest.raises(ValueError, match=r"pair_order: expected a permutation"):
        lens_loss(x, batch, config, pair_order=torch.arange(1))


def test_the_objective_compiles_into_one_graph_and_operations_do_not_grow():
    from torch._dynamo.testing import CompileCounter

    config = LensConfig(block_size=4, objective=ObjectiveConfig(budget_smooth_weight=0.1))
    counts = []
    for seed, num_samples, variants in ((1, 5, 5), (2, 9, 8)):
        batch = random_batch(seed=seed, num_samples=num_samples, num_variants=variants)
        assert batch.loss.shape[1] > 3
        x = torch.randn(batch.pos.shape).tanh().requires_grad_()
        torch._dynamo.reset()
        counter = CompileCounter()

        def loss_of(x, batch=batch):
            return lens_loss(x, batch, config).loss

        compiled = torch.compile(loss_of, backend=counter, fullgraph=True)
        loss = compiled(x)
        torch.testing.assert_close(loss, loss_of(x))
        assert counter.frame_count == 1
        counts.append(counter.op_count)
    assert counts[0] == counts[1]
    assert math.isfinite(loss.item())


def test_no_host_reads_between_scores_and_gradient():
    from leanstep.tape.syncs import host_syncs

    batch = random_batch(seed=3)
    config = LensConfig(block_size=4, objective=ObjectiveConfig(**EVERY_TERM))
    x = torch.randn(batch.pos.shape).tanh().requires_grad_()
    before = 0.5 * x.detach()

    def step():
        lens_loss(x, batch, config, prev_scores=before).loss.backward()

    step()
    assert host_syncs(step) == 0
    assert host_syncs(lambda: lens_loss_reference(x, batch, config).loss.backward()) > 100


@pytest.mark.timeout(300)
# Inductor's own imports.
def test_a_full_graph_by_inductor_is_as_close_to_float64_as_eager():
    from leanstep.cpu import find_compiler

    if find_compiler() is None:
        pytest.skip("Inductor needs a C++ compiler")
    batch, config = random_batch(seed=4, tokens=32, num_samples=2), LensConfig(block_size=4)
    start = torch.randn(batch.pos.shape)

    def loss_of(start):
        return lens_loss(start.tanh(), batch, config).loss

    def both(function, values):
        values = values.clone().requires_grad_()
        loss = function(values)
        loss.backward()
        return loss.detach().double(), values.grad.double()

    truth, eager = both(loss_of, start.double()), both(loss_of, start)
    torch._dynamo.reset()
    for got, plain, want in zip(
        both(torch.compile(loss_of, fullgraph=True), start), eager, truth, strict=True
    ):
        assert (got - want).abs().max() <= 2 * (plain - want).abs().max() + 1e-7
