"""Gradients computed in the forward pass: when the incoming gradient needs no multiplication."""

from __future__ import annotations

import torch

from leanstep.logprob.engine.forward_gradients import _is_one_on_host as is_one


def test_a_factor_of_one_is_known_without_a_read():
    assert is_one(torch.tensor(1.0)) and is_one(torch.ones(3, dtype=torch.float64)[1])
    assert not is_one(torch.tensor(1.5)) and not is_one(torch.tensor(float("nan")))
    assert not is_one(torch.tensor(1.0, dtype=torch.bfloat16)) and not is_one(torch.ones(2))
    assert not is_one(torch.empty((), device="meta"))
