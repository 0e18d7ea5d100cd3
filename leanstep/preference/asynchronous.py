"""The controller's loss beside the main step: a worker thread, a side stream, or a second device.

The worker never touches the live parameters or their `.grad`: it differentiates a snapshot, and the finished
gradients are added at one defined point, `apply_ready`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .batch import LensBatch
from .config import LensConfig
from .loss import lens_loss

LossFunction = Callable[[Tensor, LensBatch], Tensor]


@dataclass
class AsyncHandle:
    """A loss in flight."""

    future: Future
    step: int

    def done(self) -> bool:
        return self.future.done()


class AsyncLens:
    """Computes LensNet's gradients in the background.

    Example:
        background = AsyncLens(lensnet, LensConfig())
        for batch in loader:
            background.submit(batch, inputs)        # returns at once
            ...                                     # the base model's own step
            if background.apply_ready(lens_optimizer):
                lens_optimizer.step()
            lens_optimizer.zero_grad()
        background.close()

    Args:
        controller: LensNet; must have its own optimizer (or its own parameter groups).
        config: of the objective; or `loss`, a function (scores, batch) -> scalar.
        max_staleness: in calls of `apply_ready`. 0: every result is waited for, which equals the
            synchronous run.
        on_stale: what happens to a result that is not there in time: `wait` for it, or `drop` it (counted
            in `dropped`).
        device: a second device for the computation; None = the controller's own, on a side stream if it is
            a GPU.
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
            raise ValueError("max_staleness: 0 with on_stale='drop' would drop every result, expected wait")
        self.controller, self.max_staleness, self.on_stale = controller, max_staleness, on_stale
        self._loss: LossFunction = (
            loss if loss is not None else lambda scores, batch: _objective(scores, batch, config)
        )
        # A functional call swaps the module's parameters while it runs: never on the one the main thread
        # uses.
        self._shadow = copy.deepcopy(controller).requires_grad_(False)
        self._home = next(controller.parameters()).device
        self._away = torch.device(device) if device is not None else self._home
        self._stream = torch.cuda.Stream(self._away) if self._away.type == "cuda" else None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="async-lens")
        self._pending: list[AsyncHandle] = []
        self._step = 0
        self._closed = False
        self.applied = 0
        self.dropped = 0
        self.last_loss: Tensor | None = None

    def submit(self, batch: LensBatch, inputs: tuple[Any, ...]) -> AsyncHandle:
        """Start on a micro-batch with LensNet's arguments; parameters and inputs as they are now."""
        if self._closed:
            raise RuntimeError("submit: this AsyncLens is closed")
        with torch.no_grad():
            snapshot = {name: p.detach().clone() for name, p in self.controller.named_parameters()}
            buffers = {name: b.detach().clone() for name, b in self.controller.named_buffers()}
        kept = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
        ready = None
        if self._home.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        future = self._worker.submit(self._run, snapshot, buffers, batch, kept, ready)
        handle = AsyncHandle(future, self._step)
        self._pending.append(handle)
        return handle

    def _run(
        self,
        snapshot: dict[str, Tensor],
        buffers: dict[str, Tensor],
        batch: LensBatch,
        inputs: tuple[Any, ...],
        ready: torch.cuda.Event | None,
    ) -> tuple[Tensor, dict[str, Tensor], torch.cuda.Event | None]:
        if self._stream is None:
            return (*self._differentiate(snapshot, buffers, batch, inputs), None)
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            # The allocator must not hand this memory out again before the side stream has read it. Tensors of
            # another device are copied on that device's current stream.
            for tensor in tensors_in((snapshot, buffers, batch, inputs)):
                if tensor.is_cuda:
                    near = tensor.device == self._away
                    tensor.record_stream(self._stream if near else torch.cuda.current_stream(tensor.device))
            loss, grads = self._differentiate(snapshot, buffers, batch, inputs)
            finished = torch.cuda.Event()
            finished.record()
        return loss, grads, finished

    def _differentiate(
        self,
        snapshot: dict[str, Tensor],
        buffers: dict[str, Tensor],
        batch: LensBatch,
        inputs: tuple[Any, ...],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self._away != self._home:
            snapshot = {name: t.to(self._away) for name, t in snapshot.items()}
            buffers = {name: t.to(self._away) for name, t in buffers.items()}
            inputs = tuple(x.to(self._away) if isinstance(x, Tensor) else x for x in inputs)
            batch = batch.to(self._away)
        leaves = {name: t.requires_grad_() for name, t in snapshot.items()}
        with torch.enable_grad():
            scores = functional_call(self._shadow, {**leaves, **buffers}, inputs)
            loss = self._loss(scores, batch)
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        named = {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}
        return loss.detach(), named

    def apply_ready(self, optimizer: torch.optim.Optimizer) -> int:
        """Add finished gradients to the controller's `.grad`; returns how many results were added.

        Results that are `max_staleness` calls old are waited for or dropped. An exception of the worker is
        raised here.
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
                stream = torch.cuda.current_stream(self._away)
                stream.wait_event(finished)
                # Made on the side stream and read here: the caller may drop them while this stream is behind.
                for tensor in (loss, *grads.values()):
                    tensor.record_stream(stream)
            parameters = dict(self.controller.named_parameters())
            for name, grad in grads.items():
                parameter, grad = parameters[name], grad.to(self._home)
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
                raise ValueError(f"optimizer: group {number} mixes the controller's parameters with others")
            seen |= inside & mine
        if seen != mine:
            raise ValueError(f"optimizer: holds {len(seen)} of the controller's {len(mine)} parameters")

    def close(self) -> None:
        """Wait for the worker and let it go; results not applied are discarded."""
        self._closed = True
        self._worker.shutdown(wait=True)
        self._pending.clear()

    def __enter__(self) -> AsyncLens:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor inside nested tuples, lists, dictionaries and batches."""
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
