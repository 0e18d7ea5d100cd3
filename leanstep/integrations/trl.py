"""TRL: labelled rows only, inside the stock GRPO, RLOO, DPO, KTO and SFT trainers.

    from leanstep.integrations.trl import LeanDPOTrainer       # in place of trl.DPOTrainer
or  apply_leanstep(trainer)                                    # on a trainer that exists

TRL 1.16 asks its model for per-token log-probs with `model(..., labels=, fused_lm_head=True)`. The adapter
handles that call with `linear_logprobs` on the labelled rows and leaves everything else (generation, rewards,
advantages, the loss, metrics, DDP and FSDP wrapping) to TRL.
"""

# Both packages export their names lazily, which a type checker cannot follow.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from leanstep.integrations.causal_lm import check_head, check_router, router_loss, score_labels
from leanstep.integrations.versions import require_version
from leanstep.logprob.inputs import Entropy

require_version("trl", ("1",))

# After the check, so that a stub fails with our line.
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, SFTTrainer  # noqa: E402

from leanstep.integrations.trl_distill import is_distillation, replace_divergence  # noqa: E402
from leanstep.integrations.trl_reward import (  # noqa: E402
    TESTED,
    GroupCollator,
    LeanRewardTrainer,
    reward_loss,
)

__all__ = [
    "GroupCollator",
    "LeanDPOTrainer",
    "LeanGRPOTrainer",
    "LeanKTOTrainer",
    "LeanRewardTrainer",
    "LeanSFTTrainer",
    "apply_leanstep",
    "reward_loss",
]

# Outputs of the policy that a trainer reads besides log-probs and entropy. A reference needs only log-probs.
READS = {
    "grpo_trainer": (),
    "rloo_trainer": (),
    "sft_trainer": ("is_top1",),
    "dpo_trainer": ("mean_logits", "is_top1"),
    "kto_trainer": ("mean_logits",),
}


def apply_leanstep(trainer: Any, *, allow_untested: bool = False, check: bool = True) -> Any:
    """Replace the head of `trainer`'s models by leanstep's and return the trainer.

    Args:
        trainer: TRL's GRPOTrainer, RLOOTrainer, DPOTrainer, KTOTrainer, SFTTrainer or DistillationTrainer,
            before `train()`.
        allow_untested: try a TRL version this was not tested with.
        check: compare our logits with each model's own on three tokens.

    Raises:
        UnknownVersion, ValueError: what is not supported is refused here, before the first step.
    """
    require_version("trl", TESTED, allow_untested=allow_untested)
    if is_distillation(trainer):
        return replace_divergence(trainer)
    reads = _reads(trainer)
    options = {
        "temperature": getattr(trainer, "temperature", 1.0),
        "in_fp32": bool(getattr(trainer.args, "cast_lm_head_to_fp32", False)),
    }

    def entropy_mode() -> Entropy:
        # TRL reads the entropy on every step for its metric; its gradient matters only with the bonus on.
        bonus = getattr(trainer, "_entropy_bonus_enabled", False)
        return "grad" if bonus and torch.is_grad_enabled() else "metric"

    answers: list[tuple[Any, tuple[str, ...], Callable[[], Entropy]]] = [(trainer.model, reads, entropy_mode)]
    if getattr(trainer, "ref_model", None) is not None:
        answers.append((trainer.ref_model, (), lambda: "none"))
    for model, outputs, entropy in answers:
        causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        if check:
            check_head(causal)
            check_router(causal, asked=model is trainer.model and getattr(trainer, "aux_loss_enabled", False))
        _answer_fused_calls(causal, entropy, outputs=outputs, **options)
    return trainer


def _reads(trainer: Any) -> tuple[str, ...]:
    for base in type(trainer).__mro__:
        package, _, name = base.__module__.rpartition(".")
        if package == "trl.trainer" and name in READS:
            return READS[name] + (("log_sum_sq_probs",) if getattr(trainer, "use_weighting", False) else ())
    expected = "TRL's GRPO, RLOO, DPO, KTO, SFT or DistillationTrainer"
    raise ValueError(f"trainer: expected {expected}, got {type(trainer).__name__}")


def _answer_fused_calls(model: nn.Module, entropy_mode: Callable[[], Entropy], **options: Any) -> None:
    from trl.trainer.utils import FusedCausalLMOutput

    stock = model.forward
    config = model.config.get_text_config()  # type: ignore[union-attr]

    # Keep the model's signature: `generate` validates its keyword arguments against it.
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
            label_arguments = {
                "labels": labels,
                "shift_labels": shift_labels,
                "num_items_in_batch": num_items_in_batch,
            }
            return stock(*args, **{k: v for k, v in label_arguments.items() if v is not None}, **kwargs)
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        kwargs["use_cache"] = False
        backbone = self.base_model(*args, **kwargs)
        shifted = shift_labels is not None
        target = shift_labels if shifted else labels
        if target is None:
            raise ValueError("labels: a fused call needs labels or shift_labels, got neither")
        scores = score_labels(
            self, backbone.last_hidden_state, target, shifted=shifted, entropy=entropy_mode(), **options
        )
        items = scores.mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss, aux_loss = -scores.logp.sum() / items, None
        if kwargs.get("output_router_logits"):
            aux_loss = router_loss(self, backbone, kwargs.get("attention_mask"))
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
        return FusedCausalLMOutput(
            loss=loss,
            log_probs=scores.logp,
            entropy=scores.entropy,
            log_sum_sq_probs=scores.log_sum_sq_probs,
            mean_logits=scores.mean_logits,
            is_top1=scores.is_top1,
            label_mask=scores.mask,
            aux_loss=aux_loss,
        )

    model.forward = types.MethodType(forward, model)


class _LeanHead:
    """Mix-in for a TRL trainer: takes the same arguments, and also supports LoRA on the head."""

    def __init__(self, *args: Any, allow_untested: bool = False, **kwargs: Any) -> None:
        with _adapter_on_head_allowed(type(self)):
            super().__init__(*args, **kwargs)
        trainer: Any = self
        if getattr(trainer, "precompute_ref_logps", False) and "ref" in getattr(
            trainer.model, "peft_config", {}
        ):
            # The constructor has computed them with TRL's head.
            if hasattr(trainer.model.get_output_embeddings(), "lora_A"):
                raise ValueError(
                    "precompute_ref_log_probs: expected False with a trained adapter on the head"
                )
        apply_leanstep(self, allow_untested=allow_untested)


class LeanGRPOTrainer(_LeanHead, GRPOTrainer):
    """`trl.GRPOTrainer` with leanstep's head."""


class LeanDPOTrainer(_LeanHead, DPOTrainer):
    """`trl.DPOTrainer` with leanstep's head, on the policy and on the reference model."""


class LeanKTOTrainer(_LeanHead, KTOTrainer):
    """`trl.KTOTrainer` with leanstep's head, on the policy and on the reference model."""


class LeanSFTTrainer(_LeanHead, SFTTrainer):
    """`trl.SFTTrainer` with leanstep's head."""


@contextlib.contextmanager
def _adapter_on_head_allowed(trainer_class: type) -> Iterator[None]:
    """Disable TRL's refusal of a LoRA head: its own kernel would ignore the adapter, leanstep's does not.

    The refusal is an isinstance check in the constructor; inside this context no layer is an instance.
    """

    class NoLayer:
        pass

    modules = {sys.modules[base.__module__] for base in trainer_class.__mro__}
    changed = [module for module in modules if hasattr(module, "BaseTunerLayer")]
    originals = [module.BaseTunerLayer for module in changed]
    for module in changed:
        module.BaseTunerLayer = NoLayer
    try:
        yield
    finally:
        for module, original in zip(changed, originals, strict=True):
            module.BaseTunerLayer = original
