"""The NorMuon optimizer: Polar Express, NorMuon variance reduction, cautious decay; Adam for non-matrices."""

from leanstep.muon.banks import unbind_bank
from leanstep.muon.groups import split_params
from leanstep.muon.optimizer import NorMuon
from leanstep.muon.polar import polar
from leanstep.muon.reference import NEWTON_SCHULZ, POLAR_EXPRESS
from leanstep.muon.residual import from_master, to_master
from leanstep.muon.step import momentum_polar
from leanstep.muon.transpose import transpose_add, transpose_copy

__all__ = [
    "NEWTON_SCHULZ",
    "POLAR_EXPRESS",
    "NorMuon",
    "from_master",
    "momentum_polar",
    "polar",
    "split_params",
    "to_master",
    "transpose_add",
    "transpose_copy",
    "unbind_bank",
]
