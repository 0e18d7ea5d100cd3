"""TRL's reward trainer with leanstep's pairwise loss, and any number of ranked answers per prompt.

from leanstep.integrations.trl import LeanRewardTrainer        # in place of trl.RewardTrainer
"""

# Both packages export their names lazily, which a type checker cannot follow.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.integrations.versions import require_version
from leanstep.objectives import bradley_terry

TESTED = ("1.16",)
GROUP_COLUMNS = ("answer_ids", "labels")

require_version("trl", ("1",))

from trl import RewardTrainer  # noqa: E402 - after the check, so that a stub fails with our line


class LeanRewardTrainer(RewardTrainer):
    """`trl.RewardTrainer` whose pairwise loss is `leanstep.objectives.bradley_terry`.

    For one pair per prompt the two are the same function. A dataset with the columns `answer_ids` (a list of
    token lists) and `labels` (one number each, higher is better) ranks K answers per prompt: every answer is
    processed once, and no pair is built.
    """

    def __init__(self, *args: Any, allow_untested: bool = False, **kwargs: Any) -> None:
        require_version("trl", TESTED, allow_untested=allow_untested)
        collator = kwargs.get("data_collator") or (args[2] if len(args) > 2 else None)
        super().__init__(*args, **kwargs)
        if collator is None and _has_groups(self.train_dataset):
            processor: Any = self.processing_class
            # TRL has replaced its "auto" by a number or None.
            multiple: Any = self.args.pad_to_multiple_of
            self.data_collator = GroupCollator(processor.pad_token_id, multiple)

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, dataset_name: str) -> Any:
        if not _has_groups(dataset):
            return super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        if args.center_rewards_coefficient is not None:
            raise ValueError("center_rewards_coefficient: expected None with groups")
        if args.max_length is None:
            return dataset
        return dataset.filter(lambda group: max(map(len, group["answer_ids"]), default=0) <= args.max_length)

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns += [name for name in GROUP_COLUMNS if name not in self._signature_columns]

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        ours = ("group_offsets", "labels", "margin")
        offsets, labels, margin = (inputs.get(name) for name in ours)
        outputs = model(**{k: v for k, v in inputs.items() if k not in ours}, use_cache=False)
        rewards = outputs.logits.squeeze(-1)
        loss = reward_loss(rewards, margin=margin, offsets=offsets, labels=labels)
        if self.args.center_rewards_coefficient is not None:
            if offsets is not None:
                raise ValueError("center_rewards_coefficient: expected None with groups")
            chosen, rejected = rewards.chunk(2)
            loss = loss + self.args.center_rewards_coefficient * ((chosen + rejected) ** 2).mean()
        self._log_rewards(rewards.detach(), inputs["attention_mask"], pairs=offsets is None)
        return (loss, outputs) if return_outputs else loss

    def _log_rewards(self: Any, rewards: Tensor, attention_mask: Tensor, *, pairs: bool) -> None:
        """Return the metrics that TRL logs, from one gather and one device read."""
        # Ranks hold different numbers of answers: each sends its own minimum, sum, count and maximum.
        values = [rewards.min(), rewards.sum(), rewards.new_tensor(rewards.numel()), rewards.max()]
        values.append(attention_mask.sum())
        if pairs:
            chosen, rejected = rewards.chunk(2)
            values += [(chosen > rejected).float().mean(), (chosen - rejected).mean()]
        # fp32 holds counts exactly up to 16 million tokens per rank and step.
        own = torch.stack([value.float() for value in values])
        ranks = list(zip(*self.accelerator.gather(own[None]).tolist(), strict=True))
        lowest, total, count, highest, tokens, *per_pair = ranks
        mode = "train" if self.model.training else "eval"
        if mode == "train":
            self._total_train_tokens += int(sum(tokens)) // self._tp_size
        metrics = self._metrics[mode]
        metrics["num_tokens"] = [self._total_train_tokens]
        metrics["min_reward"].append(min(lowest))
        metrics["mean_reward"].append(sum(total) / sum(count))
        metrics["max_reward"].append(max(highest))
        for name, shares in zip(("accuracy", "margin"), per_pair, strict=False):
            metrics[name].append(sum(shares) / len(shares))


@dataclass
class GroupCollator:
    """Pads the answers of all groups into one batch; `group_offsets` says where each group begins.

    Args:
        pad_token_id: padding on the right side.
        pad_to_multiple_of: as TRL's own collator.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None

    def __call__(self, groups: list[dict[str, Any]]) -> dict[str, Tensor]:
        from trl.trainer.utils import pad

        for group in groups:
            if len(group["answer_ids"]) != len(group["labels"]):
                raise ValueError(
                    f"labels: expected one per answer, got {len(group['labels'])} "
                    f"for {len(group['answer_ids'])} answers"
                )
        answers = [torch.tensor(ids) for group in groups for ids in group["answer_ids"]]
        sizes = torch.tensor([0, *(len(group["answer_ids"]) for group in groups)])
        to_multiple = {"padding_side": "right", "pad_to_multiple_of": self.pad_to_multiple_of}
        return {
            "input_ids": pad(answers, padding_value=self.pad_token_id, **to_multiple),
            "attention_mask": pad([torch.ones_like(a) for a in answers], padding_value=0, **to_multiple),
            "group_offsets": sizes.cumsum(0),
            "labels": torch.tensor([float(label) for group in groups for label in group["labels"]]),
        }


def _has_groups(dataset: Any) -> bool:
    names = getattr(dataset, "column_names", None) or ()
    return all(name in names for name in GROUP_COLUMNS)


def reward_loss(
    rewards: Tensor,
    *,
    margin: Tensor | None = None,
    offsets: Tensor | None = None,
    labels: Tensor | None = None,
) -> Tensor:
    """Compute TRL's reward loss: rewards are [2 * B], the chosen half first; or ragged groups with labels.

    Equivalent to (without groups):
        chosen, rejected = rewards.chunk(2)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected - margin).mean()
    """
    if (offsets is None) != (labels is None):
        raise ValueError("offsets, labels: expected both or neither")
    if offsets is not None:
        assert labels is not None
        if margin is not None:
            raise ValueError("margin: expected None with groups")
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
