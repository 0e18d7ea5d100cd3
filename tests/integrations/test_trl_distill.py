"""The divergence of TRL's DistillationTrainer, stock against leanstep: arguments, values, gradients."""

from __future__ import annotations

import inspect

import pytest
import torch

stock = pytest.importorskip("trl.trainer.distillation_trainer")

from leanstep.integrations.trl_distill import divergence_loss  # noqa: E402

B, K, D, WIDE, V = 3, 5, 8, 12, 37


def batch(seed=0):
    g = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    hidden, weight = make(B, K, D).requires_grad_(), make(V, D).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    return hidden, make(B, K, WIDE), weight, make(V, WIDE), mask


OPTIONS = [
    {},
    {"num_items_in_batch": torch.tensor(11), "temperature": 0.8},
    {"student_logit_scale": 0.7, "teacher_logit_scale": 1.3, "num_items_in_batch": 4},
    {"student_final_logit_softcapping": 5.0, "teacher_final_logit_softcapping": 3.0},
]


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_equals_trl(beta, options):
    found = []
    for function in (stock._chunked_divergence_loss, divergence_loss):
        hidden, far, weight, wide, mask = batch()
        loss, entropy, count = function(hidden, far, weight, wide, mask, beta, **options)
        loss.backward()
        found.append((loss.detach(), entropy.detach(), count, hidden.grad, weight.grad))
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert not found[1][3][2].any()


def test_the_arguments_are_trls():
    names = set(inspect.signature(stock._chunked_divergence_loss).parameters)
    own = set(inspect.signature(divergence_loss).parameters) - {"options"}
    hidden, far, weight, wide, mask = batch()
    for name in names - own:
        divergence_loss(hidden, far, weight, wide, mask, 0.5, **({name: 1.0} if "bias" not in name else {}))
    with pytest.raises(ValueError, match="got chunk"):
        divergence_loss(hidden, far, weight, wide, mask, 0.5, chunk=3)
