"""Count how often one call makes the host read a device value."""

from __future__ import annotations

from collections.abc import Callable

import torch

from leanstep.diagnose.reads import count_host_reads


def host_syncs(step: Callable[[], object]) -> int:
    """Host reads of one call of `step` (forward and backward), as `diagnose` defines them.

    A read is counted whatever the device, so a CPU run shows what a GPU run would wait for. Compiled regions
    run uncompiled here: the compiler refuses to work under a dispatch mode.
    """
    with torch.compiler.set_stance("force_eager"), count_host_reads() as reads:
        step()
    return reads.total
