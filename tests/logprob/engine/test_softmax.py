"""Running statistics: any partition of the columns, merged in any order, gives the same statistics."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanstep.logprob.engine.softmax import FinalStatistics, RowStatistics, merge


def swept(z, widths, **options):
    stats = RowStatistics.empty(len(z), dtype=z.dtype, moment=True, **options)
    start = 0
    for width in widths:
        tile = z[:, start : start + width].clone()
        stats.update_(tile, [tile, torch.zeros_like(tile)])
        start += width
    return stats


def truth(z):
    p = torch.log_softmax(z.double(), -1)
    return torch.logsumexp(z.double(), -1), -torch.where(p > -torch.inf, p.exp() * p, 0.0).sum(-1)


@settings(max_examples=40, deadline=None)
@given(
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=6), cut=st.integers(0, 5), seed=st.integers(0, 99)
)
def test_any_partition_gives_the_whole(widths, cut, seed):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(4, sum(widths), generator=g, dtype=torch.float64) * 30
    z[torch.rand(z.shape, generator=g) < 0.3] = -torch.inf
    z[3] = -torch.inf
    cut = min(cut, len(widths))
    left, right = widths[:cut], widths[cut:]
    split = sum(left)
    merged = merge(swept(z[:, :split], left), swept(z[:, split:], right))
    final, direct = merged.final(), swept(z, widths).final()
    alive = z.isfinite().any(-1)
    lse, entropy = truth(z[alive])
    assert torch.equal(final.alive, alive) and torch.equal(direct.alive, alive)
    for each in (final, direct):
        torch.testing.assert_close(each.log_sum_exp()[alive], lse, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(each.entropy[alive], entropy, atol=1e-11, rtol=1e-11)
        assert torch.equal(each.entropy[~alive], torch.zeros(int((~alive).sum()), dtype=torch.float64))


def test_packing_keeps_every_field():
    stats = RowStatistics.empty(
        3,
        dtype=torch.float64,
        moment=True,
        num_targets=2,
        total=True,
        allowed=True,
        reference=True,
        reverse=True,
    )
    for index, name in enumerate(vars(stats)):
        getattr(stats, name).copy_(torch.randn(getattr(stats, name).shape, dtype=torch.float64) + index)
    maxima = stats.maxima()
    same = stats.replaced(maxima, stats.sums_under(maxima))
    for name, value in vars(stats).items():
        torch.testing.assert_close(getattr(same, name), value)
    nothing = RowStatistics.empty(
        3,
        dtype=torch.float64,
        moment=True,
        num_targets=2,
        total=True,
        allowed=True,
        reference=True,
        reverse=True,
    )
    for merged in (merge(stats, nothing), merge(nothing, stats)):
        for name, value in vars(stats).items():
            torch.testing.assert_close(getattr(merged, name), value)


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e6])
def test_large_offsets_keep_their_digits(offset):
    z = torch.randn(5, 40) * 2
    shifted = (z + offset).float()
    _, entropy = truth(shifted)
    torch.testing.assert_close(
        swept(shifted, [7, 33]).final().entropy.double(), entropy, atol=2e-6, rtol=2e-6
    )


def test_opposite_ends_of_fp32():
    z = torch.tensor([[-3e38, 3e38, -3e38, 3e38]])
    for widths in ([4], [1, 3], [2, 2], [1, 1, 1, 1]):
        final = swept(z, widths).final()
        torch.testing.assert_close(final.entropy, torch.tensor([2.0]).log())


def test_saved_statistics_come_back():
    stats = swept(torch.tensor([[0.0, 1.0], [-torch.inf, -torch.inf]]), [2])
    final = stats.final()
    back = FinalStatistics.restored(*final.saved())
    for a, b in zip(final, back, strict=True):
        assert torch.equal(a, b)
    assert back.log_prob(torch.tensor([1.0, 0.0])).tolist()[1] == -torch.inf
