"""Independent CPU jobs side by side: one job per core instead of all cores on one operation.

Two threads on one product meet at a barrier after every call; two jobs on one thread each meet once, at the
end. torch releases the interpreter lock inside its operations, so plain Python threads are enough.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

# Called with the number of its core: scratch memory may be kept per core.
Job = Callable[[int], None]


def is_watched() -> bool:
    """Whether a profiler or a dispatch mode is on: they see the calling thread only."""
    return torch.autograd._profiler_enabled() or torch._C._len_torch_dispatch_stack() > 0


def run_on_cores(jobs: Sequence[Job], cores: int) -> None:
    """Run every job once, in the order of the list as cores become free, each with one thread per operation.

    For the time of the call torch uses one thread per operation in the whole process. While somebody watches
    this thread the jobs stay on it and take turns as the cores would, so that scratch per core shows. The
    first error stops the jobs that have not begun and is raised here.
    """
    threads, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()
    queue = iter(enumerate(jobs))
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work(core: int) -> None:
        # Grad mode and inference mode belong to a thread; a new one has neither of the caller's.
        with torch.inference_mode(inference), torch.no_grad():
            while not failures:
                with lock:
                    index, job = next(queue, (0, None))
                if job is None:
                    return
                try:
                    job(index % cores if watched else core)
                except BaseException as failure:
                    failures.append(failure)

    watched = is_watched()
    torch.set_num_threads(1)
    try:
        others = [threading.Thread(target=work, args=(core,)) for core in range(1, 1 if watched else cores)]
        for thread in others:
            thread.start()
        work(0)
        for thread in others:
            thread.join()
    finally:
        torch.set_num_threads(threads)
    if failures:
        raise failures[0]
