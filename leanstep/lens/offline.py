"""Train the controller outside the base model's step: from contexts on disk, or in the background.

The background worker never changes the parameters or their `.grad`: it differentiates a snapshot, and
`apply_ready` adds the finished gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map_only

from leanstep.lens.batch import LensBatch, Variant
from leanstep.lens.lens_config import LensConfig
from leanstep.lens.lens_objective import lens_loss

FORMAT = "leanstep-contexts-2"
LossFunction = Callable[[Tensor, LensBatch], Tensor]


@dataclass(frozen=True)
class CachedBatch:
    """A micro-batch from the cache: the batch, its sequence ids, and the tensors stored with them.

    `extras` has one tensor per sequence or None; `inputs` has the controller's arguments by name, [V, W, ...]
    right-padded with 0.

    Equivalent to, for the first record:
        cached = cache.batch([0], config)                        # cached.batch.pos: [V, W]
        same = LensBatch.from_variants(samples[:1], config, num_tokens=64, loss_dtype=torch.float32)
    """

    batch: LensBatch
    sequence_ids: list[int]
    extras: list[Tensor | None]
    inputs: dict[str, Tensor]


class ContextCache:
    """Append-only records: sequence id, variants with losses, optional tensors per sequence and per variant.

    Example:
        cache = ContextCache()
        for i, variants in enumerate(samples):
            cache.append(i, variants, num_tokens=64)
        for cached in cache.batches(2, config, seed=0, epoch=1):
            lens_loss(torch.zeros(cached.batch.pos.shape), cached.batch, config)

    Each variant takes positions [W] int32, lods [W] int8 and a float32 loss, in flat tensors with offsets. A
    batch from the cache has bitwise the same loss as the original batch with float32 losses.
    """

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._records)

    def append(
        self,
        sequence_id: int,
        variants: Sequence[Variant],
        num_tokens: int,
        *,
        extra: Tensor | None = None,
        inputs: Sequence[Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Add a sequence.

        Args:
            extra: one tensor for the sequence, such as its token ids; stored unchanged, on the host.
            inputs: per variant, the controller's arguments by name, [W, ...] each (embeddings, encodings).
        """
        if not variants:
            raise ValueError(f"variants: expected at least one for sequence {sequence_id}, got none")
        stored = _check_inputs(sequence_id, variants, inputs)
        losses = [torch.nan if v.loss is None else float(v.loss) for v in variants]
        self._records.append(
            {
                "id": int(sequence_id),
                "num_tokens": int(num_tokens),
                "positions": [torch.as_tensor(v.positions, device="cpu").to(torch.int32) for v in variants],
                "lods": [torch.as_tensor(v.lods, device="cpu").to(torch.int8) for v in variants],
                "losses": torch.tensor(losses, dtype=torch.float32),
                "baseline": torch.tensor([v.is_baseline for v in variants]),
                "extra": None if extra is None else extra.detach().cpu(),
                "inputs": stored,
            }
        )

    def batch(
        self, indices: Sequence[int], config: LensConfig, *, device: torch.device | str | None = None
    ) -> CachedBatch:
        """Return the records with these indices as one micro-batch."""
        records = [self._records[i] for i in indices]
        samples = []
        for r in records:
            rows = zip(r["positions"], r["lods"], r["losses"], r["baseline"].tolist(), strict=True)
            samples.append(
                [Variant(p, lod, None if loss.isnan() else loss, base) for p, lod, loss, base in rows]
            )
        batch = LensBatch.from_variants(
            samples,
            config,
            num_tokens=[r["num_tokens"] for r in records],
            device=device,
            loss_dtype=torch.float32,
        )
        rows = [row for r in records for row in r["inputs"]]
        if rows and len(rows) != batch.num_contexts:
            raise ValueError(
                f"indices: expected stored inputs for all {batch.num_contexts} variants or for none, "
                f"got {len(rows)}"
            )
        names = sorted(rows[0]) if rows else ()
        inputs = {name: pad_sequence([row[name] for row in rows], batch_first=True) for name in names}
        inputs = {name: tensor.to(device) if device else tensor for name, tensor in inputs.items()}
        return CachedBatch(batch, [r["id"] for r in records], [r["extra"] for r in records], inputs)

    def batches(
        self,
        batch_size: int,
        config: LensConfig,
        *,
        seed: int = 0,
        epoch: int = 0,
        device: torch.device | str | None = None,
    ) -> Iterator[CachedBatch]:
        """Yield one shuffled epoch; the order depends only on seed and epoch."""
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(self), generator=generator).tolist()
        for begin in range(0, len(order), batch_size):
            yield self.batch(order[begin : begin + batch_size], config, device=device)

    def save(self, path: str | Path) -> None:
        """Write flat tensors; the file contains no code and loads with `weights_only`."""
        records = self._records
        flat = [(p, lod) for r in records for p, lod in zip(r["positions"], r["lods"], strict=True)]
        extras = {str(i): r["extra"] for i, r in enumerate(records) if r["extra"] is not None}
        inputs = {str(i): r["inputs"] for i, r in enumerate(records) if r["inputs"]}
        empty = torch.zeros(0)
        torch.save(
            {
                "format": FORMAT,
                "ids": torch.tensor([r["id"] for r in records], dtype=torch.int64),
                "num_tokens": torch.tensor([r["num_tokens"] for r in records], dtype=torch.int64),
                "counts": torch.tensor([len(r["positions"]) for r in records], dtype=torch.int64),
                "lengths": torch.tensor([len(p) for p, _ in flat], dtype=torch.int64),
                "positions": torch.cat([p for p, _ in flat]) if flat else empty.to(torch.int32),
                "lods": torch.cat([lod for _, lod in flat]) if flat else empty.to(torch.int8),
                "losses": torch.cat([r["losses"] for r in records]) if records else empty,
                "baseline": torch.cat([r["baseline"] for r in records]) if records else empty.bool(),
                "extras": extras,
                "inputs": inputs,
            },
            path,
        )

    @classmethod
    def load(cls, path: str | Path) -> ContextCache:
        """Read a saved cache; only tensors are accepted."""
        data = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"path: {path} is not a context cache ({FORMAT})")
        cache = cls()
        lengths, counts = data["lengths"].tolist(), data["counts"].tolist()
        positions, lods = data["positions"].split(lengths), data["lods"].split(lengths)
        losses, baseline = data["losses"].split(counts), data["baseline"].split(counts)
        first = 0
        for i, (sequence_id, num_tokens, count) in enumerate(
            zip(data["ids"].tolist(), data["num_tokens"].tolist(), counts, strict=True)
        ):
            cache._records.append(
                {
                    "id": sequence_id,
                    "num_tokens": num_tokens,
                    "positions": list(positions[first : first + count]),
                    "lods": list(lods[first : first + count]),
                    "losses": losses[i],
                    "baseline": baseline[i],
                    "extra": data["extras"].get(str(i)),
                    "inputs": data["inputs"].get(str(i), []),
                }
            )
            first += count
        return cache


def _check_inputs(
    sequence_id: int, variants: Sequence[Variant], inputs: Sequence[Mapping[str, Tensor]] | None
) -> list[dict[str, Tensor]]:
    """Check the inputs of each variant and return them on the host; empty for None."""
    if inputs is None:
        return []
    if len(inputs) != len(variants):
        raise ValueError(f"inputs: sequence {sequence_id} has {len(variants)} variants, got {len(inputs)}")
    for variant, row in zip(variants, inputs, strict=True):
        for name, tensor in row.items():
            if set(row) != set(inputs[0]) or tensor.shape[:1] != (len(variant.positions),):
                raise ValueError(
                    f"inputs: expected the names {sorted(inputs[0])} with {len(variant.positions)} rows, "
                    f"got {name} of shape {tuple(tensor.shape)}"
                )
    return [{name: tensor.detach().cpu() for name, tensor in row.items()} for row in inputs]


@dataclass
class AsyncHandle:
    """A loss in flight: `future` returns (0-d loss, gradients by parameter name, CUDA event or None).

    Example:
        handle = background.submit(batch, inputs)
        ready = handle.done()
    """

    future: Future
    step: int

    def done(self) -> bool:
        return self.future.done()


class AsyncLens:
    """Computes LensNet's gradients in the background.

    Example:
        background = AsyncLens(lensnet, LensConfig())
        for batch in loader:
            background.submit(batch, inputs)        # returns immediately
            ...                                     # the base model's step
            if background.apply_ready(lens_optimizer):
                lens_optimizer.step()
            lens_optimizer.zero_grad()
        background.close()

    Args:
        controller: LensNet; must have its own optimizer (or its own parameter groups).
        config: configuration of the objective; or `loss`, a function (scores, batch) -> scalar.
        max_staleness: in calls of `apply_ready`. 0 waits for every result, which equals the synchronous run.
        on_stale: `wait` for a result that is late, or `drop` it (counted in `dropped`).
        device: a second device for the computation; None = the controller's device, on a side stream if it
            is a GPU.
    """

    def __init__(
        self,
        controller: nn.Module,
        config: LensConfig | None = None,
        *,
        loss: LossFunction | None = None,
        max_staleness: int = 1,
        on_stale: str = "wait",
        device: torch.device | str | None = None,
    ) -> None:
        if (config is None) == (loss is None):
            raise ValueError("config, loss: expected exactly one of them")
        if max_staleness < 0:
            raise ValueError(f"max_staleness: expected at least 0, got {max_staleness}")
        if on_stale not in ("wait", "drop"):
            raise ValueError(f"on_stale: expected wait or drop, got {on_stale!r}")
        if on_stale == "drop" and max_staleness == 0:
            raise ValueError(
                "max_staleness: expected at least 1 with on_stale='drop', got 0: drops all results"
            )
        self.controller, self.max_staleness, self.on_stale = controller, max_staleness, on_stale
        self._loss: LossFunction = (
            loss if loss is not None else lambda scores, batch: _objective(scores, batch, config)
        )
        # A functional call swaps the module's parameters while it runs, so it needs a copy that the main
        # thread does not use.
        self._shadow = copy.deepcopy(controller).requires_grad_(False)
        self._device = next(controller.parameters()).device
        self._worker_device = torch.device(device) if device is not None else self._device
        self._stream = torch.cuda.Stream(self._worker_device) if self._worker_device.type == "cuda" else None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="async-lens")
        self._pending: list[AsyncHandle] = []
        self._step = 0
        self._closed = False
        self.applied = 0
        self.dropped = 0
        self.last_loss: Tensor | None = None

    def submit(
        self, batch: LensBatch, inputs: tuple[Any, ...] = (), keywords: Mapping[str, Any] | None = None
    ) -> AsyncHandle:
        """Start a micro-batch with LensNet's arguments and the current parameters and inputs."""
        if self._closed:
            raise RuntimeError("submit: this AsyncLens is closed")
        with torch.no_grad():
            snapshot = {name: p.detach().clone() for name, p in self.controller.named_parameters()}
            buffers = {name: b.detach().clone() for name, b in self.controller.named_buffers()}
        arguments = (inputs, dict(keywords or {}))
        arguments = tree_map_only(Tensor, torch.Tensor.detach, arguments)
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()
            # The current device may differ from the controller's.
            ready.record(torch.cuda.current_stream(self._device))
        future = self._worker.submit(self._run, snapshot, buffers, batch, arguments, ready)
        handle = AsyncHandle(future, self._step)
        self._pending.append(handle)
        return handle

    def _run(
        self,
        snapshot: dict[str, Tensor],
        buffers: dict[str, Tensor],
        batch: LensBatch,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        ready: torch.cuda.Event | None,
    ) -> tuple[Tensor, dict[str, Tensor], torch.cuda.Event | None]:
        if self._stream is None:
            return (*self._differentiate(snapshot, buffers, batch, arguments), None)
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            # The allocator must not reuse this memory before the side stream has read it. Tensors on another
            # device are copied on that device's current stream.
            for tensor in tensors_in((snapshot, buffers, batch, arguments)):
                if tensor.is_cuda:
                    near = tensor.device == self._worker_device
                    tensor.record_stream(self._stream if near else torch.cuda.current_stream(tensor.device))
            loss, grads = self._differentiate(snapshot, buffers, batch, arguments)
            finished = torch.cuda.Event()
            finished.record()
        return loss, grads, finished

    def _differentiate(
        self,
        snapshot: dict[str, Tensor],
        buffers: dict[str, Tensor],
        batch: LensBatch,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self._worker_device != self._device:
            snapshot = {name: t.to(self._worker_device) for name, t in snapshot.items()}
            buffers = {name: t.to(self._worker_device) for name, t in buffers.items()}
            arguments = tree_map_only(Tensor, lambda x: x.to(self._worker_device), arguments)
            batch = batch.to(self._worker_device)
        leaves = {name: t.requires_grad_() for name, t in snapshot.items()}
        with torch.enable_grad():
            scores = functional_call(self._shadow, {**leaves, **buffers}, *arguments)
            loss = self._loss(scores, batch)
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        named = {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}
        return loss.detach(), named

    def apply_ready(self, optimizer: torch.optim.Optimizer) -> int:
        """Add finished gradients to the controller's `.grad`; return the number of results added.

        Waits for or drops results that are `max_staleness` calls old. Raises exceptions of the worker.
        """
        self._check_optimizer(optimizer)
        added = 0
        while self._pending:
            handle = self._pending[0]
            overdue = self._step - handle.step >= self.max_staleness
            if not handle.done() and not overdue:
                break
            self._pending.pop(0)
            if not handle.done() and self.on_stale == "drop":
                handle.future.cancel()
                self.dropped += 1
                continue
            loss, grads, finished = handle.future.result()
            if finished is not None:
                stream = torch.cuda.current_stream(self._worker_device)
                stream.wait_event(finished)
                # Allocated on the side stream and read on this one: record the use before the caller frees
                # them.
                for tensor in (loss, *grads.values()):
                    tensor.record_stream(stream)
            parameters = dict(self.controller.named_parameters())
            for name, grad in grads.items():
                parameter, grad = parameters[name], grad.to(self._device)
                parameter.grad = grad if parameter.grad is None else parameter.grad + grad
            self.last_loss = loss
            self.applied += 1
            added += 1
        self._step += 1
        return added

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        mine = {id(p) for p in self.controller.parameters()}
        seen: set[int] = set()
        for number, group in enumerate(optimizer.param_groups):
            inside = {id(p) for p in group["params"]}
            if inside & mine and inside - mine:
                raise ValueError(
                    f"optimizer: group {number} mixes the controller's parameters with others; use a "
                    "separate optimizer or group for the controller, because its gradients arrive late"
                )
            seen |= inside & mine
        if seen != mine:
            raise ValueError(
                f"optimizer: expected all {len(mine)} parameters of the controller, got {len(seen)} of them"
            )

    def close(self) -> None:
        """Wait for the worker and shut it down; results that were not applied are discarded."""
        self._closed = True
        self._worker.shutdown(wait=True)
        self._pending.clear()

    def __enter__(self) -> AsyncLens:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor inside nested tuples, lists, dictionaries and batches."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def _objective(scores: Tensor, batch: LensBatch, config: LensConfig | None) -> Tensor:
    assert config is not None
    return lens_loss(scores, batch, config).loss
