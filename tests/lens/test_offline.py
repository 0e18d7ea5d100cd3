"""Two-stage training: from cached contexts, then frozen during the main run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from leanstep.lens import ContextCache, LensBatch, LensConfig, LensObjective, Variant, lens_loss
from recipes.lens.contexts import LensNet, sample_variants

CONFIG = LensConfig(block_size=4)


def variants_of(seed, tokens=64):
    g = torch.Generator().manual_seed(seed)
    drawn = sample_variants(tokens, 4, 2, 2, 52, g, recent_tokens=8)
    return [
        replace(v, loss=float(x)) for v, x in zip(drawn, torch.rand(len(drawn), generator=g), strict=True)
    ]


def embeddings_of(variants, seed):
    g = torch.Generator().manual_seed(seed)
    return [{"embeddings": torch.randn(len(v.positions), 3, generator=g) + v.lods[:, None]} for v in variants]


def test_cached_batch_gives_the_live_loss_bitwise(tmp_path):
    cache = ContextCache()
    samples = [variants_of(i) for i in range(5)]
    for i, variants in enumerate(samples):
        cache.append(variants, 64, inputs=embeddings_of(variants, i))
    cache.save(tmp_path / "contexts.pt")
    loaded = ContextCache.load(tmp_path / "contexts.pt")
    live = LensBatch.from_variants(samples, CONFIG, num_tokens=64)
    again, inputs = loaded.batch(range(5), CONFIG)
    x = torch.randn(live.pos.shape).tanh()
    assert lens_loss(x, live, CONFIG).loss.equal(lens_loss(x, again, CONFIG).loss)
    flat = [row["embeddings"] for i, v in enumerate(samples) for row in embeddings_of(v, i)]
    assert inputs["embeddings"].shape == (*live.pos.shape, 3)
    assert all(got[: len(row)].equal(row) for got, row in zip(inputs["embeddings"], flat, strict=True))
    epochs = [
        torch.cat([b.loss[:, 0] for b, _ in loaded.batches(2, CONFIG, seed=1, epoch=e)]) for e in (0, 0, 1)
    ]
    assert epochs[0].equal(epochs[1]) and not epochs[0].equal(epochs[2])
    assert epochs[2].sort().values.equal(live.loss[:, 0].sort().values)
    torch.save({"format": "other"}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="not a context cache"):
        ContextCache.load(tmp_path / "other.pt")


def test_missing_losses_survive_the_cache_and_wrong_inputs_are_named():
    cache, variants = ContextCache(), [Variant([0, 1], [0, 0], None, True), Variant([0], [1], 1.0)]
    cache.append(variants, 4)
    assert cache.batch([0], CONFIG)[0].loss.isnan().tolist() == [[True, False]]
    cache.append(variants, 4, inputs=[{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([3.0])}])
    assert cache.batch([1], CONFIG)[1]["x"].tolist() == [[1.0, 2.0], [3.0, 0.0]]
    with pytest.raises(ValueError, match="inputs: expected one per variant, 2, got 1"):
        cache.append(variants, 4, inputs=[{"x": torch.ones(2)}])
    with pytest.raises(ValueError, match="inputs: expected 1 rows, got x"):
        cache.append(variants, 4, inputs=[{"x": torch.ones(2)}, {"x": torch.ones(2)}])


def test_trained_offline_then_frozen_during_the_main_run():
    cache = ContextCache()
    for i in range(6):
        cache.append(variants_of(i), 64, inputs=embeddings_of(variants_of(i), i))
    torch.manual_seed(0)
    net = LensNet(3, 8, max_lod=2, block_size=4)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)

    def loss_of(batch, inputs):
        scores = net(inputs["embeddings"], batch.pos, batch.lod, batch.valid, batch.num_tokens)
        return lens_loss(scores, batch, CONFIG).loss

    first = loss_of(*cache.batch(range(6), CONFIG)).item()
    for epoch in range(15):
        for batch, inputs in cache.batches(3, CONFIG, epoch=epoch):
            loss_of(batch, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert loss_of(*cache.batch(range(6), CONFIG)).item() < 0.8 * first

    weights = [p.detach().clone() for p in net.parameters()]
    objective = LensObjective(CONFIG)
    objective.set_stage("frozen", net)
    batch, inputs = cache.batch(range(6), CONFIG)
    arguments = (inputs["embeddings"], batch.pos, batch.lod, batch.valid, batch.num_tokens)
    result = objective(net, batch, inputs=arguments)
    base = torch.nn.Parameter(torch.ones(()))
    (base**2 + CONFIG.objective.lens_loss_weight * result.loss).backward()
    assert result.loss.item() == 0 and not result.active and result.scores.abs().max() > 0.1
    assert all(p.grad is None and p.equal(w) for p, w in zip(net.parameters(), weights, strict=True))
