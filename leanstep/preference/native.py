"""The objective on a CPU in two calls of native.cpp, which `leanstep.cpu` builds once per machine.

Same contract as `fused_loss`. Sampling, global normalisation and contexts whose positions do not ascend go
to the torch version; KL and coverage are computed there too. Without a compiler everything does.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, c_double, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from leanstep.cpu import has_memory, load_library

from .batch import LensBatch
from .config import LensConfig
from .fused import FusedOutput, context_terms
from .pairs import Pairs, pairs_per_sample
from .terms import total_of

SOURCE = Path(__file__).with_name("native.cpp")
ROW_TERMS = ("pref", "rank", "budget", "smooth")
FORMS = {"logistic": 0, "hinge": 1, "squared_hinge": 2}


class _Contexts(ctypes.Structure):
    _fields_ = [
        ("pos", c_void_p),
        ("lod", c_void_p),
        ("valid", c_void_p),
        ("num_contexts", c_int64),
        ("width", c_int64),
        ("ascending", c_int64),
    ]


class _PairList(ctypes.Structure):
    _fields_ = [
        ("better", c_void_p),
        ("worse", c_void_p),
        ("delta", c_void_p),
        ("live", c_void_p),
        ("num_pairs", c_int64),
    ]


class _Settings(ctypes.Structure):
    _fields_ = [
        *((name, c_double) for name in ("margin", "rank_weight", "budget_weight", "smooth_weight")),
        *((name, c_double) for name in ("smooth_beta", "collapse_weight", "hinge_margin", "tau")),
        *((name, c_int64) for name in ("block_size", "max_lod", "form")),
        *((name, c_int64) for name in (*ROW_TERMS, "need_grad")),
    ]


class _Outputs(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in (*ROW_TERMS, "kept", "grad", "state", "loss")]


def _declare(library: ctypes.CDLL) -> None:
    library.lens_rows.argtypes = [
        POINTER(_Contexts),
        POINTER(_PairList),
        POINTER(_Settings),
        POINTER(_Outputs),
        c_void_p,
        c_int64,
        c_int64,
    ]
    library.lens_rows.restype = c_int
    library.lens_pairs.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_double, c_int64] + [
        c_void_p
    ] * 5
    library.lens_pairs.restype = None


def _library() -> ctypes.CDLL:
    library = load_library(SOURCE, _declare)
    assert not isinstance(library, str), library
    return library


def why_not(scores: Tensor, config: LensConfig) -> str | None:
    """Why the native path cannot take this call; None if it can."""
    if scores.device.type != "cpu":
        return f"scores are on {scores.device}, expected cpu"
    if config.normalize == "global":
        return 'normalize is "global", expected "local"'
    if config.span_sampling != "none":
        return f'span_sampling is "{config.span_sampling}", expected "none"'
    if not has_memory(scores):
        return f"scores are a {type(scores).__name__}, expected a plain tensor"
    library = load_library(SOURCE, _declare)
    return library if isinstance(library, str) else None


def native_pairs(loss: Tensor, row: Tensor, config: LensConfig) -> Pairs:
    """`build_pairs` in its own order; unused slots hold the sample's first context twice."""
    library = _library()
    num_samples, num_variants = loss.shape
    slots = pairs_per_sample(num_variants, config)
    loss, row = loss.contiguous(), row.contiguous()
    contexts = torch.empty(2, num_samples * slots, dtype=torch.int64)
    flags = torch.empty(2, num_samples * slots, dtype=torch.bool)
    delta = torch.empty(num_samples * slots, dtype=loss.dtype)
    (better, worse), (live, valid) = contexts.unbind(0), flags.unbind(0)
    library.lens_pairs(
        loss.data_ptr(),
        row.data_ptr(),
        num_samples,
        num_variants,
        slots,
        config.hard_negative_ratio,
        loss.dtype == torch.float64,
        better.data_ptr(),
        worse.data_ptr(),
        delta.data_ptr(),
        live.data_ptr(),
        valid.data_ptr(),
    )
    return Pairs(better, worse, delta, live, valid)


@functools.lru_cache(maxsize=64)
def _settings(config: LensConfig, active: tuple[str, ...], need_grad: bool) -> _Settings:
    switches = [name in active for name in ROW_TERMS]
    return _Settings(
        config.margin,
        config.rank_weight,
        config.budget_weight,
        config.budget_smooth_weight,
        config.budget_smooth_beta,
        config.collapse_weight,
        config.hinge_margin,
        config.tau,
        config.block_size,
        config.max_lod,
        FORMS[config.form],
        *switches,
        need_grad,
    )


def native_loss(
    scores: Tensor,
    batch: LensBatch,
    pairs: Pairs,
    config: LensConfig,
    active: tuple[str, ...],
    state: Tensor,
    prev_scores: Tensor | None,
    prev_valid: Tensor | None,
    *,
    need_grad: bool = True,
    on_built: Callable[[], None] | None = None,
) -> FusedOutput | None:
    """Loss and gradient of one micro-batch; None when a context has holes or its positions do not ascend.

    Args:
        scores: [V, W] float32 or float64, detached.
    """
    library = _library()
    scores = scores.contiguous()
    num_pairs = pairs.worse.shape[0]
    names = [name for name in ROW_TERMS if name in active]
    values = torch.zeros(len(names), num_pairs, dtype=scores.dtype)
    columns = dict(zip(names, values.unbind(0), strict=True))
    kept = torch.empty(num_pairs, dtype=torch.bool)
    # The average after this call, and the loss.
    scalars = torch.stack([state, torch.zeros_like(state)])
    after, loss = scalars.unbind(0)
    grad = torch.zeros_like(scores) if need_grad else None
    tensors = [
        batch.pos,
        batch.lod,
        batch.valid,
        *(getattr(pairs, n) for n in ("better", "worse", "delta", "live")),
    ]
    pos, lod, valid, better, worse, delta, live = (t.contiguous() for t in tensors)
    contexts = _Contexts(
        pos.data_ptr(), lod.data_ptr(), valid.data_ptr(), *scores.shape, batch.gists is not None
    )
    listed = _PairList(better.data_ptr(), worse.data_ptr(), delta.data_ptr(), live.data_ptr(), num_pairs)
    places = [columns[name].data_ptr() if name in columns else None for name in ROW_TERMS]
    outputs = _Outputs(
        *places,
        kept.data_ptr(),
        None if grad is None else grad.data_ptr(),
        after.data_ptr(),
        loss.data_ptr(),
    )
    failed = library.lens_rows(
        contexts,
        listed,
        _settings(config, active, need_grad),
        outputs,
        scores.data_ptr(),
        scores.dtype == torch.float64,
        delta.dtype == torch.float64,
    )
    if failed:
        return None
    if on_built is not None:
        on_built()
    if set(active) - set(ROW_TERMS):
        factor = kept / kept.sum().clamp(min=1).to(scores.dtype)
        context_terms(
            scores, batch, pairs, config, active, prev_scores, prev_valid, columns, kept, factor, grad
        )
        total = total_of(columns, config)
        if total is not None:
            loss = torch.dot(total, factor)
    return FusedOutput(loss, columns, kept, after if "smooth" in active else state, grad)
