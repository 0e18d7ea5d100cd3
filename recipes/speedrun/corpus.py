"""The default corpus: the Python standard library's source, tokenized with a BPE trained on it.

Every machine with Python has this text, so nothing is downloaded. Files are split into documents at
blank lines; every twentieth file goes to validation; documents are in a fixed random order. The shards and
the tokenizer are cached in the user's cache folder, under a name made of everything that determines them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from leanstep.cpu import cache_folder
from leanstep.extras import require
from recipes.speedrun.data import write_shard

BOS = "<|bos|>"
MAX_CHARS = 1200


@dataclass(frozen=True)
class Corpus:
    """Shards on disk, the tokenizer that made them, its vocabulary and its BOS token."""

    train_paths: list[Path]
    validation_paths: list[Path]
    tokenizer_path: Path
    vocab_size: int
    bos: int


def standard_library_files(root: Path | None = None) -> list[Path]:
    """Python files of the standard library in a fixed order, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts[:-1])]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def split_documents(text: str) -> Iterator[str]:
    """Split a file at blank lines into documents of about `MAX_CHARS`; a longer paragraph stays whole."""
    document = ""
    for paragraph in text.split("\n\n"):
        if document and len(document) + len(paragraph) > MAX_CHARS:
            yield document
            document = ""
        document += paragraph + "\n\n"
    if document.strip():
        yield document


def standard_library_corpus(
    vocab_size: int = 512, *, root: Path | None = None, folder: Path | None = None
) -> Corpus:
    """Build the corpus, or load it from the cache.

    Args:
        vocab_size: BPE size, BOS included; 257 (bytes and BOS) at least.
        root: another folder of Python files instead of the standard library.
        folder: cache folder; default `cache_folder()`.
    """
    if not 257 <= vocab_size <= 2**16:
        raise ValueError(f"vocab_size: expected 257..65536 (256 bytes and BOS at least), got {vocab_size}")
    require("the corpus", "train", "tokenizers")
    import tokenizers

    texts = [path.read_bytes() for path in standard_library_files(root)]
    if len(texts) < 2:
        raise ValueError(f"root: expected at least two Python files, got {len(texts)}")
    digest = hashlib.sha256(f"3 {vocab_size} {MAX_CHARS} {tokenizers.__version__}".encode())
    for raw in texts:
        digest.update(len(raw).to_bytes(8, "little") + raw)
    target = (folder or cache_folder()) / f"stdlib-{vocab_size}-{digest.hexdigest()[:16]}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Built aside and renamed: no process sees half a corpus.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".building-") as name:
            building = Path(name) / "corpus"
            _build(building, [raw.decode("utf-8", errors="replace") for raw in texts], vocab_size)
            with contextlib.suppress(OSError):  # another process was first; its corpus is the same
                building.rename(target)
    about = json.loads((target / "corpus.json").read_text(encoding="utf-8"))
    return Corpus(
        [target / "train.bin"],
        [target / "validation.bin"],
        target / "tokenizer.json",
        about["vocab_size"],
        about["bos"],
    )


def _build(folder: Path, texts: list[str], vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    # The held-out files alternate between both ends of the alphabet: one in twenty, at least one.
    every = min(20, len(texts))
    documents: dict[str, list[str]] = {"train": [], "validation": []}
    for i, text in enumerate(texts):
        documents["validation" if i % every == every - 1 else "train"] += split_documents(text)
    # Alphabetical order would show a model one subject at a time.
    for docs in documents.values():
        random.Random(0).shuffle(docs)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents["train"], trainer)
    bos = tokenizer.token_to_id(BOS)
    folder.mkdir()
    for split, docs in documents.items():
        ids: list[int] = []
        for encoding in tokenizer.encode_batch(docs):
            ids += [bos, *encoding.ids]
        write_shard(folder / f"{split}.bin", torch.tensor(ids, dtype=torch.int32))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "corpus.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size(), "bos": bos}))
