"""Training steps captured as CUDA graphs: static inputs, warm-up, capture, replay.

A graph repeats its kernels with the addresses and numbers of its capture. Everything that changes from step
to step is therefore copied into tensors that stay: tokens, documents, prediction weights, learning rates,
momentum. There is one graph for each kind of step of a stage (with and without Adam's turn), captured after
`WARM_UP` steps of its kind. Warm-up steps run the same code on the same tensors, so they give the same bits.

On one rank a graph holds the whole step. Over several ranks it holds the forwards and backwards, and the
optimizer runs after it: NCCL expects all ranks to replay a collective or none, and a rank whose documents
need a larger table must capture again on its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from leanstep.gpt import Batch
from leanstep.gpt.attention import FixedPlans, PlanCache
from leanstep.logprob.layout import to_device
from leanstep.recipes.optimizers import ScheduledOptimizer
from leanstep.recipes.schedules import Position

# Steps of a kind before its capture: they compile, create optimizer state and load every kernel.
WARM_UP = 2


class Graphs(Protocol):
    """How a body of device work is run and captured; tests replace it on a CPU."""

    def run(self, body: Callable[[], Tensor]) -> Tensor:
        """Run the body now."""
        ...

    def capture(self, body: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Return the replay of the body, which has not run yet, and the tensor of its result."""
        ...


class CudaGraphs:
    """CUDA graphs that share one memory pool. They must be replayed in the order of their captures.

    Bodies run on the stream of the captures as well: a backward on the default stream cannot be captured.
    """

    def __init__(self) -> None:
        self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def run(self, body: Callable[[], Tensor]) -> Tensor:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = body()
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def capture(self, body: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Other threads (data, NCCL) may use the device during the capture.
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            result = body()
        return graph.replay, result


class StepGraphs:
    """The graphs of one stage, by kind of step and by the gradients that wait for it.

    A step that leaves gradients for a later one (Adam's, every other step) leaves them in its graph's memory.
    The later step is captured with these tensors and adds to them, so no gradient is copied or zeroed.

    Args:
        parameters: whose `.grad` the steps use.
        graphs: captures and runs.
    """

    def __init__(self, parameters: Iterable[Tensor], graphs: Graphs) -> None:
        self.parameters, self.graphs = list(parameters), graphs
        self._warm: Counter[Hashable] = Counter()
        # (kind, gradients before the step) -> replay, its result, gradients after the step.
        self._captured: dict[Any, tuple[Callable[[], None], Tensor, list[Tensor | None]]] = {}

    def step(self, kind: Hashable, body: Callable[[], Tensor]) -> Tensor:
        """Run one step of this kind. A later step overwrites the returned tensor."""
        before = [parameter.grad for parameter in self.parameters]
        key = (kind, *map(id, before))
        if key not in self._captured:
            if self._warm[kind] < WARM_UP or not self._owns(before):
                self._warm[kind] += 1
                return self.graphs.run(body)
            replay, result = self.graphs.capture(body)
            after = [parameter.grad for parameter in self.parameters]
            self._captured[key] = (replay, result, after)
        replay, result, after = self._captured[key]
        replay()
        for parameter, grad in zip(self.parameters, after, strict=True):
            parameter.grad = grad
        return result

    def _owns(self, grads: Sequence[Tensor | None]) -> bool:
        """Return whether all gradients are tensors of graphs; others are freed after this step."""
        owned = {id(grad) for *_, after in self._captured.values() for grad in after}
        return all(grad is None or id(grad) in owned for grad in grads)


class StepInputs:
    """Tensors that the steps of one stage read, at fixed addresses.

    Args:
        like: one batch per micro-batch, on the device: the sizes.
        numbers: how many numbers of the schedule a step reads.
        plans: makes the plans of attention.
    """

    def __init__(self, like: Sequence[Batch], numbers: int, plans: PlanCache) -> None:
        device = like[0].inputs.device
        self.batches = [Batch(b.inputs.clone(), b.targets.clone(), b.cu_seqlens) for b in like]
        self.plans = [FixedPlans(plans) for _ in like]
        self.numbers = torch.zeros(numbers, device=device)

    def load(self, batches: Sequence[Batch], numbers: Sequence[float]) -> bool:
        """Copy a step's batches and numbers; return False if its documents need new tensors."""
        self.numbers.copy_(to_device(torch.tensor(numbers, dtype=torch.float32), self.numbers.device))
        fits = True
        for place, (batch, plans) in enumerate(zip(batches, self.plans, strict=True)):
            mine = self.batches[place]
            mine.inputs.copy_(batch.inputs)
            mine.targets.copy_(batch.targets)
            self.batches[place] = Batch(mine.inputs, mine.targets, batch.cu_seqlens)
            fits = plans.load(batch.cu_seqlens.tolist()) and fits
        return fits


class CapturedSteps:
    """The training steps of the gpt recipe as graphs.

    Args:
        model: whose `plans` are replaced during a step.
        optimizer: part of the graph if `whole`.
        accumulate: (batches, prediction weights) -> loss; runs forwards and backwards.
        whole: capture the optimizer's step too.
        new_graphs: called for each stage.
    """

    def __init__(
        self,
        model: Any,
        optimizer: ScheduledOptimizer,
        accumulate: Callable[[Iterable[Batch], tuple[Any, ...]], Tensor],
        *,
        whole: bool,
        new_graphs: Callable[[], Graphs] = CudaGraphs,
    ) -> None:
        self.model, self.optimizer, self.accumulate = model, optimizer, accumulate
        self.whole, self.new_graphs = whole, new_graphs
        self.forget()

    def forget(self) -> None:
        """Free all graphs: tensors that they use have been replaced."""
        self._stage: tuple[int, bool] | None = None
        self._inputs: StepInputs | None = None
        self._graphs: StepGraphs | None = None

    def step(self, here: Position, batches: Sequence[Batch]) -> Tensor:
        """Take the optimizer's step for these batches, which are on the device; return the loss."""
        stage = (here.stage, self.model.tied)
        numbers = (*here.mtp_weights, *self.optimizer.rates(here))
        if stage != self._stage:
            self.forget()
            self._stage, self._inputs = stage, StepInputs(batches, len(numbers), self.model.plans)
        assert self._inputs is not None
        if not self._inputs.load(batches, numbers):
            self._graphs = None
        if self._graphs is None:
            self._graphs = StepGraphs(self.model.parameters(), self.new_graphs())
        loss = self._graphs.step(here.adam_step, lambda: self._body(here))
        if not self.whole:
            self.optimizer.step(here)
        return loss

    def _body(self, here: Position) -> Tensor:
        """All device work of a step, from tensors that stay."""
        assert self._inputs is not None
        numbers, count = self._inputs.numbers.unbind(), len(here.mtp_weights)
        plans = self.model.plans
        try:
            loss = self.accumulate(self._static_batches(self._inputs), numbers[:count])
        finally:
            self.model.plans = plans
        if self.whole:
            self.optimizer.step(here, numbers[count:])
        return loss

    def _static_batches(self, inputs: StepInputs) -> Iterable[Batch]:
        for batch, plans in zip(inputs.batches, inputs.plans, strict=True):
            self.model.plans = plans
            yield batch
