"""The result of a call of the objective: loss, metrics computed when they are read, section timers.

V contexts · W padded length · B samples · C variants per sample · P pairs · T tokens
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leanstep.lens.batch import LensBatch, owned_tokens
from leanstep.lens.config import TERMS, LensConfig

if TYPE_CHECKING:
    from leanstep.lens.loss import Pairs

PREFIX = "mc/"


@dataclass
class LensMetrics:
    """References to the tensors of one call. `values` returns device scalars, `read` a dictionary of floats.

    Example:
        read = lens_loss(scores, batch, config).metrics.read()   # one host read
        agreement = read["mc/preference_agreement"]              # None if no pair has a target

    Keys start with `mc/`; an undefined value (no pair, constant input, inactive term) is None.
    """

    scores: Tensor
    batch: LensBatch
    config: LensConfig
    pairs: Pairs
    kept: Tensor  # prose: ignore
    targets: tuple[Tensor, Tensor, Tensor]  # [P, T]: scores of the worse contexts; up; down
    terms: dict[str, Tensor]
    loss: Tensor
    state: Tensor
    extra: dict[str, Tensor | float | None] = field(default_factory=dict)

    @torch.no_grad()
    def values(self) -> dict[str, Tensor]:
        """Return every metric as a 0-d float64 tensor on the scores' device; NaN = undefined."""
        batch, scores = self.batch, self.scores.double()
        nan = scores.new_full((), torch.nan)
        has_target = self.kept
        num_kept = has_target.sum()
        some = num_kept > 0
        valid = batch.valid
        length = valid.sum(1)
        present = length > 0
        x = torch.where(valid, scores, 0)
        mean = x.sum(1) / length.clamp(min=1)
        absolute = x.abs().sum(1) / length.clamp(min=1)
        spread = (torch.where(valid, x - mean[:, None], 0).square().sum(1) / length.clamp(min=1)).sqrt()
        out: dict[str, Tensor] = {
            "lens_loss": self.loss.double(),
            "lens_active": scores.new_ones(()),
            "preference_pairs": self.pairs.valid.sum().double(),
            "preference_pairs_kept": num_kept.double(),
            "budget_ema": self.state.double(),
            "policy_score_abs_mean": torch.where(some, _mean(absolute, present), nan),
            "policy_score_std_mean": torch.where(some, _mean(spread, present), nan),
        }
        out |= self._target_metrics()
        out |= self._advantage_metrics(x, mean)
        own = owned_tokens(batch, self.config).sum(1).double() / batch.tokens
        out["coverage_mean"] = _mean(own, present)
        for name in TERMS:
            if name in self.terms:
                out[f"term_{name}"] = _mean(self.terms[name].double(), has_target)
            else:
                out[f"term_{name}"] = nan
        if batch.counts is not None:
            total = sum(batch.counts)
            out["variants_total"] = scores.new_full((), total)
            out["variants_mean"] = scores.new_full((), total / max(len(batch.counts), 1))
        else:
            has_loss = (batch.loss == batch.loss).sum().double()
            out["variants_total"] = has_loss
            out["variants_mean"] = has_loss / max(batch.loss.shape[0], 1)
        return out

    @torch.no_grad()
    def target_sums(self) -> Tensor:
        """Return [P, 3, 3] float64: products of score, sign and 1, summed over entries with a target."""
        x, up, down = self.targets
        rows = torch.stack([x * (up + down), up - down, up + down], 1).double()
        return rows @ rows.mT

    def _target_metrics(self) -> dict[str, Tensor]:
        sums = self.target_sums()
        num_masked, balance, aligned = sums[:, 1, 1], sums[:, 1, 2], sums[:, 0, 1]
        num_kept, count = (num_masked > 0).sum().double(), num_masked.sum()
        target = torch.tanh(self.pairs.delta.double())
        sum_x, square_x = sums[:, 0, 2].sum(), sums[:, 0, 0].sum()
        sum_t, square_t = torch.dot(target, balance), torch.dot(target.square(), num_masked)
        spread_x, spread_t = square_x - sum_x * sum_x / count, square_t - sum_t * sum_t / count
        # The rounding error of a constant column is not variation.
        varies = (spread_x > 1e-13 * square_x) & (spread_t > 1e-13 * square_t)
        product = torch.dot(target, aligned) - sum_x * sum_t / count
        return {
            "preference_agreement": (aligned > 0).sum() / num_kept,
            "masked_entries_mean": count / num_kept,
            "pref_span_corr": torch.where(varies, product / (spread_x * spread_t).sqrt(), torch.nan),
        }

    def _advantage_metrics(self, x: Tensor, mean: Tensor) -> dict[str, Tensor]:
        batch = self.batch
        loss = batch.loss.double()
        scored = loss == loss
        column = torch.arange(loss.shape[1], device=loss.device)
        is_baseline = column == batch.baseline[:, None]
        advantage = loss - loss.gather(1, batch.baseline[:, None]) if loss.numel() else loss
        known = advantage == advantage
        other = known & ~is_baseline
        out: dict[str, Tensor] = {}
        if batch.num_contexts == 0 or batch.pos.shape[1] == 0:
            return out
        lowest = torch.where(batch.valid, x, torch.inf).amin(1)
        highest = torch.where(batch.valid, x, -torch.inf).amax(1)
        for name, value in (("mean", mean), ("max", highest), ("min", lowest)):
            correlation = _pearson(value[batch.row], advantage, known)
            out[f"preference_corr_{name}"] = correlation
            out[f"preference_corr_{name}_valid"] = (correlation == correlation).double()
        average = _mean(advantage, other)
        out["adv_delta_mean"] = average
        out["adv_delta_std"] = _mean((advantage - average).square(), other).sqrt()
        out["adv_delta_p95"] = torch.where(other, advantage, torch.nan).reshape(-1).nanquantile(0.95)
        levels = self.config.max_lod + 1
        histogram = torch.zeros(batch.num_contexts, levels, dtype=torch.float64, device=loss.device)
        histogram = histogram.scatter_add(1, batch.lod.long(), batch.valid.double())
        share = histogram / histogram.sum(1, keepdim=True).clamp(min=1)
        for level in range(self.config.max_lod + 1):
            out[f"lod_count/{level}"] = histogram[:, level].sum()
            weight = share[:, level][batch.row]
            out[f"lod_loss/{level}"] = _mean(loss, scored, weight)
            if level:
                out[f"lod_delta/{level}"] = _mean(advantage, other, weight)
        return out

    def read(self) -> dict[str, float | None]:
        """Return all metrics as floats: one transfer from the device."""
        values = dict(self.values())
        host: dict[str, float | None] = {}
        for name, value in self.extra.items():
            if isinstance(value, Tensor):
                values[name] = value.double()
            else:
                host[name] = value
        numbers = torch.stack([v.reshape(()) for v in values.values()]).tolist()
        read = {
            name: (None if number != number else number) for name, number in zip(values, numbers, strict=True)
        }
        return {PREFIX + name: value for name, value in {**read, **host}.items()}


@dataclass
class LensResult:
    """Loss and telemetry of one micro-batch. P pairs.

    Equivalent to, with default weights:
        result = lens_loss(scores, batch, config)
        per_pair = sum(config.objective.weights[name] * value for name, value in result.terms.items())
        loss = per_pair[result.kept].mean()

    Args:
        loss: scalar, float32 or float64, the only tensor here that has a gradient.
        terms: unweighted terms by name, [P] each; inactive terms are absent.
        kept: [P] bool, the pairs that have at least one target.
        active: False if the gate skipped the objective or the controller is frozen.
        state: the moving average of the budget imbalance after this call (0-d), to pass to the next one.
        pairs: the pairs in processing order.
        metrics: telemetry, computed when it is read.
        scores: the scores of the loss, detached; also present if the controller is frozen.
    """

    loss: Tensor
    terms: dict[str, Tensor] = field(default_factory=dict)
    kept: Tensor | None = None  # prose: ignore
    active: bool = True
    state: Tensor | None = None
    pairs: Pairs | None = None
    metrics: LensMetrics | None = None
    scores: Tensor | None = None


@contextlib.contextmanager
def peak_memory(device: torch.device, read: dict[str, float | None]) -> Iterator[None]:
    """Write the block's `peak_lens_mb` and `lens_allocs` into `read`; None without an allocator's counters.

    The process's peak above the level at entry and the bytes allocated inside are both upper bounds of the
    block's peak; the smaller one is reported. It is exact if the block sets a new peak. Peak statistics are
    never reset.
    """
    if device.type != "cuda":
        read["peak_lens_mb"] = read["lens_allocs"] = None
        yield
        return
    level, before = torch.cuda.memory_allocated(device), torch.cuda.memory_stats(device)
    yield
    peak, after = torch.cuda.max_memory_allocated(device) - level, torch.cuda.memory_stats(device)
    inside, count = (
        after.get(name, 0) - before.get(name, 0)
        for name in ("allocated_bytes.all.allocated", "allocation.all.allocated")
    )
    read["peak_lens_mb"], read["lens_allocs"] = min(peak, inside) / 2**20, float(count)


class SectionTimer:
    """Milliseconds between marks, summed by section.

    Call `start(device)`, then `mark("name")` at the end of each section. `read()` returns mean milliseconds
    per call and clears them. With CUDA events it waits for the last one: call it only when logging.
    """

    def __init__(self) -> None:
        self._spans: dict[str, list] = {}
        self._last: float | torch.cuda.Event = 0.0
        self._cuda = False

    def start(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last = self._now()

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self, name: str, since: float | torch.cuda.Event | None = None) -> float | torch.cuda.Event:
        """End a section that began at the previous mark, or at `since`."""
        now = self._now()
        self._spans.setdefault(name, []).append((self._last if since is None else since, now))
        self._last = now
        return now

    def read(self) -> dict[str, float]:
        """Return mean milliseconds per section since the last call."""
        means = {}
        for name, spans in self._spans.items():
            total = 0.0
            for begin, end in spans:
                if isinstance(begin, float) and isinstance(end, float):
                    total += 1000 * (end - begin)
                else:
                    assert not isinstance(begin, float) and not isinstance(end, float)
                    end.synchronize()
                    total += begin.elapsed_time(end)
            means[name] = total / len(spans)
        self._spans.clear()
        return means


def _mean(values: Tensor, mask: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the mean over `mask`; NaN if the mask is empty."""
    weight = mask.double() if weight is None else torch.where(mask, weight, 0)
    return torch.where(mask, values * weight, 0).sum() / torch.where(
        weight.sum() > 0, weight.sum(), torch.nan
    )


def _pearson(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Return the Pearson correlation over `mask`; NaN for fewer than two values or a constant side."""
    dx = torch.where(mask, x - _mean(x, mask), 0)
    dy = torch.where(mask, y - _mean(y, mask), 0)
    size_x, size_y = dx.square().sum().sqrt(), dy.square().sum().sqrt()
    # The rounding error of a constant column is not variation.
    scale_x = torch.where(mask, x, 0).abs().amax() if x.numel() else size_x
    scale_y = torch.where(mask, y, 0).abs().amax() if y.numel() else size_y
    count = mask.sum().clamp(min=1).sqrt()
    varies = (size_x > 1e-12 * scale_x * count) & (size_y > 1e-12 * scale_y * count)
    return torch.where(varies & (mask.sum() >= 2), (dx * dy).sum() / (size_x * size_y), torch.nan)
