"""Token log-probabilities and entropy without the [T, V] tensor."""

from leanstep.logprob.linear import linear_logprobs
from leanstep.logprob.logits import token_logprobs

__all__ = ["linear_logprobs", "token_logprobs"]
