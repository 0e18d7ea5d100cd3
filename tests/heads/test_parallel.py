"""Vocabulary and sequence parallelism over gloo: equal to one rank, with exact collective counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from heads.golden import core_cases, dtype_of, expected_runs, numbers, ragged
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from leanstep.heads import (
    Head,
    LoRA,
    TeacherLogProbs,
    linear_cross_entropy,
    linear_distill_loss,
    linear_logprobs,
    linear_policy_loss,
    linear_preference_loss,
    logprob,
    losses,
    token_logprobs,
)
from leanstep.heads.parallel import gather_hidden_rows, resolve_group

SETS = (torch.arange(0, 27) % 41, torch.arange(0, 28, 3))


class Collectives(TorchDispatchMode):
    """The names of the collectives issued inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace.endswith("c10d"):
            name = func.name().split("::")[1]
            self.names.append(next(n for n in ("gather", "scatter", "reduce") if n in name))
        return func(*args, **(kwargs or {}))


def everything(rank: int, world: int) -> dict:
    """Run all checks in one start of the ranks: importing torch costs more than the checks."""
    return {
        "linear": linear_ranks(rank, world),
        "golden": golden_ranks(rank, world) if world == 2 else [],
        "gradcheck": gradcheck_ranks(rank, world),
        "losses": loss_ranks(rank, world),
        "plumbing": plumbing_ranks(rank, world),
    }


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    return run_ranks(request.param, everything, timeout=240)


def shard(full: torch.Tensor, rank: int, world: int, dim: int = 0) -> torch.Tensor:
    """Return this rank's part; columns beyond the real vocabulary are filled with large values."""
    width = -(-full.shape[dim] // world)
    short = width * world - full.shape[dim]
    shape = [*full.shape]
    shape[dim] = short
    padded = torch.cat((full, torch.full(shape, 50.0, dtype=full.dtype)), dim)
    return padded.narrow(dim, rank * width, width).contiguous()


def linear_ranks(rank: int, world: int) -> list[dict]:
    """Compare every path through both functions on shards with the same call on one rank."""
    T, D, V = 24, 8, 41
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, bias, down, up = random(T, D), random(V, D), random(V), random(2, D), random(V, 2)
    rows = torch.tensor([20, 3, 4, 5, 11, 17, 0, 23, 9])
    cases = {
        "rows": {"rows": rows},
        "all rows": {},
        "tiles": {"rows": rows, "chunk_rows": 2, "softcap": 6.0, "scale": 0.8},
        "frozen head": {"rows": rows, "frozen": True},
        "lora": {"rows": rows, "lora": True},
        "sequence parallel": {"rows": rows, "sequence_parallel": True},
        "sequence parallel, all rows": {"sequence_parallel": True},
        "no rows": {"rows": rows[:0]},
        "allowed": {"rows": rows, "allowed": SETS, "chunk_rows": 4},
        "metric": {"rows": rows, "entropy": "metric"},
        "logits": {"rows": rows, "logits": True},
        "logits, allowed": {"rows": rows, "logits": True, "allowed": SETS},
        # All columns of the last ranks are padding.
        "padding": {"rows": rows, "real": 13},
        "logits, padding": {"rows": rows, "logits": True, "real": 13},
    }
    logprob.CPU_TILE_BYTES, logprob.COLUMN_BLOCK = 4 * 40, 1
    results = []
    for name, options in cases.items():
        options = {"entropy": "grad", **options}
        frozen, scale, cap = (
            options.pop(k, d) for k, d in (("frozen", False), ("scale", 1.0), ("softcap", None))
        )
        split, adapted = options.pop("sequence_parallel", False), options.pop("lora", False)
        existing, real = options.pop("logits", False), options.pop("real", V)
        n = T if "rows" not in options else len(options["rows"])
        tokens = torch.randint(0, real, (n,), generator=generator)
        upstream = [random(n), random(n), random(n)]

        def run(h, w, b, u, **more):
            leaves = [x.clone().requires_grad_() for x in (h, w, b, down, u)]
            if frozen:  # noqa: B023
                leaves[1:] = [x.detach() for x in leaves[1:]]
            lora = LoRA(leaves[3], leaves[4], 0.5) if adapted else None  # noqa: B023
            with Collectives() as forward:
                if existing:  # noqa: B023
                    leaf = (h @ w.T).requires_grad_()
                    leaves = [leaf]
                    out = token_logprobs(leaf, tokens, **more)  # noqa: B023
                else:
                    head = Head(leaves[1], leaves[2], lora, scale, cap)  # noqa: B023
                    out = linear_logprobs(leaves[0], head, tokens, **more)  # noqa: B023
            roots = [t for t in (out.logp, out.entropy, out.lse) if t.requires_grad]
            with Collectives() as backward:
                torch.autograd.backward(roots, upstream[: len(roots)])  # noqa: B023
            return out, [x.grad for x in leaves], forward.names, backward.names

        truth = run(hidden, weight, bias, up, vocab_total=real, **options)
        block = T // world
        mine = slice(rank * block, (rank + 1) * block) if split else slice(None)
        parts = [shard(x, rank, world) for x in (weight, bias, up)]
        more = {"sequence_parallel": True} if split else {}
        got = run(hidden[mine], *parts, group=dist.group.WORLD, vocab_total=real, **options, **more)
        errors = [
            float((a - b).detach().abs().max()) if a.numel() else 0.0
            for a, b in zip(got[0][:3], truth[0][:3], strict=True)
        ]
        errors.append(float(not torch.equal(got[0].argmax, truth[0].argmax)))
        expected = truth[1]
        if existing:
            expected = [shard(expected[0], rank, world, 1)]
            expected[0][:, max(real - rank * got[1][0].shape[1], 0) :] = 0
        else:
            width = parts[0].shape[0]
            expected = [expected[0][mine], *expected[1:]]
            for i in (1, 2, 4):
                if expected[i] is not None:
                    expected[i] = shard(expected[i], rank, world)
                    expected[i][max(real - rank * width, 0) :] = 0
        for a, b in zip(got[1], expected, strict=True):
            if b is not None and b.numel():
                errors.append(float((a - b).abs().max()))
        results.append(
            {
                "name": name,
                "error": max(errors),
                "bits": b"".join(x.detach().numpy().tobytes() for x in got[0][:3]),
                "forward": got[2],
                "backward": got[3],
                "split": split,
                "logits": existing,
            }
        )
    return results


def test_sharded_head_equals_one_rank_with_two_collectives(ranks):
    for results in (rank["linear"] for rank in ranks):
        for result, first in zip(results, ranks[0]["linear"], strict=True):
            assert result["error"] < 1e-12, (result["name"], result["error"])
            # The same bits everywhere: ranks may branch on these values.
            assert result["bits"] == first["bits"], result["name"]
            assert result["forward"] == ["gather"] * (1 + result["split"]), result
            backward = [] if result["logits"] else ["scatter"] if result["split"] else ["reduce"]
            assert result["backward"] == backward, result


def golden_ranks(rank: int, world: int) -> list[str]:
    """Return the runs of slime's two ranks that differ, through both functions."""
    wrong = []
    for name, case in core_cases():
        if case["tp"] != world:
            continue
        dtype = dtype_of(case)
        logits, tokens = numbers(case["logits"]).to(dtype), torch.tensor(case["tokens"])
        g = [numbers(case[k]) for k in ("grad_log_prob", "grad_entropy")]
        eye = torch.eye(logits.shape[1], dtype=dtype)
        close = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 5e-6, "rtol": 5e-6}
        for expected in expected_runs(case):
            options = {"entropy": expected["mode"], "allowed": ragged(case.get("keep_ids"))}
            for linear in (False, True):
                leaf = (logits if linear else logits.chunk(world, 1)[rank]).clone().requires_grad_()
                if linear:
                    head = eye.chunk(world)[rank]
                    out = linear_logprobs(leaf, head, tokens, group=dist.group.WORLD, **options)
                else:
                    out = token_logprobs(leaf, tokens, group=dist.group.WORLD, **options)
                checks = [(out.logp, expected["log_prob"])]
                checks += [] if out.entropy is None else [(out.entropy, expected["entropy"])]
                for key, which in (("logprob_only", [0]), ("entropy_only", [1]), ("both", [0, 1])):
                    if f"grad_{key}" in expected:
                        roots = [(out.logp, out.entropy)[i] for i in which]
                        seeds = [g[i].to(roots[0].dtype) for i in which]
                        (grad,) = torch.autograd.grad(roots, leaf, seeds, retain_graph=True)
                        whole = numbers(expected[f"grad_{key}"])
                        checks.append((grad, (whole if linear else whole.chunk(world, 1)[rank]).tolist()))
                for got, want in checks:
                    if not torch.allclose(got.detach().double(), numbers(want), **close):
                        wrong.append(f"{name} {expected['mode']} linear={linear}")
    return wrong


def test_two_ranks_equal_slimes(ranks):
    assert all(rank["golden"] == [] for rank in ranks)


def gradcheck_ranks(rank: int, world: int) -> bool:
    """Numerical gradients of replicated hidden states, in fp64."""
    generator = torch.Generator().manual_seed(11)
    hidden = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7 * world, 3, generator=generator, dtype=torch.float64)
    tokens = torch.randint(0, 7 * world, (4,), generator=generator)
    local = weight[rank * 7 : (rank + 1) * 7].clone()
    sets = torch.arange(8) % 7, torch.arange(0, 9, 2)

    def replicated(h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        options = {"entropy": "grad", "group": dist.group.WORLD}
        out = linear_logprobs(h, local, tokens, **options)
        kept = linear_logprobs(h, local, tokens, allowed=sets, **options)
        return out.logp, out.entropy, out.lse, kept.logp

    # Every rank perturbs the same replicated input, so torch's own checker stays in step.
    return torch.autograd.gradcheck(replicated, (hidden,), eps=1e-6, atol=1e-7)


def test_numerical_gradients_of_shards(ranks):
    assert all(rank["gradcheck"] for rank in ranks)


def loss_ranks(rank: int, world: int) -> list[dict]:
    """Losses on shards: the policy loss in chunks (with gspo a sequence that is recomputed), compositions."""
    T, D, V = 150, 8, 41
    generator = torch.Generator().manual_seed(23)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, lengths, rows = random(T, D), random(V, D), [90, 20, 30], torch.arange(5, 145)
    tokens, old, advantages = torch.randint(0, V, (140,), generator=generator), random(140) - 3, random(140)
    labels = torch.randint(0, V, (6, 25), generator=generator)
    width = -(-V // world)

    def policy(size, **options):
        def call(h, w, **more):
            losses.CPU_CHUNK_BYTES = size * 8 * (width if more else V)
            options.update(rows=rows, normalizer="sequence_mean", sequence_lengths=lengths)
            return linear_policy_loss(h, w, tokens, old, advantages, **options, **more).loss

        return call

    cases = [
        policy(140, entropy_coef=0.1, clip_high=0.3),
        policy(70, entropy_coef=0.1, clip_high=0.3),
        policy(64, objective="gspo", clip_low=0.5, clip_high=0.5),
        lambda h, w, **more: linear_cross_entropy(h.view(6, 25, D), w, labels, z_loss=0.1, **more),
        lambda h, w, **more: (
            linear_preference_loss(h.view(6, 25, D), w, labels, objective="orpo", **more).loss
        ),
    ]
    results = []
    for case in cases:

        def run(h, w, **more):
            h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
            with Collectives() as forward:
                loss = case(h, w, **more)  # noqa: B023
            with Collectives() as backward:
                (3 * loss).backward()
            return loss.detach(), h.grad, w.grad, forward.names, backward.names

        truth = run(hidden, weight)
        got = run(hidden, shard(weight, rank, world), group=dist.group.WORLD, vocab_total=V)
        own = shard(truth[2], rank, world)
        own[max(V - rank * width, 0) :] = 0
        errors = [(got[0] - truth[0]).abs(), (got[1] - truth[1]).abs().max(), (got[2] - own).abs().max()]
        results.append({"error": float(max(errors)), "forward": got[3], "backward": got[4]})
    refusals = []
    teacher = TeacherLogProbs(torch.zeros(T, width, dtype=torch.float64))
    for call in (
        lambda: linear_distill_loss(hidden, weight[:width], teacher, group=dist.group.WORLD),
        lambda: linear_cross_entropy(
            hidden, weight[:width], torch.zeros(T).long(), label_smoothing=0.1, group=dist.group.WORLD
        ),
    ):
        try:
            call()
        except ValueError as error:
            refusals.append(str(error))
    results[0]["refusals"] = refusals
    return results


def test_sharded_losses_equal_one_rank(ranks):
    for result in (r for rank in ranks for r in rank["losses"]):
        assert result["error"] < 1e-11, result
    for results in (rank["losses"] for rank in ranks):
        # One per chunk of rows and one for the hidden gradient at the end, none in backward.
        assert [len(r["forward"]) for r in results] == [2, 3, 3, 1, 1]
        assert [r["backward"] for r in results] == [[], [], [], ["reduce"], ["reduce"]]
        assert [text.split(":")[0] for text in results[0]["refusals"]] == ["group", "label_smoothing"]


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
    for name, group in (
        ("stranger", singles[(rank + 1) % world]),
        ("2-D", init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))),
    ):
        try:
            resolve_group(group)
            result[name] = "accepted"
        except ValueError as error:
            result[name] = str(error)

    # Sequence parallel: only selected rows, in the given order and repeated; gradients return to their ranks.
    generator = torch.Generator().manual_seed(5)
    full, rows = torch.randn(18, 4, generator=generator, dtype=torch.float64), torch.tensor([16, 2, 2, 5, 11])
    block = 18 // world
    local = full[rank * block : (rank + 1) * block].clone().requires_grad_()
    gathered = gather_hidden_rows(local, rows, world_group)
    result["rows"] = torch.equal(gathered, full[rows])
    upstream = torch.randn(world, *gathered.shape, generator=generator, dtype=torch.float64)
    gathered.backward(upstream[rank])
    expected = torch.zeros_like(full).index_add(0, rows, upstream.sum(0))[rank * block : (rank + 1) * block]
    result["row gradients"] = torch.allclose(local.grad, expected, atol=1e-14)
    nothing = gather_hidden_rows(local, rows[:0], world_group)
    nothing.sum().backward()
    result["no rows"] = tuple(nothing.shape) == (0, 4) and nothing.requires_grad
    # One pair of ranks' worth: a rank without rows beside one that has some, on a data-parallel group.
    own = rows[:0] if rank == 0 else rows
    weight = torch.randn(9, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    linear_logprobs(full, weight, torch.zeros(len(own)).long(), rows=own).logp.sum().backward()
    dist.all_reduce(weight.grad)
    result["empty beside full"] = bool(weight.grad.any()) and weight.grad.isfinite().all().item()
    return result


def test_groups_and_sequence_rows(ranks):
    for result in (r["plumbing"] for r in ranks):
        assert result["same group"] and result["no cp"] and result["one rank has no group"]
        assert "not a member" in result["stranger"] and "1-D DeviceMesh" in result["2-D"]
        assert (
            result["rows"] and result["row gradients"] and result["no rows"] and result["empty beside full"]
        )


def test_what_is_no_group_is_refused():
    assert resolve_group(SimpleNamespace(tp=None)) is None
    with pytest.raises(ValueError, match="group: expected a ProcessGroup"):
        resolve_group("tp")
