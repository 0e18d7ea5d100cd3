"""Generation: without a cache, or without its context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from leanstep.diagnose.findings import Hit, Rule, Work, callers_of, plural
from leanstep.diagnose.step import Step, grouped
from leanstep.tape.events import FORWARD, GENERATE, Event
from leanstep.tape.lines import Line


def _calls(step: Step, name: str) -> dict[Line, list[Event]]:
    return grouped((e for e in step.of_kind(GENERATE) if e.name == name), lambda event: event.site)


def no_kv_cache(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find generation that recomputes all earlier positions for each token."""
    for line, calls in _calls(step, "again").items():
        if len(calls) >= limits["calls"]:
            positions = sum(event.value for event in calls)
            # All but the last position of each call were already computed.
            again = positions - len(calls)
            evidence = {"calls": len(calls), "positions": positions, "computed_again": again}
            callers = callers_of(event.site for event in calls)
            yield Hit(line, len(calls), callers, FORWARD, evidence, Work(rollout_share=again / positions))


NO_KV_CACHE = Rule(
    "no-kv-cache",
    no_kv_cache,
    limits={"calls": 8},
    fires_when="≥ 8 model calls, each with the previous call's input plus one position",
    what=lambda f: (
        f"Generation without a KV cache: {plural(f.count, 'call')} over {f.evidence['positions']:,} "
        f"positions, {f.evidence['computed_again']:,} of which the previous call had already computed."
    ),
    amount=lambda f: plural(f.count, "call"),
    why="Each new token runs the model over the whole sequence. With a cache it runs over one position.",
    fix="Keep keys and values between calls: use_cache=True in transformers (checkpointing in training "
    "mode switches it off: model.eval() or gradient_checkpointing_disable() for the rollout), "
    "past_key_values in your own loop.",
    short_fix="keep keys and values: use_cache=True",
)


def no_context(step: Step, limits: Mapping[str, float]) -> Iterator[Hit]:
    """Find generation that calls the model with one token and an empty cache."""
    for line, calls in _calls(step, "no context").items():
        if len(calls) >= limits["calls"]:
            callers = callers_of(event.site for event in calls)
            yield Hit(line, len(calls), callers, FORWARD, {"calls": len(calls)}, Work(rollout_share=1))


NO_CONTEXT = Rule(
    "no-context",
    no_context,
    limits={"calls": 2},
    fires_when=(
        "≥ 2 model calls with one token and an empty `DynamicCache`: `generate()` with "
        "checkpointing in training mode ignores the prompt"
    ),
    what=lambda f: (
        f"Generation without context: {plural(f.count, 'call')} with one token and a KV cache that is still "
        "empty."
    ),
    amount=lambda f: plural(f.count, "call"),
    why="The model sees neither the prompt nor the previous tokens, so the generated text is "
    "meaningless. In transformers, checkpointing in training mode switches off the cache that "
    "generate() needs.",
    fix="model.eval() or gradient_checkpointing_disable() for the rollout, model.train() after it.",
    short_fix="model.eval() for the rollout",
)
