"""The GPU code path end to end on a CPU: tiles, padding and products, with Triton in its interpreter."""

from __future__ import annotations

import types

import pytest
import torch
from logprob.flat import linear_logprobs, linear_policy_loss, token_logprobs

pytest.importorskip("triton")

from leanstep.logprob import (
    Allowed,
    LMHead,
    PolicyBatch,
    PolicyObjective,
    ReferenceHead,
    Transform,
    Tuning,
    policy_loss,
)
from leanstep.logprob import linear_logprobs as unflattened
from leanstep.logprob import linear_policy_loss as policy_of_rows
from leanstep.logprob.engine import invariant, kernel, lm_head, passes, tiles
from leanstep.logprob.engine.gpu import gpu_tiles
from leanstep.logprob.engine.gpu import kernel as gpu_kernel
from leanstep.logprob.engine.invariant import GPU_COLUMNS, RowBlocks
from leanstep.logprob.engine.softmax import RowStatistics
from leanstep.logprob.engine.tiles import Tiles, choose_tiles, row_stride, tile_slices
from leanstep.logprob.parallel import VocabShard
from leanstep.objectives import TeacherHead, linear_distill_loss, linear_masked_logprobs

pytestmark = pytest.mark.interpreter

MIB = 1 << 20
# 157 and 41 columns are no multiple of 8: the last tile is padded.
T, V, D = 13, 157, 24


@pytest.fixture
def gpu_route(monkeypatch):
    """Make CPU tensors take the GPU code path."""
    monkeypatch.setattr(tiles, "CPU_TYPES", ())
    monkeypatch.setattr(passes, "launches_triton", lambda tensor: tensor.dtype != torch.float64)


def inputs(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, D, generator=generator).to(dtype)
    weight = (torch.randn(V, D, generator=generator) / 2).to(dtype)
    bias = torch.randn(V, generator=generator).to(dtype)
    targets = torch.randint(0, V, (T,), generator=generator)
    return hidden, weight, bias, targets, torch.randn(2, T, generator=generator)


def plain(hidden, weight, bias, targets, *, scale=1.0, softcap=None, temperature=1.0, rows=None):
    hidden = hidden if rows is None else hidden.index_select(0, rows)
    z = torch.nn.functional.linear(hidden, weight, bias) * scale
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.unsqueeze(-1).to(z.dtype)
    wide = torch.float64 if z.dtype == torch.float64 else torch.float32
    log_p = torch.log_softmax((z / temperature).to(wide), -1)
    logp = log_p.gather(1, targets[:, None])[:, 0]
    return logp, -(log_p.exp() * log_p).sum(-1)


def with_gradients(function, leaves, upstream):
    inputs = [None if t is None else t.detach().clone().requires_grad_() for t in leaves]
    out = [value for value in function(*inputs) if value is not None]
    upstream = [g.to(value.dtype) for g, value in zip(upstream, out, strict=False)]
    wanted = [t for t in inputs if t is not None]
    return [*(v.detach() for v in out), *torch.autograd.grad(out, wanted, upstream)]


def assert_as_good_as_plain(actual, plainly, truth, floor):
    """At most three times as far from fp64 as the plain code in the same dtype."""
    assert len(actual) == len(plainly) == len(truth)
    for f, p, x in zip(actual, plainly, truth, strict=True):
        assert f.isfinite().all()
        scale = float(x.abs().max())
        error, other = (float((v.double() - x).abs().max()) for v in (f, p))
        assert error <= 3 * other + floor * scale, (error, other, scale)


SMALL, ROW_CHUNK = Tiles(4, 64, "vocab"), Tiles(16, 41, "vocab")
OPTIONS = {
    "plain": (SMALL, False, {}),
    "one row chunk": (ROW_CHUNK, False, {}),
    "own choice": (None, True, {}),
    "rows": (SMALL, True, {"rows": torch.tensor([1, 5, 5, 9])}),
    "few rows, logits in dW": (None, False, {"rows": torch.tensor([1, 5, 9, 2, 12, 0])}),
    "temperature": (ROW_CHUNK, True, {"temperature": 0.7}),
    "temperatures": (SMALL, False, {"temperature": torch.linspace(0.5, 2.0, T)}),
    "softcap": (ROW_CHUNK, False, {"softcap": 3.0, "scale": 1.5, "temperature": 0.8}),
    "all": (SMALL, True, {"softcap": 3.0, "temperature": torch.linspace(0.5, 2.0, T)}),
}


@pytest.mark.parametrize(("name", "dtype"), [*((n, torch.bfloat16) for n in OPTIONS), ("all", torch.float32)])
def test_linear_logprobs(name, dtype, gpu_route):
    hidden, weight, bias, targets, upstream = inputs(dtype)
    tile, with_bias, options = OPTIONS[name]
    rows = options.get("rows")
    targets = targets if rows is None else targets[: len(rows)]
    upstream = upstream if rows is None else upstream[:, : len(rows)]
    leaves = (hidden, weight, bias if with_bias else None)

    def fast(h, w, b):
        out = linear_logprobs(h, w, targets, bias=b, entropy="grad", tile=tile, **options)
        return out.logp, out.entropy

    def slow(h, w, b):
        return plain(h, w, b, targets, **options)

    truth = with_gradients(slow, [None if t is None else t.double() for t in leaves], upstream)
    actual, plainly = with_gradients(fast, leaves, upstream), with_gradients(slow, leaves, upstream)
    assert_as_good_as_plain(actual, plainly, truth, 1e-3 if dtype == torch.bfloat16 else 2e-6)


@pytest.mark.parametrize("name", ["all", "few rows, logits in dW"])
def test_rounded_logits_are_as_good_as_a_16_bit_head(name, gpu_route):
    tile, with_bias, options = OPTIONS[name]
    hidden, weight, bias, targets, upstream = inputs(torch.bfloat16)
    rows = options.get("rows")
    targets = targets if rows is None else targets[: len(rows)]
    upstream = upstream if rows is None else upstream[:, : len(rows)]
    leaves = (hidden, weight, bias if with_bias else None)

    def fast(h, w, b, round_logits=True):
        tuning = Tuning(tile=tile, round_logits=round_logits)
        transform = Transform(softcap=options.get("softcap"))
        more = {k: v for k, v in options.items() if k in ("rows", "temperature")}
        out = unflattened(
            h, LMHead(w, b), targets, entropy="grad", transform=transform, tuning=tuning, **more
        )
        return out.logp, out.entropy

    def slow(h, w, b):
        return plain(h, w, b, targets, **options)

    truth = with_gradients(slow, [None if t is None else t.double() for t in leaves], upstream)
    actual, plainly = with_gradients(fast, leaves, upstream), with_gradients(slow, leaves, upstream)
    assert_as_good_as_plain(actual, plainly, truth, 4e-3)
    exact = fast(*leaves, round_logits=False)[0].double()
    assert (exact - truth[0]).abs().max() < (actual[0].double() - truth[0]).abs().max()


@pytest.mark.parametrize("entropy", ["none", "metric", "grad"])
def test_frozen_head(entropy, gpu_route, monkeypatch):
    """2 GEMMs by chunks of rows without an entropy gradient, 3 by tiles with one."""
    monkeypatch.setattr(gpu_tiles, "GPU_CHUNK_BYTES", 5 * 160 * 4)
    hidden, weight, bias, targets, upstream = inputs(torch.bfloat16)
    rows = torch.tensor([1, 5, 5, 9, 0, 12, 3])
    targets, upstream = targets[:7], upstream[:, :7]
    options = {"rows": rows, "temperature": 0.8, "softcap": 4.0}

    def fast(h):
        out = linear_logprobs(h, weight, targets, bias=bias, entropy=entropy, **options)
        assert (out.entropy is not None) == (entropy != "none")
        return out.logp, out.entropy if entropy == "grad" else None

    def slow(h):
        w, b = weight.to(h.dtype), bias.to(h.dtype)
        return plain(h, w, b, targets, **options)[: 2 if entropy == "grad" else 1]

    truth = with_gradients(slow, [hidden.double()], upstream)
    actual, plainly = with_gradients(fast, [hidden], upstream), with_gradients(slow, [hidden], upstream)
    assert_as_good_as_plain(actual, plainly, truth, 1e-3)


@pytest.mark.parametrize(("dtype", "chunk"), [(torch.bfloat16, 5), (torch.bfloat16, 99), (torch.float16, 4)])
@pytest.mark.parametrize("trained", ["with bias", "no bias"])
def test_policy_loss(dtype, chunk, trained, gpu_route, monkeypatch):
    monkeypatch.setattr(gpu_tiles, "GPU_CHUNK_BYTES", chunk * 160 * 4)
    hidden, weight, bias, targets, upstream = inputs(dtype)
    objective = PolicyObjective(entropy_coef=0.01, kl_coef=0.04)
    logp = plain(hidden.double(), weight.double(), bias.double(), targets)[0]
    data = {"old_logp": logp.float() + 0.2 * upstream[0], "ref_logp": logp.float() + 0.1 * upstream[1]}
    data["advantages"] = upstream[1]

    def fast(h, w, b=bias):
        out = linear_policy_loss(h, w, targets, bias=b, objective=objective, **data)
        # A mean over as many rows as a large batch has: fp16 gradients would vanish below 6e-8.
        return (out.loss / 4096,)

    def slow(h, w, b=bias):
        logp, entropy = plain(h, w, b.to(h.dtype), targets)
        own = {name: value.to(logp.dtype) for name, value in data.items()}
        old, advantages = own["old_logp"], own["advantages"]
        actual = policy_loss(
            logp, old, advantages, entropy=entropy, ref_logp=own["ref_logp"], objective=objective
        )
        return (actual.loss / 4096,)

    leaves, one = (hidden, weight, bias)[: 3 if trained == "with bias" else 2], [torch.tensor(4096.0)]
    truth = with_gradients(slow, [t.double() for t in leaves], one)
    actual, plainly = with_gradients(fast, leaves, one), with_gradients(slow, leaves, one)
    assert_as_good_as_plain(actual, plainly, truth, 1e-3)


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.linspace(0.5, 2.0, 7)])
@pytest.mark.parametrize("selected", [True, False])
def test_token_logprobs_of_16_bit_logits(selected, temperature, gpu_route, monkeypatch):
    counts, (hidden, weight, _, targets, upstream) = counted(monkeypatch), inputs(torch.bfloat16)
    logits = (hidden @ weight.t())[:7].contiguous()
    rows = torch.tensor([6, 0, 2, 2, 3, 1, 4]) if selected else None
    targets, upstream = targets[:7], upstream[:, :7]

    def fast(z):
        out = token_logprobs(z, targets, rows=rows, entropy="grad", temperature=temperature)
        return out.logp, out.entropy

    def slow(z):
        z = z if rows is None else z.index_select(0, rows)
        t = temperature.unsqueeze(-1) if isinstance(temperature, torch.Tensor) else temperature
        log_p = torch.log_softmax((z if z.dtype == torch.float64 else z.float()) / t, -1)
        return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    truth = with_gradients(slow, [logits.double()], upstream)
    actual, plainly = with_gradients(fast, [logits], upstream), with_gradients(slow, [logits], upstream)
    # The interpreter cuts a 16-bit store off where a GPU rounds it.
    assert_as_good_as_plain(actual, plainly, truth, 1e-3)
    assert actual[-1].dtype == torch.bfloat16
    assert counts == {"update_statistics": 1, "scale_exponentials": 1}


def counted(monkeypatch):
    """Count how often each kernel runs."""
    counts = {"update_statistics": 0, "scale_exponentials": 0}
    for name in counts:
        run = getattr(kernel, name)

        def once(*args, run=run, name=name, **kwargs):
            counts[name] += 1
            return run(*args, **kwargs)

        monkeypatch.setattr(kernel, name, once)
    return counts


def test_what_finishes_a_logit_costs_no_pass_of_its_own(gpu_route, monkeypatch):
    """With bias, softcap and temperatures, only two products and two kernels read the tile."""
    counts = counted(monkeypatch)
    seen, inside, multiply = [], [], lm_head.product

    def product(*args, **kwargs):
        # What stands for addmm here takes several steps.
        inside.append(True)
        try:
            return multiply(*args, **kwargs)
        finally:
            inside.pop()

    monkeypatch.setattr(lm_head, "product", product)

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            tensors = [t for t in args if isinstance(t, torch.Tensor) and tuple(t.shape) == (T, 64)]
            if tensors and not inside and getattr(function, "__name__", "") not in FREE:
                seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    hidden, weight, bias, targets, _ = inputs(torch.bfloat16)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    options = {"softcap": 3.0, "temperature": torch.linspace(0.5, 2.0, T), "tile": Tiles(T, 64, "vocab")}
    with Watch():
        out = linear_logprobs(
            leaves[0], leaves[1], targets, bias=leaves[2], entropy="grad", save_logits="none", **options
        )
        (out.logp.sum() + out.entropy.sum()).backward()
    assert counts == {"update_statistics": 3, "scale_exponentials": 3}
    assert not seen


# Looks at shapes only, or reads through the interpreter's pointers.
FREE = {
    *("__get__", "data_ptr", "stride", "size", "dim", "element_size", "as_strided", "view", "t"),
    *("to", "__getitem__", "detach", "is_contiguous", "numel", "__len__", "untyped_storage"),
    *("storage_offset", "poisoned"),  # poisoned: an allocation, see conftest.py
}


def test_autocast_chooses_the_operands_as_linear_would(gpu_route):
    hidden, weight, _, targets, upstream = inputs(torch.float32)
    seen = []

    def fast(h, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = linear_logprobs(h, w, targets, entropy="grad", tile=Tiles(5, 64, "vocab"))
        return out.logp, out.entropy

    def slow(h, w):
        seen.append(h.dtype)
        if h.dtype == torch.float64:
            return plain(h, w, None, targets)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain(h, w, None, targets)

    leaves = (hidden, weight)
    truth = with_gradients(slow, [t.double() for t in leaves], upstream)
    actual, plainly = with_gradients(fast, leaves, upstream), with_gradients(slow, leaves, upstream)
    assert [f.dtype for f in actual] == [torch.float32] * 4
    assert_as_good_as_plain(actual, plainly, truth, 1e-3)
    # Rounded to bf16 they are another product than in fp32.
    exact = linear_logprobs(hidden, weight, targets, tile=Tiles(5, 64, "vocab")).logp
    assert not torch.equal(actual[0], exact)


@pytest.mark.parametrize(
    ("rows", "vocab", "width"),
    [(51_320, 76_032, 2_560), (51_320, 151_936, 4_096), (1_024, 151_936, 4_096), (8_192, 50_257, 768)],
)
def test_tiles_of_a_gpu_are_aligned_tall_and_fixed(rows, vocab, width):
    tiles = choose_tiles(rows, vocab, width, device="meta", kernels=True)
    assert tiles == choose_tiles(rows, vocab, width, device="meta", kernels=True)
    assert tiles.order == "vocab" and tiles.columns % 128 == 0
    assert tiles.rows == rows or tiles.rows % 128 == 0
    several = tiles.rows < rows
    assert 4 * (tiles.rows + several * width) * tiles.columns <= 544 * MIB
    heights = [part.stop - part.start for part in tile_slices(rows, tiles.rows, "meta")]
    widths = [part.stop - part.start for part in tile_slices(vocab, tiles.columns, "meta")]
    # Sums over rows (dW) and over columns (d hidden) have a thousand terms or all there are.
    assert min(heights) >= min(1_024, rows) and min(widths) >= 1_024
    assert all(width % 128 == 0 for width in widths[:-1])
    assert row_stride(widths[-1], "meta") % 8 == 0


def test_the_budget_of_a_gpu_is_no_share_of_its_free_memory(monkeypatch):
    def asked(*_):
        raise AssertionError("asked for free memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", asked)
    assert tiles.default_budget("cuda") == 544 * MIB


class TestProducts:
    """How 16-bit operands are multiplied into fp32 sums, depending on what this torch supports."""

    def product(self, monkeypatch, works):
        def addmm(sums, a, b, *, out_dtype, out, beta=1.0, alpha=1.0):
            if works != "addmm":
                raise RuntimeError("self and mat2 must have the same dtype")
            assert sums is out and out_dtype == out.dtype
            fresh = alpha * (a.float() @ b.float())
            return out.copy_(beta * out + fresh if beta else fresh)

        def mm(a, b, out_dtype=None):
            if out_dtype is not None and works == "widen":
                raise TypeError("unexpected keyword argument 'out_dtype'")
            return torch.matmul(a.to(out_dtype or a.dtype), b.to(out_dtype or b.dtype))

        fake = types.SimpleNamespace(
            addmm=addmm, mm=mm, ones=torch.ones, zeros=torch.zeros, float32=torch.float32
        )
        monkeypatch.setattr(passes, "torch", fake)
        monkeypatch.setattr(lm_head, "torch", fake)
        passes.mixed_product.cache_clear()
        assert passes.mixed_product(torch.bfloat16, torch.float32, torch.device("cpu")) == works

    @pytest.mark.parametrize("works", ["addmm", "mm", "widen"])
    def test_sums(self, monkeypatch, works):
        a, b = torch.randn(5, 7).bfloat16(), torch.randn(7, 3).bfloat16()
        start = torch.randn(5, 3)
        self.product(monkeypatch, works)
        try:
            for accumulate in (False, True):
                out = start.clone()
                lm_head.product(a, b, out, factor=0.5, accumulate=accumulate)
                expected = 0.5 * (a.double() @ b.double()) + (start.double() if accumulate else 0.0)
                torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        finally:
            passes.mixed_product.cache_clear()


def test_a_launch_happens_on_the_tensors_device(monkeypatch):
    entered = []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *_):
            entered.append(None)

    monkeypatch.setattr(torch.cuda, "device", Guard)
    fake = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda:1"))
    with kernel.on_device_of(fake):
        assert entered == [torch.device("cuda:1")]
    assert entered == [torch.device("cuda:1"), None]
    with kernel.on_device_of(torch.zeros(1)):
        assert len(entered) == 2


def test_invariant_rows_keep_their_bits(gpu_route):
    wide = RowBlocks(1, 1, 0, GPU_COLUMNS).column_parts(GPU_COLUMNS, torch.device("cpu"))
    assert wide == [[slice(0, GPU_COLUMNS)]]
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(5, 8, generator=generator), torch.randn(41, 8, generator=generator)
    targets, some = torch.randint(0, 41, (5,), generator=generator), slice(3, 5)
    tuning = Tuning(invariant=True)
    whole = unflattened(hidden, weight, targets, entropy="metric", tuning=tuning)
    part = unflattened(hidden[some], weight, targets[some], entropy="metric", tuning=tuning)
    assert torch.equal(whole.logp[some], part.logp) and torch.equal(whole.entropy[some], part.entropy)
    log_p = torch.log_softmax(hidden.double() @ weight.double().T, -1)
    torch.testing.assert_close(whole.logp.double(), log_p.gather(1, targets[:, None])[:, 0])


def test_few_heights_are_tried_and_kernels_get_no_scratch(gpu_route, monkeypatch):
    """A trial is a host sync, so 541 numbers of rows need at most 56 trial heights."""
    tried, scratches = [], []

    def trial(rows, columns, *constants):
        tried.append(rows)
        return torch.zeros(1)

    bits = invariant.row_bits
    monkeypatch.setattr(invariant, "row_bits", trial)
    weight = torch.zeros(16, 8)
    head = lm_head.Head(weight, None, None, 1.0, None, 1.0, VocabShard(0, 16, 16), 16, torch.float32)
    for rows in range(1, 20_001, 37):
        hidden = torch.zeros(1, 8).expand(rows, 8)
        blocks, _ = invariant.arrange_blocks(
            head, hidden, rows, ranks=1, budget=None, tile=None, max_rows=1024
        )
        places = len(blocks.places(torch.device("cpu")))
        assert rows <= places <= max(rows + 63, 1.125 * rows) and places % 64 == 0
    assert len(set(tried)) <= 56, sorted(set(tried))
    update = RowStatistics.update_

    def watched(self, z, scratch, *args, **options):
        scratches.append(len(scratch))
        return update(self, z, scratch, *args, **options)

    monkeypatch.setattr(RowStatistics, "update_", watched)
    shape = (64, 512, 8, torch.float32, torch.float32, torch.device("cpu"))
    results = [bits.__wrapped__(*shape, kernels) for kernels in (kernel, None)]
    trials = len(scratches) // 2
    assert scratches == [0] * trials + [2] * trials
    torch.testing.assert_close(*results)


def kl_to_reference(hidden, weight, reference_logits):
    """KL(p || q) of the plain code, [T]."""
    log_p = torch.log_softmax(hidden @ weight.T, -1)
    log_q = torch.log_softmax(reference_logits.to(log_p.dtype), -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@pytest.mark.parametrize("tile", [None, Tiles(4, 64, "vocab")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kl_to_a_reference_head_of_an_odd_vocabulary(tile, dtype, gpu_route):
    """The reference's tile of logits needs the padding that its product writes."""
    hidden, weight, _, targets, upstream = inputs(dtype)
    other = inputs(dtype, seed=1)[1]
    logits = hidden.double() @ other.double().T

    def fast(h, w):
        reference = ReferenceHead(weight=other)
        out = unflattened(h, w, targets, outputs=("kl",), reference=reference, tuning=Tuning(tile=tile))
        return out.logp, out.kl

    def slow(h, w):
        return plain(h, w, None, targets)[0], kl_to_reference(h, w, logits)

    truth = with_gradients(slow, (hidden.double(), weight.double()), upstream)
    actual, plainly = (with_gradients(f, (hidden, weight), upstream) for f in (fast, slow))
    assert_as_good_as_plain(actual, plainly, truth, 4e-3 if dtype == torch.bfloat16 else 2e-6)


def test_masked_logprobs_with_a_reference_of_an_odd_vocabulary(gpu_route):
    """Rows without a set cover the whole vocabulary, and so does their reference."""
    hidden, weight, _, targets, _ = inputs(torch.float32)
    other = inputs(torch.float32, seed=1)[1]
    ids = torch.stack([targets, (targets + 3) % V], 1).flatten()
    has_set = torch.arange(T) % 3 > 0
    allowed = Allowed(
        ids[has_set.repeat_interleave(2)], torch.cat([torch.zeros(1), 2 * has_set.cumsum(0)]).long(), has_set
    )
    out = linear_masked_logprobs(hidden, weight, targets, allowed, reference=ReferenceHead(weight=other))
    logits = hidden.double() @ other.double().T
    expected = kl_to_reference(hidden.double(), weight.double(), logits)
    torch.testing.assert_close(out.kl[~has_set].double(), expected[~has_set], rtol=1e-4, atol=1e-5)


def test_a_16_bit_hidden_state_decides_for_an_fp32_weight(gpu_route, monkeypatch):
    """FSDP2 master weights, gathered in fp32: without autocast all three products have 16-bit operands."""
    hidden, weight, _, targets, upstream = inputs(torch.float32)
    hidden = hidden.bfloat16()
    operands = set()

    def watched(a, b, *args, **options):
        operands.update((a.dtype, b.dtype))
        return product(a, b, *args, **options)

    product = lm_head.product
    monkeypatch.setattr(lm_head, "product", watched)

    def fast(h, w):
        out = linear_logprobs(h, w, targets, entropy="grad", tile=Tiles(5, 64, "vocab"))
        return out.logp, out.entropy

    def slow(h, w):
        return plain(h, w.to(h.dtype), None, targets)

    actual, plainly = (
        with_gradients(fast, (hidden, weight), upstream),
        with_gradients(slow, (hidden, weight), upstream),
    )
    truth = with_gradients(slow, (hidden.double(), weight.double()), upstream)
    assert operands == {torch.bfloat16}
    assert [f.dtype for f in actual] == [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    assert_as_good_as_plain(actual, plainly, truth, 1e-3)


# Triton's interpreter is numpy, which speaks of branches that are not taken.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("route", ["CPU", "GPU"])
@pytest.mark.parametrize("selected", [None, torch.tensor([1, 5, 9, 2])])
@pytest.mark.parametrize("loss", ["policy", "distill", "two teachers"])
def test_fp16_gradients_of_hidden_wait_for_the_loss_scale(loss, selected, route, request):
    """A mean over two million tokens and GradScaler's 65,536: rounding before scaling gives many zeros."""
    if route == "GPU":
        request.getfixturevalue("gpu_route")
    hidden, weight, _, targets, upstream = inputs(torch.float32)
    hidden, other = hidden.half(), inputs(torch.float32, seed=1)[1]
    rows = torch.arange(T) if selected is None else selected
    old = upstream[0][: len(rows)] - 5.0

    def fast(h, w):
        fixed = {"normalizer": 2.0**21, "rows": selected}
        if loss == "policy":
            batch = PolicyBatch(old, upstream[1][: len(rows)])
            fixed["objective"] = "gpg"
            return (policy_of_rows(h, w, targets[: len(rows)], batch, **fixed).loss,)
        teacher = TeacherHead(h.detach(), other.to(h.dtype))
        return (
            linear_distill_loss(h, w, teacher if loss == "distill" else [(teacher, 0.5)] * 2, **fixed).loss,
        )

    scale = torch.tensor(65536.0)
    actual = with_gradients(fast, (hidden, weight), [scale])
    truth = with_gradients(fast, (hidden.double(), weight.double()), [scale.double()])
    assert [g.dtype for g in actual[1:]] == [torch.float16, torch.float32]
    for gradient, exact in zip(actual[1:], truth[1:], strict=True):
        assert gradient.isfinite().all()
        assert (gradient.double() - exact).abs().max() <= 2e-3 * exact.abs().max()
    representable = truth[1].abs() > 2e-7
    assert (actual[1][representable] != 0).all()


def test_a_compiled_policy_loss_takes_the_loss_scale_of_fp16():
    """GradScaler's initial scale, 65,536, is infinite in fp16."""
    hidden, weight, _, targets, upstream = inputs(torch.float32)
    batch = PolicyBatch(upstream[0], upstream[1])

    def gradient(function, dtype):
        leaf = hidden.half().to(dtype).requires_grad_()
        loss = function(leaf, weight.to(leaf.dtype), targets, batch, objective="gpg")
        return torch.autograd.grad(65536.0 * loss.loss, leaf)[0]

    compiled = gradient(torch.compile(policy_of_rows, backend="aot_eager", fullgraph=True), torch.float16)
    exact = gradient(policy_of_rows, torch.float64).clamp(-65504.0, 65504.0)
    assert compiled.dtype == torch.float16
    small = exact.abs() < 60000.0
    assert small.any() and compiled[small].isfinite().all()
    assert (compiled[small].double() - exact[small]).abs().max() <= 5e-3 * exact[small].abs().max()


def test_a_padded_product_refuses_a_tile_without_padding():
    with pytest.raises(AssertionError, match="a tile of 8 columns, but 5 elements per row"):
        lm_head.widened(torch.zeros(3, 5), 8)


def traced_calls():
    hidden, weight, _, targets, (old, advantages) = inputs(torch.float32)
    batch = PolicyBatch(old, advantages)
    teacher = TeacherHead(hidden.flip(0), weight.flip(0))
    return {
        "update_statistics scale_exponentials": lambda h, w: unflattened(h, w, targets, entropy="grad").logp,
        "policy_rows": lambda h, w: policy_of_rows(h, w, targets, batch, rows=ROWS).loss,
        "divergence_sums divergence_gradient": lambda h, w: linear_distill_loss(h, w, teacher).loss,
    }


ROWS = torch.arange(T).flip(0)


# The interpreter computes lanes that a mask drops.
@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")
@pytest.mark.parametrize("names", traced_calls())
def test_the_kernels_of_the_passes_run_inside_a_whole_graph(gpu_route, monkeypatch, names):
    """Dynamo sees an op; the op launches the kernels."""
    launched = set()
    for name in names.split():
        module = kernel if hasattr(kernel, name) else gpu_kernel

        run = getattr(module, name)

        def counted(*args, name=name, run=run, **options):
            launched.add(name)
            return run(*args, **options)

        monkeypatch.setattr(module, name, counted)
    call, leaves = traced_calls()[names], inputs(torch.float32)[:2]
    torch._dynamo.reset()
    compiled = torch.compile(lambda h, w: [call(h, w)], fullgraph=True, backend="aot_eager")
    upstream = [torch.linspace(0.5, 1.5, T)] if names.startswith("update") else [torch.tensor(1.0)]
    actual = with_gradients(compiled, leaves, upstream)
    assert launched == set(names.split())
    for got, want in zip(actual, with_gradients(lambda h, w: [call(h, w)], leaves, upstream), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
