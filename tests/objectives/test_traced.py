"""Head functions in torch.compile(fullgraph=True): one graph for any number of rows, same results as eager.

Real Dynamo and AOTAutograd, forward and backward, for every function that a training step may compile.
"""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from leanstep.logprob import (
    Allowed,
    LMHead,
    LoRA,
    PolicyBatch,
    PolicyObjective,
    ReferenceHead,
    Transform,
    Tuning,
    VocabShards,
    linear_logprobs,
    linear_policy_loss,
    token_logprobs,
)
from leanstep.objectives import (
    HardLabels,
    SoftLabels,
    TeacherHead,
    TeacherLogProbs,
    TeacherTopK,
    linear_ahead_cross_entropy,
    linear_cross_entropy,
    linear_distill_loss,
    linear_masked_logprobs,
    linear_preference_loss,
    linear_sequence_logprobs,
)

V, D = 37, 6
# Dynamo makes a graph of its own for one row, as it does for plain code.
ROW_COUNTS = (1, 2, 3, 5, 8, 13, 4, 9, 21, 40, 11)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def ids(*shape):
    return torch.randint(V, shape)


def floats(*shape):
    return torch.randn(shape)


def head(n):
    """Return the leaves of every case: hidden states, weight, bias, both halves of LoRA."""
    return floats(n, D), floats(V, D), floats(V), floats(2, D), floats(V, 2)


def plain(h, w, b, down, up):
    """Use every leaf, so that each has a gradient."""
    return LMHead(w, b, LoRA(down, up, 0.5))


def differentiable(out):
    return [value for value in out if isinstance(value, torch.Tensor) and value.requires_grad]


def logprobs(h, w, b, down, up, t, r, temperature):
    options = {"rows": r, "temperature": temperature, "entropy": "grad", "outputs": ("lse", ("top_k", 2))}
    return differentiable(linear_logprobs(h, plain(h, w, b, down, up), t, **options))


def divergences(h, w, b, down, up, t, other):
    reference = ReferenceHead(other)
    options = {"outputs": ("kl", "reverse_kl"), "reference": reference, "transform": Transform(0.5, 4.0)}
    return differentiable(linear_logprobs(h, plain(h, w, b, down, up), t, **options))


def allowed(n):
    return ids(3 * n), torch.arange(0, 3 * n + 1, 3), torch.rand(n) > 0.3


def policy(h, w, b, down, up, t, old, advantages, mask, normalizer):
    objective = PolicyObjective(entropy_coef=0.01)
    batch = PolicyBatch(old, advantages, mask)
    out = linear_policy_loss(
        h, plain(h, w, b, down, up), t, batch, objective=objective, normalizer=normalizer
    )
    return [out.loss]


def padded(n):
    labels = ids(4, n + 1)
    labels[:, : n // 2] = -100
    return labels


def log_probs(*shape):
    return torch.log_softmax(floats(*shape), -1)


def distill(h, w, b, down, up, teachers, **options):
    return [linear_distill_loss(h, plain(h, w, b, down, up), teachers, **options).loss]


def masked(h, w, b, t, sets, reference, whole):
    out = linear_masked_logprobs(
        h, LMHead(w, b), t, Allowed(*sets, whole), entropy="grad", reference=reference
    )
    return [out.logp, out.entropy, *([] if out.kl is None else [out.kl])]


# name: (function of leaves and data, leaves of n rows, data of n rows)
CASES = {
    "linear_logprobs": (
        logprobs,
        lambda n: head(n + 2),
        lambda n: (ids(n), torch.randperm(n + 2)[:n], torch.rand(n) + 0.5),
    ),
    "several targets": (
        lambda h, w, b, down, up, t: [linear_logprobs(h, plain(h, w, b, down, up), t).logp],
        head,
        lambda n: (ids(n, 3),),
    ),
    "kl": (divergences, head, lambda n: (ids(n), floats(V, D))),
    "allowed": (
        lambda h, w, t, *sets: differentiable(linear_logprobs(h, w, t, allowed=sets, entropy="grad")),
        lambda n: head(n)[:2],
        lambda n: (ids(n), *allowed(n)),
    ),
    "allowed, few ids": (
        lambda h, w, t, i, o: differentiable(
            linear_logprobs(h, w, t, allowed=Allowed(i, o, None, False), entropy="grad")
        ),
        lambda n: head(n)[:2],
        lambda n: (ids(n), ids(2 * n), torch.arange(0, 2 * n + 1, 2)),
    ),
    "token_logprobs": (
        lambda z, t, temperature: differentiable(
            token_logprobs(z, t, entropy="grad", temperature=temperature, outputs="lse")
        ),
        lambda n: (floats(n, V),),
        lambda n: (ids(n), torch.rand(n) + 0.5),
    ),
    "token_logprobs, allowed": (
        lambda z, t, *sets: differentiable(token_logprobs(z, t, allowed=sets, entropy="grad")),
        lambda n: (floats(n, V),),
        lambda n: (ids(n), *allowed(n)),
    ),
    "linear_policy_loss": (
        policy,
        head,
        lambda n: (ids(n), floats(n), floats(n), (torch.rand(n) > 0.2).float(), torch.tensor(3.0)),
    ),
    "linear_cross_entropy": (
        lambda h, w, b, down, up, y: [linear_cross_entropy(h, plain(h, w, b, down, up), y)],
        lambda n: (floats(4, n + 1, D), *head(n)[1:]),
        lambda n: (padded(n),),
    ),
    "linear_cross_entropy, rows": (
        lambda h, w, y, r: [linear_cross_entropy(h, w, y, rows=r, reduction="none")],
        lambda n: head(n + 3)[:2],
        lambda n: (ids(n + 3), torch.arange(n)),
    ),
    "linear_cross_entropy, probabilities": (
        lambda h, w, q: [linear_cross_entropy(h, w, q), linear_cross_entropy(h, w, q, reduction="none")],
        lambda n: head(n)[:2],
        lambda n: (torch.rand(n, V),),
    ),
    "linear_ahead_cross_entropy": (
        lambda h, w, y: [linear_ahead_cross_entropy(h, [w, w], y)],
        # A shift that leaves no or one position has a graph of its own.
        lambda n: (floats(2, n + 3, D), floats(V, D)),
        lambda n: (ids(2, n + 3),),
    ),
    "linear_distill_loss": (
        lambda h, w, b, down, up, *t: distill(h, w, b, down, up, TeacherHead(*t), temperature=1.5),
        head,
        lambda n: (floats(n, 4), floats(V, 4)),
    ),
    "linear_distill_loss, two teachers, labels": (
        lambda h, w, b, down, up, th, tw, q, y: distill(
            h,
            w,
            b,
            down,
            up,
            [(TeacherHead(th, LMHead(tw, b, LoRA(down, up))), 0.3), (TeacherLogProbs(q), 0.7)],
            divergence=("jsd", 0.3),
            hard=HardLabels(y, 0.2),
            normalizer=7,
        ),
        head,
        lambda n: (floats(n, D), floats(V, D), log_probs(n, V), ids(n)),
    ),
    "linear_distill_loss, soft labels": (
        lambda h, w, b, down, up, q, c: distill(
            h, w, b, down, up, SoftLabels(q, 0.1, c), divergence="cross_entropy"
        ),
        head,
        lambda n: (torch.rand(n, V), torch.rand(V)),
    ),
    "linear_distill_loss, top k": (
        lambda h, w, b, down, up, i, q: distill(h, w, b, down, up, TeacherTopK(i, q)),
        head,
        lambda n: (torch.stack([torch.randperm(V)[:3] for _ in range(n)]), log_probs(n, 4)[:, :3]),
    ),
    "linear_masked_logprobs": (
        lambda h, w, b, t, *sets: masked(h, w, b, t, sets, None, None),
        lambda n: head(n)[:3],
        lambda n: (ids(n), *allowed(n)),
    ),
    "linear_masked_logprobs, kl": (
        lambda h, w, b, t, other, i, o: masked(h, w, b, t, (i, o, None), ReferenceHead(other), False),
        lambda n: head(n)[:3],
        lambda n: (ids(n), floats(V, D), *allowed(n)[:2]),
    ),
    "linear_sequence_logprobs": (
        lambda h, w, y, r: [linear_sequence_logprobs(h, w, y, rows=r).sums],
        lambda n: (floats(2, 64, D), floats(V, D)),
        lambda n: (ids(2, 64), torch.arange(n)),
    ),
    "linear_preference_loss": (
        lambda h, w, y, other: [
            linear_preference_loss(h, w, y, reference=ReferenceHead(other)).loss,
            linear_preference_loss(h, w, y, objective="orpo").loss,
        ],
        lambda n: (floats(4, n + 1, D), floats(V, D)),
        lambda n: (padded(n), floats(V, D)),
    ),
}


def values_and_gradients(function, leaves, data):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out = function(*leaves, *data)
    upstream = [torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).view_as(value) for value in out]
    return [*(value.detach() for value in out), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_one_graph_for_any_number_of_rows(name, dynamic):
    function, leaves_of, data_of = CASES[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for count in ROW_COUNTS:
        leaves, data = leaves_of(count), data_of(count)
        for got, want in zip(
            values_and_gradients(compiled, leaves, data),
            values_and_gradients(function, leaves, data),
            strict=True,
        ):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] <= 2


# A function of tensors and one number; leaves, and what is not differentiated.
NUMBERS = {
    "linear_logprobs": (
        lambda h, w, t, x: differentiable(linear_logprobs(h, w, t, temperature=x, entropy="grad")),
        lambda: (head(7)[:2], (ids(7),)),
    ),
    "linear_logprobs, rows": (
        lambda h, w, t, r, x: differentiable(linear_logprobs(h, w, t, rows=r, temperature=x)),
        lambda: (head(7)[:2], (ids(3), torch.tensor([0, 4, 6]))),
    ),
    "token_logprobs": (
        lambda z, t, x: differentiable(token_logprobs(z, t, temperature=x, entropy="grad")),
        lambda: ((floats(7, V),), (ids(7),)),
    ),
    "linear_policy_loss, temperature": (
        lambda h, w, t, o, a, x: [linear_policy_loss(h, w, t, PolicyBatch(o, a), temperature=x).loss],
        lambda: (head(7)[:2], (ids(7), floats(7), floats(7))),
    ),
    "linear_policy_loss, normalizer": (
        lambda h, w, t, o, a, x: [linear_policy_loss(h, w, t, PolicyBatch(o, a), normalizer=x).loss],
        lambda: (head(7)[:2], (ids(7), floats(7), floats(7))),
    ),
    "linear_distill_loss, normalizer": (
        lambda h, w, th, tw, x: [linear_distill_loss(h, w, TeacherHead(th, tw), normalizer=x).loss],
        lambda: (head(7)[:2], (floats(7, 4), floats(V, 4))),
    ),
    "linear_masked_logprobs": (
        lambda h, w, b, t, *rest: differentiable(
            linear_masked_logprobs(h, LMHead(w, b), t, rest[:-1], temperature=rest[-1])
        ),
        lambda: (head(7)[:3], (ids(7), *allowed(7))),
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_one_graph_for_any_temperature_or_normalizer(name):
    """Dynamo makes the first number a constant of the graph; the next graph accepts any number."""
    function, inputs = NUMBERS[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    leaves, data = inputs()
    for number in (0.9, 0.8, 1.3, 0.7, 2.5, 0.75):
        for got, want in zip(
            values_and_gradients(compiled, leaves, (*data, number)),
            values_and_gradients(function, leaves, (*data, number)),
            strict=True,
        ):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    assert counters["stats"]["unique_graphs"] <= 2


SELECTING = {
    "token_logprobs": lambda h, w, t, r: token_logprobs(h @ w.T, t, rows=r).logp,
    "linear_logprobs": lambda h, w, t, r: linear_logprobs(h, w, t, rows=r).logp,
    "linear_policy_loss": lambda h, w, t, r: (
        linear_policy_loss(h, w, t, PolicyBatch(t / V, 1 - t / V), rows=r).loss
    ),
    "linear_distill_loss": lambda h, w, t, r: (
        linear_distill_loss(
            h, w, TeacherHead(h.detach(), w.detach() + 1), hard=HardLabels(t, 0.2), rows=r
        ).loss
    ),
}


def graphs_for_halves(function) -> int:
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for count in (1, 2, 3, 5, 8, 13, 21, 40):
        selected = max(count // 2, 1)
        hidden, weight = floats(count, D).requires_grad_(), floats(V, D).requires_grad_()
        compiled(hidden, weight, ids(selected), torch.arange(selected)).sum().backward()
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", SELECTING)
def test_no_more_graphs_for_selected_rows_than_plain_code_has(name):
    """One row of one, one row of several, several rows: Dynamo compiles a graph for each."""
    plain = graphs_for_halves(lambda h, w, t, r: (h[r] @ w.T).gather(1, t[:, None]))
    assert graphs_for_halves(SELECTING[name]) <= plain == 3


def test_no_rows():
    function = lambda h, w, t: linear_logprobs(h, w, t, entropy="grad")[:2]  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for got, want in zip(
        *(values_and_gradients(f, (floats(0, D), HEAD), (ids(0),)) for f in (compiled, function)), strict=True
    ):
        assert torch.equal(got, want)


HEAD = torch.randn(V, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "call",
    [
        lambda h, t: linear_logprobs(h, HEAD, t, shards=VocabShards(total=V - 1)).logp,
        lambda h, t: linear_logprobs(h, HEAD, t, tuning=Tuning(main_grad=torch.zeros(V, D))).logp,
        lambda h, t: token_logprobs(h @ HEAD.T, t, shards=VocabShards(total=V - 1)).logp,
        lambda h, t: (
            linear_policy_loss(
                h, HEAD, t, PolicyBatch(h[:, 0].detach(), h[:, 1].detach()), shards=VocabShards(total=V - 1)
            ).loss
        ),
        lambda h, t: linear_distill_loss(h, HEAD, TeacherHead(h, HEAD), shards=VocabShards(total=V)).loss,
        lambda h, t: (
            linear_masked_logprobs(
                h, HEAD, t, (t, torch.arange(len(t) + 1)), shards=VocabShards(total=V)
            ).logp
        ),
    ],
    ids=["logprobs", "main_grad", "tokens", "policy", "distill", "masked"],
)
# torch's own, where it takes up a broken graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_what_no_op_expresses_runs_outside_of_the_graph(call):
    """There is one graph break, and the tile loop is not recompiled for each number of rows."""
    compiled = torch.compile(call, backend="aot_eager")
    for count in (3, 4, 5, 6):
        hidden, targets = floats(count, D).requires_grad_(), ids(count) % (V - 1)
        got, want = compiled(hidden, targets), call(hidden, targets)
        torch.testing.assert_close(got, want)
    assert counters["stats"].get("unique_graphs", 0) <= 4
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a process group or main_grad"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(hidden, targets)


def check_ops(name, count):
    """Record the ops that a case calls, then have torch check each of them with the same arguments."""
    function, leaves_of, data_of = CASES[name]
    calls = {}

    class Recorder(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if getattr(target, "namespace", "") == "leanstep":
                calls[target] = args
            return super().call_function(target, args, kwargs)

    def record(graph, _inputs):
        return make_boxed_func(Recorder(graph).run)

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    values_and_gradients(compiled, leaves_of(count), data_of(count))
    assert calls
    for op, args in calls.items():
        detached = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, args)
        torch.library.opcheck(op, detached)
    return {op._opname for op in calls}


def test_the_ops_are_registered_as_torch_wants_them():
    seen = set()
    for name in (
        "linear_logprobs",
        "kl",
        "allowed",
        "token_logprobs",
        "linear_policy_loss",
        "linear_cross_entropy",
        "linear_distill_loss, two teachers, labels",
        "linear_masked_logprobs, kl",
    ):
        torch._dynamo.reset()
        seen |= check_ops(name, 3)
    names = {"linear_logprobs", "token_logprobs", "linear_masked_logprobs"}
    names |= {f"{one}_backward" for one in names} | {"linear_policy_loss", "linear_distill_loss"}
    assert seen == names


def traced_dtensor_head(rank, world_size):
    """Return the gradients of a sharded head, compiled and eager, as plain lists."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world_size,))
    hidden, weight, targets = torch.randn(5, D), torch.randn(V, D), torch.randint(V, (5,))
    batch = PolicyBatch(torch.randn(5), torch.randn(5))
    results = []
    for function in (
        lambda h, w: linear_logprobs(h, w, targets).logp.sum(),
        lambda h, w: linear_policy_loss(h, w, targets, batch).loss,
    ):
        for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            h = hidden.clone().requires_grad_()
            w = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
            loss = call(h, w)
            loss.backward()
            assert w.grad.placements == w.placements
            results.append([loss.item(), h.grad.tolist(), w.grad.full_tensor().tolist()])
    return results


def test_a_sharded_head_is_gathered_in_the_graph(run_ranks):
    for results in run_ranks(2, traced_dtensor_head, timeout=300):
        for eager, compiled in (results[:2], results[2:]):
            for got, want in zip(compiled, eager, strict=True):
                torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-5, atol=1e-5)
