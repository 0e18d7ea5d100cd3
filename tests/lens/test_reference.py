"""The loop reference against the numbers of the original project."""

from __future__ import annotations

import pytest
import torch

from leanstep.lens.config import LensConfig, ObjectiveConfig
from leanstep.lens.reference import (
    lens_loss_reference,
    reference_coverage,
)

from . import golden


@pytest.mark.parametrize("name", [n for n in golden.NAMES if not n.startswith("14")])
def test_loss_terms_and_gradient_equal_the_original(name):
    data = golden.load(name)
    batch = golden.batch_of(data)
    scores = golden.scores_of(data, batch).requires_grad_()
    result = lens_loss_reference(
        scores,
        batch,
        golden.config_of(data),
        state=data["config"]["ema_in"],
        pair_order=golden.pair_order_of(data, batch),
    )
    result.loss.backward()
    golden.assert_gradient(data, batch, scores.grad, rtol=1e-9, atol=1e-15)
    outputs = data["outputs"]
    assert result.loss.item() == pytest.approx(outputs["loss"], rel=1e-9)
    assert result.state.item() == pytest.approx(outputs["ema_out"], rel=1e-9)
    assert int(result.kept.sum()) == outputs["num_kept"]
    for k, pair in enumerate(data["pairs"]):
        assert bool(result.kept[k]) == pair["kept"]
        for term in result.terms:
            if pair["kept"]:
                assert result.terms[term][k].item() == pytest.approx(pair[term], rel=1e-9, abs=1e-15), (
                    k,
                    term,
                )


def coverage_of(scores):
    config = LensConfig(block_size=4, max_lod=2, objective=ObjectiveConfig(coverage_weight=1.0))
    context = [(0, 1), (4, 1), *[(p, 0) for p in range(8, 16)]]
    return reference_coverage(list(scores), context, 16, config)


def test_coverage_examples_of_the_derivation():
    first = torch.zeros(10, dtype=torch.float64)
    first[0] = 0.5
    second = torch.zeros(10, dtype=torch.float64)
    second[1] = 0.5
    assert coverage_of(first).item() == pytest.approx(0.15)
    assert coverage_of(second).item() == pytest.approx(0.30)
    assert coverage_of(torch.zeros(10)).item() == 0
    assert coverage_of(torch.full((10,), -0.7)).item() == 0
