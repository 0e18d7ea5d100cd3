"""`generate` of transformers: some tokens are recorded, the others follow from them.

The loop of `generate` asks its stopping criteria once per token. After `TOKENS` tokens the rehearsal answers
that all sequences have ended. The tokens up to the maximum length are priced from the recorded ones, as
`repeated_calls` does for single calls, and the output gets its full length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
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
from leanstep.rehearse.events import Extrapolated
from leanstep.rehearse.shadows import CHOSEN_INDEX
from leanstep.script.hooks import replace_function

# Recorded per call: the prompt, a first token, and a series.
TOKENS = RECORDED + 2
# So many tokens share a price: that of the one in the middle.
CHUNK = 16
# Arguments of other ways to generate: these run as they are.
_OTHER_WAYS = ("streamer", "assistant_model", "custom_generate", "prompt_lookup_num_tokens")


class Generations:
    """Runs `generate`, or its beginning."""

    def __init__(self, tape: Any) -> None:
        self.tape = tape
        self.extrapolated = 0
        # Of the call under way: where its tokens end, live bytes there, tokens that are left out.
        self._ends: list[int] = []
        self._live: list[int] = []
        self._left_out = 0

    def run(self, generate: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`generate(*args, **kwargs)` with fewer tokens recorded, where its result is a tensor of tokens."""
        if not self._is_plain(args, kwargs):
            return generate(*args, **kwargs)
        self._ends, self._live, self._left_out = [], [], 0
        with self._stopping_early():
            tokens = generate(*args, **kwargs)
        if not self._left_out or not isinstance(tokens, Tensor):
            return tokens
        self._add_tokens()
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
        longest = criteria.max_length
        if len(self._ends) < TOKENS or not isinstance(longest, int) or not isinstance(done, Tensor):
            return done
        self._left_out = max(0, longest - input_ids.shape[1])
        return torch.ones_like(done) if self._left_out else done

    def _add_tokens(self) -> None:
        """The price of the tokens that are left out, and the memory of their cache."""
        tape, place = self.tape, self.tape.lines.place()
        events = tape.recording.events
        ends = self._ends[-RECORDED - 1 :]
        calls = [recorded_call(events[a:b]) for a, b in pairwise(ends)]
        family = Family(series=calls, templates=templates_of([call.launches for call in calls]))
        if family.templates is None:
            tape.notes["generate: recorded tokens differ; the last one stands for those left out"] += 1
            family = Family(series=[calls[-1]] * RECORDED)
            family.templates = templates_of([calls[-1].launches] * RECORDED)
        self._add_peak(calls)
        for first in range(0, self._left_out, CHUNK):
            count = min(CHUNK, self._left_out - first)
            event = _times(extrapolated(family, first + (count + 1) / 2), count)
            tape.add(event.at(place.line, place.phase, tape.step))
            for wait in calls[-1].waits * count:
                tape.add(replace(wait, step=tape.step))
        self.extrapolated += self._left_out

    def _add_peak(self, calls: list[RecordedCall]) -> None:
        tape, place = self.tape, self.tape.lines.place()
        live = next_value(self._live[-RECORDED:], self._left_out)
        transient = next_value([call.transient for call in calls], self._left_out)
        extra = int(live + transient) - tape.live_bytes
        if extra > 0:
            tape.release(tape.allocate(extra, (extra,), "uint8", place, "temporary"))


def _times(event: Extrapolated, count: int) -> Extrapolated:
    """The event so many times in a row."""
    return replace(
        event,
        parts=tuple((line, kernel, count * times) for line, kernel, times in event.parts),
        calls=count * event.calls,
        views=count * event.views,
        launches=count * event.launches,
        products=tuple(product._replace(flops=count * product.flops) for product in event.products),
    )
