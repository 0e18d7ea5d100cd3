"""Every backend of the objective against the original numbers, the loop reference, and itself."""

from __future__ import annotations

import math

import pytest
import torch

from leanstep.preference import LensBatch, LensConfig, Variant, lens_loss, lens_loss_reference
from leanstep.preference.pairs import build_pairs
from leanstep.preference.targets import build_targets

from . import golden

BACKENDS = ["eager", "flat", "fused"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", golden.NAMES)
def test_golden_vectors(name, dtype, backend):
    data = golden.load(name)
    batch = golden.batch_of(data)
    scores = golden.scores_of(data, batch, dtype).requires_grad_()
    rtol, atol = (1e-9, 1e-15) if dtype == torch.float64 else (1e-4, 2e-8)
    state = torch.tensor(data["config"]["ema_in"], dtype=dtype)
    result = lens_loss(
        scores, batch, golden.config_of(data), state=state, pair_order=golden.pair_order_of(data, batch), backend=backend
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


@pytest.mark.parametrize("lookup", ["table", "search"])
@pytest.mark.parametrize("name", golden.NAMES)
def test_pairs_and_targets_equal_the_original(name, lookup):
    data = golden.load(name)
    batch, config = golden.batch_of(data), golden.config_of(data)
    pairs = build_pairs(batch.loss, batch.row, config, order=golden.pair_order_of(data, batch))
    sign = build_targets(batch, pairs, config, lookup=lookup)
    row = {(s, v): int(batch.row[s, v]) for s, sample in enumerate(data["samples"]) for v in range(len(sample["variants"]))}
    for k, pair in enumerate(data["pairs"]):
        assert int(pairs.better[k]) == row[pair["sample"], pair["better"]]
        assert int(pairs.worse[k]) == row[pair["sample"], pair["worse"]]
        assert pairs.delta[k].item() == pytest.approx(pair["delta"], rel=1e-12)
        expand, collapse = (pair["expand"], pair["collapse"]) if pair["kept"] else ([], [])
        assert (sign[k] > 0).nonzero()[:, 0].tolist() == expand
        assert (sign[k] < 0).nonzero()[:, 0].tolist() == collapse
    assert not pairs.valid[len(data["pairs"]) :].any()


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
