"""The optimizer: Polar Express, NorMuon, cautious decay; matrices at the FLOP limit, the rest with Adam."""

from leanstep.muon.optimizer import NorMuon
from leanstep.muon.polar import explain, plan_polar, polar
from leanstep.muon.reference import NEWTON_SCHULZ, POLAR_EXPRESS
from leanstep.muon.residual import from_master, to_master
from leanstep.muon.split import ParamSplit, split_params
from leanstep.muon.transpose import transpose_add, transpose_copy
from leanstep.muon.workspace import Workspace

__all__ = [
    "NEWTON_SCHULZ",
    "POLAR_EXPRESS",
    "NorMuon",
    "ParamSplit",
    "Workspace",
    "explain",
    "from_master",
    "plan_polar",
    "polar",
    "split_params",
    "to_master",
    "transpose_add",
    "transpose_copy",
]
