"""linear_policy_loss equals linear_logprobs followed by the plain loss, in values and in every gradient."""

from __future__ import annotations

import pytest
import torch

from leanstep.heads import OBJECTIVES as NAMES
from leanstep.heads import Head, LoRA, logprob, losses, policy_loss
from leanstep.heads import linear_logprobs as of_head
from leanstep.heads import linear_policy_loss as loss_of_head


def linear_logprobs(hidden, weight, targets, *, bias=None, scale=1.0, softcap=None, **options):
    return of_head(hidden, Head(weight, bias, None, scale, softcap), targets, **options)


def linear_policy_loss(
    hidden, weight, targets, *, old_logp, advantages, bias=None, lora=None, scale=1.0, softcap=None, **options
):
    head = Head(weight, bias, lora, scale, softcap)
    return loss_of_head(hidden, head, targets, old_logp, advantages, **options)


T, D, V = 19, 6, 41
LENGTHS = [3, 0, 6, 2]
ROWS = torch.tensor([2, 3, 4, 7, 8, 9, 10, 11, 12, 17, 18])


def make(dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape, scale=1.0):
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(dtype)

    n = len(ROWS)
    tensors = {"hidden": randn(T, D), "weight": randn(V, D), "bias": randn(V, scale=0.1)}
    tokens = torch.randint(0, V, (n,), generator=g)
    with torch.no_grad():
        logp = linear_logprobs(
            tensors["hidden"], tensors["weight"], tokens, bias=tensors["bias"], rows=ROWS
        ).logp
    data = {
        # Spread wide enough that some ratios are clipped on either side.
        "old_logp": logp + randn(n, scale=0.4).to(logp.dtype),
        "advantages": randn(n),
        "ref_logp": logp + randn(n, scale=0.3).to(logp.dtype),
        "mask": (torch.rand(n, generator=g) > 0.25).to(dtype),
    }
    return tensors, tokens, data


OBJECTIVES = {
    "ppo": {"objective": "ppo"},
    "dapo": {"objective": "dapo"},
    "cispo": {"objective": "cispo"},
    "gspo": {"objective": "gspo", "clip_low": 0.1, "clip_high": 0.1},
    "dual": {"dual_clip": 1.3, "entropy_coef": 0.01},
    "k1": {"kl": "k1", "kl_coef": 0.1},
    "k2": {"kl": "k2", "kl_coef": 0.1},
    "k3": {"kl": "k3", "kl_coef": 0.1, "entropy_coef": 0.02},
    "gspo-entropy": {"objective": "gspo", "clip_low": 0.3, "clip_high": 0.3, "entropy_coef": 0.02},
}


def composed(tensors, tokens, data, objective, normalizer, upstream=1.0, **options):
    leaves = {k: v.detach().requires_grad_() for k, v in tensors.items()}
    out = linear_logprobs(
        leaves["hidden"], leaves["weight"], tokens, bias=leaves["bias"], rows=ROWS, entropy="grad", **options
    )
    result = policy_loss(
        out.logp, data["old_logp"], data["advantages"], **objective, entropy=out.entropy,
        ref_logp=data["ref_logp"], mask=data["mask"], normalizer=normalizer, sequence_lengths=LENGTHS,
    )  # fmt: skip
    (result.loss * upstream).backward()
    return result, {k: v.grad for k, v in leaves.items()}


def fused(tensors, tokens, data, objective, normalizer, upstream=1.0, **options):
    leaves = {k: v.detach().requires_grad_() for k, v in tensors.items()}
    result = linear_policy_loss(
        leaves["hidden"], leaves["weight"], tokens, bias=leaves["bias"], rows=ROWS, **objective,
        normalizer=normalizer, sequence_lengths=LENGTHS, entropy="metric", **data, **options,
    )  # fmt: skip
    (result.loss * upstream).backward()
    return result, {k: v.grad for k, v in leaves.items()}


# The smallest chunk holds 4 rows of logits: several chunks, and a sequence of 6 that does not fit.
@pytest.mark.parametrize("rows", [None, 4, 1])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_fused_equals_composed(name, rows, monkeypatch):
    if rows is not None:
        monkeypatch.setattr(losses, "CPU_CHUNK_BYTES", rows * 8 * V)
        monkeypatch.setattr(losses, "FEWEST_ROWS", 1)
        monkeypatch.setattr(logprob, "CPU_TILE_BYTES", 4 * 40)
        monkeypatch.setattr(logprob, "COLUMN_BLOCK", 1)
    tensors, tokens, data = make()
    for normalizer in ("token_mean", "sequence_mean", 7.0):
        expected, expected_grads = composed(
            tensors, tokens, data, OBJECTIVES[name], normalizer, upstream=-2.5
        )
        result, grads = fused(tensors, tokens, data, OBJECTIVES[name], normalizer, upstream=-2.5)
        close = {"atol": 1e-10, "rtol": 1e-10}
        torch.testing.assert_close(result.loss, expected.loss, **close)
        torch.testing.assert_close(result.logp, expected.logp, **close)
        torch.testing.assert_close(result.entropy, expected.entropy, **close)
        assert result.metrics.keys() == expected.metrics.keys()
        for key in expected.metrics:
            torch.testing.assert_close(result.metrics[key], expected.metrics[key], **close)
        for key, grad in grads.items():
            torch.testing.assert_close(grad, expected_grads[key], **close, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize(
    "options", [{"softcap": 2.0, "scale": 0.7}, {"temperature": 0.6}, {"temperature": "rows"}]
)
def test_transforms(options):
    tensors, tokens, data = make()
    if options.get("temperature") == "rows":
        options = {"temperature": torch.linspace(0.5, 2.0, len(ROWS), dtype=torch.float64)}
    expected, expected_grads = composed(tensors, tokens, data, OBJECTIVES["k3"], "token_mean", **options)
    result, grads = fused(tensors, tokens, data, OBJECTIVES["k3"], "token_mean", **options)
    torch.testing.assert_close(result.loss, expected.loss, atol=1e-10, rtol=1e-10)
    for key, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[key], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("frozen", [("weight", "bias"), ("hidden",), ("hidden", "weight", "bias")])
def test_only_wanted_gradients_are_formed(frozen):
    tensors, tokens, data = make()
    _, expected = composed(tensors, tokens, data, OBJECTIVES["k3"], "token_mean")
    leaves = {k: v.detach().requires_grad_(k not in frozen) for k, v in tensors.items()}
    result = linear_policy_loss(
        leaves["hidden"],
        leaves["weight"],
        tokens,
        bias=leaves["bias"],
        rows=ROWS,
        **OBJECTIVES["k3"],
        **data,
    )
    assert result.loss.requires_grad == (len(frozen) < 3)
    if result.loss.requires_grad:
        result.loss.backward()
    for key, leaf in leaves.items():
        if key in frozen:
            assert leaf.grad is None
        else:
            torch.testing.assert_close(leaf.grad, expected[key], atol=1e-10, rtol=1e-10)


def test_lora_gets_its_gradients():
    tensors, tokens, data = make()
    grads = []
    for merged in (True, False):
        down = torch.randn(
            2, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
        ).requires_grad_()
        up = torch.randn(
            V, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
        ).requires_grad_()
        hidden = tensors["hidden"].detach().requires_grad_()
        weight = tensors["weight"] + 0.5 * up @ down if merged else tensors["weight"]
        lora = None if merged else LoRA(down, up, 0.5)
        result = linear_policy_loss(hidden, weight, tokens, rows=ROWS, objective="grpo", lora=lora, **data)
        result.loss.backward()
        grads.append((result.loss.detach(), hidden.grad, down.grad, up.grad))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


def test_no_rows_give_zero_loss_and_zero_gradients():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    none = torch.zeros(0)
    result = linear_policy_loss(
        hidden, weight, none.long(), rows=none.long(), old_logp=none, advantages=none, objective="ppo"
    )
    result.loss.backward()
    assert float(result.loss.detach()) == 0 and result.logp.shape == (0,)
    assert torch.equal(hidden.grad, torch.zeros(3, 4)) and torch.equal(weight.grad, torch.zeros(7, 4))


def test_a_second_backward_is_refused():
    tensors, tokens, data = make()
    hidden = tensors["hidden"].requires_grad_()
    result = linear_policy_loss(hidden, tensors["weight"], tokens, rows=ROWS, **data)
    result.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward only once"):
        result.loss.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "best"}, "objective: expected one of ppo, grpo"),
        (
            {"kl_coef": 0.1, "ref_logp": None},
            "ref_logp: expected reference log-probs",
        ),
        ({"objective": "gspo"}, "sequence_lengths: expected rows per sequence"),
        (
            {"objective": "gspo", "sequence_lengths": [5]},
            "sequence_lengths: expected lengths that add up to 11",
        ),
        ({"normalizer": "mean"}, "normalizer: expected token_mean"),
        ({"normalizer": 0.0}, "normalizer: expected a number > 0"),
        (
            {"normalizer": torch.tensor(2.0, requires_grad=True)},
            "normalizer: expected a 0-dimensional constant",
        ),
        ({"advantages": torch.zeros(3)}, r"advantages: expected \[11\]"),
        ({"mask": torch.zeros(11, 1)}, r"mask: expected \[11\]"),
        ({"dual_clip": 1.0}, "dual_clip: expected a value > 1"),
        ({"kl": "k4"}, "kl: expected k1, k2 or k3"),
        ({"clip_low": -1.0}, "clip_low, clip_high: expected values >= 0"),
    ],
)
def test_bad_input_is_named(change, message):
    tensors, tokens, data = make()
    with pytest.raises(ValueError, match=message):
        linear_policy_loss(tensors["hidden"], tensors["weight"], tokens, rows=ROWS, **{**data, **change})


BAD_ROWS = {
    "far old": {"old_logp": -200.0},
    "old -inf": {"old_logp": -torch.inf},
    "old NaN": {"old_logp": torch.nan},
    "advantage NaN": {"advantages": torch.nan},
    "advantage inf": {"advantages": torch.inf},
    "far reference": {"ref_logp": 200.0},
    "reference inf": {"ref_logp": torch.inf},
    "reference -inf": {"ref_logp": -torch.inf},
    "all NaN": {"old_logp": torch.nan, "advantages": torch.nan, "ref_logp": torch.nan},
}


@pytest.mark.parametrize("how", [fused, composed])
@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=list(BAD_ROWS))
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_masked_row_can_hold_anything(name, bad, how):
    """The values of a row with mask 0 do not affect loss, gradients and metrics."""
    for dtype in (torch.float32, torch.float64):
        tensors, tokens, data = make(dtype)
        data["mask"][3] = 0.0
        expected = how(tensors, tokens, data, OBJECTIVES[name], "token_mean")
        for key, value in bad.items():
            data[key] = data[key].clone()
            data[key][3] = value
        result, grads = how(tensors, tokens, data, OBJECTIVES[name], "token_mean")
        assert result.loss.isfinite() and torch.equal(result.loss, expected[0].loss)
        for key, value in expected[0].metrics.items():
            assert torch.equal(result.metrics[key], value), key
        for key, value in expected[1].items():
            assert torch.equal(grads[key], value), key


@pytest.mark.parametrize("name", NAMES)
def test_inference_mode_gives_the_loss(name):
    """Without gradients nothing is differentiated, which inference tensors do not allow."""
    random = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 8, generator=random), torch.randn(20, 8, generator=random)
    targets = torch.randint(20, (6,), generator=random)
    old, advantages = torch.randn(6, generator=random) - 3, torch.randn(6, generator=random)

    def loss():
        batch = (old * 1, advantages * 1)
        return loss_of_head(hidden, weight, targets, *batch, objective=name, sequence_lengths=[2, 4])

    with torch.no_grad():
        expected = loss()
    with torch.inference_mode():
        got = loss()
    assert torch.equal(got.loss, expected.loss)
    assert torch.equal(got.logp, expected.logp)
