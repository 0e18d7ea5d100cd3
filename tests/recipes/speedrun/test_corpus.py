from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipes.speedrun.corpus import standard_library_corpus, standard_library_files
from recipes.speedrun.data import DocumentLoader, read_shard

Tokenizer = pytest.importorskip("tokenizers").Tokenizer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the standard library."""
    root = tmp_path_factory.mktemp("source")
    for path in standard_library_files()[:30]:
        (root / path.name).write_bytes(path.read_bytes())
    return root


@pytest.fixture(scope="module")
def corpus(source: Path, tmp_path_factory: pytest.TempPathFactory):
    return standard_library_corpus(300, root=source, folder=tmp_path_factory.mktemp("cache"))


def test_tokens_decode_to_python(corpus):
    tokens = read_shard(corpus.train_paths[0])
    assert corpus.vocab_size == 300 and tokens.numel() > 10_000
    assert int(tokens.long().max()) < 300 and tokens[0] == corpus.bos
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_path))
    text = tokenizer.decode(tokens.long().tolist(), skip_special_tokens=True)
    assert "def " in text and "import " in text and "\ufffd" not in text
    assert read_shard(corpus.validation_paths[0]).numel() > 500
    batch = DocumentLoader(corpus.train_paths, 512, 128, bos=corpus.bos).next_batch()
    assert batch.inputs.shape == (512,)


def test_second_call_reads_the_cache_and_rebuilding_is_exact(corpus, source: Path, tmp_path: Path):
    folder = corpus.tokenizer_path.parent.parent
    stamp = corpus.train_paths[0].stat().st_mtime_ns
    again = standard_library_corpus(300, root=source, folder=folder)
    assert again == corpus and again.train_paths[0].stat().st_mtime_ns == stamp
    fresh = standard_library_corpus(300, root=source, folder=tmp_path)
    assert torch.equal(read_shard(fresh.train_paths[0]).long(), read_shard(corpus.train_paths[0]).long())
    assert not list(tmp_path.glob(".building-*"))


def test_bad_arguments_are_named(tmp_path: Path):
    with pytest.raises(ValueError, match="vocab_size"):
        standard_library_corpus(100, folder=tmp_path)
    with pytest.raises(ValueError, match="root"):
        standard_library_corpus(300, root=tmp_path, folder=tmp_path)
