"""TRL's DistillationTrainer: compute its divergence with `linear_distill_loss`, on completion rows.

    from leanstep.integrations.trl import apply_leanstep
    apply_leanstep(trainer)                                    # on a trainer that exists

TRL 1.16 passes hidden states and heads of student and teacher to one function of its module. While this
trainer computes a loss, the adapter replaces it by `divergence_loss`, which has the same arguments and
results; generation, buffering, metrics and wrapping stay TRL's.
"""

# Both packages export their names lazily, which a type checker cannot follow.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

import functools
import types
from typing import Any

from torch import Tensor

from leanstep.heads import Head, TeacherHead, linear_distill_loss


def divergence_loss(
    student_hidden_states: Tensor, teacher_hidden_states: Tensor, student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor, completion_mask: Tensor, beta: float, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the generalized JSD, the student's summed entropy and the number of rows, like TRL's function.

    Args:
        student_hidden_states, teacher_hidden_states: [B, K, D] and [B, K, D'].
        student_lm_head_weight, teacher_lm_head_weight: [V, D] and [V, D'].
        completion_mask: [B, K]; rows with 0 are not projected.
        beta: 0 forward KL, 1 reverse KL, between them the JSD.
        options: num_items_in_batch, temperature, and per side (student_, teacher_) lm_head_bias, logit_scale,
            final_logit_softcapping, as TRL names them.
    """
    known = {"num_items_in_batch", "temperature"} | {
        f"{side}_{name}"
        for side in ("student", "teacher")
        for name in ("lm_head_bias", "logit_scale", "final_logit_softcapping")
    }
    unknown = set(options) - known
    if unknown:
        raise ValueError(f"options: expected those of TRL 1.16, got {', '.join(sorted(unknown))}")

    def side(name: str, weight: Tensor) -> Head:
        softcap = options.get(f"{name}_final_logit_softcapping")
        scale = options.get(f"{name}_logit_scale", 1.0)
        return Head(weight, options.get(f"{name}_lm_head_bias"), None, scale, softcap)

    valid = completion_mask.reshape(-1) != 0
    rows = valid.nonzero().flatten()
    head = side("student", student_lm_head_weight)
    teacher = side("teacher", teacher_lm_head_weight)
    items = options.get("num_items_in_batch")
    out = linear_distill_loss(
        student_hidden_states.flatten(0, 1),
        head,
        TeacherHead(teacher_hidden_states.flatten(0, 1), teacher),
        divergence=("jsd", beta),
        temperature=options.get("temperature", 1.0),
        rows=rows,
        normalizer=items.float() if isinstance(items, Tensor) else items,
    )
    return out.loss, out.entropy.sum(), valid.sum()


def replace_divergence(trainer: Any) -> Any:
    """Let `trainer`, a `trl.DistillationTrainer`, compute its loss with `divergence_loss`."""
    from trl.trainer import distillation_trainer

    @functools.wraps(type(trainer)._compute_loss)
    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = distillation_trainer._chunked_divergence_loss
        distillation_trainer._chunked_divergence_loss = divergence_loss
        try:
            return type(self)._compute_loss(self, *args, **kwargs)
        finally:
            distillation_trainer._chunked_divergence_loss = original

    trainer._compute_loss = types.MethodType(compute, trainer)
    return trainer


def is_distillation(trainer: Any) -> bool:
    """Return whether the trainer's divergence can be replaced."""
    return hasattr(trainer, "teacher_model") and any(
        base.__module__ == "trl.trainer.distillation_trainer" for base in type(trainer).__mro__
    )
