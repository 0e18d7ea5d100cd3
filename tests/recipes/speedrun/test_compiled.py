"""The compiled forward: one graph for each stage, not for each batch, and the same results."""

from __future__ import annotations

import pytest
import torch
from speedrun.golden import batch, loss, make, scramble

from recipes.speedrun import train
from recipes.speedrun.train import GPT

# Dynamo's own: it makes instances of autograd functions and looks for gradients of its inputs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def flash_on_cpu(q, k, v, cu, longest, scale, window):
    """What FlashAttention computes of packed documents, with a T x T mask; padding documents are empty."""
    time = torch.arange(q.shape[0])
    document = torch.searchsorted(cu[1:], time, right=True)
    distance = time[:, None] - time
    mask = (distance >= 0) & (distance <= window) & (document[:, None] == document)
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=scale)
    return out.transpose(0, 1)


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that were captured; they run as they are."""
    captured = []

    def backend(graph, inputs):
        captured.append(graph)
        return graph.forward

    torch._dynamo.reset()
    states = torch.compile(GPT.states, backend=backend, fullgraph=True, dynamic=False)
    monkeypatch.setattr(train, "compiled", lambda function: states)
    yield captured
    torch._dynamo.reset()


@pytest.mark.timeout(300)
def test_a_stage_has_one_graph(graphs, monkeypatch):
    compiled, plain = (scramble(make(GPT, compile=way)) for way in ("true", "false"))
    for model in (compiled, plain):
        # The route of a GPU: FlashAttention reads the documents.
        monkeypatch.setattr(
            model, "documents", lambda cu, longest: train.Documents(cu, longest, flash=flash_on_cpu)
        )
    for documents in ((0, 20, 21, 21), (0, 6, 30, 77)):
        tokens, targets, cu = batch(documents=documents)
        losses = [loss(model, tokens, targets, cu) for model in (compiled, plain)]
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
        for total in losses:
            total.backward()
        for p, q in zip(compiled.parameters(), plain.parameters(), strict=True):
            assert (p.grad - q.grad).abs().max() <= 1e-4 * q.grad.abs().max() + 1e-6
        with torch.no_grad():
            for model in (compiled, plain):
                model.scalars.mul_(1.1)  # weights change in every step
    assert len(graphs) == 1
    for model in (compiled, plain):
        model.set_windows(3, 12)  # and YaRN's angles and scale with them
    assert loss(compiled, tokens, targets, cu).item() == pytest.approx(
        loss(plain, tokens, targets, cu).item(), rel=1e-5
    )
    assert len(graphs) == 2
