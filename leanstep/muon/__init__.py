"""The NorMuon optimizer: Polar Express, NorMuon variance reduction, cautious decay; Adam for non-matrices."""

from leanstep.muon.momentum_polar import momentum_polar
from leanstep.muon.optimizer import NorMuon
from leanstep.muon.param_groups import ParamSplit, split_params
from leanstep.muon.polar import Workspace, explain, plan_polar, polar
from leanstep.muon.reference import NEWTON_SCHULZ, POLAR_EXPRESS
from leanstep.muon.state import from_master, to_master
from leanstep.muon.transpose import transpose_add, transpose_copy

__all__ = [
    "NEWTON_SCHULZ",
    "POLAR_EXPRESS",
    "NorMuon",
    "ParamSplit",
    "Workspace",
    "explain",
    "from_master",
    "momentum_polar",
    "plan_polar",
    "polar",
    "split_params",
    "to_master",
    "transpose_add",
    "transpose_copy",
]
