"""Asynchronous training: the controller's gradients are computed in the background and applied later.

The worker never changes the parameters or their `.grad`: it differentiates a snapshot, and `apply_ready` adds
the finished gradients at a point that the training loop chooses.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from leanstep.lens.batch import LensBatch


class AsyncLens:
    """Computes LensNet's gradients on a worker thread: on a side stream of its GPU, or on a second device.

    Example:
        background = AsyncLens(lensnet, lambda scores, batch: lens_loss(scores, batch, config).loss)
        for batch in loader:
            background.submit(batch, inputs)        # returns immediately
            ...                                     # the base model's step
            if background.apply_ready(lens_optimizer):
                lens_optimizer.step()
            lens_optimizer.zero_grad()
        background.close()

    Args:
        controller: LensNet; must have its own optimizer (or its own parameter groups).
        loss: a function (scores [V, W], batch) -> scalar.
        max_staleness: in calls of `apply_ready`; a result this late is waited for. 0 equals the synchronous
            run.
        device: a second device for the computation; None = the controller's device.
    """

    def __init__(
        self,
        controller: nn.Module,
        loss: Callable[[Tensor, LensBatch], Tensor],
        *,
        max_staleness: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        if max_staleness < 0:
            raise ValueError(f"max_staleness: expected at least 0, got {max_staleness}")
        self.controller, self.loss, self.max_staleness = controller, loss, max_staleness
        # A functional call swaps the module's parameters while it runs: on a copy that no other thread uses.
        self._shadow = copy.deepcopy(controller).requires_grad_(False)
        self._home = next(controller.parameters()).device
        self._device = torch.device(device) if device is not None else self._home
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="async-lens")
        self._pending: deque[tuple[int, Future]] = deque()
        self._calls = 0
        self.last_loss: Tensor | None = None

    def submit(self, batch: LensBatch, inputs: tuple[Any, ...] | Mapping[str, Any]) -> Future:
        """Start a micro-batch with the current parameters; `inputs` are LensNet's, by position or by name."""
        with torch.no_grad():
            weights = {name: p.detach().clone() for name, p in self.controller.named_parameters()}
            weights |= {name: b.detach().clone() for name, b in self.controller.named_buffers()}
        named = isinstance(inputs, Mapping)
        arguments = ((), dict(inputs)) if named else (tuple(inputs), {})
        arguments = tree_map_only(Tensor, torch.Tensor.detach, arguments)
        ready = None
        if self._home.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._home))  # the current device may be another one
        future = self._worker.submit(self._run, weights, batch, arguments, ready)
        self._pending.append((self._calls, future))
        return future

    def _run(self, weights: dict[str, Tensor], batch: LensBatch, arguments: Any, ready: Any) -> Any:
        if self._stream is None:
            return (*self._differentiate(weights, batch, arguments), None)
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            # The allocator must not reuse this memory before it is read: on this stream, or on the current
            # stream of another device, which makes the copy.
            for tensor in _tensors_in((weights, batch, arguments)):
                if tensor.is_cuda:
                    near = tensor.device == self._device
                    tensor.record_stream(self._stream if near else torch.cuda.current_stream(tensor.device))
            loss, gradients = self._differentiate(weights, batch, arguments)
            finished = torch.cuda.Event()
            finished.record()
        return loss, gradients, finished

    def _differentiate(
        self, weights: dict[str, Tensor], batch: LensBatch, arguments: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self._device != self._home:
            weights, arguments = tree_map_only(Tensor, lambda x: x.to(self._device), (weights, arguments))
            batch = batch.to(self._device)
        leaves = {name: weights[name].requires_grad_() for name, _ in self.controller.named_parameters()}
        with torch.enable_grad():
            loss = self.loss(functional_call(self._shadow, weights, *arguments), batch)
            gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return loss.detach(), {n: g for n, g in zip(leaves, gradients, strict=True) if g is not None}

    def apply_ready(self, optimizer: torch.optim.Optimizer) -> int:
        """Add finished gradients to the controller's `.grad`; return how many results were added.

        Waits for results that are `max_staleness` calls old. Raises exceptions of the worker.
        """
        self._check_optimizer(optimizer)
        added = 0
        while self._pending:
            call, future = self._pending[0]
            if not future.done() and self._calls - call < self.max_staleness:
                break
            self._pending.popleft()
            loss, gradients, finished = future.result()
            self.last_loss = loss
            if finished is not None:
                stream = torch.cuda.current_stream(self._device)
                stream.wait_event(finished)
                # Allocated on the side stream and read on this one: record it before the caller frees them.
                for tensor in (loss, *gradients.values()):
                    tensor.record_stream(stream)
            for name, parameter in self.controller.named_parameters():
                if name in gradients:
                    gradient = gradients[name].to(self._home)
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            added += 1
        self._calls += 1
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
                f"optimizer: expected all {len(mine)} parameters of the controller, got {len(seen)}"
            )

    def close(self) -> None:
        """Wait for the worker and shut it down; results that were not applied are discarded."""
        self._worker.shutdown(wait=True)
        self._pending.clear()

    def __enter__(self) -> AsyncLens:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor inside nested tuples, lists, dictionaries and batches."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors_in(getattr(value, field.name))
