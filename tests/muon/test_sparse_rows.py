"""Tables exchanged by touched rows: the bits of the dense exchange, for any rows on any rank."""

from __future__ import annotations

import io
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from leanstep.muon import NorMuon, sparse_rows
from leanstep.muon.sparse_rows import TouchedRows, plan_rows

ROWS, COLUMNS = 4096, 16
CPU = torch.device("cpu")
SOME = "some rows of every rank"


def rows_of(scenario, step, rank, world_size):
    """Rows that a rank's batch touches, with duplicates; None: it does not name any."""
    piece = ROWS // world_size
    generator = torch.Generator().manual_seed(100 * step + rank)
    some = torch.randint(ROWS, (300,), generator=generator)
    return {
        "some rows of every rank": some,
        "the same rows on every rank": torch.arange(0, ROWS, 7),
        "no rows": some[:0],
        "no rows on rank 1": some[:0] if rank == 1 else some,
        "rows of the last owner": ROWS - 1 - some % piece,
        "rows of the own piece": rank * piece + some % piece,
        "first and last row": torch.tensor([[0, ROWS - 1], [ROWS - 1, 0]], dtype=torch.int32),
        "too many rows on rank 0": torch.arange(ROWS // 4 if rank == 0 else ROWS - 5, ROWS),
        "rank 1 names none": None if rank == 1 else some,
    }[scenario]


SCENARIOS = {  # whether rows are exchanged
    "some rows of every rank": True,
    "the same rows on every rank": True,
    "no rows": True,
    "no rows on rank 1": True,
    "rows of the last owner": True,
    "rows of the own piece": True,
    "first and last row": True,
    "too many rows on rank 0": False,
    "rank 1 names none": False,
}


def make_optimizer(dtype, *, sparse, **options):
    generator = torch.Generator().manual_seed(5)
    table = nn.Parameter(torch.randn(ROWS, COLUMNS, generator=generator).to(dtype))
    gain = nn.Parameter(torch.ones(7))
    group = {"params": [("table", table)], "algorithm": "adam", "sparse_rows": sparse, **options}
    groups = [group, {"params": [("gain", gain)], "algorithm": "adam"}]
    return table, NorMuon(groups, lr=0.03, mesh=dist.group.WORLD)


def backward(table, rows, step, rank):
    """Add whole numbers in these rows to the gradient: their sums are exact in any order and dtype."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    values = torch.randint(-8, 8, (ROWS, COLUMNS), generator=generator).to(table.dtype)
    touched = torch.zeros(ROWS, 1, dtype=torch.bool)
    touched[rows.flatten()] = True
    grad = values * touched
    table.grad = grad if table.grad is None else table.grad + grad


def train(rank, world_size, scenario, steps=2, dtype=torch.float32, *, sparse, **options):
    table, optimizer = make_optimizer(dtype, sparse=sparse, **options)
    advance(table, optimizer, scenario, range(steps), rank, world_size, sparse=sparse)
    return table, optimizer


def advance(table, optimizer, scenario, steps, rank, world_size, *, sparse):
    for step in steps:
        rows = rows_of(scenario, step, rank, world_size)
        if sparse and rows is not None:
            # In two parts, as two micro-batches would.
            for part in rows.flatten().tensor_split(2):
                optimizer.note_rows(table, part)
        backward(table, rows_of(SOME, step, rank, world_size) if rows is None else rows, step, rank)
        before = table.grad.clone()
        optimizer.step()
        assert torch.equal(table.grad, before)
        optimizer.zero_stepped_grads()


def counting():
    return mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single)


def same_bits(rank, world_size, dtype, steps=2, **options):
    """Scenario -> (equal bits, exchanges by rows, exchanges by rows without the option)."""
    results = {}
    for scenario in SCENARIOS:
        with counting() as sparse_calls:
            sparse, _ = train(rank, world_size, scenario, steps, dtype, sparse=True, **options)
        with counting() as dense_calls:
            dense, _ = train(rank, world_size, scenario, steps, dtype, sparse=False, **options)
        results[scenario] = torch.equal(sparse, dense), sparse_calls.call_count, dense_calls.call_count
    return results


def resumed_in_between(rank, world_size):
    """Saved and loaded while a gradient waits: bits of the run that went on, and of one that never named."""
    every = {"every": 2, "phase": 1}
    tables = []
    with counting() as calls:
        table, optimizer = train(rank, world_size, SOME, steps=3, sparse=True, **every)
        optimizer.average_waiting()
        state, weight, waiting = optimizer.state_dict(), table.detach().clone(), table.grad.clone()
        again, other = make_optimizer(torch.float32, sparse=True, **every)
        again.data.copy_(weight)
        again.grad = waiting
        other.load_state_dict(state)
        counts = [calls.call_count]
        for which, whose in ((table, optimizer), (again, other)):
            advance(which, whose, SOME, range(3, 4), rank, world_size, sparse=True)
            counts.append(calls.call_count)
            advance(which, whose, SOME, range(4, 6), rank, world_size, sparse=True)
            counts.append(calls.call_count)
            tables.append(which.detach())
    dense, _ = train(rank, world_size, SOME, steps=6, sparse=False, **every)
    return [torch.equal(table, dense) for table in tables], counts


def missing_rows(rank, world_size):
    """Rank 1 names one row too few in step 1: after a step by rows, a checked one, a dense one, and none."""
    step, rows = 1, rows_of(SOME, 1, rank, world_size)
    theirs = rows_of(SOME, 1, 1, world_size)
    row = theirs[theirs // (ROWS // world_size) != 1][0]
    few = rows[rows != row] if rank == 1 else rows
    dense, _ = train(rank, world_size, SOME, steps=2, sparse=False)
    messages, unchanged = [], []
    for before, level in (("rows", "OFF"), ("rows", "DETAIL"), ("dense", "OFF"), ("nothing", "OFF")):
        table, optimizer = make_optimizer(torch.float32, sparse=True)
        if before != "nothing":
            advance(table, optimizer, SOME, range(1), rank, world_size, sparse=before == "rows")
        optimizer.note_rows(table, few)
        backward(table, rows, step, rank)
        weight, usual = table.detach().clone(), dist.get_debug_level()
        dist.set_debug_level(getattr(dist.DebugLevel, level))
        try:
            optimizer.step()
            messages.append("")
            lost = (table != dense).any(1).nonzero().flatten().tolist()
        except ValueError as error:
            messages.append(str(error))
            unchanged.append(torch.equal(table, weight))
        finally:
            dist.set_debug_level(usual)
    return messages, unchanged, lost, int(row)


def other_meshes(rank, world_size):
    """Averaged gradients, a group of one rank, no group, a table that is not cut: no rows are sent."""
    with counting() as calls:
        table = nn.Parameter(torch.ones(ROWS, COLUMNS))
        small = nn.Parameter(torch.ones(8, 2))
        groups = [{"params": [("table", table), ("small", small)], "algorithm": "adam", "sparse_rows": True}]
        alone = [dist.new_group([r]) for r in range(world_size)][rank]
        for options in ({"averaged": True, "mesh": dist.group.WORLD}, {"mesh": alone}, {}):
            optimizer = NorMuon(groups, lr=0.03, **options)
            for param in (table, small):
                optimizer.note_rows(param, torch.tensor([3]))
                param.grad = torch.zeros_like(param)
                param.grad[3] = 1
            optimizer.step()
            groups[0].pop("calls", None)
    return table.detach()[2:5, 0].tolist(), small.detach()[2:5, 0].tolist(), calls.call_count


def explained(rank, world_size):
    return [make_optimizer(torch.float32, sparse=sparse)[1].explain() for sparse in (True, False)]


def everything(rank, world_size):
    results = {
        "float32": same_bits(rank, world_size, torch.float32),
        "bfloat16": same_bits(rank, world_size, torch.bfloat16),
        "waiting": same_bits(rank, world_size, torch.float32, steps=4, every=2, phase=1),
        "resumed": resumed_in_between(rank, world_size),
        "missing": missing_rows(rank, world_size),
        "other": other_meshes(rank, world_size),
        "explained": explained(rank, world_size),
    }
    buffer = io.BytesIO()
    torch.save(results, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def ranks(request):
    from ranks import run_ranks

    return [torch.load(io.BytesIO(data)) for data in run_ranks(request.param, everything, timeout=150)]


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "waiting"])
def test_the_bits_are_those_of_the_dense_exchange(ranks, kind, scenario):
    for result in ranks:
        equal, by_rows, without_option = result[kind][scenario]
        assert equal
        assert by_rows == (2 if SCENARIOS[scenario] else 0)
        assert without_option == 0


def test_gradients_that_were_averaged_for_a_checkpoint_are_exchanged_as_a_whole(ranks):
    for result in ranks:
        equal, counts = result["resumed"]
        assert equal == [True, True]
        # One exchange by rows before, none for the averaged gradient, one for the next, in both runs.
        assert counts == [1, 1, 2, 2, 3]


def test_a_missing_row_raises_in_the_first_exchange_and_in_all_that_are_checked(ranks):
    for result in ranks:
        messages, unchanged, lost, row = result["missing"]
        want = (
            "table: expected note_rows for every row with a gradient, got a gradient in other rows on rank 1"
        )
        assert messages == ["", want, want, want]
        assert unchanged == [True] * 3
        # Unchecked, that row gets another weight than in the dense exchange: the test above would fail.
        assert lost == [row]


def test_rows_are_accepted_where_nothing_is_sent(ranks):
    for result in ranks:
        table, small, calls = result["other"]
        assert calls == 0
        for before, named, after in (table, small):
            assert named != before == after


def test_explain_names_the_tables(ranks):
    for result in ranks:
        sparse, dense = result["explained"]
        assert "gradients sent by touched rows: table" in sparse
        assert "touched rows" not in dense


@given(st.integers(2, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_plans_of_all_ranks_deliver_every_touched_row_once(ranks, piece, random):
    flags = torch.tensor([[random.random() < 0.4 for _ in range(ranks * piece)] for _ in range(ranks)])
    with mock.patch.object(sparse_rows, "MAX_SHARE", 1):
        plans = [plan_rows(flags, rank, CPU) for rank in range(ranks)]
    delivered = torch.zeros(ranks, ranks * piece, dtype=torch.long)
    for sender, plan in enumerate(plans):
        parts = plan.send_rows.split(plan.send_counts)
        assert plan.send_counts[sender] == 0
        for owner, part in enumerate(parts):
            assert torch.equal(plans[owner].receive_rows[sender] + owner * piece, part)
            delivered[sender, part.long()] += 1
        delivered[sender, sender * piece : (sender + 1) * piece] += flags[
            sender, sender * piece : (sender + 1) * piece
        ]
    assert torch.equal(delivered, flags.long())


def test_more_than_half_of_the_dense_rows_are_not_exchanged_by_rows():
    flags = torch.zeros(2, 16, dtype=torch.bool)
    flags[0, 8:12] = True
    assert all(plan_rows(flags, rank, CPU) is not None for rank in (0, 1))
    flags[0, 12] = True
    assert all(plan_rows(flags, rank, CPU) is None for rank in (0, 1))
    # Many senders of few rows to one owner count as well.
    flags = torch.zeros(4, 16, dtype=torch.bool)
    flags[1:, :2] = True
    assert all(plan_rows(flags, rank, CPU) is not None for rank in range(4))
    flags[1, 2] = True
    assert all(plan_rows(flags, rank, CPU) is None for rank in range(4))


def test_all_rows_are_touched_until_some_are_named():
    touched = TouchedRows(4)
    assert touched.flags().tolist() == [True] * 4
    touched.add(torch.tensor([1, 1]))
    assert touched.flags().tolist() == [False, True, False, False]
    touched.add_all()
    touched.add(torch.tensor([2]))
    assert touched.flags().tolist() == [True] * 4
    touched.clear()
    assert touched.flags().tolist() == [True] * 4
    touched.add(torch.tensor([], dtype=torch.long))
    assert touched.flags().tolist() == [False] * 4


def test_mistakes_are_named():
    table, plain, gain = (nn.Parameter(torch.zeros(s)) for s in ((8, 2), (8, 2), (8,)))
    adam = {"algorithm": "adam"}
    optimizer = NorMuon(
        [{"params": [("table", table)], **adam, "sparse_rows": True}, {"params": [("plain", plain)], **adam}]
    )
    with pytest.raises(
        ValueError, match="plain: expected a parameter of an Adam group with sparse_rows=True"
    ):
        optimizer.note_rows(plain, torch.tensor([1]))
    with pytest.raises(ValueError, match="param: expected a parameter of this optimizer"):
        optimizer.note_rows(gain, torch.tensor([1]))
    with pytest.raises(ValueError, match=r"rows: expected numbers within 0..7, got -1..8"):
        optimizer.note_rows(table, torch.tensor([-1, 8]))
    with pytest.raises(TypeError, match=r"rows: expected a tensor of integers, got torch.float32"):
        optimizer.note_rows(table, torch.tensor([1.0]))
    with pytest.raises(TypeError, match="rows: expected a tensor of integers, got list"):
        optimizer.note_rows(table, [1])
    with pytest.raises(ValueError, match=r"rows: expected a tensor on the CPU.*got one on meta"):
        optimizer.note_rows(table, torch.zeros(1, dtype=torch.long, device="meta"))
    with pytest.raises(ValueError, match="sparse_rows: expected True or False, got 1"):
        NorMuon([{"params": [table], **adam, "sparse_rows": 1}])
    with pytest.raises(ValueError, match=r"sparse_rows: expected tables \[rows, ...\], got gain of shape"):
        NorMuon([{"params": [("gain", gain)], **adam, "sparse_rows": True}])
    with pytest.raises(ValueError, match="sparse_rows: unknown option for algorithm 'normuon'"):
        NorMuon([{"params": [table], "sparse_rows": True}])
