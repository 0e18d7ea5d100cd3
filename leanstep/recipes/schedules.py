"""What changes from step to step of a speedrun: stages, learning rate, momentum, windows, prediction weights.

A run is a few stages of (nearly) equal length and a short extension at the end. A stage fixes the tokens
per step, the longest sequence, the attention windows and the weights of the multi-token prediction. The
learning rate follows the stage's multiplier and, in the last part of the scheduled steps, is blended
linearly into a small constant. Everything is a pure function of the step, so resuming needs no state.

    schedule = Schedule.record_74()
    schedule.at(967).lr_mul        # 1.0271...
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Stage:
    """One part of a run.

    Args:
        tokens: tokens per optimizer step, over all ranks and micro-batches.
        max_seq_len: documents are cut here.
        windows: (short, long) attention windows, in blocks.
        lr_mul: multiplies all learning rates.
        mtp_start, mtp_end: weights of the next, second next, ... token at the first step of the stage and
            at the first step after it; linear in between.
    """

    tokens: int
    max_seq_len: int
    windows: tuple[int, int]
    lr_mul: float = 1.0
    mtp_start: tuple[float, ...] = (1.0,)
    mtp_end: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if len(self.mtp_start) != len(self.mtp_end):
            raise ValueError(
                f"mtp_end: expected {len(self.mtp_start)} weights like mtp_start, got {len(self.mtp_end)}"
            )
        if self.tokens < 1 or self.max_seq_len < 1:
            raise ValueError(
                f"tokens, max_seq_len: expected at least 1, got {self.tokens}, {self.max_seq_len}"
            )


@dataclass(frozen=True)
class Position:
    """Everything the trainer needs to know at one step."""

    step: int
    stage: int
    stage_fraction: float
    tokens: int
    max_seq_len: int
    windows: tuple[int, int]
    mtp_weights: tuple[float, ...]
    lr_mul: float
    momentum: float
    adam_step: bool


@dataclass(frozen=True)
class Schedule:
    """The schedule of a run; the last stage is the extension, the others share the scheduled steps.

    Args:
        stages: at least two; the last is the extension.
        scheduled: steps that the stages before the extension share.
        extension: steps of the last stage.
        cooldown_fraction: the last part of the scheduled steps in which the rate falls to `final_lr_mul`.
        final_lr_mul: where the rate ends, and stays during the extension.
        momentum_low, momentum_high: the ends of the momentum ramps.
        momentum_warmup: steps of the ramp up. momentum_cooldown: steps of the ramp down at the very end.
        final_window: long window (blocks) of the final evaluation.
        adam_every: Adam parameters step when step % adam_every == adam_every - 1 (2 = odd steps).
    """

    stages: tuple[Stage, ...]
    scheduled: int
    extension: int
    cooldown_fraction: float = 0.6
    final_lr_mul: float = 0.15
    momentum_low: float = 0.85
    momentum_high: float = 0.95
    momentum_warmup: int = 300
    momentum_cooldown: int = 50
    final_window: int = 20
    adam_every: int = 2

    def __post_init__(self) -> None:
        if len(self.stages) < 2:
            raise ValueError(f"stages: expected at least one stage and the extension, got {len(self.stages)}")
        if self.scheduled < len(self.stages) - 1:
            raise ValueError(
                f"scheduled: expected at least one step for each of {len(self.stages) - 1} stages, "
                f"got {self.scheduled}"
            )
        if self.extension < 0:
            raise ValueError(f"extension: expected 0 or more steps, got {self.extension}")
        if not 0 < self.cooldown_fraction <= 1:
            raise ValueError(f"cooldown_fraction: expected a number in (0, 1], got {self.cooldown_fraction}")
        if self.adam_every < 1:
            raise ValueError(f"adam_every: expected at least 1, got {self.adam_every}")

    @classmethod
    def record_74(cls) -> Schedule:
        """The 74th NanoGPT speedrun record: 1450 + 40 steps."""
        return cls(
            stages=(
                Stage(131072, 896, (1, 3), 1.0, (1.0, 0.5, 0.25), (1.0, 0.5, 0.0)),
                Stage(262144, 2048, (3, 7), 1.52, (1.0, 0.5), (1.0, 0.0)),
                Stage(393216, 2048, (5, 11), 1.73),
                Stage(393216, 2048, (6, 13)),
            ),
            scheduled=1450,
            extension=40,
        )

    def of_length(self, steps: int) -> Schedule:
        """The same shape in another number of steps; extension and momentum ramps shrink or grow along."""
        if steps < len(self.stages):
            raise ValueError(f"steps: expected at least one step per stage ({len(self.stages)}), got {steps}")
        extension = min(max(round(steps * self.extension / self.num_steps), 1), steps - len(self.stages) + 1)
        scale = steps / self.num_steps
        return replace(
            self,
            scheduled=steps - extension,
            extension=extension,
            momentum_warmup=max(round(self.momentum_warmup * scale), 1),
            momentum_cooldown=max(round(self.momentum_cooldown * scale), 1),
        )

    @property
    def num_steps(self) -> int:
        return self.scheduled + self.extension

    @property
    def boundaries(self) -> tuple[tuple[int, int], ...]:
        """(first step, step after the last) of each stage."""
        parts = len(self.stages) - 1
        ends = [round(self.scheduled * (i + 1) / parts) for i in range(parts)] + [self.num_steps]
        return tuple(zip([0, *ends[:-1]], ends, strict=True))

    @property
    def untie_step(self) -> int:
        """The first Adam step of the last scheduled stage: head and embedding part after it."""
        first = self.boundaries[-2][0]
        return first + (self.adam_every - 1 - first) % self.adam_every

    @property
    def cooldown_start(self) -> int:
        return int(self.scheduled * (1 - self.cooldown_fraction))

    def stage_of(self, step: int) -> int:
        for index, (_, end) in enumerate(self.boundaries):
            if step < end:
                return index
        return len(self.stages) - 1

    def lr_mul(self, step: int) -> float:
        """The learning-rate multiplier of every group."""
        multiplier = self.stages[self.stage_of(step)].lr_mul
        if step < self.cooldown_start:
            return multiplier
        t = min(1.0, (step - self.cooldown_start) / (self.scheduled - self.cooldown_start))
        return multiplier * (1 - t) + self.final_lr_mul * t

    def momentum(self, step: int) -> float:
        """The momentum of the matrices: up, flat, and down again over the last steps."""
        span = self.momentum_high - self.momentum_low
        turn = self.num_steps - self.momentum_cooldown
        if step < self.momentum_warmup:
            return self.momentum_low + step / self.momentum_warmup * span
        if step > turn:
            return self.momentum_high - (step - turn) / self.momentum_cooldown * span
        return self.momentum_high

    def at(self, step: int) -> Position:
        """All quantities at `step` (0-based)."""
        if step < 0:
            raise ValueError(f"step: expected 0 or more, got {step}")
        index = self.stage_of(step)
        stage, (start, end) = self.stages[index], self.boundaries[index]
        fraction = (step - start) / (end - start) if end > start else 0.0
        weights = tuple(a + (b - a) * fraction for a, b in zip(stage.mtp_start, stage.mtp_end, strict=True))
        return Position(
            step=step,
            stage=index,
            stage_fraction=fraction,
            tokens=stage.tokens,
            max_seq_len=stage.max_seq_len,
            windows=stage.windows,
            mtp_weights=weights,
            lr_mul=self.lr_mul(step),
            momentum=self.momentum(step),
            adam_step=step % self.adam_every == self.adam_every - 1,
        )
