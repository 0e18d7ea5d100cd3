"""Train a focus controller from preferences: vectorized, without host reads."""

from leanstep.lens.background import AsyncLens
from leanstep.lens.batch import LensBatch, Variant
from leanstep.lens.config import GateConfig, LensConfig, ObjectiveConfig, SamplingConfig
from leanstep.lens.loss import check_variant_counts, coverage, lens_loss
from leanstep.lens.metrics import LensMetrics, LensResult
from leanstep.lens.objective import LensObjective
from leanstep.lens.offline import ContextCache
from leanstep.lens.proxy import proxy_loss
from leanstep.lens.reference import lens_loss_reference

__all__ = [
    "AsyncLens",
    "ContextCache",
    "GateConfig",
    "LensBatch",
    "LensConfig",
    "LensMetrics",
    "LensObjective",
    "LensResult",
    "ObjectiveConfig",
    "SamplingConfig",
    "Variant",
    "check_variant_counts",
    "coverage",
    "lens_loss",
    "lens_loss_reference",
    "proxy_loss",
]
