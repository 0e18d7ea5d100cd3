"""torch.compile(fullgraph=True) of models that end in a head function: no graph break, eager's results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leanstep.cpu import find_compiler
from leanstep.logprob import (
    CovarianceChoice,
    LMHead,
    LoRA,
    PolicyBatch,
    PolicyObjective,
    Tiles,
    Transform,
    Tuning,
    linear_logprobs,
    linear_policy_loss,
    token_logprobs,
)

T, V, D = 11, 41, 8


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TARGETS = torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(5))
ROWS = torch.tensor([1, 4, 4, 9])


def head_of(weight, bias=None, down=None, up=None):
    return LMHead(weight, bias, None if down is None else LoRA(down, up, 0.5))


def scores(hidden, *head, **options):
    out = linear_logprobs(1.5 * hidden, head_of(*head), TARGETS, **options)
    return [v for v in (out.logp, out.entropy, out.lse, out.z_loss) if v is not None]


def policy(hidden, *head, batch, **options):
    out = linear_policy_loss(1.5 * hidden, head_of(*head), TARGETS, batch, **options)
    return [out.loss, out.logp, *out.metrics.values()]


def tokens(logits, **options):
    out = token_logprobs(1.5 * logits, TARGETS, **options)
    return [v for v in (out.logp, out.entropy, out.lse) if v is not None]


HEAD = [normal(T, D), normal(V, D, seed=1)]
ADAPTER = [normal(V, seed=2), normal(2, D, seed=3), normal(V, 2, seed=4)]
BATCH = PolicyBatch(normal(T, seed=6) - 4, normal(T, seed=7), (normal(T, seed=8) > -1).float(), normal(T) - 4)
SEQUENCES = PolicyBatch(BATCH.old_logp, BATCH.advantages, sequence_lengths=[5, 6])
CASES = {
    "head": (scores, HEAD, {"entropy": "grad"}),
    "no entropy": (scores, HEAD, {}),
    "rows": (scores, HEAD, {"rows": ROWS, "entropy": "metric", "temperature": 0.7}),
    "adapter": (
        scores,
        HEAD + ADAPTER,
        {"entropy": "grad", "outputs": ("lse", "z_loss"), "transform": Transform(1.5, 3.0)},
    ),
    "temperatures": (scores, HEAD, {"temperature": torch.linspace(0.5, 2.0, T), "outputs": "lse"}),
    "smoothing": (scores, HEAD, {"transform": Transform(label_smoothing=0.1)}),
    "policy": (
        policy,
        HEAD + ADAPTER,
        {"batch": BATCH, "objective": PolicyObjective(entropy_coef=0.01, kl_coef=0.1)},
    ),
    "gspo": (policy, HEAD, {"batch": SEQUENCES, "objective": "gspo", "normalizer": 7.0}),
    "sapo": (policy, HEAD, {"batch": BATCH, "objective": PolicyObjective("sapo", temperatures=(0.5, 2.0))}),
    "kl_cov": (
        policy,
        HEAD,
        {"batch": BATCH, "objective": PolicyObjective("kl_cov", covariance=CovarianceChoice(0.3, coef=0.5))},
    ),
    "logits": (tokens, [normal(T, V)], {"entropy": "grad", "outputs": "lse"}),
    "logits of rows": (tokens, [normal(T, V)], {"rows": ROWS, "temperature": 0.7}),
}


def results(function, leaves, options):
    """Return values and gradients."""
    inputs = [t.clone().requires_grad_() for t in leaves]
    out = function(*inputs, **options)
    flowing = [v for v in out if v.requires_grad]
    upstream = [normal(*v.shape, seed=20 + i).to(v.dtype) for i, v in enumerate(flowing)]
    return [*(v.detach() for v in out), *torch.autograd.grad(flowing, inputs, upstream)]


def check(name, backend):
    function, leaves, options = CASES[name]
    if "rows" in options:
        # Targets are given for all rows and selected by the call.
        assert len(TARGETS) != len(options["rows"])
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    truth = results(function, [t.double() for t in leaves], _double(options))
    eager, actual = results(function, leaves, options), results(compiled, leaves, options)
    assert len(actual) == len(eager)
    for f, e, x in zip(actual, eager, truth, strict=True):
        error, other = (float((v.double() - x).abs().max()) for v in (f, e))
        assert error <= 2 * other + 2e-6 * float(x.abs().max()), (name, error, other)


def _double(options):
    converted = dict(options)
    if isinstance(converted.get("temperature"), torch.Tensor):
        converted["temperature"] = converted["temperature"].double()
    return converted


@pytest.mark.parametrize("name", CASES)
def test_traced_without_a_break(name):
    check(name, "aot_eager")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler for inductor")
@pytest.mark.parametrize("name", ["head", "policy", "logits"])
def test_compiled_by_inductor(name):
    check(name, "inductor")


def test_a_module_that_ends_in_the_head_under_autocast():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(D, D), nn.Linear(D, V)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return linear_logprobs(self.body(x), self.head, TARGETS, entropy="grad", outputs=("argmax",))

    torch.manual_seed(0)
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    outs = []
    for one in (model, compiled):
        model.zero_grad()
        out = one(normal(T, D))
        (out.logp.sum() + out.entropy.sum()).backward()
        outs.append([out.logp.detach(), out.argmax, *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_backward_starts_from_the_forwards_statistics(monkeypatch):
    """One product forward, three backward: logits, hidden, weight."""
    from leanstep.logprob.engine import lm_head

    counts, run = [], lm_head.product
    monkeypatch.setattr(lm_head, "product", lambda *a, **k: (counts.append(1), run(*a, **k))[1])
    leaves = [t.clone().requires_grad_() for t in HEAD]
    compiled = torch.compile(lambda h, w: scores(h, w, entropy="grad"), fullgraph=True, backend="aot_eager")
    logp, entropy = compiled(*leaves)
    assert len(counts) == 1
    (logp.sum() + entropy.sum()).backward()
    assert len(counts) == 4


def test_no_gradient_where_none_is_needed():
    hidden = HEAD[0].clone().requires_grad_()
    compiled = torch.compile(lambda h, w: scores(h, w)[0], fullgraph=True, backend="aot_eager")
    (actual,) = torch.autograd.grad(compiled(hidden, HEAD[1]).sum(), hidden)
    (expected,) = torch.autograd.grad(scores(hidden, HEAD[1])[0].sum(), hidden)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("tile", [(4, 16), (None, 16), (4, None), Tiles(4, 16)], ids=str)
def test_a_tile_of_the_callers_own(tile):
    truth = torch.log_softmax(HEAD[0].double() @ HEAD[1].double().T, -1).gather(1, TARGETS[:, None])[:, 0]
    compiled = torch.compile(
        lambda h, w: linear_logprobs(h, w, TARGETS, tuning=Tuning(tile=tile)).logp,
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(compiled(*HEAD).double(), truth, rtol=1e-5, atol=1e-5)
