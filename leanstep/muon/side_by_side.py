"""Independent CPU jobs side by side: one matrix per core instead of all cores on one matrix.

Two threads on one 768 x 768 product reach 80 % of twice one thread and meet at a barrier after every call;
two matrices on one thread each meet once per step. torch releases the interpreter lock inside its operations.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import torch

from leanstep.muon.triangle import one_triangle_allowed
from leanstep.muon.workspace import Workspace

Job = Callable[[Workspace], None]
# With fewer jobs per core than this, the last one would leave the other cores idle for too long.
MIN_JOBS_PER_WORKER = 2


def run_side_by_side(jobs: Sequence[Job], workspace: Workspace, workers: int | None = None) -> None:
    """Run every job once, in order of the list as cores become free; each gets a workspace of its own core.

    Results do not depend on which core runs a job. For the time of the call torch uses one thread per
    operation in the whole process, and so does NumPy. With one core, or few jobs, they run in a row with
    all threads.
    """
    threads = torch.get_num_threads()
    workers = threads if workers is None else workers
    if workers < 2 or len(jobs) < MIN_JOBS_PER_WORKER * workers:
        with one_triangle_allowed() if threads == 1 else contextlib.nullcontext():
            for job in jobs:
                job(workspace)
        return
    queue = iter(jobs)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work(scratch: Workspace) -> None:
        with torch.no_grad():
            while not failures:
                with lock:
                    job = next(queue, None)
                if job is None:
                    return
                try:
                    job(scratch)
                except BaseException as failure:
                    failures.append(failure)

    torch.set_num_threads(1)
    try:
        others = [threading.Thread(target=work, args=(workspace.child(i),)) for i in range(1, workers)]
        with one_triangle_allowed():
            for thread in others:
                thread.start()
            work(workspace.child(0))
            for thread in others:
                thread.join()
    finally:
        torch.set_num_threads(threads)
    if failures:
        raise failures[0]
