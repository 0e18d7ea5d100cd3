"""Independent CPU jobs side by side: one job per core instead of all cores on one operation.

Two threads on one product meet at a barrier after every call; two jobs on one thread each meet once, at the
end. torch releases the interpreter lock inside its operations, so plain Python threads are enough.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from leanstep.blas import one_thread_each

# Called with the number of its core: scratch memory may be kept per core.
Job = Callable[[int], None]


def is_watched() -> bool:
    """Whether a profiler or a dispatch mode is on: they see the calling thread only."""
    return torch.autograd._profiler_enabled() or torch._C._len_torch_dispatch_stack() > 0


def run_on_cores(jobs: Sequence[Job], cores: int) -> None:
    """Run every job once, in the order of the list as cores become free, each with one thread per operation.

    For the time of the call torch and NumPy use one thread per operation in the process. While somebody
    watches this thread the jobs stay on it and take turns as the cores would, so that scratch per core shows.
    The first error stops the jobs that have not begun and is raised here.
    """
    queue = iter(jobs)
    _run(lambda: next(queue, None), cores)


def run_chains(chains: Sequence[Iterator[None]], cores: int) -> None:
    """Run every chain of steps to its end; a free core takes the next step of the chain that is least far.

    Inside a chain the order is fixed, so sums that belong to a chain have the same bits whichever core takes
    a step. One chain more than cores keeps all of them busy until the end, also when one is slower. Threads,
    watchers and errors as in `run_on_cores`.
    """
    # (steps done, number) of the chains that no core is busy with.
    idle = [(0, index) for index in range(len(chains))]
    lock = threading.Lock()

    def take() -> Job | None:
        with lock:
            if not idle:
                return None
            steps, index = min(idle)
            idle.remove((steps, index))

        def step(core: int) -> None:
            for _ in chains[index]:
                with lock:
                    idle.append((steps + 1, index))
                return

        return step

    _run(take, cores)


def _run(take: Callable[[], Job | None], cores: int) -> None:
    """`take` gives the next job, or None to a core that may go home."""
    threads, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()
    lock = threading.Lock()
    failures: list[BaseException] = []
    taken = 0

    def work(core: int) -> None:
        nonlocal taken
        # Grad mode and inference mode belong to a thread; a new one has neither of the caller's.
        with torch.inference_mode(inference), torch.no_grad():
            while not failures:
                with lock:
                    job, number = take(), taken
                    taken += 1
                if job is None:
                    return
                try:
                    job(number % cores if watched else core)
                except BaseException as failure:
                    failures.append(failure)

    watched = is_watched()
    torch.set_num_threads(1)
    try:
        others = [threading.Thread(target=work, args=(core,)) for core in range(1, 1 if watched else cores)]
        # Watchers see torch's operations only.
        with contextlib.nullcontext() if watched else one_thread_each():
            for thread in others:
                thread.start()
            work(0)
            for thread in others:
                thread.join()
    finally:
        torch.set_num_threads(threads)
    if failures:
        raise failures[0]
