"""Views of a parameter: each element is in exactly one matrix, memory is shared, state matches the views."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from leanstep.muon import NorMuon
from leanstep.muon.groups import layout_of, matrix_views, second_views

CUTS = [
    ((6, 8), {}),
    ((2, 3, 6, 8), {}),
    ((6, 8), {"split": [4, 2]}),
    ((6, 8), {"split": [5, 3], "split_dim": 1}),
    ((6, 8), {"heads": 3}),
    ((3, 6, 8), {"split": [4, 2], "heads": [2, 1]}),
    ((3, 6, 8), {"split_dim": 1, "heads": 4}),
    ((6, 2, 2, 2), {"flatten": "conv"}),
    ((6, 2, 2, 2), {"flatten": "conv", "heads": 2}),
]


def group_of(shape, **options):
    """Return the options of a parameter that NorMuon accepts."""
    return NorMuon([nn.Parameter(torch.zeros(shape))], **options).param_groups[0]


@pytest.mark.parametrize(("shape", "options"), CUTS)
def test_views_cover_every_element_once_and_share_memory(shape, options):
    tensor = torch.zeros(shape)
    for view in matrix_views(tensor, layout_of(shape, group_of(shape, **options))):
        assert view.ndim == 3
        view += 1
    assert (tensor == 1).all()


@pytest.mark.parametrize("per", ["long", "row"])
@pytest.mark.parametrize(("shape", "options"), CUTS)
def test_variance_state_has_a_number_for_every_line(shape, options, per):
    layout = layout_of(shape, group_of(shape, variance=per, **options))
    second = torch.zeros(layout.second_shape)
    views = matrix_views(torch.zeros(shape), layout)
    for view, state in zip(views, second_views(second, layout), strict=True):
        state += 1
        assert state.size(0) == view.size(0)
        lines = view.size(1) if state.size(2) == 1 else view.size(2)
        assert lines == (view.size(1) if per == "row" else max(view.shape[1:]))
    assert (second == 1).all()


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
def test_heads_are_contiguous_blocks_of_rows(heads, rows, cols):
    tensor = torch.arange(heads * rows * cols).view(heads * rows, cols).float()
    (view,) = matrix_views(tensor, layout_of(tensor.shape, group_of(tensor.shape, heads=heads)))
    for index in range(heads):
        assert torch.equal(view[index], tensor[index * rows : (index + 1) * rows])
