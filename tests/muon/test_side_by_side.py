"""Matrices side by side: every one once, scratch per core, results as in a row."""

from __future__ import annotations

import torch
from torch import nn

from leanstep.muon import NorMuon, Workspace
from leanstep.muon.side_by_side import run_side_by_side


def test_every_job_runs_once_and_torch_threads_are_restored():
    threads = torch.get_num_threads()
    done = [0] * 20

    def job(index, workspace):
        done[index] += 1
        workspace.take("x", (4, 4), torch.zeros(1)).fill_(index)
        assert not torch.is_grad_enabled()
        assert torch.get_num_threads() == 1

    run_side_by_side([lambda w, i=i: job(i, w) for i in range(20)], Workspace(), workers=3)
    assert done == [1] * 20
    assert torch.get_num_threads() == threads


def test_each_core_has_scratch_of_its_own():
    workspace, seen = Workspace(), set()
    run_side_by_side([lambda w: seen.add(id(w))] * 12, workspace, workers=3)
    assert seen <= {id(workspace.child(core)) for core in range(3)}


def test_step_with_two_threads_equals_step_with_one():
    weights = [torch.randn(80, 90) for _ in range(6)]
    grads = [torch.randn(80, 90) for _ in range(6)]
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            params = [nn.Parameter(w.clone()) for w in weights]
            optimizer = NorMuon(params)
            for _ in range(3):
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad
                optimizer.step()
        finally:
            torch.set_num_threads(1)
        results.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
