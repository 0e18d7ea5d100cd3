"""The recorder: storages, lines, values read once, and a list that Python's collector does not walk."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from leanstep.diagnose.watch import Watch, record
from leanstep.tape import events
from leanstep.tape.events import Event, TensorInfo

SCRIPT = """\
import torch
model = torch.nn.Linear(8, 32)
idle = torch.nn.Linear(8, 4)
frozen = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([*model.parameters(), *idle.parameters(), frozen], lr=0.1)
x = torch.randn(6, 8)
for _ in range(4):
    optimizer.zero_grad()
    hidden = model(x)
    loss = hidden[:2].square().mean() + 0 * idle(x).sum()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def tape(tmp_path_factory) -> events.Tape:
    path = tmp_path_factory.mktemp("recorder") / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return record(str(path), steps=2, warmup=1)


def step(tape: events.Tape, number: int = -1) -> list[Event]:
    span = tape.steps[number]
    return tape.between(span.first, span.last)


def test_steps_are_the_recorded_ones_and_follow_each_other(tape) -> None:
    first, second = tape.steps
    assert 0 < first.first < first.last == second.first < second.last == tape.count
    assert len(step(tape, 0)) == len(step(tape, 1))


def test_a_backward_op_has_the_line_of_its_forward_and_its_node(tape) -> None:
    products = [e for e in step(tape) if e.name in ("addmm", "mm") and 32 in e.results[0].shape]
    assert [(e.site.line.number, e.phase, e.direct) for e in products] == [
        (9, events.FORWARD, True),
        (9, events.BACKWARD, False),
    ]
    assert products[0].node == products[1].node > 0
    # Four of six rows of the output are not read; the values were counted once, at the end of the step.
    assert products[1].value == (6, 4)


def test_views_share_a_storage_and_later_tensors_do_not(tape) -> None:
    one, other = ([e for e in step(tape, n) if e.name == "addmm"] for n in (0, 1))
    assert one[0].args[1].storage == other[0].args[1].storage  # x
    assert one[0].results[0].storage != other[0].results[0].storage
    numbers = {t.storage for e in step(tape) for t in (*e.tensors, *e.results)}
    assert 0 not in numbers and numbers <= tape.freed.keys() | tape.alive
    squares = [e for e in step(tape, 0) if e.name == "pow" and e.direct]
    freed = tape.freed[squares[0].results[0].storage]
    assert tape.steps[0].first < freed <= tape.steps[1].last


def test_an_update_says_which_gradients_are_none_zero_or_live(tape) -> None:
    (begin,) = [e for e in step(tape) if e.kind == events.UPDATE]
    gradients = [held.gradient for held in begin.args]
    assert gradients == ["live", "live", "zero", "zero", "none"]
    assert begin.site.line.number == 12
    (end,) = [e for e in step(tape) if e.kind == events.UPDATED]
    assert [held.gradient for held in end.args] == gradients[:4]
    assert {held.storage for held in begin.args} <= tape.held


def test_the_leaf_of_a_gradient_is_known(tape) -> None:
    (begin,) = [e for e in step(tape) if e.kind == events.UPDATE]
    assert {e.leaf for e in step(tape) if e.leaf} == {held.storage for held in begin.args[:4]}


def test_the_recording_costs_the_collector_nothing() -> None:
    """A list of thousands of events with their tensors would be walked again and again."""
    weight = torch.ones(4, 4, requires_grad=True)
    with Watch(steps=1, warmup=0) as watch:
        for _ in range(20):
            torch.cat([weight, weight]).sum().backward(retain_graph=True)
        # A collection stops walking tuples whose parts it walks no more.
        for _ in range(5):
            gc.collect()
        rows = watch.tape.events
        assert len(rows) > 100 and not any(gc.is_tracked(row) for row in rows)
        watch.step()


def test_what_is_recomputed_and_what_a_backward_by_hand_does_is_told_apart() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    weight = torch.ones(4, 4, requires_grad=True)
    with Watch(steps=1, warmup=0) as watch:
        out = checkpoint(lambda w: w.exp().tanh(), weight, use_reentrant=False)
        Double.apply(out).sum().backward()
        watch.step()
    (span,) = watch.tape.steps
    found = [(e.name, e.phase, e.direct) for e in watch.tape.between(span.first, span.last)]
    assert ("exp", events.FORWARD, True) in found and ("exp", events.RECOMPUTE, True) in found
    assert ("mul", events.BACKWARD, True) in found
    assert ("tanh_backward", events.BACKWARD, False) in found


def test_a_value_is_read_after_the_step_not_in_it(monkeypatch) -> None:
    """The recorder must not wait for a device while the step runs."""
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.shape) or tolist(self))
    model = torch.nn.Linear(4, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(steps=2, warmup=0, timed=False) as watch:
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        assert reads in ([], [torch.Size([3])])
        done = len(reads)
        watch.step()
        assert len(reads) - done <= 1
        model(torch.randn(3, 4)).sum().backward()
        assert len(reads) <= 1


def test_a_tape_written_by_hand_reads_the_same() -> None:
    tape = events.Tape()
    info = TensorInfo(1, 0, 0, 0, events.Layout((2,), (1,), torch.float32, "cpu", 8))
    tape.events += [Event(events.OP, "mul", args=(info, (info, 2.0))), Event(events.OP, "add")]
    assert [e.name for e in tape.between(0, 2)] == ["mul", "add"]
    assert tape.between(0, 1)[0].tensors == [info, info]
    tape.freed = {1: 0, 2: 1}
    tape.drop_before(1)
    assert (tape.count, tape.freed) == (2, {2: 1})
    assert [e.name for e in tape.between(0, 2)] == ["add"]
