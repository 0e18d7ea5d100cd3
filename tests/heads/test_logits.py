"""token_logprobs against upstream's outputs, fp64 truth, numerical derivatives and the memory contract."""

from __future__ import annotations

import pytest
import torch
from heads.golden import (
    GRAD_TOLERANCE,
    VALUE_TOLERANCE,
    core_cases,
    dtype_of,
    expected_runs,
    numbers,
    ragged,
)

from leanstep.heads import Head, LogProbs, linear_logprobs, token_logprobs
from leanstep.heads.reference import reference_logprobs

CORE = core_cases()


def random_case(n, v, dtype=torch.float32, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, v, generator=generator, dtype=torch.float64) * spread).to(dtype)
    tokens = torch.randint(0, v, (n,), generator=generator)
    upstream = torch.randn(2, n, generator=generator, dtype=torch.float64)
    return logits, tokens, upstream


def run(logits, tokens, upstream, which="both", **options):
    """(logp, entropy, gradient) of the fast path."""
    leaf = logits.detach().requires_grad_()
    out = token_logprobs(leaf, tokens, entropy="grad", **options)
    outputs = {"both": [0, 1], "logp": [0], "entropy": [1]}[which]
    values = [out.logp, out.entropy]
    seeds = [upstream[i].to(values[i].dtype) for i in outputs]
    (grad,) = torch.autograd.grad([values[i] for i in outputs], leaf, seeds)
    return out.logp.detach(), out.entropy.detach(), grad


def plain(logits, tokens, upstream, which="both", dtype=None, **options):
    leaf = logits.detach().to(dtype or logits.dtype).requires_grad_()
    values = reference_logprobs(leaf, tokens, **options)
    outputs = {"both": [0, 1], "logp": [0], "entropy": [1]}[which]
    (grad,) = torch.autograd.grad(
        [values[i] for i in outputs], leaf, [upstream[i].to(leaf.dtype) for i in outputs]
    )
    return values[0].detach(), values[1].detach(), grad


def assert_no_further_than_plain(candidate, baseline, truth, k=2.0, floor=3e-7):
    for name, c, b, t in zip(("logp", "entropy", "grad"), candidate, baseline, truth, strict=True):
        scale = max(float(t.abs().max()) if t.numel() else 0.0, 1.0)
        error = float((c.double() - t).abs().max()) if t.numel() else 0.0
        plain_error = float((b.double() - t).abs().max()) if t.numel() else 0.0
        assert error <= k * plain_error + floor * scale, f"{name}: {error} against {plain_error}"


SETS = (torch.tensor([0, 4, 4, 9]), torch.tensor([0, 1, 1, 1, 3, 3, 4, 4]))


def of_identity(logits, tokens, **options):
    """`linear_logprobs` whose logits these are; infinite ones as a bias, so that they meet no product."""
    n, v = logits.shape
    eye = torch.eye(v, dtype=logits.dtype)
    if logits.isfinite().all() and logits.abs().max() < 1e30:
        return linear_logprobs(logits, eye, tokens, **options)
    assert options.pop("allowed") is None
    zero = torch.zeros(1, v, dtype=logits.dtype)
    rows = [linear_logprobs(zero, Head(eye, logits[i]), tokens[i : i + 1], **options)[:2] for i in range(n)]
    logp, entropy = zip(*rows, strict=True)
    return LogProbs(torch.cat(logp), None if entropy[0] is None else torch.cat(entropy), logp, logp)


@pytest.mark.parametrize(("name", "case"), CORE, ids=[name for name, _ in CORE])
@pytest.mark.parametrize("chunk_rows", [None, 3])
@pytest.mark.parametrize("function", [token_logprobs, of_identity])
def test_upstream_outputs(name, case, chunk_rows, function):
    dtype = dtype_of(case)
    logits, tokens = numbers(case["logits"]).to(dtype), torch.tensor(case["tokens"])
    g_logp, g_entropy = numbers(case["grad_log_prob"]), numbers(case["grad_entropy"])
    allowed = ragged(case.get("keep_ids"))
    for expected in expected_runs(case):
        leaf = logits.clone().requires_grad_()
        out = function(leaf, tokens, entropy=expected["mode"], allowed=allowed, chunk_rows=chunk_rows)
        close = dict(zip(("atol", "rtol"), VALUE_TOLERANCE[dtype], strict=True))
        torch.testing.assert_close(out.logp.double(), numbers(expected["log_prob"]), **close)
        if expected["mode"] == "none":
            assert out.entropy is None
        else:
            torch.testing.assert_close(out.entropy.double(), numbers(expected["entropy"]), **close)
            assert out.entropy.requires_grad == (expected["mode"] == "grad")
        roots = {
            "grad_logprob_only": ([out.logp], [g_logp]),
            "grad_entropy_only": ([out.entropy], [g_entropy]),
            "grad_both": ([out.logp, out.entropy], [g_logp, g_entropy]),
        }
        close = dict(zip(("atol", "rtol"), GRAD_TOLERANCE[dtype], strict=True))
        for key, (outputs, seeds) in roots.items():
            if key in expected:
                seeds = [s.to(o.dtype) for s, o in zip(seeds, outputs, strict=True)]
                (grad,) = torch.autograd.grad(outputs, leaf, seeds, retain_graph=True)
                assert grad.dtype == dtype
                torch.testing.assert_close(
                    grad.double(), numbers(expected[key]), **close, msg=lambda m, k=key: f"{k}: {m}"
                )


@pytest.mark.parametrize(
    "options",
    [
        {"entropy": "grad"},
        {"entropy": "metric", "temperature": 0.7},
        {"entropy": "grad", "temperature": torch.linspace(0.5, 2.0, 7, dtype=torch.float64), "chunk_rows": 3},
        {"entropy": "none", "rows": torch.tensor([5, 1, 1, 6])},
        {"entropy": "grad", "allowed": SETS},
        {
            "entropy": "none",
            "allowed": (*SETS, torch.tensor([True, False, True, True, True, True, False])),
        },
    ],
    ids=["lse", "metric", "row-temperature", "rows", "allowed", "allowed-some"],
)
def test_gradcheck(options):
    logits, tokens, _ = random_case(7, 13, torch.float64)
    rows = options.get("rows")

    def outputs(leaf):
        out = token_logprobs(leaf, tokens if rows is None else tokens[rows], **options)
        return tuple(t for t in out if t is not None and t.requires_grad)

    assert torch.autograd.gradcheck(outputs, (logits.requires_grad_(),))


@pytest.mark.parametrize(("n", "v"), [(41, 401), (1, 1271), (7, 1), (0, 11)])
@pytest.mark.parametrize("which", ["both", "logp", "entropy"])
def test_no_further_from_truth_than_plain_code(n, v, which):
    logits, tokens, upstream = random_case(n, v)
    truth = plain(logits, tokens, upstream, which, dtype=torch.float64)
    assert_no_further_than_plain(
        run(logits, tokens, upstream, which), plain(logits, tokens, upstream, which), truth
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_give_fp32_results(dtype):
    logits, tokens, upstream = random_case(41, 401, dtype)
    truth = plain(logits, tokens, upstream, dtype=torch.float64)
    candidate = run(logits, tokens, upstream)
    assert candidate[0].dtype == torch.float32 and candidate[2].dtype == dtype
    assert_no_further_than_plain(candidate, plain(logits, tokens, upstream), truth, k=3.0)
    # Values see no 16-bit rounding at all; the gradient is rounded once.
    torch.testing.assert_close(candidate[0].double(), truth[0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(candidate[2], truth[2].to(dtype), atol=1e-6, rtol=2 * torch.finfo(dtype).eps)


def test_logits_are_not_modified_and_may_have_any_strides():
    logits, tokens, upstream = random_case(11, 37)
    strided = torch.stack([logits.t(), logits.t()], -1)[..., 0].t()
    assert not strided.is_contiguous()
    before = strided.clone()
    expected = run(logits, tokens, upstream, temperature=0.5)
    for a, b in zip(expected, run(strided, tokens, upstream, temperature=0.5), strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-6)
    assert torch.equal(strided, before)


def test_rows_equal_selecting_first_and_leave_zero_gradient_elsewhere():
    logits, tokens, upstream = random_case(19, 53)
    rows = torch.tensor([17, 2, 3, 11])
    upstream = upstream[:, :4]
    expected = run(logits[rows], tokens[rows], upstream)
    for targets in (tokens[rows], tokens):
        logp, entropy, grad = run(logits, targets, upstream, rows=rows, chunk_rows=3)
        torch.testing.assert_close(logp, expected[0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(entropy, expected[1], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(grad[rows], expected[2], atol=1e-6, rtol=1e-6)
        others = torch.ones(19, dtype=torch.bool).index_fill_(0, rows, False)
        assert torch.equal(grad[others], torch.zeros(15, 53))


def test_empty_input_stays_in_the_graph():
    logits = torch.zeros(0, 9, requires_grad=True)
    out = token_logprobs(logits, torch.zeros(0, dtype=torch.int64), entropy="grad")
    assert out.logp.shape == out.entropy.shape == (0,)
    (out.logp.sum() + out.entropy.sum()).backward()
    assert logits.grad.shape == (0, 9)
    logits = torch.randn(4, 9, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    token_logprobs(logits, none, rows=none).logp.sum().backward()
    assert torch.equal(logits.grad, torch.zeros(4, 9))


def test_minus_infinity_never_makes_nan():
    logits = torch.randn(5, 8, dtype=torch.float32)
    logits[0, 2:5] = -torch.inf
    logits[1, :] = -torch.inf
    logits[2, 3] = -torch.inf
    logits[3] = torch.tensor([3e38, -3e38] * 4)
    tokens = torch.tensor([0, 1, 3, 0, 4])
    leaf = logits.requires_grad_()
    out = token_logprobs(leaf, tokens, entropy="grad")
    assert out.logp[1] == -torch.inf and out.logp[2] == -torch.inf and out.entropy[1] == 0
    assert out.entropy.isfinite().all()
    upstream = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    for outputs, seeds in (([out.logp], [upstream]), ([out.logp, out.entropy], [upstream, torch.ones(5)])):
        (grad,) = torch.autograd.grad(outputs, leaf, seeds, retain_graph=True)
        assert grad.isfinite().all()
        assert torch.equal(grad[1], torch.zeros(8))
        assert torch.equal(grad[0, 2:5], torch.zeros(3))


def test_a_nan_logit_shows():
    logits = torch.randn(2, 5)
    logits[0, 1] = torch.nan
    out = token_logprobs(logits, torch.tensor([0, 0]), entropy="metric")
    assert out.logp[0].isnan() and out.entropy[0].isnan() and out.logp[1].isfinite()


def test_an_empty_keep_list_leaves_the_target_alone():
    logits, tokens, upstream = random_case(3, 7)
    keep = (torch.zeros(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    logp, _, grad = run(logits, tokens, upstream, "logp", allowed=keep)
    assert torch.equal(logp, torch.zeros(3)) and torch.equal(grad, torch.zeros(3, 7))


def test_a_restricted_softmax_has_its_own_maximum():
    logits = torch.tensor([[200.0, 1.0, 2.0, 3.0]])
    keep = (torch.tensor([1, 2]), torch.tensor([0, 2]))
    logp = token_logprobs(logits, torch.tensor([1]), allowed=keep).logp
    torch.testing.assert_close(logp, torch.log_softmax(logits[:, 1:3], -1)[:, 0])


def test_retain_graph_gives_the_same_gradient_twice():
    logits, tokens, _ = random_case(5, 9)
    leaf = logits.requires_grad_()
    loss = token_logprobs(leaf, tokens, entropy="grad").entropy.sum()
    first, second = (torch.autograd.grad(loss, leaf, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_second_derivatives_are_refused():
    logits, tokens, _ = random_case(5, 9)
    leaf = logits.requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(token_logprobs(leaf, tokens).logp.sum(), leaf, create_graph=True)


def test_reuse_buffer_writes_the_gradient_where_the_logits_were():
    logits, tokens, upstream = random_case(12, 31)
    expected = run(logits, tokens, upstream)[2]
    leaf = logits.clone().requires_grad_()
    logits = leaf * 1.0
    storage = logits.data_ptr()
    seen = []
    logits.register_hook(lambda grad: seen.append((grad.data_ptr(), grad.clone())))
    out = token_logprobs(logits, tokens, entropy="grad", reuse_buffer=True)
    torch.autograd.backward([out.logp, out.entropy], [u.float() for u in upstream], retain_graph=True)
    assert seen[0][0] == storage
    torch.testing.assert_close(leaf.grad, expected)
    with pytest.raises(RuntimeError, match="overwritten"):
        out.logp.sum().backward()


def unit_peak(n, v, step):
    """Highest allocation of `step`, in units of n x v fp32, with the input counted."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    live = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return 1.0 + peak / (n * v * 4)


@pytest.mark.parametrize("entropy", ["none", "grad"])
def test_memory_contract(entropy):
    n, v, chunk = 512, 1024, 16
    logits, tokens, _ = random_case(n, v)

    def loss_of(values, **options):
        out = token_logprobs(values, tokens, entropy=entropy, chunk_rows=chunk, **options)
        return out.logp.sum() + (out.entropy.sum() if entropy == "grad" else 0.0)

    def plain_step():
        leaf = logits.detach().requires_grad_()
        torch.autograd.grad(loss_of(leaf), leaf)

    scaled = logits.detach().requires_grad_() * 1.0

    def reusing_step():
        torch.autograd.grad(loss_of(scaled, reuse_buffer=True), scaled)

    def forward_step():
        with torch.no_grad():
            loss_of(logits)

    buffers = 3.2 * chunk / n
    assert unit_peak(n, v, plain_step) <= 2.0 + buffers
    assert unit_peak(n, v, reusing_step) <= 1.0 + buffers
    assert unit_peak(n, v, forward_step) <= 1.0 + buffers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3, 4, dtype=torch.int64)}, "logits: expected a floating-point"),
        ({"logits": torch.zeros(4)}, "logits: expected a floating-point"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, r"targets: expected \[3\], got \(2,\)"),
        ({"targets": torch.zeros(3)}, "targets: expected an int64"),
        ({"targets": torch.tensor([0, 4, 1])}, r"targets: expected ids in \[0, 4\), got 0 to 4"),
        ({"targets": torch.tensor([0, -100, 1])}, r"targets: expected ids in \[0, 4\)"),
        ({"entropy": "yes"}, "entropy: expected none, metric or grad"),
        ({"temperature": 0.0}, "temperature: expected a value > 0"),
        ({"temperature": torch.tensor([1.0, -1.0, 1.0])}, "temperature: expected values > 0"),
        ({"chunk_rows": -2}, "chunk_rows: expected at least 1"),
        ({"rows": torch.tensor([0.0])}, "rows: expected a one-dimensional int64"),
        ({"reuse_buffer": True}, "reuse_buffer: expected"),
        ({"allowed": (torch.tensor([9]), torch.tensor([0, 1, 1, 1]))}, "allowed ids: expected ids"),
        ({"allowed": (torch.tensor([1]), torch.tensor([0, 1]))}, "allowed: expected 4 offsets"),
        ({"allowed": (torch.tensor([1]), torch.tensor([0, 2, 1, 1]))}, "allowed: expected offsets that rise"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"logits": torch.randn(3, 4), "targets": torch.tensor([0, 1, 2]), **change}
    with pytest.raises(ValueError, match=message):
        token_logprobs(arguments.pop("logits"), arguments.pop("targets"), **arguments)
