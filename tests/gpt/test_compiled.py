"""The compiled forward: one graph, none more when a schedule's number changes, and the same results."""

from __future__ import annotations

import pytest
import torch
from gpt.golden import scramble
from gpt.test_model import TINY, batch, results

from leanstep.case import get_case
from leanstep.cpu import find_compiler
from leanstep.gpt import GPT, GPTConfig, cases, model
from leanstep.gpt.attention import PackedPlan, PlanCache, make_packed_plan
from leanstep.gpt.reference import dense_mask
from leanstep.measure.parity import prove_case

# Dynamo's own: it makes instances of autograd functions and looks for gradients of its inputs.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def flash_on_cpu(q, k, v, cu_q, cu_k, longest_q, longest_k, *, softmax_scale, causal, window_size):
    """What FlashAttention computes of packed documents, with a T x T mask; padding documents are empty."""
    assert cu_q is cu_k and causal and window_size[1] == 0 and longest_q == longest_k
    time = torch.arange(q.shape[0])
    document = torch.searchsorted(cu_q[1:], time, right=True)
    distance = time[:, None] - time
    mask = (distance >= 0) & (distance <= window_size[0]) & (document[:, None] == document)
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=softmax_scale)
    return out.transpose(0, 1), None


class PackedPlans(PlanCache):
    """FlashAttention's plans on a CPU."""

    def _flash(self, dtype, device):
        return flash_on_cpu


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that were captured; they run as they are."""
    captured = []

    def backend(graph, inputs):
        captured.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = model.compile_states(backend)
    monkeypatch.setattr(model, "_compiled_states", lambda: compiled)
    yield captured
    torch._dynamo.reset()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("plans", [PackedPlans, PlanCache], ids=["flash", "band"])
def test_a_schedule_makes_no_new_graphs(graphs, plans):
    config = GPTConfig.preset("tiny", **{**TINY, "windows": (3, 6)})
    compiled, plain = scramble(GPT(config, run="compiled")), GPT(config, run="plain")
    plain.load_state_dict(compiled.state_dict())
    compiled.plans = plans()
    # Documents longer than the windows, and shorter ones.
    for documents in ((0, 20, 21, 21, 60), tuple(range(0, 80, 6))):
        data = batch(config, documents=documents)
        ours, theirs = results(compiled, *data), results(plain, *data)
        for name, want in theirs.items():
            assert (ours[name] - want).abs().max() <= 1e-4 * want.abs().max() + 1e-6, name
        for each in (compiled, plain):
            # YaRN's numbers and the weights change in every stage and step.
            each.rotary.rescale(14, 21)
            with torch.no_grad():
                each.scalars.mul_(1.1)
    assert len(graphs) == 1
    # Inductor would sum the tables' gradients in any order.
    assert not [node for node in graphs[0].graph.nodes if "embedding" in str(node.target)]
    compiled.set_windows(3, 12)
    compiled.hidden(data[0], data[2])
    assert len(graphs) == 2


@pytest.mark.timeout(300)
def test_the_compiled_row_of_the_case_is_proven(monkeypatch):
    """All of torch.compile but the C++ compiler, which takes minutes: traced, differentiated, decomposed."""
    torch._dynamo.reset()
    states = torch.compile(GPT._states, backend="aot_eager_decomp_partition", fullgraph=True, dynamic=False)
    monkeypatch.setattr(model, "_compiled_states", lambda: states)
    monkeypatch.setattr(cases, "find_compiler", lambda: "not needed")
    rows = prove_case(get_case("gpt-step"), implementations=("compiled",), dtypes=(torch.float32,))
    torch._dynamo.reset()
    assert rows and not [row for row in rows if not row.ok]


@pytest.mark.skipif(find_compiler() is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.timeout(600)
def test_inductor_gives_the_same_results_on_a_cpu():
    one_layer = {"num_layers": 1, "long_window_layers": (0,), "key_offset_layers": (0,)}
    config = GPTConfig.preset("plain", **one_layer, attention_gate=True)
    compiled, plain = scramble(GPT(config, run="compiled")), GPT(config, run="plain")
    plain.load_state_dict(compiled.state_dict())
    inputs, targets, cu = batch(config)
    ours, theirs = (m(inputs, targets, cu) for m in (compiled, plain))
    assert torch.allclose(ours, theirs, rtol=1e-6)
    gradients = (
        torch.autograd.grad(loss, list(m.parameters()), allow_unused=True)
        for loss, m in ((ours, compiled), (theirs, plain))
    )
    for name, a, b in zip(dict(plain.named_parameters()), *gradients, strict=True):
        assert (a is None) == (b is None), name
        assert a is None or (a - b).abs().max() <= 1e-4 * b.abs().max() + 1e-6, name


def test_a_packed_plan_has_the_shape_of_its_tokens():
    def flash(*_, **__):
        raise NotImplementedError

    cpu = torch.device("cpu")
    plans = [make_packed_plan([0, *cuts, 4096], 64, 512, cpu, flash) for cuts in ([], [5], [7, 9, 4000])]
    assert {plan.cu_seqlens.shape for plan in plans} == {(128,)} and {p.longest for p in plans} == {512}
    assert all(plan.cu_seqlens[-1] == 4096 and plan.cu_seqlens.dtype == torch.int32 for plan in plans)
    crowded = make_packed_plan(list(range(201)), 64, None, cpu, flash)
    assert crowded.cu_seqlens.shape == (256,) and crowded.longest == 200
    assert isinstance(crowded, PackedPlan) and crowded.num_bytes == 1024


def test_packed_documents_are_those_of_the_mask():
    bounds, window = [0, 5, 5, 17, 40], 6
    q, k, v = torch.randn(3, 40, 2, 8).unbind(0)
    plan = make_packed_plan(bounds, window, None, torch.device("cpu"), flash_on_cpu)
    from leanstep.gpt.attention import windowed_attention

    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    mask = dense_mask(bounds, window)
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(windowed_attention(q, k, v, plan, 0.3), want.transpose(0, 1))


def test_models_of_one_process_may_have_more_graphs_than_one_run(graphs):
    config = GPTConfig.preset("plain", vocab_size=64)
    compiled = GPT(config, run="compiled")
    for length in range(16, 28):
        compiled(torch.arange(length), torch.arange(length), torch.tensor([0, length], dtype=torch.int32))
    assert len(graphs) == 12
