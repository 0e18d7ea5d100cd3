"""Row plans against slime's layouts, and the properties that every layout must have."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanstep.heads.layout import local_spans
from leanstep.heads.rows import (
    full_loss_mask,
    next_token_targets,
    place_response,
    plan_rows,
    sample_mean,
    select_rows,
    slice_response,
)

VECTORS = Path(__file__).parents[1] / "vectors" / "logprob"
CP_LAYOUTS = ("zigzag", "bshd_zigzag", "allgather")


def layout_cases():
    for file in sorted([*VECTORS.glob("layout_*.json"), *VECTORS.glob("e2e_*.json")]):
        for case in json.loads(file.read_text())["cases"]:
            yield pytest.param(case, id=f"{file.stem}-{case['name']}")


def arguments(case, rank):
    return {
        "layout": case["layout"],
        "cp_size": case["cp_size"],
        "cp_rank": rank,
        "pad_multiple": case["pad_multiplier"],
        "max_seq_len": case.get("max_seq_len"),
    }


@pytest.mark.parametrize("case", list(layout_cases()))
def test_plan_equals_upstream_layout(case):
    totals, responses, masks = case["total_lengths"], case["response_lengths"], case["loss_masks"]
    stream = torch.tensor(list(chain(*case["tokens"])))
    for rank, golden in enumerate(case["ranks"]):
        plan = plan_rows(totals, responses, loss_masks=masks, **arguments(case, rank))
        assert plan.T_local == golden["T_local"]
        assert plan.rows.tolist() == golden["keep_index"] == list(chain(*golden["rows"]))
        assert plan.splits == tuple(len(r) for r in golden["rows"])
        assert [r.tolist() for r in plan.split(plan.rows)] == golden["rows"]
        assert [r.tolist() for r in plan.split(plan.resp_index)] == golden["resp_index"]
        assert [t.tolist() for t in plan.split(plan.targets(stream))] == golden["targets"]
        full = full_loss_mask(masks, totals, responses, **arguments(case, rank))
        assert full.tolist() == golden["full_loss_mask"]

        masked = plan_rows(totals, responses, loss_masks=masks, select="loss_mask", **arguments(case, rank))
        assert masked.rows.tolist() == golden["keep_index_loss_mask"]
        if "resp_index_after_redistribute" in golden:
            positions = [torch.arange(r) for r in responses]
            sliced = slice_response(positions, plan.returned())
            assert [s.tolist() for s in sliced] == golden["resp_index_after_redistribute"]


@pytest.mark.parametrize("case", list(layout_cases()))
def test_spans_place_the_tokens_where_upstream_does(case):
    for rank, golden in enumerate(case["ranks"]):
        spans, T_local = local_spans(case["total_lengths"], **arguments(case, rank))
        local = torch.zeros(T_local, dtype=torch.int64)
        for span in spans:
            tokens = torch.tensor(case["tokens"][span.sample])[span.start : span.stop]
            local[span.base : span.base + len(span)] = tokens
        held = torch.tensor(golden["local_tokens"]).flatten()
        covered = torch.zeros(T_local, dtype=torch.bool)
        for span in spans:
            covered[span.base : span.base + len(span)] = True
        assert torch.equal(local[covered], held[covered])


@pytest.mark.parametrize("case", list(layout_cases()))
def test_all_rows_give_the_same_targets_and_parts_as_the_selection(case):
    totals, responses = case["total_lengths"], case["response_lengths"]
    stream = torch.tensor(list(chain(*case["tokens"])))
    for rank in range(case["cp_size"]):
        every = plan_rows(totals, responses, select="all", **arguments(case, rank))
        chosen = plan_rows(totals, responses, **arguments(case, rank))
        assert every.rows is None
        values = torch.randn(every.T_local)
        for a, b in zip(every.split(values), chosen.split(values[chosen.rows]), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(every.targets(stream)[chosen.rows], chosen.targets(stream))
        assert torch.equal(every.resp_index[chosen.rows], chosen.resp_index)
        assert int((every.resp_index >= 0).sum()) == chosen.num_rows


samples = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=0, max_size=6)


@settings(max_examples=150, deadline=None)
@given(samples, st.integers(1, 5), st.sampled_from(CP_LAYOUTS), st.integers(1, 9), st.integers(0, 7))
def test_every_response_is_held_exactly_once(lengths, cp_size, layout, pad, slack):
    totals, responses = [p + r for p, r in lengths], [r for _, r in lengths]
    seen = [torch.zeros(r, dtype=torch.int64) for r in responses]
    stream = torch.arange(sum(totals))
    base = torch.tensor([0, *totals]).cumsum(0)
    for rank in range(cp_size):
        plan = plan_rows(
            totals,
            responses,
            layout=layout,
            cp_size=cp_size,
            cp_rank=rank,
            pad_multiple=pad,
            max_seq_len=max(totals, default=1) + slack,
        )
        assert plan.rows.unique().numel() == plan.num_rows <= plan.T_local
        assert bool(((plan.rows >= 0) & (plan.rows < plan.T_local)).all())
        targets = plan.split(plan.targets(stream))
        for k, (indices, tokens) in enumerate(zip(plan.split(plan.resp_index), targets, strict=True)):
            seen[k][indices] += 1
            # The stream's token ids are positions, so the target says where in the sample it lies.
            assert torch.equal(tokens, base[k] + lengths[k][0] + indices)
    assert all(bool((s == 1).all()) for s in seen)


@settings(max_examples=60, deadline=None)
@given(samples, st.integers(1, 4), st.sampled_from(CP_LAYOUTS), st.randoms(use_true_random=False))
def test_shares_of_the_sample_mean_add_up(lengths, cp_size, layout, random):
    totals, responses = [p + r for p, r in lengths], [r for _, r in lengths]
    masks = [[random.randint(0, 1) for _ in range(r)] for r in responses]
    values = [torch.tensor([random.random() for _ in range(r)], dtype=torch.float64) for r in responses]
    expected = sum(
        float((v * torch.tensor(m)).sum()) / max(sum(m), 1) for v, m in zip(values, masks, strict=True)
    )
    share, places = 0.0, [torch.zeros(r, dtype=torch.float64) for r in responses]
    for rank in range(cp_size):
        plan = plan_rows(
            totals,
            responses,
            layout=layout,
            cp_size=cp_size,
            cp_rank=rank,
            max_seq_len=max(totals, default=1),
            loss_masks=masks,
        )
        parts = slice_response(values, plan)
        share += float(sample_mean(parts, plan))
        for place, part in zip(places, place_response(parts, plan), strict=True):
            place += part
    assert share == pytest.approx(expected, abs=1e-12)
    # The parts of all ranks, each at its place, are the whole responses: gather and slice are inverse.
    assert all(torch.equal(a, b) for a, b in zip(places, values, strict=True))


def test_results_are_scattered_to_the_local_rows():
    masks = [[1, 0, 1], [0], [1, 1, 1, 0, 1, 1]]
    plan = plan_rows([7, 5, 11], [3, 1, 6], loss_masks=masks, select="loss_mask", pad_multiple=8)
    values = torch.randn(plan.num_rows, dtype=torch.float64)
    full = plan.scatter(values)
    assert full.shape == (24,) and torch.equal(full[plan.rows], values)
    assert int((full != 0).sum()) == plan.num_rows
    assert torch.equal(plan.scatter(values, 30), torch.cat((full, full.new_zeros(6))))
    with pytest.raises(ValueError, match="length: 23 is less than the 24 local rows"):
        plan.scatter(values, 23)
    every = plan_rows([3], [1], select="all")
    assert every.scatter(torch.ones(3), 5).tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_empty_responses_and_empty_batches_are_legal():
    plan = plan_rows([4, 3], [0, 2])
    assert plan.rows.tolist() == [4, 5] and plan.splits == (0, 2)
    nothing = plan_rows([], [], loss_masks=[])
    assert nothing.rows.tolist() == [] and nothing.split(torch.zeros(0)) == [torch.zeros(0)] * 0
    assert nothing.targets([]).tolist() == [] and float(sample_mean([], nothing)) == 0.0


def test_empty_parts_stay_in_the_graph():
    plan = plan_rows([24], [2], layout="zigzag", cp_size=3, cp_rank=1)
    values = torch.zeros(0, requires_grad=True)
    (response,) = place_response(plan.split(values), plan)
    assert response.requires_grad
    (grad,) = torch.autograd.grad(response.sum(), values)
    assert grad.shape == (0,)


def test_index_tensors_come_from_one_copy(monkeypatch):
    copies = []
    monkeypatch.setattr(
        "leanstep.heads.rows.to_device", lambda host, device: copies.append(host.numel()) or host
    )
    plan_rows([9, 13], [2, 12], loss_masks=[[1, 1], [1, 0] * 6], select="loss_mask")
    assert len(copies) == 1


def test_the_two_switches_become_a_selection():
    assert select_rows(False, False) == "all"
    assert select_rows(True, False) == "response"
    assert select_rows(True, True) == "loss_mask"
    with pytest.raises(ValueError, match="loss_mask_only: needs response_only"):
        select_rows(response_only=False, loss_mask_only=True)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        (([5, 4], [2, 4]), {}, r"response_lengths\[1\]: sample 1 has 4 tokens and 4 response"),
        (([5], [6]), {}, r"response_lengths\[0\]"),
        (([5], [-1]), {}, r"response_lengths\[0\]: expected 0 or more"),
        (([5, 6], [2]), {}, "response_lengths: expected one per sample"),
        ((torch.tensor([5]), [2]), {}, "total_lengths: expected Python integers"),
        (([5], [2]), {"layout": "ring"}, "layout: got 'ring'"),
        (([5], [2]), {"select": "prompt"}, "select: got 'prompt'"),
        (([5], [2]), {"cp_size": 2}, "has no context parallelism"),
        (([5], [2]), {"layout": "zigzag", "cp_size": 2, "cp_rank": 2}, "cp_rank"),
        (([5], [2]), {"layout": "bshd"}, "max_seq_len"),
        (([5], [2]), {"layout": "bshd", "max_seq_len": 4}, r"total_lengths\[0\]: 5 is more"),
        (([5], [2]), {"local_len": 4}, "local_len: 4 rows cannot hold the 5"),
        (([5], [2]), {"layout": "allgather", "cp_size": 2, "local_len": 2}, "cannot hold 5 tokens"),
        (([5], [2]), {"pad_multiple": 0}, "pad_multiple"),
        (([5], [2]), {"select": "loss_mask"}, "loss_masks: select='loss_mask' needs"),
        (([5], [2]), {"loss_masks": [[1]]}, r"loss_masks\[0\]: expected length 2"),
        (([5], [2]), {"loss_masks": [[1, 2]]}, r"loss_masks\[0\]: expected only 0 and 1"),
        (([5], [2]), {"loss_masks": []}, "loss_masks: expected one per sample"),
    ],
)
def test_bad_input_is_named(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        plan_rows(*lengths, **options)


def test_results_of_the_wrong_length_are_named():
    plan = plan_rows([5, 6], [2, 3])
    with pytest.raises(ValueError, match="values: expected 5 rows"):
        plan.split(torch.zeros(4))
    with pytest.raises(ValueError, match="tokens: expected all samples' 11 tokens"):
        plan.targets(torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"responses\[1\]: expected length 3"):
        slice_response([torch.zeros(2), torch.zeros(2)], plan)
    with pytest.raises(ValueError, match=r"parts\[0\]: expected length 2"):
        place_response([torch.zeros(1), torch.zeros(3)], plan)
    with pytest.raises(ValueError, match="needs a plan built with loss_masks"):
        sample_mean([torch.zeros(2), torch.zeros(3)], plan)


def test_next_token_targets_are_the_following_tokens_of_the_same_sequence():
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    rows, targets = next_token_targets(tokens)
    assert rows.tolist() == [0, 1, 3, 4] and targets.tolist() == [6, 7, 9, 10]
    rows, targets = next_token_targets(tokens[0])
    assert rows.tolist() == [0, 1] and targets.tolist() == [6, 7]
    for short in (tokens[:, :1], tokens[:0], tokens[0, :0]):
        assert [x.tolist() for x in next_token_targets(short)] == [[], []]


def test_next_token_targets_leave_ignored_labels_out():
    labels = torch.tensor([[-100, -100, 7, 2], [-100, 9, -100, 4]])
    rows, targets = next_token_targets(labels, ignore_index=-100)
    assert rows.tolist() == [1, 2, 4, 6] and targets.tolist() == [7, 2, 9, 4]
    with pytest.raises(ValueError, match=r"tokens: expected integers \[S\] or \[B, S\]"):
        next_token_targets(torch.zeros(2, 3))
