"""Ranks that share the work follow one process; saving, loading and other numbers of ranks change no bit."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from leanstep.muon import NorMuon
from leanstep.muon.sharded import assign

# Banks that divide evenly or not, split by rows and by columns, matrices, tables large and small.
SHAPES = {
    "attn": (4, 32, 8),
    "mlp": (3, 2, 12, 8),
    "uneven": (3, 6, 10),
    "columns": (2, 6, 9),
    "conv": (6, 2, 2, 2),
    "up": (24, 16),
    "down": (16, 24),
    "square": (10, 10),
    "table": (4096, 16),
    "odd": (5, 3),
    "gain": (7,),
}
STEPS = 6


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return {n: nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in SHAPES.items()}


def make_optimizer(params, **options):
    groups = [
        {"params": [("attn", params["attn"])], "split": [8] * 4},
        {"params": [("mlp", params["mlp"])], "lr_mul": [1.0, 2.0] * 3},
        {"params": [("uneven", params["uneven"])]},
        {"params": [("columns", params["columns"])], "split": [6, 3], "split_dim": 1, "heads": [2, 1]},
        {"params": [("conv", params["conv"])], "flatten": "conv"},
        {"params": [(n, params[n]) for n in ("up", "down", "square")]},
        {"params": [(n, params[n]) for n in ("table", "odd", "gain")], "algorithm": "adam"},
    ]
    return NorMuon(groups, lr=0.03, compute_dtype=torch.float32, **options)


def grad_of(name, step, rank, low_rank=False):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + list(SHAPES).index(name))
    shape = SHAPES[name]
    if low_rank and len(shape) == 2:
        return torch.randn(shape[0], 4, generator=generator) @ torch.randn(4, shape[1], generator=generator)
    # Multiples of 1/8: their sums over the ranks are exact in bfloat16, whatever the order.
    return (8 * torch.randn(shape, generator=generator)).round() / 8


def advance(params, optimizer, steps, ranks, low_rank=False):
    """Steps with the mean gradient of `ranks`; a schedule changes the groups."""
    for step in range(*steps):
        for name, param in params.items():
            grads = [grad_of(name, step, rank, low_rank).to(param.dtype) for rank in ranks]
            param.grad = torch.stack(grads).sum(0) / len(grads)
        for group in optimizer.param_groups:
            group["lr"] = 0.03 / (1 + step)
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


def resume(params, optimizer, saved):
    weights, state = unpack(saved)
    for name, param in params.items():
        param.data.copy_(weights[name])
    optimizer.load_state_dict(state)


def run(rank, world_size, saved):
    """Train half, save, go on; then resume from `saved` or from that half, in float32 and bfloat16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    mesh, results = init_device_mesh("cpu", (world_size,)), {}
    for dtype in (torch.float32, torch.bfloat16):
        params = make_params(dtype)
        optimizer = make_optimizer(params, mesh=torch.distributed.group.WORLD)
        advance(params, optimizer, (0, STEPS // 2), [rank])
        half = pack((weights_of(params), optimizer.state_dict()))
        with CommDebugMode() as counter:
            advance(params, optimizer, (STEPS // 2, STEPS), [rank])
        # As after DDP, from the saved state: of this world, or of another one.
        again = make_params(dtype)
        other = make_optimizer(again, mesh=mesh, averaged=True)
        resume(again, other, saved[str(dtype)] if saved else half)
        advance(again, other, (STEPS // 2, STEPS), range(2 if saved else world_size))
        shares = {
            n: optimizer.state[p].get("momentum_buffer", torch.empty(0)).numel() for n, p in params.items()
        }
        collectives = counter.get_total_counts() / (STEPS - STEPS // 2)
        results[str(dtype)] = (half, weights_of(params), weights_of(again), shares, collectives)
    params = make_params()
    optimizer = make_optimizer(params, mesh=mesh)
    advance(params, optimizer, (0, STEPS), [rank], low_rank=True)
    results["low rank"] = weights_of(params)
    results["misuse"] = misuse(rank, world_size)
    return pack(results)


def misuse(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh

    params, messages = make_params(), []
    optimizer = make_optimizer(params, mesh=torch.distributed.group.WORLD)
    before = weights_of(params)
    for name, param in params.items():
        param.grad = grad_of(name, 0, rank)
    if rank == 1:
        params["up"].grad[0, 0] = float("nan")
    optimizer.step()
    unchanged = all(torch.equal(before[name], p.detach()) for name, p in params.items())
    if rank == 1:
        params["up"].grad = None
    grid = init_device_mesh("cpu", (world_size, 1))
    turned = nn.Parameter(torch.zeros(2, 3).T)
    for make in (
        optimizer.step,
        lambda: NorMuon([nn.Parameter(torch.zeros(2, 2))], mesh=grid),
        lambda: NorMuon([turned], mesh=torch.distributed.group.WORLD).state_dict(),
    ):
        try:
            make()
        except ValueError as error:
            messages.append(str(error))
    return unchanged, optimizer.skipped_steps, messages


@pytest.fixture(scope="module")
def two_ranks():
    from ranks import run_ranks

    return [unpack(data) for data in run_ranks(2, run, None, timeout=120)]


@pytest.fixture(scope="module")
def four_ranks(two_ranks):
    from ranks import run_ranks

    saved = {str(dtype): two_ranks[0][str(dtype)][0] for dtype in (torch.float32, torch.bfloat16)}
    return [unpack(data) for data in run_ranks(4, run, saved, timeout=120)]


TOLERANCE = {torch.float32: {"atol": 2e-5, "rtol": 1e-4}, torch.bfloat16: {"atol": 0.03, "rtol": 0.03}}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_follow_one_process(request, world, dtype):
    params = make_params(dtype)
    optimizer = make_optimizer(params)
    advance(params, optimizer, (0, STEPS // 2), range(world))
    middle, state = weights_of(params), copy.deepcopy(optimizer.state_dict()["state"])
    advance(params, optimizer, (STEPS // 2, STEPS), range(world))
    results = request.getfixturevalue("two_ranks" if world == 2 else "four_ranks")
    for result in results:
        half, weights, *_ = result[str(dtype)]
        theirs, saved = unpack(half)
        for name, param in params.items():
            torch.testing.assert_close(theirs[name], middle[name], **TOLERANCE[dtype])
            torch.testing.assert_close(weights[name], param.detach(), **TOLERANCE[dtype])
            assert torch.equal(weights[name], results[0][str(dtype)][1][name])
        for key, items in state.items():
            assert set(saved["state"][key]) == set(items)
            for item, value in items.items():
                assert saved["state"][key][item].shape == value.shape
                if item != "residual":
                    torch.testing.assert_close(saved["state"][key][item], value, **TOLERANCE[dtype])


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_follow_one_process_on_gradients_of_low_rank(request, world):
    params = make_params()
    advance(params, make_optimizer(params), (0, STEPS), range(world), low_rank=True)
    for result in request.getfixturevalue("two_ranks" if world == 2 else "four_ranks"):
        for name, param in params.items():
            torch.testing.assert_close(result["low rank"][name], param.detach(), atol=2e-5, rtol=1e-4)


def test_a_state_saved_on_two_ranks_loads_on_one_two_and_four(two_ranks, four_ranks):
    half, weights, resumed, *_ = two_ranks[0][str(torch.float32)]
    params = make_params()
    optimizer = make_optimizer(params)
    resume(params, optimizer, half)
    advance(params, optimizer, (STEPS // 2, STEPS), range(2))
    on_four = four_ranks[3][str(torch.float32)][2]
    for name, param in params.items():
        for other in (weights, resumed, on_four):
            torch.testing.assert_close(other[name], param.detach(), atol=1e-5, rtol=1e-5)
    # bfloat16 with low bits: the same float32 weights in every world.
    low = [result[str(torch.bfloat16)] for result in (two_ranks[1], four_ranks[2])]
    for name in SHAPES:
        torch.testing.assert_close(low[0][2][name], low[1][2][name], **TOLERANCE[torch.bfloat16])


def test_matrices_and_elements_are_divided_and_collectives_do_not_grow_with_them(two_ranks, four_ranks):
    whole = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    for results in (two_ranks, four_ranks):
        shares = [result[str(torch.float32)][3] for result in results]
        for name in ("attn", "mlp", "uneven", "columns", "conv", "up", "down", "square"):
            assert sum(share[name] for share in shares) == whole[name], name
        assert {share["attn"] for share in shares} == {whole["attn"] // len(results)}
        assert {share["conv"] for share in shares} == {0, whole["conv"]}
        # The finite check, two for the table, two for everything else.
        assert {result[str(torch.float32)][4] for result in results} == {5}


def test_one_bad_rank_makes_all_skip_and_misuse_raises_everywhere(two_ranks):
    for result in two_ranks:
        unchanged, skipped, messages = result["misuse"]
        assert unchanged and skipped == 1
        assert "expected the same parameters with a gradient on every rank" in messages[0]
        assert messages[1].startswith("mesh: expected one dimension, got 2")
        assert messages[2].startswith("param_0: expected a contiguous parameter with a mesh")


def test_largest_first_to_the_least_loaded_ties_to_the_lowest_rank():
    costs = {"a": (4, 4.0), "b": (9, 9.0), "c": (4, 4.0), "d": (1, 1.0)}
    assert assign(costs, [0.0, 0.0]) == {"b": 0, "a": 1, "c": 1, "d": 1}
    assert assign(costs, [0.0, 100.0]) == dict.fromkeys("bacd", 0)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 5))
def test_every_matrix_has_one_owner_and_no_order_matters(sizes, world):
    costs = {f"m{i}": (size, float(size)) for i, size in enumerate(sizes)}
    owner = assign(costs, [0.0] * world)
    assert assign(dict(reversed(costs.items())), [0.0] * world) == owner and set(owner) == set(costs)
    loads = [sum(costs[name][1] for name in costs if owner[name] == rank) for rank in range(world)]
    # The rank with the last matrix had the lowest load before it, at most the average of the others.
    assert max(loads) <= sum(sizes) / world + (1 - 1 / world) * max(sizes) + 1e-9
