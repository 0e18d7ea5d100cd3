"""Megatron-Core: vocab-parallel log-probs on `parallel_state` groups.

    from leanstep.integrations.megatron import apply_leanstep

    layer = apply_leanstep(model.output_layer)
    out = layer.logprobs(hidden, plan.targets(tokens), rows=plan.rows, entropy="grad")

or the same as a function, `output_layer_logprobs(hidden, layer, targets, ...)`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from leanstep.integrations.versions import require_version
from leanstep.logprob import LMHead, LogProbs, VocabShards, linear_logprobs, token_logprobs

TESTED = ("0.16",)

require_version("megatron-core", ("0",))

from megatron.core import parallel_state  # noqa: E402 - after the check, so that a stub fails with our line


def tensor_parallel_group() -> Any:
    """Megatron's tensor-parallel group, or None when it is not initialised (one rank)."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    return parallel_state.get_tensor_model_parallel_group()


def apply_leanstep(output_layer: Any, *, allow_untested: bool = False) -> Any:
    """Give a Megatron output layer a method `logprobs(hidden, targets, ...)`; returns the layer.

    The method is `output_layer_logprobs` of this layer; its forward is left alone.

    Raises:
        UnknownVersion, ValueError: what is not supported is refused here, before the first step.
    """
    require_version("megatron-core", TESTED, allow_untested=allow_untested)
    _check_layer(output_layer)

    def logprobs(hidden: Tensor, targets: Tensor, **options: Any) -> LogProbs:
        return output_layer_logprobs(hidden, output_layer, targets, allow_untested=allow_untested, **options)

    output_layer.logprobs = logprobs
    return output_layer


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_total: int | None = None,
    allow_untested: bool = False,
    **options: Any,
) -> LogProbs:
    """`token_logprobs` on this rank's [N, V / TP] logits; Megatron's padded columns are left out.

    Args:
        logits: this rank's columns, as `ColumnParallelLinear(gather_output=False)` returns them.
        targets: [N] global ids, what each row predicts.
        vocab_total: the real vocabulary when the last shard is padded.
        options: as for `token_logprobs`.
    """
    require_version("megatron-core", TESTED, allow_untested=allow_untested)
    shards = VocabShards(tensor_parallel_group(), total=vocab_total)
    return token_logprobs(logits, targets, shards=shards, **options)


def output_layer_logprobs(
    hidden: Tensor,
    output_layer: Any,
    targets: Tensor,
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
        targets: [S * B] ids, what each row of the flattened hidden states predicts, or one per row of `rows`.
        weight: the shared embedding's weight, when the layer has none of its own.
    """
    require_version("megatron-core", TESTED, allow_untested=allow_untested)
    weight = output_layer.weight if weight is None else weight
    if weight is None:
        raise ValueError("weight: this output layer has no weight of its own; pass the shared embedding's")
    _check_layer(output_layer)
    if hidden.dim() == 3:
        hidden = hidden.flatten(0, 1)
    shards = VocabShards(
        tensor_parallel_group(),
        total=vocab_total,
        sequence_parallel=bool(getattr(output_layer, "sequence_parallel", False)),
    )
    return linear_logprobs(hidden, LMHead(weight, output_layer.bias), targets, shards=shards, **options)


def _check_layer(output_layer: Any) -> None:
    if getattr(output_layer, "gather_output", False):
        raise ValueError("output_layer: expected gather_output=False; leanstep never gathers logits")
