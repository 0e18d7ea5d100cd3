"""Token log-probabilities and entropy without the [T, V] tensor."""

from leanstep.logprob.engine.tiles import Tiles, choose_tiles
from leanstep.logprob.inputs import (
    Allowed,
    LMHead,
    LogProbs,
    LoRA,
    ReferenceHead,
    Transform,
    Tuning,
    VocabShards,
)
from leanstep.logprob.linear import linear_logprobs
from leanstep.logprob.logits import token_logprobs
from leanstep.logprob.objective import (
    OBJECTIVES,
    CovarianceChoice,
    PolicyBatch,
    PolicyLoss,
    PolicyObjective,
    policy_loss,
)
from leanstep.logprob.padded import masked_token_logprobs
from leanstep.logprob.parallel import gather_response, gather_vocab_starts, return_parts
from leanstep.logprob.policy import linear_policy_loss
from leanstep.logprob.rows import (
    RowPlan,
    full_loss_mask,
    next_token_targets,
    plan_rows,
    sample_mean,
    select_allowed,
    select_rows,
    slice_response,
)

__all__ = [
    "OBJECTIVES",
    "Allowed",
    "CovarianceChoice",
    "LMHead",
    "LoRA",
    "LogProbs",
    "PolicyBatch",
    "PolicyLoss",
    "PolicyObjective",
    "ReferenceHead",
    "RowPlan",
    "Tiles",
    "Transform",
    "Tuning",
    "VocabShards",
    "choose_tiles",
    "full_loss_mask",
    "gather_response",
    "gather_vocab_starts",
    "linear_logprobs",
    "linear_policy_loss",
    "masked_token_logprobs",
    "next_token_targets",
    "plan_rows",
    "policy_loss",
    "return_parts",
    "sample_mean",
    "select_allowed",
    "select_rows",
    "slice_response",
    "token_logprobs",
]
