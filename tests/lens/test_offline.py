"""Cache, store, proxy and background computation equal the direct computation where documented."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace

import pytest
import torch

from leanstep.lens import (
    AsyncLens,
    ContextCache,
    LaggedPolicy,
    LensBatch,
    LensConfig,
    LensNet,
    ObjectiveConfig,
    ProxyLoss,
    ScoreStore,
    Variant,
    aggregate_targets,
    content_key,
    lens_loss,
    sample_variants,
)
from leanstep.lens.offline import tensors_in

from .test_closed_form import random_batch

CONFIG = LensConfig(block_size=4)


def variants_of(seed, tokens=64):
    g = torch.Generator().manual_seed(seed)
    drawn = sample_variants(tokens, 4, 2, 2, 52, g, recent_tokens=8)
    return [
        replace(v, loss=float(x)) for v, x in zip(drawn, torch.rand(len(drawn), generator=g), strict=True)
    ]


def test_cached_batch_gives_the_live_loss_bitwise(tmp_path):
    cache = ContextCache()
    samples = [variants_of(i) for i in range(5)]
    for i, variants in enumerate(samples):
        cache.append(100 + i, variants, 64, extra=torch.arange(64) + i)
    cache.save(tmp_path / "contexts.pt")
    loaded = ContextCache.load(tmp_path / "contexts.pt")
    live = LensBatch.from_variants(samples, CONFIG, num_tokens=64, loss_dtype=torch.float32)
    again = loaded.batch(range(5), CONFIG)
    assert again.sequence_ids == [100, 101, 102, 103, 104] and again.extras[2].equal(torch.arange(64) + 2)
    x = torch.randn(live.pos.shape).tanh()
    assert lens_loss(x, live, CONFIG).loss.equal(lens_loss(x, again.batch, CONFIG).loss)
    epochs = [
        [i for b in loaded.batches(2, CONFIG, seed=1, epoch=e) for i in b.sequence_ids] for e in (0, 0, 1)
    ]
    assert epochs[0] == epochs[1] != epochs[2] and sorted(epochs[2]) == [100, 101, 102, 103, 104]
    torch.save({"format": "other"}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="not a context cache"):
        ContextCache.load(tmp_path / "other.pt")


def test_missing_losses_survive_the_cache():
    cache = ContextCache()
    cache.append(0, [Variant([0, 1], [0, 0], None, True), Variant([0], [1], 1.0)], 4)
    assert cache.batch([0], CONFIG).batch.loss.isnan().tolist() == [[True, False]]


def test_score_store_is_keyed_by_content_and_bounded():
    batch = random_batch(seed=2)
    x = torch.randn(batch.pos.shape).tanh()
    keys = [content_key(v, batch.pos[v], batch.lod[v]) for v in range(batch.num_contexts)]
    assert len(set(keys)) == batch.num_contexts
    store = ScoreStore(capacity=batch.num_contexts - 1)
    store.put(keys, x, batch)
    assert len(store) == batch.num_contexts - 1
    scores, valid = store.get(keys, batch)
    assert valid.tolist() == [False] + [True] * (batch.num_contexts - 1)
    assert scores[1:].equal(torch.where(batch.valid, x, 0)[1:])
    config = LensConfig(block_size=4, objective=ObjectiveConfig(kl_weight=1.0))
    result = lens_loss(x, batch, config, prev_scores=scores, prev_valid=valid)
    assert result.terms["kl"].abs().max().item() == 0


def test_lagged_policy_follows_the_controller():
    net = LensNet(3, 8, max_lod=2, block_size=4)
    policy = LaggedPolicy(net, decay=0.5)
    before = net.head.weight.detach().clone()
    with torch.no_grad():
        net.head.weight += 1
    policy.update(net)
    torch.testing.assert_close(policy.model.head.weight, before + 0.5)
    assert not any(p.requires_grad for p in policy.model.parameters())


def test_proxy_losses_by_hand():
    # One sample, two contexts: the gist context is better, so block 0 of the raw one should collapse.
    samples = [[Variant([0, 1, 2], [0, 0, 0], 2.0, True), Variant([0, 2], [1, 0], 1.0)]]
    config = LensConfig(block_size=2)
    batch = LensBatch.from_variants(samples, config, num_tokens=3)
    t = torch.tanh(torch.tensor(1.0)).item()
    target, masked = aggregate_targets(batch, config)
    torch.testing.assert_close(target, torch.tensor([[-t, -t, 0.0], [0.0, 0.0, 0.0]]))
    assert masked.tolist() == [[True, True, False], [False, False, False]]
    x = torch.tensor([[0.5, -0.2, 9.0], [9.0, 9.0, 9.0]], requires_grad=True)
    l2 = ProxyLoss(config, "l2")(x, batch)
    assert l2.item() == pytest.approx(((0.5 + t) ** 2 + (-0.2 + t) ** 2) / 2, rel=1e-6)
    l2.backward()
    assert (
        x.grad[0, 2] == 0
        and (x.grad[1] == 0).all()
        and x.grad[0, 0].item() == pytest.approx(0.5 + t, rel=1e-6)
    )
    hinge = ProxyLoss(config, "hinge")(x, batch)
    assert hinge.item() == pytest.approx((t + 0.5 + t - 0.2) / 2, rel=1e-6)
    teacher = torch.zeros_like(x).requires_grad_()
    distill = ProxyLoss(config, "distill")(x, batch, teacher=teacher)
    first, second = (0.25 + 0.04 + 81) / 3, 81.0
    assert distill.item() == pytest.approx((first + second) / 2, rel=1e-6)
    few = ProxyLoss(config, "l2", entries_per_context=1)
    g = torch.Generator().manual_seed(0)
    seen = {round(few(x, batch, generator=g).item(), 4) for _ in range(20)}
    assert seen == {round((0.5 + t) ** 2, 4), round((-0.2 + t) ** 2, 4)}
    with pytest.raises(ValueError, match="teacher"):
        ProxyLoss(config, "distill")(x, batch)


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
        with AsyncLens(net, CONFIG, max_staleness=0) as worker:
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


def test_late_results_are_waited_for_or_dropped():
    batch, net, inputs = controller_and_inputs()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    gate = threading.Event()

    def slow(scores, batch):
        assert gate.wait(10)
        return scores.square().mean()

    with AsyncLens(net, loss=slow, max_staleness=1, on_stale="drop") as worker:
        worker.submit(batch, inputs)
        assert worker.apply_ready(optimizer) == 0 and worker.dropped == 0
        assert worker.apply_ready(optimizer) == 0 and worker.dropped == 1
        gate.set()
        assert all(p.grad is None for p in net.parameters())
    with AsyncLens(net, loss=slow, max_staleness=1) as worker:
        handle = worker.submit(batch, inputs)
        handle.future.result(timeout=10)
        before = [p.detach().clone() for p in net.parameters()]
        with torch.no_grad():
            net.head.weight += 1
        assert worker.apply_ready(optimizer) == 1 and worker.applied == 1
        # Gradients of the snapshot, not of the parameters as they are now.
        expected = torch.func.functional_call(
            net,
            dict(zip(dict(net.named_parameters()), (p.requires_grad_() for p in before), strict=True)),
            inputs,
        )
        grads = torch.autograd.grad(expected.square().mean(), before, allow_unused=True)
        for p, g in zip(net.parameters(), grads, strict=True):
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
    assert batch.gists is not None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with AsyncLens(net, loss=lambda scores, batch: scores.square().mean(), max_staleness=0) as worker:
        worker._stream, worker._worker_device, worker._device = (
            Stream("side"),
            torch.device("cpu"),
            torch.device("cpu"),
        )
        nested = {"batch": [batch]}
        assert {t.data_ptr() for t in tensors_in(nested)} == {t.data_ptr() for t in tensors_in(batch)}
        handle = worker.submit(batch, inputs)
        loss, grads, finished = handle.future.result()
        for name in ("pos", "lod", "valid", "loss", "row", "tokens", "baseline"):
            assert getattr(batch, name).data_ptr() in recorded["side"], name
        assert {batch.gists.rows.data_ptr(), batch.gists.key.data_ptr()} <= recorded["side"]
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
    with AsyncLens(net, loss=lambda scores, batch: scores.square().mean(), max_staleness=0) as worker:
        monkeypatch.setattr(worker, "_run", lambda *_: None)
        worker._device = torch.device("cuda:1")
        worker.submit(batch, inputs)
    assert streams == ["stream of cuda:1"]


def test_worker_errors_and_mixed_optimizers_are_raised():
    batch, net, inputs = controller_and_inputs()

    def broken(scores, batch):
        raise FloatingPointError("no loss today")

    with AsyncLens(net, loss=broken, max_staleness=0) as worker:
        worker.submit(batch, inputs)
        with pytest.raises(FloatingPointError, match="no loss today"):
            worker.apply_ready(torch.optim.SGD(net.parameters(), lr=0.1))
        other = torch.nn.Linear(1, 1)
        with pytest.raises(ValueError, match="mixes"):
            worker.apply_ready(torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1))
        with pytest.raises(ValueError, match="got 0 of them"):
            worker.apply_ready(torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(batch, inputs)


def test_lensnet_scores_are_bounded_and_ignore_padding():
    batch, net, inputs = controller_and_inputs()
    scores = net(*inputs)
    assert scores.abs().max() <= 1 and (scores[~batch.valid] == 0).all()
    poisoned = inputs[0].clone()
    poisoned[~batch.valid] = 1e4
    torch.testing.assert_close(net(poisoned, *inputs[1:]), scores)
    with pytest.raises(ValueError, match="embeddings: expected shape"):
        net(inputs[0][:, :-1], *inputs[1:])
