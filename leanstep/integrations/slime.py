"""slime: `get_log_probs_and_entropy` with slime's calling convention; a user swaps one import.

    # from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
    from leanstep.integrations.slime import get_log_probs_and_entropy

or, where slime itself calls the function, once before training:

    from slime.backends.megatron_utils import loss
    apply_leanstep(loss)

`args` is slime's own: `rollout_temperature`, `log_probs_chunk_size`, `qkv_format`, `allgather_cp`, and the
switches of pull request 2076, `log_probs_response_only` and `log_probs_loss_mask_only` (both default off).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leanstep.integrations.versions import require_version
from leanstep.logprob import Tuning, VocabShards, token_logprobs
from leanstep.logprob.layout import Layout
from leanstep.logprob.parallel import return_parts
from leanstep.logprob.rows import plan_rows


def apply_leanstep(loss_module: Any) -> Any:
    """Replace `get_log_probs_and_entropy` in slime's loss module by leanstep's; returns the module."""
    if not hasattr(loss_module, "get_log_probs_and_entropy"):
        name = getattr(loss_module, "__name__", type(loss_module).__name__)
        raise ValueError(f"loss_module: expected slime.backends.megatron_utils.loss, got {name}")
    loss_module.get_log_probs_and_entropy = get_log_probs_and_entropy
    return loss_module


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    max_seq_lens: Sequence[int] | None = None,
    loss_masks: Sequence[Tensor] | None = None,
    tp_group: Any = "megatron",
    cp_group: Any = "megatron",
    allow_untested: bool = False,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Per-sample log-probs (and entropy) of the local response tokens.

    Args:
        logits: [1, T, V / TP] (thd) or [B, S, V / TP] (bshd), not modified.
        loss_masks: per sample, length R; needed by `log_probs_loss_mask_only`.
        tp_group, cp_group: "megatron" takes them from `parallel_state`; a group, a mesh or None otherwise.
        allow_untested: try a Megatron-Core version this was not tested with.

    Returns:
        An empty tensor and {"log_probs": [...], "entropy": [...]}, as slime does. Entropy carries a gradient
        exactly when slime's does: with `with_entropy` and `args.entropy_coef` not zero.
    """
    response_only = bool(getattr(args, "log_probs_response_only", False))
    loss_mask_only = bool(getattr(args, "log_probs_loss_mask_only", False))
    if loss_mask_only and not response_only:
        raise ValueError("log_probs_loss_mask_only: needs log_probs_response_only")
    if loss_mask_only and loss_masks is None:
        raise ValueError("loss_masks: log_probs_loss_mask_only needs them, got None")
    tp_group, cp_group, cp_size, cp_rank = _groups(tp_group, cp_group, allow_untested)
    flat = logits.reshape(-1, logits.shape[-1])
    plan = plan_rows(
        total_lengths,
        response_lengths,
        layout=_layout(args, cp_size),
        cp_size=cp_size,
        cp_rank=cp_rank,
        local_len=flat.shape[0],
        max_seq_len=None if max_seq_lens is None else int(max_seq_lens[0]),
        loss_masks=loss_masks if loss_mask_only else None,  # type: ignore[arg-type]
        select="loss_mask" if loss_mask_only else "response" if response_only else "all",
        device=logits.device,
    )
    entropy = "none" if not with_entropy else "grad" if getattr(args, "entropy_coef", 1.0) else "metric"
    chunk = getattr(args, "log_probs_chunk_size", -1)
    scored = token_logprobs(
        flat,
        plan.targets([t.to(logits.device) for t in unconcat_tokens]),
        rows=plan.rows,
        entropy=entropy,
        temperature=float(getattr(args, "rollout_temperature", 1.0)),
        shards=None if tp_group is None else VocabShards(tp_group, total=getattr(args, "vocab_size", None)),
        tuning=None if chunk is None or chunk <= 0 else Tuning(tile=(int(chunk), None)),
    )
    values = [scored.logp] if scored.entropy is None else [scored.logp, scored.entropy]
    parts = return_parts(plan, cp_group, *values)
    result = {"log_probs": parts[0]}
    if with_entropy:
        result["entropy"] = parts[1]
    return torch.empty((0,), device=logits.device), result


def _layout(args: Namespace, cp_size: int) -> Layout:
    form = getattr(args, "qkv_format", "thd")
    if form not in ("thd", "bshd"):
        raise ValueError(f"qkv_format: expected thd or bshd, got {form!r}")
    if getattr(args, "allgather_cp", False) and cp_size > 1:
        if form == "bshd":
            raise ValueError("allgather_cp: expected qkv_format thd, got bshd")
        return "allgather"
    if cp_size > 1:
        return "zigzag" if form == "thd" else "bshd_zigzag"
    return form  # type: ignore[return-value]


def _groups(tp_group: Any, cp_group: Any, allow_untested: bool) -> tuple[Any, Any, int, int]:
    if "megatron" in (tp_group, cp_group):
        from leanstep.integrations import megatron

        require_version("megatron-core", megatron.TESTED, allow_untested=allow_untested)
        state = megatron.parallel_state
        ready = state.model_parallel_is_initialized()
        tp_group = megatron.tensor_parallel_group() if tp_group == "megatron" else tp_group
        if cp_group == "megatron":
            cp_group = state.get_context_parallel_group() if ready else None
    if cp_group is None:
        return tp_group, None, 1, 0
    from leanstep.logprob.parallel import resolve_group

    group = resolve_group(cp_group, "cp")
    if group is None:
        return tp_group, None, 1, 0
    return tp_group, group, group.size(), group.rank()
