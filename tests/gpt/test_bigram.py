from __future__ import annotations

import pytest
import torch
from gpt.golden import load

from leanstep.gpt.bigram import bigram_hash


@pytest.mark.parametrize("case", range(2))
def test_vectors(case: int):
    c = load("bigram_hash")["cases"][case]
    assert bigram_hash(torch.tensor(c["tokens"]), c["bigram_vocab_size"]).tolist() == c["ids"]
    assert (
        bigram_hash(torch.tensor(c["tokens"], dtype=torch.int32), c["bigram_vocab_size"]).tolist() == c["ids"]
    )


def test_model_vectors_use_the_same_ids():
    golden = load("gpt_forward")
    ids = bigram_hash(torch.tensor(golden["tokens"]), golden["config"]["bigram_vocab_size"])
    assert ids.tolist() == golden["bigram_ids"]


def test_ids_are_in_range_and_need_two_tokens_only():
    tokens = torch.randint(0, 50257, (2000,))
    ids = bigram_hash(tokens, 640)
    assert 0 <= ids.min() and ids.max() <= 639 and (ids[1:] < 639).all()
    assert torch.equal(bigram_hash(tokens[5:], 640)[2:], ids[7:])
    assert bigram_hash(tokens[:0], 640).numel() == 0


def test_document_starts_take_the_last_row():
    tokens = torch.randint(0, 100, (50,))
    starts = torch.zeros(50, dtype=torch.bool)
    starts[[0, 20, 21]] = True
    ids = bigram_hash(tokens, 640, starts)
    assert (ids[starts] == 639).all()
    assert torch.equal(ids[20:], torch.cat([bigram_hash(tokens[20:], 640, starts[20:])]))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="tokens"):
        bigram_hash(torch.zeros(3), 10)
    with pytest.raises(ValueError, match="table_size"):
        bigram_hash(torch.zeros(3, dtype=torch.long), 1)
