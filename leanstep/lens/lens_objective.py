"""The controller objective: a function for one micro-batch, and a module with the state between calls.

V contexts · W padded length · P pairs
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from leanstep.lens.batch import LensBatch
from leanstep.lens.closed_form import AttachGradient, ClosedForm, closed_form_loss
from leanstep.lens.lens_config import LensConfig
from leanstep.lens.lens_terms import Denominator, LossCall, compute_dtype, eager_terms, total_of
from leanstep.lens.pairs import build_pairs, build_targets, sample_pairs, sample_spans
from leanstep.lens.telemetry import PREFIX, LensMetrics, LensResult, MemoryWatch, SectionTimer
from leanstep.triton_driver import can_launch

BACKENDS = ("auto", "eager", "fused")
STAGES = ("joint", "offline", "frozen")
SLOW_MS = 50.0

Scorer = Callable[..., Tensor]


def lens_loss(
    scores: Tensor,
    batch: LensBatch,
    config: LensConfig,
    *,
    state: Tensor | None = None,
    prev_scores: Tensor | None = None,
    prev_valid: Tensor | None = None,
    pair_order: Tensor | torch.Generator | None = None,
    terms: Iterable[str] | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
    process_group: object | None = None,
    on_built: Callable[[], None] | None = None,
) -> LensResult:
    """Compute the loss of the controller's scores against the base model's preferences.

    Equivalent to:
        lens_loss_reference(scores, batch, config)

    Args:
        scores: [V, W] float64, float32, float16 or bfloat16; padded entries are not used.
        batch: the contexts and their losses.
        state: 0-d moving average of the budget imbalance from the previous call; None = 0.
        prev_scores: [V, W] scores of a previous policy on the same contexts; they receive no gradient.
        prev_valid: [V] bool, contexts whose `prev_scores` may be used.
        pair_order: permutation of the P pair slots, or a generator that shuffles inside each sample.
        terms: the terms to compute (of those with a weight above 0); None = all of them.
        generator: for pair and span sampling.
        backend: eager (autograd over dense rows; works under torch.compile), fused (closed-form gradient:
            torch operations on a CPU, Triton kernels on a GPU), auto (fused; eager under torch.compile).
        process_group: for `normalize="global"`.
        on_built: called when pairs and targets are built, before the terms; for timers.

    Returns:
        LensResult; `loss` is 0 with zero gradient if no pair has a target.

    Host syncs: none. Cost: O(V T + P W). Peak extra memory: V (T + 1) bytes and a few [P, W] tensors.
    Do not use with one variant per sample: there is nothing to compare, and the loss is 0.
    """
    _check(scores, batch, state, prev_scores, prev_valid, backend)
    if backend == "auto":
        backend = "eager" if torch.compiler.is_compiling() else "fused"
    dtype = compute_dtype(scores)
    ema = scores.new_zeros((), dtype=dtype) if state is None else state.detach().to(dtype)
    kernels = _kernels(scores) if backend == "fused" else None
    with torch.no_grad():
        if kernels is not None and pair_order is None:
            pairs = kernels.triton_pairs(batch.loss, batch.row, config)
        else:
            pairs = build_pairs(batch.loss, batch.row, config, order=pair_order)
        pairs = sample_pairs(pairs, config, generator)
    call = LossCall(
        scores=scores,
        batch=batch,
        pairs=pairs,
        config=config,
        active=config.objective.active_terms(terms),
        state=ema,
        prev_scores=prev_scores,
        prev_valid=prev_valid,
        denominator=_denominator(config, process_group),
        need_grad=scores.requires_grad and torch.is_grad_enabled(),
        on_built=on_built,
    )
    if backend == "fused":
        implementation = closed_form_loss if kernels is None else kernels.triton_loss
        loss, values, has_target, ema, entries = _fused(call, implementation, generator)
    else:
        loss, values, has_target, ema = _eager(call, generator)
        entries = None
    metrics = LensMetrics(
        scores.detach(), batch, config, pairs, has_target, values, loss.detach(), ema, entries=entries
    )
    return LensResult(loss, values, has_target, True, ema, pairs, metrics, scores.detach())


def _fused(
    call: LossCall, implementation: Callable[[LossCall], ClosedForm], generator: torch.Generator | None
) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Return loss, terms, has_target, state and the entries read; the gradient is attached to the loss."""
    scores, dtype = call.scores, compute_dtype(call.scores)
    with torch.no_grad():
        # The kernel reads any dtype; the torch version works in the dtype of its sums.
        x = scores.detach() if implementation is not closed_form_loss else scores.detach().to(dtype)
        call = replace(call, scores=x)
        if call.config.sampling.span_sampling != "none":
            sign = build_targets(call.batch, call.pairs, call.config)
            weights = sample_spans(x.to(dtype), sign, call.pairs, call.config, generator)
            call = replace(call, sign=sign, span_weights=weights)
        out = implementation(call)
    loss = AttachGradient.apply(scores, out.loss, out.grad) if call.need_grad else out.loss
    return loss, out.terms, out.has_target, out.state, out.entries


def _eager(
    call: LossCall, generator: torch.Generator | None
) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
    """Do the same with autograd."""
    with torch.no_grad():
        sign = build_targets(call.batch, call.pairs, call.config)
    call.built()
    x = call.scores.to(compute_dtype(call.scores))
    weights = sample_spans(x, sign, call.pairs, call.config, generator)
    values, has_target, state = eager_terms(replace(call, scores=x, sign=sign, span_weights=weights))
    total = total_of(values, call.config)
    # An empty slice attaches the zero to the graph of the scores without reading any score.
    total = x.reshape(-1)[:0] if total is None else torch.where(has_target, total, 0)
    loss = total.sum() / call.denominator(has_target).to(x.dtype)
    return (
        loss,
        {name: torch.where(has_target, value.detach(), 0) for name, value in values.items()},
        has_target,
        state,
    )


def _kernels(scores: Tensor) -> ModuleType | None:
    """Return the Triton versions of pairs and closed form if the scores are on a GPU."""
    return importlib.import_module("leanstep.lens.kernel") if scores.is_cuda and can_launch() else None


def _denominator(config: LensConfig, process_group: object | None) -> Denominator:
    def local(has_target: Tensor) -> Tensor:
        return has_target.sum().clamp(min=1)

    def everywhere(has_target: Tensor) -> Tensor:
        # Gradient averaging over ranks divides by the world size again.
        count = has_target.sum().double()
        torch.distributed.all_reduce(count, group=process_group)  # type: ignore[arg-type]
        return count.clamp(min=1) / torch.distributed.get_world_size(process_group)  # type: ignore[arg-type]

    if config.objective.normalize == "global":
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise ValueError('normalize: "global" needs an initialized torch.distributed process group')
        return everywhere
    return local


def _check(
    scores: Tensor,
    batch: LensBatch,
    state: Tensor | None,
    prev_scores: Tensor | None,
    prev_valid: Tensor | None,
    backend: str,
) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if not scores.is_floating_point():
        raise ValueError(f"scores: expected a floating dtype, got {scores.dtype}")
    expected = tuple(batch.pos.shape)
    if tuple(scores.shape) != expected:
        raise ValueError(f"scores: expected shape {expected} to match the batch, got {tuple(scores.shape)}")
    if scores.device != batch.pos.device:
        raise ValueError(f"scores: expected the device of the batch, {batch.pos.device}, got {scores.device}")
    if state is not None and state.dim() != 0:
        raise ValueError(f"state: expected a 0-d tensor, got shape {tuple(state.shape)}")
    if prev_scores is not None and tuple(prev_scores.shape) != expected:
        raise ValueError(f"prev_scores: expected shape {expected}, got {tuple(prev_scores.shape)}")
    if prev_valid is not None and (tuple(prev_valid.shape) != expected[:1] or prev_valid.dtype != torch.bool):
        raise ValueError(
            f"prev_valid: expected bool of shape {expected[:1]}, "
            f"got {prev_valid.dtype} {tuple(prev_valid.shape)}"
        )


class LensObjective(nn.Module):
    """`lens_loss` as a module for a training loop. It has no parameters; save its `state_dict` to resume.

    Example:
        objective = LensObjective(LensConfig())
        inputs = (embeddings, batch.pos, batch.lod, batch.valid, batch.num_tokens)
        result = objective(lensnet, batch, inputs=inputs)
        (base_loss + config.objective.lens_loss_weight * result.loss).backward()
        optimizer.step()
        objective.optimizer_step()

    Gate: with `gate.every` > 1 the controller runs only if `(counter - gate.phase) % gate.every == 0`. On
    other calls `loss` is a plain 0 with `active=False`. The decision depends only on counters, so all ranks
    agree. Mode `accumulate` stores the detached inputs of skipped calls and returns the mean loss over them
    and the current call.

    Stages: `joint` (default), `offline` (from cached contexts), `frozen` (loss 0; scores still available).
    """

    def __init__(
        self, config: LensConfig, *, backend: str = "auto", process_group: object | None = None
    ) -> None:
        super().__init__()
        self.config, self.backend, self.process_group = config, backend, process_group
        self.register_buffer("budget_ema", torch.zeros((), dtype=torch.float64))
        self.micro_steps = 0
        self.optimizer_steps = 0
        self.stage = "joint"
        self._skipped: list[tuple[LensBatch, tuple[Any, ...], dict[str, Any]]] = []
        self._timer = SectionTimer()
        self._metrics: LensMetrics | None = None
        self._loss_sum: Tensor | None = None
        self._active_steps = 0
        self._variants = 0
        self._variants_known = True
        self._memory = MemoryWatch()
        self._warned = False

    def is_due(self) -> bool:
        """Return whether the next call runs the controller."""
        if self.stage == "frozen":
            return False
        counter = self.micro_steps if self.config.gate.unit == "micro" else self.optimizer_steps
        return (counter - self.config.gate.phase) % self.config.gate.every == 0

    def optimizer_step(self) -> None:
        """Count an optimizer step for the gate."""
        self.optimizer_steps += 1

    def set_stage(self, stage: str, controller: nn.Module | None = None) -> None:
        """Change the stage, and `requires_grad` of the controller's parameters if one is passed."""
        if stage not in STAGES:
            raise ValueError(f"stage: expected one of {', '.join(STAGES)}, got {stage!r}")
        self.stage = stage
        if controller is not None:
            controller.requires_grad_(stage != "frozen")

    def forward(
        self,
        scores: Tensor | Scorer,
        batch: LensBatch,
        *,
        inputs: tuple[Any, ...] = (),
        prev_scores: Tensor | None = None,
        prev_valid: Tensor | None = None,
        pair_order: Tensor | torch.Generator | None = None,
        terms: Iterable[str] | None = None,
        generator: torch.Generator | None = None,
    ) -> LensResult:
        """Run one micro-step.

        Args:
            scores: [V, W], or a callable that computes them from `inputs`; it is not called on skipped steps.
            inputs: arguments of the callable; tensors are detached before they are stored.
        """
        due = self.is_due()
        self.micro_steps += 1
        self._count_variants(batch)
        if self.stage == "frozen":
            with torch.no_grad():
                available = scores(*inputs) if callable(scores) else scores.detach()
            return LensResult(torch.zeros((), device=available.device), active=False, scores=available)
        options = {
            "prev_scores": prev_scores,
            "prev_valid": prev_valid,
            "pair_order": pair_order,
            "terms": terms,
        }
        accumulate = self.config.gate.mode == "accumulate" and self.config.gate.every > 1
        if accumulate and not callable(scores):
            raise ValueError('scores: gate.mode="accumulate" needs a callable and its inputs, got a tensor')
        if not due:
            if accumulate:
                detached_inputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
                self._skipped.append((batch, detached_inputs, options))
            return LensResult(torch.zeros((), device=batch.pos.device), active=False, state=self._state())

        device = batch.pos.device
        with self._memory.watch(device, (*batch.pos.shape, *batch.loss.shape)):
            result = self._run(scores, batch, inputs, options, generator)
        if self.config.gate.mode == "scale" and self.config.gate.every > 1:
            result.loss = result.loss * self.config.gate.every
        detached = result.loss.detach()
        # In place: a CUDA graph adds to the tensor that it captured.
        self._loss_sum = detached.clone() if self._loss_sum is None else self._loss_sum.add_(detached)
        self._active_steps += 1
        self._metrics = result.metrics
        return result

    def _run(
        self,
        scores: Tensor | Scorer,
        batch: LensBatch,
        inputs: tuple[Any, ...],
        options: dict[str, Any],
        generator: torch.Generator | None,
    ) -> LensResult:
        """Run the objective on this micro-step and on the skipped ones before it."""
        results = []
        for past_batch, past_inputs, past_options in self._skipped:
            assert callable(scores)
            results.append(self._evaluate(scores(*past_inputs), past_batch, past_options, generator))
        self._skipped.clear()
        self._timer.start(batch.pos.device)
        if callable(scores):
            values = scores(*inputs)
            self._timer.mark("lens_forward_ms")
        else:
            values = scores
        result = self._evaluate(values, batch, options, generator, timed=True)
        if results:
            result.loss = torch.stack([r.loss for r in (*results, result)]).mean()
        return result

    def _evaluate(
        self,
        scores: Tensor,
        batch: LensBatch,
        options: dict[str, Any],
        generator: torch.Generator | None,
        *,
        timed: bool = False,
    ) -> LensResult:
        begin = self._timer._last
        result = lens_loss(
            scores,
            batch,
            self.config,
            state=self._state(),
            generator=generator,
            backend=self.backend,
            process_group=self.process_group,
            on_built=self._mark_built if timed else None,
            **options,
        )
        if timed:
            self._timer.mark("lens_loss_ms", since=begin)
        if "smooth" in self.config.objective.active_terms(options["terms"]) and result.state is not None:
            self.budget_ema = result.state.to(torch.float64)
        return result

    def _mark_built(self) -> None:
        self._timer.mark("lens_build_ms")

    def _state(self) -> Tensor:
        return self.budget_ema

    def _count_variants(self, batch: LensBatch) -> None:
        if batch.counts is None:
            self._variants_known = False
        else:
            self._variants += sum(batch.counts)

    def log_due(self, every: int) -> bool:
        """Return True after the first micro-step and after every `every`-th one."""
        return self.micro_steps == 1 or (every > 0 and self.micro_steps % every == 0)

    def read_metrics(
        self, *, base_forward_ms: float | None = None, grad_accum_steps: int | None = None
    ) -> dict[str, float | None]:
        """Return telemetry since the last call, with one host read; keys start with `mc/`.

        Warns once if the objective takes more than 50 ms; the objective itself is never changed.
        """
        timings = self._timer.read()
        host: dict[str, Tensor | float | None] = {
            name: timings.get(name) for name in ("lens_forward_ms", "lens_build_ms", "lens_loss_ms")
        }
        host["lens_ms"] = timings.get("lens_loss_ms")
        host["variants_total_step"] = float(self._variants) if self._variants_known else None
        host["peak_lens_mb"] = self._memory.peak_lens_mb
        host["lens_allocs"] = self._memory.lens_allocs
        if base_forward_ms is not None:
            host["base_forward_ms"] = base_forward_ms
        if grad_accum_steps is not None:
            host["grad_accum_steps"] = float(grad_accum_steps)
        if self._metrics is None:
            values: dict[str, float | None] = {
                PREFIX + name: value for name, value in host.items() if not isinstance(value, Tensor)
            }
            values |= {PREFIX + "lens_active": 0.0, PREFIX + "lens_loss": None}
        else:
            assert self._loss_sum is not None
            self._metrics.extra = {**host, "lens_loss": self._loss_sum / self._active_steps}
            values = self._metrics.read()
        self._metrics, self._loss_sum, self._active_steps = None, None, 0
        self._variants, self._variants_known = 0, True
        slow = timings.get("lens_loss_ms")
        if slow is not None and slow > SLOW_MS and not self._warned:
            self._warned = True
            warnings.warn(
                f"the controller objective takes {slow:.0f} ms per micro-step: consider span_sampling or "
                "pair_sampling (fewer entries or pairs) or gate.every (fewer steps)",
                stacklevel=2,
            )
        return values

    def get_extra_state(self) -> dict[str, Any]:
        return {"micro_steps": self.micro_steps, "optimizer_steps": self.optimizer_steps, "stage": self.stage}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.micro_steps, self.optimizer_steps = int(state["micro_steps"]), int(state["optimizer_steps"])
        self.stage = state["stage"]
