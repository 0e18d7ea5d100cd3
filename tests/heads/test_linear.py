"""linear_logprobs against plain code in fp64, numerical derivatives, and its memory promise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanstep.heads import Head, LoRA, logprob, passes
from leanstep.heads import linear_logprobs as of_head
from leanstep.heads.reference import reference_linear_logprobs

T, D, V = 6, 3, 17
ROWS = torch.tensor([3, 1, 1, 5, 4])
KEEP = (
    torch.randint(0, V, (20,), generator=torch.Generator().manual_seed(1)),
    torch.tensor([0, 4, 4, 9, 12, 20]),
)
SOME = torch.tensor([True, False, True, True, False])


def linear_logprobs(hidden, weight, targets, *, bias=None, lora=None, scale=1.0, softcap=None, **options):
    return of_head(hidden, Head(weight, bias, lora, scale, softcap), targets, **options)


def tensors(dtype=torch.float64, t=T, d=D, v=V, seed=0):
    g = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return make(t, d), make(v, d), make(v)


@pytest.mark.parametrize(
    "options",
    [
        {"entropy": "grad"},
        {"entropy": "grad", "rows": ROWS, "temperature": "rows", "scale": 0.7, "chunk_rows": 2},
        {"entropy": "grad", "rows": ROWS, "softcap": 2.0, "temperature": 0.8, "scale": 1.3},
        {"entropy": "metric", "softcap": 2.0, "temperature": "rows"},
        {"entropy": "none", "vocab_total": 13},
        {"entropy": "grad", "lora": True, "scale": 1.3, "chunk_rows": 4},
        {"entropy": "grad", "allowed": KEEP, "rows": ROWS},
        {"entropy": "metric", "allowed": (*KEEP, SOME), "rows": ROWS, "temperature": 0.5, "chunk_rows": 2},
        {"entropy": "none", "allowed": (*KEEP, SOME), "rows": ROWS, "softcap": 2.0, "scale": 0.7},
    ],
    ids="plain rows softcap metric padded lora allowed allowed-metric allowed-some".split(),
)
def test_gradcheck(options, tiles):
    options = dict(options)
    hidden, weight, bias = (x.requires_grad_() for x in tensors())
    selected = len(options.get("rows", range(T)))
    tokens = torch.randint(0, 13, (selected,))
    if options.get("temperature") == "rows":
        options["temperature"] = torch.linspace(0.5, 1.5, selected, dtype=torch.float64)
    inputs = [hidden, weight, bias]
    lora = options.pop("lora", False)
    if lora:
        g = torch.Generator().manual_seed(3)
        inputs += [
            torch.randn(*s, generator=g, dtype=torch.float64, requires_grad=True) for s in ((2, D), (V, 2))
        ]

    def outputs(h, w, b, *low):
        more = {"lora": LoRA(*low, 0.5)} if lora else {}
        out = linear_logprobs(h, w, tokens, bias=b, **options, **more)
        return tuple(x for x in out if isinstance(x, torch.Tensor) and x.requires_grad)

    assert torch.autograd.gradcheck(outputs, inputs)


@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias"])
def test_only_wanted_gradients(wanted):
    """Gradients with the other two frozen equal those with everything trained."""
    tokens = torch.randint(0, V, (T,))
    grads = []
    for alone in (False, True):
        names = dict(zip(("hidden", "weight", "bias"), tensors(), strict=True))
        for name, x in names.items():
            x.requires_grad_(not alone or name == wanted)
        out = linear_logprobs(names["hidden"], names["weight"], tokens, bias=names["bias"], entropy="grad")
        (out.logp.sum() + 0.3 * out.entropy.square().sum()).backward()
        if alone:
            assert [n for n, x in names.items() if x.grad is not None] == [wanted]
        grads.append(names[wanted].grad)
    torch.testing.assert_close(*grads, atol=1e-12, rtol=1e-12)


def run(function, hidden, weight, tokens, upstream, dtype, **options):
    h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
    out = function(h, w, tokens, **options)
    logp, entropy = out[0], out[1]
    grads = torch.autograd.grad([logp, entropy], [h, w], [u.to(logp.dtype) for u in upstream])
    return logp.detach(), entropy.detach(), *grads


@pytest.mark.parametrize(("t", "d", "v"), [(41, 41, 401), (1, 3, 1271), (17, 1, 5), (33, 8, 1)])
@pytest.mark.parametrize(
    ("dtype", "k", "floor"), [(torch.float32, 2, 5e-7), (torch.bfloat16, 3, 8e-3), (torch.float16, 3, 1e-3)]
)
def test_no_further_from_truth_than_plain_code(t, d, v, dtype, k, floor, tiles):
    hidden, weight, _ = tensors(dtype, t, d, v)
    tokens, upstream = torch.randint(0, v, (t,)), torch.randn(2, t, dtype=torch.float64)
    truth = run(reference_linear_logprobs, hidden, weight, tokens, upstream, torch.float64)
    plain = run(reference_linear_logprobs, hidden, weight, tokens, upstream, dtype)
    fast = run(linear_logprobs, hidden, weight, tokens, upstream, dtype, entropy="grad")
    assert fast[0].dtype == torch.float32 and fast[2].dtype == dtype
    for f, p, x in zip(fast, plain, truth, strict=True):
        scale = float(x.abs().max().clamp(min=1e-3))
        assert float((f.double() - x).abs().max()) <= k * float((p.double() - x).abs().max()) + floor * scale


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 12),
    vocab=st.integers(1, 40),
    size=st.integers(1, 60),
    chunk_rows=st.sampled_from([None, 1, 5]),
    select=st.booleans(),
)
def test_tiles_do_not_matter(rows, vocab, size, chunk_rows, select):
    g = torch.Generator().manual_seed(rows * 41 + vocab)
    hidden = torch.randn(rows, 3, generator=g, dtype=torch.float64)
    weight = torch.randn(vocab, 3, generator=g, dtype=torch.float64)
    index = torch.randint(0, rows, (max(rows // 2, 1),), generator=g) if select and rows else None
    selected = rows if index is None else len(index)
    tokens = torch.randint(0, vocab, (selected,), generator=g)
    upstream = torch.randn(2, selected, generator=g, dtype=torch.float64)
    expected = run(reference_linear_logprobs, hidden, weight, tokens, upstream, torch.float64, rows=index)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprob, "CPU_TILE_BYTES", 4 * size)
        patch.setattr(logprob, "COLUMN_BLOCK", 1)
        actual = run(
            linear_logprobs, hidden, weight, tokens, upstream, torch.float64, rows=index, entropy="grad",
            chunk_rows=chunk_rows,
        )  # fmt: skip
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_strided_inputs():
    hidden, weight, _ = tensors(torch.float32, 12, 6, 30)
    tokens, upstream = torch.randint(0, 30, (12,)), torch.randn(2, 12)
    expected = run(linear_logprobs, hidden, weight, tokens, upstream, torch.float32, entropy="grad")
    strided = torch.stack([hidden, hidden], 1)[:, 1], weight.t().contiguous().t()
    assert not any(x.is_contiguous() for x in strided)
    actual = run(linear_logprobs, *strided, tokens, upstream, torch.float32, entropy="grad")
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-6)


def test_no_selected_rows_stay_in_the_graph():
    hidden, weight, bias = (x.requires_grad_() for x in tensors(torch.float32))
    none = torch.zeros(0, dtype=torch.int64)
    out = linear_logprobs(hidden, weight, none, bias=bias, rows=none, entropy="grad")
    assert out.logp.requires_grad and out.entropy.requires_grad and out.logp.shape == (0,)
    (out.logp.sum() + out.entropy.sum()).backward()
    for x in (hidden, weight, bias):
        assert torch.equal(x.grad, torch.zeros_like(x))


def test_autocast_does_not_lower_precision():
    hidden, weight, _ = tensors(torch.float32, 12, 16, 40)
    tokens, upstream = torch.randint(0, 40, (12,)), torch.randn(2, 12)
    expected = run(linear_logprobs, hidden, weight, tokens, upstream, torch.float32, entropy="grad")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(linear_logprobs, hidden, weight, tokens, upstream, torch.float32, entropy="grad")
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_mixed_dtypes_return_gradients_in_kind():
    hidden, weight, _ = tensors(torch.float32)
    h, w = hidden.bfloat16().requires_grad_(), weight.requires_grad_()
    linear_logprobs(h, w, torch.randint(0, V, (T,))).logp.sum().backward()
    assert h.grad.dtype == torch.bfloat16 and w.grad.dtype == torch.float32


def test_memory_holds_one_tile_and_no_full_logits(monkeypatch):
    from torch.profiler import ProfilerActivity, profile

    t, d, v, size = 256, 32, 8192, 64 * 512
    monkeypatch.setattr(logprob, "CPU_TILE_BYTES", 4 * size)
    monkeypatch.setattr(passes, "NATIVE_LOGITS", 1 << 60)
    hidden, weight, _ = tensors(torch.float32, t, d, v)
    tokens, rows = torch.randint(0, v, (128,)), torch.arange(0, t, 2)

    def step():
        h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        out = linear_logprobs(h, w, tokens, rows=rows, entropy="grad")
        return torch.autograd.grad(out.logp.sum() + out.entropy.sum(), [h, w])

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    live = peak = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    returned = 4 * (t * d + v * d)
    # The torch passes need two more tiles; selected rows and their gradient; a table per tile of columns.
    allowed = 4 * 4 * size + 2 * 4 * 128 * d + 5 * 4 * 128 * (v // 256) + 60 * 4 * 128
    assert peak <= 1.1 * (returned + allowed)
    assert peak - returned < 4 * t * v / 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4)}, "hidden: expected a floating-point tensor with 2"),
        ({"weight": torch.zeros(7, 3)}, r"head.weight: expected \[V, 4\] to match hidden, got \(7, 3\)"),
        ({"weight": torch.nn.Embedding(7, 4)}, "head: expected nn.Linear or a LoRA layer"),
        ({"bias": torch.zeros(3)}, r"head.bias: expected \[7\]"),
        (
            {"lora": LoRA(torch.zeros(2, 4), torch.zeros(2, 7))},
            r"head.lora: expected down \[r, 4\] and up \[7, r\]",
        ),
        ({"targets": torch.tensor([0, 7, 1])}, r"targets: expected ids in \[0, 7\)"),
        ({"targets": torch.tensor([0, -1, 1])}, r"targets: expected ids in \[0, 7\)"),
        ({"targets": torch.tensor([0, 1])}, r"targets: expected \[3\]"),
        ({"rows": torch.tensor([0.5])}, "rows: expected a one-dimensional int64"),
        ({"rows": torch.zeros(3).long().to("meta")}, "rows: expected device cpu, got meta"),
        ({"weight": torch.zeros(7, 4, device="meta")}, "head.weight: expected device cpu"),
        ({"rows": torch.tensor([0, 1, 3])}, r"rows: expected ids in \[0, 3\), got 0 to 3"),
        ({"rows": torch.tensor([0, 1, -1])}, r"rows: expected ids in \[0, 3\), got -1 to 1"),
        (
            {"hidden": torch.zeros(3, 4).to(torch.float8_e4m3fn)},
            "hidden: expected a dense tensor of at least",
        ),
        (
            {"weight": torch.zeros(7, 4).to_sparse()},
            "head.weight: expected a dense tensor",
        ),
        ({"softcap": 1e-45}, "head.softcap: expected a value > 0"),
        ({"softcap": float("inf")}, "head.softcap: expected a value > 0"),
        ({"scale": float("nan")}, "head.scale: expected a finite number > 0"),
        ({"scale": -1.0}, "head.scale: expected a finite number > 0"),
        ({"temperature": 1e-45}, "temperature: expected a value > 0"),
        ({"temperature": torch.ones(3, requires_grad=True)}, "temperature: expected a float or"),
        ({"temperature": torch.tensor([1.0, 0.0, 1.0])}, "temperature: expected values > 0"),
        ({"chunk_rows": 0}, "chunk_rows: expected at least 1"),
        ({"vocab_total": 8}, "vocab_total: expected 1 to 7 columns"),
        ({"entropy": True}, "entropy: expected none, metric or grad"),
        ({"allowed": KEEP}, "allowed: expected 4 offsets"),
        ({"allowed": KEEP[:1]}, r"allowed: expected \(ids, offsets\) or .* got 1 values"),
        ({"allowed": (KEEP[0].float(), KEEP[1])}, "allowed: expected one-dimensional int ids"),
        ({"allowed": (KEEP[0], KEEP[1][[0, 1, 2, 5]], SOME)}, r"allowed: expected has_set bool \[3\]"),
        ({"main_grad": torch.zeros(6, 4)}, r"main_grad: expected shape \(7, 4\)"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {
        "hidden": torch.randn(3, 4),
        "weight": torch.randn(7, 4),
        "targets": torch.tensor([0, 1, 2]),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        linear_logprobs(**arguments)


def test_a_second_backward_recomputes_the_logits_that_were_in_the_gradients_memory():
    hidden, weight, _ = (x.requires_grad_() for x in tensors(torch.float32, 24, 32, 300))
    loss = linear_logprobs(hidden, weight, torch.randint(0, 300, (24,)), entropy="grad").logp.sum()
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="no second derivatives"):
        loss = linear_logprobs(hidden, weight, torch.randint(0, 300, (24,))).logp.sum()
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_selected_may_hold_anything(bad):
    hidden, weight, _ = tensors(torch.float32)
    hidden[[0, 2]] = bad
    h, w = hidden.requires_grad_(), weight.requires_grad_()
    out = linear_logprobs(h, w, torch.tensor([0, 1, 2, 3, 4]), rows=ROWS, entropy="grad")
    (out.logp.sum() + out.entropy.sum()).backward()
    assert out.logp.isfinite().all() and w.grad.isfinite().all()
    assert not h.grad[[0, 2]].any() and (h.grad[ROWS].abs() > 0).all() and h.grad.isfinite().all()


def test_large_offsets_and_minus_infinity_are_exact(tiles):
    """The bias sets the logits: they may be -inf, and a sum of 1e6 and a log-sum would lose digits."""
    inf = torch.inf
    for row, target in (
        ([1e6, 1e6 - 0.5, -1e6, 1e6 - 1, 0.0], 1),
        ([1.0, -inf, 2.0, 3.0, -inf], 0),
        ([-inf] * 5, 2),
    ):
        for dtype in (torch.float32, torch.float64):
            bias = torch.tensor(row, dtype=dtype, requires_grad=True)
            zero = torch.zeros(1, 5, dtype=dtype)
            out = linear_logprobs(
                zero, torch.eye(5, dtype=dtype), torch.tensor([target]), bias=bias, entropy="grad"
            )
            (2 * out.logp.sum() + out.entropy.sum()).backward()
            z = bias.detach().double()
            log_p = torch.log_softmax(z, 0)
            p, finite = log_p.exp(), log_p.masked_fill(log_p == -inf, 0)
            entropy = -(p * finite).sum()
            expected = 2 * (torch.eye(5)[target].double() - p) - p * (finite + entropy)
            if (z == -inf).all():
                assert out.logp == -inf and out.entropy == 0 and out.lse == -inf and not bias.grad.any()
                continue
            for got, want in ((out.logp[0], log_p[target]), (out.entropy[0], entropy), (bias.grad, expected)):
                torch.testing.assert_close(got.detach().double(), want, rtol=2e-6, atol=2e-6)
            assert out.argmax[0] == z.argmax()


# torch's own, where a graph begins with a tensor that another one made.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_step_gives_the_numbers_of_eager_for_any_number_of_rows():
    _, weight, _ = tensors(torch.float32)
    weight.requires_grad_()

    def step(h, targets):
        return linear_logprobs(h * 2, weight, targets).logp.sum() * 3

    compiled = torch.compile(step, backend="aot_eager")
    for rows in (3, 5, 7):
        hidden, targets = torch.randn(rows, D), torch.randint(0, V, (rows,))
        ours, eager = (torch.autograd.grad(f(hidden, targets), weight)[0] for f in (compiled, step))
        torch.testing.assert_close(ours, eager)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="remove fullgraph=True"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(hidden, targets)


def test_checkpointing_recomputes_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    hidden, weight, _ = (x.requires_grad_() for x in tensors(torch.float32, 12, 16, 40))
    targets = torch.randint(0, 40, (12,))
    step = lambda h, w: linear_logprobs(h * 2, w, targets, entropy="grad").entropy.sum()  # noqa: E731
    plain = torch.autograd.grad(step(hidden, weight), (hidden, weight))
    saved = torch.autograd.grad(checkpoint(step, hidden, weight, use_reentrant=False), (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(plain, saved, strict=True))


def test_a_reducer_that_waits_for_the_weight_hears_of_main_grad():
    """Megatron's hook runs when a gradient arrives, and adds it unless the mark is set."""
    weight = torch.nn.Parameter(torch.randn(23, 5))
    weight.grad_added_to_main_grad = False
    main_grad, ready = torch.ones(23, 5), []

    def hook(parameter):
        ready.append(parameter.grad_added_to_main_grad)
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(hook)
    hidden, targets = torch.randn(4, 5), torch.randint(0, 23, (4,))
    linear_logprobs(hidden, weight, targets, main_grad=main_grad).logp.sum().backward()
    assert ready == [True] and weight.grad is None
    plain = weight.detach().clone().requires_grad_()
    linear_logprobs(hidden, plain, targets).logp.sum().backward()
    torch.testing.assert_close(main_grad, 1 + plain.grad)


def test_a_shared_embeddings_own_gradient_survives_main_grad():
    """Megatron sets zero_out_wgrad on it: its hook then adds the gradient despite the mark."""
    weight = torch.nn.Parameter(torch.randn(23, 5))
    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, True
    main_grad = torch.zeros(23, 5)
    ids, targets = torch.randint(0, 23, (4,)), torch.randint(0, 23, (4,))
    linear_logprobs(weight[ids], weight, targets, main_grad=main_grad).logp.sum().backward()
    plain = weight.detach().clone().requires_grad_()
    linear_logprobs(plain[ids], plain, targets).logp.sum().backward()
    torch.testing.assert_close(main_grad + weight.grad, plain.grad)


@pytest.mark.parametrize("entropy", ["none", "grad"])
@pytest.mark.parametrize("frozen", [False, True])
def test_slope_of_a_saturated_softcap_is_as_exact_as_plain_code(entropy, frozen):
    # Logits of 3 to 9 times the cap: 1 - tanh^2 is a few units in the last place of 1.
    cap, g = 2.0, torch.Generator().manual_seed(0)
    hidden = torch.linspace(3 * cap, 9 * cap, 600)[:, None]
    weight, targets = torch.tensor([[1.0], [-1.0], [0.9]]), torch.randint(3, (600,), generator=g)

    def gradients(dtype, fast):
        h, w = (t.to(dtype).requires_grad_() for t in (hidden, weight))
        w = w.detach() if frozen else w
        if fast:
            out = linear_logprobs(h, w, targets, softcap=cap, temperature=0.7, entropy=entropy)
            logp, entropies = out.logp, out.entropy
        else:
            logp, entropies = reference_linear_logprobs(h, w, targets, softcap=cap, temperature=0.7)
        loss = logp.sum() if entropy == "none" else logp.sum() + 0.3 * entropies.sum()
        return torch.autograd.grad(loss, [h] if frozen else [h, w])

    # Row by row: each has a slope of its own.
    for truth, plain, ours in zip(
        gradients(torch.float64, False), gradients(torch.float32, False), gradients(torch.float32, True),
        strict=True,
    ):  # fmt: skip
        size = truth.abs().clamp(min=1e-12)
        own, error = ((plain - truth).abs() / size).mean(), ((ours - truth).abs() / size).mean()
        assert error <= 1.5 * own


def test_a_16_bit_weight_gradient_is_rounded_once_for_any_number_of_blocks(monkeypatch):
    hidden, weight, _ = tensors(torch.bfloat16, 2048, 512, 64)
    targets = torch.arange(2048) % 64

    def gradient(block_rows: int, dtype: torch.dtype) -> torch.Tensor:
        monkeypatch.setattr(logprob, "CPU_BLOCK_ROWS", block_rows)
        h, w = hidden.to(dtype), weight.to(dtype, copy=True).requires_grad_()
        linear_logprobs(h, w, targets, temperature=8.0).logp.sum().backward()
        assert w.grad is not None
        return w.grad.double()

    exact = gradient(4096, torch.float64)
    one, several = ((gradient(n, torch.bfloat16) - exact).norm() for n in (4096, 256))
    assert several <= 1.05 * one
