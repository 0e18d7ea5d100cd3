"""The frozen-head path: the same numbers as the recomputing path, without a GEMM in the backward pass."""

from __future__ import annotations

import pytest
import torch
from logprob.flat import linear_logprobs

T, D, V = 10, 6, 45
ROWS = torch.tensor([7, 1, 1, 4, 9])
TRANSFORMS = [
    {},
    {"softcap": 2.0, "scale": 0.8, "temperature": 0.6},
    {"rows": ROWS, "temperature": torch.linspace(0.5, 2, 5, dtype=torch.float64)},
]


def setup(dtype=torch.float64, options=None):
    g = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(n, D, generator=g, dtype=torch.float64).to(dtype) for n in (T, V))
    bias = torch.randn(V, generator=g, dtype=torch.float64).to(dtype)
    selected = len((options or {}).get("rows", range(T)))
    return hidden, weight, bias, torch.randint(0, V, (selected,), generator=g)


@pytest.mark.parametrize("options", TRANSFORMS, ids=["plain", "softcap", "rows"])
def test_gradcheck(options):
    hidden, weight, bias, tokens = setup(options=options)

    def outputs(h):
        out = linear_logprobs(
            h, weight, tokens, bias=bias, entropy="grad", outputs=("lse", "z_loss"), tile=(3, 11), **options
        )
        assert type(out.logp.grad_fn).__name__ == "FrozenLinearLogProbsBackward"
        return out.logp, out.entropy, out.lse, out.z_loss

    assert torch.autograd.gradcheck(outputs, (hidden.requires_grad_(),))


@pytest.mark.parametrize("options", TRANSFORMS, ids=["plain", "softcap", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_recomputing_path(options, dtype):
    options = {
        k: v.to(dtype) if k == "temperature" and isinstance(v, torch.Tensor) else v
        for k, v in options.items()
    }
    hidden, weight, bias, tokens = setup(dtype, options)
    upstream = torch.randn(2, len(tokens), dtype=dtype)
    grads = []
    for trained in (False, True):
        h = hidden.detach().requires_grad_()
        w = weight.detach().requires_grad_(trained)
        out = linear_logprobs(h, w, tokens, bias=bias, entropy="grad", tile=(4, 13), **options)
        grads.append(
            (out.logp, out.entropy, *torch.autograd.grad([out.logp, out.entropy], h, list(upstream)))
        )
    tolerance = 1e-11 if dtype == torch.float64 else 5e-6
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), atol=tolerance, rtol=tolerance)


def test_the_entropy_gradient_does_not_cancel():
    """Nearly uniform logits far below their maximum: E[xW] - E[x]E[W] would lose the digits."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.ones(1, 2)
    weight = torch.stack([torch.randn(4000, generator=g) * 1e-2, torch.randn(4000, generator=g) * 1e-2], 1)
    bias = torch.zeros(4000)
    bias[17] = 9.0
    grads = []
    for dtype in (torch.float64, torch.float32):
        h = hidden.to(dtype).requires_grad_()
        out = linear_logprobs(
            h, weight.to(dtype), torch.tensor([3]), bias=bias.to(dtype), entropy="grad", tile=(1, 512)
        )
        grads.append(torch.autograd.grad(out.entropy.sum(), h)[0].double())
    assert float((grads[1] - grads[0]).abs().max() / grads[0].abs().max()) < 2e-5


def test_backward_multiplies_no_matrices():
    hidden, weight, _, tokens = setup(torch.float32)
    out = linear_logprobs(hidden.requires_grad_(), weight, tokens, entropy="grad")
    with torch.profiler.profile() as recorded:
        (out.logp.sum() + out.entropy.sum()).backward()
    assert not {e.key for e in recorded.key_averages()} & {"aten::mm", "aten::addmm", "aten::matmul"}


def test_dead_rows_and_underflow_make_no_nan():
    hidden, bias = torch.ones(2, 1, requires_grad=True), torch.full((4,), -torch.inf)
    out = linear_logprobs(
        hidden, torch.ones(4, 1), torch.tensor([0, 1]), bias=bias, entropy="grad", tile=(1, 2)
    )
    assert torch.equal(out.logp.detach(), torch.full((2,), -torch.inf)) and torch.equal(
        out.entropy.detach(), torch.zeros(2)
    )
    (grad,) = torch.autograd.grad([out.logp, out.entropy], hidden, [torch.ones(2), torch.ones(2)])
    assert torch.equal(grad, torch.zeros(2, 1))


def test_entropy_metric_saves_one_matrix_only():
    hidden, weight, _, tokens = setup(torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = linear_logprobs(hidden.requires_grad_(), weight, tokens, entropy="metric")
    assert not out.entropy.requires_grad
    assert [tuple(x.shape) for x in saved] == [(T, D)]


@pytest.mark.parametrize("rows", [None, torch.arange(0, 512, 2)])
def test_backward_holds_a_chunk_of_rows(rows):
    from leanstep.measure.peaks import measure_peak

    t, d, v, chunk = 512, 256, 64, 32
    g = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, d, generator=g) for n in (t, v))
    tokens = torch.randint(0, v, (t if rows is None else len(rows),), generator=g)
    h = hidden.requires_grad_()
    out = linear_logprobs(h, weight, tokens, rows=rows, entropy="grad", tile=(chunk, 64))

    def step():
        grads = torch.autograd.grad(
            [out.logp, out.entropy], h, [out.logp.detach(), out.entropy.detach()], retain_graph=True
        )
        return {"hidden": grads[0]}

    # A sum, a term and what an index adds, [chunk, D] each: far from [T', D].
    assert measure_peak(step, {}).extra_bytes <= 4 * (3 * chunk * d) + 16 * t


def test_backward_in_chunks_adds_rows_that_repeat():
    hidden, weight, bias, _ = setup(torch.float64)
    rows = torch.tensor([3, 3, 0, 3, 9, 0])
    tokens, upstream = torch.tensor([1, 2, 3, 4, 5, 44]), torch.randn(3, 6, dtype=torch.float64)
    grads = []
    for tile in ((2, 45), (6, 45)):
        h = hidden.detach().requires_grad_()
        out = linear_logprobs(
            h, weight, tokens, bias=bias, rows=rows, entropy="grad", outputs=("lse",), tile=tile
        )
        grads += torch.autograd.grad([out.logp, out.entropy, out.lse], h, list(upstream))
    h = hidden.detach().requires_grad_()
    log_p = torch.log_softmax(h[rows] @ weight.t() + bias, -1)
    plain = [log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)]
    plain.append(torch.logsumexp(h[rows] @ weight.t() + bias, -1))
    grads += torch.autograd.grad(plain, h, list(upstream))
    torch.testing.assert_close(grads[0], grads[2], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(grads[1], grads[2], atol=1e-12, rtol=1e-12)
