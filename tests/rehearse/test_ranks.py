"""One process of many: models without memory at first, and what the host knows of collectives."""

from __future__ import annotations

import json

import pytest
from rehearse.rehearsed import SCRIPTS, run_script, run_text

from leanstep.rehearse.events import HostWait, Launch, Request
from leanstep.rehearse.stage import rehearse

RANKS = 8


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    found = run_script(
        SCRIPTS / "ranks.py", capture=tmp_path_factory.mktemp("ranks"), steps=1000, ranks=RANKS
    )
    assert found.recording.refused is None, found.recording.refused
    return found


@pytest.fixture(scope="module")
def seen(ranks):
    return json.loads(ranks.printed)


def test_a_mesh_starts_the_process_group(seen):
    assert seen["world"] == [0, RANKS, RANKS]


def test_fsdp2_around_a_model_built_on_the_meta_device(seen):
    assert seen["built_on"] == ["meta"]
    assert seen["sharded_bytes"] == 0
    # Shards (the small ones of 512 bytes), and the buffers that are whole.
    assert seen["empty_bytes"] == 4 * (2 * 4 * 256 * 1_024 // RANKS + 4 * 512 + 4 * 256)
    assert seen["shard"] == [1_024 // RANKS, 256, "cuda"]


def test_what_every_rank_sends_is_known_of_collectives(seen, ranks):
    assert seen["sums"] == [3 * RANKS, 5 * RANKS]
    assert seen["read"] == [1.0, 3 * RANKS, 5 * RANKS]
    assert seen["largest"] == 5 * RANKS
    assert seen["gathered"] == [4, 7] * RANKS
    assert seen["apart"] == [[4, 7]] * RANKS
    assert seen["objects"] == [{"loss": 1.5}] * RANKS
    listed = {a.kind for a in ranks.recording.assumed if a.value == "the same on every rank"}
    assert {"all_reduce", "all_gather"} <= listed


def test_a_collective_has_the_size_of_its_group(ranks):
    sent = {
        mark: (kernel.name, kernel.nbytes, kernel.sizes)
        for mark in ("over two", "over four", "sent", "paired")
        for event in ranks.recording.events
        if isinstance(event, Launch) and ranks.is_at(event.line, mark)
        for kernel in event.kernels
        if kernel.kind == "collective"
    }
    assert sent == {
        "over two": ("all_reduce", 4 * 1_024, (2, 4)),  # ranks 0 and 4
        "over four": ("all_gather", 4 * 4 * 1_024, (4, 1)),
        "sent": ("send", 4 * 1_024, (2, 4)),
        "paired": ("all_reduce", 4 * (64 * 64 + 64), (2, 4)),
    }


def test_a_device_for_each_rank_of_the_machine(seen):
    assert seen["another_ranks"] == "cuda:3"


def test_a_copy_to_the_device_in_inference_mode(seen):
    assert seen["inferred"] == [2.0, 4.0]


def test_a_script_without_a_process_group_gets_a_note(tmp_path, ranks):
    text = "import torch\nmodel = torch.nn.Linear(8, 8).cuda()\n"
    text += "optimizer = torch.optim.SGD(model.parameters())\nfor _ in range(4):\n"
    text += "    model(torch.ones(8, 8).cuda()).sum().backward()\n    optimizer.step()\n"
    alone = run_text(tmp_path, text, ranks=RANKS).recording
    noted = [any("created no process group" in n for n in r.notes) for r in (alone, ranks.recording)]
    assert noted == [True, False]


def test_a_recipe_is_rehearsed_on_ranks(tmp_path):
    given = ("--micro-batches", str(RANKS), "--device", "cuda", "--out", str(tmp_path))
    request = Request("recipes.speedrun.train", given, device="h100", ranks=RANKS, module=True)
    recording = rehearse(request, quiet=True)
    assert recording.ended == "steps", recording.refused
    last = recording.events[recording.steps[-1].first : recording.steps[-1].last]
    assert not [e for e in last if isinstance(e, HostWait)]
