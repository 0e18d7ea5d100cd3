"""The kernels (C++, and Triton in its interpreter) against the plain passes, in isolation and in use."""

from __future__ import annotations

import importlib

import pytest
import torch
from logprob.flat import linear_logprobs, linear_policy_loss, token_logprobs
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from leanstep.logprob import PolicyObjective, Tiles
from leanstep.logprob.engine import kernel
from leanstep.logprob.engine.gpu import kernel as rowwise
from leanstep.logprob.engine.pass_interface import Compared, Finish, LabelGradient
from leanstep.logprob.engine.passes import NativePasses as native
from leanstep.logprob.engine.passes import PlannedPasses as planned
from leanstep.logprob.engine.passes import kernels_for, suited
from leanstep.logprob.engine.softmax import RowFactors, RowGradients, RowStatistics
from leanstep.logprob.engine.tiles import laid_over
from leanstep.logprob.objective import policy_losses
from leanstep.objectives.divergences import checked_divergence, divergence

# Opposite ends of fp32 overflow when subtracted, on purpose, and -inf - -inf is not taken; the interpreter is
# numpy and says so.
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
]

NAMES = (
    {
        f"{name}{variant}"
        for name in ("update_statistics", "scale_exponentials", "overwrite_exponentials")
        for variant in ("", "_entropy", "_finish", "_bf16")
        if (name, variant) != ("overwrite_exponentials", "_bf16")
    }
    | {
        f"divergence_{name}_{variant}"
        for name in ("sums", "gradient")
        for variant in ("forward", "reverse", "between")
    }
    | {"update_statistics_keep"}
)


@pytest.fixture(params=["triton", "native"])
def kernels(request):
    if request.param == "native" and not native.is_built():
        pytest.skip("no C++ compiler")
    return kernel if request.param == "triton" else native


def tile(rows, columns, spread=4.0):
    z = torch.randn(rows, columns) * spread
    if rows > 3 and columns > 3:
        z[1, : columns // 2] = -torch.inf
        z[2] = -torch.inf
        z[3, 1] = 3e38
        z[3, 2] = -3e38
    return z


@pytest.mark.parametrize(("rows", "columns"), [(5, 41), (4, 401), (2, 4100), (1, 1), (0, 7)])
@pytest.mark.parametrize("moment", [True, False])
def test_statistics(rows, columns, moment, kernels):
    first, second = tile(rows, columns), tile(rows, columns)
    expected = RowStatistics.empty(rows, moment=moment)
    actual = RowStatistics.empty(rows, moment=moment)
    for z in (first, second):
        tokens = torch.randint(0, 3 * columns, (rows,))
        expected.update_(z.clone(), [torch.zeros_like(z), torch.zeros_like(z)], tokens, columns)
        kernels.update_statistics(z, actual.max, actual.sum, actual.moment, tokens, columns, actual.target)
    assert torch.equal(actual.target, expected.target)
    torch.testing.assert_close(actual.max, expected.max)
    torch.testing.assert_close(actual.sum, expected.sum, rtol=1e-5, atol=1e-6)
    if moment:
        torch.testing.assert_close(actual.moment, expected.moment, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(5, 41), (2, 4100), (1, 1), (0, 7)])
@pytest.mark.parametrize("scaled", [True, False])
def test_finished_logits_take_the_place_of_products(rows, columns, scaled):
    """The statistics are the same; memory past the end of a row is unchanged."""
    product, bias = torch.randn(rows, columns + 3), torch.randn(columns).bfloat16()
    tokens = torch.randint(0, columns, (rows,))
    finish = Finish(bias, 0.5, scaled, torch.rand(rows) + 1.0 if scaled else None)
    read_only, overwritten = (RowStatistics.empty(rows, moment=True) for _ in range(2))
    tiles = product.clone(), product.clone()
    for stats, z, keep in zip((read_only, overwritten), tiles, (False, True), strict=True):
        vectors = (stats.max, stats.sum, stats.moment)
        kernel.update_statistics(z[:, :columns], *vectors, tokens, 0, stats.target, finish=finish, keep=keep)
    logits = product[:, :columns] + 0.5 * bias.float()
    logits = torch.tanh(logits) * finish.scale.unsqueeze(-1) if scaled else logits
    assert torch.equal(tiles[0], product) and torch.equal(tiles[1][:, columns:], product[:, columns:])
    torch.testing.assert_close(tiles[1][:, :columns], logits, rtol=1e-5, atol=1e-6)
    for name in ("max", "sum", "moment", "target"):
        assert torch.equal(getattr(read_only, name), getattr(overwritten, name))


@pytest.mark.parametrize(("rows", "columns"), [(5, 41), (4, 401), (2, 2100), (1, 1), (0, 7)])
@pytest.mark.parametrize("has_slope", [True, False])
@pytest.mark.parametrize("has_target", [True, False])
def test_gradient(rows, columns, has_slope, has_target, kernels):
    z = tile(rows, columns)
    maximum = torch.where(z.amax(-1) == -torch.inf, 0.0, z.amax(-1)) if rows else torch.zeros(0)
    constant, slope = torch.randn(2, rows)
    x = z.double() - maximum.double().unsqueeze(-1)
    e = x.exp()
    factor = constant.unsqueeze(-1) + (slope.unsqueeze(-1) * x if has_slope else 0.0)
    expected = torch.where(e.float() == 0, 0.0, e * factor)
    wide = torch.full((rows, columns + 3), 7.0)
    wide[:, :columns] = z
    view = wide[:, :columns]
    tokens, target = torch.randint(0, 3 * columns, (rows,)), torch.randn(rows)
    if has_target:
        held = (tokens >= columns) & (tokens < 2 * columns)
        expected[held, tokens[held] - columns] += target[held].double()
    arguments = (
        maximum,
        constant,
        slope if has_slope else None,
        tokens,
        columns,
        target if has_target else None,
    )
    apart = torch.full_like(wide, 7.0)[:, :columns]
    assert kernels.scale_exponentials(view, apart, *arguments) is apart
    actual = kernels.scale_exponentials(view, view, *arguments)
    assert torch.equal(actual, apart)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    assert actual.isfinite().all() and torch.equal(wide[:, columns:], torch.full((rows, 3), 7.0))


KINDS = [
    "forward_kl",
    "reverse_kl",
    ("jsd", 0.3),
    ("skew_kl", 0.1),
    ("skew_reverse_kl", 0.2),
    "cross_entropy",
]


@pytest.mark.parametrize(("rows", "columns"), [(5, 41), (3, 4100), (1, 1)])
@pytest.mark.parametrize("kind", [*KINDS, "labels"], ids=str)
@pytest.mark.parametrize("more", [False, True], ids=["alone", "labels and softcap"])
def test_divergence(kind, rows, columns, more, kernels):
    """Values, entropy and gradient of two tiles against autograd in fp64, with ids that neither side has."""
    z, y = torch.randn(2, rows, columns) * 3
    if columns > 8:
        z[:, 3:5] = y[:, 3:5] = -torch.inf
    exact = z.double().requires_grad_()
    log_p, log_q = exact.log_softmax(-1), y.double().log_softmax(-1)
    record = checked_divergence("cross_entropy" if kind == "labels" else kind)
    values = divergence(log_p, log_q, record)
    of_p, of_q = ((x.amax(-1), (x - x.amax(-1, keepdim=True)).exp().sum(-1).log()) for x in (z, y))
    if kind == "labels":
        y = log_q.exp().float()
    weights = (record.teacher, record.student, record.mix)
    compared = Compared((*of_p, *of_q), record.mode(kind == "labels"), *weights)
    sums = torch.zeros(3, rows)
    parts = [slice(0, columns // 2), slice(columns // 2, columns)]
    for part in parts:
        kernels.divergence_sums(z[:, part], y[:, part], compared, sums)
    entropy = -torch.where(log_p.isfinite(), log_p.exp() * log_p, 0.0).sum(-1).detach()
    torch.testing.assert_close(sums[0].double(), values.detach(), rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(sums[2].double(), entropy, rtol=2e-5, atol=2e-6)
    factor, hard_factor = torch.randn(2, rows)
    factor[0] = hard_factor[0] = 0.0
    (expected,) = torch.autograd.grad((values * factor).sum(), exact)
    cap, labels = 0.0, None
    if more:
        # z has temperature 0.7, the labels' cross-entropy has 1.
        tokens, cap = torch.randint(0, columns, (rows,)), 20.0
        hot = torch.nn.functional.one_hot(tokens, columns)
        log_sum = ((z - of_p[0].unsqueeze(-1)) * 0.7).exp().sum(-1).log()
        expected += hard_factor.unsqueeze(-1) * ((0.7 * z.double()).softmax(-1) - hot)
        expected *= 1 - torch.where(z.isfinite(), z.double() / cap, 0.0) ** 2
        labels = LabelGradient(tokens, hard_factor, log_sum, 0.7)
        z[:, 3:5] = z[:, 3:5].clamp(min=-1e4)
    actual = torch.full((rows, columns), 7.0)
    for part in parts:
        row_terms = (sums[1], factor, cap, labels, part.start)
        kernels.divergence_gradient(z[:, part], y[:, part], actual[:, part], compared, *row_terms)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=2e-6)
    assert not actual[0].any()
    for part in parts:
        kernels.divergence_gradient(z[:, part], y[:, part], y[:, part], compared, sums[1], factor)
    if not more:
        assert torch.equal(y, actual)


@pytest.mark.parametrize("columns", [41, 2100, 4500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_lie_over_their_logits(columns, dtype):
    """The same values as in separate memory, although the launch overwrites what it reads; padding stays."""
    rows, padded = 5, columns + 3
    wide = torch.full((rows, padded), 7.0)
    wide[:, :columns] = tile(rows, columns)
    view = wide[:, :columns]
    maximum = torch.where(view.amax(-1) == -torch.inf, 0.0, view.amax(-1))
    tokens = torch.randint(0, 3 * columns, (rows,))
    arguments = (maximum, *torch.randn(2, rows), tokens, columns, torch.randn(rows))
    apart = kernel.scale_exponentials(view, torch.zeros(rows, columns, dtype=dtype), *arguments)
    out = laid_over(view, dtype)
    assert kernel.scale_exponentials(view, out, *arguments, overlaps=True) is out
    assert torch.equal(out, apart) and out.data_ptr() == wide.data_ptr()
    assert torch.equal(wide[:, columns:], torch.full((rows, 3), 7.0))


@pytest.mark.parametrize(("dtype", "into"), [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("columns", [1, 41, 1100])
def test_rows_are_gathered(columns, dtype, into):
    wide = torch.randn(9, columns + 3, dtype=dtype)
    x, rows = wide[:, :columns], torch.tensor([3, 0, 3, 8, -1, 9])
    actual = rowwise.gather_rows(x, rows, torch.zeros(6, columns, dtype=into))
    assert torch.equal(actual[:4], x[rows[:4]].to(into))
    assert actual[4:].isnan().all()  # no such rows
    assert rowwise.gather_rows(x, rows[:0], actual[:0]).shape == (0, columns)


OBJECTIVES = {
    "ppo": PolicyObjective(),
    "dual, k1": PolicyObjective(dual_clip=1.3, kl="k1", kl_coef=0.1),
    "bonus, k2": PolicyObjective(entropy_coef=0.05, kl="k2", kl_coef=0.1),
    "bonus, k3": PolicyObjective(clip_high=0.28, entropy_coef=0.05, kl="k3", kl_coef=0.1),
    "cispo": PolicyObjective(kind="cispo", clip_low=1.0, clip_high=0.28, entropy_coef=0.02),
}


# A row without a finite logit has an infinite KL, which is left out.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("slopes", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_rows_of_a_policy_objective(name, slopes, masked):
    """One kernel against the objective differentiated by autograd, in fp64."""
    rows, columns, objective = 300, 23, OBJECTIVES[name]
    z, targets = 2 * torch.randn(rows, columns), torch.randint(0, columns, (rows,))
    z[4] = -torch.inf
    stats = RowStatistics.empty(rows, moment=True)
    stats.update_(z.clone(), [torch.zeros_like(z), torch.zeros_like(z)], targets)
    old, advantages, ref = torch.randn(3, rows)
    mask = (torch.rand(rows) < 0.7).float() if masked else None
    weights = torch.rand(rows) if mask is None else mask / mask.sum()
    weights[7] = 0.0
    if mask is not None:
        mask[4], weights[4] = 0.0, 0.0  # the row without a finite logit
        old[mask == 0], advantages[mask == 0] = torch.inf, torch.nan
    else:
        weights[4] = 0.0
    written = [*torch.zeros(4, rows), torch.zeros(rows, dtype=torch.bool)]
    per_row = torch.rand(rows) if slopes else None
    factors = rowwise.policy_rows(
        (stats.max, stats.sum, stats.moment, stats.target),
        (old, advantages, mask, ref), weights, objective, written, (0.5, per_row),
    )  # fmt: skip
    wide = RowStatistics(*(t.double() for t in (stats.max, stats.sum, stats.moment, stats.target)))
    final = wide.final()
    logp, entropy = final.log_prob(wide.target).requires_grad_(), final.entropy.requires_grad_()
    doubles = (old.double(), advantages.double())
    truth = policy_losses(
        objective, logp, *doubles, entropy=entropy, ref_logp=ref.double(),
        mask=None if mask is None else mask.double(),
    )  # fmt: skip
    alive = torch.arange(rows) != 4
    expected = (logp, entropy, truth.losses, truth.ratio)
    for value, other in zip(written, expected, strict=False):
        torch.testing.assert_close(value[alive].double(), other.detach()[alive], rtol=2e-5, atol=2e-5)
    assert torch.equal(written[4][alive], truth.clipped[alive])
    total = torch.where(weights == 0, 0.0, truth.losses * weights.double()).sum()
    g_logp, g_entropy = torch.autograd.grad(total, (logp, entropy), allow_unused=True)
    common = 0.5 * (1.0 if per_row is None else per_row.double())
    gradients = RowGradients(torch.where(alive, g_logp, 0.0) * common)
    if objective.entropy_coef:
        gradients.entropy = torch.where(alive, g_entropy, 0.0) * common
    for value, other in zip(factors, RowFactors.of(final, gradients), strict=True):
        assert (value is None) == (other is None)
        if value is not None:
            torch.testing.assert_close(value.double(), other.detach(), rtol=2e-5, atol=2e-6)


def test_a_divergence_reads_16_bit_tiles_as_they_are():
    z, y = (torch.randn(2, 3, 41) * 3).bfloat16()
    statistics = (*(x.float().amax(-1) for x in (z, y)), *(torch.full((3,), 4.0) for _ in range(2)))
    compared = Compared((statistics[0], statistics[2], statistics[1], statistics[3]), 2, 0.4, 0.6, 0.4)
    results = []
    for tiles in ((z, y), (z.float(), y.float())):
        sums, out = torch.zeros(3, 3), torch.empty(3, 41)
        kernel.divergence_sums(*tiles, compared, sums)
        kernel.divergence_gradient(*tiles, out, compared, sums[1], torch.ones(3))
        results.append((sums, out))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def choose(monkeypatch, kernels):
    """Use these kernels, or none, for every fp32 tile."""
    for module in ("linear", "logits", "policy"):
        chosen = lambda tensor, dtype, count: kernels if dtype == torch.float32 else None  # noqa: E731
        monkeypatch.setattr(importlib.import_module(f"leanstep.logprob.{module}"), "kernels_for", chosen)


# More ids per row than the sparse head takes.
SETS = (torch.arange(13 * 20) % 157, torch.arange(0, 13 * 20 + 1, 20))
OPTIONS = {
    "plain": {"entropy": "grad"},
    "no entropy": {},
    "softcap": {"entropy": "grad", "softcap": 2.0, "temperature": 0.7},
    "smoothing": {"entropy": "metric", "label_smoothing": 0.1},
    "targets": {"entropy": "grad"},
    "allowed ids": {"entropy": "grad", "allowed": (*SETS, None, False)},
    "whole entropy": {"entropy": "grad", "allowed": SETS},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_linear_logprobs_through_kernels(name, kernels, monkeypatch):
    hidden, weight = torch.randn(13, 8), torch.randn(157, 8)
    tokens = torch.randint(0, 157, (13, 2) if name == "targets" else (13,))
    upstream = torch.randn(2, *tokens.shape)

    def results(chosen):
        choose(monkeypatch, chosen)
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = linear_logprobs(h, w, tokens, tile=Tiles(5, 60, "vocab"), **OPTIONS[name])
        pairs = [(out.logp, upstream[0])]
        if out.entropy is not None and out.entropy.requires_grad:
            pairs.append((out.entropy, upstream[1].flatten()[:13]))
        grads = torch.autograd.grad([v for v, _ in pairs], [h, w], [g for _, g in pairs])
        return [*(value.detach() for value, _ in pairs), *grads]

    for a, b in zip(results(kernels), results(None), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "half"])
def test_token_logprobs_through_kernels(temperature, layout, kernels, monkeypatch):
    logits, tokens, upstream = torch.randn(23, 157), torch.randint(0, 157, (23,)), torch.randn(2, 23)

    def results(chosen):
        choose(monkeypatch, chosen)
        z = {"contiguous": logits, "transposed": logits.t().contiguous().t(), "half": logits.bfloat16()}[
            layout
        ]
        z = z.detach().requires_grad_()
        out = token_logprobs(z, tokens, entropy="grad", chunk_rows=4, temperature=temperature)
        (grad,) = torch.autograd.grad([out.logp, out.entropy], z, list(upstream))
        return out.logp.detach(), out.entropy.detach(), grad

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for a, b in zip(results(kernels), results(None), strict=True):
            tolerance = 1e-2 if a.dtype == torch.bfloat16 else 2e-5
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    finally:
        torch.set_num_threads(threads)


def test_policy_loss_through_kernels(kernels, monkeypatch):
    hidden, weight, tokens = torch.randn(13, 8), torch.randn(157, 8), torch.randint(0, 157, (13,))
    old, advantages = torch.randn(2, 13)

    def results(chosen, budget):
        choose(monkeypatch, chosen)
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        objective = PolicyObjective(entropy_coef=0.1)
        out = linear_policy_loss(
            h, w, tokens, old_logp=old - 5, advantages=advantages, objective=objective, budget=budget
        )
        return out.loss.detach(), out.logp, out.entropy, *torch.autograd.grad(out.loss, [h, w])

    for budget in (None, 8 * 3 * 157 * 4):
        for a, b in zip(results(kernels, budget), results(None, budget), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_one_core_of_many_leaves_the_passes_to_torch(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert suited(native, 1) is None and suited(native, 16) is native
    assert suited(kernel, 1) is kernel and suited(None, 1) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert suited(native, 1) is native


def test_kernels_are_for_fp32_and_many_logits(monkeypatch):
    monkeypatch.delenv("LEANSTEP_NATIVE", raising=False)
    x, many = torch.zeros(3), 1 << 20
    assert kernels_for(x, torch.float64, many) is None and kernels_for(x, torch.float32, 1000) is None
    assert kernels_for(x.to("meta"), torch.float32, many) is None
    is_built = native.is_built()
    assert kernels_for(x, torch.float32, many) is (native if is_built else None)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert kernels_for(fake, torch.float32, many) is (planned if is_built else None)
        assert kernels_for(fake, torch.float32, 1000) is None
    monkeypatch.setenv("LEANSTEP_NATIVE", "0")
    assert kernels_for(x, torch.float32, many) is None


def test_shipped_configurations_are_listed():
    assert {entry["name"] for entry in kernel.AOT_KERNELS} == NAMES
    for entry in kernel.AOT_KERNELS:
        constants = {name for name, kind in entry["signature"].items() if kind == "constexpr"}
        assert constants == set(entry["constexprs"])
