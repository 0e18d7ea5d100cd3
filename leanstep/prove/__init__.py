"""Capture the update that a training script makes and compare it with another one.

with leanstep.update() as u: ...              capture an update
leanstep prove before.py after.py             do two scripts make the same update?
"""

from __future__ import annotations

from leanstep.prove.capture import update
from leanstep.prove.cuts import same_update
from leanstep.prove.functions import prove_functions
from leanstep.prove.invariance import row_invariance

__all__ = ["prove_functions", "row_invariance", "same_update", "update"]
