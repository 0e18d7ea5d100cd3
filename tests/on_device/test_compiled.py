"""Kernels and public paths on the test device: interpreted on a CPU, compiled by `make test-gpu`.

Twins of the interpreter's tests in logprob, muon, lens and gpt, on tensors of the `device` fixture, and
what only a device can show: no host read in a path, a CUDA graph that replays it, a second GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.lens_workloads import make_batch
from leanstep.diagnose.unseen import sync_debug_mode
from leanstep.heads import linear_logprobs, linear_policy_loss, passes, token_logprobs
from leanstep.lens import lens_loss, lens_loss_reference
from leanstep.muon import NorMuon
from leanstep.muon import kernel as products
from recipes.speedrun.reference import ReferenceGPT
from recipes.speedrun.train import GPT, TINY_SHAPE, Settings

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


def test_transposes(device):
    src, base = torch.randn(41, 70, device=device), torch.randn(70, 41, device=device)
    dst = torch.empty_like(base)
    products.transpose_copy(src, dst)
    assert torch.equal(dst, src.T)
    dst = base.clone()
    products.transpose_add(src, dst)
    assert torch.equal(dst, base + src.T)


def head(device, dtype=torch.float32, rows=37, width=64, vocab=259):
    hidden = torch.randn(rows, width).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocab, width) / 4).to(device, dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab, (rows,)).to(device)


def plain_head(hidden, weight, targets):
    log_p = torch.nn.functional.linear(hidden, weight).log_softmax(-1)
    logp = log_p.gather(1, targets[:, None])[:, 0]
    return logp, -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_logprobs_and_their_gradients(dtype, device):
    hidden, weight, targets = head(device, dtype)

    def gradients(function, *leaves):
        logp, entropy = function(*leaves, targets)
        loss = (logp + 0.3 * entropy).sum()
        return [logp, entropy, *torch.autograd.grad(loss, leaves)]

    def fast(hidden, weight, targets):
        out = linear_logprobs(hidden, weight, targets, entropy="grad")
        return out.logp, out.entropy

    got, plain = gradients(fast, hidden, weight), gradients(plain_head, hidden, weight)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    for a, b, truth in zip(got, plain, gradients(plain_head, *wide), strict=True):
        assert_as_exact(a.to(b.dtype), b, truth)


def test_token_logprobs_of_half_precision_logits(device):
    logits = (2 * torch.randn(19, 401)).to(device, torch.bfloat16)
    targets = torch.randint(401, (19,), device=device)
    out = token_logprobs(logits, targets, entropy="metric")
    log_p = logits.double().log_softmax(-1)
    assert error(out.logp, log_p.gather(1, targets[:, None])[:, 0]) < 1e-5
    assert error(out.entropy, -(log_p.exp() * log_p).sum(-1)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_step_equals_that_of_the_cpu(dtype, device):
    start = [torch.randn(4, 48, 40) / 8, torch.randn(40, 96) / 8]
    grads = [torch.randn_like(t) for t in start]

    def stepped(where):
        weights = [torch.nn.Parameter(t.to(where, dtype, copy=True)) for t in start]
        optimizer = NorMuon(weights, lr=0.02, weight_decay=1.2, compute_dtype=torch.float32)
        for _ in range(2):
            for weight, grad in zip(weights, grads, strict=True):
                weight.grad = grad.to(where, dtype)
            optimizer.step()
        return [w.detach().cpu() for w in weights]

    for a, b, before in zip(stepped(device), stepped("cpu"), start, strict=True):
        assert error(a.float() - before, b.float() - before) < (2e-3 if dtype == torch.float32 else 3e-2)


def test_the_lens_objective_equals_the_loops(device):
    params = {"samples": 3, "variants": 3, "tokens": 96, "block": 4, "max_lod": 2, "max_pairs": 8}
    batch, config = make_batch(params, torch.Generator().manual_seed(0), device)
    scores = torch.randn(batch.pos.shape).tanh().to(device)
    found = []
    for function, place in ((lens_loss, device), (lens_loss_reference, "cpu")):
        x = scores.to(place, copy=True).requires_grad_()
        loss = function(x, batch.to(place), config).loss
        found.append((loss.detach(), *torch.autograd.grad(loss, x)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-6)


def test_the_model_equals_its_modules_in_fp64(device):
    settings = Settings(vocab_size=250)
    model, truth = GPT(settings, TINY_SHAPE).to(device), ReferenceGPT(settings, TINY_SHAPE).double()
    state = {name: (p + 0.05 * torch.randn(p.shape).to(p)).cpu() for name, p in model.named_parameters()}
    for each in (model, truth):
        for name, parameter in each.named_parameters():
            parameter.data.copy_(state[name])
    tokens, bigrams = torch.randint(250, (258,)), torch.randint(2560, (257,))
    ends = torch.tensor([0, 100, 257], dtype=torch.int32)
    losses = [
        each.loss(
            *(t.to(place) for t in (tokens[:-1], tokens[1:], bigrams)), each.documents(ends, 157), (1.0, 0.5)
        )
        for each, place in ((model, device), (truth, "cpu"))
    ]
    assert error(*losses) < 1e-4
    for loss in losses:
        loss.backward()
    grads = dict(truth.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.numel() > 1000:
            assert error(parameter.grad, grads[name].grad) < 2e-3, name


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
