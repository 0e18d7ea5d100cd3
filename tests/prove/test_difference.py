"""prove names the kind of a difference between two scripts, once, and where a script failed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from prove.captured_scripts import job, prove_pair
from torch import nn

import leanstep
from leanstep.cli import run
from leanstep.prove.captured import Update
from leanstep.prove.difference import of_the_gradient, of_the_optimizer
from leanstep.prove.script_jobs import capture_script

SCRIPT = """import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
words, head = nn.Embedding(40, 8), nn.Linear(8, 40)
optimizer = torch.optim.SGD([*words.parameters(), *head.parameters()], lr=0.1)
for i in range(2):
    ids = torch.randint(0, 39, (3, 9))
    ids[1, 6:] = 39
    mask = (ids != 39).float()
    logits = head(words(ids).cumsum(1))[:, :-1]
    logp = F.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    loss = -(logp * mask[:, 1:]).sum() / mask[:, 1:].sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
CHANGES = {
    "a factor of two": (("loss = -(", "loss = -2 * ("), "A constant factor: 2"),
    "another normalisation": (
        ("/ mask[:, 1:].sum()", "/ ids.numel()"),
        "21 sum of a mask / 27 tokens with padding: a mean over a different number of tokens",
    ),
    "shifted targets": (("ids[:, 1:, None]", "ids[:, :-1, None]"), "Shifted targets: a row scores the token"),
    "a mask left out": (
        ("(logp * mask[:, 1:])", "logp"),
        "up to squeeze at after.py:12; then sum at after.py:13 differs, where before.py computes mul at",
    ),
    "an option of some parameters": (
        ("[*words.parameters(), *head.parameters()]", "[{'params': words.parameters()}, {'params': "
         "head.parameters(), 'weight_decay': 0.1}]"),
        "another weight_decay of Linear.weight and 1 more: 0 before, 0.1 after",
    ),
    "another optimizer": (("optim.SGD", "optim.Adam"), "another optimizer: SGD before, Adam after"),
    "clipping": (
        ("    optimizer.step()", "    nn.utils.clip_grad_norm_(head.parameters(), 0.1); optimizer.step()"),
        "The same gradients, but only one of the scripts clips them",
    ),
    "masked scores": (
        (
            "words(ids).cumsum(1)",
            "(words(ids) @ words(ids).mT).masked_fill(torch.ones(9, 9).triu(1) > 0, -torch.inf).softmax(-1) "
            "@ words(ids)",
        ),
        "both compute the same values up to embedding at after.py:11; then",
    ),
    "a normalized value": (
        ("words(ids).cumsum(1)", "F.normalize(words(ids).cumsum(1) + 1, dim=-1)"),
        "up to cumsum at after.py:11; then add at after.py:11 differs",
    ),
    "a frozen parameter": (
        ("for i in", "head.bias.requires_grad_(False)\nfor i in"),
        "In after.py, Linear.bias does not require a gradient",
    ),
    "dropout in one script": (
        ("words(ids)", "F.dropout(words(ids), 0.5)"),
        "Before.py draws no random numbers in the forward pass; the other does, at after.py:11",
    ),
    "a detached mask of gradients": (
        ("loss = -(", "hidden = logits.square().mean(); loss = hidden - hidden.detach() - ("),
        "The loss agrees, the gradient does not",
    ),
    "another function of the same value": (
        ("words(ids)", "(words(ids) + (words(ids) - words(ids).detach()) * ids[..., None])"),
        ": a term without a gradient, or another function with the same value, in after.py or before.py",
    ),
    "a detached term": (
        ("loss = -(", "loss = logits.square().mean().detach() - logits.square().mean() - ("),
        "a detached term; the term of the loss at after.py:13 of after.py has no gradient in before.py",
    ),
    "a summand": (
        ("mask[:, 1:].sum()\n", "mask[:, 1:].sum() + 0.1 * logits.square().mean()\n"),
        "The term of the loss at after.py:13 of after.py has no gradient in before.py",
    ),
    "no gradient below the head": (
        ("head(words(ids).cumsum(1))", "head(words(ids).cumsum(1).detach())"),
        "In after.py, Embedding.weight gets a gradient of exactly zero; the last parameter with one is",
    ),
    "rounding": (
        ("head(words(ids).cumsum(1))", "(head(words(ids).cumsum(1))).to(torch.bfloat16).float()"),
        "In fp64 both have the same gradient: after.py rounds more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_the_kind_of_a_difference_is_named_once(tmp_path: Path, capfd, name: str):
    change, words = CHANGES[name]
    assert change[0] in SCRIPT
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(SCRIPT, encoding="utf-8")
    after.write_text(SCRIPT.replace(*change), encoding="utf-8")
    assert run(["prove", str(before), str(after), "--steps", "1"]) == 1
    out, err = capfd.readouterr()
    line = out.splitlines()[-1]
    assert words in line and line.startswith("not the same update")
    assert out.count("not the same update") == 1 and "leanstep:" not in err


def test_the_term_that_differs_is_named_among_others(tmp_path: Path, capfd):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    terms = SCRIPT.replace(
        "    optimizer.zero_grad()\n",
        "    center = 0.1 * logits.mean(-1).square().mean()\n"
        "    size = 0.1 * logits.square().mean()\n"
        "    loss = loss + center + size\n"
        "    optimizer.zero_grad()\n",
    )
    before.write_text(terms, encoding="utf-8")
    after.write_text(terms.replace("logits.square().mean()", "logits.abs().mean()"), encoding="utf-8")
    assert run(["prove", str(before), str(after), "--steps", "1"]) == 1
    said = capfd.readouterr().out
    assert "nly the term of the loss at after.py:15" in said
    assert "differs (before.py:15" in said and "; the other 2 agree" in said


# The same update, written in another way.
INNOCENT = {
    "clipping by hand": (
        "    nn.utils.clip_grad_norm_(head.parameters(), 0.1)\n",
        "    norm = torch.stack([p.grad.norm() for p in head.parameters()]).norm()\n"
        "    for p in head.parameters():\n        p.grad.mul_((0.1 / (norm + 1e-6)).clamp(max=1))\n",
    ),
    "a scaled loss": (
        "",
        "    for p in [*words.parameters(), *head.parameters()]:\n        p.grad.div_(8)\n",
    ),
}


@pytest.mark.parametrize("name", INNOCENT)
def test_the_same_update_passes(tmp_path: Path, capfd, name: str):
    paths = [tmp_path / "before.py", tmp_path / "after.py"]
    for path, inserted in zip(paths, INNOCENT[name], strict=True):
        text = SCRIPT.replace("    optimizer.step()", inserted + "    optimizer.step()")
        text = text.replace("loss.backward()", "(8 * loss).backward()") if "8" in inserted else text
        path.write_text(text, encoding="utf-8")
    assert run(["prove", *map(str, paths)]) == 0, capfd.readouterr().err
    assert run(["prove", *map(str, reversed(paths))]) == 0, capfd.readouterr().err


ACCUMULATED = SCRIPT.replace(
    "    loss.backward()\n", "    for row in logp:\n        row.mean().backward(retain_graph=True)\n"
)


def test_a_zero_grad_between_backward_calls_is_a_lost_gradient(tmp_path: Path, capfd):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(ACCUMULATED, encoding="utf-8")
    text = ACCUMULATED.replace("for row in logp:", "for k, row in enumerate(logp):")
    text = text.replace("retain_graph=True)\n", "retain_graph=True)\n        k or optimizer.zero_grad()\n")
    after.write_text(text, encoding="utf-8")
    assert run(["prove", str(before), str(after), "--steps", "1"]) == 1
    assert "after.py lacks the gradient of backward call 1 of 3: zero_grad()" in capfd.readouterr().out


def test_a_parameter_that_only_one_script_trains_is_found(tmp_path: Path, capfd):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(
        SCRIPT.replace("for i in", "head.bias.requires_grad_(False)\nfor i in"), encoding="utf-8"
    )
    after.write_text(SCRIPT, encoding="utf-8")
    assert run(["prove", str(before), str(after), "--steps", "1"]) == 1
    assert "In before.py, Linear.bias does not require a gradient" in capfd.readouterr().out


def test_other_random_numbers_in_both_scripts_are_not_judged(tmp_path: Path, capfd):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    text = SCRIPT.replace("words(ids)", "F.dropout(words(ids), 0.5)")
    before.write_text(text, encoding="utf-8")
    after.write_text(text.replace("    mask", "    torch.rand(3)\n    mask"), encoding="utf-8")
    assert run(["prove", str(before), str(after), "--steps", "1"]) == 2
    assert "cannot judge: the scripts draw different random numbers; without" in capfd.readouterr().err


MASK = "    mask = {} < 0.6\n    mask[1, 6:] = False\n    mask = mask.float()\n"
DRAWS = {
    "torch.rand(3, 9)": "torch.rand(3, 9, dtype=torch.float64)",
    "torch.randint(10, (3, 9)) / 10": "torch.rand(3, 9)",
    "torch.rand(3, 9, generator=torch.Generator().manual_seed(1))": (
        "torch.rand(3, 9, generator=torch.Generator().manual_seed(2))"
    ),
    "torch.rand(3, 9).round()": "torch.bernoulli(torch.full((3, 9), 0.5))",
}


@pytest.mark.parametrize("draw", DRAWS)
def test_masks_of_other_random_numbers_are_not_judged(tmp_path: Path, draw: str):
    text = SCRIPT.replace("    mask = (ids != 39).float()\n", MASK)
    for name, drawn in (("before.py", draw), ("after.py", DRAWS[draw])):
        (tmp_path / name).write_text(text.format(drawn), encoding="utf-8")
    mine, theirs = (job(str(tmp_path / name), steps=1) for name in ("before.py", "after.py"))
    kind, words = of_the_gradient(mine, theirs, 1, lambda job: [capture_script(job)])
    assert (kind, words) == (
        "random", "the scripts draw different random numbers: before.py:10 and after.py:10"
    )  # fmt: skip


def test_an_unused_random_number_hides_no_difference(tmp_path: Path):
    text = SCRIPT.replace("    mask = (ids != 39).float()\n", MASK.format("torch.rand(3, 9)"))
    changed = text.replace("(logp * ", "(logp.sin() * ").replace("    loss =", "    torch.rand(3); loss =")
    for name, script in (("before.py", text), ("after.py", changed)):
        (tmp_path / name).write_text(script, encoding="utf-8")
    mine, theirs = (job(str(tmp_path / name), steps=1) for name in ("before.py", "after.py"))
    kind, words = of_the_gradient(mine, theirs, 1, lambda job: [capture_script(job)])
    assert kind == "value" and "sin at after.py:15" in words


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "    optimizer.zero_grad()\n",
            "",
            "Stale gradient: after.py adds the gradient of step 1 to that of step 2",
        ),
        (
            "    optimizer.step()",
            "    optimizer.param_groups[0]['lr'] = 0.03 if i else 0.1; optimizer.step()",
            "The same gradients, another lr: 0.1 before, 0.03 after",
        ),
    ],
    ids=["stale", "learning rate"],
)
def test_a_difference_of_the_second_step_is_named(tmp_path: Path, capfd, old: str, new: str, words: str):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(SCRIPT, encoding="utf-8")
    after.write_text(SCRIPT.replace(old, new), encoding="utf-8")
    assert run(["prove", str(before), str(after)]) == 1
    assert words in capfd.readouterr().out


def test_an_imprecise_script_is_no_standard(tmp_path: Path, capfd):
    before = tmp_path / "before.py"
    noisy = SCRIPT.replace(
        "head(words(ids).cumsum(1))", "head((words(ids).cumsum(1) + 300).to(torch.bfloat16).float() - 300)"
    )
    before.write_text(noisy, encoding="utf-8")
    assert run(["prove", str(before), str(before), "--steps", "1"]) == 2
    assert "cannot judge: before.py is itself" in capfd.readouterr().err


def test_the_line_of_an_exception_is_named_once(tmp_path: Path, capfd):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(SCRIPT, encoding="utf-8")
    after.write_text(SCRIPT.replace("(3, 9)", "(3, 9, 2)"), encoding="utf-8")
    assert run(["prove", str(before), str(after)]) == 2
    out, err = capfd.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("leanstep:")]
    assert "RuntimeError: The size of tensor" in line and "after.py:13)" in line
    assert "RuntimeError" not in out


CLIP = "    nn.utils.clip_grad_norm_([*words.parameters(), *head.parameters()], {})\n"


def clipped(folder: Path, name: str, *, before: float | None = None, after: float | None = None, keep: bool):
    """Write SCRIPT with clipping before the step, after it, or both; `keep`: zero_grad() writes zeros."""
    text = SCRIPT.replace("zero_grad()", f"zero_grad(set_to_none={not keep})")
    inserted = ["" if norm is None else CLIP.format(norm) for norm in (before, after)]
    path = folder / name
    path.write_text(
        text.replace("    optimizer.step()\n", f"{inserted[0]}    optimizer.step()\n{inserted[1]}")
    )
    return job(str(path), steps=2)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("norm", [1e3, 1e-3])
def test_clipping_behind_the_step_changes_no_update(tmp_path: Path, keep: bool, norm: float):
    plain = clipped(tmp_path, "plain.py", keep=keep)
    late = clipped(tmp_path, "late.py", after=norm, keep=keep)
    note = "late.py clips after the optimizer's step, which does not change that step"
    for before, after in ((plain, late), (late, plain)):
        proof = prove_pair(before, after)
        assert proof.ok, proof.sentence()
        assert proof.notes == [note]


@pytest.mark.parametrize("keep", [True, False])
def test_clipping_that_moves_behind_the_step_is_the_missing_clipping(tmp_path: Path, keep: bool):
    early = clipped(tmp_path, "early.py", before=1e3, keep=keep)
    proof = prove_pair(early, clipped(tmp_path, "late.py", after=1e3, keep=keep))
    assert proof.ok, proof.sentence()
    assert "late.py clips after the optimizer's step, which does not change that step" in proof.notes
    early = clipped(tmp_path, "early.py", before=1e-3, keep=keep)
    proof = prove_pair(early, clipped(tmp_path, "late.py", after=1e-3, keep=keep))
    assert (proof.failed[0].step, proof.failed[0].what) == (1, "clipped gradient")


def test_clipping_that_only_one_script_has_is_said(tmp_path: Path):
    plain = clipped(tmp_path, "plain.py", keep=False)
    proof = prove_pair(clipped(tmp_path, "clips.py", before=1e3, keep=False), plain)
    note = "only clips.py clips; its clipping changed no gradient in these steps"
    assert proof.ok and proof.notes == [note]
    assert prove_pair(plain, clipped(tmp_path, "clips.py", before=1e3, keep=False)).notes == [note]
    assert not prove_pair(plain, plain).notes


class Scaled(torch.optim.Adam):
    """Adam whose change of a parameter is multiplied by `scale`."""

    scale: float | torch.Tensor = 1.0

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        old = [p.detach().clone() for p in parameters]
        super().step(closure)
        with torch.no_grad():
            for p, value in zip(parameters, old, strict=True):
                p.copy_(value + self.scale * (p - value))


def first_update(scale: float | torch.Tensor = 1.0, clip=None) -> Update:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = Scaled(model.parameters(), lr=0.1)
    optimizer.scale = scale
    with leanstep.update() as u:
        model(torch.randn(5, 3)).square().sum().backward()
        if clip:
            clip(model.parameters())
        optimizer.step()
    return u.updates[0]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            {"clip": lambda p: nn.utils.clip_grad_norm_(p, 0.1)},
            {"clip": lambda p: nn.utils.clip_grad_norm_(p, 0.05)},
            "clipped in another way: 0.5 times as large",
        ),
        (
            {"clip": lambda p: nn.utils.clip_grad_norm_(p, 0.1)},
            {"clip": lambda p: nn.utils.clip_grad_value_(p, 0.1)},
            "clipped in another way: not by one factor for all parameters",
        ),
        ({}, {"scale": 2.0}, "an update 2 times as large: the learning rate or its schedule"),
        # The first averages are 0.1 of the gradient and 0.001 of its square.
        ({}, {"scale": 0.1 / 0.001**0.5}, "the script after does not correct the bias of Adam's averages"),
        ({"scale": 0.1}, {}, "the script before does not correct the bias of Adam's averages"),
        ({}, {"scale": torch.tensor([1.0, 2.0, 3.0])}, "a different update: the optimizer, its"),
    ],
    ids=["threshold", "by value", "factor", "bias after", "bias before", "no factor"],
)
def test_another_optimizer_of_the_same_gradients_is_named(before: dict, after: dict, words: str):
    mine, theirs = first_update(**before), first_update(**after)
    assert words in of_the_optimizer(mine, theirs, ["weight"], 1)
