"""Losses from preferences within ragged groups, without n^2 memory and without host syncs."""

from leanstep.objectives.ragged.csr_groups import Groups, make_groups
from leanstep.objectives.ragged.draws import SampledPairs, draw_pairs, top_pairs
from leanstep.objectives.ragged.logistic import bradley_terry
from leanstep.objectives.ragged.ranking import hinge, plackett_luce

__all__ = [
    "Groups",
    "SampledPairs",
    "bradley_terry",
    "draw_pairs",
    "hinge",
    "make_groups",
    "plackett_luce",
    "top_pairs",
]
