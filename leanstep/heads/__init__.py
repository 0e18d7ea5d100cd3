"""Log-probs and losses of the LM head on selected rows, without the [T, V] logits.

logprob.py   linear_logprobs and token_logprobs: the two loops over tiles of logits
rowwise.py   any function of a row's logits, block by block
losses.py    cross-entropy, policy objectives, distillation, preferences
rows.py      which rows to score, for packed, padded and context-parallel batches (layout.py: where they are)
padded.py    token log-probs of a padded batch
head.py      the LM head as one record, and the checks of per-row arguments
allowed.py   softmax over allowed ids
parallel.py  process groups and DTensors
kernels.py   the two passes over a tile, in torch, C++ (passes.cpp) and Triton
reference.py the definitions, in plain torch
"""

from leanstep.heads.head import Head, LoRA
from leanstep.heads.logprob import LogProbs, linear_logprobs, token_logprobs
from leanstep.heads.losses import (
    OBJECTIVES,
    PREFERENCES,
    DistillLoss,
    PolicyLoss,
    PreferenceLoss,
    TeacherHead,
    TeacherLogProbs,
    TeacherTopK,
    linear_cross_entropy,
    linear_distill_loss,
    linear_policy_loss,
    linear_preference_loss,
    policy_loss,
)
from leanstep.heads.padded import masked_token_logprobs
from leanstep.heads.parallel import gather_response, return_parts
from leanstep.heads.rows import (
    RowPlan,
    next_token_targets,
    place_response,
    plan_rows,
    select_allowed,
    slice_response,
)
from leanstep.heads.rowwise import rowwise

__all__ = [
    "OBJECTIVES",
    "PREFERENCES",
    "DistillLoss",
    "Head",
    "LoRA",
    "LogProbs",
    "PolicyLoss",
    "PreferenceLoss",
    "RowPlan",
    "TeacherHead",
    "TeacherLogProbs",
    "TeacherTopK",
    "gather_response",
    "linear_cross_entropy",
    "linear_distill_loss",
    "linear_logprobs",
    "linear_policy_loss",
    "linear_preference_loss",
    "masked_token_logprobs",
    "next_token_targets",
    "place_response",
    "plan_rows",
    "policy_loss",
    "return_parts",
    "rowwise",
    "select_allowed",
    "slice_response",
    "token_logprobs",
]
