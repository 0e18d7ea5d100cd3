"""No public path makes the GPU wait, multiply in the wrong type or from misaligned rows, or hold T x T.

Every path runs on the device that is not there (scripts/public_paths.py, one process for all), at three
sizes. What is asserted is what a GPU would be asked to do; no time is predicted here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from rehearse.rehearsed import SCRIPTS, Rehearsed, run_script

from leanstep.heads import OBJECTIVES, PREFERENCES
from leanstep.rehearse.events import Alloc, Event, HostWait, Kernel, Launch

Events = list[Event]

PATHS = {
    "logprob": (
        *("linear_logprobs", "linear_logprobs, metric", "linear_logprobs, bias, softcap"),
        *("linear_logprobs, frozen head", "linear_logprobs, LoRA"),
        *("linear_logprobs, autocast, fp32 weight", "linear_logprobs, allowed", "token_logprobs"),
        *(f"linear_policy_loss, {objective}" for objective in OBJECTIVES),
        *("policy_loss", "plan_rows", "next_token_targets", "rowwise"),
    ),
    "objectives": (
        *("linear_cross_entropy", "linear_cross_entropy, none"),
        *("linear_distill_loss", "linear_distill_loss, reverse_kl"),
        *("linear_distill_loss, jsd", "linear_distill_loss, skew_kl"),
        *("linear_distill_loss, TeacherLogProbs", "linear_distill_loss, TeacherTopK"),
        *(f"linear_preference_loss, {kind}" for kind in PREFERENCES),
    ),
    "muon": ("NorMuon, fp32", "NorMuon, bf16", "NorMuon, banks", "polar", "transpose_copy, transpose_add"),
    "gpt": ("GPT", "GPT, evaluation"),
    "lens": ("LensObjective, float32", "LensObjective, bfloat16"),
}
# A product with a shorter side than this has no tile for tensor cores: a gate's outer product, a bias.
SMALLEST_TILE = 16
ALL = [pytest.param(room, name, id=f"{room}: {name}") for room, names in PATHS.items() for name in names]


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Rehearsed:
    pytest.importorskip("triton", reason="Triton is not installed")
    folder = tmp_path_factory.mktemp("public_paths")
    return run_script(SCRIPTS / "public_paths.py", capture=folder, steps=100_000, device="h100")


def sizes_of(paths: Rehearsed, room: str, name: str) -> list[tuple[dict[str, Any], Events]]:
    """(what was run, its events) for every size of a path."""
    assert paths.recording.refused is None, paths.recording.refused
    found = []
    for entry in json.loads(paths.printed.splitlines()[-1]):
        if (entry["room"], entry["path"]) == (room, name):
            assert not entry["trouble"], entry
            step = paths.recording.steps[entry["step"]]
            found.append((entry, paths.recording.events[step.first : step.last]))
    assert len(found) == 3, f"{room}, {name}: {len(found)} sizes ran"
    assert all(products(events) or launched(events) for _, events in found)
    return found


def launched(events: Events) -> list[Launch]:
    return [e for e in events if isinstance(e, Launch) and e.kernels]


def products(events: Events) -> list[tuple[Kernel, str]]:
    """Products that tensor cores could do, with their lines."""
    calls = [(kernel, str(e.line)) for e in launched(events) for kernel in e.kernels]
    return [(k, line) for k, line in calls if k.kind == "gemm" and min(k.sizes[1:]) >= SMALLEST_TILE]


def wrong_at(paths: Rehearsed, room: str, name: str, look: Callable[[Events, int], Iterable[str]]) -> str:
    """What `look` finds in the events of each size (and its tokens), as lines, the most frequent first."""
    found = {
        entry["size"]: Counter(look(events, entry["tokens"])) for entry, events in sizes_of(paths, room, name)
    }
    return "\n".join(f"{size}: {n} x {what}" for size, c in found.items() for what, n in c.most_common(4))


@pytest.mark.parametrize(("room", "name"), ALL)
def test_the_host_never_waits(paths, room, name):
    def look(events: Events, _: int) -> Iterable[str]:
        return (f"{e.kind} at {e.line}" for e in events if isinstance(e, HostWait))

    assert wrong_at(paths, room, name, look) == ""


@pytest.mark.parametrize(("room", "name"), ALL)
def test_every_operand_of_a_product_is_16_byte_aligned(paths, room, name):
    def look(events: Events, _: int) -> Iterable[str]:
        return (f"{k.sizes}, {k.alignment} at {line}" for k, line in products(events) if k.alignment < 16)

    assert wrong_at(paths, room, name, look) == ""


# Every model, hidden state and head of the script has 16 bits, or runs under autocast; NorMuon multiplies in
# 16 bits whatever the parameters have.
@pytest.mark.parametrize(("room", "name"), ALL)
def test_no_product_is_done_in_fp32(paths, room, name):
    def look(events: Events, _: int) -> Iterable[str]:
        slow = ("float32", "tf32", "float64")
        return (f"{k.sizes}, {k.dtype} at {line}" for k, line in products(events) if k.dtype in slow)

    assert wrong_at(paths, room, name, look) == ""


@pytest.mark.parametrize(("room", "name"), [p for p in ALL if p.values[0] in ("gpt", "lens")])
def test_no_storage_is_tokens_by_tokens(paths, room, name):
    def look(events: Events, tokens: int) -> Iterable[str]:
        for event in events:
            shape = paths.recording.storages[event.storage].shape if isinstance(event, Alloc) else ()
            # Two of its sides (or one flat side) are those of a tokens x tokens table, or a multiple.
            sides = [n for n in shape if n >= tokens and n % tokens == 0]
            if len(sides) > 1 or any(n % tokens**2 == 0 for n in sides):
                yield f"{shape} at {event.line}"

    assert wrong_at(paths, room, name, look) == ""
