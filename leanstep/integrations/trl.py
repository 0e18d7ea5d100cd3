"""TRL: completion rows only, entropy with its gradient, inside the stock GRPOTrainer.

    from leanstep.integrations.trl import LeanGRPOTrainer      # in place of trl.GRPOTrainer
or  apply(trainer)                                             # on a trainer that exists

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
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from leanstep.integrations.causal_lm import check_head, score_labels
from leanstep.integrations.versions import require_version
from leanstep.logprob.outputs import Entropy
from leanstep.preference.ragged import bradley_terry

TESTED = ("1.16",)

require_version("trl", ("1",))

from trl import GRPOTrainer, RewardTrainer  # noqa: E402 - after the check, so that a stub fails with our line


def apply(trainer: Any, *, allow_untested: bool = False, check: bool = True) -> Any:
    """Replace the head of `trainer`'s models by leanstep's; returns the trainer.

    Args:
        trainer: a `trl.GRPOTrainer`, before `train()`.
        allow_untested: try a TRL version this was not tested with.
        check: compare our logits with each model's own on three tokens.

    Raises:
        UnknownVersion, ValueError: what is not supported is refused here, before the first step.
    """
    require_version("trl", TESTED, allow_untested=allow_untested)
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
        apply(self, allow_untested=allow_untested)


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


class LeanRewardTrainer(RewardTrainer):
    """`trl.RewardTrainer` whose pairwise loss is `leanstep.preference.ragged.bradley_terry`.

    For one pair per prompt the two are the same function. The ragged form also takes K answers per prompt
    (`group_offsets` and `labels` in the batch: answers of one prompt are neighbours, a higher label is
    better) without building the pairs.
    """

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        offsets, labels = inputs.pop("group_offsets", None), inputs.pop("labels", None)
        margin = inputs.pop("margin", None)
        outputs = model(**{**inputs, "use_cache": False})
        rewards = outputs.logits.squeeze(-1)
        loss = reward_loss(rewards, margin=margin, offsets=offsets, labels=labels)
        if self.args.center_rewards_coefficient is not None:
            if offsets is not None:
                raise ValueError("center_rewards_coefficient: has no meaning for groups, expected None")
            chosen, rejected = rewards.chunk(2)
            loss = loss + self.args.center_rewards_coefficient * ((chosen + rejected) ** 2).mean()
        self._log_rewards(rewards.detach(), inputs["attention_mask"], pairs=offsets is None)
        return (loss, outputs) if return_outputs else loss

    def _log_rewards(self: Any, rewards: Tensor, attention_mask: Tensor, *, pairs: bool) -> None:
        """The metrics that TRL logs, from one stacked read of the device."""
        mode = "train" if self.model.training else "eval"
        gather = self.accelerator.gather
        if mode == "train":
            self._total_train_tokens += int(gather(attention_mask.sum()).sum().item()) // self._tp_size
        metrics = self._metrics[mode]
        metrics["num_tokens"] = [self._total_train_tokens]
        values = gather(rewards)
        stacked = [values.min(), values.mean(), values.max()]
        names = ["min_reward", "mean_reward", "max_reward"]
        if pairs:
            chosen, rejected = rewards.chunk(2)
            stacked += [
                gather((chosen > rejected).float().mean()).mean(),
                gather((chosen - rejected).mean()).mean(),
            ]
            names += ["accuracy", "margin"]
        for name, value in zip(names, torch.stack(stacked).tolist(), strict=True):
            metrics[name].append(value)


def reward_loss(
    rewards: Tensor,
    *,
    margin: Tensor | None = None,
    offsets: Tensor | None = None,
    labels: Tensor | None = None,
) -> Tensor:
    """TRL's reward loss: rewards are [2 * B], the chosen half first; or ragged groups with labels.

    Equivalent to (without groups):
        chosen, rejected = rewards.chunk(2)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected - margin).mean()
    """
    if (offsets is None) != (labels is None):
        raise ValueError("offsets, labels: expected both or neither")
    if offsets is not None:
        assert labels is not None
        return bradley_terry(rewards, labels=labels, offsets=offsets, reduction="mean")
    if rewards.dim() != 1 or rewards.numel() % 2:
        raise ValueError(f"rewards: expected an even number in one row, got shape {tuple(rewards.shape)}")
    half = rewards.numel() // 2
    index = torch.arange(half, device=rewards.device)
    if margin is not None:
        margin = margin.to(rewards.device, rewards.dtype)
    return bradley_terry(
        rewards, pairs=(index, index + half), margin=0.0 if margin is None else margin, reduction="mean"
    )
