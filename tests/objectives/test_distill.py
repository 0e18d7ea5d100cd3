"""linear_distill_loss against plain code in fp64, numerical derivatives, TRL's GKD."""

from __future__ import annotations

import pytest
import torch

from leanstep.logprob import LMHead, LoRA, Transform, Tuning
from leanstep.logprob.engine.passes import NativePasses
from leanstep.objectives import (
    Divergence,
    HardLabels,
    SoftLabels,
    TeacherHead,
    TeacherLogProbs,
    TeacherTopK,
    divergence,
    linear_distill_loss,
)
from leanstep.objectives.reference import reference_distill, reference_logits, reference_top_k

T, D, WIDE, V = 9, 4, 6, 29
KINDS = ["forward_kl", "reverse_kl", ("jsd", 0.3), ("jsd", 0.0), ("jsd", 1.0), ("skew_kl", 0.1)]
KINDS += [("skew_reverse_kl", 0.1), "cross_entropy", Divergence(0.4, 0.7, 0.25)]
ROWS = torch.tensor([7, 0, 3, 3, 5])
# Several chunks of rows: 2 rows of two heads in fp64.
SMALL = Tuning(budget=2 * 2 * V * 8)


def tensors(dtype=torch.float64, t=T, v=V, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((t, D), (v, D), (v,), (t, WIDE), (v, WIDE), (v,))
    leaves = [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_(i < 3) for i, x in enumerate(leaves)]


@pytest.fixture(params=["torch", "C++", "two cores", pytest.param("Triton", marks=pytest.mark.interpreter)])
def passes(request, monkeypatch):
    """Select the passes over a tile; all but torch's are for fp32."""
    if request.param == "Triton":
        kernel = pytest.importorskip("leanstep.logprob.engine.kernel")
        chosen = lambda tensor, dtype, count: kernel if dtype == torch.float32 else None  # noqa: E731
        monkeypatch.setattr("leanstep.objectives.distill.kernels_for", chosen)
        yield request.param
        return
    if request.param == "torch":
        monkeypatch.setenv("LEANSTEP_NATIVE", "0")
        yield request.param
        return
    if not NativePasses.is_built():
        pytest.skip("no C++ compiler")
    monkeypatch.setattr("leanstep.logprob.engine.passes.NATIVE_LOGITS", 1)
    monkeypatch.setattr("leanstep.logprob.engine.tiles.KERNEL_TILE_BYTES", 4096)
    monkeypatch.setattr("leanstep.logprob.engine.tiles.MIN_CORE_PRODUCTS", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if request.param == "two cores" else 1)
    yield request.param
    torch.set_num_threads(threads)


def compare(ours, theirs, inputs):
    torch.testing.assert_close(ours, theirs)
    pairs = zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_equals_plain_code(kind):
    hidden, weight, bias, far, wide, teacher_bias = tensors()
    weights = torch.rand(len(ROWS), dtype=torch.float64)
    out = linear_distill_loss(
        hidden, LMHead(weight, bias), TeacherHead(far, LMHead(wide, teacher_bias), Transform(0.5)),
        divergence=kind, temperature=1.7, rows=ROWS, row_weights=weights, normalizer=3.0,
        transform=Transform(scale=0.8, softcap=2.0), tuning=SMALL,
    )  # fmt: skip
    logits = reference_logits(hidden, weight, bias, scale=0.8, softcap=2.0)[ROWS]
    teacher = reference_logits(far, wide, teacher_bias, scale=0.5)[ROWS]
    values = reference_distill(logits, teacher, kind, temperature=1.7)
    torch.testing.assert_close(out.divergence, values.detach())
    log_p = torch.log_softmax(logits / 1.7, -1).detach()
    torch.testing.assert_close(out.entropy, -(log_p.exp() * log_p).sum(-1))
    compare(out.loss, (values * weights).sum() / 3.0, (hidden, weight, bias))


def assert_derivatives(loss, inputs):
    """Check every coordinate by finite differences: gradients are returned once, so gradcheck would fail."""
    grads = torch.autograd.grad(loss(*inputs), inputs)
    for number, grad in enumerate(grads):
        for place in range(grad.numel()):
            sides = []
            for step in (1e-6, -1e-6):
                moved = [x.detach().clone() for x in inputs]
                moved[number].view(-1)[place] += step
                sides.append(loss(*moved))
            torch.testing.assert_close(
                grad.view(-1)[place], (sides[0] - sides[1]) / 2e-6, rtol=1e-6, atol=1e-8
            )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradcheck(kind):
    hidden, weight, bias, far, wide, _ = tensors(t=3, v=7)
    down, up = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, D), (7, 2)))
    labels = HardLabels(torch.tensor([1, 6, 0]), 0.4)

    def loss(h, w, b, a, c):
        head = LMHead(w, b, LoRA(a, c, 0.5))
        return linear_distill_loss(
            h, head, TeacherHead(far, wide), divergence=kind, temperature=2.0, hard=labels,
            transform=Transform(softcap=3.0),
        ).loss  # fmt: skip

    assert_derivatives(loss, (hidden, weight, bias, down, up))


@pytest.mark.parametrize("who", ["given", "top k", "top k without tail", "several", "soft labels"])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", ("jsd", 0.4)], ids=str)
def test_gradcheck_of_other_teachers(who, kind):
    """One row has no weight, one id cannot occur on either side."""
    hidden, weight, _, far, wide, _ = tensors(t=3, v=7)
    bias = torch.zeros(7, dtype=torch.float64)
    bias[2] = -torch.inf
    log_q = torch.log_softmax(torch.randn(3, 7, dtype=torch.float64) + bias, -1)
    ids = torch.tensor([[0, 1], [3, 5], [6, 4]])
    top = log_q.gather(1, ids)
    teacher = {
        "given": TeacherLogProbs(log_q),
        "top k": TeacherTopK(ids, top),
        "top k without tail": TeacherTopK(ids, top, tail=False),
        "several": [(TeacherHead(far, LMHead(wide, bias)), 0.3), (TeacherLogProbs(log_q), 0.6)],
        "soft labels": SoftLabels(log_q.exp()),
    }[who]
    kind = "cross_entropy" if who == "soft labels" else kind
    weights = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)

    def loss(h, w):
        return linear_distill_loss(
            h, LMHead(w, bias), teacher, divergence=kind, row_weights=weights, normalizer=2.0
        ).loss

    assert_derivatives(loss, (hidden, weight))


def test_several_teachers_and_labels():
    hidden, weight, bias, far, wide, _ = tensors()
    log_q = torch.log_softmax(torch.randn(T, V, dtype=torch.float64), -1)
    targets = torch.randint(0, V, (T,))
    out = linear_distill_loss(
        hidden, LMHead(weight, bias), [(TeacherHead(far, wide), 0.7), (TeacherLogProbs(log_q), 0.5)],
        divergence=("jsd", 0.4), hard=HardLabels(targets, 0.25), tuning=SMALL,
    )  # fmt: skip
    logits = reference_logits(hidden, weight, bias)
    soft = 0.7 * reference_distill(logits, far @ wide.T, ("jsd", 0.4))
    soft = soft + 0.5 * reference_distill(logits, log_q, ("jsd", 0.4))
    hard = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(out.hard, hard.detach())
    compare(out.loss, (0.75 * soft + 0.25 * hard).mean(), (hidden, weight, bias))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", ("jsd", 0.5)], ids=str)
def test_top_k_has_the_tail_as_one_more_outcome(kind):
    hidden, weight, bias, far, wide, _ = tensors()
    full = torch.log_softmax(far @ wide.T, -1)
    log_q, ids = full.topk(4, -1)
    out = linear_distill_loss(
        hidden, LMHead(weight, bias), TeacherTopK(ids, log_q), divergence=kind, rows=ROWS
    )
    log_p = torch.log_softmax(reference_logits(hidden, weight, bias), -1)
    values = reference_top_k(log_p, ids, log_q, kind)[ROWS]
    torch.testing.assert_close(out.divergence, values.detach())
    compare(out.loss, values.mean(), (hidden, weight, bias))
    bare = linear_distill_loss(
        hidden, LMHead(weight, bias), TeacherTopK(ids, log_q, tail=False), divergence=kind, rows=ROWS
    )
    log_p = torch.log_softmax(reference_logits(hidden, weight, bias), -1)
    values = divergence(log_p.gather(1, ids), log_q, kind)[ROWS]
    compare(bare.loss, values.mean(), (hidden, weight, bias))


@pytest.mark.parametrize("logit", [12.0, 21.0, 36.0, 90.0])
@pytest.mark.parametrize("kind", ["forward_kl", ("jsd", 0.5)], ids=str)
def test_the_tail_of_a_student_that_is_sure(logit, kind):
    """1 - sum(p) is 0 in fp32 long before the tail's own logits underflow."""
    g = torch.Generator().manual_seed(0)
    log_q, ids = torch.log_softmax(3 * torch.randn(T, V, generator=g), -1).topk(4, -1)
    hidden, weight = torch.randn(T, D, generator=g), torch.randn(V, D, generator=g)
    hidden[0], weight[:, 0] = torch.eye(D)[0], 0.0
    weight[ids[0, 0], 0] = logit
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    log_p = torch.log_softmax(exact[0] @ exact[1].T, -1)
    rest = torch.logsumexp(log_p.scatter(1, ids, -torch.inf), -1, keepdim=True)
    tail = torch.log1p(-log_q.double().exp().sum(-1, keepdim=True))
    outcomes = torch.cat([log_p.gather(1, ids), rest], -1), torch.cat([log_q.double(), tail], -1)
    expected = divergence(*outcomes, kind).mean()
    expected.backward()
    leaves = [t.requires_grad_() for t in (hidden, weight)]
    loss = linear_distill_loss(*leaves, TeacherTopK(ids, log_q), divergence=kind).loss
    loss.backward()
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=2e-6, atol=0)
    for got, wanted in zip(leaves, exact, strict=True):
        torch.testing.assert_close(got.grad.double(), wanted.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["reverse_kl", ("jsd", 0.3), ("skew_kl", 0.1)])
def test_gradient_of_a_student_that_is_nearly_certain(kind):
    # All but e^-25 of the mass on one outcome: in fp32 p is 1 and p - 1 has no digits.
    def gradient(dtype: torch.dtype) -> torch.Tensor:
        weight = torch.tensor([[25.0], [0.0]], dtype=dtype, requires_grad=True)
        teacher = TeacherTopK(torch.tensor([[0]]), torch.tensor([[-0.5]], dtype=dtype))
        linear_distill_loss(torch.ones(1, 1, dtype=dtype), weight, teacher, divergence=kind).loss.backward()
        assert weight.grad is not None
        return weight.grad.double()

    exact = gradient(torch.float64)
    assert exact.abs().max() > 0
    assert (gradient(torch.float32) - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("who", ["head", "given", "top k"])
def test_rows_as_long_as_the_batch_select_every_row_in_order(who):
    """A teacher's tensor of that length could follow the rows or the batch: another order is an error."""
    hidden, weight, _, far, wide, _ = tensors()
    log_q = torch.log_softmax(far @ wide.T, -1)
    top, ids = log_q.topk(4, -1)
    teacher = {
        "head": TeacherHead(far, wide),
        "given": TeacherLogProbs(log_q),
        "top k": TeacherTopK(ids, top),
    }[who]
    whole = linear_distill_loss(hidden, weight, teacher)
    in_order = linear_distill_loss(hidden, weight, teacher, rows=torch.arange(T))
    torch.testing.assert_close(in_order.divergence, whole.divergence)
    for rows in (torch.arange(T).flip(0), torch.zeros(T, dtype=torch.int64)):
        with pytest.raises(ValueError, match="rows: expected every row in order"):
            linear_distill_loss(hidden, weight, teacher, rows=rows)


def test_all_outcomes_given_leave_no_tail():
    hidden, weight, *_ = tensors()
    log_q = torch.log_softmax(torch.randn(T, V, dtype=torch.float64), -1)
    ids = torch.arange(V).expand(T, V)
    top = linear_distill_loss(hidden, weight, TeacherTopK(ids, log_q, tail=False), divergence="reverse_kl")
    full = linear_distill_loss(hidden, weight, TeacherLogProbs(log_q), divergence="reverse_kl")
    with_tail = linear_distill_loss(hidden, weight, TeacherTopK(ids, log_q), divergence="reverse_kl")
    torch.testing.assert_close(with_tail.loss, full.loss)
    compare(top.loss, full.loss, (hidden, weight))


@pytest.mark.parametrize("kind", KINDS[:4] + KINDS[5:7], ids=str)
def test_ids_that_neither_side_has_add_nothing(kind):
    """Columns at -inf on both sides equal a smaller vocabulary; mass where the other has none is infinite."""
    hidden, weight, _, far, wide, _ = tensors()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[[2, V - 1]] = -torch.inf
    left = [v for v in range(V) if v not in (2, V - 1)]
    out = linear_distill_loss(
        hidden, LMHead(weight, bias), TeacherHead(far, LMHead(wide, bias)), divergence=kind
    )
    small = linear_distill_loss(hidden, weight[left], TeacherHead(far, wide[left]), divergence=kind)
    compare(out.loss, small.loss, (hidden, weight))


@pytest.mark.parametrize(
    ("kind", "finite"), [("forward_kl", True), ("reverse_kl", False), (("jsd", 0.5), True)]
)
def test_mass_where_the_teacher_has_none(kind, finite):
    hidden, weight, _, far, wide, _ = tensors()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[2] = -torch.inf
    out = linear_distill_loss(hidden, weight, TeacherHead(far, LMHead(wide, bias)), divergence=kind)
    assert out.divergence.isfinite().all() == finite and bool(out.divergence.isinf().all()) != finite
    out.loss.backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()
    assert bool(hidden.grad.any()) == finite


def test_no_rows_and_rows_without_weight():
    hidden, weight, _, far, wide, _ = tensors()
    none = linear_distill_loss(hidden, weight, TeacherHead(far, wide), rows=torch.zeros(0, dtype=torch.int64))
    none.loss.backward()
    assert none.loss == 0 and not hidden.grad.any() and not weight.grad.any()
    weights = torch.tensor([1.0, 0, 1, 0, 0, 1, 1, 0, 1], dtype=torch.float64)
    some = linear_distill_loss(hidden, weight, TeacherHead(far, wide), row_weights=weights)
    rows = weights.nonzero().flatten()
    compare(
        some.loss,
        linear_distill_loss(hidden, weight, TeacherHead(far, wide), rows=rows).loss,
        (hidden, weight),
    )


# Triton's interpreter is numpy, which speaks of branches that are not taken.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", ("jsd", 0.5), "cross_entropy"], ids=str)
@pytest.mark.parametrize("way", ["bare", "several chunks", "labels, softcap, bias", "given"])
def test_as_near_to_the_truth_as_plain_code(kind, dtype, way, passes):
    """`bare`: 3 of 41 rows, whose logits are saved in the gradient of the weight.

    Several seeds: with 12 numbers, plain code may happen to round all of them well.
    """
    errors = torch.stack([_errors(kind, dtype, way, seed) for seed in range(4)]).amax(0)
    factor = 2 if dtype == torch.float32 else 3
    for plain, ours in errors.T.tolist():
        assert ours <= factor * plain + 2e-7


def _errors(kind, dtype, way, seed):
    """Return errors of plain code and fast path against fp64, relative to each output's maximum, [2, 3]."""
    rows = torch.tensor([3, 40, 17]) if way == "bare" else None
    targets = torch.randint(0, 401, (41,))
    more = way.startswith("labels")
    results = {}
    for name, cast in (("truth", torch.float64), ("plain", dtype), ("ours", dtype)):
        leaves = tensors(t=41, v=401, seed=seed)
        hidden, weight, bias, far, wide, _ = (x.detach().to(dtype).to(cast) for x in leaves)
        hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
        logits = reference_logits(hidden, weight, bias if more else None, softcap=4.0 if more else None)
        teacher = far @ wide.T
        if cast == torch.bfloat16:
            logits, teacher = logits.float(), teacher.float()
        if name == "ours":
            options = {"tuning": Tuning(budget=2 * 16 * 401 * 4)} if way == "several chunks" else {}
            if more:
                options = {"hard": HardLabels(targets, 0.3), "transform": Transform(softcap=4.0)}
                options["temperature"] = 1.3
            log_probs = TeacherLogProbs(torch.log_softmax(teacher, -1)) if way == "given" else None
            loss = linear_distill_loss(
                hidden, LMHead(weight, bias) if more else weight, log_probs or TeacherHead(far, wide),
                divergence=kind, rows=rows, **options,
            ).loss  # fmt: skip
        else:
            labelled = {"temperature": 1.3, "targets": targets, "hard_weight": 0.3} if more else {}
            values = reference_distill(logits, teacher, kind, **labelled)
            loss = (values if rows is None else values[rows]).mean()
        results[name] = [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]
    truth = results["truth"]
    away = [
        (x.double() - exact).abs().max() / exact.abs().max()
        for name in ("plain", "ours")
        for x, exact in zip(results[name], truth, strict=True)
    ]
    return torch.stack(away).view(2, 3)


@pytest.mark.parametrize("beta", [0.0, 0.35, 1.0])
def test_equals_trl_gkd(beta):
    trainer = pytest.importorskip("trl.experimental.gkd.gkd_trainer").GKDTrainer
    hidden, weight, _, far, wide, _ = tensors(t=12)
    labels = torch.randint(0, V, (2, 6))
    labels[0, :3] = labels[1, 4:] = -100
    theirs = trainer.generalized_jsd_loss(
        (hidden @ weight.T).view(2, 6, V), (far @ wide.T).view(2, 6, V), labels, beta, 0.9
    )
    rows = (labels.flatten() != -100).nonzero().flatten()
    ours = linear_distill_loss(
        hidden, weight, TeacherHead(far, wide), divergence=("jsd", beta), temperature=0.9, rows=rows
    )
    compare(ours.loss, theirs, (hidden, weight))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"divergence": "jsd"}, r'divergence: expected \("jsd", value\)'),
        ({"divergence": ("forward_kl", 0.5)}, 'divergence: expected "forward_kl" without a value'),
        ({"divergence": "tv"}, "divergence: expected one of forward_kl"),
        ({"temperature": 0.0}, "temperature: expected a value > 0"),
        ({"normalizer": 0}, "normalizer: expected a number > 0"),
        ({"tuning": Tuning(main_grad=torch.zeros(V, D))}, "tuning: expected only a budget here"),
        ({"teacher": 3}, "teacher: expected TeacherHead"),
        ({"teacher": TeacherHead(torch.zeros(4, WIDE), torch.zeros(V, WIDE))}, "teacher.hidden: expected 9"),
        (
            {"teacher": TeacherHead(torch.zeros(T, WIDE), torch.zeros(8, WIDE))},
            r"teacher.weight: expected \[29",
        ),
    ],
)
def test_refusals(change, complaint):
    hidden, weight, _, far, wide, _ = tensors(torch.float32)
    options = {"teacher": TeacherHead(far, wide), **change}
    with pytest.raises(ValueError, match=complaint):
        linear_distill_loss(hidden, weight, **options)
