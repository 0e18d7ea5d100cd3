"""Memory of captured graphs: what Inductor never materialises gets none, and what a kernel reads stays."""

import json

import pytest
import torch

from leanstep.rehearse.answers.compiled import _kept_in_registers, _last_uses
from leanstep.rehearse.events import Launch
from tests.rehearse.rehearsed import run_script

ROWS, WIDTH, VOCAB = 512, 64, 8192
HEAD = f"""
import json, sys, torch, torch._inductor.config
import torch.nn.functional as F
torch._inductor.config.optimize_scatter_upon_const_tensor = sys.argv[1] == "fused"
hidden = torch.randn({ROWS}, {WIDTH}, device="cuda", dtype=torch.bfloat16, requires_grad=True)
weight = torch.randn({VOCAB}, {WIDTH}, device="cuda", dtype=torch.bfloat16, requires_grad=True)
targets = torch.zeros({ROWS}, dtype=torch.int64, device="cuda")
(weight[:8] @ weight[:8].T).sum().backward()
weight.grad = None


@torch.compile
def loss_of(hidden, weight):
    logits = torch.tanh(hidden @ weight.T / 30) * 30
    return F.cross_entropy(logits.float(), targets)


torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
loss = loss_of(hidden, weight)
forward = torch.cuda.max_memory_allocated() - before
loss.backward()
print(json.dumps([forward, torch.cuda.max_memory_allocated() - before]))
"""


@pytest.mark.parametrize(
    ("scatter", "buffers"),
    [
        # The product's logits and their gradient.
        ("fused", 2),
        # As torch before 2.5: a scatter in fp32 besides, but not the zeros that it is written into.
        # Published for cut-cross-entropy's torch.compile head on torch 2.4.1: 4,000 and 16,000 MB.
        ("written", 4),
    ],
)
def test_the_backward_of_a_compiled_cross_entropy(tmp_path, scatter, buffers):
    script = tmp_path / "head.py"
    script.write_text(HEAD)
    forward, both = json.loads(run_script(script, scatter, capture=tmp_path).printed)
    logits = ROWS * VOCAB * 2
    assert logits <= forward < 1.02 * logits
    assert buffers * logits <= both < (buffers + 0.05) * logits


def test_backward_has_a_workspace_of_its_own(tmp_path):
    script = tmp_path / "products.py"
    script.write_text(
        "import torch\n"
        "x = torch.ones(64, 64, device='cuda', requires_grad=True)\n"
        "for _ in range(2):\n    (x @ x).sum().backward()\n"
    )
    recording = run_script(script, device="h100").recording
    assert [s.nbytes for s in recording.storages.values() if s.category == "library"] == 2 * [32 * 2**20]


COMPILED = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
called = model
if sys.argv[1] == "method":
    model.compile()
else:
    called = torch.compile(model)
    called.eval().scale = 5.0
    called.forward = lambda x, forward=called.forward: forward(x)
print(next(iter(called.state_dict())), called.training, len(called), getattr(model, "scale", None))
for _ in range(3):
    called(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("how", "compiled", "printed"),
    [
        ("method", True, "0.weight True 2 None"),
        ("method", False, "0.weight True 2 None"),
        ("function", False, "_orig_mod.0.weight False 2 5.0"),
    ],
)
def test_a_module_is_compiled_by_its_method_and_runs_eagerly_where_asked(tmp_path, how, compiled, printed):
    script = tmp_path / "train.py"
    script.write_text(COMPILED)
    got = run_script(script, how, capture=tmp_path, compiled=compiled)
    assert got.recording.refused is None, got.recording.refused
    assert got.printed.strip() == printed
    assert {r.name for r in got.recording.regions.values()} == ({"Sequential"} if compiled else set())


def _graph(function, count):
    """The graph of a function of matrices, in ATen's calls."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function)(*(torch.ones(4, 4) for _ in range(count)))


def _named(graph, target):
    return [node for node in graph.graph.nodes if node.target is target]


def test_what_a_later_kernel_can_compute_again_gets_no_memory_up_to_four_buffers():
    def chain(*inputs):
        total = inputs[0]
        for x in inputs[1:]:
            total = total + x
        return (total.cos() @ total.sin()) * total

    for count, kept in ((4, True), (5, False)):
        graph = _graph(chain, count)
        total = _named(graph, torch.ops.aten.add.Tensor)[-1]
        assert (total in _kept_in_registers(graph)) is kept, count


def test_a_result_in_one_kernel_with_its_readers_gets_no_memory_whatever_it_reads():
    def chain(*inputs):
        total = inputs[0]
        for x in inputs[1:]:
            total = total + x
        return total * total.sum()

    graph = _graph(chain, 12)
    assert _named(graph, torch.ops.aten.add.Tensor)[-1] in _kept_in_registers(graph)


def test_what_a_fused_result_is_computed_from_stays_until_it_is_read():
    graph = _graph(lambda x, y: ((x @ y).sin() + (y @ x)).exp(), 2)
    nodes = list(graph.graph.nodes)
    inside = _kept_in_registers(graph)
    first, second = _named(graph, torch.ops.aten.mm.default)
    aten = torch.ops.aten
    sine, total, last = (
        _named(graph, call)[0] for call in (aten.sin.default, aten.add.Tensor, aten.exp.default)
    )
    assert {sine, total} <= inside and last not in inside
    ends = _last_uses(nodes, inside)
    assert {first, second, sine, total} <= set(ends[last])
    assert first in _last_uses(nodes, set())[sine]


CHECKPOINTED = """
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
weight = torch.nn.Parameter(torch.randn(64, 64, device="cuda", dtype=torch.bfloat16))
rows = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD([weight], lr=0.1)


def attend(x):
    y = x @ weight
    return F.scaled_dot_product_attention(y, y, y, is_causal=True)


@torch.compile(fullgraph=True)
def block(x):
    return checkpoint(attend, x, use_reentrant=False, preserve_rng_state=False)


for _ in range(2):
    block(rows).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_checkpointed_attention_is_computed_again(tmp_path):
    """torch would save the state of the device's random numbers around it; there is none here."""
    script = tmp_path / "checkpointed.py"
    script.write_text(CHECKPOINTED)
    recording = run_script(script, steps=2).recording
    assert recording.refused is None, recording.refused
    step = recording.steps[-1]
    kinds = [
        (event.phase, kernel.kind)
        for event in recording.events[step.first : step.last]
        if isinstance(event, Launch)
        for kernel in event.kernels
        if kernel.kind.startswith("attention")
    ]
    assert kinds == [("forward", "attention"), ("backward", "attention"), ("backward", "attention_bwd")]
