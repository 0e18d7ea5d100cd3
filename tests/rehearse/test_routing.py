"""A router's choices are spread evenly, and everything that the host derives from them agrees."""

from __future__ import annotations

import json

import pytest
import torch
from rehearse.rehearsed import SCRIPTS, Rehearsed, run_script

from leanstep.rehearse.routing import spread_evenly

RANKS, TOKENS, EXPERTS, CHOSEN = 4, 8192, 64, 4


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Rehearsed:
    capture = tmp_path_factory.mktemp("experts")
    rehearsed = run_script(SCRIPTS / "experts.py", capture=capture, steps=2, ranks=RANKS)
    assert rehearsed.recording.refused is None, rehearsed.recording.refused
    return rehearsed


@pytest.fixture(scope="module")
def seen(experts) -> dict:
    return json.loads(experts.printed.splitlines()[-1])


def test_each_expert_gets_its_share_of_tokens(seen):
    assert seen["rows"] == [TOKENS * CHOSEN // EXPERTS] * 4
    assert seen["largest"] == [TOKENS // EXPERTS] * EXPERTS


def test_ranks_exchange_equal_parts(seen):
    part = TOKENS * CHOSEN // RANKS
    assert seen["exchanged"] == [[part] * RANKS, [part] * RANKS, [RANKS * part, 16]]


def test_the_assumption_is_listed_with_its_line(experts):
    listed = [a for a in experts.recording.assumed if (a.kind, a.value) == ("topk", "spread evenly")]
    assert [experts.is_at(a.line, "topk") for a in listed] == [True]
    exchanged = [a for a in experts.recording.assumed if a.kind == "all_to_all"]
    assert any(experts.is_at(a.line, "counts") for a in exchanged)


@pytest.mark.parametrize(
    ("name", "shape", "args", "chosen"),
    [
        ("topk", (6, 3), (2,), [[0, 1], [2, 0], [1, 2], [0, 1], [2, 0], [1, 2]]),
        ("topk", (3, 6), (2, 0), [[0, 2, 1, 0, 2, 1], [1, 0, 2, 1, 0, 2]]),
        ("argmax", (2, 3, 4), (-1,), [[0, 1, 2], [3, 0, 1]]),
        ("argmax", (2, 3), (), None),  # over all elements
        ("argmax", (4, 1000), (-1,), None),  # a vocabulary
    ],
)
def test_choices_by_shape(name, shape, args, chosen):
    scores = torch.zeros(shape)
    if name == "topk":
        indices = torch.topk(scores, *args).indices
    else:
        indices = torch.argmax(scores, *args)
    spread = spread_evenly(name, (scores, *args), {}, indices)
    assert (None if spread is None else spread.tolist()) == chosen


def test_choices_among_known_scores_are_followed_into_large_masks(tmp_path):
    """Scores that the device drew are known; a mask for each token and expert is larger than they."""
    script = tmp_path / "known.py"
    script.write_text(
        "import torch\n"
        "chosen = torch.randn(2048, 128, device='cuda').topk(8, dim=-1).indices\n"
        "mask = torch.nn.functional.one_hot(chosen, num_classes=128).permute(2, 1, 0)\n"
        "print(sum(torch.where(mask[expert])[1].numel() for expert in range(128)))\n"
    )
    assert run_script(script, capture=tmp_path).printed.split() == [str(2048 * 8)]
