"""Captured steps without a GPU: operations are recorded and run again on the same tensors, like a graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipes.test_gpt import small_training, weights, write_data
from rehearse.rehearsed import stub_or_skip
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from leanstep.gpt.attention import FixedPlans, PlanCache, PlanKey, make_flex_plan
from leanstep.muon import state as muon_state
from leanstep.recipes import Cadence, captured, gpt, run
from leanstep.recipes.captured import CapturedSteps, StepGraphs
from leanstep.rehearse.events import GRAPH_REPLAY, HostWait, Launch, Request
from leanstep.rehearse.stage import rehearse

STEPS = 20  # six per stage: of each kind one to warm up, one captured, one replayed


def tensors(*values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


class Recording(TorchDispatchMode):
    """A capture: operations and kernel launches of a body. Its writes are undone: a capture runs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert func is not torch.ops.aten._local_scalar_dense.default, "a host read during a capture"
        written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
        names = [a.name for a in func._schema.arguments]
        self._save([x for x, w in zip(args, written, strict=False) if w])
        self._save([kwargs[n] for n, w in zip(names, written, strict=True) if w and n in kwargs])
        out = func(*args, **kwargs)
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view:
            self.calls.append((func, args, kwargs, out))
        return out

    def launch(self, kernel, grid, args, kwargs) -> None:
        with _disable_current_modes():
            self._save(args)
            self.calls.append((kernel[grid], args, kwargs, None))
            kernel[grid](*args, **kwargs)

    def _save(self, values: Any) -> None:
        with _disable_current_modes():
            for x in tensors(values):
                whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                self._before.setdefault(whole.data_ptr(), (whole, whole.clone()))

    def undo(self) -> None:
        for whole, before in self._before.values():
            whole.copy_(before)

    def replay(self) -> None:
        for call, args, kwargs, out in self.calls:
            for old, new in zip(tensors(out), tensors(call(*args, **kwargs)), strict=out is not None):
                if old is not new:
                    old.copy_(new)


class RecordedGraphs:
    """Stands in for `CudaGraphs`. Counts captures and replays."""

    active: Recording | None = None
    captures = replays = 0

    def run(self, body):
        return body()

    def capture(self, body):
        cls = type(self)
        cls.captures += 1
        recording = cls.active = Recording()
        try:
            with recording:
                result = body()
        finally:
            cls.active = None
        recording.undo()

        def replay():
            cls.replays += 1
            with torch.no_grad():
                recording.replay()

        return replay, result


@pytest.fixture
def graphs(monkeypatch):
    """The route of a GPU through the model, and recorded graphs."""
    monkeypatch.setattr(captured, "WARM_UP", 1)
    monkeypatch.setattr(PlanCache, "_flash", lambda self, dtype, device: packed_attention)
    monkeypatch.setattr(RecordedGraphs, "captures", 0)
    monkeypatch.setattr(RecordedGraphs, "replays", 0)
    return RecordedGraphs


def packed_attention(q, k, v, cu, cu_k, longest, longest_k, *, softmax_scale, causal, window_size):
    """FlashAttention's function in torch; the documents are read from the tensor."""
    time = torch.arange(q.shape[0], dtype=torch.int32)
    document = torch.searchsorted(cu, time, right=True)
    behind = time[:, None] - time
    mask = (behind >= 0) & (behind <= window_size[0]) & (document[:, None] == document)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale).transpose(0, 1)


def training(data, new_graphs=None, whole=False, **options):
    made = small_training(data=data, **{"steps": STEPS, **options})
    made.model.run = "plain"
    if new_graphs is not None:
        made.captured = CapturedSteps(
            made.model, made.optimizer, made._accumulate, whole=whole, new_graphs=new_graphs
        )
    return made


def losses(made, steps, evaluate_at=()):
    found = []
    for i in steps:
        found.append(float(made.step(i)["loss"]))
        if i in evaluate_at:
            found.append(made.evaluate()["val_loss"])
    return found


def same(one, other):
    assert {n for n, w in weights(one).items() if not torch.equal(w, weights(other)[n])} == set()


@pytest.mark.parametrize("optimizer", ["normuon", "adamw"])
def test_a_captured_run_has_the_bits_of_a_plain_one(tmp_path, graphs, optimizer):
    """Stages, fading prediction weights, the untying and evaluations between replays."""
    data = write_data(tmp_path)
    plain, graphed = training(data, optimizer=optimizer), training(data, graphs, optimizer=optimizer)
    at = (4, 5, 11, 19)
    assert losses(graphed, range(STEPS), at) == losses(plain, range(STEPS), at)
    same(plain, graphed)
    assert graphs.captures >= 6 and graphs.replays > graphs.captures


def test_a_stale_number_would_be_noticed(tmp_path, graphs, monkeypatch):
    """Prediction weights of the capture, not of the step: another loss."""
    data = write_data(tmp_path)
    plain, graphed = training(data), training(data, graphs)
    load = captured.StepInputs.load

    def forgets(self, batches, numbers):
        return load(self, batches, self.numbers.tolist() if self.numbers.any() else numbers)

    monkeypatch.setattr(captured.StepInputs, "load", forgets)
    assert losses(graphed, range(6)) != losses(plain, range(6))


def test_captured_runs_resume_exactly(tmp_path, graphs):
    data, cadence = write_data(tmp_path), Cadence(log=2, evaluate=5, save=4)
    plain = training(data)
    run(plain, tmp_path / "plain", cadence=cadence, say=lambda line: None)
    # Between Adam's turns (5: gradients wait in a graph's memory) and in another stage; then without graphs.
    for stop, new_graphs in ((5, graphs), (11, graphs), (13, None), (None, graphs)):
        part = training(data, new_graphs)
        run(part, tmp_path / "parts", cadence=cadence, resume=True, stop_after=stop, say=lambda line: None)
    same(plain, part)
    assert graphs.replays > 4


def test_gradients_of_no_graph_are_never_captured():
    """They are freed after the step, and another tensor may get their address."""
    parameter = torch.zeros(3, requires_grad=True)
    steps, seen = StepGraphs([parameter], RecordedGraphs()), []

    def body():
        seen.append("ran")
        parameter.grad.add_(1)
        return parameter.grad.sum()

    for _ in range(5):
        parameter.grad = torch.zeros(3)
        assert steps.step("adds", body) == 3
    assert len(seen) == 5 and not steps._captured


@pytest.mark.interpreter
def test_a_whole_step_reads_rates_and_momentum_from_the_device(tmp_path, graphs, monkeypatch):
    """The optimizer's kernels are in the graph; loading a state while it runs starts over."""
    launches = pytest.importorskip("leanstep.muon.fused.launches", reason="Triton is not installed")
    monkeypatch.setattr(muon_state, "FUSED_DEVICES", ("cuda", "cpu"))
    kernel = launches.kernel

    class Launcher:
        def __init__(self, function):
            self.function = function

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                if RecordedGraphs.active is None:
                    return self.function[grid](*args, **kwargs)
                return RecordedGraphs.active.launch(self.function, grid, args, kwargs)

            return launch

    class Kernels:
        def __getattr__(self, name):
            value = getattr(kernel, name)
            return Launcher(value) if name.endswith("_kernel") else value

    monkeypatch.setattr(launches, "kernel", Kernels())
    # Few large programs: the interpreter runs them one by one.
    for tile in ("TILE", "LINE_TILE", "COLUMN_TILE"):
        monkeypatch.setattr(kernel, tile, (256, 64))
    monkeypatch.setattr(kernel, "FLAT_BLOCK", 1 << 16)
    data = write_data(tmp_path)
    eager, graphed = (training(data, graphs, whole=True, micro_batches=1) for _ in range(2))
    for made in (eager, graphed):
        # One kind of step, whose rate, momentum and prediction weights change every time.
        made.schedule = replace(made.schedule, adam_every=1, cooldown_fraction=1.0)
    found = losses(graphed, range(3))
    assert (graphs.captures, graphs.replays) == (1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(captured, "WARM_UP", 100)
        assert losses(eager, range(3)) == found
    same(eager, graphed)
    # A checkpoint holds the rates of the last step as numbers.
    groups = graphed.state_dict()["optimizer"]["param_groups"]
    rates = {group["algorithm"]: group["lr"] for group in groups}
    lr, adam_lr, momentum = graphed.optimizer.rates(graphed.schedule.at(2))
    assert rates == pytest.approx({"normuon": lr, "adam": adam_lr}, rel=1e-6)
    assert groups[0]["momentum"] == pytest.approx(momentum, rel=1e-6)
    assert {type(rate) for rate in (*rates.values(), groups[0]["momentum"])} == {float}
    # With numbers in place of tensors: the same steps up to the rounding of a rate.
    plain = training(data, micro_batches=1)
    plain.schedule = eager.schedule
    assert losses(plain, range(3)) == pytest.approx(found, rel=1e-4)


def test_documents_beyond_the_table_need_a_new_one():
    source, device = PlanCache(), torch.device("cpu")
    source._flash = lambda dtype, device: packed_attention
    plans = FixedPlans(source)
    layer = PlanKey(16, False, 8, torch.float32, device)
    few, many = list(range(0, 513, 8)), list(range(0, 513, 2))
    plan = plans.get(few, layer)
    assert plans.load([0, 100, 512]) and plans.get([], layer) is plan
    assert plan.cu_seqlens.tolist() == [0, 100] + [512] * 126
    assert not plans.load(many)
    larger = plans.get(many, layer)
    assert larger is not plan and larger.cu_seqlens.tolist() == many + [512] * (384 - len(many))
    assert plans.load(few) and plans.get([], layer) is larger
    assert larger.cu_seqlens.tolist() == few + [512] * (384 - len(few))


def test_a_flex_plan_is_overwritten_with_all_its_tensors():
    plan, other = (make_flex_plan(bounds, 200, "cpu") for bounds in ([0, 300, 700], [0, 100, 650, 700]))
    addresses = [x.data_ptr() for x in plan.tensors]
    assert any(not torch.equal(a, b) for a, b in zip(plan.tensors, other.tensors, strict=True))
    assert plan.overwrite(other) and addresses == [x.data_ptr() for x in plan.tensors]
    assert all(torch.equal(a, b) for a, b in zip(plan.tensors, other.tensors, strict=True))
    query, key = torch.tensor(660), torch.tensor(640)
    assert not plan.block_mask.mask_mod(0, 0, query, key) and plan.block_mask.mask_mod(0, 0, key, key)
    assert not plan.overwrite(make_flex_plan([0, 1000], 200, "cpu"))


def test_a_cpu_and_models_without_static_documents_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^cuda_graph: expected a CUDA device, got cpu$"):
        gpt.build("smoke", cuda_graph=True)
    made = small_training(data=write_data(tmp_path))
    made.world = replace(made.world, device=torch.device("cuda"))
    made.config = replace(made.config, respect_docs=True)
    with pytest.raises(
        ValueError, match=r"^cuda_graph: expected model.respect_docs=false .* got True and True$"
    ):
        made.capture_steps()


SCRIPT = """
import os
import torch
import torch.distributed as dist
from leanstep.recipes.distributed import World
from leanstep.recipes.gpt import build

ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("nccl")
world = World(size=ranks, device=torch.device("cuda", 0))
training = build("smoke", steps=60, world=world, cuda_graph=True, model={"dtype": "bfloat16"})
for step in range(15):
    training.step(step)
    if step == 6:
        training.evaluate()
        # The graphs' tensors are replaced: they are captured anew.
        training.load_state_dict(training.state_dict())
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", [1, 2])
def test_on_a_gpu_a_step_is_one_replay_without_waits(tmp_path, ranks):
    """Rehearsed: a capture raises at a host sync, a replay at memory that was freed."""
    pytest.importorskip("triton", reason="Triton is not installed")
    stub_or_skip()
    script = tmp_path / "step.py"
    script.write_text(SCRIPT)
    recording = rehearse(Request(str(script), device="h100", steps=100, ranks=ranks), quiet=True)
    assert recording.refused is None and len(recording.steps) == 15, recording.refused
    eager, replayed = recording.steps[2], recording.steps[14]
    kernels = []
    for step in (eager, replayed):
        events = recording.events[step.first : step.last]
        assert not [event for event in events if isinstance(event, HostWait)]
        launches = [event for event in events if isinstance(event, Launch)]
        kernels.append(
            Counter(k.name for e in launches for k in e.kernels if k.kind in ("gemm", "attention"))
        )
    assert [e.name for e in launches].count(GRAPH_REPLAY) == 1
    # The copies of inputs, documents and numbers; over ranks also the optimizer and its collectives.
    others = [e for e in launches if e.name != GRAPH_REPLAY]
    collectives = [k for e in others for k in e.kernels if k.kind == "collective"]
    assert (len(others) <= 40 and not collectives) if ranks == 1 else collectives
    assert kernels[0] == kernels[1] and kernels[0]
