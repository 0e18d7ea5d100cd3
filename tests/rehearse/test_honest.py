"""Features that a rehearsal once ran with wrong figures and no word about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rehearse.rehearsed import Rehearsed, run_text

from leanstep.rehearse.devices import device_named
from leanstep.rehearse.events import GRAPH_REPLAY, Launch
from leanstep.rehearse.what_if import update_step

H100 = device_named("h100")

CAPTURED = """\
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(2)]).cuda()
optimizer = torch.optim.Adam(model.parameters(), capturable=True)
x = torch.randn(64, 512, device="cuda")

def step():
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()

with torch.cuda.stream(torch.cuda.Stream()):
    for _ in range(3):
        step()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
for _ in range(8):
    x.copy_(torch.randn(64, 512, device="cuda"))
    graph.replay()
    print("replayed")
"""


def launches(got: Rehearsed, step: int) -> list[Launch]:
    cut = got.recording.steps[step]
    return [e for e in got.recording.events[cut.first : cut.last] if isinstance(e, Launch)]


def test_a_replay_of_a_captured_update_is_a_step(tmp_path):
    """The updates before the capture warm up; the capture itself runs nothing."""
    got = run_text(tmp_path, CAPTURED, device="h100")
    assert got.recording.ended == "steps" and got.printed.split() == ["replayed"] * 2
    assert len(got.recording.steps) == 6
    eager, replayed = launches(got, 2), launches(got, 5)
    assert [e.name for e in replayed if e.name == GRAPH_REPLAY] == [GRAPH_REPLAY]

    def kernels(events: list[Launch]) -> int:
        return sum(k.launches for e in events for k in e.kernels)

    assert kernels(replayed) == kernels(eager) + 2  # and the new input: drawn, copied
    timing = update_step(got.recording, H100)
    assert timing is not None and timing.device_s > 50e-6 and timing.calls == 3


GRAPHED = """\
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(2)]).cuda()
x = torch.randn(64, 512, device="cuda")
called = torch.cuda.make_graphed_callables(model, (x,)) if GRAPHED else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = torch.cuda.memory_allocated()
for _ in range(5):
    called(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_graphed_callables_replay_forward_and_backward(tmp_path):
    plain = run_text(tmp_path, GRAPHED.replace("GRAPHED", "False"), device="h100")
    graphed = run_text(tmp_path, GRAPHED.replace("GRAPHED", "True"), device="h100")
    assert graphed.recording.refused is None
    assert [e.name for e in launches(graphed, 2)].count(GRAPH_REPLAY) == 2
    times = [update_step(got.recording, H100) for got in (plain, graphed)]
    assert times[0] is not None and times[1] is not None
    assert times[1].device_s == pytest.approx(times[0].device_s, rel=0.15)
    assert times[1].host_s < times[0].host_s


RING = """\
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
import torch.nn.functional as F
mesh = init_device_mesh("cuda", (4,))
w = torch.nn.Linear(512, 1536).cuda().bfloat16()
optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(1, 4096, 512, device="cuda", dtype=torch.bfloat16)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        q, k, v = (t.unflatten(-1, (8, 64)).transpose(1, 2) for t in w(x).chunk(3, -1))
        F.scaled_dot_product_attention(q, k, v, is_causal=True).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_context_parallel_counts_its_share_of_the_attention_and_the_ring(tmp_path):
    pytest.importorskip("torch.distributed.tensor.experimental._context_parallel")
    got = run_text(tmp_path, RING, device="h100", ranks=4)
    assert got.recording.refused is None, got.recording.refused
    forward = [k for e in launches(got, 2) for k in e.kernels if k.kind == "attention"]
    # Head and tail of the sequence are on rank 0: its own block, and half of the queries for each other rank.
    pairs = 1024 * 1025 / 2 + 3 * 512 * 1024
    assert len(forward) == 4
    assert sum(k.flops for k in forward) == pytest.approx(4 * 8 * 64 * pairs, rel=0.01)
    keys = 2 * 8 * 1024 * 64 * 2
    moved = [k for e in launches(got, 2) for k in e.kernels if k.kind == "collective"]
    assert sum(k.nbytes for k in moved) >= 4 * keys


EVENTS = """\
import json, time, torch
from torch import nn
blocks = [nn.Sequential(nn.LayerNorm(2048), nn.Linear(2048, 2048), nn.GELU(), nn.Tanh()) for _ in range(3)]
model = torch.compile(nn.Sequential(*blocks).cuda().bfloat16())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16384, 2048, device="cuda", dtype=torch.bfloat16)
start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
for _ in range(3):
    begun = time.perf_counter()
    start.record()
    model(x).square().mean().backward()
    end.record()
    end.synchronize()
    print(json.dumps([start.elapsed_time(end), 1e3 * (time.perf_counter() - begun)]))
    optimizer.step()
    optimizer.zero_grad()
"""


def test_events_and_the_clock_show_what_the_verdict_predicts_of_compiled_regions(tmp_path):
    got = run_text(tmp_path, EVENTS, device="h100", clock=True)
    event_ms, clock_ms = json.loads(got.printed.splitlines()[-1])
    fused, plain = (update_step(got.recording, H100, compiled=how) for how in (True, False))
    assert fused is not None and plain is not None and plain.step_s > 1.2 * fused.step_s
    # The optimizer's update is outside the events.
    assert 0.9 * fused.step_s < event_ms / 1e3 < fused.step_s
    assert event_ms < clock_ms < 1e3 * fused.step_s


REFUSED_BY_DYNAMO = {
    "with torch.cuda.device(0): y = x + 1": True,
    "y = x + torch.cuda.current_device()": True,
    "with torch.cuda.device_of(x): y = x + 1": False,
    "y = x + torch.cuda.memory_allocated()": False,
    "torch.cuda.manual_seed(0); y = x + 1": torch.__version__.startswith(
        "2.8."
    ),  # in 2.8's list of functions
}


def test_dynamo_refuses_in_a_full_graph_what_it_refuses_on_a_device(tmp_path):
    """Its rules are for torch's own functions; the answers in their place have them too."""
    tries = "\n".join(
        f"def f{i}(x):\n    {body}\n    return y\nattempt(f{i})" for i, body in enumerate(REFUSED_BY_DYNAMO)
    )
    program = f"""\
import json, torch
x, passed = torch.ones(3, device="cuda"), []
def attempt(f):
    try:
        torch.compile(f, fullgraph=True)(x)
        passed.append(True)
    except torch._dynamo.exc.Unsupported:
        passed.append(False)
{tries}
with torch.cuda.device_of(x), torch.cuda.device(0):
    print(json.dumps(passed))
"""
    got = run_text(tmp_path, program)
    assert json.loads(got.printed) == list(REFUSED_BY_DYNAMO.values())


SHAPES = """\
import json, torch
shapes = []
for _ in range(3):  # a call that comes again is built from its plan
    x = torch.zeros(1, 4, 6, device="cuda")
    x.squeeze_(0).t_()
    x.resize_(2, 3)
    shapes.append(list(x.shape))
model = torch.nn.Linear(6, 4).cuda()
weight = model.weight
model(torch.ones(2, 6, device="cuda")).sum().backward()
model.cpu()
there = [weight.device.type, weight.grad.device.type, weight is model.weight]
model.cuda()
print(json.dumps([shapes, there, [model.weight.device.type, model.weight.grad.device.type]]))
"""


def test_shapes_change_in_place_each_time_and_small_models_come_back_to_the_host(tmp_path):
    """Lightning moves its model to the host when training ends, gradients and all."""
    got = run_text(tmp_path, SHAPES)
    assert got.recording.refused is None, got.recording.refused
    assert json.loads(got.printed) == [[[2, 3]] * 3, ["cpu", "cpu", True], ["cuda", "cuda"]]


TEMPORARY = """\
import json, tempfile, torch
held = tempfile.TemporaryDirectory()
model = torch.nn.Linear(2, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(json.dumps([held.name, tempfile.mkdtemp()]), flush=True)
while True:
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_a_program_that_is_left_leaves_no_temporary_folders(tmp_path):
    got = run_text(tmp_path, TEMPORARY, steps=2)
    assert got.recording.ended == "steps"
    assert not [folder for folder in json.loads(got.printed) if Path(folder).exists()]
