"""linear_distill_loss against plain code in fp64, numerical derivatives, TRL's GKD."""

from __future__ import annotations

import pytest
import torch

from leanstep.heads import (
    Head,
    LoRA,
    TeacherHead,
    TeacherLogProbs,
    TeacherTopK,
    linear_distill_loss,
    losses,
)
from leanstep.heads.losses import row_divergence as divergence
from leanstep.heads.reference import reference_distill, reference_logits, reference_top_k

T, D, WIDE, V = 9, 4, 6, 29
KINDS = ["forward_kl", "reverse_kl", ("jsd", 0.3), ("jsd", 0.0), ("jsd", 1.0), ("skew_kl", 0.1)]
KINDS += [("skew_reverse_kl", 0.1)]
ROWS = torch.tensor([7, 0, 3, 3, 5])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of rows: 2 rows in fp64."""
    import sys

    rowwise = sys.modules["leanstep.heads.rowwise"]
    monkeypatch.setattr(rowwise, "CPU_BLOCK_BYTES", 2 * V * 8)
    monkeypatch.setattr(rowwise, "FEWEST_ROWS", 1)


def tensors(dtype=torch.float64, t=T, v=V, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((t, D), (v, D), (v,), (t, WIDE), (v, WIDE), (v,))
    leaves = [torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]
    return [x.requires_grad_(i < 3) for i, x in enumerate(leaves)]


def compare(ours, theirs, inputs):
    torch.testing.assert_close(ours, theirs)
    pairs = zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_equals_plain_code(kind):
    hidden, weight, bias, far, wide, teacher_bias = tensors()
    weights = torch.rand(len(ROWS), dtype=torch.float64)
    lora = LoRA(*(torch.randn(*s, dtype=torch.float64) for s in ((2, WIDE), (V, 2))), 0.7)
    out = linear_distill_loss(
        hidden, Head(weight, bias, None, 0.8, 2.0), TeacherHead(far, Head(wide, teacher_bias, lora, 0.5)),
        divergence=kind, temperature=1.7, rows=ROWS, row_weights=weights, normalizer=3.0,
    )  # fmt: skip
    logits = reference_logits(hidden, weight, bias, scale=0.8, softcap=2.0)[ROWS]
    teacher = reference_logits(far, wide + 0.7 * lora.up @ lora.down, teacher_bias, scale=0.5)[ROWS]
    values = reference_distill(logits, teacher, kind, temperature=1.7)
    torch.testing.assert_close(out.divergence, values.detach())
    log_p = torch.log_softmax(logits / 1.7, -1).detach()
    torch.testing.assert_close(out.entropy, -(log_p.exp() * log_p).sum(-1))
    compare(out.loss, (values * weights).sum() / 3.0, (hidden, weight, bias))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_gradcheck(kind):
    hidden, weight, bias, far, wide, _ = tensors(t=3, v=7)
    down, up = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, D), (7, 2)))

    def loss(h, w, b, a, c):
        head = Head(w, b, LoRA(a, c, 0.5), 1.0, 3.0)
        return linear_distill_loss(h, head, TeacherHead(far, wide), divergence=kind, temperature=2.0).loss

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias, down, up))


@pytest.mark.parametrize("who", ["given", "top k", "top k without tail"])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", ("jsd", 0.4)], ids=str)
def test_gradcheck_of_other_teachers(who, kind):
    """One row has no weight, one id cannot occur on either side."""
    hidden, weight, *_ = tensors(t=3, v=7)
    bias = torch.zeros(7, dtype=torch.float64)
    bias[2] = -torch.inf
    log_q = torch.log_softmax(torch.randn(3, 7, dtype=torch.float64) + bias, -1)
    ids = torch.tensor([[0, 1], [3, 5], [6, 4]])
    top = log_q.gather(1, ids)
    teacher = {
        "given": TeacherLogProbs(log_q),
        "top k": TeacherTopK(ids, top),
        "top k without tail": TeacherTopK(ids, top, tail=False),
    }[who]
    weights = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)

    def loss(h, w):
        return linear_distill_loss(
            h, Head(w, bias), teacher, divergence=kind, row_weights=weights, normalizer=2.0
        ).loss

    assert torch.autograd.gradcheck(loss, (hidden, weight))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", ("jsd", 0.5)], ids=str)
def test_top_k_has_the_tail_as_one_more_outcome(kind):
    hidden, weight, bias, far, wide, _ = tensors()
    full = torch.log_softmax(far @ wide.T, -1)
    log_q, ids = full.topk(4, -1)
    out = linear_distill_loss(hidden, Head(weight, bias), TeacherTopK(ids, log_q), divergence=kind, rows=ROWS)
    log_p = torch.log_softmax(reference_logits(hidden, weight, bias), -1)
    values = reference_top_k(log_p, ids, log_q, kind)[ROWS]
    torch.testing.assert_close(out.divergence, values.detach())
    compare(out.loss, values.mean(), (hidden, weight, bias))
    bare = linear_distill_loss(
        hidden, Head(weight, bias), TeacherTopK(ids, log_q, tail=False), divergence=kind, rows=ROWS
    )
    log_p = torch.log_softmax(reference_logits(hidden, weight, bias), -1)
    values = divergence(log_p.gather(1, ids), log_q, kind)[ROWS]
    compare(bare.loss, values.mean(), (hidden, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 5.0])
def test_the_tail_of_a_teacher_in_another_dtype_is_summed_in_the_students(dtype, size):
    """The same rounded numbers in fp64 are the truth; only the student's own rounding may differ."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(16, D, generator=g), torch.randn(200, D, generator=g)
    log_q, ids = (torch.randn(16, 200, generator=g) * size).log_softmax(-1).topk(12)
    log_q = log_q.to(dtype)
    results = []
    for kind, teacher in ((torch.float64, log_q.double()), (torch.float32, log_q)):
        x = hidden.to(kind).requires_grad_()
        loss = linear_distill_loss(x, weight.to(kind), TeacherTopK(ids, teacher)).loss
        results.append((loss.detach(), torch.autograd.grad(loss, x)[0]))
    (loss, gradient), (ours, found) = results
    assert ours.item() == pytest.approx(loss.item(), rel=2e-6)
    assert (found - gradient).abs().max() <= 5e-6 * gradient.abs().max()


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


@pytest.mark.parametrize("kind", KINDS[:4] + KINDS[5:7], ids=str)
def test_ids_that_neither_side_has_add_nothing(kind):
    """Columns at -inf on both sides equal a smaller vocabulary; mass where the other has none is infinite."""
    hidden, weight, _, far, wide, _ = tensors()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[[2, V - 1]] = -torch.inf
    left = [v for v in range(V) if v not in (2, V - 1)]
    out = linear_distill_loss(hidden, Head(weight, bias), TeacherHead(far, Head(wide, bias)), divergence=kind)
    small = linear_distill_loss(hidden, weight[left], TeacherHead(far, wide[left]), divergence=kind)
    compare(out.loss, small.loss, (hidden, weight))


@pytest.mark.parametrize(
    ("kind", "finite"), [("forward_kl", True), ("reverse_kl", False), (("jsd", 0.5), True)]
)
def test_mass_where_the_teacher_has_none(kind, finite):
    hidden, weight, _, far, wide, _ = tensors()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[2] = -torch.inf
    out = linear_distill_loss(hidden, weight, TeacherHead(far, Head(wide, bias)), divergence=kind)
    assert out.divergence.isfinite().all() == finite and bool(out.divergence.isinf().all()) != finite
    out.loss.backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()
    assert bool(hidden.grad.any()) == finite


def test_no_rows_and_rows_without_weight():
    hidden, weight, _, far, wide, _ = tensors()
    none = linear_distill_loss(hidden, weight, TeacherHead(far, wide), rows=torch.zeros(0, dtype=torch.int64))
    none.loss.backward()
    assert none.loss == 0 and not hidden.grad.any() and not weight.grad.any()
    zeros = torch.zeros(T, dtype=torch.float64)
    assert linear_distill_loss(hidden, weight, TeacherHead(far, wide), row_weights=zeros).loss == 0
    weights = torch.tensor([1.0, 0, 1, 0, 0, 1, 1, 0, 1], dtype=torch.float64)
    some = linear_distill_loss(hidden, weight, TeacherHead(far, wide), row_weights=weights)
    rows = weights.nonzero().flatten()
    compare(
        some.loss,
        linear_distill_loss(hidden, weight, TeacherHead(far, wide), rows=rows).loss,
        (hidden, weight),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", ("jsd", 0.5), ("skew_kl", 0.1)], ids=str)
def test_as_near_to_the_truth_as_plain_code(kind, dtype):
    """Students and teachers between even and nearly sure; several seeds, as plain code may be lucky."""
    errors = []
    for seed in range(4):
        results = {}
        for name, cast in (("truth", torch.float64), ("plain", dtype), ("ours", dtype)):
            leaves = tensors(t=41, v=401, seed=seed)
            hidden, weight, _, far, wide, _ = (x.detach().to(dtype).to(cast) for x in leaves)
            hidden = (hidden * (1 + 4 * seed)).requires_grad_()
            weight.requires_grad_()
            logits, teacher = hidden @ weight.T, far @ wide.T
            if cast == torch.bfloat16:
                logits, teacher = logits.float(), teacher.float()
            if name == "ours":
                loss = linear_distill_loss(hidden, weight, TeacherHead(far, wide), divergence=kind).loss
            else:
                loss = reference_distill(logits, teacher, kind).mean()
            results[name] = [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]
        away = [
            (x.double() - exact).abs().max() / exact.abs().max()
            for name in ("plain", "ours")
            for x, exact in zip(results[name], results["truth"], strict=True)
        ]
        errors.append(torch.stack(away).view(2, 3))
    factor = 2 if dtype == torch.float32 else 3
    for plain, ours in torch.stack(errors).amax(0).T.tolist():
        assert ours <= factor * plain + 2e-7


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
        ({"normalizer": torch.ones(2)}, "normalizer: expected a number or a 0-dimensional constant"),
        ({"divergence": ("jsd", 1.5)}, "divergence: expected 0 <= value <= 1"),
        ({"teacher": 3}, "teacher: expected TeacherHead"),
        ({"teacher": TeacherHead(torch.zeros(4, WIDE), torch.zeros(V, WIDE))}, "teacher: expected 9"),
        (
            {"teacher": TeacherHead(torch.zeros(T, WIDE), torch.zeros(8, WIDE))},
            r"teacher.head: expected \[29",
        ),
    ],
)
def test_refusals(change, complaint):
    hidden, weight, _, far, wide, _ = tensors(torch.float32)
    options = {"teacher": TeacherHead(far, wide), **change}
    with pytest.raises(ValueError, match=complaint):
        linear_distill_loss(hidden, weight, **options)


@pytest.mark.compile
@pytest.mark.parametrize("kind", [("jsd", 0.5), "forward_kl"], ids=str)
def test_compiled_rows_equal_eager_rows(kind):
    """As on a GPU: one graph serves blocks of several heights, and computes the values and the gradient."""
    generator = torch.Generator().manual_seed(4)
    for function, with_upstream in zip(losses._full_rows(kind, 1.3, True, False), (False, True), strict=True):
        fused = losses.compiled(function, True)
        for n in (16, 5, 7):
            z, t, g = (torch.randn(*shape, generator=generator) for shape in ((n, 401), (n, 401), (n,)))
            arguments = (z, (g, None), t) if with_upstream else (z, t)
            torch.testing.assert_close(fused(*arguments), function(*arguments), rtol=1e-5, atol=1e-6)


def test_rows_that_cannot_be_compiled_run_as_they_are(monkeypatch):
    def fails(function, **_):
        def call(*_):
            raise torch._dynamo.exc.BackendCompilerFailed("inductor", RuntimeError("no compiler"), None)

        return call

    monkeypatch.setattr(torch, "compile", fails)
    call = losses.compiled(torch.exp, True)
    x = torch.randn(3, generator=torch.Generator().manual_seed(5))
    with pytest.warns(RuntimeWarning, match="runs as separate kernels"):
        assert torch.equal(call(x), x.exp())
    assert torch.equal(call(x), x.exp())
