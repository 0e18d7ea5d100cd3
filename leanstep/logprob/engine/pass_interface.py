"""The common interface of the elementwise passes over a tile of logits.

passes.py chooses between kernel.py (Triton), C++ and plain torch; all of them take these records.
"""

# R rows · W columns of a tile

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Finish(NamedTuple):
    """The remaining steps from a product h W^T to a logit; Triton applies them while it reads the tile.

        z = tanh(u + factor bias) scale         (without tanh unless `capped`)

    Args:
        bias: [W], of the tile's columns, any float dtype; None: no bias.
        factor: factor of the bias.
        capped: whether the logits have a softcap.
        scale: [R] fp32; None: 1.
    """

    bias: Tensor | None
    factor: float
    capped: bool
    scale: Tensor | None


class Compared(NamedTuple):
    """Two softmaxes and their divergence D = a KL(q || m) + b KL(p || m), m = mix q + (1 - mix) p.

    Args:
        statistics: max and log-sum of the student's rows, then of the teacher's, [R] fp32 each.
        mode: 0: m is p, 1: m is q, 2: between, 3: mode 0 without q log q, 4: mode 3 with q itself in the
            tile.
    """

    statistics: tuple[Tensor, Tensor, Tensor, Tensor]
    mode: int
    a: float
    b: float
    mix: float


class LabelGradient(NamedTuple):
    """Cross-entropy at temperature 1 that is added to a divergence; targets, factor and log_sum are [R]."""

    targets: Tensor
    factor: Tensor
    log_sum: Tensor
    temperature: float


class Passes(Protocol):
    """The passes that kernel.py, `NativePasses` and `PlannedPasses` implement."""

    @property
    def update_statistics(self) -> Any: ...

    @property
    def scale_exponentials(self) -> Any: ...

    @property
    def divergence_sums(self) -> Any: ...

    @property
    def divergence_gradient(self) -> Any: ...
