"""What a recording cannot see is said, and what surrounds it still works."""

from __future__ import annotations

import functools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from leanstep.diagnose import unseen
from leanstep.diagnose.unseen import others_at_work
from leanstep.diagnose.watch import Watch
from leanstep.tape import nodes

TRAIN = """\
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(4, 8)
{setup}
for _ in range(4):
    optimizer.zero_grad()
    {body}
    loss.backward()
    optimizer.step()
"""


def kinds(watch: Watch) -> set[str]:
    return {note["kind"] for note in watch.not_seen}


def test_compiled_regions_are_named_and_rank_last(write_script, watched) -> None:
    setup = (
        "@torch.compile(backend='eager')\ndef total(h):\n    out = torch.zeros(())\n"
        "    for i in range(40):\n        out = out + (h[i % 4] * 2).mean()\n    return out\n"
    )
    script = write_script(TRAIN.format(setup=setup, body="loss = total(model(x)); loss.item()"))
    watch = watched(script)
    assert kinds(watch) == set()
    first, *others, last = watch.findings()
    assert (first.rule, first.compiled) == ("host-sync", False)
    assert (last.rule, last.count, last.compiled) == ("op-storm", 120, True)
    assert not others
    assert [graph.function for graph in watch.compiled.graphs] == ["total"]


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_of_which_no_graph_was_seen_is_named() -> None:
    """Compiled before the recording began."""
    total = torch.compile(lambda h: (h * 2).mean(), backend="eager")
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total(model(torch.randn(4, 8))).backward()
    with Watch(steps=2, warmup=0) as watch:
        for _ in range(4):
            optimizer.zero_grad()
            total(model(torch.randn(4, 8))).backward()
            optimizer.step()
    assert kinds(watch) == {"compiled"}
    assert "no graph of it was seen" in watch.not_seen[0]["note"]


def test_a_step_that_must_be_one_graph_is_recorded(write_script, watched) -> None:
    """torch raises where fullgraph=True finds a dispatch mode on; the compiled code is back afterwards."""
    setup = (
        "import torch._dynamo.eval_frame as dynamo\n"
        "@torch.compile(backend='eager', fullgraph=True)\ndef total(h):\n    return (h * 2).mean()\n"
    )
    body = "loss = total(model(x)); loss.item(); print(dynamo._stance.stance)"
    watch = watched(write_script(TRAIN.format(setup=setup, body=body)))
    assert kinds(watch) == set()
    assert [(f.rule, f.count) for f in watch.findings()] == [("host-sync", 1)]
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_function_transforms_run_and_are_named(write_script, watched) -> None:
    body = (
        "loss = torch.func.vmap(lambda r: (r * r).sum())(model(x)).mean()\n"
        "    torch.func.grad(lambda w: (x @ w).sum())(model.weight.detach())"
    )
    watch = watched(write_script(TRAIN.format(setup="", body=body)))
    assert kinds(watch) == {"transform"}
    assert len(watch.steps) == 3


def test_the_compilers_threads_are_not_named(monkeypatch) -> None:
    """Inductor waits for its compilers in a pool whose threads have the names of anybody's pool."""
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as other:
        known = {thread.name for thread in threading.enumerate()}
        pool.submit(int).result()
        compiler = SimpleNamespace(pool=functools.lru_cache(1)(lambda: pool))
        monkeypatch.setitem(
            sys.modules, "torch._inductor.async_compile", SimpleNamespace(AsyncCompile=compiler)
        )
        assert list(others_at_work(known))
        compiler.pool()
        assert not list(others_at_work(known))
        other.submit(int).result()
        assert list(others_at_work(known))


def test_other_threads_are_named(write_script, watched) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="prefetch")
    setup = "import threading\nnext(t for t in threading.enumerate() if t.name == 'holder').begin()"
    holder = threading.Thread(target=done.wait, name="holder")
    holder.begin = thread.start
    holder.start()
    try:
        watch = watched(write_script(TRAIN.format(setup=setup, body="loss = model(x).mean()")))
    finally:
        done.set()
        holder.join()
        thread.join()
    assert kinds(watch) == {"thread"}


def test_replayed_graphs_are_named(write_script, watched, monkeypatch) -> None:
    class Graph:
        def replay(self) -> str:
            return "replayed"

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    body = "loss = model(x).mean(); assert torch.cuda.CUDAGraph().replay() == 'replayed'"
    watch = watched(write_script(TRAIN.format(setup="", body=body)))
    (note,) = watch.not_seen
    assert (note["kind"], note["where"].endswith("train.py:8")) == ("cuda-graph", True)
    assert Graph().replay() == "replayed"
    assert Graph.replay.__code__.co_filename == __file__


def test_too_many_autograd_nodes_are_named(write_script, watched, monkeypatch) -> None:
    monkeypatch.setattr(nodes, "MAX_MAP_ENTRIES", 3)
    watch = watched(write_script(TRAIN.format(setup="", body="loss = (model(x) * 2).tanh().exp().mean()")))
    assert kinds(watch) >= {"dropped"}


def test_disagreement_with_torchs_own_sync_warnings_is_said() -> None:
    assert unseen.disagreement(100, 95) is None
    assert unseen.disagreement(0, 0) is None
    assert "3 synchronising calls, 10 host reads" in str(unseen.disagreement(10, 3))


def test_two_ranks_each_record_themselves(run_ranks) -> None:
    results = run_ranks(2, _train_rank)
    assert [reads for reads, _ in results] == [1, 1]
    assert all("rank" in noted for _, noted in results)


def _train_rank(rank: int, world_size: int) -> tuple[int, set[str]]:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Watch(steps=2, warmup=1) as watch:
        for _ in range(4):
            loss = model(torch.randn(4, 8)).mean()
            loss.backward()
            loss.item()
            optimizer.step()
            optimizer.zero_grad()
            watch.step()
    assert watch.recorder.errors == []
    (finding,) = watch.findings()
    return finding.count, kinds(watch)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_sync_debug_mode_is_restored() -> None:
    before = torch.cuda.get_sync_debug_mode()
    with Watch():
        pass
    assert torch.cuda.get_sync_debug_mode() == before
