"""Every public name of `objectives.ragged` has shapes and code that runs and means the same."""

from __future__ import annotations

import doctest
import inspect
import re

import pytest
import torch
from docstring_code import code_blocks

from leanstep.objectives import ragged

# What the code of a docstring must have computed; the names are those of the docstring and of `world`.
MEANS = {
    "Groups": "(groups.group[items] == g).all()",
    "SampledPairs": "estimate > 0",
    "bradley_terry": "torch.allclose(loss, bradley_terry(scores, pairs=(i, j), weights=weights))",
    "draw_pairs": "loss > 0",
    "hinge": "torch.allclose(loss, hinge(scores, labels, [0, len(scores)], margin=margin))",
    "plackett_luce": "torch.allclose(loss, plackett_luce(scores, labels, [0, len(scores)], reduction='sum'))",
    "top_pairs": "best[0] // n == top_pairs(scores, labels, [0, n], k).i[0]",
}


def world() -> dict[str, object]:
    """Names that the docstrings use."""
    names: dict[str, object] = {name: getattr(ragged, name) for name in ragged.__all__}
    names |= {"torch": torch, "softplus": torch.nn.functional.softplus, "relu": torch.relu}
    scores, labels = torch.randn(9), torch.randperm(9)
    return names | {
        "scores": scores,
        "labels": labels,
        "offsets": [0, 4, 9],
        "groups": ragged.make_groups(scores, [0, 4, 9]),
        "g": 1,
        "i": torch.tensor([0, 3, 4]),
        "j": torch.tensor([1, 2, 8]),
        "weights": torch.rand(3),
        "margin": 0.0,
        "scale": 1.0,
        "top_k": None,
        "generator": torch.Generator().manual_seed(0),
        "n": 9,
        "k": 3,
    }


@pytest.mark.parametrize("name", ragged.__all__)
def test_docstring_names_shapes_and_its_code_means_the_same(name):
    public = getattr(ragged, name)
    doc = inspect.getdoc(public) or ""
    assert re.search(r"\[[A-Z0-9n]|0-d|scalar", doc), f"{name}: no shape"
    blocks = code_blocks(doc)
    assert blocks or ">>>" in doc, f"{name}: no equivalent or example"
    names = world()
    for block in blocks:
        exec(block, names)
    assert not blocks or eval(MEANS[name], names), f"{name}: the code computes something else"
    for example in doctest.DocTestFinder(recurse=False).find(public, name, globs=world()):
        assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.parametrize("name", ragged.__all__)
def test_objectives_exports_every_public_name(name):
    import leanstep.objectives as package

    assert name in package.__all__ and getattr(package, name) is getattr(ragged, name)
