"""The two passes in torch, C++ (also built for AVX2) and Triton's interpreter; the GPU's path on a CPU."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from leanstep.cpu import build_library, find_compiler
from leanstep.heads import Head, LoRA, linear_logprobs, linear_policy_loss, logprob, passes, token_logprobs
from leanstep.heads.reference import reference_linear_logprobs

BODIES = ["torch", "C++", "AVX2", pytest.param("Triton", marks=pytest.mark.interpreter)]


@pytest.fixture(params=BODIES)
def body(request, tmp_path):
    if request.param == "Triton":
        pytest.importorskip("triton")
        return passes.triton_passes()
    if request.param == "torch":
        return passes.TORCH
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    if request.param == "AVX2":
        source = passes.Path(passes.__file__).with_name("passes.cpp")
        flags = [
            "-std=c++17",
            "-O3",
            "-fPIC",
            "-shared",
            "-mavx2",
            "-mfma",
            "-fno-math-errno",
            "-fopenmp-simd",
        ]
        library = ctypes.CDLL(str(build_library(source, [flags], tmp_path)))
        passes._declare(library)
        return passes.Native(library)
    return passes.native_passes()


def tile(dtype, rows=7, columns=1271):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(rows, columns + 5, generator=generator, dtype=torch.float64)[:, :columns] * 4
    z[1, 3:40] = -torch.inf
    z[2] = -torch.inf
    z[3] += 1e4
    ids = torch.tensor([5, 60, 7, columns + 99, 2, 50, 9])  # the tile begins at id 50
    k = torch.rand(rows, generator=generator, dtype=torch.float64) + 0.5
    return z.to(dtype), ids, k.to(torch.float64 if dtype == torch.float64 else torch.float32)


def statistics(body, z, ids, k):
    table = torch.empty(5, len(z), dtype=k.dtype)
    body.stats(z, ids, 50, k, *table)
    return table


# Triton's interpreter is numpy, which warns about branches that are not taken.
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")
def test_passes_equal_the_torch_body_in_fp64(body):
    z, ids, k = tile(torch.float32)
    own = statistics(body, z, ids, k)
    truth = statistics(passes.TORCH, z.double(), ids, k.double())
    torch.testing.assert_close(own.double(), truth, rtol=3e-6, atol=1e-30)
    assert own[4].tolist() == [float(x) for x in z.argmax(1)]
    generator = torch.Generator().manual_seed(1)
    m, s, t = own[:3]
    log_s = s.log().masked_fill(s == 0, 0)
    entropy = (log_s - t / s).masked_fill(s == 0, 0)
    a, b, g = torch.randn(3, len(z), generator=generator)
    dead = m == -torch.inf
    a, b, g = (x.masked_fill(dead, 0) for x in (a, b, g))
    vectors = (k, m.masked_fill(dead, 0), log_s, entropy, a, b, g)
    for inv_cap in (0.0, 0.01):
        given = z if not inv_cap else z.masked_fill(z == -torch.inf, -90.0)
        du, expected = torch.empty(given.shape), torch.empty(given.shape, dtype=torch.float64)
        body.grads(given, du, ids, 50, *vectors, inv_cap)
        wide = [v.double() for v in vectors]
        passes.TORCH.grads(given.double(), expected, ids, 50, *wide, inv_cap)
        torch.testing.assert_close(du.double(), expected, rtol=1e-4, atol=2e-6)
        over = given.clone()
        body.grads(over, over, ids, 50, *vectors, inv_cap)
        assert torch.equal(over, du)


@pytest.fixture
def gpu_route(monkeypatch):
    """Let CPU tensors take the GPU's path: Triton's passes, 16-bit gradients over fp32 logits."""
    pytest.importorskip("triton")
    monkeypatch.setattr(passes, "on_gpu", lambda device: True)
    monkeypatch.setattr(logprob, "GPU_TILE_BYTES", 4 * 6 * 40)


# Triton's interpreter is numpy, which warns about branches that are not taken.
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")
@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("upstream", [1.0, 1e-4])
def test_the_gpus_path_is_as_near_to_the_truth_as_plain_code(gpu_route, dtype, upstream):
    """Gradients of logits below 6e-8 would be 0 in fp16 if they were not scaled."""
    if upstream != 1.0 and dtype == torch.bfloat16:
        pytest.skip("its exponent is that of fp32")
    generator = torch.Generator().manual_seed(0)
    shapes = ((13, 24), (157, 24), (157,), (2, 24), (157, 2))
    tensors = [(torch.randn(*s, generator=generator) / 2).to(dtype) for s in shapes]
    targets = torch.randint(0, 157, (9,), generator=generator)
    rows = torch.tensor([0, 3, 3, 12, 5, 7, 8, 1, 2])
    weights = upstream * torch.randn(2, 9, generator=generator, dtype=torch.float64)

    def run(kind, cast):
        h, w, b, down, up = leaves = [x.to(cast).requires_grad_() for x in tensors]
        if kind == "ours":
            head = Head(w, b, LoRA(down, up, 0.5), 0.8, 5.0)
            out = linear_logprobs(h, head, targets, rows=rows, temperature=0.7, entropy="grad")[:2]
        else:
            out = reference_linear_logprobs(
                h, w + 0.5 * up @ down, targets, bias=b, rows=rows, temperature=0.7, scale=0.8, softcap=5.0
            )
        pairs = zip(out, weights, strict=True)
        loss = sum((x.double() * c).sum() for x, c in pairs)
        return [*[x.detach().double() for x in out], *[g.double() for g in torch.autograd.grad(loss, leaves)]]

    truth, ours = run("truth", torch.float64), run("ours", dtype)
    # Plain code in fp16 loses these gradients itself: compare with bf16's precision instead.
    plain = run("plain", torch.bfloat16 if dtype == torch.float16 else dtype)
    factor = 2 if dtype == torch.float32 else 3
    for t, p, x in zip(truth, plain, ours, strict=True):
        scale = t.abs().max()
        assert (x - t).abs().max() <= factor * (p - t).abs().max() + 2e-6 * scale


@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")
@pytest.mark.interpreter
def test_the_gpus_path_of_logits_and_of_the_policy_loss(gpu_route):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 40, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, 40, (5,), generator=generator)
    out = token_logprobs(logits, targets, entropy="grad")
    (grad,) = torch.autograd.grad(out.logp.sum() + out.entropy.sum(), logits)
    wide = logits.detach().double().requires_grad_()
    expected = token_logprobs(wide, targets, entropy="grad")
    (truth,) = torch.autograd.grad(expected.logp.sum() + expected.entropy.sum(), wide)
    torch.testing.assert_close(out.logp.double(), expected.logp, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.double(), truth, rtol=8e-3, atol=1e-4)

    hidden, weight = torch.randn(5, 16, generator=generator), torch.randn(40, 16, generator=generator)
    data = torch.full((5,), -3.0), torch.randn(5, generator=generator)
    results = []
    for dtype in (torch.float64, torch.float32):
        h, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        loss = linear_policy_loss(h, w, targets, *data, entropy_coef=0.1).loss
        results.append([loss.detach(), *torch.autograd.grad(loss, (h, w))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b.double(), a, rtol=1e-4, atol=1e-5)


def test_small_calls_build_nothing(monkeypatch):
    monkeypatch.setattr(passes, "native_passes", lambda: pytest.fail("built"))
    assert passes.passes_for(torch.zeros(2), torch.float32, 1000) is passes.TORCH
    assert passes.passes_for(torch.zeros(2), torch.float64, 1 << 30) is passes.TORCH
    monkeypatch.setattr(passes, "native_passes", lambda: None)
    assert passes.passes_for(torch.zeros(2), torch.float32, 1 << 30) is passes.TORCH
    native = SimpleNamespace()
    monkeypatch.setattr(passes, "native_passes", lambda: native)
    assert passes.passes_for(torch.zeros(2), torch.float32, 1 << 30) is native
