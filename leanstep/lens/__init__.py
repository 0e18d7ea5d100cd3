"""Train a focus controller from preferences: vectorised, without host reads."""

# ruff: noqa: E402  (first the line that names the extra, then what imports numpy)
from leanstep.extras import require

require("leanstep.lens", "train", "numpy")

from leanstep.lens.batch import GistList, LensBatch, Variant
from leanstep.lens.contexts import (
    ContextReader,
    GistTree,
    LensNet,
    allocate_focus,
    baseline_variant,
    planned_length,
    reachable_length,
    sample_variants,
)
from leanstep.lens.lens_config import (
    AllocatorConfig,
    GateConfig,
    LensConfig,
    ObjectiveConfig,
    SamplingConfig,
)
from leanstep.lens.lens_objective import LensObjective, lens_loss
from leanstep.lens.lens_terms import coverage
from leanstep.lens.offline import AsyncHandle, AsyncLens, CachedBatch, ContextCache
from leanstep.lens.pairs import (
    Pairs,
    build_lod_table,
    build_pairs,
    build_targets,
    check_variant_counts,
)
from leanstep.lens.previous_policy import LaggedPolicy, ScoreStore, content_key
from leanstep.lens.proxy_loss import ProxyLoss, aggregate_targets
from leanstep.lens.reference import lens_loss_reference
from leanstep.lens.telemetry import LensMetrics, LensResult

__all__ = [
    "AllocatorConfig",
    "AsyncHandle",
    "AsyncLens",
    "CachedBatch",
    "ContextCache",
    "ContextReader",
    "GateConfig",
    "GistList",
    "GistTree",
    "LaggedPolicy",
    "LensBatch",
    "LensConfig",
    "LensMetrics",
    "LensNet",
    "LensObjective",
    "LensResult",
    "ObjectiveConfig",
    "Pairs",
    "ProxyLoss",
    "SamplingConfig",
    "ScoreStore",
    "Variant",
    "aggregate_targets",
    "allocate_focus",
    "baseline_variant",
    "build_lod_table",
    "build_pairs",
    "build_targets",
    "check_variant_counts",
    "content_key",
    "coverage",
    "lens_loss",
    "lens_loss_reference",
    "planned_length",
    "reachable_length",
    "sample_variants",
]
