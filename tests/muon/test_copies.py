"""Copies and pickles of a NorMuon, and errors for options and states that a step cannot use."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch

from leanstep.muon import NorMuon, split_params


def model_and_optimizer(**options) -> tuple[torch.nn.Module, NorMuon]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 5))
    return model, NorMuon(split_params(model), lr=0.02, **options)


def take_step(model: torch.nn.Module, optimizer: NorMuon, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)
    optimizer.step()


def through_file(pair):
    buffer = io.BytesIO()
    torch.save(pair, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
    "torch.save": through_file,
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_copy_steps_like_the_original(how, steps):
    model, optimizer = model_and_optimizer(momentum=0.8, nonfinite="ignore")
    for seed in range(steps):
        take_step(model, optimizer, seed)
    other_model, other = COPIES[how]((model, optimizer))
    for seed in (10, 11):
        take_step(model, optimizer, seed)
        take_step(other_model, other, seed)
    for param, same in zip(model.parameters(), other_model.parameters(), strict=True):
        assert param is not same
        assert torch.equal(param, same)
    extra = torch.nn.Parameter(torch.ones(3, 3))
    other.add_param_group({"params": [("extra", extra)]})
    assert other.param_groups[-1]["momentum"] == 0.8


def test_parameters_without_elements_go_to_adam():
    model = torch.nn.ParameterList([torch.zeros(shape) for shape in ((0, 4), (4, 0), (2, 0, 3), (3, 3))])
    groups = split_params(model)
    assert [choice.algorithm for choice in groups.choices] == ["adam", "adam", "adam", "normuon"]
    optimizer = NorMuon(groups, lr=0.1)
    for param in model:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert model[3].any()
    with pytest.raises(ValueError, match=r"param_0: expected elements in a Muon group, got shape \(4, 0\)"):
        NorMuon([model[1]])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", math.inf),
        ("lr", math.nan),
        ("lr_mul", math.nan),
        ("lr_mul", [math.inf]),
        ("weight_decay", math.inf),
        ("compute_dtype", torch.int32),
        ("compute_dtype", "float32"),
    ],
)
def test_impossible_options_are_refused(option, value):
    with pytest.raises(ValueError, match=f"^{option}: expected "):
        NorMuon([torch.nn.Parameter(torch.ones(3, 3))], **{option: value})
