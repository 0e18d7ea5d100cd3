"""masked_token_logprobs: a padded batch against plain log_softmax and gather in fp64."""

from __future__ import annotations

import pytest
import torch

from leanstep.heads import masked_token_logprobs
from leanstep.heads.reference import reference_masked_token_logprobs
from leanstep.tape.syncs import host_syncs

B, T, D, V = 4, 13, 24, 151


def batch(side: str = "left", dtype=torch.float32, seed: int = 0):
    """hidden [B, T, D], weight, tokens with -100 in the padding, a mask that is 1 on the response."""
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(V, (B, T), generator=g)
    mask = torch.zeros(B, T, dtype=torch.bool)
    for row, (prompt, response) in enumerate([(3, 7), (1, 12), (5, 2), (4, 0)]):
        start = T - prompt - response if side == "left" else 0
        mask[row, start + prompt : start + prompt + response] = True
        real = torch.zeros(T, dtype=torch.bool)
        real[start : start + prompt + response] = True
        tokens[row, ~real] = -100
    hidden = torch.randn(B, T, D, generator=g).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(V, D, generator=g)).to(dtype).requires_grad_()
    return hidden, weight, tokens, mask


def test_the_default_device_of_a_script_makes_no_difference():
    """The default mask is on the host, and torch supports pinned memory only there."""
    hidden, weight, tokens, _ = batch()
    tokens = tokens.clamp(min=0)
    expected = masked_token_logprobs(hidden, weight, tokens)
    with torch.device("meta"):
        assert torch.equal(masked_token_logprobs(hidden, weight, tokens), expected)


def gradients(function, hidden, weight, *args, **options):
    """Results and gradients under upstream gradients that are not ones."""
    hidden, weight = (t.detach().clone().requires_grad_() for t in (hidden, weight))
    logp, entropy = function(hidden, weight, *args, **options)
    g = torch.Generator().manual_seed(5)
    upstream = torch.randn(logp.shape, generator=g).to(logp.dtype)
    (logp * upstream + 0.3 * entropy * upstream.flip(0)).sum().backward()
    return logp.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("max_rows", [None, 40])
def test_values_and_gradients_are_those_of_the_plain_code(side, max_rows):
    hidden, weight, tokens, mask = batch(side)
    truth = gradients(
        reference_masked_token_logprobs, hidden.double(), weight.double(), tokens, mask, temperature=0.7
    )
    plain = gradients(reference_masked_token_logprobs, hidden, weight, tokens, mask, temperature=0.7)
    ours = gradients(
        masked_token_logprobs, hidden, weight, tokens, mask,
        temperature=0.7, entropy="grad", max_rows=max_rows,
    )  # fmt: skip
    for name, a, b, t in zip(("logp", "entropy", "hidden", "weight"), ours, plain, truth, strict=True):
        error, allowed = (a - t).abs().max().item(), (b - t).abs().max().item()
        assert error <= 2 * allowed + 1e-6, f"{name}: {error:.2e}, plain {allowed:.2e}"
    assert ours[0][~mask[:, 1:]].eq(0).all() and ours[1][~mask[:, 1:]].eq(0).all()
    dead = ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
    assert ours[2][dead].eq(0).all()


def test_masks_of_all_widths_mean_the_same():
    hidden, weight, tokens, mask = batch()
    tokens = tokens.clamp(min=0)
    whole = masked_token_logprobs(hidden, weight, tokens, mask)
    assert whole.shape == (B, T - 1) and whole.ne(0).sum() == mask[:, 1:].sum()
    for variant in (mask[:, 1:], mask.float(), mask.long()):
        torch.testing.assert_close(masked_token_logprobs(hidden, weight, tokens, variant), whole)
    # The model did not see the last token.
    torch.testing.assert_close(masked_token_logprobs(hidden[:, :-1], weight, tokens, mask), whole)
    last = masked_token_logprobs(hidden, weight, tokens, mask[:, -4:])
    torch.testing.assert_close(last, whole[:, -4:])
    every = masked_token_logprobs(hidden, weight, tokens)
    torch.testing.assert_close(every[mask[:, 1:]], whole[mask[:, 1:]])
    torch.testing.assert_close(masked_token_logprobs(hidden[:, :-1], weight, tokens), every)


def test_without_gradients_nothing_is_recorded_and_values_are_equal():
    hidden, weight, tokens, mask = batch()
    with torch.no_grad():
        old = masked_token_logprobs(hidden, weight, tokens, mask)
    assert not old.requires_grad
    torch.testing.assert_close(old, masked_token_logprobs(hidden, weight, tokens, mask).detach())


def test_a_static_number_of_rows_needs_no_host_read():
    hidden, weight, tokens, mask = batch("right")
    assert host_syncs(lambda: masked_token_logprobs(hidden, weight, tokens, mask, max_rows=30)) == 0
    assert host_syncs(lambda: masked_token_logprobs(hidden, weight, tokens, mask)) == 1


def test_more_tokens_than_max_rows_are_refused():
    hidden, weight, tokens, mask = batch()
    with pytest.raises(ValueError, match="mask: expected at most max_rows = 5"):
        masked_token_logprobs(hidden, weight, tokens, mask, max_rows=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.ones(B, T + 1)}, r"mask: expected \[4, up to 13\]"),
        ({"mask": torch.ones(B - 1, T)}, r"mask: expected \[4, up to 13\]"),
        ({"tokens": torch.ones(B, T + 2, dtype=torch.int64)}, r"tokens: expected \[B, 13\] or \[B, 14\]"),
        ({"tokens": torch.ones(B, T)}, r"tokens: expected \[B, 13\] or \[B, 14\] ids"),
        ({"tokens": torch.ones(B - 1, T, dtype=torch.int64)}, r"hidden, tokens: expected \[B, T, D\]"),
        ({"hidden": torch.ones(B * T, D)}, r"hidden, tokens: expected \[B, T, D\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change, message):
    hidden, weight, tokens, mask = batch()
    arguments = {"hidden": hidden, "head": weight, "tokens": tokens, "mask": mask} | change
    with pytest.raises(ValueError, match=message):
        masked_token_logprobs(**arguments)


@pytest.mark.parametrize("selected", [0, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("max_rows", [None, 2, 4])
def test_a_masked_row_without_numbers_never_matters(max_rows, bad, selected):
    """Left padding with NaN in row 0, which unused slots must not read."""
    torch.manual_seed(0)
    clean, weight, tokens = torch.randn(1, 5, 8), torch.randn(20, 8), torch.tensor([[1, 2, 3, 4, 5]])
    mask = (torch.arange(5) >= 5 - selected)[None]
    results = []
    for first in (0.0, bad):
        hidden, head = clean.clone(), weight.clone().requires_grad_()
        hidden[0, 0] = first
        hidden.requires_grad_()
        logp = masked_token_logprobs(hidden, head, tokens, mask, max_rows=max_rows)
        (logp * torch.linspace(-1, 2, 4)).sum().backward()
        results.append((logp.detach(), hidden.grad, head.grad))
    for a, b in zip(*results, strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b)
