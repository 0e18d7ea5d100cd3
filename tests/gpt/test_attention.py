"""The band of blocks against a dense mask; rotary tables and YaRN against the vectors."""

from __future__ import annotations

import itertools
import json
import math
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from gpt.golden import array, load
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from leanstep.gpt import GPT, GPTConfig, attention
from leanstep.gpt.attention import (
    PlanCache,
    PlanKey,
    Rotary,
    check_cu_seqlens,
    make_flex_plan,
    make_plan,
    rotate,
    windowed_attention,
)
from leanstep.gpt.reference import dense_mask
from leanstep.recipes.schedules import Schedule


def dense(q, k, v, bounds, window, scale):
    heads_first = (x.transpose(0, 1) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=dense_mask(bounds, window), scale=scale)
    return out.transpose(0, 1)


def outputs_and_gradients(function, inputs, upstream):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize(
    "bounds", [[0, 1], [0, 41], [0, 9, 9, 20, 32], [0, 1, 2, 300, 401], [0, 401]], ids=str
)
@pytest.mark.parametrize("window", [1, 6, 31, 32, 33, 1000])
def test_band_equals_dense_mask(bounds: list[int], window: int):
    length = bounds[-1]
    inputs = [torch.randn(length, 3, 16) for _ in range(3)]
    upstream = torch.randn(length, 3, 16)
    plan = make_plan(bounds, window, 16, torch.float32)
    wide = make_plan(bounds, window, 16, torch.float64)
    candidate = outputs_and_gradients(
        lambda q, k, v: windowed_attention(q, k, v, plan, 0.3), inputs, upstream
    )
    plain = outputs_and_gradients(lambda q, k, v: dense(q, k, v, bounds, window, 0.3), inputs, upstream)
    doubles = [x.double() for x in inputs]
    truth = outputs_and_gradients(
        lambda q, k, v: dense(q, k, v, bounds, window, 0.3), doubles, upstream.double()
    )
    exact = outputs_and_gradients(
        lambda q, k, v: windowed_attention(q, k, v, wide, 0.3), doubles, upstream.double()
    )
    for ours, theirs, same, want in zip(candidate, plain, exact, truth, strict=True):
        # A document of one token has zero gradients of q and k: inputs of size one set the scale then.
        scale = max(want.abs().max(), 1.0)
        assert (ours - want).abs().max() <= 2 * (theirs - want).abs().max() + 5e-7 * scale
        assert (same - want).abs().max() <= 1e-13 * scale


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=6).filter(any),
    window=st.integers(0, 90),
    head_dim=st.sampled_from([8, 48, 72]),
)
def test_any_documents_and_window(lengths: list[int], window: int, head_dim: int):
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    inputs = [torch.randn(bounds[-1], 2, head_dim, dtype=torch.float64) for _ in range(3)]
    plan = make_plan(bounds, window, head_dim, torch.float64)
    got = windowed_attention(*inputs, plan, 0.2)
    assert (got - dense(*inputs, bounds, window, 0.2)).abs().max() < 1e-12


@pytest.mark.filterwarnings("ignore:.*flex_attention.*")
def test_flex_plan_sees_the_same_keys():
    # Forward only: flex attention has no backward on the CPU.
    bounds, window = [0, 40, 41, 130], 17
    inputs = [torch.randn(130, 2, 16) for _ in range(3)]
    with torch.no_grad():
        flex = windowed_attention(*inputs, make_flex_plan(bounds, window, "cpu"), 0.3)
    band = windowed_attention(*inputs, make_plan(bounds, window, 16, torch.float32), 0.3)
    assert (flex - band).abs().max() < 1e-5


@pytest.fixture
def flex_graphs(monkeypatch):
    """Flex attention compiled as on a GPU, its graphs run as they are: how often each of them ran."""
    graphs, compile = [], torch.compile

    def run_as_it_is(graph, inputs):
        number = len(graphs)
        graphs.append(0)

        def run(*args):
            graphs[number] += 1
            return graph.forward(*args)

        return run

    torch._dynamo.reset()
    attention._flex_attention.cache_clear()
    # Flex attention refuses CPU tensors that require grad; no test calls its backward.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(
            torch, "compile", lambda function, **options: compile(function, backend=run_as_it_is, **options)
        )
        attention._flex_attention()
    yield graphs
    torch._dynamo.reset()
    attention._flex_attention.cache_clear()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_records_schedule_stays_below_the_limit_of_graphs(flex_graphs):
    """Windows, tokens and YaRN's scale change in every stage; an evaluation follows each."""
    schedule, rotary, calls = Schedule.record_74(), Rotary(16, 1024.0, 0.1), 0
    for stage, following in pairwise(schedule.stages):
        tokens = stage.tokens // 512
        for paired, window in itertools.product((False, True), stage.windows):
            slots, heads = (2 * tokens, 2) if paired else (tokens, 4)
            plan = make_flex_plan([0, slots // 4, slots], 8 * window, "cpu")
            inputs = [torch.randn(slots, heads, 16, requires_grad=True) for _ in range(3)]
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    windowed_attention(*inputs, plan, rotary.attention_scale)
                calls += 1
        rotary.rescale(8 * stage.windows[1], 8 * following.windows[1])
    # A call past the limit would run no graph.
    assert sum(flex_graphs) == calls, flex_graphs
    assert len(flex_graphs) <= 6, flex_graphs


@pytest.mark.filterwarnings("ignore:.*flex_attention.*")
def test_the_model_scales_its_queries_for_flex_attention():
    config = GPTConfig.preset("tiny", dtype="float32", attention_scale=0.37)
    model = GPT(config, generator=torch.Generator().manual_seed(0), run="plain")
    ids, bounds = torch.randint(config.vocab_size, (40,)), torch.tensor([0, 9, 40], dtype=torch.int32)
    band = model.hidden(ids, bounds)
    model.plans = PlanCache(kind="flex")
    with torch.no_grad():
        assert (model.hidden(ids, bounds) - band).abs().max() < 1e-5
    model.rotary.attention_scale *= 1.5
    with torch.no_grad():
        assert (model.hidden(ids, bounds) - band).abs().max() > 1e-3


@torch._dynamo.config.patch(recompile_limit=1)
def test_flex_attention_raises_at_the_limit_of_graphs(flex_graphs):
    """Without fullgraph Dynamo would call the eager one, which makes T x T scores."""
    plan = make_flex_plan([0, 64], 17, "cpu")
    for dtype, raises in ((torch.float32, False), (torch.float64, True)):
        inputs = [torch.randn(64, 2, 16, dtype=dtype) for _ in range(3)]
        expected = pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit) if raises else nullcontext()
        with torch.no_grad(), expected:
            windowed_attention(*inputs, plan, 0.3)


def test_caches_of_an_evaluation_serve_a_training_step():
    config = GPTConfig.preset("tiny", dtype="float32")
    model, fresh = (GPT(config, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    ids, bounds = torch.randint(config.vocab_size, (40,)), torch.tensor([0, 9, 40], dtype=torch.int32)
    with torch.inference_mode():
        model(ids, ids, bounds)
    for each in (model, fresh):
        each(ids, ids, bounds).backward()
    for (name, parameter), same in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert (parameter.grad is None and same.grad is None) or torch.equal(parameter.grad, same.grad), name


class LargestTensor(TorchDispatchMode):
    """The most elements that any tensor made inside has."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


def blocks(mask, full):
    counts, columns = (getattr(mask, f"{full}kv_{what}")[0, 0] for what in ("num_blocks", "indices"))
    return [sorted(row[:count].tolist()) for count, row in zip(counts.tolist(), columns, strict=True)]


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=8).filter(any),
    window=st.sampled_from([0, 1, 100, 127, 128, 129, 300, 10_000]),
)
def test_block_masks_from_bounds_are_those_of_the_dense_mask(lengths: list[int], window: int):
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    mask = make_flex_plan(bounds, window, "cpu").block_mask
    dense = dense_mask(bounds, window)
    count = -(-bounds[-1] // 128)
    dense = F.pad(dense, (0, 128 * count - bounds[-1]) * 2)
    sums = dense.view(count, 128, count, 128).sum((1, 3))
    assert blocks(mask, "full_") == [row.nonzero()[:, 0].tolist() for row in sums == 128**2]
    assert blocks(mask, "") == [row.nonzero()[:, 0].tolist() for row in (sums > 0) & (sums < 128**2)]
    want = create_block_mask(mask.mask_mod, None, None, bounds[-1], bounds[-1], device="cpu")
    assert torch.equal(mask.to_dense(), want.to_dense()) and mask.seq_lengths == want.seq_lengths
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(want, name)), name
        assert getattr(mask, name).dtype == getattr(want, name).dtype


def test_a_block_mask_never_makes_a_square_of_tokens():
    with LargestTensor() as mode:
        make_flex_plan(list(range(0, 65537, 512)), 1000, "cpu")
    assert mode.elements <= 4 * (65536 // 128) ** 2


def test_short_documents_make_the_band_narrow():
    wide = make_plan([0, 2048], 1024, 16, torch.float32)
    narrow = make_plan(list(range(0, 2049, 32)), 1024, 16, torch.float32)
    assert narrow.mask.numel() * 10 < wide.mask.numel()


def test_the_bands_gradients_are_those_of_finite_differences():
    # Three blocks of 16, the last one padded; each sees two more.
    plan = make_plan([0, 3, 37], 20, 8, torch.float64)
    assert (plan.num_blocks, plan.back, plan.padded > plan.length) == (3, 2, True)
    q, k, v = (torch.randn(37, 1, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda *x: windowed_attention(*x, plan, 0.3), (q, k, v))


def test_a_band_for_longer_documents_sees_the_same_keys():
    q, k, v = torch.randn(3, 120, 2, 16).unbind(0)
    bounds = [0, 30, 50, 80, 120]
    narrow, wide = (make_plan(bounds, 110, 16, torch.float32, longest=n) for n in (None, 120))
    assert wide.mask.shape == make_plan([0, 120], 110, 16, torch.float32).mask.shape != narrow.mask.shape
    torch.testing.assert_close(*(windowed_attention(q, k, v, plan, 0.3) for plan in (narrow, wide)))
    with pytest.raises(ValueError, match="longest: expected at least 40, the longest document, got 39"):
        make_plan(bounds, 110, 16, torch.float32, longest=39)


def test_mask_allows_exactly_the_window():
    plan = make_plan([0, 50, 120], 7, 16, torch.float32)
    allowed = (plan.mask == 0).sum(-1).flatten()[:120]
    want = [min(t if t < 50 else t - 50, 7) + 1 for t in range(120)]
    assert allowed.tolist() == want
    assert set(plan.mask.unique().tolist()) == {-math.inf, 0.0}


def test_plans_are_cached_and_bounded():
    cache = PlanCache(max_bytes=200_000)
    first = cache.get([0, 300], PlanKey(20, False, 16, torch.float32, torch.device("cpu")))
    assert cache.get([0, 300], PlanKey(20, False, 16, torch.float32, torch.device("cpu"))) is first
    for window in range(21, 40):
        cache.get([0, 300], PlanKey(window, False, 16, torch.float32, torch.device("cpu")))
        assert cache.num_bytes <= 200_000
    assert cache.get([0, 300], PlanKey(20, False, 16, torch.float32, torch.device("cpu"))) is not first
    doubled = cache.get([0, 300], PlanKey(20, True, 16, torch.float32, torch.device("cpu")))
    assert doubled.length == 600


def test_flex_plans_are_counted_and_dropped_too():
    one = make_flex_plan([0, 300], 20, "cpu")
    tensors = [x for x in vars(one.block_mask).values() if isinstance(x, torch.Tensor)]
    # The block mask's own tensors and the document starts that its function reads.
    assert len(tensors) == 8 and one.num_bytes == sum(x.nbytes for x in tensors) + 300 * 4
    cache, device = PlanCache(max_bytes=3 * one.num_bytes, kind="flex"), torch.device("cpu")
    first = cache.get([0, 300], PlanKey(20, False, 16, torch.float32, device))
    for split in range(1, 30):
        cache.get([0, split, 300], PlanKey(20, False, 16, torch.float32, device))
        assert 0 < cache.num_bytes <= 3 * one.num_bytes
    assert len(cache._plans) == 3
    assert cache.get([0, 300], PlanKey(20, False, 16, torch.float32, device)) is not first


def test_bad_boundaries_are_named():
    for bad in ([1, 5], [0, 4], [0, 4, 3, 5]):
        with pytest.raises(ValueError, match="cu_seqlens"):
            check_cu_seqlens(torch.tensor(bad), 5)
    with pytest.raises(ValueError, match="cu_seqlens"):
        check_cu_seqlens(torch.tensor([0.0, 5.0]), 5)
    plan = make_plan([0, 5], 2, 16, torch.float32)
    with pytest.raises(ValueError, match="q: expected 5"):
        windowed_attention(*(torch.randn(6, 1, 16) for _ in range(3)), plan, 1.0)


CPU = torch.device("cpu")


def factors(rotary: Rotary, rows: list[int], paired: bool):
    """The vectors' layout: cos, and sin with the sign of odd dimensions, features repeated in pairs."""
    table = rotary.head_table(max(rows) + 1, paired, torch.float32, CPU)[rows].reshape(len(rows), -1)
    cos, sin = table.real.repeat_interleave(2, -1), -table.imag.repeat_interleave(2, -1)
    return cos, sin * torch.tensor([1.0, -1.0]).repeat(sin.shape[-1] // 2)


@pytest.mark.parametrize("case", range(4))
def test_vectors(case: int):
    golden = load("rotary_yarn")
    c = golden["cases"][case]
    rotary = Rotary(c["head_dim"], 1024.0, 0.1)
    half = c["head_dim"] // 2

    def check(want: dict) -> None:
        frequencies = rotary.frequencies.repeat_interleave(2)
        assert torch.allclose(frequencies, torch.tensor(want["angular_freq"])[:half], rtol=1e-6)
        assert not any(want["angular_freq"][half:])
        assert abs(rotary.attention_scale - want["attn_scale"]) < 1e-12
        cos, sin = factors(rotary, c["rows"], c["paired"])
        assert (cos - array(want["factor1"])).abs().max() < golden["tolerance"]
        assert (sin - array(want["factor2"])).abs().max() < golden["tolerance"]

    check(c)
    x = array(c["x"])[0]
    if not c["paired"]:
        turned = rotate(x, rotary.head_table(x.shape[0], False, torch.float32, CPU))
        assert (turned - array(c["rotary_x"])[0]).abs().max() < golden["tolerance"]
    else:
        # Width 2D: an even head and the odd head after it, side by side.
        heads = x.reshape(x.shape[0], -1, c["head_dim"])
        turned = rotate(heads, rotary.head_table(x.shape[0], True, torch.float32, CPU)).reshape(x.shape)
        assert (turned - array(c["rotary_x"])[0]).abs().max() < golden["tolerance"]
    for step in c["yarn"]:
        rotary.rescale(step["old"], step["new"])
        check(step)


def test_only_half_of_a_head_turns_and_lengths_stay():
    x = torch.randn(9, 4, 16)
    turned = rotate(x, Rotary(16, 1024.0, 0.1).head_table(9, False, torch.float32, CPU))
    assert torch.equal(turned[..., 8:], x[..., 8:]) and torch.equal(turned[0], x[0])
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-6)


@pytest.mark.parametrize("paired", [False, True])
def test_a_real_table_rotates_like_a_complex_one(paired: bool):
    rotary, x = Rotary(16, 1024.0, 0.1), torch.randn(9, 4, 16, dtype=torch.float64)
    tables = (make(9, paired, torch.float64, CPU) for make in (rotary.head_table, rotary.real_table))
    first, second = (rotate(x, table) for table in tables)
    assert (first - second).abs().max() < 1e-14


def test_scores_depend_on_distance_only():
    q, k = torch.randn(2, 16, dtype=torch.float64)
    table = Rotary(16, 1024.0, 0.1).head_table(40, False, torch.float64, CPU)
    at = [rotate(x.expand(40, 1, 16), table)[:, 0] for x in (q, k)]
    scores = at[0] @ at[1].T
    assert torch.allclose(scores.diagonal(-3), scores[3, 0].expand(37))


def test_tables_grow_and_state_is_exact():
    rotary = Rotary(16, 1024.0, 0.1)
    short = rotary.table(5, torch.float32, CPU)
    long = rotary.table(100, torch.float32, CPU)
    assert torch.equal(long[:5], short)
    rotary.rescale(48, 112)
    other = Rotary(16, 1024.0, 0.1)
    other.load_state_dict(json.loads(json.dumps(rotary.state_dict())))
    assert torch.equal(other.table(100, torch.float32, CPU), rotary.table(100, torch.float32, CPU))
    assert other.attention_scale == rotary.attention_scale
    with pytest.raises(ValueError, match="frequencies"):
        other.load_state_dict({"frequencies": [1.0], "attention_scale": 0.1})
    with pytest.raises(ValueError, match="window"):
        other.rescale(0, 5)
