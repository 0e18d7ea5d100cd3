"""`generate` of transformers: a few tokens are recorded, the others are extrapolated.

The loop of `generate` calls its stopping criteria once per token. After `TOKENS` tokens, the rehearsal
reports that all sequences have ended. The tokens up to the maximum length are priced from the recorded ones,
as `repeated_calls` does for single calls, and the output gets its full length. A call whose second token
continues the series of an earlier call stops there: prompts of another length produce the same series.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isclose
from typing import Any

import torch
from torch import Tensor

from leanstep.rehearse.answers.repeated_calls import (
    RECORDED,
    Family,
    RecordedCall,
    extrapolated,
    next_value,
    recorded_call,
    templates_of,
)
from leanstep.rehearse.events import Extrapolated, Launch
from leanstep.rehearse.shadows import CHOSEN_INDEX
from leanstep.tape.hooks import replace_function

# Recorded per call: the prompt, a first token, and a series.
TOKENS = RECORDED + 2
# This many tokens share the price of the middle one.
CHUNK = 16
# Number of stored series, and how closely a token must agree with one.
MAX_SERIES, FITS = 16, 1e-3
# Arguments that select other ways to generate; such calls run unchanged.
_OTHER_WAYS = ("streamer", "assistant_model", "custom_generate", "prompt_lookup_num_tokens")


@dataclass
class Series:
    """Tokens of a call that ran. `length`: of the sequences after the last one; `live`: bytes after each."""

    family: Family
    length: int
    live: list[int]

    def fits(self, token: RecordedCall, position: int) -> bool:
        """Return whether a token matches the series at `position`: same kernels, bytes and FLOPs."""
        recorded = [call.launches for call in self.family.series]
        if any(len(launches) != len(token.launches) for launches in recorded):
            return False
        if any(_kinds(a) != _kinds(b) for a, b in zip(token.launches, recorded[-1], strict=True)):
            return False
        totals = [_work(launches) for launches in recorded]
        expected = [next_value(column, position) for column in zip(*totals, strict=True)]
        pairs = zip(_work(token.launches), expected, strict=True)
        return all(isclose(work, value, rel_tol=FITS) for work, value in pairs)


def _kinds(launch: Launch) -> tuple[Any, ...]:
    return launch.name, launch.line, [(kernel.kind, kernel.dtype) for kernel in launch.kernels]


def _work(launches: Sequence[Launch]) -> tuple[float, float]:
    kernels = [kernel for launch in launches for kernel in launch.kernels]
    return sum(kernel.nbytes for kernel in kernels), sum(kernel.flops for kernel in kernels)


class Generations:
    """Runs `generate`, or only its first tokens."""

    def __init__(self, tape: Any) -> None:
        self.tape = tape
        self.extrapolated = 0
        # Of earlier calls, the newest last.
        self._recorded: deque[Series] = deque(maxlen=MAX_SERIES)
        # Of the current call: where its tokens end, live bytes there, length of its sequences.
        self._ends: list[int] = []
        self._live: list[int] = []
        self._length = 0
        # Cost and number of its other tokens.
        self._series: Series | None = None
        self._left_out = 0

    def run(self, generate: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `generate(*args, **kwargs)` with fewer recorded tokens, if its result is a tensor of tokens."""
        if not self._is_plain(args, kwargs):
            return generate(*args, **kwargs)
        self._ends, self._live, self._series, self._left_out = [], [], None, 0
        with self._stopping_early():
            tokens = generate(*args, **kwargs)
        if self._series is None or not isinstance(tokens, Tensor):
            return tokens
        self._add_tokens(self._series)
        more = torch.full(
            (tokens.shape[0], self._left_out), CHOSEN_INDEX, dtype=tokens.dtype, device=tokens.device
        )
        return torch.cat([tokens, more], dim=1)

    @staticmethod
    def _is_plain(args: Any, kwargs: Any) -> bool:
        configs = [kwargs.get("generation_config"), getattr(args[0], "generation_config", None)]

        def setting(name: str) -> Any:
            values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
            return next((value for value in values if value is not None), None)

        if any(kwargs.get(name) for name in _OTHER_WAYS) or setting("return_dict_in_generate"):
            return False
        return (setting("num_beams") or 1) == 1

    @contextmanager
    def _stopping_early(self) -> Iterator[None]:
        criteria = sys.modules["transformers.generation.stopping_criteria"].StoppingCriteriaList
        undo = replace_function(criteria, "__call__", self._token_ends)
        try:
            yield
        finally:
            undo()

    def _token_ends(self, original: Any, criteria: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._ends.append(len(self.tape.recording.events))
        self._live.append(self.tape.live_bytes)
        done = original(criteria, input_ids, *args, **kwargs)
        longest, self._length = criteria.max_length, input_ids.shape[1]
        if isinstance(longest, int) and isinstance(done, Tensor) and longest > self._length:
            self._series = self._known_series() if len(self._ends) < TOKENS else self._new_series()
            if self._series is not None:
                self._left_out = longest - self._length
                return torch.ones_like(done)
        return done

    def _known_series(self) -> Series | None:
        """Return the series of an earlier call that this call repeats, judged by its second token."""
        if len(self._ends) != 2:
            return None
        token = self._tokens(self._ends)[0]
        fitting = (s for s in reversed(self._recorded) if s.fits(token, self._length - s.length))
        return next(fitting, None)

    def _new_series(self) -> Series:
        calls = self._tokens(self._ends[-RECORDED - 1 :])
        family = Family(series=calls, templates=templates_of([call.launches for call in calls]))
        if family.templates is None:
            self.tape.notes[
                "generate: recorded tokens differ; the last one is used for the tokens left out"
            ] += 1
            family = Family(series=[calls[-1]] * RECORDED)
            family.templates = templates_of([calls[-1].launches] * RECORDED)
        series = Series(family, self._length, self._live[-RECORDED:])
        self._recorded.append(series)
        return series

    def _tokens(self, ends: Sequence[int]) -> list[RecordedCall]:
        events = self.tape.recording.events
        return [recorded_call(events[a:b]) for a, b in pairwise(ends)]

    def _add_tokens(self, series: Series) -> None:
        """Record the price of the tokens that are left out, and the memory of their cache."""
        tape, place = self.tape, self.tape.lines.place()
        ran = self._length - series.length
        self._add_peak(series, ran, ran + self._left_out)
        for first in range(0, self._left_out, CHUNK):
            count = min(CHUNK, self._left_out - first)
            event = _times(extrapolated(series.family, ran + first + (count + 1) / 2), count)
            tape.add(event.at(place.line, place.phase, tape.step))
            for wait in series.family.series[-1].waits * count:
                tape.add(replace(wait, step=tape.step))
        self.extrapolated += self._left_out

    def _add_peak(self, series: Series, ran: int, last: int) -> None:
        """Return the memory of token `last` of the series. `ran`: the last token that ran."""
        tape, place = self.tape, self.tape.lines.place()
        grown = next_value(series.live, last) - next_value(series.live, ran)
        transient = next_value([call.transient for call in series.family.series], last)
        extra = int(self._live[-1] + grown + transient) - tape.live_bytes
        if extra > 0:
            tape.release(tape.allocate(extra, (extra,), "uint8", place, "temporary"))


def _times(event: Extrapolated, count: int) -> Extrapolated:
    """Return the event repeated this many times."""
    return replace(
        event,
        parts=tuple((line, kernel, count * times) for line, kernel, times in event.parts),
        calls=count * event.calls,
        views=count * event.views,
        launches=count * event.launches,
        products=tuple(product._replace(flops=count * product.flops) for product in event.products),
    )
