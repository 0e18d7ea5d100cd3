"""Row selection end to end: against slime's own results, and context-parallel ranks against one process."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from leanstep.heads import linear_logprobs, token_logprobs
from leanstep.heads.layout import local_spans
from leanstep.heads.parallel import gather_response, return_parts
from leanstep.heads.rows import (
    plan_rows,
    sample_mean,
    select_allowed,
    slice_response,
)

VECTORS = Path(__file__).parents[1] / "vectors" / "logprob"
TOLERANCE = {"atol": 5e-6, "rtol": 5e-6}


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace.endswith("c10d"):
            self.names.append(func.name().split("::")[1].strip("_"))
        return func(*args, **(kwargs or {}))


def golden_cases(*files: str) -> list:
    return [case for file in files for case in json.loads((VECTORS / f"{file}.json").read_text())["cases"]]


def run_case(case: dict, rank: int, select: str, group=None) -> list[str]:
    """Return the results that differ from upstream, for one rank of a golden case and one selection."""
    golden, e2e = case["ranks"][rank], case["e2e"]
    layout = {
        "layout": case["layout"],
        "cp_size": case["cp_size"],
        "cp_rank": rank,
        "pad_multiple": case["pad_multiplier"],
        "max_seq_len": case.get("max_seq_len"),
    }
    totals, responses = case["total_lengths"], case["response_lengths"]
    plan = plan_rows(totals, responses, select=select, loss_masks=case["loss_masks"], **layout)
    keep = None
    if "top_p_token_ids" in e2e:
        keep = select_allowed(e2e["top_p_token_ids"], e2e["top_p_token_offsets"], plan)
    back = plan.returned()
    masks = slice_response([torch.tensor(m) for m in case["loss_masks"]], back)
    g_logp, g_entropy = (
        slice_response([torch.tensor(g) for g in e2e[name]], back) for name in ("g_lp", "g_ent")
    )
    logits = torch.tensor(golden["logits"], dtype=torch.float32).view(plan.T_local, e2e["V"])
    untouched = logits.clone()
    logits.requires_grad_()
    tokens = torch.tensor(list(chain(*case["tokens"])))
    wrong = []
    variants = {"logprob_only": (1, 0), "entropy_only": (0, 1), "both": (1, 1)}
    for name, (with_logp, with_entropy) in variants.items():
        logits.grad = None
        out = token_logprobs(
            logits,
            plan.targets(tokens),
            rows=plan.rows,
            entropy="grad",
            temperature=e2e["temperature"],
            chunk_rows=e2e["chunk"] if e2e["chunk"] > 0 else None,
            allowed=keep,
        )
        logp, entropy = return_parts(plan, group, out.logp, out.entropy)
        roots = ([*logp] if with_logp else []) + ([*entropy] if with_entropy else [])
        upstream = ([*g_logp] if with_logp else []) + ([*g_entropy] if with_entropy else [])
        torch.autograd.backward(roots, upstream)
        values = "e2e_loss_mask_only" if select == "loss_mask" else "e2e_full"
        values = values if values in golden else "e2e_response_only"
        for kind, parts in (("log_probs", logp), ("entropy", entropy)):
            for k, (part, expected) in enumerate(
                zip(parts, golden.get(values, {}).get(kind, []), strict=False)
            ):
                if not torch.allclose(part, torch.tensor(expected).float(), atol=5e-6, rtol=2e-6):
                    wrong.append(f"{select} {name} {kind}[{k}]")
                if select == "loss_mask" and bool((part[masks[k] == 0] != 0).any()):
                    wrong.append(f"{select} {name} {kind}[{k}] not exactly 0")
        gradients = golden.get("e2e_grad_masked" if select == "loss_mask" else "e2e_full", {})
        if f"grad_logits_{name}" in gradients:
            expected = torch.tensor(gradients[f"grad_logits_{name}"]).view_as(logits)
            if not torch.allclose(logits.grad, expected, **TOLERANCE):
                wrong.append(f"{select} {name} gradient")
            unused = torch.ones(plan.T_local, dtype=torch.bool)
            unused[slice(0, 0) if plan.rows is None else plan.rows] = False
            if plan.rows is not None and bool((logits.grad[unused] != 0).any()):
                wrong.append(f"{select} {name} gradient outside the selection")
    if not torch.equal(logits.detach(), untouched):
        wrong.append("logits modified")
    return wrong


@pytest.mark.parametrize("select", ["all", "response", "loss_mask"])
@pytest.mark.parametrize(
    "case", golden_cases("e2e_cp1_thd", "e2e_cp1_bshd", "e2e_zigzag"), ids=lambda case: case["name"]
)
def test_selection_equals_upstream(case, select):
    if select == "loss_mask" and "e2e_loss_mask_only" not in case["ranks"][0]:
        pytest.skip("upstream has no result for this combination")
    for rank in range(case["cp_size"]):
        assert run_case(case, rank, select) == []


# --- ranks ---

# Sequences whose responses leave some ranks without any row.
LENGTHS = {"some": ([24, 9, 5], [2, 6, 1]), "one-sided": ([24], [2]), "nothing": ([6, 4], [0, 0])}


def everything(rank: int, world: int) -> dict:
    result: dict = {"golden": [], "cp": {}}
    if world == 2:
        for case in golden_cases("e2e_allgather"):
            for select in ("all", "response", "loss_mask"):
                result["golden"] += run_case(case, rank, select, dist.group.WORLD)
    for layout in ("zigzag", "bshd_zigzag", "allgather"):
        for name in LENGTHS:
            for select in ("response", "loss_mask"):
                result["cp"][f"{layout} {name} {select}"] = cp_case(rank, world, layout, name, select)
    return result


def cp_case(rank: int, world: int, layout: str, name: str, select: str) -> dict:
    """One training loss on context-parallel ranks and on one process: values, gradients, collectives."""
    totals, responses = LENGTHS[name]
    D, V = 6, 19
    generator = torch.Generator().manual_seed(13)
    hidden = [torch.randn(n, D, generator=generator, dtype=torch.float64) for n in totals]
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    tokens = [torch.randint(0, V, (n,), generator=generator) for n in totals]
    masks = [[int(i % 3 != 1) for i in range(r)] for r in responses]
    weights = [torch.randn(r, generator=generator, dtype=torch.float64) for r in responses]
    entropy_share = 0.3 if select == "response" else 0.0

    def loss_of(plan, hidden_rows, head, group=None):
        out = linear_logprobs(
            hidden_rows, head, plan.targets(tokens), rows=plan.rows, entropy="grad", chunk_rows=3
        )
        logp, entropy = return_parts(plan, group, out.logp, out.entropy)
        back = plan.returned() if group is not None else plan
        local = slice_response(weights, back)
        masked = back
        if back.weights is None:
            masked = plan_rows(
                totals, responses, loss_masks=masks, layout="zigzag", cp_size=world, cp_rank=rank
            )
        policy = [a * b for a, b in zip(logp, local, strict=True)]
        return sample_mean(policy, masked) + entropy_share * sum(e.sum() for e in entropy), (logp, entropy)

    # Truth: one process, all rows, plain concatenation.
    whole = torch.cat(hidden).requires_grad_()
    head = weight.clone().requires_grad_()
    plan = plan_rows(totals, responses, loss_masks=masks, select=select)
    expected, _ = loss_of(plan, whole, head)
    expected.backward()

    spans, T_local = local_spans(
        totals, layout=layout, cp_size=world, cp_rank=rank, max_seq_len=30, pad_multiple=2
    )
    local = torch.full((T_local, D), 7.0, dtype=torch.float64)
    for span in spans:
        local[span.base : span.base + len(span)] = hidden[span.sample][span.start : span.stop]
    local.requires_grad_()
    local_head = weight.clone().requires_grad_()
    plan = plan_rows(
        totals,
        responses,
        loss_masks=masks,
        select=select,
        layout=layout,
        cp_size=world,
        cp_rank=rank,
        max_seq_len=30,
        pad_multiple=2,
    )
    with Collectives() as forward:
        loss, (logp, _) = loss_of(plan, local, local_head, dist.group.WORLD)
    with Collectives() as backward:
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    # A gradient hook or a data-parallel reduction needs a tensor on every rank, also on one without rows.
    exists = local.grad is not None and local_head.grad is not None
    dist.all_reduce(local_head.grad)
    starts = [0, *torch.tensor(totals).cumsum(0).tolist()]
    error = float((total - expected.detach()).abs())
    error = max(error, float((local_head.grad - head.grad).abs().max()))
    covered = torch.zeros(T_local, dtype=torch.bool)
    for span in spans:
        covered[span.base : span.base + len(span)] = True
        mine = local.grad[span.base : span.base + len(span)]
        if len(span):
            base = starts[span.sample]
            error = max(error, float((mine - whole.grad[base + span.start : base + span.stop]).abs().max()))
    # gather_response undoes slice_response.
    back = plan.returned()
    whole_again = gather_response(slice_response(weights, back), back, dist.group.WORLD)
    inverse = all(torch.equal(a, b) for a, b in zip(whole_again, weights, strict=True))
    return {
        "error": error,
        "padding": float(local.grad[~covered].abs().sum()) if bool((~covered).any()) else 0.0,
        "exists": exists,
        "inverse": inverse,
        "rows": plan.num_rows,
        "forward": forward.names,
        "backward": backward.names,
        "splits": [len(x) for x in logp] == list(back.splits),
    }


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request):
    return run_ranks(request.param, everything, timeout=240)


def test_allgather_results_equal_upstream(ranks):
    assert all(rank["golden"] == [] for rank in ranks)


def test_gradients_equal_the_unsharded_run(ranks):
    for rank in ranks:
        for name, result in rank["cp"].items():
            assert result["error"] < 1e-12, (name, result)
            assert result["padding"] == 0.0, name
            assert result["splits"] and result["inverse"], name


def test_ranks_without_rows_stay_in_step_and_in_the_graph(ranks):
    for name in ranks[0]["cp"]:
        results = [rank["cp"][name] for rank in ranks]
        assert all(r["exists"] for r in results), name
        # The same collectives on every rank, whatever it holds: none, or one each way for allgather.
        expected = ["allreduce"] if name.startswith("allgather") else []
        assert all(r["forward"] == r["backward"] == expected for r in results), (name, results)
    some_empty = [r["cp"]["zigzag one-sided response"]["rows"] for r in ranks]
    assert 0 in some_empty and sum(some_empty) == 2


def test_kept_ids_follow_the_rows():
    ids, offsets = [[5, 6, 7], [8, 9]], [[0, 2, 2, 3], [0, 2]]
    plan = plan_rows([5, 3], [3, 1], loss_masks=[[1, 0, 1], [1]], select="loss_mask")
    chosen, bounds, has_set = select_allowed(ids, offsets, plan)
    assert chosen.tolist() == [5, 6, 7, 8, 9] and bounds.tolist() == [0, 2, 3, 5]
    assert has_set.tolist() == [True] * 3
    every = plan_rows([5, 3], [3, 1], select="all")
    chosen, bounds, has_set = select_allowed(ids, offsets, every)
    assert has_set.tolist() == [False, True, True, True, False, False, True, False]
    assert bounds.tolist() == [0, 0, 2, 2, 3, 3, 3, 5, 5] and chosen.tolist() == [5, 6, 7, 8, 9]
    nothing = plan_rows([], [])
    assert [t.tolist() for t in select_allowed([], [], nothing)] == [[], [0], []]
    with pytest.raises(ValueError, match=r"offsets\[0\]: expected 4 bounds up to 3"):
        select_allowed(ids, [[0, 3], [0, 2]], plan)
