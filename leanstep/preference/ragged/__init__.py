"""Losses from preferences inside ragged groups: no n^2 memory, no host read."""

from .draws import SampledPairs, draw_pairs, top_pairs
from .groups import Groups, make_groups
from .logistic import bradley_terry
from .ranking import plackett_luce
from .sorted_hinge import hinge

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
