"""Every argument name of version 0.1 still works, warns, and gives what the new spelling gives."""

from __future__ import annotations

import inspect

import pytest
import torch

from leanstep.logprob import (
    Allowed,
    LMHead,
    LoRA,
    PolicyBatch,
    ReferenceHead,
    Transform,
    Tuning,
    VocabShards,
    linear_logprobs,
    linear_policy_loss,
    token_logprobs,
)
from leanstep.logprob.deprecated import OLD_NAMES
from leanstep.logprob.rows import plan_rows, select_allowed, select_keep

T, D, V = 5, 4, 11
G = torch.Generator().manual_seed(0)
HIDDEN, LOGITS = torch.randn(T, D, generator=G), torch.randn(T, V, generator=G)
WEIGHT, OTHER, BIAS = (torch.randn(*s, generator=G) for s in ((V, D), (V, D), (V,)))
TARGETS = torch.randint(0, V - 1, (T,), generator=G)
OLD, ADVANTAGES = torch.randn(T, generator=G), torch.randn(T, generator=G)
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
ADAPTER = LoRA(torch.randn(2, D, generator=G), torch.randn(V, 2, generator=G), 0.5)
SETS = (torch.tensor([1, 2, 3]), torch.tensor([0, 1, 1, 2, 3, 3]))
BATCH = PolicyBatch(OLD, ADVANTAGES)
KL = {"outputs": ("kl",)}

# Old arguments, new arguments.
HEAD = {
    "bias": ({"bias": BIAS}, {"weight": LMHead(WEIGHT, BIAS)}),
    "lora": ({"lora": ADAPTER}, {"weight": LMHead(WEIGHT, lora=ADAPTER)}),
    "scale": ({"scale": 0.5}, {"transform": Transform(scale=0.5)}),
    "softcap": ({"softcap": 2.0}, {"transform": Transform(softcap=2.0)}),
    "budget": ({"budget": 4096}, {"tuning": Tuning(budget=4096)}),
    "reduce_grad": ({"reduce_grad": "none"}, {"shards": VocabShards(reduce_grad="none")}),
}
SHARDS = {
    "group": ({"group": None}, {"shards": VocabShards()}),
    "vocab_start": ({"vocab_start": 0}, {"shards": VocabShards(start=0)}),
    "vocab_total": ({"vocab_total": 10}, {"shards": VocabShards(total=10)}),
}
LINEAR = {
    **HEAD,
    **SHARDS,
    "keep": ({"keep": SETS}, {"allowed": Allowed(*SETS)}),
    "extras": ({"extras": ("lse", ("top_k", 2))}, {"outputs": ("lse", ("top_k", 2))}),
    "label_smoothing": ({"label_smoothing": 0.1}, {"transform": Transform(label_smoothing=0.1)}),
    "ref_weight": ({"ref_weight": OTHER, **KL}, {"reference": ReferenceHead(OTHER), **KL}),
    "ref_hidden": ({"ref_hidden": 2 * HIDDEN, **KL}, {"reference": ReferenceHead(hidden=2 * HIDDEN), **KL}),
    "ref_bias": (
        {"ref_weight": OTHER, "ref_bias": BIAS, **KL},
        {"reference": ReferenceHead(OTHER, bias=BIAS), **KL},
    ),
    "sequence_parallel": ({"sequence_parallel": True}, {"shards": VocabShards(sequence_parallel=True)}),
    "tile": ({"tile": (2, 3)}, {"tuning": Tuning(tile=(2, 3))}),
    "main_grad": ({"main_grad": WEIGHT}, {"tuning": Tuning(main_grad=WEIGHT)}),
    "logits_in_grad": ({"logits_in_grad": False}, {"tuning": Tuning(save_logits="none")}),
    "logit_bytes": ({"logit_bytes": 99}, {"tuning": Tuning(save_logits=("grad", 99))}),
}
LOGITS_LEVEL = {
    **SHARDS,
    "keep": ({"keep": SETS}, {"allowed": SETS}),
    "return_lse": ({"return_lse": True}, {"outputs": ("lse",)}),
    "chunk_rows": ({"chunk_rows": 2}, {"tuning": Tuning(tile=(2, None))}),
}
POLICY = {
    **HEAD,
    **SHARDS,
    "old_logp": ({"old_logp": OLD, "advantages": ADVANTAGES}, {}),
    "advantages": ({"old_logp": OLD, "advantages": ADVANTAGES}, {}),
    "mask": ({"mask": MASK}, {"batch": PolicyBatch(OLD, ADVANTAGES, MASK)}),
    "ref_logp": ({"ref_logp": OLD}, {"batch": PolicyBatch(OLD, ADVANTAGES, ref_logp=OLD)}),
    "sequence_lengths": (
        {"sequence_lengths": [2, 3]},
        {"batch": PolicyBatch(OLD, ADVANTAGES, sequence_lengths=[2, 3])},
    ),
    "entropy_metric": ({"entropy_metric": True}, {"entropy": "metric"}),
}


def assert_same(old, new):
    for a, b in zip(old, new, strict=True):
        if isinstance(b, tuple):
            assert_same(a, b)
        elif isinstance(b, dict):
            assert_same(a.values(), b.values())
        else:
            assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("name", LINEAR)
def test_linear_logprobs(name):
    old, new = LINEAR[name]
    with pytest.warns(DeprecationWarning) as caught:
        found = linear_logprobs(HIDDEN, WEIGHT, TARGETS, **old)
    assert any(f"{name}= is deprecated, use " in str(w.message) for w in caught)
    assert_same(found, linear_logprobs(**{"hidden": HIDDEN, "weight": WEIGHT, "targets": TARGETS, **new}))


@pytest.mark.parametrize("name", LOGITS_LEVEL)
def test_token_logprobs(name):
    old, new = LOGITS_LEVEL[name]
    with pytest.warns(DeprecationWarning) as caught:
        found = token_logprobs(LOGITS, TARGETS, **old)
    assert any(f"{name}= is deprecated, use " in str(w.message) for w in caught)
    assert_same(found, token_logprobs(LOGITS, TARGETS, **new))


@pytest.mark.parametrize("name", POLICY)
def test_linear_policy_loss(name):
    old, new = POLICY[name]
    given = {"hidden": HIDDEN, "weight": WEIGHT, "targets": TARGETS, "batch": BATCH, **new}
    batch = [] if name in ("old_logp", "advantages") else [BATCH]
    with pytest.warns(DeprecationWarning) as caught:
        found = linear_policy_loss(HIDDEN, WEIGHT, TARGETS, *batch, objective="ppo", **old)
    assert any(f"{name}= is deprecated, use " in str(w.message) for w in caught)
    assert_same(found, linear_policy_loss(**given, objective="ppo"))


def test_tokens_are_targets():
    calls = (
        (linear_logprobs, {"hidden": HIDDEN, "weight": WEIGHT}),
        (token_logprobs, {"logits": LOGITS}),
        (linear_policy_loss, {"hidden": HIDDEN, "weight": WEIGHT, "batch": BATCH, "objective": "ppo"}),
    )
    for function, given in calls:
        with pytest.warns(DeprecationWarning, match="tokens= is deprecated, use targets="):
            found = function(**given, tokens=TARGETS)
        assert_same(found, function(**given, targets=TARGETS))


def test_every_old_name_is_tried():
    assert set(OLD_NAMES) == {"tokens", *LINEAR, *LOGITS_LEVEL, *POLICY}


def test_the_warning_spells_the_new_call():
    with pytest.warns(
        DeprecationWarning, match=r"softcap= is deprecated, use transform=Transform\(softcap=\)"
    ):
        linear_logprobs(HIDDEN, WEIGHT, TARGETS, softcap=3.0)


def test_old_and_new_arguments_mix():
    with pytest.warns(DeprecationWarning):
        found = linear_logprobs(HIDDEN, WEIGHT, TARGETS, transform=Transform(softcap=3.0), scale=0.5)
    assert_same(found, linear_logprobs(HIDDEN, WEIGHT, TARGETS, transform=Transform(0.5, 3.0)))


def test_an_unknown_name_is_an_error():
    with pytest.raises(TypeError, match="colour"):
        linear_logprobs(HIDDEN, WEIGHT, TARGETS, colour=1)


@pytest.mark.parametrize("function", [linear_logprobs, token_logprobs, linear_policy_loss])
def test_at_most_twelve_parameters(function):
    assert len(inspect.signature(function).parameters) <= 12


def test_select_keep_is_select_allowed():
    plan = plan_rows([4], [2])
    with pytest.warns(DeprecationWarning, match="use select_allowed"):
        found = select_keep([[1, 2, 3]], [[0, 1, 3]], plan)
    assert_same(found, select_allowed([[1, 2, 3]], [[0, 1, 3]], plan))
