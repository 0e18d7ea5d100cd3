"""Logits saved for the backward pass: the same bits as recomputing, fewer GEMMs, within the byte limit."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from logprob.flat import linear_logprobs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from leanstep.logprob import LoRA, Tiles

T, D, V = 11, 8, 37
ROWS = torch.tensor([9, 1, 1, 5, 4, 0, 10])
IDS = torch.randint(0, V, (30,), generator=torch.Generator().manual_seed(1))
KEEP = (IDS, torch.tensor([0, 4, 4, 9, 12, 20, 28, 30]))
SOME = torch.tensor([True, False, True, True, False, True, True])
EVERYTHING = 1 << 40

OPTIONS = {
    "plain": {"entropy": "grad"},
    "no-entropy": {"entropy": "none", "bias": True},
    "rows": {
        "entropy": "grad",
        "rows": ROWS,
        "temperature": "rows",
        "scale": 0.7,
        "outputs": ("lse", "z_loss"),
    },
    "softcap": {"entropy": "grad", "rows": ROWS, "softcap": 2.0, "temperature": 0.8, "bias": True},
    "metric": {"entropy": "metric", "softcap": 2.0, "temperature": "rows"},
    "targets": {"entropy": "grad", "targets": 3},
    "smoothing": {"entropy": "grad", "label_smoothing": 0.1, "bias": True},
    "kl": {"entropy": "grad", "outputs": ("kl", "reverse_kl", "argmax"), "reference": True},
    "allowed": {"entropy": "grad", "allowed": KEEP, "rows": ROWS},
    "allowed-metric": {"entropy": "metric", "allowed": (*KEEP, SOME), "rows": ROWS, "temperature": 0.5},
    "allowed-some": {"entropy": "none", "allowed": (*KEEP, SOME), "rows": ROWS},
    "allowed-narrow": {"entropy": "grad", "allowed": (*KEEP, SOME, False), "rows": ROWS},
    "allowed-narrow-metric": {"entropy": "metric", "allowed": (*KEEP, None, False), "rows": ROWS},
    "lora": {"entropy": "grad", "rows": ROWS, "lora": True, "bias": True},
    "padded": {"entropy": "grad", "rows": ROWS, "total": V - 3},
    "empty": {"entropy": "grad", "rows": ROWS[:0]},
}
SAVE_OPTIONS = {
    "one tile": {"save_logits": 4 * 7 * 8},
    "all": {"save_logits": EVERYTHING},
    "in grad": {},
    "in grad, others saved": {"save_logits": ("grad", EVERYTHING)},
}


def normal(*shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def call(name, dtype, tile, **more):
    """Return inputs that require a gradient, and a function of them."""
    options = dict(OPTIONS[name])
    selected = len(options.get("rows", range(T)))
    real = options.get("total", V)
    shape = (selected, options.pop("targets")) if "targets" in options else (selected,)
    tokens = torch.randint(0, real, shape, generator=torch.Generator().manual_seed(2))
    if options.get("temperature") == "rows":
        options["temperature"] = torch.linspace(0.5, 1.5, selected, dtype=torch.float64)
    if options.pop("reference", False):
        options |= {
            "ref_hidden": normal(T, D, seed=5, dtype=dtype),
            "ref_weight": normal(V, D, seed=6, dtype=dtype),
        }
    inputs = {"hidden": normal(T, D, seed=3, dtype=dtype), "weight": normal(V, D, seed=4, dtype=dtype)}
    if options.pop("bias", False):
        inputs["bias"] = normal(V, seed=7, dtype=dtype)
    low_rank = options.pop("lora", False)
    if low_rank:
        inputs |= {"down": normal(2, D, seed=8, dtype=dtype), "up": normal(V, 2, seed=9, dtype=dtype)}

    def outputs(*values):
        named = dict(zip(inputs, values, strict=True))
        if low_rank:
            named["lora"] = LoRA(named.pop("down"), named.pop("up"), 0.5)
        out = linear_logprobs(
            named.pop("hidden"), named.pop("weight"), tokens, tile=tile, **named, **options, **more
        )
        return tuple(x for x in out if isinstance(x, torch.Tensor) and x.requires_grad)

    return [x.requires_grad_() for x in inputs.values()], outputs


def values_and_gradients(name, dtype, tile, **more):
    inputs, outputs = call(name, dtype, tile, **more)
    values = outputs(*inputs)
    upstream = [normal(*x.shape, seed=20 + i, dtype=x.dtype) for i, x in enumerate(values)]
    return [x.detach() for x in values] + list(torch.autograd.grad(values, inputs, upstream))


@pytest.mark.parametrize("tile", [Tiles(4, 7, "vocab"), Tiles(4, 7, "rows"), Tiles(11, 9, "vocab")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_bits_as_recomputing(name, dtype, tile):
    expected = values_and_gradients(name, dtype, tile, save_logits="none")
    for how, options in SAVE_OPTIONS.items():
        for a, b in zip(values_and_gradients(name, dtype, tile, **options), expected, strict=True):
            assert torch.equal(a, b), how


@pytest.mark.parametrize("options", SAVE_OPTIONS.values(), ids=list(SAVE_OPTIONS))
@pytest.mark.parametrize("name", ["rows", "softcap", "smoothing", "allowed", "allowed-narrow", "lora"])
def test_gradcheck(name, options):
    inputs, outputs = call(name, torch.float64, Tiles(4, 9, "vocab"), **options)
    # Along random directions: the bits are those of recomputing, which test_tile_loop checks entry by entry.
    assert torch.autograd.gradcheck(outputs, tuple(inputs), fast_mode=True)


@pytest.mark.parametrize("options", SAVE_OPTIONS.values(), ids=list(SAVE_OPTIONS))
def test_a_second_backward_finds_the_same(options):
    inputs, outputs = call("rows", torch.float32, Tiles(4, 9, "vocab"), **options)
    values = outputs(*inputs)
    upstream = [normal(*x.shape, seed=30, dtype=x.dtype) for x in values]
    (alone,) = torch.autograd.grad(values, inputs[:1], upstream, retain_graph=True)
    first = torch.autograd.grad(values, inputs, upstream, retain_graph=True)
    copies = [x.clone() for x in first]
    second = torch.autograd.grad(values, inputs, upstream)
    assert torch.equal(alone, first[0])
    for a, b, c in zip(first, copies, second, strict=True):
        assert torch.equal(a, b) and torch.equal(b, c) and a.data_ptr() != c.data_ptr()
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(values, inputs, upstream)


@pytest.mark.parametrize("options", SAVE_OPTIONS.values(), ids=list(SAVE_OPTIONS))
def test_activation_checkpointing_finds_the_same(options):
    inputs, outputs = call("rows", torch.float32, Tiles(7, 9, "vocab"), **options)

    def total(*values):
        return torch.stack([x.sum() for x in outputs(*values)]).sum()

    expected = torch.autograd.grad(total(*inputs), inputs)
    for x in inputs:
        x.grad = None
    checkpoint(total, *inputs, use_reentrant=False).backward()
    assert all(torch.equal(x.grad, y) for x, y in zip(inputs, expected, strict=True))


def test_activation_checkpointing_on_several_threads_finds_the_same(monkeypatch):
    """The tile that finishes first differs from run to run; the place of a saved tile must not."""
    t, d, v = 64, 16, 2048
    monkeypatch.setattr("leanstep.logprob.engine.tiles.MIN_CORE_PRODUCTS", 1)
    hidden, weight = normal(t, d, seed=1, dtype=torch.float32), normal(v, d, seed=2, dtype=torch.float32)
    inputs, tokens = [hidden.requires_grad_(), weight.requires_grad_()], torch.arange(t)
    options = {"save_logits": 4 * t * v, "budget": 10 * 16 * 512 * 3}

    def total(h, w):
        return (linear_logprobs(h, w, tokens, entropy="grad", **options).logp * torch.arange(t)).sum()

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = torch.autograd.grad(total(*inputs), inputs)
        for _ in range(10):
            actual = torch.autograd.grad(checkpoint(total, *inputs, use_reentrant=False), inputs)
            assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_saved_tiles_have_an_order_that_no_timing_changes():
    """The places of saved tiles are decided before the first tile is computed."""
    from leanstep.logprob.engine.tiles import SavedLogits

    saved = SavedLogits(torch.empty(0), torch.float32, None, 4 * 5 * 3)
    walk = [(slice(r, r + 1), slice(c, c + 3)) for r in range(2) for c in (0, 3, 6)]
    saved.reserve(walk)
    assert saved.places == ((0, 0), (0, 3), (0, 6), (1, 0), (1, 3))
    for rows, columns in reversed(walk[:-1]):
        saved.tile(rows, columns).fill_(rows.start * 10 + columns.start)
    assert saved.tile(*walk[-1]) is None
    assert [x[0, 0].item() for x in saved.tensors] == [0, 3, 6, 10, 13]


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name().startswith("aten::addmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("options", "tile", "products"),
    [
        # 3 row chunks, 4 vocabulary tiles; each tile is one product forward and two for the gradients.
        ({"save_logits": "none"}, (4, 10), 4 * 12),
        ({"save_logits": EVERYTHING}, (4, 10), 3 * 12),
        ({"save_logits": 5 * 4 * 4 * 10}, (4, 10), 4 * 12 - 5),
        # The gradient fits the first chunk of every vocabulary tile, unless it is taller than D = 8.
        ({}, (4, 10), 4 * 12 - 4),
        ({"save_logits": ("grad", EVERYTHING)}, (4, 10), 3 * 12),
        ({}, (11, 10), 4 * 4),
    ],
)
def test_kept_tiles_are_not_recomputed(options, tile, products):
    inputs, outputs = call("plain", torch.float32, tile, **options)
    with Products() as counted:
        torch.autograd.grad([x.sum() for x in outputs(*inputs)], inputs)
    assert counted.count == products


def test_few_rows_fit_the_gradient_entirely():
    inputs, outputs = call("rows", torch.float32, (7, 10))
    with Products() as counted:
        torch.autograd.grad([x.sum() for x in outputs(*inputs)], inputs)
    assert counted.count == 3 * 4


def saved_tiles(allowed, **more):
    inputs, outputs = call("plain", torch.float32, (4, 10), save_logits=allowed, **more)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        values = outputs(*inputs)
    # Everything else that is saved is an input or a vector.
    return [x for x in saved if x.dim() == 2 and x.shape[1] != D], values, inputs


@pytest.mark.parametrize(("allowed", "tiles"), [(0, 0), (83, 0), (160, 1), (1000, 7), (EVERYTHING, 12)])
def test_no_more_is_saved_than_allowed(allowed, tiles):
    saved, _, _ = saved_tiles(allowed)
    assert len(saved) == tiles and sum(x.numel() * 4 for x in saved) <= allowed


def test_tiles_are_freed_with_the_graph():
    tiles, values, inputs = saved_tiles(EVERYTHING)
    alive = [weakref.ref(x) for x in tiles]
    del tiles
    torch.autograd.grad([x.sum() for x in values], inputs)
    gc.collect()
    assert not any(x() is not None for x in alive)


def test_nothing_is_kept_without_a_graph():
    hidden, weight = normal(T, D, seed=3), normal(V, D, seed=4).requires_grad_()

    class Sizes(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if "empty" in func.name():
                self.most = max(self.most, out.numel())
            return out

    for context in (torch.no_grad(), torch.inference_mode()):
        with context, Sizes() as sizes:
            linear_logprobs(
                hidden, weight, torch.zeros(T, dtype=torch.int64), tile=(4, 7),
                save_logits=("grad", EVERYTHING),
            )  # fmt: skip
        assert sizes.most <= 4 * 7


def test_an_early_gradient_costs_no_memory_at_the_peak():
    from leanstep.measure.peaks import measure_peak

    t, d, v = 128, 256, 4096
    inputs = {
        "hidden": normal(t, d, seed=1, dtype=torch.float32),
        "weight": normal(v, d, seed=2, dtype=torch.float32),
    }
    tokens = torch.randint(0, v, (t,))

    def extra(**options):
        def step():
            h, w = (x.detach().requires_grad_() for x in inputs.values())
            out = linear_logprobs(h, w, tokens, entropy="grad", tile=(64, 512), **options)
            grads = torch.autograd.grad([out.logp.sum(), out.entropy.sum()], [h, w])
            return {"hidden": grads[0], "weight": grads[1]}

        return measure_peak(step, inputs).extra_bytes

    recomputed = extra(save_logits="none")
    assert extra() <= 1.02 * recomputed
    saved = extra(save_logits=EVERYTHING)
    assert recomputed + 4 * t * v <= saved <= 1.02 * recomputed + 4 * t * v


def test_main_grad_is_never_lent():
    inputs, _ = call("plain", torch.float32, (4, 10))
    tokens, mains = torch.arange(T), []
    for options in ({}, {"save_logits": "none"}):
        main = torch.ones(V, D)
        linear_logprobs(*inputs, tokens, main_grad=main, tile=(4, 10), **options).logp.sum().backward()
        mains.append(main)
    assert torch.equal(*mains)


@pytest.mark.parametrize("value", [-1, 1.5, True, "all", None])
def test_bad_allowances_are_named(value):
    with pytest.raises(ValueError, match=r"save_logits: expected .* a whole number of bytes >= 0"):
        linear_logprobs(torch.zeros(1, 2), torch.zeros(3, 2), torch.tensor([0]), save_logits=value)
