"""Kernels and public paths on the test device: interpreted on a CPU, compiled by `make test-gpu`.

Twins of the interpreter's tests of heads and muon, on tensors of the `device` fixture, and what only a device
can show: no host read in a path, a CUDA graph that replays it, a second GPU. Public paths are compared with
fp64 on that device by tests/benchmarks/test_parity.py.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from leanstep.diagnose.unseen import sync_debug_mode
from leanstep.heads import linear_logprobs, linear_policy_loss, passes
from leanstep.muon import NorMuon
from leanstep.muon import kernel as products

needs_gpu = pytest.mark.skipif(
    os.environ["LEANSTEP_TEST_DEVICE"] == "cpu", reason="needs a GPU: make test-gpu"
)


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    truth = truth.detach().double().cpu()
    return float((got.detach().double().cpu() - truth).abs().max() / truth.abs().max())


def assert_as_exact(got: torch.Tensor, plain: torch.Tensor, truth: torch.Tensor) -> None:
    """The fp64 rule of docs/measuring.md."""
    k, floor = (3, 8e-3) if got.dtype in (torch.float16, torch.bfloat16) else (2, 1e-6)
    assert error(got, truth) <= k * error(plain, truth) + floor


@pytest.mark.parametrize(("rows", "columns"), [(3, 41), (2, 4100), (1, 1)])
def test_passes_over_a_tile(rows, columns, device):
    z = 4 * torch.randn(rows, columns, device=device)
    ids, k = torch.zeros(rows, dtype=torch.int64, device=device), torch.rand(rows, device=device) + 0.5
    results = []
    for body, dtype in ((passes.triton_passes(), torch.float32), (passes.TORCH, torch.float64)):
        table = torch.empty(5, rows, dtype=dtype, device=device)
        body.stats(z.to(dtype), ids, 0, k.to(dtype), *table)
        m, s, t = table[:3]
        entropy = s.log() - t / s
        du = torch.empty(z.shape, dtype=dtype, device=device)
        ones = torch.ones_like(m)
        body.grads(z.to(dtype), du, ids, 0, k.to(dtype), m, s.log(), entropy, ones, ones, ones, 0.0)
        results.append((table, du))
    for got, truth in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(41, 71), (2, 33, 17)])
def test_symmetric_products(shape, device):
    x = (torch.randn(shape) / 4).to(device, torch.bfloat16)
    for function, left, right in ((products.xxt, x, x.mT), (products.xtx, x.mT, x)):
        out = torch.empty(*shape[:-2], left.size(-2), left.size(-2), dtype=x.dtype, device=device)
        function(x, out, tiles=(32, 64, 32))
        assert_as_exact(out, left @ right, left.double() @ right.double())
        assert torch.equal(out, out.mT)


def head(device, dtype=torch.float32, rows=37, width=64, vocab=259):
    hidden = torch.randn(rows, width).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocab, width) / 4).to(device, dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab, (rows,)).to(device)


def policy(device):
    hidden, weight, targets = head(device, torch.bfloat16, rows=256, width=128, vocab=1024)
    ones = torch.ones(256, device=device)
    return lambda: linear_policy_loss(hidden, weight, targets, -ones, ones, mask=ones).loss.backward()


def logprobs(device):
    hidden, weight, targets = head(device, torch.bfloat16, rows=256, width=128, vocab=1024)
    return lambda: linear_logprobs(hidden, weight, targets, entropy="grad").logp.sum().backward()


def optimizer(device):
    weights = [torch.nn.Parameter(torch.randn(128, 256, device=device)) for _ in range(4)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return NorMuon(weights, lr=0.02).step


PATHS = {"linear_logprobs": logprobs, "linear_policy_loss": policy, "NorMuon": optimizer}


@needs_gpu
@pytest.mark.parametrize("name", PATHS)
def test_no_path_waits_for_the_device(name, device):
    step = PATHS[name](device)
    step()
    with sync_debug_mode("error"):
        step()


@needs_gpu
@pytest.mark.parametrize("name", ["linear_logprobs", "linear_policy_loss"])
def test_a_cuda_graph_replays_a_path(name, device):
    step = PATHS[name](device)
    stream = torch.cuda.Stream(device)
    # The inputs are made on the current stream.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize(device)


@needs_gpu
def test_tensors_of_another_gpu_than_the_current_one(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    here, there = (head(torch.device("cuda", n)) for n in (0, 1))
    with torch.no_grad():
        for a, b in zip(here, there, strict=True):
            b.copy_(a)
    with torch.cuda.device(0):
        got = [linear_logprobs(*each, entropy="grad") for each in (here, there)]
    assert got[1].logp.device.index == 1
    torch.testing.assert_close(got[0].logp, got[1].logp.to(got[0].logp.device))
