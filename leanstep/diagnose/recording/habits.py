"""Habits that waste time: attention matrices, float64, copies of weights, retained graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leanstep.diagnose.recording.ops import OpInfo, out_of_order
from leanstep.diagnose.step_records import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE, Tally, tally
from leanstep.tape.lines import Site

# Smaller ops are ignored.
MIN_BYTES = 16 * 1024
# Minimum queries and keys of an attention matrix: fewer are a set of experts or heads.
MIN_TOKENS = 64
BACKWARD_CALLS = frozenset({Tensor.backward, torch.autograd.backward})


class Habits:
    """Tallies of one step, by line."""

    def __init__(self) -> None:
        self.attention: dict[Site, Tally] = {}
        self.doubles: dict[Site, Tally] = {}
        self.clones: dict[Site, Tally] = {}
        self.indexed: dict[Site, Tally] = {}
        self.retained: dict[Site, Tally] = {}
        # Products of two activations, and elementwise results of them: storage -> keys.
        self._scores: dict[int, int] = {}

    def on_op(
        self, info: OpInfo, args: Sequence[Any], outs: Sequence[Tensor], site: Site, phase: str
    ) -> None:
        """Record an op with a large output that a line dispatches itself, not its backward."""
        out = outs[0]
        if out.dtype is torch.float64:
            tally(self.doubles, site, sum(o.nbytes for o in outs), 1, info.name)
        if phase in (BACKWARD, OPTIMIZER) or not out.ndim:
            return
        if not self._scores or not args or not isinstance(args[0], Tensor):
            return
        keys = self._scores.get(args[0].untyped_storage()._cdata)
        if keys is not None and out.shape[-1] == keys:
            self._scores[out.untyped_storage()._cdata] = keys
            if info.name == "_softmax" and phase in (FORWARD, RECOMPUTE) and out.shape[-2] >= MIN_TOKENS:
                shape = f"{list(out.shape)} {str(out.dtype).removeprefix('torch.')}"
                tally(self.attention, site, out.nbytes, 1, shape)

    def on_scores(self, out: Tensor, keys: int) -> None:
        """Record a product of activations: a row of `keys` columns per query."""
        if keys >= MIN_TOKENS and torch.is_grad_enabled():
            self._scores[out.untyped_storage()._cdata] = keys

    def on_clone(self, weight: Tensor, out: Tensor, site: Site) -> None:
        """Record a copy of a weight; a copy into the other layout is a transposed copy."""
        if not out_of_order(weight):
            tally(self.clones, site, out.nbytes)

    def on_backward_call(self, kwargs: dict[str, Any], site: Site | None) -> None:
        """Record a call of backward(); a second derivative needs its graph."""
        if site is not None and kwargs.get("retain_graph") and not kwargs.get("create_graph"):
            tally(self.retained, site)
