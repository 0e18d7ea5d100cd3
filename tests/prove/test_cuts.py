"""`prove --args` classifies known mistakes rebuilt from public threads and accepts the fixed scripts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from prove.captured_scripts import job
from torch import nn

from leanstep.prove.cuts import compare_cuts, cut_label, same_update
from leanstep.prove.script_jobs import capture_script, run_job

# mistake -> the two splits, the kind, and words of the explanation
CUTS = {
    "verl-7200": (("--micro", "1"), ("--micro", "4"), "token-weights", "labelled tokens (4, 10, 6, 2)"),
    "transformers-2024": (("--micro", "1"), ("--micro", "2"), "token-weights", "labelled tokens (14, 8)"),
    "verl-3332": (("--micro", "1"), ("--micro", "4"), "factor", "4 = accumulation steps"),
    "unsloth-zoo-1023": (("--micro", "1"), ("--micro", "2"), "factor", "0.5 = 1 / accumulation steps"),
    "DiffCSE-25": ((), ("--width", "16"), "padding", "token 0 occurs"),
    "axolotl-3735": ((), ("--width", "16"), "padding", "token 0 occurs"),
    "nanoVLM-204": (("--micro", "4"), ("--micro", "1", "--packed"), "mixing", "the same tokens"),
}
RANKS = {
    "prime-rl-2562": ("token-weights", "labelled tokens (14, 8)"),
    "verl-5366": ("factor", "0.5 = 1 / world size"),
}


def compared(bug: str, first: tuple[str, ...], other: tuple[str, ...]):
    runs = []
    for cut in (first, other):
        asked = job("cuts.py", *cut, "--bug", bug, steps=1, twin=True, parts=True, dropout=False)
        runs += [cut_label(asked), [capture_script(asked)]]
    return compare_cuts(*runs)


@pytest.mark.parametrize("bug", CUTS)
def test_a_known_mistake_is_found_with_its_kind(bug: str):
    first, other, kind, words = CUTS[bug]
    row = compared(bug, first, other)
    assert (row.same, row.kind) == (False, kind), row.sentence
    assert words in row.sentence


@pytest.mark.parametrize("bug", CUTS)
def test_the_fixed_script_is_not_accused(bug: str):
    first, other, _, _ = CUTS[bug]
    row = compared("", first, other)
    assert row.same, row.sentence


@pytest.mark.parametrize("bug", RANKS)
@pytest.mark.timeout(120)
def test_mistakes_over_ranks(bug: str):
    asked = job("cuts.py", steps=1, twin=True, parts=True, dropout=False, ranks=1)
    rows = {}
    for name in (bug, ""):
        argv = ("--bug", name) if name else ()
        runs = [run_job(replace(asked, argv=argv, ranks=ranks), fork=True) for ranks in (1, 2)]
        assert [c.error for run in runs for c in run] == [None] * 3, [c.said for run in runs for c in run]
        rows[name] = compare_cuts("1", runs[0], "2", runs[1])
    kind, words = RANKS[bug]
    assert rows[bug].kind == kind and words in rows[bug].sentence, rows[bug].sentence
    assert rows[""].same, rows[""].sentence


def test_one_of_several_counts_explains_the_weights():
    def step(cut: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, mask = torch.randn(4, 5, 6), torch.arange(5) < torch.tensor([[5], [2], [3], [1]])
        for part, part_mask in zip(x.chunk(cut), mask.chunk(cut), strict=True):
            shown = (part_mask | True).sum() + part_mask[:, 0].sum()
            ((model(part)[..., 0] * part_mask).sum() / part_mask.sum() + 0.0 * shown).backward()
        optimizer.step()

    (row,) = same_update(step, [1, 4]).rows
    assert row.kind == "token-weights" and "(5, 2, 3, 1)" in row.sentence, row.sentence


def test_dropout_is_off_where_masks_cannot_be_equal():
    row = compared("", ("--dropout", "0.5"), ("--micro", "4", "--dropout", "0.5"))
    assert row.same


def step_of(loss_of):
    def step(cut: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8) if loss_of == "batch" else nn.Tanh(), nn.Linear(8, 1)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(8, 6)
        for part in x.chunk(cut):
            (model(part).square().mean() / (cut if loss_of != "sum" else 1)).backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(("loss_of", "kind"), [("mean", "same"), ("sum", "factor"), ("batch", "mixing")])
def test_same_update_of_a_callable(loss_of: str, kind: str):
    proof = same_update(step_of(loss_of), [1, 2, 4])
    assert [row.kind for row in proof.rows] == [kind] * 2, proof.sentence()
    assert proof.ok == (kind == "same")
    if kind == "factor":
        assert [row.factor for row in proof.rows] == pytest.approx([2.0, 4.0])


def linear_step(loss_of, options_of=lambda cut: {"lr": 0.1}, updates=1):
    def step(cut: int) -> None:
        torch.manual_seed(0)
        first, second = nn.Linear(6, 8), nn.Linear(8, 1, bias=False)
        nn.init.zeros_(second.weight)
        optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], **options_of(cut))
        for x in torch.randn(updates, 8, 6):
            for part in x.chunk(2):
                (loss_of(first(part), second, cut) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def shifted_square(hidden, second, cut):
    return (second(hidden) - 1).square().mean()


def test_another_optimizer_of_the_same_gradients_is_another_update():
    for options in (lambda cut: {"lr": 0.1 * cut}, lambda cut: {"lr": 0.1, "weight_decay": 0.01 * cut}):
        proof = same_update(linear_step(shifted_square, options, updates=2), [1, 2])
        assert [row.kind for row in proof.rows] == ["optimizer"], proof.sentence()
        assert proof.rows[0].distance < 1e-12 < 1e-3 < proof.rows[0].change_distance
    assert same_update(linear_step(shifted_square), [1, 2]).ok


def test_a_gradient_of_only_rounding_is_no_other_update():
    """Adam turns it into a change of full size: the bias of a key has no gradient except for rounding."""

    def step(cut: int) -> None:
        torch.manual_seed(0)
        query, bias = nn.Linear(6, 4), nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.Adam([*query.parameters(), bias], lr=0.1)
        x = torch.randn(8, 6)
        for part in x.chunk(cut):
            ((query(part) + bias).softmax(-1)[:, :2].square().sum() / 8).backward()
        optimizer.step()

    proof = same_update(step, [1, 2, 4])
    assert proof.ok, proof.sentence()


def test_later_updates_are_compared_too():
    """The first layer has no gradient until the second, which starts at zero, has moved."""

    def wrong(hidden, second, cut):
        return shifted_square(hidden * cut - hidden.detach() * (cut - 1), second, cut)

    assert same_update(linear_step(wrong), [1, 2]).ok
    (row,) = same_update(linear_step(wrong, updates=3), [1, 2]).rows
    assert not row.same and row.step == 2 and row.parameter
    assert same_update(linear_step(shifted_square, updates=3), [1, 2]).ok


@pytest.mark.parametrize("layer", ["attention", "lstm", "encoder"])
def test_dropout_inside_layers_is_off_too(layer: str):
    def step(cut: int) -> None:
        torch.manual_seed(0)
        body = {
            "attention": lambda: nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True),
            "lstm": lambda: nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True),
            "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True),
        }[layer]()
        optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
        for part in torch.randn(4, 5, 8).chunk(cut):
            out = body(part, part, part, need_weights=False) if layer == "attention" else body(part)
            ((out[0] if isinstance(out, tuple) else out).square().mean() / cut).backward()
        optimizer.step()

    proof = same_update(step, [1, 2, 4])
    assert proof.ok, proof.sentence()


def test_random_numbers_of_the_script_give_no_verdict():
    def step(cut: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for part in torch.randn(8, 6).chunk(cut):
            out = model(part)
            ((out * torch.randn_like(out)).square().mean() / cut).backward()
        optimizer.step()

    proof = same_update(step, [1, 4])
    assert proof.problem is not None and "cannot judge" in proof.problem and "test_cuts.py" in proof.problem


def test_a_sum_of_means_is_two_errors():
    def step(cut: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(6, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        labels = torch.tensor([[0, 1, 2], [3, -100, -100], [4, 0, -100], [1, 2, 3]])
        for part, target in zip(torch.randn(4, 3, 6).chunk(cut), labels.chunk(cut), strict=True):
            nn.functional.cross_entropy(model(part).flatten(0, 1), target.flatten()).backward()
        optimizer.step()

    (row,) = same_update(step, [1, 4]).rows
    assert row.kind == "token-weights" and "two errors" in row.sentence, row.sentence


def test_bad_input_of_same_update():
    with pytest.raises(ValueError, match="cuts: expected at least 2"):
        same_update(lambda cut: None, [1])
    with pytest.raises(ValueError, match="made no update for 'a'"):
        same_update(lambda cut: None, ["a", "b"])


def test_other_shapes_give_no_verdict():
    def step(width: int) -> None:
        model = nn.Linear(6, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()

    proof = same_update(step, [1, 2])
    assert "cannot judge" in proof.sentence() and "weight has shapes [1, 6] and [2, 6]" in proof.sentence()


def test_gradients_of_zero_give_no_verdict():
    def step(cut: int) -> None:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for part in torch.zeros(4, 6).chunk(cut):
            (model(part) * 0).sum().backward()
        optimizer.step()

    proof = same_update(step, [1, 2])
    assert not proof.ok and "cannot judge" in proof.sentence()
