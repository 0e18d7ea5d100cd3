"""Token log-probabilities and entropy without the [T, V] tensor."""

from leanstep.logprob.logits import token_logprobs

__all__ = ["token_logprobs"]
