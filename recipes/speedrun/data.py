"""Token shards, the batches read from them, and the hash of bigrams.

A `.bin` shard is 256 little-endian int32 of header (magic, version, token count, zeros), then uint16
tokens. Every document starts with the BOS token. Training batches hold whole documents, cut only at the
sequence limit and at the end of the batch; validation batches are contiguous, so that losses compare
between runs.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAGIC = 20240520
VERSION = 1
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS


@dataclass(frozen=True)
class Batch:
    """One packed micro-batch of one rank.

    Args:
        inputs, targets: [T] int64; target t is the token after input t in the buffer.
        cu_seqlens: [documents + 1] int32 cumulative document lengths, from 0 to T, padded with T to a
            length that depends on T only (`padded_boundaries`), if the documents are not too many.
    """

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor


def write_shard(path: str | Path, tokens: Tensor) -> None:
    """Write tokens [N] (integers within 0..65535) as a shard."""
    if tokens.dim() != 1 or tokens.is_floating_point():
        raise ValueError(f"tokens: expected [N] integers, got {tokens.dtype} {tuple(tokens.shape)}")
    wide = tokens.to(torch.int64)
    if wide.numel() and not (0 <= int(wide.min()) and int(wide.max()) < 2**16):
        raise ValueError(f"tokens: expected values within 0..65535, got {int(wide.min())}..{int(wide.max())}")
    header = torch.zeros(HEADER_INTS, dtype=torch.int32)
    header[:3] = torch.tensor([MAGIC, VERSION, wide.numel()], dtype=torch.int32)
    with Path(path).open("wb") as file:
        file.write(_bytes(header))
        file.write(_bytes(wide.to(torch.uint16)))


def _bytes(x: Tensor) -> bytes:
    x = x.contiguous()
    return ctypes.string_at(x.data_ptr(), x.nbytes) if x.nbytes else b""


def read_shard(path: str | Path) -> Tensor:
    """Return the tokens [N] uint16 of a shard, memory-mapped: pages are loaded when they are read.

    Raises ValueError for a file that is not a shard, has another version, is truncated or holds no tokens.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"shard: expected a token shard, no file {path}")
    size = path.stat().st_size
    if size < HEADER_BYTES:
        raise ValueError(f"shard {path}: expected a header of {HEADER_BYTES} bytes, got a file of {size}")
    mapped = torch.from_file(str(path), shared=False, size=size // 2, dtype=torch.uint16)
    magic, version, count = mapped[:6].view(torch.int32).tolist()
    if magic != MAGIC:
        raise ValueError(f"shard {path}: expected magic number {MAGIC}, got {magic}; not a token shard")
    if version != VERSION:
        raise ValueError(f"shard {path}: expected version {VERSION}, got {version}")
    if count <= 0:
        raise ValueError(f"shard {path}: expected at least one token, got {count} in the header")
    held = (size - HEADER_BYTES) / 2
    if held != count:
        raise ValueError(
            f"shard {path}: the header says {count} tokens, the file holds {held:g}; truncated or corrupt"
        )
    return mapped[HEADER_BYTES // 2 :]


def document_starts(tokens: Tensor, bos: int) -> Tensor:
    """Return positions [documents] of the BOS tokens in uint16 tokens [N]."""
    # uint16 has few operations in torch; comparing the same bits as int16 is equivalent.
    return (tokens.view(torch.int16) == (bos if bos < 2**15 else bos - 2**16)).nonzero()[:, 0]


def padded_boundaries(num_tokens: int) -> int:
    """Return the length of `cu_seqlens` for a batch of this many tokens: kernels need fixed shapes."""
    return max(-(-(num_tokens // 300) // 128), 1) * 128


def padded(cu_seqlens: Tensor) -> Tensor:
    """Add empty documents at the end."""
    length = int(cu_seqlens[-1])
    missing = max(padded_boundaries(length) - len(cu_seqlens), -len(cu_seqlens) % 128)
    return torch.cat([cu_seqlens, cu_seqlens.new_full((missing,), length)])


def bigram_hash(tokens: Tensor, table_size: int) -> Tensor:
    """Return row ids [T] of the bigram table for tokens [T].

    Position 0 takes the last row. Position 1 takes the last row's number for its predecessor, as the record
    does (it overwrites slot 0 before hashing). Document boundaries are ignored.

    Equivalent to:
        last = table_size - 1
        tokens32 = tokens.to(torch.int32)
        previous = torch.cat([torch.full((2,), last, dtype=torch.int32), tokens32[1:-1]])[: len(tokens)]
        ids = ((36313 * tokens32) ^ (27191 * previous)).long().remainder(last)
        ids[:1] = last
    """
    last = table_size - 1
    current = tokens.to(torch.int32)
    previous = torch.cat([current.new_full((1,), last), current[:-1]])[: len(current)]
    previous[1:2] = last
    ids = torch.bitwise_xor(36313 * current, 27191 * previous).long().remainder(last)  # int32 wraps around
    ids[:1] = last
    return ids


def to_device(values: Tensor, device: torch.device | str) -> Tensor:
    """Copy from the host without a host sync: a copy from pageable memory would wait."""
    if torch.device(device).type == "cuda" and not values.is_cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class _Shard:
    """A mapped shard and its document starts."""

    def __init__(self, path: str | Path, bos: int) -> None:
        self.path = Path(path)
        self.tokens = read_shard(path)
        self.starts = document_starts(self.tokens, bos).tolist()
        if not self.starts:
            raise ValueError(
                f"shard {path}: no document starts (token {bos}) in {self.tokens.numel()} tokens"
            )

    def spans(
        self, document: int, num_tokens: int, max_seq_len: int
    ) -> tuple[list[tuple[int, int]], int] | None:
        """Return spans of num_tokens + 1 tokens from `document`, and the next document; None at the tail."""
        spans, missing = [], num_tokens + 1
        while missing > 0:
            if document >= len(self.starts):
                return None
            start = self.starts[document]
            following = self.starts[document + 1] if document + 1 < len(self.starts) else self.tokens.numel()
            end = min(following, start + max_seq_len, start + missing)
            spans.append((start, end))
            missing -= end - start
            document += 1
        return spans, document


class DocumentLoader:
    """Document-aligned training batches from shards, in file order, for one rank of several.

    Each batch takes documents for rank 0, then rank 1, and so on; the rest of a truncated document is
    dropped. A shard's tail that cannot fill every rank is dropped too. The next shard is read in a thread
    while this one is used. The order depends on the files and sizes only.

    Args:
        paths: shards, in order.
        num_tokens: tokens per batch over all ranks.
        max_seq_len: longest document span.
        bos: the token that starts a document.
        rank, world_size: which share of every batch this loader returns.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        num_tokens: int,
        max_seq_len: int,
        *,
        bos: int = 50256,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not paths:
            raise ValueError("paths: expected at least one shard, got none")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank: expected 0 <= rank < world_size = {world_size}, got {rank}")
        self.paths = [Path(p) for p in paths]
        self.bos, self.rank, self.world_size = bos, rank, world_size
        self.resize(num_tokens, max_seq_len)
        self.epoch = self.shard_index = self.document = 0
        self._shard = _Shard(self.paths[0], bos)
        self._ahead: _ReadAhead | None = None

    def resize(self, num_tokens: int, max_seq_len: int) -> None:
        """Set batch size (over all ranks) and sequence limit from the next batch on."""
        if num_tokens < self.world_size or num_tokens % self.world_size:
            raise ValueError(
                f"num_tokens: expected a positive multiple of world_size = {self.world_size}, "
                f"got {num_tokens}"
            )
        if max_seq_len < 1:
            raise ValueError(f"max_seq_len: expected at least 1, got {max_seq_len}")
        self.num_tokens, self.max_seq_len = num_tokens, max_seq_len

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self.next_batch()

    def next_batch(self) -> Batch:
        """Return this rank's share of the next batch."""
        local = self.num_tokens // self.world_size
        spans = self._rank_spans(local)
        tried = 0
        while spans is None:
            if tried == len(self.paths):
                raise ValueError(
                    f"num_tokens: no shard can fill {self.world_size} x {local} tokens with documents of up "
                    f"to {self.max_seq_len} tokens; use a smaller batch or larger shards"
                )
            self._next_shard()
            spans = self._rank_spans(local)
            tried += 1
        if self._ahead is None and len(self.paths) > 1:
            self._ahead = _ReadAhead(self.paths[(self.shard_index + 1) % len(self.paths)], self.bos)
        tokens = self._shard.tokens
        buffer = torch.cat([tokens[a:b] for a, b in spans]).to(torch.int64)
        lengths = torch.tensor([b - a for a, b in spans])
        lengths[-1] -= 1
        cu_seqlens = torch.zeros(len(spans) + 1, dtype=torch.int32)
        cu_seqlens[1:] = lengths.cumsum(0)
        return Batch(buffer[:-1], buffer[1:], padded(cu_seqlens))

    def _rank_spans(self, local: int) -> list[tuple[int, int]] | None:
        """Return spans of this rank and move past the spans of all ranks. None at the shard's tail."""
        document, mine = self.document, []
        for rank in range(self.world_size):
            taken = self._shard.spans(document, local, self.max_seq_len)
            if taken is None:
                return None
            spans, document = taken
            if rank == self.rank:
                mine = spans
        self.document = document
        return mine

    def _next_shard(self) -> None:
        following = self.shard_index + 1
        if following == len(self.paths):
            following = 0
            self.epoch += 1
        ahead, self._ahead = self._ahead, None
        if len(self.paths) > 1:
            self._shard = ahead.result() if ahead else _Shard(self.paths[following], self.bos)
        self.shard_index, self.document = following, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch; JSON-able."""
        return {
            "epoch": self.epoch,
            "shard_index": self.shard_index,
            "shard": self.paths[self.shard_index].name,
            "document": self.document,
            "num_tokens": self.num_tokens,
            "max_seq_len": self.max_seq_len,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; the shards must be the same."""
        index = state["shard_index"]
        if not 0 <= index < len(self.paths) or self.paths[index].name != state["shard"]:
            raise ValueError(
                f"state: expected shard {index} to be {state['shard']!r}, got {[p.name for p in self.paths]}"
            )
        self._ahead = None
        shard = _Shard(self.paths[index], self.bos)
        if state["document"] > len(shard.starts):
            raise ValueError(f"state: document {state['document']} is past the end of {shard.path}")
        self._shard = shard
        self.epoch, self.shard_index, self.document = state["epoch"], index, state["document"]
        self.resize(state["num_tokens"], state["max_seq_len"])


class _ReadAhead:
    """Opens a shard in a thread; `result` raises its errors."""

    def __init__(self, path: Path, bos: int) -> None:
        self._path, self._bos = path, bos
        self._shard: _Shard | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="leanstep-shard", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._shard = _Shard(self._path, self._bos)
        except Exception as error:
            self._error = error

    def result(self) -> _Shard:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._shard is not None
        return self._shard


def validation_batches(
    paths: Sequence[str | Path], num_tokens: int, total_tokens: int | None = None, *, bos: int = 50256
) -> Iterator[Batch]:
    """Yield contiguous batches over the first `total_tokens` (None: all that fit) of the shards.

    Documents are found by BOS, so a batch that starts with one begins with an empty document (0, 0). A
    shard's tail that cannot fill a batch is skipped.
    """
    if total_tokens is not None and total_tokens % num_tokens:
        raise ValueError(
            f"total_tokens: expected a multiple of num_tokens = {num_tokens}, got {total_tokens}"
        )
    yielded = 0
    for path in paths:
        tokens = read_shard(path)
        for start in range(0, tokens.numel() - num_tokens, num_tokens):
            if yielded == total_tokens:
                return
            buffer = tokens[start : start + num_tokens + 1].to(torch.int64)
            starts = (buffer[:-1] == bos).nonzero()[:, 0].to(torch.int32)
            bounds = torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), num_tokens)])
            yield Batch(buffer[:-1], buffer[1:], padded(bounds))
            yielded += num_tokens
    if total_tokens is not None and yielded < total_tokens:
        raise ValueError(
            f"total_tokens: expected {total_tokens}, but the shards hold {yielded} in batches of {num_tokens}"
        )
