"""The objective with what lives between calls: moving average, counters, gate, stage, telemetry."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .batch import LensBatch
from .config import LensConfig
from .loss import lens_loss
from .metrics import PREFIX, LensMetrics
from .result import LensResult
from .timers import SectionTimer

STAGES = ("joint", "offline", "frozen")
SLOW_MS = 50.0

Scorer = Callable[..., Tensor]


class LensObjective(nn.Module):
    """`lens_loss` for a training loop. Has no parameters; `state_dict` holds what a resumed run needs.

    Example:
        objective = LensObjective(LensConfig())
        inputs = (embeddings, batch.pos, batch.lod, batch.valid, batch.num_tokens)
        result = objective(lensnet, batch, inputs=inputs)
        (base_loss + config.lens_loss_weight * result.loss).backward()
        optimizer.step()
        objective.optimizer_step()

    Gate: with `gate_every` > 1 the controller runs only when `(counter - gate_phase) % gate_every == 0`. On
    other calls `loss` is a plain 0 with `active=False`. The decision depends on counters alone, so all
    ranks agree. Mode `accumulate` keeps the detached inputs of skipped calls and returns the mean loss over
    them and the present one.

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
        self._waiting: list[tuple[LensBatch, tuple[Any, ...], dict[str, Any]]] = []
        self._timer = SectionTimer()
        self._metrics: LensMetrics | None = None
        self._loss_sum: Tensor | None = None
        self._active_steps = 0
        self._variants = 0
        self._variants_known = True
        self._memory: dict[str, float] = {}
        self._warned = False

    def is_due(self) -> bool:
        """Whether the next call runs the controller."""
        if self.stage == "frozen":
            return False
        counter = self.micro_steps if self.config.gate_unit == "micro" else self.optimizer_steps
        return (counter - self.config.gate_phase) % self.config.gate_every == 0

    def optimizer_step(self) -> None:
        """Tell the gate that the optimizer has stepped."""
        self.optimizer_steps += 1

    def set_stage(self, stage: str, controller: nn.Module | None = None) -> None:
        """Change the stage; with `controller`, its parameters follow: frozen ones require no gradient."""
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
        """One micro-step.

        Args:
            scores: [V, W], or a callable that gives them from `inputs`; a callable is not called on skipped
                steps.
            inputs: arguments of the callable; tensors among them are detached before they are kept.
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
        accumulate = self.config.gate_mode == "accumulate" and self.config.gate_every > 1
        if accumulate and not callable(scores):
            raise ValueError('scores: gate_mode="accumulate" needs a callable and its inputs, got a tensor')
        if not due:
            if accumulate:
                kept = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
                self._waiting.append((batch, kept, options))
            return LensResult(torch.zeros((), device=batch.pos.device), active=False, state=self._state())

        device = batch.pos.device
        self._watch_memory(device, begin=True)
        results = []
        for past_batch, past_inputs, past_options in self._waiting:
            assert callable(scores)
            results.append(self._evaluate(scores(*past_inputs), past_batch, past_options, generator))
        self._waiting.clear()
        self._timer.start(device)
        if callable(scores):
            values = scores(*inputs)
            self._timer.mark("lens_forward_ms")
        else:
            values = scores
        result = self._evaluate(values, batch, options, generator, timed=True)
        if results:
            result.loss = torch.stack([r.loss for r in (*results, result)]).mean()
        if self.config.gate_mode == "scale" and self.config.gate_every > 1:
            result.loss = result.loss * self.config.gate_every
        self._watch_memory(device, begin=False)
        detached = result.loss.detach()
        self._loss_sum = detached if self._loss_sum is None else self._loss_sum + detached
        self._active_steps += 1
        self._metrics = result.metrics
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
        if "smooth" in self.config.active_terms(options["terms"]) and result.state is not None:
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

    def _watch_memory(self, device: torch.device, *, begin: bool) -> None:
        """Memory of this call from the allocator's counters; resetting the peak is the user's business.

        Neither the process's peak above the level at entry nor the bytes allocated inside can be below this
        call's own peak; the smaller of the two is reported. It is exact when the call sets a new peak.
        """
        if device.type != "cuda":
            return
        stats = torch.cuda.memory_stats(device)
        now = {
            "level": stats.get("allocated_bytes.all.current", 0),
            "bytes": stats.get("allocated_bytes.all.allocated", 0),
            "allocations": stats.get("allocation.all.allocated", 0),
        }
        if begin:
            self._memory = now
        else:
            peak = stats.get("allocated_bytes.all.peak", 0) - self._memory["level"]
            allocated = now["bytes"] - self._memory["bytes"]
            self._memory["peak_lens_mb"] = min(peak, allocated) / 2**20
            self._memory["lens_allocs"] = float(now["allocations"] - self._memory["allocations"])

    def log_due(self, every: int) -> bool:
        """True after the first micro-step and after every `every`-th."""
        return self.micro_steps == 1 or (every > 0 and self.micro_steps % every == 0)

    def read_metrics(
        self, *, base_forward_ms: float | None = None, grad_accum_steps: int | None = None
    ) -> dict[str, float | None]:
        """Telemetry since the last reading, one host read; keys start with `mc/`.

        Warns once when the objective takes more than 50 ms. Nothing about the objective changes by itself.
        """
        timings = self._timer.read()
        host: dict[str, Tensor | float | None] = {
            name: timings.get(name) for name in ("lens_forward_ms", "lens_build_ms", "lens_loss_ms")
        }
        host["lens_ms"] = timings.get("lens_loss_ms")
        host["variants_total_step"] = float(self._variants) if self._variants_known else None
        host["peak_lens_mb"] = self._memory.get("peak_lens_mb")
        host["lens_allocs"] = self._memory.get("lens_allocs")
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
                "pair_sampling (fewer entries or pairs), or gate_every (fewer steps)",
                stacklevel=2,
            )
        return values

    def get_extra_state(self) -> dict[str, Any]:
        return {"micro_steps": self.micro_steps, "optimizer_steps": self.optimizer_steps, "stage": self.stage}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.micro_steps, self.optimizer_steps = int(state["micro_steps"]), int(state["optimizer_steps"])
        self.stage = state["stage"]
