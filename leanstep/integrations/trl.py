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
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from leanstep.heads.logprob import Entropy
from leanstep.integrations.causal_lm import (
    check_head,
    check_router,
    last_hidden,
    router_loss,
    score_labels,
)
from leanstep.integrations.class_forward import handle_calls
from leanstep.integrations.versions import require_version

require_version("trl", ("1",))

# After the check, so that a stub fails with our line.
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, SFTTrainer  # noqa: E402

from leanstep.integrations.trl_distill import is_distillation, replace_divergence  # noqa: E402

__all__ = [
    "LeanDPOTrainer",
    "LeanGRPOTrainer",
    "LeanKTOTrainer",
    "LeanSFTTrainer",
    "apply_leanstep",
]

TESTED = ("1.16",)

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
    # TRL reads the entropy on every step for its metric; its gradient matters only with the bonus on.
    bonus = getattr(trainer, "_entropy_bonus_enabled", False)
    policy = FusedCalls(
        _reads(trainer),
        entropy="grad" if bonus else "metric",
        temperature=getattr(trainer, "temperature", 1.0),
        in_fp32=bool(getattr(trainer.args, "cast_lm_head_to_fp32", False)),
    )
    models = [(trainer.model, policy)]
    if getattr(trainer, "ref_model", None) is not None:
        reference = FusedCalls((), "none", policy.temperature, policy.in_fp32)
        models.append((trainer.ref_model, reference))
    for model, calls in models:
        causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        _remove_fused_head(causal)
        if check:
            check_head(causal, of_backbone=True)
            check_router(causal, asked=calls is policy and getattr(trainer, "aux_loss_enabled", False))
        handle_calls(causal, calls)
    return trainer


def _reads(trainer: Any) -> tuple[str, ...]:
    for base in type(trainer).__mro__:
        package, _, name = base.__module__.rpartition(".")
        if package == "trl.trainer" and name in READS:
            return READS[name] + (("log_sum_sq_probs",) if getattr(trainer, "use_weighting", False) else ())
    expected = "TRL's GRPO, RLOO, DPO, KTO, SFT or DistillationTrainer"
    raise ValueError(f"trainer: expected {expected}, got {type(trainer).__name__}")


@dataclass
class FusedCalls:
    """Handles `model(..., fused_lm_head=True)` as TRL's own head does; every other call is the model's own.

    Attributes:
        outputs: fields besides log-probs and entropy.
        entropy: "grad" if it needs a gradient where gradients are on.
    """

    outputs: tuple[str, ...]
    entropy: Entropy
    temperature: float
    in_fp32: bool

    def __call__(self, model: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not kwargs.pop("fused_lm_head", False):
            return stock(*args, **kwargs)
        from trl.trainer.utils import FusedCausalLMOutput

        config = model.config.get_text_config()
        labels, shift_labels = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
        items = kwargs.pop("num_items_in_batch", None)
        target = labels if shift_labels is None else shift_labels
        if target is None:
            raise ValueError("labels: a fused call needs labels or shift_labels, got neither")
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        kwargs["use_cache"] = False
        backbone = model.base_model(*args, **kwargs)
        entropy = "metric" if self.entropy == "grad" and not torch.is_grad_enabled() else self.entropy
        scores = score_labels(
            model,
            last_hidden(model, backbone),
            target,
            shifted=shift_labels is not None,
            entropy=entropy,
            outputs=self.outputs,
            temperature=self.temperature,
            in_fp32=self.in_fp32,
        )
        items = scores.mask.sum().clamp(min=1) if items is None else items
        loss, aux_loss = -scores.logp.sum() / items, None
        if kwargs.get("output_router_logits"):
            aux_loss = router_loss(model, backbone, kwargs.get("attention_mask"))
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


def _remove_fused_head(model: nn.Module) -> None:
    """Remove TRL's own fused forward from the object; its closure would run the original in every copy."""
    function: Any = getattr(vars(model).get("forward"), "__func__", None)
    if getattr(getattr(function, "__code__", None), "co_name", None) != "_fused_forward":
        return
    original = inspect.getclosurevars(function).nonlocals["original_forward"]
    del model.forward
    if getattr(original, "__func__", None) is not type(model).forward:
        model.forward = original


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
