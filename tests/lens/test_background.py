"""The controller's loss in the background: the synchronous result, late by a bounded number of steps."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from leanstep.lens import AsyncLens, LensConfig, lens_loss
from recipes.lens.contexts import LensNet

from .test_loss import random_batch

CONFIG = LensConfig(block_size=4)


def objective(scores, batch):
    return lens_loss(scores, batch, CONFIG).loss


def controller_and_inputs(seed=0):
    torch.manual_seed(seed)
    batch = random_batch(seed=5)
    net = LensNet(3, 8, max_lod=2, block_size=4)
    inputs = (torch.randn(*batch.pos.shape, 3), batch.pos, batch.lod, batch.valid, batch.num_tokens)
    return batch, net, inputs


def test_staleness_zero_equals_the_synchronous_run():
    weights = []
    for background in (False, True):
        batch, net, inputs = controller_and_inputs()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        with AsyncLens(net, objective, max_staleness=0) as worker:
            for _ in range(3):
                if background:
                    worker.submit(batch, inputs)
                    assert worker.apply_ready(optimizer) == 1
                else:
                    lens_loss(net(*inputs), batch, CONFIG).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
    assert weights[0].equal(weights[1])


def test_a_late_result_does_not_block_and_is_waited_for_when_it_is_stale():
    batch, net, inputs = controller_and_inputs()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    gate = threading.Event()

    def slow(scores, batch):
        assert gate.wait(30)
        return scores.square().mean()

    with AsyncLens(net, slow, max_staleness=2) as worker:
        future = worker.submit(batch, inputs)
        before = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
        for _ in range(2):  # the base model's steps go on
            assert worker.apply_ready(optimizer) == 0
        assert not future.done() and all(p.grad is None for p in net.parameters())
        with torch.no_grad():
            net.head.weight += 1
        timer = threading.Timer(0.05, gate.set)
        timer.start()
        assert worker.apply_ready(optimizer) == 1 and future.done()
        timer.join()
    # Gradients of the snapshot, not of the parameters as they are now.
    expected = torch.func.functional_call(net, before, inputs).square().mean()
    gradients = torch.autograd.grad(expected, list(before.values()), allow_unused=True)
    for p, g in zip(net.parameters(), gradients, strict=True):
        if g is not None:
            torch.testing.assert_close(p.grad, g)


def test_every_tensor_that_crosses_streams_is_recorded(monkeypatch):
    """On a GPU, tensors that the side stream reads and that the main stream uses are recorded on it."""
    recorded = {"side": set(), "main": set()}

    class Stream:
        def __init__(self, name):
            self.name, self.device, self.waited = name, torch.device("cuda:0"), []

        def wait_event(self, event):
            self.waited.append(event)

    class Event:
        def record(self, stream=None):
            pass

    main = Stream("main")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: recorded[stream.name].add(self.data_ptr())
    )
    # The tensors are on the CPU and only pretend to be on a GPU.
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    batch, net, inputs = controller_and_inputs()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with AsyncLens(net, lambda scores, batch: scores.square().mean(), max_staleness=0) as worker:
        worker._stream, worker._device, worker._home = (
            Stream("side"),
            torch.device("cpu"),
            torch.device("cpu"),
        )
        loss, grads, finished = worker.submit(batch, inputs).result()
        for name in ("pos", "lod", "valid", "loss", "row", "tokens", "baseline"):
            assert getattr(batch, name).data_ptr() in recorded["side"], name
        assert inputs[0].data_ptr() in recorded["side"] and not recorded["main"]
        assert worker.apply_ready(optimizer) == 1 and main.waited == [finished]
        assert recorded["main"] == {t.data_ptr() for t in (loss, *grads.values())} and len(grads) > 5


def test_the_snapshot_is_ready_on_the_controllers_device(monkeypatch):
    """The controller is on cuda:1 while cuda:0 is current: its copies are made on a stream of cuda:1."""
    streams = []

    class Event:
        def record(self, stream=None):
            streams.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device or 'cuda:0'}")
    batch, net, inputs = controller_and_inputs()
    with AsyncLens(net, lambda scores, batch: scores.square().mean(), max_staleness=0) as worker:
        monkeypatch.setattr(worker, "_run", lambda *_: None)
        worker._home = torch.device("cuda:1")
        worker.submit(batch, inputs)
    assert streams == ["stream of cuda:1"]


def test_worker_errors_and_mixed_optimizers_are_raised():
    batch, net, inputs = controller_and_inputs()

    def broken(scores, batch):
        raise FloatingPointError("no loss today")

    with AsyncLens(net, broken, max_staleness=0) as worker:
        worker.submit(batch, inputs)
        with pytest.raises(FloatingPointError, match="no loss today"):
            worker.apply_ready(torch.optim.SGD(net.parameters(), lr=0.1))
        other = torch.nn.Linear(1, 1)
        with pytest.raises(ValueError, match="mixes"):
            worker.apply_ready(torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1))
        with pytest.raises(ValueError, match="expected all 29 parameters of the controller, got 0"):
            worker.apply_ready(torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="after shutdown"):
        worker.submit(batch, inputs)
