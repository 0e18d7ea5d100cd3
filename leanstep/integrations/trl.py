"""TRL: completion rows only, entropy with its gradient, inside the stock GRPOTrainer.

    from leanstep.integrations.trl import LeanGRPOTrainer      # in place of trl.GRPOTrainer
or  apply_leanstep(trainer)                                    # on a trainer that exists

TRL 1.16 asks its model for per-token log-probs with `model(..., labels=, fused_lm_head=True)`. The adapter
answers that call with `linear_logprobs` on the labelled rows and leaves everything else (generation, rewards,
advantages, the loss, metrics, DDP and FSDP wrapping) to TRL.
"""

# Both packages export their names lazily, which a type checker cannot follow.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from leanstep.integrations.causal_lm import check_head, score_labels
from leanstep.integrations.versions import require_version
from leanstep.logprob.inputs import Entropy

require_version("trl", ("1",))

from trl import GRPOTrainer  # noqa: E402 - after the check, so that a stub fails with our line

from leanstep.integrations.trl_distill import is_distillation, replace_divergence  # noqa: E402
from leanstep.integrations.trl_reward import (  # noqa: E402
    TESTED,
    GroupCollator,
    LeanRewardTrainer,
    reward_loss,
)

__all__ = ["GroupCollator", "LeanGRPOTrainer", "LeanRewardTrainer", "apply", "apply_leanstep", "reward_loss"]


def apply_leanstep(trainer: Any, *, allow_untested: bool = False, check: bool = True) -> Any:
    """Replace the head of `trainer`'s models by leanstep's; returns the trainer.

    Args:
        trainer: a `trl.GRPOTrainer` or a `trl.DistillationTrainer`, before `train()`.
        allow_untested: try a TRL version this was not tested with.
        check: compare our logits with each model's own on three tokens.

    Raises:
        UnknownVersion, ValueError: what is not supported is refused here, before the first step.
    """
    require_version("trl", TESTED, allow_untested=allow_untested)
    if is_distillation(trainer):
        return replace_divergence(trainer)
    if getattr(trainer, "aux_loss_enabled", False):
        raise ValueError("trainer: router_aux_loss_coef needs TRL's own head; expected 0 with leanstep")
    if not hasattr(trainer, "_get_per_token_logps_and_entropies"):
        raise ValueError(f"trainer: expected a trl.GRPOTrainer, got {type(trainer).__name__}")
    fp32_head = bool(trainer.args.cast_lm_head_to_fp32)

    def entropy_mode() -> Entropy:
        # TRL reads the entropy on every step for its metric; its gradient matters only with the bonus on.
        return "grad" if trainer._entropy_bonus_enabled and torch.is_grad_enabled() else "metric"

    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            causal = model.get_base_model() if hasattr(model, "get_base_model") else model
            if check:
                check_head(causal)
            _answer_fused_calls(causal, trainer.temperature, fp32_head, entropy_mode)
    return trainer


def apply(trainer: Any, **options: Any) -> Any:
    """The old name of `apply_leanstep`."""
    warnings.warn("apply is deprecated, use apply_leanstep", DeprecationWarning, stacklevel=2)
    return apply_leanstep(trainer, **options)


def _answer_fused_calls(model: nn.Module, temperature: float, in_fp32: bool, entropy_mode: Any) -> None:
    from trl.trainer.utils import FusedCausalLMOutput

    stock = model.forward

    # The signature stays the model's own: `generate` validates its keyword arguments against it.
    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            return stock(*args, **{k: v for k, v in given.items() if v is not None}, **kwargs)
        hidden = self.base_model(*args, **{**kwargs, "use_cache": False}).last_hidden_state
        shifted = shift_labels is not None
        target = shift_labels if shifted else labels
        if target is None:
            raise ValueError("labels: a fused call needs labels or shift_labels, got neither")
        scores = score_labels(
            self,
            hidden,
            target,
            shifted=shifted,
            entropy=entropy_mode(),
            temperature=temperature,
            in_fp32=in_fp32,
        )
        items = scores.mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return FusedCausalLMOutput(
            loss=-scores.logp.sum() / items,
            log_probs=scores.logp,
            entropy=scores.entropy,
            label_mask=scores.mask,
        )

    model.forward = types.MethodType(forward, model)


class LeanGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` with leanstep's head; takes the same arguments, and LoRA on the head as well."""

    def __init__(self, *args: Any, allow_untested: bool = False, **kwargs: Any) -> None:
        with _adapter_on_head_allowed():
            super().__init__(*args, **kwargs)
        apply_leanstep(self, allow_untested=allow_untested)


@contextlib.contextmanager
def _adapter_on_head_allowed() -> Iterator[None]:
    """TRL refuses a LoRA head because its own kernel would ignore the adapter; leanstep's does not.

    The refusal is an isinstance check in the constructor; for its duration no layer is an instance.
    """
    from trl.trainer import grpo_trainer

    class NoLayer:
        pass

    original = getattr(grpo_trainer, "BaseTunerLayer", None)
    if original is not None:
        grpo_trainer.BaseTunerLayer = NoLayer
    try:
        yield
    finally:
        if original is not None:
            grpo_trainer.BaseTunerLayer = original
