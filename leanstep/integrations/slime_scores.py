"""slime's `get_log_probs_and_entropy` with leanstep: from logits, or from hidden states.

A `RowPlan` says which rows are computed and where their results go; this module translates slime's arguments.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.heads import (
    LogProbs,
    RowPlan,
    place_response,
    plan_rows,
    return_parts,
    select_allowed,
    slice_response,
    token_logprobs,
)
from leanstep.heads.layout import Layout
from leanstep.heads.parallel import resolve_group

# Total and response lengths of the samples.
Lengths = tuple[Sequence[int], Sequence[int]]

# Of slime's main branch, its pull request 2076 and miles.
KNOWN_PARAMETERS = {
    "logits",
    "args",
    "unconcat_tokens",
    "total_lengths",
    "response_lengths",
    "with_entropy",
    "entropy_requires_grad",
    "non_loss_data",
    "top_p_token_ids",
    "top_p_token_offsets",
    "max_seq_lens",
    "full_loss_mask",
}


@dataclass
class Scorer:
    """The function that replaces slime's, with the state it needs besides its arguments.

    Attributes:
        returns_pair: slime returns an empty tensor before the results, miles does not.
        from_hidden: the model's output is hidden states, produced by `output`.
        output: the output layer of this process (`megatron.HiddenOutput`), set when the model is built.
        loss_masks: of the micro-batch whose policy loss is being computed, else None.
    """

    returns_pair: bool
    from_hidden: bool
    output: Any = None
    loss_masks: Sequence[Tensor] | None = None

    def get_log_probs_and_entropy(
        self,
        logits: Tensor,
        *,
        args: Namespace,
        unconcat_tokens: Sequence[Tensor],
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        with_entropy: bool = False,
        non_loss_data: bool = True,
        **options: Any,
    ) -> Any:
        """Return log-probs, and entropy, of the local response tokens: lists with one tensor per sample.

        Args:
            logits: [1, T, V / TP] (thd) or [B, S, V / TP] (bshd), not modified; or hidden states, D wide.
            options: `top_p_token_ids` and `top_p_token_offsets`, `max_seq_lens`, `full_loss_mask`,
                `entropy_requires_grad`.

        Returns:
            What slime returns. Entropy carries a gradient exactly when slime's does.
        """
        lengths = (total_lengths, response_lengths)
        flat = logits.flatten(0, -2)
        plan = self._plan(args, flat, lengths, options)
        allowed = _allowed(plan, options)
        entropy_grad = options.get("entropy_requires_grad", getattr(args, "entropy_coef", 0.0) != 0)
        settings: dict[str, Any] = {
            "entropy": "none" if not with_entropy else "grad" if entropy_grad else "metric",
            "temperature": float(getattr(args, "rollout_temperature", 1.0)),
            "allowed": allowed,
        }
        targets = plan.targets([tokens.to(logits.device) for tokens in unconcat_tokens])
        if self.from_hidden:
            self.output.check(logits)
            scores = self.output.logprobs(flat, targets, plan, **settings)
        else:
            scores = _from_logits(flat, targets, plan, args, settings)
        values = [scores.logp] if scores.entropy is None else [scores.logp, scores.entropy]
        results = dict(
            zip(("log_probs", "entropy"), return_parts(plan, context_group(), *values), strict=False)
        )
        return (torch.empty((0,), device=logits.device), results) if self.returns_pair else results

    def _plan(
        self,
        args: Namespace,
        flat: Tensor,
        lengths: Lengths,
        options: dict[str, Any],
    ) -> RowPlan:
        if self.from_hidden and self.output is None:
            expected = "a model that get_model_provider_func has built in this process"
            raise ValueError(f"--log-probs-from-hidden: expected {expected}")
        num_rows = self.output.num_rows(flat.shape[0]) if self.from_hidden else flat.shape[0]
        plan = row_plan(args, lengths, options.get("max_seq_lens"), local_len=num_rows, device=flat.device)
        masks, full_mask = self.loss_masks, options.get("full_loss_mask")
        if not getattr(args, "log_probs_loss_mask_only", False) or (masks is None and full_mask is None):
            return plan
        if full_mask is not None:
            assert plan.rows is not None
            masks = place_response(plan.split(full_mask.flatten()[plan.rows]), plan)
        return row_plan(
            args,
            lengths,
            options.get("max_seq_lens"),
            local_len=num_rows,
            device=flat.device,
            loss_masks=_on_host(masks),  # type: ignore[arg-type]
        )


def without_masked_values(args: Namespace, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch with stored log-probs of 0 wherever the loss mask is 0, like the new ones.

    A stored log-prob below -88 beside a new one of 0 is an infinite ratio, and infinity times 0 is NaN.
    """
    lengths = (batch["total_lengths"], batch["response_lengths"])
    plan = row_plan(args, lengths, batch.get("max_seq_lens")).returned()
    masks = slice_response(batch["loss_masks"], plan)
    changed = dict(batch)
    for key in ("log_probs", "ref_log_probs", "rollout_log_probs"):
        if batch.get(key):
            pairs = zip(batch[key], masks, strict=True)
            changed[key] = [x.masked_fill(mask.to(x.device) == 0, 0.0) for x, mask in pairs]
    return changed


def row_plan(
    args: Namespace,
    lengths: Lengths,
    max_seq_lens: Sequence[int] | None,
    *,
    local_len: int | None = None,
    device: torch.device | str = "cpu",
    loss_masks: Sequence[Tensor] | None = None,
) -> RowPlan:
    """Return this rank's rows that score a response token; with `loss_masks`, those whose mask is 1."""
    group = resolve_group(context_group(), "cp")
    cp_size, cp_rank = (1, 0) if group is None else (group.size(), group.rank())
    return plan_rows(
        lengths[0],
        lengths[1],
        layout=_layout(args, cp_size),
        cp_size=cp_size,
        cp_rank=cp_rank,
        local_len=local_len,
        max_seq_len=None if max_seq_lens is None else int(max_seq_lens[0]),
        loss_masks=loss_masks,
        select="response" if loss_masks is None else "loss_mask",
        device=device,
    )


def context_group() -> Any:
    """Return Megatron's context-parallel group, or None if it is not initialised (one rank)."""
    from megatron.core import parallel_state

    ready = parallel_state.model_parallel_is_initialized()
    return parallel_state.get_context_parallel_group() if ready else None


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


def _allowed(plan: RowPlan, options: dict[str, Any]) -> tuple[Tensor, ...] | None:
    """Return the ids in the rollout's top-p set, per row; all ids for a response token without a set."""
    ids, offsets = options.get("top_p_token_ids"), options.get("top_p_token_offsets")
    if ids is None or offsets is None:
        return None
    return select_allowed(_on_host(ids), _on_host(offsets), plan)


def _from_logits(
    flat: Tensor, targets: Tensor, plan: RowPlan, args: Namespace, settings: dict[str, Any]
) -> LogProbs:
    from leanstep.integrations import megatron

    chunk = getattr(args, "log_probs_chunk_size", -1)
    return token_logprobs(
        flat,
        targets,
        rows=plan.rows,
        # Padded columns count, as they do in slime.
        group=megatron.tensor_parallel_group(),
        chunk_rows=int(chunk) if chunk is not None and chunk > 0 else None,
        **settings,
    )


def _on_host(values: Sequence[Any]) -> list[Tensor]:
    """Return tensors or lists as host tensors, in one copy from the device."""
    tensors = [torch.as_tensor(value) for value in values]
    if not tensors or tensors[0].device.type == "cpu":
        return tensors
    return list(torch.cat(tensors).cpu().split([tensor.numel() for tensor in tensors]))
