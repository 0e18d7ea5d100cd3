"""`Tuning(invariant=True)`: a row's bits do not depend on the other rows, even with a hostile BLAS."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from leanstep.logprob import LMHead, LoRA, Transform, Tuning, VocabShards, linear_logprobs, token_logprobs
from leanstep.logprob.engine import invariant
from leanstep.logprob.reference import reference_logprobs
from leanstep.measure.parity import FACTOR, FLOOR, relative_error

D, ROWS = 48, 300
INVARIANT = Tuning(invariant=True)


@pytest.fixture
def fresh():
    """Clear the cached results of the product trials."""
    tried = invariant.row_bits
    tried.cache_clear()
    yield
    tried.cache_clear()


@contextlib.contextmanager
def threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def inputs(vocab: int, dtype: torch.dtype = torch.float32):
    random = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(ROWS, D, generator=random).to(dtype)
    weight = (torch.randn(vocab, D, generator=random) / 3).to(dtype)
    targets = torch.randint(vocab, (ROWS,), generator=random)
    return hidden, weight, targets, 0.5 + torch.rand(ROWS, generator=random)


def outputs(hidden, weight, targets, temperature, tuning=INVARIANT, **options):
    """Return logp, entropy, lse and the gradient of the hidden rows."""
    hidden, weight = (t.detach().requires_grad_() for t in (hidden, weight))
    out = linear_logprobs(
        hidden,
        weight,
        targets,
        temperature=temperature,
        entropy="grad",
        outputs="lse",
        tuning=tuning,
        **options,
    )
    assert out.entropy is not None and out.lse is not None
    values = [out.logp, out.entropy, out.lse]
    loss = (out.logp * temperature).sum() + (0.1 * out.entropy).sum() + (out.lse * temperature).sum()
    return [*(t.detach() for t in values), torch.autograd.grad(loss, (hidden, weight))[0]]


def same(actual, expected) -> bool:
    return all(a.shape == b.shape and a.equal(b) for a, b in zip(actual, expected, strict=True))


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_row_keeps_its_bits_in_any_company(data):
    vocab = data.draw(st.sampled_from([7, 700, 1500]), "vocabulary")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), "dtype")
    transform = Transform(1.5, data.draw(st.sampled_from([None, 4.0]), "softcap"))
    hidden, weight, targets, temperature = inputs(vocab, dtype)
    with threads(1):
        expected = outputs(hidden, weight, targets, temperature, transform=transform)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=260, unique=True)))
    tuning = Tuning(
        invariant=True,
        tile=data.draw(st.sampled_from([None, (64, None), (100, 7), (1, 1)]), "tile"),
        save_logits=data.draw(st.sampled_from(["grad", "none", 1 << 20]), "save"),
    )
    with threads(data.draw(st.sampled_from([1, 2, 4]), "threads")):
        selected = (hidden[rows], weight, targets[rows], temperature[rows])
        actual = outputs(*selected, tuning, transform=transform)
        assert same(actual, [t[rows] for t in expected])
        # The same rows selected by their numbers.
        whole = (hidden, weight, targets[rows], temperature[rows])
        *actual, gradient = outputs(*whole, tuning, transform=transform, rows=rows)
        assert same([*actual, gradient[rows]], [t[rows] for t in expected])


def test_threads_share_the_parts_and_change_no_bit(monkeypatch):
    """The threshold is lowered, so that the call is large enough for one job per core."""
    monkeypatch.setattr("leanstep.logprob.engine.tiles.MIN_CORE_PRODUCTS", 1)
    arguments = inputs(5000)
    results = []
    for count in (1, 2, 4):
        with threads(count):
            results.append(outputs(*arguments))
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_log_probs_and_gradients_are_right():
    hidden, weight, targets, temperature = (t.double() if t.is_floating_point() else t for t in inputs(1500))
    actual = outputs(hidden, weight, targets, temperature)
    hidden.requires_grad_()
    logp, entropy = reference_logprobs(hidden @ weight.t(), targets, temperature)
    lse = torch.logsumexp(hidden @ weight.t() / temperature[:, None], -1)
    loss = (logp * temperature).sum() + 0.1 * entropy.sum() + (lse * temperature).sum()
    (gradient,) = torch.autograd.grad(loss, hidden)
    for a, b in zip(actual, (logp, entropy, lse, gradient), strict=True):
        torch.testing.assert_close(a, b.detach())


def hostile(by_place: bool):
    """Simulate a library whose sums depend on the number of rows or on the position of a row."""

    def addmm(sums, a, b, *, beta, alpha, out):
        def row(place: int) -> torch.Tensor:
            cut = 5 + (place % 3 if by_place else len(a) % 11)
            mine = a[place : place + 1]
            return alpha * (mine[:, cut:] @ b[cut:] + mine[:, :cut] @ b[:cut])

        result = torch.cat([row(place) for place in range(len(a))])
        return out.copy_(result + sums if beta else result)

    return addmm


@pytest.mark.parametrize("by_place", [False, True])
def test_a_library_whose_sums_depend_on_the_shape(monkeypatch, fresh, by_place: bool):
    monkeypatch.setattr(torch, "addmm", hostile(by_place))
    hidden, weight, targets, temperature = inputs(40)
    count = 20 if by_place else 140
    few = (hidden[4:9], weight, targets[4:9], temperature[4:9])
    many = (hidden[:count], weight, targets[:count], temperature[:count])
    assert not same([t[4:9] for t in outputs(*many, Tuning())], outputs(*few, Tuning()))
    assert same([t[4:9] for t in outputs(*many)], outputs(*few))


def test_every_way_gives_the_same_bits(monkeypatch, fresh):
    """Products of a whole tile, one block or copies of one row: always the bits of position 0 of a block."""
    arguments = inputs(700)
    expected = outputs(*arguments)
    ways = []
    true_blocks = invariant.RowBlocks
    monkeypatch.setattr(invariant, "RowBlocks", lambda *a: ways.append(a[1:3]) or true_blocks(*a))
    monkeypatch.setattr(invariant, "_agrees", lambda *_: False)
    assert same(outputs(*arguments), expected)
    if ways[-1] == (1, invariant.BLOCK):
        monkeypatch.setattr(invariant, "row_bits", lambda *_unused: None)
        assert same(outputs(*arguments), expected)
    assert ways[-1] == (invariant.BLOCK, invariant.BLOCK)


def shard_ranks(rank: int, world: int, vocab: int) -> list[torch.Tensor]:
    hidden, weight, targets, temperature = inputs(vocab)
    mine = weight.chunk(world)[rank].clone()
    shards = VocabShards(dist.group.WORLD, total=vocab - 30)
    return outputs(hidden[:70], mine, targets[:70] % (vocab - 30), temperature[:70], shards=shards)


def test_ranks_that_hold_whole_parts_change_no_bit():
    vocab = 4096
    hidden, weight, targets, temperature = inputs(vocab)
    shards = VocabShards(total=vocab - 30)
    expected = outputs(hidden, weight, targets % (vocab - 30), temperature, shards=shards)
    for actual in run_ranks(2, shard_ranks, vocab):
        assert same(actual[:3], [t[:70] for t in expected[:3]])
        torch.testing.assert_close(actual[3], expected[3][:70])


def broken_shards(rank: int, world: int) -> str:
    hidden, weight, targets, _ = inputs(1100)
    try:
        linear_logprobs(hidden, weight[:550], targets, shards=VocabShards(dist.group.WORLD), tuning=INVARIANT)
    except ValueError as error:
        return str(error)
    return ""


def test_what_makes_no_promise_is_refused(monkeypatch):
    hidden, weight, targets, _ = inputs(40)
    refused = [
        ({"outputs": "argmax"}, r"outputs: expected lse or z_loss with tuning.invariant, got \['argmax'\]"),
        ({"allowed": (targets[:0], torch.zeros(ROWS + 1, dtype=torch.long))}, "allowed: expected None with"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            linear_logprobs(hidden, weight, targets, tuning=INVARIANT, **options)
    lora = LMHead(weight, lora=LoRA(torch.zeros(2, D), torch.zeros(40, 2)))
    with pytest.raises(ValueError, match="weight: expected a head without LoRA"):
        linear_logprobs(hidden, lora, targets, tuning=INVARIANT)
    with pytest.raises(ValueError, match="tuning: expected invariant=False here"):
        token_logprobs(hidden @ weight.t(), targets, tuning=INVARIANT)
    with monkeypatch.context() as patched:
        patched.setattr(torch.compiler, "is_compiling", lambda: True)
        with pytest.raises(ValueError, match=r"expected a call outside of torch\.compile"):
            linear_logprobs(hidden, weight, targets, tuning=INVARIANT)
    for message in run_ranks(2, broken_shards):
        assert "expected shards of whole parts of 512 columns" in message


def test_no_rows_and_one_row():
    hidden, weight, targets, temperature = inputs(700)
    none = outputs(hidden[:0], weight, targets[:0], temperature[:0])
    assert [tuple(t.shape) for t in none] == [(0,), (0,), (0,), (0, D)]
    one = outputs(hidden[:1], weight, targets[:1], temperature[:1])
    assert same(one, [t[:1] for t in outputs(hidden, weight, targets, temperature)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_further_from_float64_than_the_rule_allows(dtype):
    """Outputs and both gradients, compared with plain code in the same dtype."""
    hidden, weight, targets, _ = inputs(1000, dtype)

    def plain(kind):
        h, w = (t.to(kind).requires_grad_() for t in (hidden, weight))
        log_p = torch.log_softmax((h @ w.T).to(torch.promote_types(kind, torch.float32)), -1)
        return h, w, log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    def gradients(h, w, logp, entropy):
        (logp.sum() - 0.1 * entropy.sum()).backward()
        return {"logp": logp, "entropy": entropy, "hidden": h.grad, "weight": w.grad}

    truth, usual = gradients(*plain(torch.float64)), gradients(*plain(dtype))
    h, w = (t.detach().clone().requires_grad_() for t in (hidden, weight))
    out = linear_logprobs(h, w, targets, entropy="grad", tuning=INVARIANT)
    ours = gradients(h, w, out.logp, out.entropy)
    for name, expected in truth.items():
        allowed = FACTOR[dtype] * relative_error(usual[name], expected) + FLOOR[dtype]
        assert relative_error(ours[name], expected) <= allowed, name


@pytest.mark.parametrize("vocab", [2, 3, 514])
@pytest.mark.parametrize("width", [14, 23, 30, 62, 126])
def test_rows_keep_their_bits_in_narrow_tiles(vocab, width, fresh):
    """With two columns, two summation orders usually round alike, so one row proves nothing."""
    random = torch.Generator().manual_seed(1000 * vocab + width)
    hidden = torch.randn(40, width, generator=random)
    weight = torch.randn(vocab, width, generator=random) / width**0.5
    targets = torch.full((40,), vocab - 1)

    def score(rows):
        return linear_logprobs(hidden[rows], weight, targets[rows], tuning=INVARIANT).logp

    shuffled = torch.randperm(40, generator=random)
    whole = score(torch.arange(40))
    assert torch.equal(whole[shuffled], score(shuffled))
    assert torch.equal(whole[7:8], score(torch.tensor([7])))
