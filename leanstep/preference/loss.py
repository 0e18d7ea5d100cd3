"""The objective of the focus controller over a whole micro-batch: one door for all backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .batch import LensBatch
from .config import LensConfig
from .flat import flat_terms
from .fused import AttachGradient, fused_loss
from .metrics import LensMetrics
from .native import native_loss, native_pairs, why_not
from .pairs import build_pairs, sample_pairs
from .result import LensResult
from .spans import sample_spans
from .targets import build_targets
from .terms import compute_dtype, eager_terms, total_of

BACKENDS = ("auto", "eager", "flat", "fused", "native")


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
    """Loss of the controller's scores against what the base model preferred.

    Equivalent to:
        lens_loss_reference(scores, batch, config)

    Args:
        scores: [V, W] float64, float32, float16 or bfloat16; padded entries are not used.
        batch: the contexts and their losses.
        state: 0-d moving average of the budget imbalance from the previous call; None = 0.
        prev_scores: [V, W] scores that a previous policy gives to the same contexts; no gradient flows into
            them.
        prev_valid: [V] bool, contexts whose `prev_scores` may be used.
        pair_order: permutation of the P pair slots, or a generator that shuffles inside each sample.
        terms: the terms to compute (of those with a weight above 0); None = all of them.
        generator: for pair and span sampling.
        backend: eager (autograd over dense rows; compiles), flat (autograd over one list), fused (closed-form
            gradient in torch operations; a Triton kernel on a GPU), native (the closed form in C++, for CPUs
            with a compiler; needs seconds once per machine), auto (native, else fused; eager while being
            compiled).
        process_group: for `normalize="global"`.
        on_built: called once pairs and targets are there, before the terms; for timers.

    Returns:
        LensResult; `loss` is 0 with zero gradient when no pair has a target.

    Host syncs: none. Cost: O(V T + P W). Peak extra memory: V (T + 1) bytes and a few [P, W] tensors.
    """
    _check(scores, batch, state, prev_scores, prev_valid, backend)
    active = config.active_terms(terms)
    dtype = compute_dtype(scores)
    ema = scores.new_zeros((), dtype=dtype) if state is None else state.detach().to(dtype)
    if backend == "auto":
        backend = "eager" if torch.compiler.is_compiling() else "fused"
        if backend == "fused" and why_not(scores, config) is None:
            backend = "native"
    elif backend == "native" and (reason := why_not(scores, config)) is not None:
        raise ValueError(f'backend: "native" cannot take this call: {reason}')
    with torch.no_grad():
        if backend == "native" and pair_order is None:
            pairs = native_pairs(batch.loss, batch.row, config)
        else:
            pairs = build_pairs(batch.loss, batch.row, config, order=pair_order)
        pairs = sample_pairs(pairs, config, generator)
    divide = _denominator(config, process_group)
    gradients = torch.is_grad_enabled()

    if backend in ("native", "fused"):
        need_grad = scores.requires_grad and gradients
        given = (batch, pairs, config, active, ema, prev_scores, prev_valid)
        with torch.no_grad():
            out = None
            if backend == "native":
                x = scores.detach().to(dtype)
                out = native_loss(x, *given, need_grad=need_grad, on_built=on_built)
            if out is None:
                backend_loss = _fused_backend(scores)
                # The kernel reads any dtype; the torch version works in the dtype of its sums.
                x = scores.detach() if backend_loss is not fused_loss else scores.detach().to(dtype)
                sign = span_weights = None
                if config.span_sampling != "none":
                    sign = build_targets(batch, pairs, config)
                    span_weights = sample_spans(x.to(dtype), sign, pairs, config, generator)
                out = backend_loss(
                    x,
                    *given,
                    divide,
                    sign=sign,
                    span_weights=span_weights,
                    need_grad=need_grad,
                    on_built=on_built,
                )
        loss = AttachGradient.apply(scores, out.loss, out.grad) if need_grad else out.loss
        kept, values, ema = out.kept, out.terms, out.state
    else:
        with torch.no_grad():
            sign = build_targets(batch, pairs, config)
        if on_built is not None:
            on_built()
        x = scores.to(dtype)
        span_weights = sample_spans(x, sign, pairs, config, generator)
        if backend == "flat":
            if span_weights is not None:
                raise ValueError('backend: span sampling needs "eager" or "fused", got "flat"')
            values, kept, ema = flat_terms(
                x, sign, batch, pairs, config, active, ema, prev_scores, prev_valid
            )
        else:
            values, kept, ema = eager_terms(
                x, sign, batch, pairs, config, active, ema, prev_scores, prev_valid, span_weights
            )
        total = total_of(values, config)
        # An empty slice keeps the zero attached to the scores without reading one of them.
        total = x.reshape(-1)[:0] if total is None else torch.where(kept, total, 0)
        loss = total.sum() / divide(kept).to(dtype)
        values = {name: torch.where(kept, value.detach(), 0) for name, value in values.items()}
    metrics = LensMetrics(scores.detach(), batch, config, pairs, kept, values, loss.detach(), ema)
    return LensResult(loss, values, kept, True, ema, pairs, metrics, scores.detach())


def _fused_backend(x: Tensor) -> Callable:
    if x.is_cuda:
        from .kernel import triton_loss

        return triton_loss
    return fused_loss


def _denominator(config: LensConfig, process_group: object | None) -> Callable[[Tensor], Tensor]:
    def local(kept: Tensor) -> Tensor:
        return kept.sum().clamp(min=1)

    def everywhere(kept: Tensor) -> Tensor:
        # Gradient averaging over ranks divides by the world size once more.
        count = kept.sum().double()
        torch.distributed.all_reduce(count, group=process_group)  # type: ignore[arg-type]
        return count.clamp(min=1) / torch.distributed.get_world_size(process_group)  # type: ignore[arg-type]

    if config.normalize == "global":
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise ValueError('normalize: "global" needs an initialised torch.distributed process group')
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
        raise ValueError(f"scores: on {scores.device}, but the batch is on {batch.pos.device}")
    if state is not None and state.dim() != 0:
        raise ValueError(f"state: expected a 0-d tensor, got shape {tuple(state.shape)}")
    if prev_scores is not None and tuple(prev_scores.shape) != expected:
        raise ValueError(f"prev_scores: expected shape {expected}, got {tuple(prev_scores.shape)}")
    if prev_valid is not None and (tuple(prev_valid.shape) != expected[:1] or prev_valid.dtype != torch.bool):
        raise ValueError(
            f"prev_valid: expected bool of shape {expected[:1]}, "
            f"got {prev_valid.dtype} {tuple(prev_valid.shape)}"
        )
