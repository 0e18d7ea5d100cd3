"""Replayed sampling masks against plain masked code in fp64, numerical derivatives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from leanstep.logprob import Allowed, LMHead, LoRA, ReferenceHead, Transform, Tuning, linear_logprobs
from leanstep.objectives import linear_masked_logprobs
from leanstep.objectives.reference import reference_logits, reference_masked

T, D, V = 7, 4, 97
ROWS = torch.tensor([5, 0, 2, 2, 6, 3])
# Row 1 keeps its target alone, row 3 keeps nothing else either; row 4 keeps its target twice.
SETS = [[3, 9, 40], [11], [0, 96, 5, 50], [], [7, 7, 8], [60]]
TARGETS = torch.tensor([9, 11, 4, 33, 7, 61])


def allowed(sets=SETS, has_set=None):
    ids = torch.tensor([v for row in sets for v in row], dtype=torch.int64)
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in sets])])
    return Allowed(ids, offsets, has_set)


def tensors(seed=0):
    g = torch.Generator().manual_seed(seed)
    leaves = [
        torch.randn(*s, generator=g, dtype=torch.float64) for s in ((T, D), (V, D), (V,), (T, 3), (V, 3))
    ]
    return [x.requires_grad_(i < 3) for i, x in enumerate(leaves)]


def compare(ours, theirs, inputs):
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
    g = torch.Generator().manual_seed(9)
    upstream = [torch.randn(x.shape, generator=g, dtype=x.dtype) for x in theirs]
    pairs = zip(
        torch.autograd.grad(ours, inputs, upstream),
        torch.autograd.grad(theirs, inputs, upstream),
        strict=True,
    )
    for mine, other in pairs:
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("sets", [SETS, [list(range(90))] * 6], ids=["sparse", "dense"])
def test_equals_plain_masked_code(sets):
    hidden, weight, bias, far, wide = tensors()
    out = linear_masked_logprobs(
        hidden, LMHead(weight, bias), TARGETS, allowed(sets), rows=ROWS, entropy="grad", temperature=0.7,
        reference=ReferenceHead(wide, far), transform=Transform(0.9, 4.0), tuning=Tuning(budget=400),
    )  # fmt: skip
    cap = {"scale": 0.9, "softcap": 4.0}
    logits, other = (
        reference_logits(h, w, b, **cap) / 0.7 for h, w, b in ((hidden, weight, bias), (far, wide, None))
    )
    theirs = reference_masked(logits[ROWS], TARGETS, sets, other[ROWS])
    compare(out[:3], theirs, (hidden, weight, bias))
    assert out.path == ((4, 2, 0) if sets is SETS else (0, 0, 6))


@pytest.mark.parametrize("whole_entropy", [False, True])
@pytest.mark.parametrize("sets", [SETS, [list(range(90))] * 6], ids=["sparse", "dense"])
def test_a_record_means_the_same_to_linear_logprobs(sets, whole_entropy):
    """`kept=` here and `allowed=` there: the same log-prob, the same entropy, the same gradients."""
    hidden, weight, bias, *_ = tensors()
    record = allowed(sets)._replace(whole_entropy=whole_entropy)
    options = {"rows": ROWS, "entropy": "grad", "temperature": 0.7, "transform": Transform(0.9, 4.0)}
    ours = linear_masked_logprobs(hidden, LMHead(weight, bias), TARGETS, record, **options)
    theirs = linear_logprobs(hidden, LMHead(weight, bias), TARGETS, allowed=record, **options)
    compare(ours[:2], theirs[:2], (hidden, weight, bias))


def test_a_record_that_leaves_the_entropy_open():
    """The default is the whole vocabulary if all logits are read, otherwise the kept ids."""
    hidden, weight, *_ = tensors()
    record, options = allowed(SETS), {"rows": ROWS, "entropy": "metric"}
    narrow = linear_masked_logprobs(hidden, weight, TARGETS, record, **options).entropy
    whole = linear_logprobs(hidden, weight, TARGETS, allowed=record, **options).entropy
    same = linear_logprobs(hidden, weight, TARGETS, **options).entropy
    assert narrow is not None and whole is not None and same is not None
    torch.testing.assert_close(whole, same)
    assert bool((narrow < 0.9 * whole).all())


def test_gradcheck():
    hidden, weight, bias, far, wide = tensors()
    temperature = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)

    def outputs(h, w, b):
        out = linear_masked_logprobs(
            h, LMHead(w, b), TARGETS, allowed(), rows=ROWS, entropy="grad", temperature=temperature,
            reference=ReferenceHead(wide, far),
        )  # fmt: skip
        return out.logp, out.entropy, out.kl

    assert torch.autograd.gradcheck(outputs, (hidden, weight[:, :], bias))


def test_a_target_alone_never_enters_the_head():
    """Log-prob and gradient are exactly 0 for any values of the hidden row."""
    hidden, weight, *_ = tensors()
    with torch.no_grad():
        hidden[0] = torch.nan
    out = linear_masked_logprobs(hidden, weight, TARGETS, allowed(), rows=ROWS, entropy="grad")
    assert out.logp[1] == 0 and out.entropy[1] == 0 and out.logp[3] == 0
    (out.logp.sum() + out.entropy.sum()).backward()
    assert not hidden.grad[0].any() and hidden.grad.isfinite().all() and weight.grad.isfinite().all()
    untouched = sorted(set(range(V)) - {3, 9, 40, 0, 96, 5, 50, 4, 7, 8, 60, 61})
    assert not weight.grad[untouched].any()


def test_rows_without_a_set_run_over_the_whole_vocabulary():
    hidden, weight, bias, far, wide = tensors()
    has_set = torch.tensor([True, False, True, True, False, True])
    out = linear_masked_logprobs(
        hidden, LMHead(weight, bias), TARGETS, allowed(has_set=has_set), rows=ROWS, entropy="grad",
        reference=ReferenceHead(wide, far),
    )  # fmt: skip
    sets = [ids if has else list(range(V)) for ids, has in zip(SETS, has_set, strict=True)]
    theirs = reference_masked(
        reference_logits(hidden, weight, bias)[ROWS], TARGETS, sets, (far @ wide.T)[ROWS]
    )
    compare(out[:3], theirs, (hidden, weight, bias))
    assert out.path == (3, 1, 2)


def test_infinite_logits_count_for_nothing():
    hidden, weight, *_ = tensors()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[[40, 50, 60, 61]] = -torch.inf
    out = linear_masked_logprobs(hidden, LMHead(weight, bias), TARGETS, allowed(), rows=ROWS, entropy="grad")
    without = [[v for v in row if v not in (40, 50)] for row in SETS]
    rest = linear_masked_logprobs(hidden, weight, TARGETS, allowed(without), rows=ROWS, entropy="grad")
    compare((out.logp[:5], out.entropy[:5]), (rest.logp[:5], rest.entropy[:5]), (hidden, weight))
    # The last row has nothing left at all.
    assert out.logp[5] == -torch.inf
    out = linear_masked_logprobs(hidden, LMHead(weight, bias), TARGETS, allowed(), rows=ROWS)
    (grad,) = torch.autograd.grad(out.logp[5], hidden)
    assert not grad.any()


def test_no_rows_and_gradient_into_main_grad():
    hidden, weight, *_ = tensors()
    none = torch.zeros(0, dtype=torch.int64)
    empty = linear_masked_logprobs(
        hidden, weight, none, Allowed(none, torch.zeros(1, dtype=torch.int64)), rows=none
    )
    empty.logp.sum().backward()
    assert empty.logp.shape == (0,) and not hidden.grad.any() and not weight.grad.any()
    main = torch.ones_like(weight)
    out = linear_masked_logprobs(hidden, weight, TARGETS, allowed(), rows=ROWS, tuning=Tuning(main_grad=main))
    plain = linear_masked_logprobs(hidden, weight, TARGETS, allowed(), rows=ROWS)
    (expected,) = torch.autograd.grad(plain.logp.sum(), weight)
    out.logp.sum().backward()
    torch.testing.assert_close(main - 1, expected)


def test_large_sets_add_to_main_grad_too():
    hidden, weight, *_ = tensors()
    main, record = torch.ones_like(weight), allowed([list(range(90))] * 6)
    for tuning in (Tuning(main_grad=main), None):
        linear_masked_logprobs(
            hidden, weight, TARGETS, record, rows=ROWS, tuning=tuning
        ).logp.sum().backward()
        assert (weight.grad is None) == (tuning is not None)
    torch.testing.assert_close(main - 1, weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_near_to_the_truth_as_plain_code(dtype):
    results = {}
    for name, cast in (("truth", torch.float64), ("plain", dtype), ("ours", dtype)):
        hidden, weight = (x.detach().to(dtype).to(cast).requires_grad_() for x in tensors()[:2])
        if name == "ours":
            out = linear_masked_logprobs(hidden, weight, TARGETS, allowed(), rows=ROWS, entropy="grad")[:2]
        else:
            logits = reference_logits(hidden, weight)[ROWS]
            out = reference_masked(logits.float() if cast == dtype else logits, TARGETS, SETS)[:2]
        grads = torch.autograd.grad(out[0].sum() + 0.5 * out[1].sum(), (hidden, weight))
        results[name] = [x.detach() for x in (*out, *grads)]
    for truth, plain, ours in zip(results["truth"], results["plain"], results["ours"], strict=True):
        allowance = 3 * (plain.double() - truth).abs().max() + 3e-7 * truth.abs().max()
        assert (ours.double() - truth).abs().max() <= allowance


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"entropy": "yes"}, "entropy: expected one of none, metric, grad"),
        ({"kept": allowed(SETS[:3])}, "allowed: expected 7 offsets for 6 rows, got 4"),
        ({"kept": allowed([[200], *SETS[1:]])}, r"allowed ids: expected ids in \[0, 97\)"),
        ({"transform": Transform(label_smoothing=0.1)}, "expected label_smoothing 0"),
        ({"reference": ReferenceHead()}, "reference: expected a ReferenceHead with weight or hidden"),
        ({"weight": LMHead(torch.zeros(V, D), None, LoRA(torch.zeros(2, D), torch.zeros(V, 2)))}, "LoRA"),
    ],
)  # fmt: skip
def test_refusals(change, complaint):
    hidden, weight, *_ = (x.detach().float() for x in tensors())
    options = {"weight": weight, "targets": TARGETS, "kept": allowed(), "rows": ROWS, **change}
    with pytest.raises(ValueError, match=complaint):
        linear_masked_logprobs(hidden, **options)


def test_sets_as_lists_are_refused_in_one_line():
    hidden, weight, targets = torch.randn(3, 4), torch.randn(9, 4), torch.tensor([2, 4, 7])
    with pytest.raises(ValueError, match=r"kept: expected Allowed\(ids, offsets\).*got one with a list"):
        linear_masked_logprobs(hidden, weight, targets, [[1, 2, 3], [4], [7, 8]])
