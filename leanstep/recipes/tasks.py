"""Made-up tasks of the lens and grpo recipes, and what the two recipes share: a warm start and an update.

`FactTask`, for lens: sequences in which focus matters. A fact token names a key and a value at once; the
tail of the sequence is `question(key) answer(value)` pairs. A gist over a block of facts mixes their values,
so a reader that collapsed the wrong block cannot answer.

`TopicTask`, for grpo: read a long text, name words of its topic. The vocabulary has topics of
`words_per_topic` words each; every other word belongs to none. A text is drawn half from one topic and half
from everything, and ends with the `ask` token. A good answer is `answer_words` different words of that topic;
`end` cuts an answer short. Demonstrations are sloppy (half of their words are off topic), so a model that
imitates them well earns less than half of the reward; the rest must come from the reward itself.

`WarmStarted`: in the first part of the steps a base model learns the task; then the part that the recipe is
about begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.recipes.checkpoint import seed_python_generators
from leanstep.recipes.distributed import World
from leanstep.recipes.optimizers import average_gradients

END, ASK, FIRST_WORD = 0, 1, 2


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


@dataclass(frozen=True)
class TopicTask:
    """Sizes of the task; texts have `min_prompt` to `max_prompt` tokens, `ask` included."""

    vocab: int = 4096
    topics: int = 8
    words_per_topic: int = 32
    answer_words: int = 8
    min_prompt: int = 64
    max_prompt: int = 112
    purity: float = 0.5

    def __post_init__(self) -> None:
        needed = FIRST_WORD + self.topics * self.words_per_topic
        if self.vocab <= needed:
            raise ValueError(f"vocab: expected more than {needed} for the topics' words, got {self.vocab}")
        if not 2 <= self.min_prompt <= self.max_prompt:
            raise ValueError(f"min_prompt: expected 2 .. max_prompt {self.max_prompt}, got {self.min_prompt}")
        if not 1 <= self.answer_words <= self.words_per_topic:
            raise ValueError(
                f"answer_words: expected 1 .. {self.words_per_topic} different words, got {self.answer_words}"
            )

    def prompts(self, count: int, generator: torch.Generator) -> tuple[list[Tensor], list[int]]:
        """`count` texts (ragged) and their topics."""
        topics = torch.randint(0, self.topics, (count,), generator=generator).tolist()
        span = self.max_prompt - self.min_prompt + 1
        lengths = (self.min_prompt + torch.randint(0, span, (count,), generator=generator)).tolist()
        ask = torch.tensor([ASK])
        texts = [
            torch.cat((self._words(t, n - 1, generator), ask)) for t, n in zip(topics, lengths, strict=True)
        ]
        return texts, topics

    def demonstrations(self, count: int, generator: torch.Generator) -> list[Tensor]:
        """Texts with sloppy answers."""
        texts, topics = self.prompts(count, generator)
        end = torch.tensor([END])
        return [
            torch.cat((text, self._words(topic, self.answer_words, generator), end))
            for text, topic in zip(texts, topics, strict=True)
        ]

    def reward(self, completion: Sequence[int], topic: int) -> float:
        """How many different on-topic words there are among the first `answer_words`, as a share; 0 .. 1."""
        first = FIRST_WORD + topic * self.words_per_topic
        named = {w for w in completion[: self.answer_words] if first <= w < first + self.words_per_topic}
        return len(named) / self.answer_words

    def _words(self, topic: int, count: int, generator: torch.Generator) -> Tensor:
        own = FIRST_WORD + topic * self.words_per_topic
        own_words = own + torch.randint(0, self.words_per_topic, (count,), generator=generator)
        any_words = FIRST_WORD + torch.randint(0, self.vocab - FIRST_WORD, (count,), generator=generator)
        return torch.where(torch.rand(count, generator=generator) < self.purity, own_words, any_words)


class WarmStarted:
    """The attributes that the loop and both phases read.

    Args:
        settings: a dataclass with `warm_fraction`, the part of the steps spent on the warm start.
        task: a dataclass; both are written into the checkpoint's settings.
    """

    def __init__(self, settings: Any, task: Any, *, seed: int, steps: int, preset: str, world: World) -> None:
        self.options, self.task, self.world, self.seed = settings, task, world, seed
        self.num_steps = steps
        self.warm_steps = round(steps * settings.warm_fraction)
        self.settings: dict[str, Any] = {
            "preset": preset,
            "seed": seed,
            "steps": steps,
            **asdict(settings),
            "task": asdict(task),
        }
        seed_python_generators(seed)
        # Ranks draw different samples, but start from the same weights.
        self.generator = torch.Generator().manual_seed(seed * 1000 + world.rank + 1)

    def update(self, optimizer: torch.optim.Optimizer, lr: float) -> Tensor:
        """Gradients averaged over ranks and clipped, one step at `lr`; returns the norm before clipping."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        average_gradients(parameters, self.world)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        return norm
