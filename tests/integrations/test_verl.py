"""verl's FusedLinearForPPO and its functions on logits, stock against leanstep; five steps of an actor."""

from __future__ import annotations

import inspect
import types
import warnings

import pytest
import torch
from integrations.tiny_models import VOCAB, causal_lm

pytest.importorskip("verl", reason="verl is not installed")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import verl.utils.torch_functional as plain
    from verl.models.transformers import dense_common
    from verl.utils.experimental import torch_functional as fused

    from leanstep.integrations import verl as lean

# verl and its dependencies warn about their own deprecations; ours stay errors elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore")
STOCK = {name: getattr(plain if hasattr(plain, name) else fused, name) for name in lean.REPLACED}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", [(13,), (3, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_head_is_as_near_to_fp64_as_verls(shape, dtype):
    def outcome(function, dtype):
        hidden = draw(*shape, 24, dtype=torch.bfloat16).to(dtype).requires_grad_()
        weight = draw(VOCAB, 24, seed=1, dtype=torch.bfloat16).to(dtype).requires_grad_()
        ids = torch.arange(hidden[..., 0].numel()).view(shape) * 5 % VOCAB
        logp, entropy = function(hidden, weight, ids, temperature=0.8)
        loss = (logp * draw(*shape, seed=2)).sum() + (entropy * draw(*shape, seed=3)).sum()
        loss.backward()
        return [x.detach().double() for x in (logp, entropy, hidden.grad, weight.grad)], (
            logp.dtype,
            entropy.dtype,
        )

    def truth(hidden, weight, ids, temperature):
        log_p = (hidden @ weight.T / temperature).log_softmax(-1)
        return log_p.gather(-1, ids[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)

    stock, stock_dtypes = outcome(STOCK["FusedLinearForPPO"](), dtype)
    ours, our_dtypes = outcome(lean.FusedLinearForPPO(chunk_size=4), dtype)
    exact, _ = outcome(truth, torch.float64)
    assert our_dtypes == stock_dtypes
    for a, b, c in zip(ours, stock, exact, strict=True):
        floor = 1e-6 * c.norm()
        assert (a - c).norm() <= (2 if dtype == torch.float32 else 3) * (b - c).norm() + floor


def test_rows_that_do_not_matter_are_not_projected():
    hidden, weight = draw(2, 5, 24).requires_grad_(), draw(VOCAB, 24, seed=1).requires_grad_()
    ids, rows = torch.arange(10).view(2, 5), torch.tensor([1, 2, 7])
    found = []
    for options in ({}, {"rows": rows}):
        values = lean.FusedLinearForPPO()(hidden, weight, ids, 0.8, **options)
        picked = [v.reshape(-1)[rows] for v in values]
        grads = torch.autograd.grad(picked[0].sum() - 2 * picked[1].sum(), (hidden, weight))
        found.append((*picked, *grads))
    for everywhere, selected in zip(*found, strict=True):
        torch.testing.assert_close(selected, everywhere)
    others = torch.ones(10, dtype=torch.bool).index_fill(0, rows, False)
    assert not values[0].reshape(-1)[others].any() and not values[1].reshape(-1)[others].any()


@pytest.mark.parametrize("name", [n for n in lean.REPLACED if n != "FusedLinearForPPO"])
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_functions_on_logits_equal_verls(name, shape):
    if name.endswith("chunking"):
        shape = (6,)
    found = []
    for function in (STOCK[name], lean.REPLACED[name]):
        leaf = draw(*shape, VOCAB).requires_grad_()
        logits = leaf * 1.5
        given = (torch.arange(6).view(shape),) if name == "logprobs_from_logits" else ()
        values = function(logits, *given)
        values.backward(draw(*shape, seed=4))
        found.append((values.detach(), leaf.grad))
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_signatures_are_verls():
    for name, ours in lean.REPLACED.items():
        theirs = inspect.signature(STOCK[name])
        assert list(inspect.signature(ours).parameters) == list(theirs.parameters), name
    theirs = inspect.signature(STOCK["FusedLinearForPPO"].forward).parameters
    ours = inspect.signature(lean.FusedLinearForPPO.forward).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[n].default == theirs[n].default for n in theirs)


def train(steps: int = 5):
    """An actor as verl runs it: its own forward, two micro-batches per step, SGD."""
    model = causal_lm("llama")
    model.forward = types.MethodType(dense_common.forward_with_torch_backend, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(7)
    losses, gradients = [], []
    for _ in range(steps):
        ids = torch.randint(0, VOCAB - 3, (4, 11), generator=generator)
        lengths = torch.tensor([11, 7, 9, 5])
        attention = (torch.arange(11) < lengths[:, None]).long()
        mask = ((torch.arange(11) >= 4) & (attention == 1)).float()
        # Ragged responses, and a sample that counts for nothing.
        mask[2] = 0
        advantages = torch.randn(4, 1, generator=generator).expand(4, 11)
        optimizer.zero_grad()
        for part in (slice(0, 2), slice(2, 4)):
            out = model(ids[part], attention_mask=attention[part], return_dict=True, temperature=0.9)
            ratio = (out.log_probs - out.log_probs.detach() - 0.1).exp()
            losses_of = -torch.minimum(ratio * advantages[part], ratio.clamp(0.8, 1.2) * advantages[part])
            terms = losses_of - 0.01 * out.entropy
            loss = (terms * mask[part]).sum() / mask.sum()
            loss.backward()
            losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.step()
    return losses, torch.stack(gradients), torch.cat([p.detach().flatten() for p in model.parameters()])


def test_five_steps_of_an_actor_equal_verls(monkeypatch):
    stock = train()
    monkeypatch.setattr(fused, "FusedLinearForPPO", STOCK["FusedLinearForPPO"])
    assert lean.apply_leanstep(fused) == (fused,) and fused.FusedLinearForPPO is lean.FusedLinearForPPO
    losses, gradients, weights = train()
    assert losses == pytest.approx(stock[0], rel=1e-4, abs=1e-6) and len(losses) == 10
    assert ((gradients - stock[1]).norm(dim=1) <= 1e-4 * stock[1].norm(dim=1)).all()
    assert (weights - stock[2]).norm() <= 1e-6 * stock[2].norm()


def test_what_is_not_verls_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"modules: expected one with any of FusedLinearForPPO.*got torch$"):
        lean.apply_leanstep(torch)
    with pytest.raises(ValueError, match="modules: expected modules of verl, got none"):
        lean.apply_leanstep()
    from importlib import metadata

    monkeypatch.setattr(metadata, "version", lambda package: "0.12.0")
    with pytest.raises(RuntimeError, match=r"verl: this adapter was not tested with version 0.12.0"):
        lean.apply_leanstep(fused)
    with pytest.raises(ValueError, match=r"expected \[T, D\] and \[T\]"):
        lean.FusedLinearForPPO()(draw(3, 24), draw(VOCAB, 24), torch.zeros(4, dtype=torch.long))
