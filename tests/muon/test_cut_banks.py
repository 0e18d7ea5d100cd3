"""Banks and tables that every rank owns a piece of: the single-process trajectory, and its checkpoints."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from leanstep.muon import NorMuon

SHAPES = {"attn": (4, 32, 8), "mlp": (3, 2, 12, 8), "wide": (2, 6, 10), "table": (4096, 16), "gain": (7,)}
STEPS = 6


def make_params(dtype):
    generator = torch.Generator().manual_seed(5)
    return {n: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in SHAPES.items()}


def make_optimizer(params, **options):
    groups = [
        {"params": [("attn", params["attn"])], "split": [8] * 4},
        {"params": [("mlp", params["mlp"])], "lr_mul": [1.0, 2.0] * 3},
        {"params": [("wide", params["wide"])]},
        {"params": [(n, params[n]) for n in ("table", "gain")], "algorithm": "adam", "every": 2, "phase": 1},
    ]
    return NorMuon(groups, lr=0.03, compute_dtype=torch.float32, **options)


def grad_of(name, step, rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


def advance(params, optimizer, first, last, ranks):
    """Steps with the mean gradient of `ranks`; groups that are not due go on accumulating."""
    for step in range(first, last):
        for name, param in params.items():
            mean = torch.stack([grad_of(name, step, rank) for rank in ranks]).mean(0).to(param.dtype)
            param.grad = mean if param.grad is None else param.grad + mean
        for group in optimizer.param_groups:
            # A schedule changes the groups, not the pieces.
            group["lr"] = 0.03 / (1 + step)
        optimizer.step()
        optimizer.zero_stepped_grads()


def saved(params, optimizer):
    optimizer.average_waiting()
    waiting = {n: None if p.grad is None else p.grad.clone() for n, p in params.items()}
    weights = {n: p.detach().clone() for n, p in params.items()}
    buffer = io.BytesIO()
    torch.save((weights, waiting, optimizer.state_dict()), buffer)
    return buffer.getvalue()


def resumed(data, dtype, **options):
    weights, waiting, state = torch.load(io.BytesIO(data), weights_only=True)
    params = make_params(dtype)
    for name, param in params.items():
        param.data.copy_(weights[name])
        param.grad = waiting[name]
    optimizer = make_optimizer(params, **options)
    optimizer.load_state_dict(state)
    return params, optimizer


def on_two_ranks(rank, world_size):
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        params, mesh = make_params(dtype), torch.distributed.group.WORLD
        optimizer = make_optimizer(params, mesh=mesh)
        # Step 4 is the last: the table's gradient waits when it is saved.
        advance(params, optimizer, 0, STEPS - 1, [rank])
        data = saved(params, optimizer)
        again, other = resumed(data, dtype, mesh=mesh)
        advance(params, optimizer, STEPS - 1, STEPS, [rank])
        advance(again, other, STEPS - 1, STEPS, [rank])
        ends = [{n: p.detach() for n, p in which.items()} for which in (params, again)]
        pieces = {
            n: tuple(optimizer.state[params[n]]["momentum_buffer"].shape) for n in ("attn", "mlp", "wide")
        }
        text = optimizer.explain()
        refusal = ""
        try:
            optimizer.master(params["attn"])
        except ValueError as problem:
            refusal = str(problem)
        results[str(dtype)] = (data, ends, pieces, text, refusal)
    buffer = io.BytesIO()
    torch.save(results, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def two_ranks():
    from ranks import run_ranks

    return [torch.load(io.BytesIO(data)) for data in run_ranks(2, on_two_ranks, timeout=120)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_ranks_follow_one_process(two_ranks, dtype):
    params = make_params(dtype)
    optimizer = make_optimizer(params)
    advance(params, optimizer, 0, STEPS - 1, [0, 1])
    state = optimizer.state_dict()["state"]
    tolerance = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.03}
    for result in two_ranks:
        data, ends, pieces, text, refusal = result[str(dtype)]
        weights, _, theirs = torch.load(io.BytesIO(data), weights_only=True)
        for name, param in params.items():
            torch.testing.assert_close(weights[name], param.detach(), **tolerance)
        for key, items in state.items():
            for item, value in items.items():
                assert theirs["state"][key][item].shape == value.shape
                if item != "residual":
                    torch.testing.assert_close(theirs["state"][key][item], value, **tolerance)
        # Resumed or not, the same bits; half of the matrices on each rank.
        assert all(torch.equal(a, ends[1][name]) for name, a in ends[0].items())
        assert pieces == {"attn": (8, 8, 8), "mlp": (3, 12, 8), "wide": (1, 6, 10)}
        assert "cut, a piece for each rank: attn, mlp, wide, table" in text
        assert ("attn: expected a parameter with one owner" in refusal) == (dtype == torch.bfloat16)
    for name in SHAPES:
        assert torch.equal(*(result[str(dtype)][1][0][name] for result in two_ranks))


def test_one_process_goes_on_where_two_stopped(two_ranks):
    data, ends, *_ = two_ranks[0][str(torch.float32)]
    params, optimizer = resumed(data, torch.float32)
    advance(params, optimizer, STEPS - 1, STEPS, [0, 1])
    for name, want in ends[0].items():
        torch.testing.assert_close(params[name].detach(), want, atol=2e-5, rtol=1e-4)
