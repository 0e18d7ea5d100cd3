"""Scores of a previous policy for the KL term: from a moving average of the controller or the last epoch."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leanstep.lens.batch import LensBatch


class LaggedPolicy:
    """An exponential moving average of the controller that scores the same batch under no_grad.

    Example:
        policy = LaggedPolicy(lensnet, decay=0.99)
        previous = policy.scores(*inputs)                        # [V, W], for lens_loss(prev_scores=...)
        policy.update(lensnet)                                   # after the optimizer step
    """

    def __init__(self, controller: nn.Module, decay: float = 0.99) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay: expected 0..1, got {decay}")
        self.decay = decay
        self.model = copy.deepcopy(controller).requires_grad_(False).eval()

    @torch.no_grad()
    def update(self, controller: nn.Module) -> None:
        for mine, theirs in zip(self.model.parameters(), controller.parameters(), strict=True):
            mine.lerp_(theirs.detach(), 1 - self.decay)

    @torch.no_grad()
    def scores(self, *inputs: Any) -> Tensor:
        return self.model(*inputs)

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)


def content_key(sequence_id: int | str, positions: Tensor, lods: Tensor) -> str:
    """Return a key of a context that depends only on its content: positions and lods [W] on any device.

    >>> content_key(7, torch.tensor([0, 4]), torch.tensor([1, 0]))[:8]
    'bbf5788e'
    """
    digest = hashlib.blake2b(str(sequence_id).encode() + b"|", digest_size=16)
    digest.update(positions.to("cpu", torch.int32).contiguous().numpy().tobytes())
    digest.update(b"|")
    digest.update(lods.to("cpu", torch.int8).contiguous().numpy().tobytes())
    return digest.hexdigest()


class ScoreStore:
    """Scores of the previous epoch by content key; the oldest are dropped beyond `capacity` contexts.

    Example:
        keys = [content_key(v, batch.pos[v], batch.lod[v]) for v in range(batch.num_contexts)]
        store = ScoreStore()
        store.put(keys, scores, batch)                           # [V, W]; reads the scores on the host
        prev_scores, prev_valid = store.get(keys, batch)         # [V, W] and [V], for lens_loss
    """

    def __init__(self, capacity: int = 10_000) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: expected at least 1, got {capacity}")
        self.capacity = capacity
        self._scores: OrderedDict[str, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._scores)

    def put(self, keys: Sequence[str], scores: Tensor, batch: LensBatch) -> None:
        """Store the valid scores of each context [V, W]."""
        if len(keys) != batch.num_contexts or scores.shape != batch.pos.shape:
            raise ValueError(
                f"keys, scores: expected {batch.num_contexts} contexts, "
                f"got {len(keys)}, {tuple(scores.shape)}"
            )
        host = scores.detach().float().cpu()
        valid = batch.valid.cpu()
        for key, row, mask in zip(keys, host, valid, strict=True):
            self._scores[key] = row[mask].clone()
            self._scores.move_to_end(key)
        while len(self._scores) > self.capacity:
            self._scores.popitem(last=False)

    def get(self, keys: Sequence[str], batch: LensBatch) -> tuple[Tensor, Tensor]:
        """Return prev_scores [V, W] and prev_valid [V] for `lens_loss`."""
        valid = batch.valid.cpu()
        scores = torch.zeros(batch.pos.shape)
        known = torch.zeros(len(keys), dtype=torch.bool)
        for v, key in enumerate(keys):
            stored = self._scores.get(key)
            if stored is not None and len(stored) == int(valid[v].sum()):
                scores[v, valid[v]] = stored
                known[v] = True
        return scores.to(batch.pos.device), known.to(batch.pos.device)
