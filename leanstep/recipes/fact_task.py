"""Toy sequences in which focus matters: some blocks hold facts that later questions need.

A fact token names a key and a value at once. The tail of the sequence is `question(key) answer(value)`
pairs. A gist over a block of facts mixes their values, so a reader that collapsed the wrong block cannot
answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FactTask:
    """Sizes of the task.

    Args:
        tokens: length of a sequence.
        block: tokens per block; facts come in whole blocks.
        fact_blocks: how many blocks hold facts; together they name `fact_blocks * block` different keys.
        values: possible values per key.
        fillers: different filler tokens.
        questions: pairs of question and answer at the end.
    """

    tokens: int = 64
    block: int = 4
    fact_blocks: int = 2
    values: int = 4
    fillers: int = 64
    questions: int = 4

    def __post_init__(self) -> None:
        if self.body % self.block or self.body // self.block < self.fact_blocks:
            raise ValueError(
                f"tokens: expected whole blocks of {self.block} before the questions, got {self.body}"
            )
        if self.questions > self.keys:
            raise ValueError(f"questions: expected at most one per key, {self.keys}, got {self.questions}")

    @property
    def keys(self) -> int:
        return self.fact_blocks * self.block

    @property
    def body(self) -> int:
        """Tokens before the questions."""
        return self.tokens - 2 * self.questions

    @property
    def vocab(self) -> int:
        return self.fillers + self.keys * self.values + self.keys + self.values

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Token ids [count, T] and which of them are answers [count, T]."""
        first_fact, first_question = self.fillers, self.fillers + self.keys * self.values
        first_answer = first_question + self.keys
        tokens = torch.randint(self.fillers, (count, self.tokens), generator=generator)
        num_blocks = self.body // self.block
        where = torch.rand(count, num_blocks, generator=generator).argsort(1)[:, : self.fact_blocks]
        cell = (where[:, :, None] * self.block + torch.arange(self.block)).flatten(1)
        keys = torch.rand(count, self.keys, generator=generator).argsort(1)
        values = torch.randint(self.values, (count, self.keys), generator=generator)
        tokens.scatter_(1, cell, first_fact + keys * self.values + values)
        asked = torch.rand(count, self.keys, generator=generator).argsort(1)[:, : self.questions]
        tokens[:, self.body :: 2] = first_question + keys.gather(1, asked)
        tokens[:, self.body + 1 :: 2] = first_answer + values.gather(1, asked)
        answers = torch.zeros_like(tokens, dtype=torch.bool)
        answers[:, self.body + 1 :: 2] = True
        return tokens, answers
