"""Batches and configuration reject input that would train incorrectly without an error."""

from __future__ import annotations

import math

import pytest
import torch

from leanstep.lens import (
    GateConfig,
    LensBatch,
    LensConfig,
    ObjectiveConfig,
    SamplingConfig,
    Variant,
    check_variant_counts,
)
from leanstep.lens.batch import real_cells

CONFIG = LensConfig(block_size=2, max_lod=1)


def make(*variants, tokens=8):
    return LensBatch.from_variants([list(variants)], CONFIG, num_tokens=tokens)


@pytest.mark.parametrize(
    "variant, message",
    [
        (Variant([0, 2, 1], [0, 0, 0], 1.0), "not strictly ascending"),
        (Variant([0, 0], [0, 0], 1.0), "not strictly ascending"),
        (Variant([0, 1], [0, 2], 1.0), r"LOD 2, expected 0..max_lod = 1"),
        (Variant([0, 9], [0, 0], 1.0), "starts at 9, expected 0..7"),
        (Variant([0, 1], [0, 0], math.nan), "is nan; pass None"),
        (Variant([0, 1], [0, 0], math.inf), "is inf"),
        (Variant([0, 1], [0], 1.0), "lods"),
        (Variant([0, 1], [0, 0], torch.ones(1)), "expected a 0-d tensor"),
    ],
)
def test_malformed_variants_are_named(variant, message):
    with pytest.raises(ValueError, match=message):
        make(Variant([0, 1], [0, 0], 2.0, True), variant)


def test_from_tensors_checks_shapes():
    pos, lod = torch.arange(4).view(2, 2), torch.zeros(2, 2, dtype=torch.int8)
    loss, row = torch.zeros(1, 2), torch.tensor([[0, 1]])
    good = {"pos": pos, "lod": lod, "loss": loss, "row": row, "num_tokens": 4}
    LensBatch.from_tensors(**good)
    masked = LensBatch.from_tensors(**good, has_loss=torch.tensor([[True, False]]))
    assert masked.loss.isnan().tolist() == [[False, True]]
    with pytest.raises(ValueError, match="with known variants per sample"):
        masked.with_losses(torch.zeros(2))
    for change, message in [
        ({"pos": pos[0]}, "pos: expected shape"),
        ({"num_tokens": 0}, "num_tokens: expected >= 1"),
        ({"baseline": torch.zeros(2, dtype=torch.int64)}, "baseline: expected shape"),
        ({"lod": lod[:, :1]}, "lod: expected shape"),
        ({"loss": loss[0]}, "loss: expected shape"),
        ({"row": row[:, :1]}, "row: expected shape"),
        ({"loss": loss.half()}, "loss: expected float32 or float64"),
        ({"tokens": torch.ones(2, 1)}, "tokens: expected shape"),
        ({"valid": torch.ones(2, 2)}, "valid: expected bool"),
        ({"has_loss": torch.ones(1, 1, dtype=torch.bool)}, "has_loss: expected bool"),
        ({"pos": pos.float()}, "integer"),
    ]:
        with pytest.raises(ValueError, match=message):
            LensBatch.from_tensors(**{**good, **change})


def test_losses_of_the_base_model_and_their_excess_over_the_baseline():
    short, whole = Variant([0], [1]), Variant([0, 1], [0, 0], is_baseline=True)
    batch = LensBatch.from_variants([[short, whole, short], [whole]], CONFIG, num_tokens=2)
    losses, nan = torch.tensor([3.0, 2.0, 1.0, 5.0], dtype=torch.float64), math.nan
    for weight, first in ((0.0, 3.0), (0.5, 3.5)):
        got = batch.with_losses(losses, gist_delta_weight=weight).loss
        expected = torch.tensor([[first, 2.0, 1.0], [5.0, nan, nan]], dtype=torch.float64)
        torch.testing.assert_close(got, expected, equal_nan=True)
    with pytest.raises(ValueError, match=r"losses: expected shape \(4,\), one per context"):
        batch.with_losses(losses[:3])


def test_left_and_right_padding_agree():
    from leanstep.lens import lens_loss

    samples = [[Variant([0, 1, 2, 3], [0] * 4, 2.0, True), Variant([0, 2, 3], [1, 0, 0], 1.0)]]
    right = LensBatch.from_variants(samples, CONFIG, num_tokens=4)
    left = LensBatch.from_tensors(
        torch.tensor([[0, 1, 2, 3], [9, 0, 2, 3]]),
        torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0]]),
        right.loss,
        right.row,
        num_tokens=4,
        valid=torch.tensor([[True] * 4, [False, True, True, True]]),
    )
    x = torch.randn(2, 4)
    y = torch.stack([x[0], x[1].roll(1)])
    assert lens_loss(x, right, CONFIG).loss > 0
    torch.testing.assert_close(lens_loss(y, left, CONFIG).loss, lens_loss(x, right, CONFIG).loss)


@pytest.mark.parametrize(
    ("record", "change"),
    [
        (ObjectiveConfig, {"temperature": 0}),
        (SamplingConfig, {"hard_negative_ratio": 0}),
        (SamplingConfig, {"max_pairs": 0}),
        (ObjectiveConfig, {"budget_smooth_beta": 1.0}),
        (ObjectiveConfig, {"form": "logit"}),
        (ObjectiveConfig, {"rank_weight": -1}),
        (ObjectiveConfig, {"margin": math.nan}),
        (GateConfig, {"every": 0}),
        (GateConfig, {"mode": "never"}),
        (LensConfig, {"block_size": 1}),
        (LensConfig, {"max_lod": 0}),
        (LensConfig, {"gate": 4}),
        (SamplingConfig, {"pair_sampling": "random"}),
        (ObjectiveConfig, {"coverage_target": 1.5}),
        (ObjectiveConfig, {"coverage_capacity": 0}),
    ],
)
def test_bad_configuration_names_the_field(record, change):
    name = "pairs_sampled" if "pair_sampling" in change else next(iter(change))
    with pytest.raises(ValueError, match=f"{name}:"):
        record(**change)


def test_variant_counts():
    assert check_variant_counts([3] * 13, 13, 2) == 39
    assert check_variant_counts([3, 1, 2], 3, 2, num_pairs=4) == 6
    for counts, message in [
        ([3] * 12, "expected 13 samples, got 12"),
        ([4] + [3] * 12, "sample 0 has 4 variants"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_variant_counts(counts, 13, 2)
    with pytest.raises(ValueError, match="5 pairs from 6 variants, expected at most 4"):
        check_variant_counts([3, 1, 2], 3, 2, num_pairs=5)


def test_rows_of_one_length_need_no_mask():
    cpu = torch.device("cpu")
    assert real_cells([3, 3], cpu) is None and real_cells([], cpu) is None
    mask = real_cells([1, 2], cpu)
    assert mask is not None and mask.tolist() == [[True, False], [True, True]]
