"""Learn a focus controller (or a reward) from preferences: one vectorised block, no host reads."""

from . import ragged
from .allocator import AllocatorConfig, allocate_focus
from .asynchronous import AsyncHandle, AsyncLens
from .batch import GistList, LensBatch, Variant
from .cache import CachedBatch, ContextCache
from .config import LensConfig
from .coverage import coverage
from .lensnet import LensNet
from .loss import lens_loss
from .metrics import LensMetrics
from .objective import LensObjective
from .pairs import Pairs, build_pairs, check_variant_counts
from .policy import LaggedPolicy, ScoreStore, content_key
from .proxy import ProxyLoss, aggregate_targets
from .reader import ContextReader, GistTree
from .reference import lens_loss_reference
from .result import LensResult
from .targets import build_lod_table, build_targets
from .variants import baseline_variant, planned_length, reachable_length, sample_variants

__all__ = [
    "AllocatorConfig",
    "AsyncHandle",
    "AsyncLens",
    "CachedBatch",
    "ContextCache",
    "ContextReader",
    "GistList",
    "GistTree",
    "LaggedPolicy",
    "LensBatch",
    "LensConfig",
    "LensMetrics",
    "LensNet",
    "LensObjective",
    "LensResult",
    "Pairs",
    "ProxyLoss",
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
    "ragged",
    "reachable_length",
    "sample_variants",
]
