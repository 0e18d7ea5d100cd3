"""Variant sampler and focus allocator: lengths, limits, legal edits."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.lens.contexts import (
    AllocatorConfig,
    allocate_focus,
    reachable_length,
    sample_variants,
)


def test_seed_setting_reaches_1831():
    assert reachable_length(2048, 1843, 32) == 1831
    variants = sample_variants(2048, 32, 2, 2, 1831, torch.Generator().manual_seed(0))
    assert [len(v.positions) for v in variants] == [1831] * 3
    assert [int((v.lods > 0).sum()) for v in variants] == [0, 7, 7]


@settings(max_examples=30, deadline=None)
@given(st.integers(20, 120), st.integers(2, 5), st.integers(1, 3), st.integers(0, 1000))
def test_random_variants_cover_everything_once(tokens, b, top, seed):
    target = reachable_length(tokens, max(int(0.7 * tokens), 1), b)
    recent = tokens // 8
    generator = torch.Generator().manual_seed(seed)
    variants = sample_variants(tokens, b, top, 3, target, generator, recent_tokens=recent)
    assert 1 <= len(variants) <= 4 and variants[0].is_baseline
    contents = {(tuple(v.positions.tolist()), tuple(v.lods.tolist())) for v in variants}
    assert len(contents) == len(variants)
    for v in variants[1:]:
        spans = torch.tensor([b**level for level in v.lods.tolist()])
        ends = v.positions + spans
        assert v.positions[0] == 0 and ends[-1] == tokens and (ends[:-1] == v.positions[1:]).all()
        assert (len(v.positions) - target) % (b - 1) == 0 and v.lods.max() <= top
        assert (v.lods[v.positions >= tokens - recent] == 0).all()


def edit(pos, lod, scores, budget=100, **limits):
    config = AllocatorConfig(protected_entries=limits.pop("protected", 0), **limits)
    p, level = allocate_focus(
        torch.tensor(pos),
        torch.tensor(lod),
        torch.tensor(scores),
        block_size=2,
        max_lod=2,
        budget=budget,
        num_tokens=16,
        config=config,
    )
    return list(zip(p.tolist(), level.tolist(), strict=True))


def test_allocator_edits_the_strongest_first():
    pos, lod = [0, 4, 6, 8, 9], [2, 1, 1, 0, 0]
    assert edit(pos, lod, [0.9, 0.0, 0.0, 0.0, 0.0]) == [(0, 1), (2, 1), (4, 1), (6, 1), (8, 0), (9, 0)]
    assert edit(pos, lod, [0.0, -0.5, 0.0, 0.0, 0.0]) == [(0, 2), (4, 2), (8, 0), (9, 0)]
    assert edit(pos, lod, [0.0, 0.0, 0.0, -0.2, 0.0]) == [(0, 2), (4, 1), (6, 1), (8, 1)]
    # Too weak, over budget, protected, not contiguous, already edited.
    same = list(zip(pos, lod, strict=True))
    assert edit(pos, lod, [0.05, -0.05, 0.0, 0.0, 0.0]) == same
    assert edit(pos, lod, [0.9, 0.0, 0.0, 0.0, 0.0], budget=5) == same
    assert edit(pos, lod, [0.0, 0.0, 0.0, -0.9, 0.0], protected=1) == same
    assert edit(pos, lod, [0.0, 0.0, -0.9, 0.0, 0.0]) == same
    assert edit(pos, lod, [0.0, -0.9, 0.8, 0.0, 0.0]) == [(0, 2), (4, 2), (8, 0), (9, 0)]
    assert len(edit(list(range(8)), [0] * 8, [-0.9] * 8, max_edits=2)) == 6
