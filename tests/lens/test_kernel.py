"""The Triton kernel: the original numbers, the closed form in torch, odd rows, two sweeps.

In the interpreter on CPU tensors (the default of this suite), or compiled when TRITON_INTERPRET is 0 and a
GPU is present.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from leanstep.lens import (
    LensBatch,
    LensConfig,
    ObjectiveConfig,
    SamplingConfig,
    Variant,
    lens_loss,
    lens_objective,
)
from leanstep.lens import kernel as kernel_module
from leanstep.lens.pairs import build_pairs, build_targets

from . import golden
from .test_closed_form import EVERY_TERM, random_batch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs TRITON_INTERPRET=1 or a GPU"
)


@pytest.fixture(autouse=True)
def use_kernel(monkeypatch):
    monkeypatch.setattr(lens_objective, "_kernels", lambda scores: kernel_module)


# The interpreter takes seconds per file: every file in float64, a few in float32.
FILES = [n for n in golden.NAMES if not n.startswith("14")]
CHOICES = [(n, torch.float64) for n in FILES] + [(n, torch.float32) for n in FILES[:2] + FILES[9:13]]


@pytest.mark.parametrize(("name", "dtype"), CHOICES)
def test_golden_vectors(name, dtype):
    data = golden.load(name)
    batch = golden.batch_of(data)
    order = golden.pair_order_of(data, batch).to(DEVICE)
    scores = golden.scores_of(data, batch, dtype).to(DEVICE).requires_grad_()
    batch = batch.to(DEVICE)
    rtol, atol = (1e-9, 1e-15) if dtype == torch.float64 else (1e-4, 2e-8)
    state = torch.tensor(data["config"]["ema_in"], dtype=dtype, device=DEVICE)
    result = lens_loss(scores, batch, golden.config_of(data), state=state, pair_order=order, backend="fused")
    result.loss.backward()
    golden.assert_gradient(data, batch.to("cpu"), scores.grad.cpu(), rtol, atol)
    assert result.loss.item() == pytest.approx(data["outputs"]["loss"], rel=rtol)
    for k, pair in enumerate(data["pairs"]):
        for term, values in result.terms.items():
            assert values[k].item() == pytest.approx(pair[term] if pair["kept"] else 0.0, rel=rtol, abs=atol)


@pytest.mark.parametrize("form", ["logistic", "hinge", "squared_hinge"])
@pytest.mark.parametrize("tile", [8192, 32])
@pytest.mark.parametrize("sampling", ["none", "topk"])
def test_equals_the_eager_path(form, tile, sampling, monkeypatch):
    monkeypatch.setattr(kernel_module, "MAX_TILE", tile)
    batch = random_batch(seed=4, tokens=48).to(DEVICE)
    config = LensConfig(
        block_size=4,
        objective=ObjectiveConfig(form=form, **EVERY_TERM),
        sampling=SamplingConfig(span_sampling=sampling, span_k=5, aux_on_full=False),
    )
    scores = torch.randn(batch.pos.shape, device=DEVICE).tanh()
    arguments = {"prev_scores": 0.3 * scores, "state": torch.tensor(0.1, device=DEVICE)}
    x, y = (torch.where(batch.valid, scores, torch.nan).requires_grad_() for _ in range(2))
    a = lens_loss(x, batch, config, backend="fused", **arguments)
    b = lens_loss(y, batch, config, backend="eager", **arguments)
    (2 * a.loss).backward()
    (2 * b.loss).backward()
    torch.testing.assert_close(a.loss, b.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(a.state, b.state)


def test_half_precision_scores_are_summed_in_float32():
    batch = random_batch(seed=6, tokens=80).to(DEVICE)
    config = LensConfig(block_size=4)
    scores = torch.randn(batch.pos.shape, device=DEVICE).tanh().half()
    x, y = scores.clone().requires_grad_(), scores.float().requires_grad_()
    a, b = (
        lens_loss(x, batch, config, backend="fused").loss,
        lens_loss(y, batch, config, backend="eager").loss,
    )
    a.backward()
    b.backward()
    assert a.dtype == torch.float32 and x.grad.dtype == torch.float16
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(x.grad, y.grad.half(), rtol=1e-3, atol=1e-6)


def test_shipped_configurations_name_every_argument():
    for entry in kernel_module.AOT_KERNELS:
        assert list(entry["fn"].arg_names) == sorted(
            [*entry["signature"], *entry["constexprs"]], key=entry["fn"].arg_names.index
        )


LOSSES = st.one_of(st.just(math.nan), st.sampled_from([1.0, 1.5, 2.0, 2.25]), st.floats(0, 5, width=32))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(1, 8), st.integers(1, 3), st.integers(1, 9))
def test_pairs_equal_those_of_torch(data, num_variants, num_samples, max_pairs):
    values = st.lists(LOSSES, min_size=num_variants, max_size=num_variants)
    loss = torch.tensor([data.draw(values) for _ in range(num_samples)], device=DEVICE)
    row = torch.arange(loss.numel(), device=DEVICE).view(loss.shape)
    config = LensConfig(sampling=SamplingConfig(max_pairs=max_pairs))
    for losses in (loss, loss.double()):
        got, want = kernel_module.triton_pairs(losses, row, config), build_pairs(losses, row, config)
        assert got.valid.equal(want.valid) and got.live.equal(want.live)
        assert got.delta.equal(want.delta) and got.delta.dtype == losses.dtype
        assert got.better[want.valid].equal(want.better[want.valid])
        assert got.worse[want.valid].equal(want.worse[want.valid])


@pytest.mark.parametrize("tile", [8192, 16])
@pytest.mark.parametrize("block", [3, 4])
def test_targets_equal_those_of_torch(block, tile, monkeypatch):
    monkeypatch.setattr(kernel_module, "MAX_TILE", tile)
    num_targets = 0
    for seed in range(3):
        batch = random_batch(seed=seed, block=block, num_variants=5, tokens=60).to(DEVICE)
        config = LensConfig(block_size=block)
        pairs = build_pairs(batch.loss, batch.row, config)
        sign, has_target = kernel_module.triton_targets(batch, pairs, config)
        want = build_targets(batch, pairs, config)
        assert sign.equal(want) and has_target.equal((want != 0).any(1))
        num_targets += int(has_target.sum())
    assert num_targets > 3


def test_a_block_of_the_top_level_has_no_parent_that_a_request_could_mark():
    """The better context requests the first block, with index 0; entries of the top level have no block."""
    worse = Variant([0, 1, 2, 3, 16], [0, 0, 0, 0, 2], 2.5, False)
    better = Variant([0, 4, 8, 12, 16], [1, 1, 1, 1, 2], 2.0, True)
    config = LensConfig(block_size=4, max_lod=2)
    batch = LensBatch.from_variants([[better, worse]], config, num_tokens=32).to(DEVICE)
    pairs = build_pairs(batch.loss, batch.row, config)
    sign, _ = kernel_module.triton_targets(batch, pairs, config)
    assert sign.equal(build_targets(batch, pairs, config))
    row = sign[pairs.worse == 1][0].tolist()
    assert row[:4] == [-1] * 4 and row[4] == 0


class Launches(TorchDispatchMode):
    """Count operations that would launch a kernel: no views, plain allocations or ops of the interpreter."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        view = torch.Tag.view_copy in func.tags or any(
            argument.alias_info is not None and not argument.alias_info.is_write
            for argument in func._schema.arguments
        )
        # The interpreter copies the outputs of a kernel, and the suite fills new memory with NaN.
        if not view and not name.startswith(("empty", "new_empty", "set_", "copy_", "fill_", "is_pinned")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_the_whole_objective_takes_at_most_thirty_launches(monkeypatch):
    batch, config = random_batch(seed=4, tokens=48).to(DEVICE), LensConfig(block_size=4)
    x = torch.randn(batch.pos.shape, device=DEVICE).tanh().requires_grad_()
    kernels = []
    for name in ("lens_pairs_kernel", "lens_targets_kernel", "lens_rows_kernel"):
        kernel = getattr(kernel_module, name)

        class Counted:
            def __init__(self, kernel=kernel, name=name):
                self.kernel, self.name = kernel, name

            def __getitem__(self, grid):
                kernels.append(self.name)
                return self.kernel[grid]

        monkeypatch.setattr(kernel_module, name, Counted())
    with Launches() as forward:
        loss = lens_loss(x, batch, config, backend="fused").loss
    assert kernels == ["lens_pairs_kernel", "lens_targets_kernel", "lens_rows_kernel"]
    assert len(forward.names) + len(kernels) <= 22, forward.names
    with Launches() as backward:
        loss.backward()
    assert len(backward.names) <= 3


def test_launches_happen_on_the_device_of_the_tensors(monkeypatch):
    batch, config = random_batch(seed=4, tokens=48).to(DEVICE), LensConfig(block_size=4)
    entered = []
    original = torch.cuda.device_of

    def device_of(tensor):
        entered.append(tensor.device)
        return original(tensor)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    x = torch.randn(batch.pos.shape, device=DEVICE)
    lens_loss(x, batch, config, backend="fused")
    assert entered == [x.device] * 3
