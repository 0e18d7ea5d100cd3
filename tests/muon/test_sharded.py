"""Two ranks give the single-process trajectory; saving, loading and resharding change no bit."""

from __future__ import annotations

import io
from unittest import mock

import pytest
import torch
from torch import nn

from leanstep.muon import NorMuon
from leanstep.muon.sharded import ShardedNorMuon

SHAPES = {
    "bank": (3, 12, 20),
    "up": (24, 16),
    "down": (16, 24),
    "square": (10, 10),
    "table": (300, 16),
    "gain": (7,),
}
OPTIONS = {"lr": 0.03, "compute_dtype": torch.float32}


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return {n: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in SHAPES.items()}


def make_groups(params):
    muon = [(name, params[name]) for name in ("up", "down", "square")]
    return [
        {"params": [("bank", params["bank"])], "algorithm": "normuon", "lr_mul": [1.0, 2.0, 0.5]},
        {"params": muon, "algorithm": "normuon"},
        {"params": [(name, params[name]) for name in ("table", "gain")], "algorithm": "adam"},
    ]


def grad_of(name, step, rank, low_rank=False):
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + list(SHAPES).index(name))
    if low_rank and len(shape) >= 2:
        left = torch.randn(*shape[:-1], 4, generator=generator)
        return left @ torch.randn(*shape[:-2], 4, shape[-1], generator=generator)
    return torch.randn(shape, generator=generator)


def single(world_size, steps, first=0, optimizer=None, params=None, low_rank=False, dtype=torch.float32):
    """The same run in one process on the averaged gradient."""
    params = params or make_params(dtype)
    optimizer = optimizer or NorMuon(make_groups(params), **OPTIONS)
    for step in range(first, first + steps):
        for name, param in params.items():
            grads = [grad_of(name, step, rank, low_rank).to(dtype) for rank in range(world_size)]
            param.grad = torch.stack(grads).sum(0) / world_size
        optimizer.step()
    return params, optimizer


def advance(optimizer, params, rank, first, steps, low_rank=False, average=None):
    for step in range(first, first + steps):
        for name, param in params.items():
            param.grad = grad_of(name, step, rank, low_rank).to(param.dtype)
            if average:
                mean = [grad_of(name, step, r, low_rank).to(param.dtype) for r in range(average)]
                param.grad = torch.stack(mean).sum(0) / average
        optimizer.step()


def weights_of(params):
    return {name: p.detach().clone() for name, p in params.items()}


def pack(value):
    """Bytes survive the end of the rank that made them; shared tensors do not."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data):
    return torch.load(io.BytesIO(data), weights_only=True)


MODES = {
    "replicated": {"comms": "replicated"},
    "sharded": {"comms": "sharded"},
    "sharded, rank 4": {"comms": "sharded", "low_rank": True},
    "owner": {"comms": "owner"},
    "owner, averaged": {"comms": "owner", "averaged": True},
}


def run_modes(rank, world_size, steps):
    from torch.distributed.tensor.debug import CommDebugMode

    results = {}
    for label, mode in MODES.items():
        low_rank, averaged = mode.get("low_rank", False), mode.get("averaged", False)
        params = make_params()
        optimizer = ShardedNorMuon(make_groups(params), comms=mode["comms"], averaged=averaged, **OPTIONS)
        average = world_size if averaged else None
        advance(optimizer, params, rank, 0, steps - 1, low_rank, average)
        with CommDebugMode() as counter:
            advance(optimizer, params, rank, steps - 1, 1, low_rank, average)
        with mock.patch.object(torch.distributed, "broadcast", wraps=torch.distributed.broadcast) as sent:
            state = optimizer.state_dict()["state"]
        shapes = [tuple(call.args[0].shape) for call in sent.call_args_list]
        text = optimizer.explain()
        results[label] = (weights_of(params), state, counter.get_total_counts(), text, shapes)
    return results


def run_everything(rank, world_size, steps):
    """All that needs two ranks in one start: processes are slow to begin, collectives are not."""
    return pack(
        (run_modes(rank, world_size, steps), resume_on_two(rank, world_size), misuse(rank, world_size))
    )


@pytest.fixture(scope="module")
def everything():
    from ranks import run_ranks

    return [unpack(data) for data in run_ranks(2, run_everything, 20, timeout=120)]


@pytest.fixture
def two_ranks(everything):
    return [modes for modes, _, _ in everything]


@pytest.mark.parametrize("label", MODES)
def test_two_ranks_follow_one_process_for_twenty_steps(two_ranks, label):
    expected, optimizer = single(2, 20, low_rank=MODES[label].get("low_rank", False))
    full = optimizer.state_dict()["state"]
    for result in two_ranks:
        weights, state, *_ = result[label]
        for name, param in expected.items():
            torch.testing.assert_close(weights[name], param.detach(), atol=2e-5, rtol=1e-5, msg=name)
        assert set(state) == set(full)
        for key in full:
            assert set(state[key]) == set(full[key])
            for item, value in full[key].items():
                torch.testing.assert_close(state[key][item], value, atol=2e-5, rtol=1e-4)
    for name in SHAPES:
        assert torch.equal(two_ranks[0][label][0][name], two_ranks[1][label][0][name])


@pytest.mark.parametrize(("label", "most"), [("replicated", 2), ("owner", 3), ("sharded", 8)])
def test_number_of_collectives_does_not_grow_with_the_matrices(two_ranks, label, most):
    for result in two_ranks:
        _, _, count, text, _ = result[label]
        assert 0 < count <= most
        assert f"{label} over 2 ranks" in text
        assert label == "replicated" or "imbalance" in text


def test_saving_sends_what_lies_with_the_weights_and_not_adams_step_on_the_host(two_ranks):
    # A group that knows devices only (NCCL) refuses a host tensor; the step is the only 0-D one.
    for result in two_ranks:
        shapes = result["owner"][4]
        assert SHAPES["table"] in shapes and () not in shapes


def resume(rank, world_size, comms, steps, first, saved, dtype):
    """Run from a saved state, or from the start; returns weights and the state dict after each leg."""
    weights, state = unpack(saved) if saved else (None, None)
    params = make_params(dtype)
    for name, param in params.items():
        if weights:
            param.data.copy_(weights[name])
    optimizer = ShardedNorMuon(make_groups(params), comms=comms, averaged=True, **OPTIONS)
    if state is not None:
        optimizer.load_state_dict(state)
    advance(optimizer, params, rank, first, steps, average=2)
    return weights_of(params), optimizer.state_dict()


def resume_on_two(rank, world_size):
    results = {}
    for comms in ("sharded", "owner"):
        whole, _ = resume(rank, world_size, comms, 6, 0, None, torch.float32)
        half = resume(rank, world_size, comms, 3, 0, None, torch.float32)
        again, _ = resume(rank, world_size, comms, 3, 3, pack(half), torch.float32)
        results[comms] = (whole, half, again)
    return results


def continue_on_three(rank, world_size, saved):
    results = {
        comms: resume(rank, world_size, comms, 3, 3, data, torch.float32)[0] for comms, data in saved.items()
    }
    # A bank of three on three ranks, then of three on two: also with low bits.
    results["bfloat16"] = resume(rank, world_size, "sharded", 4, 0, None, torch.bfloat16)[0]
    return pack(results)


def test_resume_changes_no_bit_and_world_sizes_may_differ(everything, run_ranks):
    _, first, _ = everything[0]
    saved = {comms: pack(first[comms][1]) for comms in ("sharded", "owner")}
    on_three = [unpack(data) for data in run_ranks(3, continue_on_three, saved, timeout=120)]
    for comms in ("sharded", "owner"):
        whole, (half, state), again = first[comms]
        params = make_params()
        for name, param in params.items():
            param.data.copy_(half[name])
        optimizer = NorMuon(make_groups(params), **OPTIONS)
        optimizer.load_state_dict(state)
        single(2, 3, first=3, optimizer=optimizer, params=params)
        for name in SHAPES:
            assert torch.equal(again[name], whole[name]), name
            assert torch.equal(params[name].detach(), whole[name]), name
            for result in on_three:
                assert torch.equal(result[comms][name], whole[name]), name
    expected, _ = single(2, 4, dtype=torch.bfloat16)
    for result in on_three:
        for name, param in expected.items():
            assert torch.equal(result["bfloat16"][name], param.detach()), name


def misuse(rank, world_size):
    params = make_params()
    optimizer = ShardedNorMuon(make_groups(params), comms="sharded", **OPTIONS)
    before = weights_of(params)
    for name, param in params.items():
        param.grad = grad_of(name, 0, rank)
    if rank == 1:
        params["up"].grad[0, 0] = float("nan")
    optimizer.step()
    unchanged = all(torch.equal(before[name], p.detach()) for name, p in params.items())
    messages = []
    if rank == 1:
        params["up"].grad = None
    try:
        optimizer.step()
    except ValueError as error:
        messages.append(str(error))
    try:
        ShardedNorMuon([nn.Parameter(torch.zeros(2, 2))], comms="ring")
    except ValueError as error:
        messages.append(str(error))
    return unchanged, optimizer.skipped_steps, messages


def test_one_bad_rank_makes_all_skip_and_misuse_raises_everywhere(everything):
    for _, _, (unchanged, skipped, messages) in everything:
        assert unchanged and skipped == 1
        assert "expected the same parameters with a gradient on every rank" in messages[0]
        assert messages[1].startswith("comms: expected one of replicated")
