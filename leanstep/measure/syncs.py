"""Count how often one call makes the host read a device value."""

from __future__ import annotations

from collections.abc import Callable

from leanstep.diagnose.reads import count_host_reads


def host_syncs(step: Callable[[], object]) -> int:
    """Host reads of one call of `step` (forward and backward), as `diagnose` defines them.

    A read is counted whatever the device, so a CPU run shows what a GPU run would wait for.
    """
    with count_host_reads() as reads:
        step()
    return reads.total
