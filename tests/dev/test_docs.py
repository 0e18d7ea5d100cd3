"""The code of README and docs runs as it is written, and means what plain torch means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from docstring_code import python_blocks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, log_softmax, logsigmoid

import leanstep
from leanstep.heads.losses import row_divergence as divergence

ROOT = Path(__file__).parent.parent.parent
SEQUENCES, LENGTH, WIDTH, VOCAB = 4, 6, 8, 37


def run(page: str, names: str, space: dict[str, Any]) -> dict[str, Any]:
    """Run the one block of a page that has `names` in it, in `space`."""
    (found,) = [block for block in python_blocks(ROOT / page) if names in block]
    exec(compile(found, page, "exec"), space)
    return space


@pytest.fixture
def world() -> dict[str, Any]:
    """Names that the blocks take from the reader's own script."""
    draw = torch.Generator().manual_seed(5)

    def head(width: int) -> nn.Linear:
        made = nn.Linear(width, VOCAB, bias=False)
        made.weight.data.copy_(torch.randn(VOCAB, width, generator=draw))
        return made

    def hidden(width: int) -> Tensor:
        return torch.randn(SEQUENCES, LENGTH, width, generator=draw)

    labels = torch.randint(VOCAB, (SEQUENCES, LENGTH), generator=draw)
    labels[:, :2] = -100
    labels[1, 4:] = -100
    return {
        "torch": torch,
        "hidden": hidden(WIDTH).requires_grad_(),
        "lm_head": head(WIDTH),
        "labels": labels,
        "student_hidden": hidden(WIDTH).requires_grad_(),
        "teacher_hidden": hidden(12),
        "teacher_head": head(12),
        "completion_mask": (labels != -100).long(),
        "reference_hidden": hidden(WIDTH),
        "reference_head": head(WIDTH),
    }


def assert_gradients(space: dict[str, Any], leaf: Tensor, loss: Tensor) -> None:
    """The block called backward: its gradients are those of the plain loss."""
    weight = space["lm_head"].weight
    found = leaf.grad, weight.grad
    for ours, plain in zip(found, torch.autograd.grad(loss, (leaf, weight)), strict=True):
        torch.testing.assert_close(ours, plain)


def test_supervised_training(world):
    space = run("docs/heads.md", "import linear_cross_entropy", world)
    logits = linear(world["hidden"], world["lm_head"].weight)[:, :-1]
    plain = cross_entropy(logits.flatten(0, 1), world["labels"][:, 1:].flatten())
    torch.testing.assert_close(space["loss"], plain)


def test_distillation(world):
    space = run("docs/heads.md", "linear_distill_loss", world)
    rows = world["completion_mask"].flatten().bool()
    log_p, log_q = (
        log_softmax(linear(world[hidden].flatten(0, 1)[rows], world[head].weight), -1)
        for hidden, head in (("student_hidden", "lm_head"), ("teacher_hidden", "teacher_head"))
    )
    plain = divergence(log_p, log_q, ("jsd", 0.5)).mean()
    torch.testing.assert_close(space["out"].loss, plain)
    assert_gradients(space, world["student_hidden"], plain)


def test_preferences(world):
    space = run("docs/heads.md", "linear_preference_loss", world)

    def sums(hidden: Tensor, weight: Tensor) -> Tensor:
        labels = world["labels"][:, 1:]
        log_p = log_softmax(linear(hidden[:, :-1], weight), -1)
        picked = log_p.gather(2, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return torch.where(labels != -100, picked, 0.0).sum(1)

    policy = sums(world["hidden"], world["lm_head"].weight)
    reference = sums(world["reference_hidden"], world["reference_head"].weight).detach()
    chosen, rejected = (policy - reference).chunk(2)
    plain = -logsigmoid(0.1 * (chosen - rejected)).mean()
    torch.testing.assert_close(space["out"].loss, plain)
    assert_gradients(space, world["hidden"], plain)
    assert "rewards/margins" in space["out"].metrics


def test_replayed_masks(world):
    world["hidden"] = world["hidden"].detach()[0, :3].requires_grad_()
    space = run("docs/heads.md", "allowed=kept", world)
    logits = linear(world["hidden"], world["lm_head"].weight)
    sets = [[1, 2, 3], [4], [7, 9]]
    plain = [log_softmax(logits[row, ids], 0) for row, ids in enumerate(sets)]
    plain = [log_p[place] for log_p, place in zip(plain, (1, 0, 0), strict=True)]
    torch.testing.assert_close(space["out"].logp, torch.stack(plain))
    log_p = log_softmax(logits, -1)
    torch.testing.assert_close(space["out"].entropy, -(log_p.exp() * log_p).sum(-1))


@pytest.fixture
def responses(world) -> dict[str, Any]:
    """Two packed samples, 6 and 9 tokens of which 4 and 3 are responses."""
    draw = torch.Generator().manual_seed(6)
    num_rows, num_tokens = 4 + 3, 6 + 9
    values = {name: torch.randn(num_rows, generator=draw) for name in ("old_logp", "ref_logp", "advantages")}
    return {
        **{**world, **values},
        "hidden": torch.randn(num_tokens, WIDTH, generator=draw).requires_grad_(),
        "tokens": torch.randint(VOCAB, (num_tokens,), generator=draw),
        "total_lengths": [6, 9],
        "response_lengths": [4, 3],
        "mask": torch.ones(num_rows, dtype=torch.bool),
        "cp_group": None,
    }


def test_log_probs_of_responses(responses):
    space = run("docs/heads.md", "return_parts", responses)
    assert [len(part) for part in space["logp"]] == [4, 3]
    torch.testing.assert_close(torch.cat(list(space["logp"])), space["out"].logp)
    space["targets"] = space["plan"].targets(space["tokens"])
    space = run("docs/heads.md", "linear_policy_loss", space)
    assert space["result"].loss.isfinite() and responses["hidden"].grad.isfinite().all()
    space = run("docs/heads.md", "import rowwise", space)
    log_p = log_softmax(linear(responses["hidden"], responses["lm_head"].weight)[space["plan"].rows], -1)
    picked = log_p.gather(1, space["targets"][:, None])[:, 0]
    torch.testing.assert_close(space["loss"], (-((1 - picked.exp()) ** 2) * picked).mean())


def test_before_and_after(responses):
    """The two blocks before and after in docs/heads.md: the same loss, the same gradients."""
    space = {**responses, "temperature": 0.7, "advantages": torch.randn(15)}
    masks = [torch.tensor([1, 0, 1, 1]), torch.tensor([1, 1, 0])]
    chosen = [torch.tensor([2, 3, 4, 5]), torch.tensor([6, 7, 8]) + 6]
    space["masks"] = masks
    space["targets"] = torch.roll(space["tokens"], -1)
    space["mask"] = torch.zeros(15, dtype=torch.bool)
    for rows, mask in zip(chosen, masks, strict=True):
        space["mask"][rows[mask.bool()] - 1] = True
    leaves = space["hidden"], space["lm_head"].weight
    before = run("docs/heads.md", "# before: all positions", space)["loss"]
    after = run("docs/heads.md", "# after: same loss", space)["loss"]
    torch.testing.assert_close(after, before)
    for ours, plain in zip(*(torch.autograd.grad(x, leaves) for x in (after, before)), strict=True):
        torch.testing.assert_close(ours, plain)


def test_optimizer(capsys):
    space: dict[str, Any] = {"model": nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.Linear(8, 4))}
    run("docs/muon.md", "from leanstep.muon import NorMuon", space)
    space["multiplier"] = 0.5
    rates = [group["lr"] for group in space["optimizer"].param_groups]
    run("docs/muon.md", 'group["lr"] = lr * multiplier', space)
    assert [group["lr"] for group in space["optimizer"].param_groups] == [0.5 * rate for rate in rates]
    assert "1.weight" in capsys.readouterr().out


def test_watching_a_loop(capsys):
    model = nn.Linear(8, 8)
    loader = [torch.randn(4, 8) for _ in range(3)]
    run(
        "docs/diagnose.md",
        "diagnose.watch()",
        {"loader": loader, "train_step": lambda x: model(x).sum().backward()},
    )
    assert capsys.readouterr().out


def test_an_update_is_read():
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"qkv": nn.Linear(4, 4)})])})
    loss = model["blocks"][0]["qkv"](torch.randn(3, 4)).square().sum()
    space = {"torch": torch, "leanstep": leanstep, "model": model, "loss": loss}
    space["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    update = run("docs/prove.md", "leanstep.update()", space)["u"]
    assert update.gradients["blocks.0.qkv.weight"].norm > 0
