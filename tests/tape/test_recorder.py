"""The recorder waits for no value, and Python's collector does not walk its list of events."""

from __future__ import annotations

import gc

import torch

from leanstep.diagnose.watch import Watch


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
