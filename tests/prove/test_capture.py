"""Capturing an update for different kinds of training loops; what a sketch preserves."""

from __future__ import annotations

import contextlib
import gc
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import leanstep
from leanstep.prove.capture import Recorder
from leanstep.prove.sketches import BUCKETS, SOLID, distance, sketch
from leanstep.tape import run


def model_of(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Embedding(20, width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def test_accumulation_clipping_names_and_losses():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.arange(12).view(3, 4)
    with leanstep.update(full=True) as u:
        losses = [model(part).square().mean() for part in tokens]
        for loss in losses:
            loss.backward()
        unclipped = {name: p.grad.clone() for name, p in model.named_parameters()}
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    assert u.losses == [loss.item() for loss in losses] and u.backward_calls == 3
    assert u.tokens == 12 and u.ids[5] == 1 and u.first_input == (4, 6.0)
    assert len(u.updates) == 1 and set(u.gradients) == set(unclipped)
    norm = sum(s.norm**2 for s in u.clipped.values()) ** 0.5
    assert norm == pytest.approx(1e-3, rel=1e-3)
    for name, p in model.named_parameters():
        assert torch.equal(u.gradients[name].full, unclipped[name])
        torch.testing.assert_close(u.changes[name].full, p.detach() - before[name])
        assert u.clipped[name].norm < u.gradients[name].norm


def test_each_optimizer_of_an_update_may_clip():
    first, last = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (first, last)]
    with leanstep.update() as u:
        last(first(torch.ones(2, 4))).sum().backward()
        for layer, optimizer in zip((first, last), optimizers, strict=True):
            nn.utils.clip_grad_norm_(layer.parameters(), 1e-3)
            optimizer.step()
    assert len(u.clipped) == 4 and all(u.clipped[name].norm < u.gradients[name].norm for name in u.clipped)


def test_clipping_that_no_backward_precedes_is_not_of_the_update():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with leanstep.update() as u:
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            model(torch.arange(4)).square().mean().backward()
            optimizer.step()
            norms = {n: p.grad.norm().item() for n, p in model.named_parameters() if p.grad is not None}
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert u.clips_late and not any(update.clipped for update in u.updates)
    assert {name: s.norm for name, s in u.gradients.items()} == pytest.approx(norms)


def test_several_optimizers_are_one_update_and_order_is_the_forwards():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(4, 1), nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.first(x))

    recorder = Recorder()
    with recorder as captured:
        model = Late()
        optimizers = [
            torch.optim.Adam(model.first.parameters()),
            torch.optim.SGD(model.last.parameters(), lr=0.1),
        ]
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert [len(update.gradients) for update in captured.updates] == [4, 4]
    assert [update.optimizer_steps for update in captured.updates] == [2, 2]
    assert captured.order[0].startswith("first.") and captured.order[-1].startswith("last.")


def test_wrappers_leave_names_alone_and_nameless_parameters_have_numbers():
    free = nn.Parameter(torch.ones(2))
    wrapped = nn.Module()
    wrapped.module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*wrapped.parameters(), free], lr=0.1)
    with leanstep.update() as u:
        (wrapped.module(free[None])).sum().backward()
        optimizer.step()
    assert list(u.gradients) == ["weight", "bias", "parameter 2 [2]"]


def test_the_program_computes_the_same_bits_while_watched():
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            nn.functional.dropout(model(torch.arange(6) + step), 0.3).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    plain = train()
    with leanstep.update(full=True, parts=True):
        watched = train()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_a_block_without_an_optimizer_step_raises():
    with leanstep.update() as u:
        model_of()(torch.arange(3)).sum().backward()
    with pytest.raises(ValueError, match="no optimizer stepped inside the block"):
        _ = u.gradients


@given(st.integers(1, 3 * BUCKETS), st.floats(1e-9, 1.0))
def test_a_sketch_knows_norms_sums_and_distances(count: int, size: float):
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, generator=generator)
    y = x.double() + size * torch.randn(count, generator=generator).double()
    a, b = sketch(x), sketch(y)
    assert a.norm == pytest.approx(float(x.double().norm())) and a.total == pytest.approx(
        float(x.double().sum()), abs=1e-9 * count
    )
    exact = float((y - x.double()).norm())
    assert distance(b, a) == pytest.approx(exact, rel=1e-6 if count <= BUCKETS else 0.35)
    assert torch.allclose(sketch(y - x.double()).projection, b.projection - a.projection, atol=1e-9)


def test_a_sketch_counts_what_is_not_finite():
    x = torch.tensor([1.0, float("nan"), float("inf")])
    assert sketch(x).not_finite == 2 and sketch(x).norm == 1.0
    assert distance(sketch(x), sketch(torch.ones(3))) == float("inf")


def test_full_capture_holds_two_copies_of_the_gradients_at_most():
    model = nn.Linear(1000, 1000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(full=True) as captured:
        for _ in range(3):
            model(torch.ones(1, 1000)).sum().backward()
            optimizer.step()
    tensors = [
        s.full
        for update in captured.updates
        for kind in (update.gradients, update.clipped, update.changes)
        for s in kind.values()
    ]
    assert sum(t.numel() for t in tensors if t is not None) == 2 * model.weight.numel()
    assert captured.gradients["weight"].full is not None


@pytest.mark.parametrize("how", ["positional", "named"])
def test_gradients_that_arrive_inside_the_step_are_captured(how: str):
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.arange(6)).square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)
        return [p.detach() for p in model.parameters()]

    plain = train()
    with leanstep.update() as u:
        watched = train()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert [update.backward_calls for update in u.updates] == [1, 1]
    assert u.gradients.keys() == u.changes.keys() and len(u.changes) == len(plain)
    assert all(change.norm > 0 for change in u.changes.values())


def test_weights_of_a_change_are_those_of_the_definition():
    gradient, value = torch.randn(5000), torch.randn(5000)
    expected = value.double() * (gradient.double() ** 2 / (gradient.double() ** 2 + (SOLID * 0.7) ** 2))
    weighted = sketch(value, gradient, 0.7)
    assert weighted.norm == pytest.approx(float(expected.norm()), rel=1e-6)
    assert torch.allclose(weighted.projection, sketch(expected).projection, atol=1e-5)


def test_compiled_code_draws_the_random_numbers_of_eager_code(tmp_path):
    import torch._inductor.config as config

    from leanstep.prove.script_jobs import Job, capture_script

    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nimport torch._inductor.config as config\n"
        "w = torch.nn.Parameter(torch.ones(4))\noptimizer = torch.optim.SGD([w], lr=0.1)\n"
        "torch.compile(torch.relu, backend='eager')\nassert config.fallback_random\n"
        "torch.compile(torch.relu, backend='eager')\n"
        "w.sum().backward()\noptimizer.step()\n"
    )
    compile_, drawn = torch.compile, config.fallback_random
    captured = capture_script(Job(str(script), steps=1))
    assert captured.error is None and len(captured.updates) == 1
    assert torch.compile is compile_ and config.fallback_random == drawn is False


LEAVES = """import sys, weakref
class Model: pass
model = Model()
sys.left = weakref.ref(model)
ENDS
"""


@pytest.mark.parametrize("ends", ["", "sys.exit(3)", "raise ValueError"])
@pytest.mark.parametrize(("world_size", "is_kept"), [("1", False), ("2", True)])
def test_what_a_rank_leaves_behind_outlives_its_script(tmp_path, monkeypatch, ends, world_size, is_kept):
    """Destroying a process group may wait for a thread that waits for the interpreter."""
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setattr(run, "_LEFT", [])
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES.replace("ENDS", ends))
    outcome = run.run_script(run.Program(str(script)), [], contextlib.nullcontext())
    gc.collect()
    left = sys.__dict__.pop("left")
    assert (left() is not None) == is_kept
    assert outcome.code == {"": 0, "sys.exit(3)": 3}.get(ends, 1)
