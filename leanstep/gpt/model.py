"""The flattened model: one forward function over parameters taken from the banks once."""

from __future__ import annotations

import torch

from leanstep.gpt.config import GPTConfig
from leanstep.gpt.reference import ReferenceGPT


class GPT(ReferenceGPT):
    def __init__(self, config: GPTConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__(config, generator=generator, core="banded")
