"""Megatron-Core: vocab-parallel log-probs on `parallel_state` groups.

    from leanstep.integrations.megatron import apply_leanstep

    layer = apply_leanstep(model.output_layer)
    out = layer.logprobs(hidden, plan.targets(tokens), rows=plan.rows, entropy="grad")

or the same as a function, `output_layer_logprobs(hidden, layer, targets, ...)`. `output_processor` is for the
argument of that name, which GPTModel's forward has in newer versions. `HiddenOutput(layer)` makes the layer
return its input, for trainers whose loss is computed from what the model returns.

With a Megatron-Core version that this module was not tested with, a warning says so, and log-probs of a few
made-up rows are compared with Megatron's own cross-entropy before anything else is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from leanstep.heads import Head, LogProbs, RowPlan, linear_logprobs, token_logprobs
from leanstep.heads.parallel import resolve_group
from leanstep.integrations.versions import is_tested_version, require_version

TESTED = ("0.16",)
# Rows checked per sequence: a model that changes its output changes every row.
CHECKED_ROWS = 64

# Names the command that installs it; any version is tried.
require_version("megatron-core", TESTED, allow_untested=True)

from megatron.core import parallel_state  # noqa: E402 - after the check, so that a missing one has our line

__all__ = [
    "HiddenOutput",
    "apply_leanstep",
    "output_layer_logprobs",
    "output_processor",
    "vocab_parallel_logprobs",
]
# What needs no comparison any more: "version", "layer".
_checked: set[str] = set()


def check_version() -> None:
    """Warn, once per process, if the installed Megatron-Core was not tested; then compare on made-up logits.

    Every rank of the tensor-parallel group calls it.

    Raises:
        ValueError: for another result than Megatron's own cross-entropy.
    """
    if "version" in _checked:
        return
    if is_tested_version("megatron-core", TESTED):
        _checked.update(("version", "layer"))
        return
    # 8 rows over 32 local columns, the same on every rank but for its shard of the vocabulary.
    group = resolve_group(tensor_parallel_group())
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    logits = torch.arange(8 * 32 * size, dtype=torch.float32).mul(0.7).sin().view(8, -1)
    targets = torch.arange(8) * 5 % (32 * size)
    shard, targets = logits.chunk(size, -1)[rank].to(_device()), targets.to(_device())
    ours = token_logprobs(shard, targets, group=tensor_parallel_group()).logp
    _compare(ours, _own_logprobs(shard[:, None], targets[:, None]).flatten())
    _checked.add("version")


def check_layer(layer: Any, weight: Tensor) -> None:
    """In an untested version, compare log-probs of made-up rows with those of the layer's own forward."""
    if "layer" in _checked:
        return
    with torch.no_grad():
        rows = torch.arange(4 * weight.shape[1], device=weight.device).mul(0.7).sin().view(4, 1, -1)
        rows = rows.to(weight.dtype)
        logits = type(layer).forward(layer, rows, weight=weight)[0]
        targets = torch.arange(len(logits), device=weight.device) * 5 % weight.shape[0]
        ours = _layer_logprobs(rows, layer, targets, weight=weight).logp
        _compare(ours, _own_logprobs(logits, targets[:, None]).flatten(), logits)
    _checked.add("layer")


@torch.no_grad()
def _own_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Megatron's own, [S, B] of [S, B, V / TP]."""
    if tensor_parallel_group() is None:
        return logits.float().log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    # It writes into its input.
    return -vocab_parallel_cross_entropy(logits.float().clone(), targets)


def _compare(ours: Tensor, theirs: Tensor, logits: Tensor | None = None) -> None:
    kind = torch.float32 if logits is None else logits.dtype
    unit = max(torch.finfo(kind).eps, 2e-3 if ours.device.type == "cuda" else 1e-5)
    limit = 4 * unit * max(1.0, theirs.abs().max().item())
    difference = (ours - theirs).abs().max().item()
    if not difference <= limit:
        raise ValueError(
            f"megatron-core: log-probs of made-up rows differ from Megatron's own by {difference:.3g}"
        )


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def tensor_parallel_group() -> Any:
    """Return Megatron's tensor-parallel group, or None if it is not initialised (one rank)."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    return parallel_state.get_tensor_model_parallel_group()


def apply_leanstep(output_layer: Any) -> Any:
    """Add a method `logprobs(hidden, targets, ...)` to a Megatron output layer and return the layer.

    The method is `output_layer_logprobs` of this layer; its forward is unchanged. Copies of the layer have
    the method with their own weight.

    Raises:
        ValueError: for anything unsupported, before the first step.
    """
    check_version()
    _check_layer(output_layer)
    output_layer.logprobs = LayerLogprobs(output_layer)
    return output_layer


class LayerLogprobs:
    """The method `logprobs` of a layer; an object, so that a copied or unpickled layer has its own."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, hidden: Tensor, targets: Tensor, **options: Any) -> LogProbs:
        return output_layer_logprobs(hidden, self.layer, targets, **options)


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_total: int | None = None,
    **options: Any,
) -> LogProbs:
    """`token_logprobs` on this rank's [N, V / TP] logits; Megatron's padded columns are excluded.

    Args:
        logits: this rank's columns, as `ColumnParallelLinear(gather_output=False)` returns them.
        targets: [N] global ids, what each row predicts.
        vocab_total: the real vocabulary when the last shard is padded.
        options: as for `token_logprobs`.
    """
    check_version()
    options |= {"group": tensor_parallel_group(), "vocab_total": vocab_total}
    return token_logprobs(logits, targets, **options)


def output_layer_logprobs(
    hidden: Tensor,
    output_layer: Any,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    vocab_total: int | None = None,
    **options: Any,
) -> LogProbs:
    """`linear_logprobs` through a Megatron output layer: hidden rows are gathered before the projection.

    Args:
        hidden: [S, B, D] (or [S / TP, B, D] under sequence parallelism), or [T, D].
        output_layer: a `ColumnParallelLinear`; its sequence-parallel setting is honoured.
        targets: [S * B] ids, what each row of the flattened hidden states predicts, or one per row of `rows`.
        weight: the shared embedding's weight, when the layer has none of its own.

    With `gradient_accumulation_fusion` the weight's gradient is added to its `main_grad`, as Megatron does.
    """
    check_version()
    weight = output_layer.weight if weight is None else weight
    if weight is None:
        raise ValueError("weight: this output layer has no weight of its own; pass the shared embedding's")
    _check_layer(output_layer)
    check_layer(output_layer, weight)
    return _layer_logprobs(hidden, output_layer, targets, weight=weight, vocab_total=vocab_total, **options)


def _layer_logprobs(
    hidden: Tensor,
    output_layer: Any,
    targets: Tensor,
    *,
    weight: Tensor,
    vocab_total: int | None = None,
    **options: Any,
) -> LogProbs:
    if hidden.dim() == 3:
        hidden = hidden.flatten(0, 1)
    options |= {"group": tensor_parallel_group(), "vocab_total": vocab_total}
    options["sequence_parallel"] = bool(getattr(output_layer, "sequence_parallel", False))
    if getattr(output_layer, "gradient_accumulation_fusion", False) and _is_trained(weight):
        options.setdefault("main_grad", weight.main_grad)  # type: ignore[attr-defined]
    return linear_logprobs(hidden, Head(weight, output_layer.bias), targets, **options)


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor | None,
    loss_mask: Tensor | None = None,
    context: Mapping[str, Any] | None = None,
    config: Any = None,
    **_: Any,
) -> LogProbs:
    """Log-probs of the labels instead of logits: the argument of that name of GPTModel's forward.

        model(ids, positions, mask, labels=labels, loss_mask=loss_mask, output_processor=output_processor,
              output_processor_context={"entropy": "grad"})

    Args:
        labels: [B, S], what each position predicts.
        loss_mask: [B, S]; positions with 0 are not projected, their results are 0. None: all count.
        context: options of `output_layer_logprobs`.

    Returns:
        `LogProbs` of [B, S] tensors.
    """
    if labels is None:
        raise ValueError("labels: expected [B, S] ids, what each position predicts, got None")
    if getattr(config, "use_mup", False):
        raise ValueError("config: expected use_mup=False; leanstep does not scale the logits")
    mask = torch.ones_like(labels) if loss_mask is None else loss_mask
    # Hidden states have the sequence first.
    rows = mask.T.flatten().nonzero()[:, 0]
    targets = labels.T.flatten()[rows]
    selected = rows.cpu() if getattr(output_layer, "sequence_parallel", False) else rows
    options = {"weight": output_weight, "rows": selected, **(context or {})}
    out = output_layer_logprobs(hidden_states, output_layer, targets, **options)

    def placed(values: Tensor) -> Tensor:
        return values.new_zeros(mask.numel()).index_copy(0, rows, values).view(mask.T.shape).T

    entropy = None if out.entropy is None else placed(out.entropy)
    return LogProbs(placed(out.logp), entropy, placed(out.lse), placed(out.argmax))


class HiddenOutput:
    """Makes an output layer return its input; the code that computes the loss calls `logprobs` instead.

    The model still calls the layer as a module, so hooks on its forward, such as those that gather
    parameters, run before its weight is read. A call that requests gathered logits uses the stock projection.
    """

    def __init__(self, layer: Any) -> None:
        _check_layer(layer)
        if layer.bias is not None and layer.skip_bias_add:
            raise ValueError("output_layer: expected no bias, or one that the layer adds itself")
        self.layer = layer
        # None: the class's forward, looked up on `self.layer`, so that copies project with their own weight.
        self._own = vars(layer).get("forward")
        self._weight: Tensor | None = None
        self._returned: Tensor | None = None
        self._is_checked = False
        layer.forward = self.forward

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the input; the model calls this instead of the projection."""
        if runtime_gather_output:
            project = (
                functools.partial(type(self.layer).forward, self.layer) if self._own is None else self._own
            )
            return project(input_, weight=weight, runtime_gather_output=True, **options)
        self._weight = self.layer.weight if weight is None else weight
        if not self._is_checked:
            self._returned = input_.detach()
        return input_, None

    def num_rows(self, local_rows: int) -> int:
        """Return the rows of the micro-batch; under sequence parallelism each rank has a part of them."""
        group = resolve_group(tensor_parallel_group())
        return local_rows if group is None or not self.layer.sequence_parallel else local_rows * group.size()

    def check(self, output: Tensor) -> None:
        """Refuse a model that changes its output layer's result, for instance by a softcap; checks once.

        Args:
            output: the model's result, [B, S, D].
        """
        if self._is_checked:
            return
        if self._returned is None:
            raise ValueError("output_layer: expected a model that calls it in its forward")
        expected, first = self._returned.transpose(0, 1), slice(CHECKED_ROWS)
        equal = expected.shape == output.shape
        if not equal or not torch.equal(expected[:, first].to(output.dtype), output[:, first].detach()):
            raise ValueError(
                "output_layer: the model changes the layer's output before the loss; its logits are needed"
            )
        self._is_checked, self._returned = True, None

    def logprobs(self, hidden: Tensor, targets: Tensor, plan: RowPlan, **options: Any) -> LogProbs:
        """`output_layer_logprobs` of the plan's rows.

        Args:
            hidden: [T, D] (or [T / TP, D] under sequence parallelism), possibly converted to fp32.
        """
        assert self._weight is not None
        rows = plan.rows_host if self.layer.sequence_parallel else plan.rows
        # Megatron returns fp32 outputs; casting back to the weight's dtype loses nothing.
        hidden = hidden.to(self._weight.dtype)
        options = {"weight": self._weight, "rows": rows, **options}
        return output_layer_logprobs(hidden, self.layer, targets, **options)


def find_output_layer(model: Any) -> Any:
    """Return the model's output layer, or None on a pipeline stage without one."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    layers = [module for name, module in model.named_modules() if name.split(".")[-1] == "output_layer"]
    if not layers:
        return None
    if len(layers) > 1 or not isinstance(layers[0], ColumnParallelLinear):
        kinds = ", ".join(type(layer).__name__ for layer in layers)
        raise ValueError(f"output_layer: expected one ColumnParallelLinear in the model, got {kinds}")
    return layers[0]


def _is_trained(weight: Any) -> bool:
    return torch.is_grad_enabled() and weight.requires_grad and getattr(weight, "main_grad", None) is not None


def _check_layer(output_layer: Any) -> None:
    if getattr(output_layer, "gather_output", False):
        raise ValueError("output_layer: expected gather_output=False; leanstep never gathers logits")
