"""What a call of the objective returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .metrics import LensMetrics
    from .pairs import Pairs


@dataclass
class LensResult:
    """Loss and telemetry of one micro-batch. P pairs.

    Args:
        loss: scalar, float32 or float64, the only tensor here that carries a gradient.
        terms: unweighted terms by name, [P] each; terms that were switched off are absent.
        kept: [P] bool, the pairs that have at least one target.
        active: False when the objective was gated off or is frozen.
        state: the moving average of the budget imbalance after this call (0-d), to pass to the next one.
        pairs: the pairs in processing order.
        metrics: telemetry, computed when it is read.
        scores: the scores the loss was computed from, detached; also there when the controller is frozen.
    """

    loss: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)
    kept: Tensor | None = None
    active: bool = True
    state: Tensor | None = None
    pairs: Pairs | None = None
    metrics: LensMetrics | None = None
    scores: Tensor | None = None
