"""A task whose reward is a few lines of code: read a long text, name words of its topic.

The vocabulary has topics of `words_per_topic` words each; every other word belongs to none. A text is drawn
half from one topic and half from everything, and ends with the `ask` token. A good answer is `answer_words`
different words of that topic; `end` cuts an answer short. Demonstrations are sloppy (half of their words are
off topic), so a model that imitates them well earns less than half of the reward; the rest must come from the
reward itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

END, ASK, FIRST_WORD = 0, 1, 2


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
