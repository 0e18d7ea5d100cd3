"""Two ranks give the single-process trajectory; saving, loading and resharding change no bit."""

from __future__ import annotations

import io
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from leanstep.muon import NorMuon
from leanstep.muon.sharded import assign

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


def single(
    world_size,
    steps,
    first=0,
    optimizer=None,
    params=None,
    low_rank=False,
    dtype=torch.float32,
    keep_waiting=False,
):
    """The same run in one process on the averaged gradient."""
    params = params or make_params(dtype)
    optimizer = optimizer or NorMuon(make_groups(params), **OPTIONS)
    for step in range(first, first + steps):
        for name, param in params.items():
            grads = [grad_of(name, step, rank, low_rank).to(dtype) for rank in range(world_size)]
            mean = torch.stack(grads).sum(0) / world_size
            param.grad = param.grad + mean if keep_waiting and param.grad is not None else mean
        optimizer.step()
        if keep_waiting:
            optimizer.zero_stepped_grads()
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
    """Return bytes, which outlive the rank; shared tensors do not."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data):
    return torch.load(io.BytesIO(data), weights_only=True)


MODES = {
    "owner": {},
    "owner, rank 4": {"low_rank": True},
    "owner, averaged": {"averaged": True},
    "owner, device mesh": {"device_mesh": True},
}


def world(device_mesh=False):
    from torch.distributed.device_mesh import init_device_mesh

    size = torch.distributed.get_world_size()
    return init_device_mesh("cpu", (size,)) if device_mesh else torch.distributed.group.WORLD


def run_modes(rank, world_size, steps):
    from torch.distributed.tensor.debug import CommDebugMode

    results = {}
    for label, mode in MODES.items():
        low_rank, averaged = mode.get("low_rank", False), mode.get("averaged", False)
        params = make_params()
        mesh = world(mode.get("device_mesh", False))
        optimizer = NorMuon(make_groups(params), mesh=mesh, averaged=averaged, **OPTIONS)
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
    """Run everything that needs two ranks in one start, because starting processes is slow."""
    parts = (resume_on_two, misuse, waiting_and_copies)
    return pack((run_modes(rank, world_size, steps), *(part(rank, world_size) for part in parts)))


@pytest.fixture(scope="module")
def everything():
    from ranks import run_ranks

    return [unpack(data) for data in run_ranks(2, run_everything, 20, timeout=120)]


@pytest.fixture
def two_ranks(everything):
    return [modes for modes, *_ in everything]


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


@pytest.mark.parametrize(("label", "most"), [("owner", 3), ("owner, averaged", 2)])
def test_number_of_collectives_does_not_grow_with_the_matrices(two_ranks, label, most):
    for result in two_ranks:
        _, _, count, text, _ = result[label]
        assert 0 < count <= most
        assert "owner over 2 ranks" in text
        assert "imbalance" in text


def test_saving_sends_what_lies_with_the_weights_and_not_adams_step_on_the_host(two_ranks):
    # A group that knows devices only (NCCL) refuses a host tensor; the step is the only 0-D one.
    for result in two_ranks:
        shapes = result["owner"][4]
        assert SHAPES["table"] in shapes and () not in shapes


def resume(rank, world_size, steps, first, saved, dtype):
    """Run from a saved state, or from the start; returns weights and the state dict after each leg."""
    weights, state = unpack(saved) if saved else (None, None)
    params = make_params(dtype)
    for name, param in params.items():
        if weights:
            param.data.copy_(weights[name])
    optimizer = NorMuon(make_groups(params), mesh=world(), averaged=True, **OPTIONS)
    if state is not None:
        optimizer.load_state_dict(state)
    advance(optimizer, params, rank, first, steps, average=2)
    return weights_of(params), optimizer.state_dict()


def resume_on_two(rank, world_size):
    whole, _ = resume(rank, world_size, 6, 0, None, torch.float32)
    half = resume(rank, world_size, 3, 0, None, torch.float32)
    again, _ = resume(rank, world_size, 3, 3, pack(half), torch.float32)
    return whole, half, again


def continue_on_three(rank, world_size, saved):
    again, _ = resume(rank, world_size, 3, 3, saved, torch.float32)
    # Also with low bits, from the start.
    low_bits, _ = resume(rank, world_size, 4, 0, None, torch.bfloat16)
    return pack((again, low_bits))


def test_resume_changes_no_bit_and_world_sizes_may_differ(everything, run_ranks):
    _, (whole, (half, state), again), *_ = everything[0]
    on_three = [unpack(data) for data in run_ranks(3, continue_on_three, pack((half, state)), timeout=120)]
    params = make_params()
    for name, param in params.items():
        param.data.copy_(half[name])
    optimizer = NorMuon(make_groups(params), **OPTIONS)
    optimizer.load_state_dict(state)
    single(2, 3, first=3, optimizer=optimizer, params=params)
    low_bits, _ = single(2, 4, dtype=torch.bfloat16)
    for name in SHAPES:
        assert torch.equal(again[name], whole[name]), name
        assert torch.equal(params[name].detach(), whole[name]), name
        for result, bfloat16 in on_three:
            assert torch.equal(result[name], whole[name]), name
            assert torch.equal(bfloat16[name], low_bits[name].detach()), name


def misuse(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    params = make_params()
    optimizer = NorMuon(make_groups(params), mesh=world(), **OPTIONS)
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
        NorMuon([nn.Parameter(torch.zeros(2, 2))], mesh=init_device_mesh("cpu", (world_size, 1)))
    except ValueError as error:
        messages.append(str(error))
    return unchanged, optimizer.skipped_steps, messages


def test_one_bad_rank_makes_all_skip_and_misuse_raises_everywhere(everything):
    for _, _, (unchanged, skipped, messages), _ in everything:
        assert unchanged and skipped == 1
        assert "expected the same parameters with a gradient on every rank" in messages[0]
        assert messages[1].startswith("mesh: expected one dimension, got 2")


def waiting_and_copies(rank, world_size):
    """Adam on every second step; then the table's state for a second one that another rank owns."""
    params = make_params()
    params["again"] = nn.Parameter(params["table"].detach().clone())
    groups = make_groups(params)
    groups[2].update(every=2, phase=1, params=[*groups[2]["params"], ("again", params["again"])])
    optimizer = NorMuon(groups, mesh=world(), **OPTIONS)
    for name in SHAPES:
        params[name].grad = grad_of(name, 0, rank)
    optimizer.step()
    optimizer.zero_stepped_grads()
    pending = params["table"].grad.clone()
    for name in SHAPES:
        grad = grad_of(name, 1, rank)
        params[name].grad = grad if params[name].grad is None else params[name].grad + grad
    optimizer.step()
    optimizer.copy_state(params["table"], params["again"])
    owner = optimizer.assignment().owner
    state = optimizer.state_dict()["state"]
    masters = make_params(torch.bfloat16)
    low = NorMuon(make_groups(masters), mesh=world(), averaged=True, **OPTIONS)
    advance(low, masters, rank, 0, 1, average=world_size)
    try:
        master = low.master(masters["up"])
    except ValueError as error:
        master = str(error)
    return weights_of(params), pending, state[4], state[6], (owner["table"], owner["again"]), master


def test_gradients_that_wait_are_means_and_state_is_copied_between_owners(everything):
    params = make_params()
    groups = make_groups(params)
    groups[2].update(every=2, phase=1)
    single(2, 2, optimizer=NorMuon(groups, **OPTIONS), params=params, keep_waiting=True)
    mean = (grad_of("table", 0, 0) + grad_of("table", 0, 1)) / 2
    masters = []
    for _, _, _, (weights, pending, table, again, owners, master) in everything:
        assert torch.equal(pending, mean)
        assert owners[0] != owners[1]
        assert all(torch.equal(table[key], again[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
        for name, param in params.items():
            torch.testing.assert_close(weights[name], param.detach(), atol=2e-6, rtol=1e-5, msg=name)
        masters.append(master)
    refused = [master for master in masters if isinstance(master, str)]
    assert len(refused) == 1 and refused[0].startswith("up: expected the call on its owner, rank")


def test_biggest_first_to_the_least_loaded_ties_to_the_lowest_rank():
    got = assign({"a": (4, 4.0), "b": (9, 9.0), "c": (4, 4.0), "d": (1, 1.0)}, 2)
    assert got.owner == {"a": 1, "b": 0, "c": 1, "d": 1}
    assert got.loads == (9.0, 9.0)
    assert "rank 0" in str(got) and "imbalance 1.000" in str(got)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 5))
def test_every_matrix_has_one_owner_and_no_order_matters(sizes, world):
    costs = {f"m{i}": (size, float(size)) for i, size in enumerate(sizes)}
    got = assign(costs, world)
    assert assign(dict(reversed(costs.items())), world).owner == got.owner
    assert sum(got.loads) == pytest.approx(sum(sizes))
    # The rank with the last matrix had the lowest load before it, at most the average of the others.
    assert max(got.loads) <= sum(sizes) / world + (1 - 1 / world) * max(sizes) + 1e-9


def test_world_size_is_checked():
    with pytest.raises(ValueError, match=r"^world_size: expected"):
        assign({}, 0)
