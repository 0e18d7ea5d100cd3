"""Jobs side by side: every one once, errors reach the caller, threads are given back, watchers see all."""

from __future__ import annotations

import threading

import pytest
import torch

from leanstep.cores import is_watched, run_chains, run_on_cores
from leanstep.measure.memory import measure_peak


def test_every_job_runs_once_with_one_thread_and_torch_threads_are_restored():
    threads, done, cores = torch.get_num_threads(), [0] * 20, set()

    def job(index, core):
        done[index] += 1
        cores.add(core)
        assert torch.get_num_threads() == 1 and not torch.is_grad_enabled()

    run_on_cores([lambda core, i=i: job(i, core) for i in range(20)], 3)
    assert done == [1] * 20 and cores <= {0, 1, 2}
    assert torch.get_num_threads() == threads and torch.is_grad_enabled()


def test_two_jobs_are_at_work_at_the_same_time():
    meeting = threading.Barrier(2, timeout=20)
    run_on_cores([lambda core: meeting.wait()] * 2, 2)


def test_an_error_stops_the_rest_and_reaches_the_caller():
    threads, begun = torch.get_num_threads(), []

    def job(core):
        begun.append(core)
        raise ValueError("broken job")

    with pytest.raises(ValueError, match="broken job"):
        run_on_cores([job] * 50, 2)
    assert len(begun) <= 2 and torch.get_num_threads() == threads


def test_inference_mode_reaches_every_core():
    with torch.inference_mode():
        x = torch.zeros(4)
        run_on_cores([lambda core, i=i: x[i].add_(1) for i in range(4)], 2)
    assert x.tolist() == [1.0] * 4


def test_a_profiler_sees_the_memory_of_every_core():
    kept, watched = {}, []

    def job(core):
        if core not in kept:
            kept[core] = torch.empty(1 << 18)

    def step():
        watched.append(is_watched())
        run_on_cores([job] * 4, 2)
        kept.clear()
        return {}

    assert measure_peak(step, {}).peak_bytes == 2 * 4 * (1 << 18)
    assert watched == [False, True]


def steps(name, count, seen, lock=None):
    for number in range(count):
        assert lock is None or lock.acquire(blocking=False), "two cores in one chain"
        seen.append((name, number))
        if lock is not None:
            lock.release()
        yield


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("lengths", [[], [0], [5], [7, 7, 7], [1, 0, 9, 4]])
def test_chains_run_to_their_end_each_in_its_order(lengths, cores):
    seen = []
    run_chains([steps(i, n, seen, threading.Lock()) for i, n in enumerate(lengths)], cores)
    for i, n in enumerate(lengths):
        assert [number for name, number in seen if name == i] == list(range(n))


def test_chains_advance_evenly():
    seen = []
    run_chains([steps(i, 6, seen) for i in range(3)], 1)
    assert seen == [(i, number) for number in range(6) for i in range(3)]


def test_a_slow_chain_does_not_hold_the_others():
    meeting = threading.Barrier(2, timeout=20)

    def slow():
        meeting.wait()
        yield

    def quick():
        for _ in range(50):
            yield
        meeting.wait()

    run_chains([slow(), quick()], 2)


def test_an_error_in_a_chain_reaches_the_caller():
    def broken():
        yield
        raise ValueError("broken chain")

    with pytest.raises(ValueError, match="broken chain"):
        run_chains([broken(), steps(0, 1000, [])], 2)
