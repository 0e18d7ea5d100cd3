"""Shards and batches: the vectors of the record's loader, resuming, ranks, and files that are not shards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from speedrun.golden import array, load

from recipes.speedrun.data import (
    HEADER_BYTES,
    MAGIC,
    DocumentLoader,
    read_shard,
    validation_batches,
    write_shard,
)

BOS = 50256


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    paths = []
    for i, entry in enumerate(load("data_loader")["shards"]):
        paths.append(tmp_path / f"shard_{i}.bin")
        write_shard(paths[-1], array(entry).long())
    return paths


def test_training_batches_of_the_record(shards: list[Path]):
    golden = load("data_loader")
    loader = DocumentLoader(shards, golden["num_tokens"], golden["max_seq_len"], bos=golden["bos"])
    for i, want in enumerate(golden["batches"]):
        batch = loader.next_batch()
        assert batch.inputs.tolist() == want["inputs"] and batch.targets.tolist() == want["targets"]
        bounds = batch.cu_seqlens.tolist()
        used = len(want["cum_seqlens"])
        assert bounds[:used] == want["cum_seqlens"] and len(bounds) == want["cum_len_padded"]
        assert set(bounds[used:]) <= {len(want["inputs"])}
        if i == golden["resize_after_batch"]:
            loader.resize(*golden["resize_to"])


def test_two_ranks_share_the_record_s_documents(shards: list[Path]):
    golden = load("data_loader")["two_rank_first_batch"]
    tokens = read_shard(shards[0]).long()
    for rank in range(2):
        loader = DocumentLoader(
            shards, 2 * golden["num_tokens_local"], golden["max_seq_len"], rank=rank, world_size=2
        )
        spans = zip(golden["starts"][rank], golden["ends"][rank], strict=True)
        buffer = torch.cat([tokens[a:b] for a, b in spans])
        batch = loader.next_batch()
        assert torch.equal(batch.inputs, buffer[:-1]) and torch.equal(batch.targets, buffer[1:])


def test_validation_batch_of_the_record(shards: list[Path]):
    golden = load("data_loader")["val_first_batch"]
    batch = next(validation_batches(shards, golden["num_tokens"], bos=BOS))
    assert batch.inputs.tolist() == golden["inputs"] and batch.targets.tolist() == golden["targets"]
    bounds, used = batch.cu_seqlens.tolist(), len(golden["cum_seqlens"])
    assert bounds[:used] == golden["cum_seqlens"] and set(bounds[used:]) <= {golden["num_tokens"]}


def test_validation_batches_tile_the_shards(shards: list[Path]):
    batches = list(validation_batches(shards, 256, 512))
    tokens = read_shard(shards[0]).long()
    assert torch.equal(torch.cat([b.inputs for b in batches]), tokens[:512]) and len(batches) == 2
    with pytest.raises(ValueError, match="total_tokens: expected 25600"):
        list(validation_batches(shards, 256, 25600))


def test_resumes_exactly_at_any_point(shards: list[Path]):
    straight = DocumentLoader(shards, 96, 40, rank=1, world_size=2)
    wanted = [straight.next_batch() for _ in range(30)]
    assert straight.epoch > 0
    for stop in (0, 1, 5, 9, 17, 29):
        first = DocumentLoader(shards, 96, 40, rank=1, world_size=2)
        for _ in range(stop):
            first.next_batch()
        state = json.loads(json.dumps(first.state_dict()))
        # Another size: the state brings its own back.
        second = DocumentLoader(shards, 64, 9, rank=1, world_size=2)
        second.load_state_dict(state)
        for want in wanted[stop:]:
            got = second.next_batch()
            assert torch.equal(got.inputs, want.inputs) and torch.equal(got.cu_seqlens, want.cu_seqlens)


def test_state_of_other_shards_is_refused(shards: list[Path], tmp_path: Path):
    state = DocumentLoader(shards, 64, 40).state_dict()
    other = tmp_path / "other.bin"
    write_shard(other, read_shard(shards[0]))
    with pytest.raises(ValueError, match="shard_0"):
        DocumentLoader([other], 64, 40).load_state_dict(state)
    state["document"] = 10**6
    with pytest.raises(ValueError, match="past the end"):
        DocumentLoader(shards, 64, 40).load_state_dict(state)


def test_a_batch_that_no_shard_fills_is_an_error(shards: list[Path]):
    with pytest.raises(ValueError, match="no shard can fill 1 x 5000"):
        DocumentLoader(shards, 5000, 40).next_batch()


def test_shards_round_trip(tmp_path: Path):
    tokens = torch.randint(0, 65536, (1001,))
    write_shard(tmp_path / "a.bin", tokens)
    assert (tmp_path / "a.bin").stat().st_size == HEADER_BYTES + 2 * 1001
    assert torch.equal(read_shard(tmp_path / "a.bin").long(), tokens)
    header = (tmp_path / "a.bin").read_bytes()[:12]
    assert [int.from_bytes(header[i : i + 4], "little") for i in (0, 4, 8)] == [MAGIC, 1, 1001]
    with pytest.raises(ValueError, match="within 0"):
        write_shard(tmp_path / "b.bin", torch.tensor([70000]))


def header(*numbers: int) -> bytes:
    return b"".join(n.to_bytes(4, "little", signed=True) for n in numbers).ljust(HEADER_BYTES, b"\0")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "header of 1024 bytes, got a file of 0"),
        (b"x" * 100, "header of 1024 bytes, got a file of 100"),
        (header(7, 1, 2) + b"abcd", "not a token shard"),
        (header(MAGIC, 2, 2) + b"abcd", "expected version 1, got 2"),
        (header(MAGIC, 1, 0), "at least one token"),
        (header(MAGIC, 1, 5) + b"abcd", "says 5 tokens, the file holds 2"),
        (header(MAGIC, 1, 2) + b"abc", "says 2 tokens, the file holds 1.5"),
        (header(MAGIC, 1, 2) + b"abcdef", "says 2 tokens, the file holds 3"),
    ],
)
def test_files_that_are_not_shards(tmp_path: Path, content: bytes, words: str):
    (tmp_path / "bad.bin").write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_shard(tmp_path / "bad.bin")


def test_missing_files_and_documents_are_named(tmp_path: Path, shards: list[Path]):
    with pytest.raises(ValueError, match=r"no file .*nothing\.bin"):
        read_shard(tmp_path / "nothing.bin")
    write_shard(tmp_path / "plain.bin", torch.arange(50))
    with pytest.raises(ValueError, match="no document starts"):
        DocumentLoader([tmp_path / "plain.bin"], 8, 4)
    # A broken second shard is found by the thread that reads ahead, and reported where it is needed.
    loader = DocumentLoader([shards[0], tmp_path / "plain.bin"], 128, 40)
    with pytest.raises(ValueError, match=r"plain\.bin: no document starts"):
        for _ in range(50):
            loader.next_batch()


def test_bad_arguments_are_named(shards: list[Path]):
    for arguments, words in (
        (([], 8, 4), "paths"),
        ((shards, 0, 4), "num_tokens"),
        ((shards, 8, 0), "max_seq_len"),
    ):
        with pytest.raises(ValueError, match=words):
            DocumentLoader(*arguments)
    with pytest.raises(ValueError, match="num_tokens"):
        DocumentLoader(shards, 9, 4, world_size=2)
    with pytest.raises(ValueError, match="rank"):
        DocumentLoader(shards, 8, 4, rank=2, world_size=2)
