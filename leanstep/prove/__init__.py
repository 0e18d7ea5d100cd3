"""Capture the update that a training script makes and compare it with another one.

with leanstep.update() as u: ...              capture an update
leanstep prove before.py after.py             do two scripts make the same update?
"""

from __future__ import annotations

from leanstep.prove.capture import Captured, Update, update
from leanstep.prove.compare import PairProof, prove_scripts
from leanstep.prove.cuts import CutsProof, same_update
from leanstep.prove.difference import prove_cuts
from leanstep.prove.functions import FunctionsProof, prove_functions
from leanstep.prove.invariance import InvarianceProof, prove_invariance, row_invariance
from leanstep.prove.script_jobs import Job, run_job
from leanstep.prove.twin import Twin

__all__ = [
    "Captured",
    "CutsProof",
    "FunctionsProof",
    "InvarianceProof",
    "Job",
    "PairProof",
    "Twin",
    "Update",
    "prove_cuts",
    "prove_functions",
    "prove_invariance",
    "prove_scripts",
    "row_invariance",
    "run_job",
    "same_update",
    "update",
]
