"""Megatron-Core: vocab-parallel log-probs on `parallel_state` groups.

from leanstep.integrations.megatron import output_layer_logprobs
out = output_layer_logprobs(hidden, model.output_layer, plan.targets(tokens), rows=plan.rows, entropy="grad")
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from leanstep.integrations.versions import require_version
from leanstep.logprob import linear_logprobs, token_logprobs
from leanstep.logprob.outputs import LogProbs

TESTED = ("0.16",)

require_version("megatron-core", ("0",))

from megatron.core import parallel_state  # noqa: E402 - after the check, so that a stub fails with our line


def tensor_parallel_group() -> Any:
    """Megatron's tensor-parallel group, or None when it is not initialised (one rank)."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    return parallel_state.get_tensor_model_parallel_group()


def vocab_parallel_logprobs(
    logits: Tensor,
    tokens: Tensor,
    *,
    vocab_total: int | None = None,
    allow_untested: bool = False,
    **options: Any,
) -> LogProbs:
    """`token_logprobs` on this rank's [N, V / TP] logits; Megatron's padded columns are left out.

    Args:
        logits: this rank's columns, as `ColumnParallelLinear(gather_output=False)` returns them.
        tokens: [N] global ids.
        vocab_total: the real vocabulary when the last shard is padded.
        options: as for `token_logprobs`.
    """
    require_version("megatron-core", TESTED, allow_untested=allow_untested)
    return token_logprobs(logits, tokens, group=tensor_parallel_group(), vocab_total=vocab_total, **options)


def output_layer_logprobs(
    hidden: Tensor,
    output_layer: Any,
    tokens: Tensor,
    *,
    weight: Tensor | None = None,
    vocab_total: int | None = None,
    allow_untested: bool = False,
    **options: Any,
) -> LogProbs:
    """`linear_logprobs` through a Megatron output layer: hidden rows are gathered before the projection.

    Args:
        hidden: [S, B, D] (or [S / TP, B, D] under sequence parallelism), or [T, D].
        output_layer: a `ColumnParallelLinear`; its sequence-parallel setting is honoured.
        tokens: [S * B] ids in the order of the flattened hidden states, or one per row of `rows`.
        weight: the shared embedding's weight, when the layer has none of its own.
    """
    require_version("megatron-core", TESTED, allow_untested=allow_untested)
    weight = output_layer.weight if weight is None else weight
    if weight is None:
        raise ValueError("weight: this output layer has no weight of its own; pass the shared embedding's")
    if getattr(output_layer, "gather_output", False):
        raise ValueError("output_layer: expected gather_output=False; leanstep never gathers logits")
    if hidden.dim() == 3:
        hidden = hidden.flatten(0, 1)
    return linear_logprobs(
        hidden,
        weight,
        tokens,
        bias=output_layer.bias,
        group=tensor_parallel_group(),
        vocab_total=vocab_total,
        sequence_parallel=bool(getattr(output_layer, "sequence_parallel", False)),
        **options,
    )
