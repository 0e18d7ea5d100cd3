"""What the elementwise passes over a tile of logits have in common: their arguments and their names.

passes.py chooses between kernel.py (Triton), C++ and plain torch; they all take these records.
"""

# R rows · W columns of a tile

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Finish(NamedTuple):
    """What is left to do to a product h W^T before it is a logit; Triton does it while it reads the tile.

        z = tanh(u + factor bias) scale         (without the tanh where not `capped`)

    Args:
        bias: [W], of the tile's columns, any float dtype; None: there is none.
        factor: of the bias.
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
        mode: 0: m is p, 1: m is q, 2: between, 3: 0 without q log q, 4: 3 with q itself in the tile.
    """

    statistics: tuple[Tensor, Tensor, Tensor, Tensor]
    mode: int
    a: float
    b: float
    mix: float


class LabelGradient(NamedTuple):
    """Cross-entropy at temperature 1 mixed into a divergence; targets, factor and log_sum are [R]."""

    targets: Tensor
    factor: Tensor
    log_sum: Tensor
    temperature: float


class Passes(Protocol):
    """The passes that kernel.py, `NativePasses` and `PlannedPasses` have."""

    @property
    def update_statistics(self) -> Any: ...

    @property
    def scale_exponentials(self) -> Any: ...

    @property
    def divergence_sums(self) -> Any: ...

    @property
    def divergence_gradient(self) -> Any: ...
