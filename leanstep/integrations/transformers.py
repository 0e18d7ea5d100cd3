"""transformers: rows with label -100 never reach the head, and the stock Trainer can use NorMuon.

    from leanstep.integrations.transformers import LeanTrainer, norm_muon
    LeanTrainer(model, args, train_dataset=..., optimizers=(norm_muon(model, lr=0.02), None))

or, without another Trainer class, `apply_leanstep(model)` once: `model(..., labels=...)` in training then
returns the same loss from the labelled rows only.
"""

# Both packages export their names lazily, which a type checker cannot follow.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import functools
import types
from typing import Any

from torch import Tensor, nn

from leanstep.integrations.causal_lm import check_head, check_router, router_loss, score_labels
from leanstep.integrations.versions import require_version
from leanstep.muon import NorMuon, split_params

TESTED = ("5.22",)

require_version("transformers", ("5",))

from transformers import Trainer  # noqa: E402 - after the check, so that a stub fails with our line
from transformers.modeling_outputs import MoeCausalLMOutputWithPast  # noqa: E402

_MARK = "_leanstep_skips_ignored_rows"


def apply_leanstep(model: nn.Module, *, allow_untested: bool = False, check: bool = True) -> nn.Module:
    """Make `model(..., labels=...)` in training mode project only rows whose label is not -100.

    The result has `loss` and no logits. Without labels, or in evaluation mode, the model is untouched.
    The loss is the one transformers computes: the mean over labelled tokens, or their sum divided by
    `num_items_in_batch` when the Trainer passes it; with `output_router_logits` plus the router's auxiliary
    loss times its coefficient.

    Raises:
        UnknownVersion, ValueError: for a head that leanstep cannot express, before the first step.
    """
    require_version("transformers", TESTED, allow_untested=allow_untested)
    causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if getattr(causal, _MARK, False):
        return model
    if not hasattr(causal, "get_output_embeddings") or not hasattr(causal, "base_model"):
        raise ValueError(f"model: expected a transformers causal LM, got {type(causal).__name__}")
    if check:
        check_head(causal)
        check_router(causal)
    stock = causal.forward
    config = causal.config.get_text_config()

    @functools.wraps(type(causal).forward)
    def forward(
        self: Any,
        *args: Any,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not self.training or (labels is None and shift_labels is None):
            label_arguments = {
                "labels": labels,
                "shift_labels": shift_labels,
                "num_items_in_batch": num_items_in_batch,
            }
            return stock(*args, **{k: v for k, v in label_arguments.items() if v is not None}, **kwargs)
        kwargs.pop("logits_to_keep", None)
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        kwargs["use_cache"] = False
        outputs = self.base_model(*args, **kwargs)
        loss = label_loss(self, outputs.last_hidden_state, labels, shift_labels, num_items_in_batch)
        aux_loss = None
        if kwargs.get("output_router_logits"):
            mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
            aux_loss = router_loss(self, outputs, mask)
            loss = loss + self.router_aux_loss_coef * aux_loss.to(loss.device)
        return MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux_loss, logits=None)  # type: ignore[arg-type]

    causal.forward = types.MethodType(forward, causal)
    setattr(causal, _MARK, True)
    return model


def label_loss(
    model: nn.Module,
    hidden: Tensor,
    labels: Tensor | None,
    shift_labels: Tensor | None = None,
    num_items_in_batch: Any = None,
) -> Tensor:
    """Return the causal-LM loss from the backbone's hidden states, labelled rows only."""
    shifted = shift_labels is not None
    target = shift_labels if shifted else labels
    assert target is not None
    # Like transformers, compute the loss from fp32 logits of a head in the model's own dtype.
    scores = score_labels(model, hidden, target, shifted=shifted)
    total = -scores.logp.sum()
    if num_items_in_batch is None:
        # No labelled token: transformers returns NaN (0 / 0), which ends a run; zero with a graph does not.
        return total / scores.mask.sum().clamp(min=1)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


class LeanTrainer(Trainer):
    """`transformers.Trainer` whose model skips label -100 rows before the head; takes the same arguments."""

    def __init__(self, *args: Any, allow_untested: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.label_smoother is not None:
            raise ValueError(
                "label_smoothing_factor: expected 0 with LeanTrainer (it would need every logit)"
            )
        model: Any = self.model
        apply_leanstep(model, allow_untested=allow_untested)


def norm_muon(model: nn.Module, lr: float = 0.02, **options: Any) -> NorMuon:
    """NorMuon on a model's matrices and AdamW on the rest, for the Trainer's `optimizers=(optimizer, None)`.

    The Trainer then creates its own schedule for it; gradient clipping, checkpoints and resuming work as
    usual.
    """
    return NorMuon(split_params(model), lr=lr, **options)
