"""Learn a focus controller (or a reward) from preferences: one vectorised block, no host reads."""

from .batch import LensBatch, Variant
from .config import LensConfig
from .coverage import coverage
from .loss import lens_loss
from .metrics import LensMetrics
from .pairs import Pairs, build_pairs, check_variant_counts
from .reference import lens_loss_reference
from .result import LensResult
from .targets import build_lod_table, build_targets

__all__ = [
    "LensBatch",
    "LensConfig",
    "LensMetrics",
    "LensResult",
    "Pairs",
    "Variant",
    "build_lod_table",
    "build_pairs",
    "build_targets",
    "check_variant_counts",
    "coverage",
    "lens_loss",
    "lens_loss_reference",
]
