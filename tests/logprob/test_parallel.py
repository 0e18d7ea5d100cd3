"""Vocabulary and sequence parallelism over gloo: equal to one rank, with exact collective counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from logprob.flat import linear_logprobs, linear_policy_loss, token_logprobs
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from leanstep.logprob.engine.softmax import RowStatistics
from leanstep.logprob.objective import CovarianceChoice, PolicyObjective
from leanstep.logprob.parallel import (
    VocabShard,
    all_reduce_sum,
    combine_statistics,
    gather_hidden_rows,
    gather_over_ranks,
    gather_vocab_starts,
    reduce_hidden_grad,
    resolve_group,
    shard_rows,
    vocab_shard,
)
from leanstep.logprob.rows import plan_rows


class Collectives(TorchDispatchMode):
    """The names of the collectives issued inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace.endswith("c10d"):
            self.names.append(func.name().split("::")[1].strip("_"))
        return func(*args, **(kwargs or {}))


def everything(rank: int, world: int) -> dict:
    """Run all checks in one start of the ranks: importing torch costs more than the checks."""
    return {
        "logits": logits_ranks(rank, world),
        "linear": linear_ranks(rank, world),
        "gradcheck": gradcheck_ranks(rank, world),
        "policy": policy_ranks(rank, world),
        "plumbing": plumbing_ranks(rank, world),
    }


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    return run_ranks(request.param, everything, timeout=240)


def shard_bounds(vocab: int, world: int, kind: str) -> list[int]:
    """Return the column bounds per rank. `equal` pads; `unequal` gives every rank a different width."""
    if kind == "equal":
        width = -(-vocab // world)
        return [rank * width for rank in range(world + 1)]
    if kind == "one-empty":
        return [0, vocab, *[vocab + 3 * r for r in range(1, world)]]
    return [0, *(vocab * (2 * r + 1) // (2 * world + 3) for r in range(1, world)), vocab]


def padded_shard(full: torch.Tensor, bounds: list[int], rank: int, dim: int) -> torch.Tensor:
    """Return this rank's part; columns beyond the real vocabulary are filled with large values."""
    start, stop = bounds[rank], bounds[rank + 1]
    part = full.narrow(dim, min(start, full.shape[dim]), max(min(stop, full.shape[dim]) - start, 0))
    missing = stop - start - part.shape[dim]
    shape = list(part.shape)
    shape[dim] = missing
    return torch.cat((part, torch.full(shape, 50.0, dtype=full.dtype)), dim).contiguous()


# --- logits level ---


def logits_ranks(rank: int, world: int) -> list[dict]:
    results = []
    for kind in ("equal", "unequal", "one-empty"):
        for dtype in (torch.float32, torch.float64):
            generator = torch.Generator().manual_seed(3)
            N, V = 13, 41
            full = torch.randn(N, V, generator=generator, dtype=dtype) * 4
            full[2, 5:] = -torch.inf
            tokens = torch.randint(0, V, (N,), generator=generator)
            tokens[2] = 1
            g_logp, g_entropy = (torch.randn(N, generator=generator, dtype=dtype) for _ in range(2))
            bounds = shard_bounds(V, world, kind)
            local = padded_shard(full, bounds, rank, 1).requires_grad_()
            with Collectives() as forward:
                out = token_logprobs(
                    local, tokens, entropy="grad", temperature=0.7, chunk_rows=4, group=dist.group.WORLD,
                    start=bounds[rank], total=V,
                )  # fmt: skip
            with Collectives() as backward:
                torch.autograd.backward([out.logp, out.entropy], [g_logp, g_entropy])

            whole = full.clone().requires_grad_()
            truth = token_logprobs(whole, tokens, entropy="grad", temperature=0.7)
            torch.autograd.backward([truth.logp, truth.entropy], [g_logp, g_entropy])
            expected = padded_shard(whole.grad, bounds, rank, 1)
            expected[:, max(V - bounds[rank], 0) :] = 0
            results.append(
                {
                    "kind": kind,
                    "forward": forward.names,
                    "backward": backward.names,
                    "logp": out.logp.detach().numpy().tobytes(),
                    "entropy": out.entropy.detach().numpy().tobytes(),
                    "tolerance": 1e-12 if dtype == torch.float64 else 5e-6,
                    "error": max(
                        float((out.logp - truth.logp).detach().abs().max()),
                        float((out.entropy - truth.entropy).detach().abs().max()),
                        float((local.grad - expected).abs().max()),
                    ),
                }
            )
    return results


def test_sharded_logits_equal_one_rank(ranks):
    ranks = [rank["logits"] for rank in ranks]
    for rank in ranks:
        for result, first in zip(rank, ranks[0], strict=True):
            assert result["forward"] == ["allreduce", "allreduce"], result["kind"]
            assert result["backward"] == []
            assert result["error"] <= result["tolerance"], result
            # The same bits everywhere: ranks may branch on these values.
            assert result["logp"] == first["logp"] and result["entropy"] == first["entropy"]


# --- hidden level ---


def linear_ranks(rank: int, world: int) -> list[dict]:
    """Compare every path through `linear_logprobs` on shards with the same call on one rank."""
    T, D, V = 24, 8, 41
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    full_hidden, full_weight, full_bias = random(T, D), random(V, D), random(V)
    some_rows = torch.tensor([20, 3, 4, 5, 11, 17, 0, 23, 9])
    cases = {
        "rows": {"rows": some_rows},
        "all rows": {},
        "tiles": {"rows": some_rows, "tile": (2, 5), "softcap": 6.0, "scale": 0.8},
        "frozen head": {"rows": some_rows, "frozen": True},
        "sequence parallel": {"rows": some_rows, "sequence_parallel": True},
        "sequence parallel, all rows": {"sequence_parallel": True},
        "caller reduces": {"rows": some_rows, "reduce_grad": "none"},
        "no rows": {"rows": some_rows[:0]},
        "allowed": {"rows": some_rows, "allowed": (torch.arange(0, 27) % V, torch.arange(0, 28, 3))},
        "metric": {"rows": some_rows, "entropy": "metric"},
        "kept logits": {"rows": some_rows, "tile": (4, 5), "save_logits": 400},
        "logits in the gradient": {"rows": some_rows, "tile": (9, 5)},
    }
    results = []
    for name, options in cases.items():
        for kind in ("equal", "unequal", "one-empty") if name in ("rows", "no rows") else ("unequal",):
            options = {"entropy": "grad", **options}
            frozen = options.pop("frozen", False)
            parallel = {k: options.pop(k) for k in ("sequence_parallel", "reduce_grad") if k in options}
            rows = options.get("rows")
            selected = T if rows is None else len(rows)
            tokens = torch.randint(0, V, (selected,), generator=generator)
            upstream = [random(selected), random(selected)]
            bounds = shard_bounds(V, world, kind)

            def run(hidden, weight, bias, **more):
                hidden = hidden.clone().requires_grad_()
                weight = weight.clone().requires_grad_(not frozen)  # noqa: B023
                bias = bias.clone().requires_grad_(not frozen)  # noqa: B023
                with Collectives() as forward:
                    out = linear_logprobs(hidden, weight, tokens, bias=bias, **more)  # noqa: B023
                roots = [t for t in (out.logp, out.entropy) if t.requires_grad]
                with Collectives() as backward:
                    torch.autograd.backward(roots, upstream[: len(roots)])  # noqa: B023
                return out, hidden.grad, weight.grad, bias.grad, forward.names, backward.names

            truth = run(full_hidden, full_weight, full_bias, **options)
            block = T // world
            split = parallel.get("sequence_parallel", False)
            mine = slice(rank * block, (rank + 1) * block) if split else slice(None)
            got = run(
                full_hidden[mine],
                padded_shard(full_weight, bounds, rank, 0),
                padded_shard(full_bias, bounds, rank, 0),
                group=dist.group.WORLD,
                start=bounds[rank],
                total=V,
                **options,
                **parallel,
            )
            grad_hidden = got[1]
            if parallel.get("reduce_grad") == "none":
                dist.all_reduce(grad_hidden)
            errors = [
                float((a - b).detach().abs().max()) if a.numel() else 0.0
                for a, b in (
                    (got[0].logp, truth[0].logp),
                    (got[0].entropy, truth[0].entropy),
                    (grad_hidden, truth[1][mine]),
                )
            ]
            if not frozen:
                for index in (2, 3):
                    expected = padded_shard(truth[index], bounds, rank, 0)
                    expected[max(V - bounds[rank], 0) :] = 0
                    errors.append(float((got[index] - expected).abs().max()))
            results.append(
                {
                    "name": f"{name}, {kind}",
                    "error": max(errors),
                    "bits": got[0].logp.detach().numpy().tobytes()
                    + got[0].entropy.detach().numpy().tobytes(),
                    "forward": got[4],
                    "backward": got[5],
                    "sequence_parallel": split,
                    "reduces": parallel.get("reduce_grad") != "none",
                }
            )
    return results


def test_sharded_head_equals_one_rank_with_three_collectives(ranks):
    for results in (rank["linear"] for rank in ranks):
        for result, first in zip(results, ranks[0]["linear"], strict=True):
            assert result["error"] < 1e-12, result
            assert result["bits"] == first["bits"], result["name"]
            gathers = [n for n in result["forward"] if "gather" in n]
            assert len(gathers) == result["sequence_parallel"], result
            assert result["forward"][len(gathers) :] == ["allreduce", "allreduce"], result
            expected = ["reduce_scatter"] if result["sequence_parallel"] else ["allreduce"]
            names = ["reduce_scatter" if "reduce_scatter" in n else n for n in result["backward"]]
            assert names == (expected if result["reduces"] else []), result


def gradcheck_ranks(rank: int, world: int) -> bool:
    """Numerical gradients of a local weight shard and of the replicated hidden states, in fp64."""
    generator = torch.Generator().manual_seed(11)
    V, D, T = 7 * world, 3, 4
    hidden = torch.randn(T, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, V, (T,), generator=generator)
    width = V // world
    local = weight[rank * width : (rank + 1) * width].clone().requires_grad_()

    # Ranks perturb in step, each its own shard, and each differentiates the sum of all ranks' losses
    # with respect to what it holds: the loss is replicated, so its own gradient is the whole one.
    def losses(shard: torch.Tensor) -> torch.Tensor:
        out = linear_logprobs(hidden, shard, tokens, entropy="grad", group=dist.group.WORLD)
        assert out.entropy is not None
        return out.logp.sum() + 0.3 * out.entropy.sum()

    (analytic,) = torch.autograd.grad(losses(local), local)
    numeric = torch.zeros_like(analytic)
    step = 1e-6
    for owner in range(world):
        for i in range(width):
            for j in range(D):
                values = []
                for sign in (1, -1):
                    moved = local.detach().clone()
                    if owner == rank:
                        moved[i, j] += sign * step
                    values.append(float(losses(moved)))
                if owner == rank:
                    numeric[i, j] = (values[0] - values[1]) / (2 * step)
    moved = hidden.clone().requires_grad_()

    def replicated(h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = linear_logprobs(h, local.detach(), tokens, entropy="grad", group=dist.group.WORLD)
        assert out.entropy is not None
        return out.logp, out.entropy

    # Every rank perturbs the same replicated input, so torch's own checker stays in step.
    checked = torch.autograd.gradcheck(replicated, (moved,), eps=1e-6, atol=1e-7)
    return checked and torch.allclose(analytic, numeric, atol=1e-7)


def test_numerical_gradients_of_shards(ranks):
    assert all(rank["gradcheck"] for rank in ranks)


# --- the policy loss ---


def policy_ranks(rank: int, world: int) -> list[dict]:
    """The fused objective on shards: chunks, and with gspo a sequence that is recomputed."""
    T, D, V = 150, 8, 41
    generator = torch.Generator().manual_seed(23)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    full_hidden, full_weight = random(T, D), random(V, D)
    lengths = [90, 20, 30]
    rows = torch.arange(5, 145)
    tokens = torch.randint(0, V, (140,), generator=generator)
    old, advantages = random(140) - 3, random(140)
    results = []
    for objective, budget in (
        (PolicyObjective(entropy_coef=0.1, clip_high=0.3), None),
        (PolicyObjective(entropy_coef=0.1, clip_high=0.3), 70 * 8 * 3 * -(-V // world)),
        (PolicyObjective(kind="gspo", clip_low=0.5, clip_high=0.5), 64 * 8 * V),
        (PolicyObjective(kind="sapo"), None),
        (PolicyObjective(kind="dppo_kl", clip_low=0.01, clip_high=0.01), 64 * 8 * V),
        # Rows that look at each other: one chunk, recomputed here because its logits do not fit.
        (PolicyObjective(kind="kl_cov", covariance=CovarianceChoice(share=0.2)), 64 * 8 * V),
        (PolicyObjective(kind="clip_cov", covariance=CovarianceChoice(share=0.1, low=0.0)), None),
    ):
        bounds = shard_bounds(V, world, "unequal")

        def run(hidden, weight, **more):
            hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            with Collectives() as forward:
                out = linear_policy_loss(
                    hidden, weight, tokens, rows=rows, old_logp=old, advantages=advantages,
                    objective=objective, normalizer="sequence_mean", sequence_lengths=lengths, **more,  # noqa: B023
                )  # fmt: skip
            with Collectives() as backward:
                (3 * out.loss).backward()
            return out, hidden.grad, weight.grad, forward.names, backward.names

        truth = run(full_hidden, full_weight)
        shard = {"group": dist.group.WORLD, "start": bounds[rank], "total": V, "budget": budget}
        got = run(full_hidden, padded_shard(full_weight, bounds, rank, 0), **shard)
        results.append(
            {
                "error": max(
                    float((got[0].loss - truth[0].loss).detach().abs()),
                    float((got[0].logp - truth[0].logp).detach().abs().max()),
                    float((got[1] - truth[1]).abs().max()),
                    float((got[2] - truth[2][bounds[rank] : bounds[rank + 1]]).abs().max()),
                ),
                "forward": got[3],
                "backward": got[4],
            }
        )
    return results


def test_sharded_policy_loss_equals_one_rank(ranks):
    for result in (r for rank in ranks for r in rank["policy"]):
        assert result["error"] < 1e-11, result
        # Two per row chunk, one for the hidden gradient at the end, none in backward.
        assert set(result["forward"]) == {"allreduce"} and len(result["forward"]) % 2 == 1, result
        assert result["backward"] == [], result
    counts = [[len(r["forward"]) for r in rank["policy"]] for rank in ranks]
    assert all(c == counts[0] for c in counts) and counts[0][0] == 3 and counts[0][1] > 3
    assert counts[0][-2:] == [3, 3]


# --- groups, shards and rows ---


def plumbing_ranks(rank: int, world: int) -> dict:
    from torch.distributed.device_mesh import init_device_mesh

    result: dict = {}
    world_group = dist.group.WORLD
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    holder = SimpleNamespace(tp=world_group, cp=None)
    result["same group"] = all(resolve_group(g).size() == world for g in (world_group, mesh, holder))
    result["no cp"] = resolve_group(holder, "cp") is None
    singles = [dist.new_group([r]) for r in range(world)]
    result["one rank has no group"] = resolve_group(singles[rank]) is None
    try:
        resolve_group(singles[(rank + 1) % world])
        result["stranger"] = "accepted"
    except ValueError as error:
        result["stranger"] = str(error)
    two_dims = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    try:
        resolve_group(two_dims)
        result["2-D"] = "accepted"
    except ValueError as error:
        result["2-D"] = str(error)

    widths = [5, 0, 7][:world]
    result["starts"] = gather_vocab_starts(widths[rank], world_group)
    result["gathered"] = gather_over_ranks(torch.tensor([rank, 10 * rank]), world_group).tolist()

    # An empty rank's statistics leave the others' untouched.
    stats = RowStatistics.empty(3, dtype=torch.float64, moment=True)
    z = torch.randn(3, 6, dtype=torch.float64)
    if rank == 0:
        stats.update_(z, [z, torch.empty_like(z)])
    alone = stats.final()
    with Collectives() as seen:
        combined = combine_statistics(stats, holder)
    result["combine"] = seen.names
    if rank == 0:
        result["unchanged"] = torch.equal(combined.final().log_sum, alone.log_sum)
    with Collectives() as seen:
        combine_statistics(RowStatistics.empty(0), world_group)
    result["combine nothing"] = seen.names

    # reduce_hidden_grad in its three modes.
    grad = torch.arange(2.0 * world * 3).view(2 * world, 3) * (rank + 1)
    total = torch.arange(2.0 * world * 3).view(2 * world, 3) * sum(range(1, world + 1))
    counts = []
    for mode, expected in (
        ("all_reduce", total),
        ("reduce_scatter", total[2 * rank : 2 * rank + 2]),
        ("none", grad.clone()),
    ):
        with Collectives() as seen:
            reduced = reduce_hidden_grad(grad.clone(), mesh, mode)
        counts.append(len(seen.names))
        result[mode] = torch.equal(reduced, expected)
    result["counts"] = counts

    # Sequence parallel: only selected rows, in plan order; gradients return to their ranks.
    generator = torch.Generator().manual_seed(5)
    plan = plan_rows([9, 6], [4, 3], pad_multiple=6)
    assert plan.T_local == 18 and plan.rows_host is not None
    full = torch.randn(18, 4, generator=generator, dtype=torch.float64)
    block = 18 // world
    local = full[rank * block : (rank + 1) * block].clone().requires_grad_()
    shards = shard_rows(plan.rows_host, 18, world_group)
    with Collectives() as forward:
        gathered = gather_hidden_rows(local, shards, world_group)
    result["rows"] = torch.equal(gathered, full[plan.rows])
    upstream = torch.randn(world, *gathered.shape, generator=generator, dtype=torch.float64)
    with Collectives() as backward:
        gathered.backward(upstream[rank])
    expected = torch.zeros_like(full).index_copy(0, plan.rows, upstream.sum(0))
    result["row gradients"] = torch.allclose(
        local.grad, expected[rank * block : (rank + 1) * block], atol=1e-14
    )
    result["row collectives"] = (len(forward.names), len(backward.names))
    nothing = gather_hidden_rows(local, shard_rows(torch.zeros(0, dtype=torch.int64), 18, mesh), mesh)
    nothing.sum().backward()
    result["no rows"] = tuple(nothing.shape) == (0, 4) and nothing.requires_grad

    x = torch.full((3,), float(rank), requires_grad=True)
    y = all_reduce_sum(x, world_group)
    (y * (rank + 1)).sum().backward()
    result["sum"] = y.tolist() == [float(sum(range(world)))] * 3
    result["sum gradient"] = x.grad.tolist() == [float(sum(range(1, world + 1)))] * 3
    return result


def test_groups_shards_and_sequence_rows(ranks):
    world = len(ranks)
    for rank, result in enumerate(r["plumbing"] for r in ranks):
        assert result["same group"] and result["no cp"] and result["one rank has no group"]
        assert "not a member" in result["stranger"]
        assert "1-D DeviceMesh" in result["2-D"]
        assert result["starts"] == [0, 5, 5, 12][: world + 1]
        assert result["gathered"] == [[r, 10 * r] for r in range(world)]
        assert result["combine"] == result["combine nothing"] == ["allreduce", "allreduce"]
        assert rank != 0 or result["unchanged"]
        assert result["all_reduce"] and result["reduce_scatter"] and result["none"]
        assert result["counts"] == [1, 1, 0]
        assert result["rows"] and result["row gradients"] and result["no rows"]
        assert result["row collectives"] == (1, 1)
        assert result["sum"] and result["sum gradient"]


def test_no_group_means_no_collectives_and_no_copy():
    stats = RowStatistics.empty(4)
    assert combine_statistics(stats, None) is stats
    grad = torch.ones(3, 2)
    assert reduce_hidden_grad(grad, None) is grad
    assert resolve_group(SimpleNamespace(tp=None)) is None
    with pytest.raises(ValueError, match="group: expected a ProcessGroup"):
        resolve_group("tp")
    with pytest.raises(ValueError, match="reduce_grad: got 'mean'"):
        reduce_hidden_grad(grad, None, "mean")  # type: ignore[arg-type]


def test_vocab_shards_know_their_padding():
    assert vocab_shard(8) == (VocabShard(0, 8, 8), 8)
    assert vocab_shard(8, start=16, total=20) == (VocabShard(16, 8, 4), 20)
    assert vocab_shard(8, start=24, total=20) == (VocabShard(24, 8, 0), 20)
    assert vocab_shard(8, start=16) == (VocabShard(16, 8, 8), 24)
    for bad in ({"start": -1}, {"total": 0}):
        with pytest.raises(ValueError, match=f"shards.{next(iter(bad))}: expected"):
            vocab_shard(8, **bad)


def test_sequence_shards_are_checked():
    with pytest.raises(ValueError, match=r"hidden: expected \[6, D\]"):
        gather_hidden_rows(torch.zeros(5, 2), shard_rows(torch.tensor([1, 4]), 6, None), None)
    gathered = gather_hidden_rows(
        torch.arange(12.0).view(6, 2), shard_rows(torch.tensor([4, 1]), 6, None), None
    )
    assert gathered.tolist() == [[8.0, 9.0], [2.0, 3.0]]
