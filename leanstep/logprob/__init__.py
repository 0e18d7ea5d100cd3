"""Token log-probabilities and entropy without the [T, V] tensor."""

from leanstep.logprob.heads import LoRA
from leanstep.logprob.linear import linear_logprobs
from leanstep.logprob.logits import token_logprobs
from leanstep.logprob.memory import MemoryPlan, plan_memory
from leanstep.logprob.objective import OBJECTIVES, PolicyLoss, PolicyObjective, policy_loss
from leanstep.logprob.outputs import LogProbs
from leanstep.logprob.parallel import (
    gather_response,
    gather_vocab_starts,
    return_parts,
)
from leanstep.logprob.policy import linear_policy_loss
from leanstep.logprob.rows import (
    RowPlan,
    full_loss_mask,
    plan_rows,
    sample_mean,
    select_rows,
    slice_response,
)
from leanstep.logprob.tiles import Tiles, choose_tiles

__all__ = [
    "OBJECTIVES",
    "LoRA",
    "LogProbs",
    "MemoryPlan",
    "PolicyLoss",
    "PolicyObjective",
    "RowPlan",
    "Tiles",
    "choose_tiles",
    "full_loss_mask",
    "gather_response",
    "gather_vocab_starts",
    "linear_logprobs",
    "linear_policy_loss",
    "plan_memory",
    "plan_rows",
    "policy_loss",
    "return_parts",
    "sample_mean",
    "select_rows",
    "slice_response",
    "token_logprobs",
]
