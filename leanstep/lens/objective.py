"""`lens_loss` in a training loop: gate, stage, state between calls, telemetry.

V contexts · W padded length
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from leanstep.lens.batch import LensBatch
from leanstep.lens.config import LensConfig
from leanstep.lens.loss import lens_loss
from leanstep.lens.metrics import PREFIX, LensMetrics, LensResult, SectionTimer, peak_memory

STAGES = ("joint", "frozen")
SLOW_MS = 50.0

Inputs = tuple[Any, ...] | Mapping[str, Any]


class LensObjective(nn.Module):
    """`lens_loss` as a module for a training loop. It has no parameters; save its `state_dict` to resume.

    Example:
        objective = LensObjective(LensConfig())
        inputs = (embeddings, batch.pos, batch.lod, batch.valid, batch.num_tokens)
        result = objective(lensnet, batch, inputs=inputs)
        (base_loss + config.objective.lens_loss_weight * result.loss).backward()
        optimizer.step()
        objective.optimizer_step()

    Gate: with `gate.every` > 1 the controller runs on the first of every `gate.every` calls, in mode
    `accumulate` on the last. On other calls `loss` is a plain 0 with `active=False`. The decision depends
    only on counters, so all ranks agree. Mode `accumulate` stores the detached inputs of skipped calls and
    returns the mean loss over them and the current call.

    Stages: `joint` (default), and `frozen` for a controller that was trained before (loss 0; scores still
    available).
    """

    def __init__(self, config: LensConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("budget_ema", torch.zeros((), dtype=torch.float64))
        self.micro_steps = 0
        self.optimizer_steps = 0
        self.stage = "joint"
        self._skipped: list[tuple[LensBatch, Inputs, dict[str, Any]]] = []
        self._timer = SectionTimer()
        self._memory: dict[str, float | None] = {"peak_lens_mb": None, "lens_allocs": None}
        self._metrics: LensMetrics | None = None
        self._loss_sum: Tensor | None = None
        self._active_steps = 0
        self._variants: int | None = 0
        self._warned = False

    def is_due(self) -> bool:
        """Return whether the next call runs the controller."""
        if self.stage == "frozen":
            return False
        gate = self.config.gate
        counter = self.micro_steps if gate.unit == "micro" else self.optimizer_steps
        return gate.runs(counter)

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
        scores: Tensor | Callable[..., Tensor],
        batch: LensBatch,
        *,
        inputs: Inputs = (),
        prev_scores: Tensor | None = None,
        prev_valid: Tensor | None = None,
        pair_order: Tensor | None = None,
        terms: Iterable[str] | None = None,
        generator: torch.Generator | None = None,
    ) -> LensResult:
        """Run one micro-step.

        Args:
            scores: [V, W], or a callable that computes them from `inputs`; it is not called on skipped steps.
            inputs: arguments of the callable by position or by name; tensors are detached before they are
                stored.
        """
        gate, due = self.config.gate, self.is_due()
        self.micro_steps += 1
        known = self._variants is not None and batch.counts is not None
        self._variants = self._variants + sum(batch.counts) if known else None  # type: ignore[operator,arg-type]
        if self.stage == "frozen":
            with torch.no_grad():
                available = _call(scores, inputs) if callable(scores) else scores.detach()
            return LensResult(torch.zeros((), device=available.device), active=False, scores=available)
        options = {
            "prev_scores": prev_scores,
            "prev_valid": prev_valid,
            "pair_order": pair_order,
            "terms": terms,
        }
        accumulate = gate.mode == "accumulate" and gate.every > 1
        if accumulate and not callable(scores):
            raise ValueError('scores: gate.mode="accumulate" needs a callable and its inputs, got a tensor')
        if not due:
            if accumulate:
                self._skipped.append((batch, _detached(inputs), options))
            zero = torch.zeros((), device=batch.pos.device)
            return LensResult(zero, active=False, state=self.budget_ema)

        earlier = []
        with peak_memory(batch.pos.device, self._memory):
            for past_batch, past_inputs, past_options in self._skipped:
                assert callable(scores)
                past = self._evaluate(_call(scores, past_inputs), past_batch, past_options, generator)
                earlier.append(past.loss)
            self._skipped.clear()
            self._timer.start(batch.pos.device)
            if callable(scores):
                scores = _call(scores, inputs)
                self._timer.mark("lens_forward_ms")
            result = self._evaluate(scores, batch, options, generator)
            self._timer.mark("lens_loss_ms")
        if earlier:
            result.loss = torch.stack([*earlier, result.loss]).mean()
        if gate.mode == "scale" and gate.every > 1:
            result.loss = result.loss * gate.every
        detached = result.loss.detach()
        # In place: a CUDA graph adds to the tensor that it captured.
        self._loss_sum = detached.clone() if self._loss_sum is None else self._loss_sum.add_(detached)
        self._active_steps += 1
        self._metrics = result.metrics
        return result

    def _evaluate(
        self, scores: Tensor, batch: LensBatch, options: dict[str, Any], generator: torch.Generator | None
    ) -> LensResult:
        result = lens_loss(scores, batch, self.config, state=self.budget_ema, generator=generator, **options)
        if "smooth" in result.terms and result.state is not None:
            self.budget_ema = result.state.to(torch.float64)
        return result

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
        slow = timings.get("lens_loss_ms")
        host: dict[str, Any] = {
            "lens_forward_ms": timings.get("lens_forward_ms"),
            "lens_loss_ms": slow,
            "lens_ms": slow,
            "variants_total_step": None if self._variants is None else float(self._variants),
            **self._memory,
        }
        if base_forward_ms is not None:
            host["base_forward_ms"] = base_forward_ms
        if grad_accum_steps is not None:
            host["grad_accum_steps"] = float(grad_accum_steps)
        if self._metrics is None:
            host |= {"lens_active": 0.0, "lens_loss": None}
            values: dict[str, float | None] = {PREFIX + name: value for name, value in host.items()}
        else:
            assert self._loss_sum is not None
            self._metrics.extra = {**host, "lens_loss": self._loss_sum / self._active_steps}
            values = self._metrics.read()
        self._metrics, self._loss_sum, self._active_steps, self._variants = None, None, 0, 0
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


def _call(controller: Callable[..., Tensor], inputs: Inputs) -> Tensor:
    return controller(**inputs) if isinstance(inputs, Mapping) else controller(*inputs)


def _detached(inputs: Inputs) -> Inputs:
    if isinstance(inputs, Mapping):
        return {name: x.detach() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    return tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
