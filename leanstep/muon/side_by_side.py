"""Matrices side by side: one per core instead of all cores on one.

Two threads on one 768 x 768 product reach 80 % of twice one thread and synchronise after every call; two
matrices on one thread each synchronise once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from leanstep.cpu import num_threads, run_on_cores
from leanstep.muon.workspace import Workspace

Job = Callable[[Workspace], None]
# With fewer jobs per core than this, the last one would leave the other cores idle for too long.
MIN_JOBS_PER_WORKER = 2


def run_side_by_side(jobs: Sequence[Job], workspace: Workspace, workers: int | None = None) -> None:
    """Run every job once; each gets the workspace of its own core.

    Results do not depend on which core runs a job. For the time of the call torch uses one thread per
    operation. With one core, or few jobs, they run in a row with all threads.
    """
    workers = num_threads() if workers is None else workers
    if workers < 2 or len(jobs) < MIN_JOBS_PER_WORKER * workers:
        for job in jobs:
            job(workspace)
        return

    def with_scratch(job: Job) -> Callable[[int], None]:
        return lambda core: job(workspace.child(core))

    run_on_cores([with_scratch(job) for job in jobs], workers)
