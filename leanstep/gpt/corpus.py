"""The default corpus: the Python standard library's source, tokenised with a BPE trained on it.

Every machine with Python has this text, so nothing is downloaded. Files are split into documents at
blank lines; every twentieth file goes to validation; documents are in a fixed random order. The shards and
the tokenizer are cached in the user's cache folder (`LEANSTEP_CACHE` overrides it), under a name made of
everything that determines them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import socket
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from leanstep.cpu import cache_folder
from leanstep.extras import require
from leanstep.gpt.data import write_shard

BOS = "<|bos|>"
FORMAT = 2
# Files of a corpus beside corpus.json, and the numbers in it.
_FILES = ("train.bin", "validation.bin", "tokenizer.json")
_COUNTS = ("vocab_size", "bos", "train_tokens", "validation_tokens")


@dataclass(frozen=True)
class Corpus:
    """Shards on disk and the tokenizer that made them."""

    train_paths: tuple[Path, ...]
    validation_paths: tuple[Path, ...]
    tokenizer_path: Path
    vocab_size: int
    bos: int
    train_tokens: int
    validation_tokens: int

    def tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.tokenizer_path))


def standard_library_files(root: Path | None = None) -> list[Path]:
    """Python files of the standard library in a fixed order, without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files = [path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts[:-1])]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def split_documents(text: str, max_chars: int) -> Iterator[str]:
    """Split a file at blank lines into documents of about `max_chars`; a longer paragraph stays whole."""
    document = ""
    for paragraph in text.split("\n\n"):
        if document and len(document) + len(paragraph) > max_chars:
            yield document
            document = ""
        document += paragraph + "\n\n"
    if document.strip():
        yield document


def standard_library_corpus(
    vocab_size: int = 512,
    *,
    max_chars: int = 1200,
    max_bytes: int | None = None,
    root: Path | None = None,
    folder: Path | None = None,
) -> Corpus:
    """Build the corpus, or load it from the cache.

    Args:
        vocab_size: BPE size, BOS included; 257 (bytes and BOS) at least.
        max_chars: target document length.
        max_bytes: stop reading files after this many bytes; None reads all.
        root: another folder of Python files instead of the standard library.
        folder: cache folder; default `cache_folder()`.
    """
    if not 257 <= vocab_size <= 2**16:
        raise ValueError(f"vocab_size: expected 257..65536 (256 bytes and BOS at least), got {vocab_size}")
    require("the corpus", "train", "tokenizers")
    import tokenizers

    texts, digest = _read(standard_library_files(root), max_bytes)
    settings = {
        "format": FORMAT,
        "vocab_size": vocab_size,
        "max_chars": max_chars,
        "text": digest,
        "tokenizers": tokenizers.__version__,
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    target = (folder or cache_folder()) / f"stdlib-{vocab_size}-{key}"
    about = _intact(target)
    if about is None:
        # Missing or damaged.
        shutil.rmtree(target, ignore_errors=True)
        _build(target, texts, vocab_size, max_chars)
        about = _intact(target)
        if about is None:
            raise OSError(f"corpus: {target} was built but cannot be read back")
    return Corpus(
        (target / "train.bin",),
        (target / "validation.bin",),
        target / "tokenizer.json",
        about["vocab_size"],
        about["bos"],
        about["train_tokens"],
        about["validation_tokens"],
    )


def _intact(target: Path) -> dict[str, Any] | None:
    """Return the content of corpus.json if the files beside it match their digests; else None."""
    try:
        about = json.loads((target / "corpus.json").read_text(encoding="utf-8"))
        if any(type(about[name]) is not int for name in _COUNTS) or set(about["files"]) != set(_FILES):
            return None
        if any(_digest(target / name) != about["files"][name] for name in _FILES):
            return None
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return None
    return about


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _remove_leftovers(folder: Path) -> None:
    """Delete leftovers of killed builds: on this host if the process has ended, else after a day."""
    for path in folder.glob(".building-*"):
        host, _, pid = path.name.removeprefix(".building-").rpartition("-")[0].rpartition("-")
        with contextlib.suppress(OSError):
            is_old = time.time() - path.stat().st_mtime > 24 * 3600
            if is_old or (host == socket.gethostname() and pid.isdigit() and not _runs(int(pid))):
                shutil.rmtree(path, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _read(files: list[Path], max_bytes: int | None) -> tuple[list[str], str]:
    texts, size, digest = [], 0, hashlib.sha256()
    for path in files:
        if max_bytes is not None and size >= max_bytes:
            break
        raw = path.read_bytes()
        size += len(raw)
        digest.update(len(raw).to_bytes(8, "little") + raw)
        texts.append(raw.decode("utf-8", errors="replace"))
    if len(texts) < 2:
        raise ValueError(f"root: expected at least two Python files, got {len(texts)}")
    return texts, digest.hexdigest()


def _build(target: Path, texts: list[str], vocab_size: int, max_chars: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    # Alternate between both ends of the alphabet: hold out one file in twenty, at least one.
    every = min(20, len(texts))
    held_out = [i % every == every - 1 for i in range(len(texts))]
    documents = {
        split: [
            doc
            for text, out in zip(texts, held_out, strict=True)
            if out == wanted
            for doc in split_documents(text, max_chars)
        ]
        for split, wanted in (("train", False), ("validation", True))
    }
    # Alphabetical order would show a model one subject at a time (and validation the first few files only).
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
    assert bos is not None, "the trainer was given it as a special token"
    target.parent.mkdir(parents=True, exist_ok=True)
    # Built aside and renamed: another process never sees half a corpus.
    _remove_leftovers(target.parent)
    mine = f".building-{socket.gethostname()}-{os.getpid()}-"
    building = Path(tempfile.mkdtemp(dir=target.parent, prefix=mine))
    try:
        counts = {}
        for split, docs in documents.items():
            ids: list[int] = []
            for encoding in tokenizer.encode_batch(docs):
                ids.append(bos)
                ids.extend(encoding.ids)
            write_shard(building / f"{split}.bin", torch.tensor(ids, dtype=torch.int32))
            counts[f"{split}_tokens"] = len(ids)
        tokenizer.save(str(building / "tokenizer.json"))
        digests = {name: _digest(building / name) for name in _FILES}
        about = {"vocab_size": tokenizer.get_vocab_size(), "bos": bos, **counts, "files": digests}
        (building / "corpus.json").write_text(json.dumps(about))
        try:
            building.rename(target)
        except OSError:
            # Another process finished first; its corpus is the same.
            if _intact(target) is None:
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
