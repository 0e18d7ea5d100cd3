"""transformers: rows with label -100 never reach the head, and the stock Trainer can use NorMuon.

    from leanstep.integrations.transformers import LeanTrainer, norm_muon
    LeanTrainer(model, args, train_dataset=..., optimizers=(norm_muon(model, lr=0.02), None))

or, without another Trainer class, `apply_leanstep(model)` once: `model(..., labels=...)` in training then
returns the same loss from the labelled rows only.
"""

# Both packages export their names lazily, which a type checker cannot follow.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from leanstep.integrations.causal_lm import (
    IGNORED,
    UNKNOWN_ROUTER,
    is_sharded,
    last_hidden,
    made_up_tokens,
    rounding,
    router_loss,
    score_labels,
    unchanged,
)
from leanstep.integrations.class_forward import handle_calls, handler_of
from leanstep.integrations.versions import require_version
from leanstep.muon import NorMuon, split_params

TESTED = ("5.22",)

require_version("transformers", ("5",))

from transformers import Trainer  # noqa: E402 - after the check, so that a stub fails with our line
from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402
from transformers.modeling_outputs import MoeCausalLMOutputWithPast  # noqa: E402

__all__ = ["LeanTrainer", "apply_leanstep", "norm_muon"]
# Arguments of a causal LM's forward that are not the backbone's; `LabelledRows` reads them.
_OWN_ARGUMENTS = {
    "labels",
    "shift_labels",
    "num_items_in_batch",
    "logits_to_keep",
    "return_dict",
    "output_router_logits",
    "use_cache",
    "ignore_index",
    "kwargs",
}
# What `LabelledRows` returns.
_FIELDS = {"loss", "aux_loss", "logits", "past_key_values", "hidden_states", "attentions", "router_logits"}
_INSTEAD = "call linear_cross_entropy(hidden, head, labels) in the model's forward instead"


def apply_leanstep(model: nn.Module, *, allow_untested: bool = False, check: bool = True) -> nn.Module:
    """Make `model(..., labels=...)` in training mode project only rows whose label is not -100.

    The result has `loss` and no logits. Without labels, or in evaluation mode, the model is untouched.
    The loss is the one transformers computes: the mean over labelled tokens, or their sum divided by
    `num_items_in_batch` when the Trainer passes it; with `output_router_logits` plus the router's auxiliary
    loss times its coefficient.

    Copies do the same with their own weights: `copy.deepcopy`, `AveragedModel`, pickle, `torch.save`.
    `save_pretrained` writes the original architecture.

    Args:
        check: compare our loss with the model's own on 16 made-up tokens; weights, buffers, random state and
            modes stay as they are. A model with sharded weights is compared in its first training forward.

    Raises:
        UnknownVersion, ValueError: for a loss or a head that leanstep cannot express, before the first step.
    """
    require_version("transformers", TESTED, allow_untested=allow_untested)
    causal: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    has_backbone = getattr(causal, "base_model", causal) is not causal
    if not hasattr(causal, "get_output_embeddings") or not has_backbone:
        raise ValueError(f"model: expected a transformers causal LM, got {type(causal).__name__}")
    handler = handler_of(causal, LabelledRows) or LabelledRows(causal, is_checked=not check)
    if not handler.is_checked and not is_sharded(causal):
        handler.check(causal, causal.forward, must_run=False)
    handle_calls(causal, handler)
    return model


class LabelledRows:
    """Computes the loss of a training forward from the labelled rows; every other call is the model's own."""

    def __init__(self, causal: Any, *, is_checked: bool) -> None:
        self.is_checked = is_checked
        # A model that does not divide by `num_items_in_batch` keeps its mean.
        self.divides = True
        self.knows_router = True
        self.names = tuple(inspect.signature(causal.forward).parameters)
        backbone = inspect.signature(causal.base_model.forward).parameters
        takes_all = any(p.kind is p.VAR_POSITIONAL for p in backbone.values())
        self.unknown = frozenset(() if takes_all else set(self.names) - set(backbone) - _OWN_ARGUMENTS)

    def __call__(self, model: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(self.names, args, strict=False)) | kwargs
        is_labelled = named.get("labels") is not None or named.get("shift_labels") is not None
        if not model.training or not is_labelled:
            return stock(*args, **kwargs)
        if not self.is_checked:
            self.check(model, stock, must_run=True)
        return self.training_forward(model, named)

    def training_forward(self, model: Any, named: dict[str, Any]) -> Any:
        """Return the loss, and what else was asked for, without logits."""
        self._check_arguments(model, named)
        config = model.config.get_text_config()
        inputs = {k: v for k, v in named.items() if k not in _OWN_ARGUMENTS and k not in self.unknown}
        inputs["use_cache"] = bool(named.get("use_cache"))
        routers = named.get("output_router_logits")
        routers = getattr(config, "output_router_logits", False) if routers is None else routers
        if routers:
            if not self.knows_router:
                raise ValueError(UNKNOWN_ROUTER.format(type(model).__name__))
            inputs["output_router_logits"] = True
        as_dict = named.get("return_dict")
        as_dict = getattr(model.config, "return_dict", True) if as_dict is None else as_dict
        if not as_dict:
            inputs["return_dict"] = True
        outputs = model.base_model(**inputs)
        hidden = last_hidden(model, outputs)
        keep = named.get("logits_to_keep")
        if isinstance(keep, Tensor):
            hidden = hidden[:, keep]
        elif keep:
            hidden = hidden[:, -keep:]
        items = named.get("num_items_in_batch") if self.divides else None
        loss, aux_loss = (
            label_loss(model, hidden, named.get("labels"), named.get("shift_labels"), items),
            None,
        )
        if routers:
            aux_loss = router_loss(model, outputs, named.get("attention_mask"))
            loss = loss + model.router_aux_loss_coef * aux_loss.to(loss.device)
        more = {
            name: getattr(outputs, name, None) for name in ("past_key_values", "hidden_states", "attentions")
        }
        result = MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux_loss, logits=None, **more)  # type: ignore[arg-type]
        if as_dict:
            return result
        # In stock's order: None stands where its logits are.
        values = (x for x in (aux_loss, *more.values()) if x is not None)
        return (loss, None, *values) if aux_loss is None else (loss, next(values), None, *values)

    def _check_arguments(self, model: Any, named: dict[str, Any]) -> None:
        name = type(model).__name__
        function = getattr(model, "_loss_function", None)
        if function not in (None, ForCausalLMLoss):
            kind = getattr(function, "__name__", type(function).__name__)
            raise ValueError(
                f"model: expected ForCausalLMLoss as loss_function of {name}, got {kind}; {_INSTEAD}"
            )
        if named.get("ignore_index", IGNORED) != IGNORED:
            raise ValueError(f"ignore_index: expected {IGNORED} with leanstep, got {named['ignore_index']}")
        for argument in self.unknown:
            if named.get(argument) is not None:
                raise ValueError(
                    f"{argument}: leanstep's loss does not know this argument of {name}; {_INSTEAD}"
                )

    @torch.compiler.disable
    def check(self, model: Any, stock: Callable[..., Any], *, must_run: bool) -> None:
        """Compare our loss with that of `stock` on 16 made-up tokens, some without a label, some masked.

        Args:
            must_run: False if `stock` may fail because the model runs only in its training context (an fp32
                head under autocast, for example); the first training forward is compared then.
        """
        name = type(model).__name__
        if getattr(model.config, "is_encoder_decoder", False):
            raise ValueError(f"model: expected a decoder-only causal LM, got {name}, an encoder-decoder")
        ids = made_up_tokens(model)
        labels, mask = ids.clone(), torch.ones_like(ids)
        labels[0, :3], mask[1, -2:] = IGNORED, 0
        batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if not getattr(model.config, "return_dict", True):
            batch["return_dict"] = True
        if "use_cache" in self.names:
            batch["use_cache"] = False
        self._check_arguments(model, batch)
        with unchanged(model):
            try:
                theirs = stock(**batch)
            except Exception as error:
                if not must_run:
                    return
                raise ValueError(f"model: {name} fails on made-up tokens: {_first_line(error)}") from error
            if getattr(theirs, "loss", None) is None or getattr(theirs, "logits", None) is None:
                raise ValueError(f"model: expected {name} to return loss and logits for labels; {_INSTEAD}")
            ours = self._ours(model, batch)
            loss, limit = theirs.loss, rounding(model, theirs.logits, theirs.loss)
            difference = abs(ours.loss.item() - loss.item())
            if not difference <= limit:
                if ours.aux_loss is not None:
                    raise ValueError(UNKNOWN_ROUTER.format(name))
                raise ValueError(
                    f"model: the loss of {name} is not the shifted cross-entropy of its head, it differs by "
                    f"{difference:.3g}; {_INSTEAD}"
                )
            returned = {k for k, v in theirs.items() if v is not None}
            missing = returned - _FIELDS | ({"aux_loss"} & returned if ours.aux_loss is None else set())
            if missing:
                raise ValueError(f"model: leanstep does not compute {min(missing)} of {name}; {_INSTEAD}")
            self.divides = self._divides(stock, batch, loss)
            if hasattr(model, "router_aux_loss_coef") and ours.aux_loss is None:
                self.knows_router = self._agrees_on_router(model, stock, batch, limit)
        self.is_checked = True

    def _ours(self, model: Any, batch: dict[str, Any]) -> Any:
        try:
            return self.training_forward(model, batch | {"return_dict": None})
        except Exception as error:
            reason = _first_line(error)
            if reason.startswith("model: "):
                raise
            name = type(model).__name__
            raise ValueError(
                f"model: leanstep cannot compute the loss of {name} ({reason}); {_INSTEAD}"
            ) from error

    def _divides(self, stock: Callable[..., Any], batch: dict[str, Any], mean: Tensor) -> bool:
        """Return whether the model divides the sum of its losses by `num_items_in_batch`."""
        try:
            # 12 labels of the batch have a row before them; far from that number.
            divided = stock(**batch, num_items_in_batch=100).loss
        except TypeError:
            return True
        return not torch.equal(divided, mean)

    def _agrees_on_router(
        self, model: Any, stock: Callable[..., Any], batch: dict[str, Any], limit: float
    ) -> bool:
        batch = batch | {"output_router_logits": True}
        try:
            difference = self.training_forward(model, batch).loss - stock(**batch).loss
        except Exception:
            return False
        return abs(difference.item()) <= limit


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


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
