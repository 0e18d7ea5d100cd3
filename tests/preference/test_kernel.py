"""The Triton kernel: the original numbers, the closed form in torch, odd rows, two sweeps.

In the interpreter on CPU tensors (the default of this suite), or compiled when TRITON_INTERPRET is 0 and a
GPU is present.
"""

from __future__ import annotations

import os

import pytest
import torch

from leanstep.preference import LensConfig, ObjectiveConfig, SamplingConfig, lens_loss, lens_objective
from leanstep.preference import kernel as kernel_module

from . import golden
from .test_closed_form import EVERY_TERM, random_batch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs TRITON_INTERPRET=1 or a GPU"
)


@pytest.fixture(autouse=True)
def use_kernel(monkeypatch):
    monkeypatch.setattr(lens_objective, "_closed_form_of", lambda x: kernel_module.triton_loss)


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
