"""Checks of the arguments that the public head functions share. They run once, before any work.

`check_options` rejects options that a function does not support. `check_head_call` checks the tensors and
returns them in the form that the engine expects. Errors name the argument, the expected and the actual value.
Host checks use shapes, dtypes and devices only; values are checked on the device, without a host sync.
"""

# T, N rows of the input · R selected rows (all without `rows`) · V vocabulary · K targets per row

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from leanstep.logprob.engine.lm_head import Head, RowSource, narrow_dtype
from leanstep.logprob.engine.vocab_subset import AllowedIds
from leanstep.logprob.inputs import ENTROPY_MODES, Allowed, Transform, Tuning, VocabShards, unpack_head
from leanstep.logprob.layout import to_device
from leanstep.logprob.parallel import (
    VocabShard,
    gather_hidden_rows,
    gather_weight,
    resolve_group,
    shard_rows,
    vocab_shard,
)
from leanstep.output_buffers import check_output_buffer

# hidden, weight, bias, low_hidden, low_weight: the differentiable inputs, in the order of the Functions.
HeadTensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


@dataclass
class CheckedCall:
    """The arguments of a head function after the checks.

    Attributes:
        head: the LM head with the temperature of the selected rows.
        tensors: hidden, weight, bias and the LoRA branch, attached to the autograd graph.
        rows: [R] rows of hidden to score, or None for all of them.
        source, low: the selected rows of hidden and of the LoRA branch (None without one), detached.
        group: the process group of the vocabulary shards, or None for one rank.
        reduce_grad: how the hidden gradient is reduced over `group`.
        caller_rows, num_rows: `rows` and the number of rows from the caller's view; they differ from those
            of `tensors` if sequence parallelism has gathered the selected rows.
    """

    head: Head
    tensors: HeadTensors
    rows: Tensor | None
    source: RowSource
    low: RowSource | None
    group: Any
    reduce_grad: str
    caller_rows: Tensor | None
    num_rows: int

    def targets(self, targets: Tensor, dims: tuple[int, ...] = (1,)) -> Tensor:
        """Return the targets of the selected rows, [R] or [R, K]."""
        return check_targets(targets, self.caller_rows, self.num_rows, self.head.vocabulary, dims)

    def per_row(self, name: str, values: Tensor) -> Tensor:
        """Return one value per selected row from a tensor with one value per selected row or per row."""
        return select_per_row(name, values, self.caller_rows, self.num_rows)


def check_options(
    transform: Transform | None,
    shards: VocabShards | None,
    tuning: Tuning | None,
    *,
    entropy: str = "none",
    only_budget: bool = True,
) -> Tuning:
    """Reject options that only `linear_logprobs` supports; return the tuning, or the default for None.

    only_budget: the function chooses its own tiles and returns the weight's gradient.
    """
    check_entropy(entropy)
    if transform is not None and transform.label_smoothing:
        raise ValueError(f"transform: expected label_smoothing 0 here, got {transform.label_smoothing}")
    if shards is not None and shards.sequence_parallel:
        raise ValueError("shards: expected sequence_parallel=False here, got True")
    tuning = Tuning() if tuning is None else tuning
    if only_budget and (tuning.tile or tuning.main_grad is not None or tuning.invariant):
        raise ValueError("tuning: expected only a budget here, no tile, main_grad or invariant")
    if tuning.invariant:
        raise ValueError("tuning: expected invariant=False here, got True")
    return tuning


def check_head_call(
    hidden: Tensor,
    weight: Any,
    *,
    rows: Tensor | None,
    temperature: float | Tensor,
    transform: Transform | None,
    shards: VocabShards | None,
    main_grad: Tensor | None = None,
) -> CheckedCall:
    """Check the arguments that describe a head and its rows.

    The methods of the result check targets and other per-row tensors. With sequence parallelism, the selected
    rows are gathered over the ranks (1 collective).
    """
    check_float("hidden", hidden, 2)
    group = None if shards is None else resolve_group(shards.group)
    reduce_grad = "none" if shards is None else shards.reduce_grad
    caller_rows, num_rows = rows, hidden.shape[0]
    if shards is not None and shards.sequence_parallel and group is not None:
        num_rows = hidden.shape[0] * group.size()
        host_rows = torch.arange(num_rows) if rows is None else rows
        hidden = gather_hidden_rows(hidden, shard_rows(host_rows, num_rows, group, hidden.device), group)
        rows, reduce_grad = None, "none"
    else:
        check_rows(rows, hidden.device, num_rows)
    head, tensors = build_head(hidden, weight, transform, shards)
    if main_grad is not None:
        shape, device = tensors[1].shape, hidden.device
        check_output_buffer("main_grad", main_grad, shape=shape, device=device, inputs=tensors)
    head.temperature = check_temperature(temperature, caller_rows, num_rows, head.dtype)
    low_hidden = tensors[3]
    return CheckedCall(
        head=head,
        tensors=tensors,
        rows=rows,
        source=RowSource(hidden.detach(), rows),
        low=None if low_hidden is None else RowSource(low_hidden.detach(), rows),
        group=group,
        reduce_grad=reduce_grad,
        caller_rows=caller_rows,
        num_rows=num_rows,
    )


def build_head(
    hidden: Tensor, weight: Any, transform: Transform | None, shards: VocabShards | None
) -> tuple[Head, HeadTensors]:
    """Check the arguments that describe a head; the caller sets its temperature.

    LoRA becomes a second, low-rank product: low_hidden @ up^T with low_hidden = scaling hidden @ down^T.
    """
    transform = Transform() if transform is None else transform
    tensor, bias, lora = unpack_head(weight)
    tensor, bias = full_tensor(tensor), full_tensor(bias)
    check_float("hidden", hidden, 2)
    check_float("weight", tensor, 2)
    if tensor.shape[1] != hidden.shape[1]:
        expected = f"[V, {hidden.shape[1]}] to match hidden"
        raise ValueError(f"weight: expected {expected}, got {tuple(tensor.shape)}")
    if tensor.device != hidden.device:
        raise ValueError(f"weight: expected device {hidden.device} to match hidden, got {tensor.device}")
    if bias is not None and bias.shape != tensor.shape[:1]:
        raise ValueError(f"bias: expected [{tensor.shape[0]}], got {tuple(bias.shape)}")
    low_hidden = low_weight = None
    if lora is not None:
        lora.check(tensor)
        low_hidden = torch.nn.functional.linear(hidden, lora.down.to(hidden.dtype)) * lora.scaling
        low_weight = lora.up
    shard, vocabulary = local_columns(tensor.shape[0], shards)
    head = Head(
        weight=tensor.detach(),
        bias=None if bias is None else bias.detach(),
        low_weight=None if low_weight is None else low_weight.detach(),
        scale=transform.scale,
        softcap=transform.softcap,
        temperature=1.0,
        shard=shard,
        vocabulary=vocabulary,
        dtype=accumulation_dtype(hidden.dtype, tensor.dtype),
        narrow=narrow_dtype(hidden),
    )
    return head, (hidden, tensor, bias, low_hidden, low_weight)


def local_columns(width: int, shards: VocabShards | None) -> tuple[VocabShard, int | None]:
    """Return this rank's shard of `width` columns, and the real vocabulary size if this rank knows it."""
    if shards is None:
        return VocabShard(0, width, width), width
    return vocab_shard(width, shards.group, start=shards.start, total=shards.total)


def check_vocabulary(head: Head, needed: str) -> int:
    """Return the size of the whole vocabulary; `needed` completes the error message."""
    if head.vocabulary is None:
        raise ValueError(f"shards.total: expected the whole vocabulary's size {needed}, got None")
    return head.vocabulary


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return fp64 if any dtype is fp64, otherwise fp32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def check_entropy(entropy: str) -> None:
    if entropy not in ENTROPY_MODES:
        raise ValueError(f"entropy: expected one of {', '.join(ENTROPY_MODES)}, got {entropy!r}")


def check_float(name: str, tensor: Tensor, dims: int) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dim() != dims:
        got = _describe(tensor)
        raise ValueError(f"{name}: expected a floating-point tensor with {dims} dimensions, got {got}")
    if tensor.layout != torch.strided or tensor.dtype.itemsize < 2:
        got = f"{tensor.dtype} {tensor.layout}"
        raise ValueError(f"{name}: expected a dense tensor of at least 16 bits per number, got {got}")


def check_rows(rows: Tensor | None, device: torch.device, num_rows: int) -> None:
    """Raise an error unless `rows` are valid row indices.

    On a GPU and in a compiled region, indexing itself asserts that they are in range. In a compiled region,
    the number of rows in the message would cause one graph per number of rows.
    """
    if rows is None:
        return
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
        raise ValueError(f"rows: expected a one-dimensional int64 tensor, got {_describe(rows)}")
    if rows.device != device:
        raise ValueError(f"rows: expected device {device}, got {rows.device}")
    if rows.device.type == "cpu" and not torch.compiler.is_compiling() and rows.numel():
        check_range("rows", rows, num_rows)


def select_per_row(name: str, values: Tensor, rows: Tensor | None, num_rows: int) -> Tensor:
    """Return `values` for the selected rows; the input has one value per selected row or per input row."""
    selected = num_rows if rows is None else rows.shape[0]
    if values.shape[0] == selected:
        return values
    if rows is not None and values.shape[0] == num_rows:
        # With sequence parallelism, rows are on the host.
        return values.index_select(0, rows.to(values.device))
    expected = f"{selected}" if rows is None else f"{selected} (selected rows) or {num_rows} (all rows)"
    raise ValueError(f"{name}: expected length {expected}, got {values.shape[0]}")


def check_targets(
    targets: Tensor, rows: Tensor | None, num_rows: int, vocabulary: int | None, dims: tuple[int, ...] = (1,)
) -> Tensor:
    """Return the targets of the selected rows. Ids outside the vocabulary raise an error, on a GPU later."""
    integers = isinstance(targets, Tensor) and targets.dtype in (torch.int64, torch.int32)
    if not integers or targets.dim() not in dims:
        wanted, got = " or ".join(map(str, dims)), _describe(targets)
        raise ValueError(f"targets: expected an int64 tensor with {wanted} dimensions, got {got}")
    targets = select_per_row("targets", targets.long(), rows, num_rows).contiguous()
    if targets.numel() and vocabulary is not None:
        check_range("targets", targets, vocabulary)
    return targets


def check_range(name: str, ids: Tensor, stop: int) -> None:
    """Raise an error for ids outside [0, stop)."""
    if not is_fake(ids):
        wrong = f"{name}: expected ids in [0, {stop})"
        assert_all((ids >= 0).logical_and_(ids < stop), wrong, ids)


def assert_all(condition: Tensor, wrong: str, values: Tensor) -> None:
    """Assert on the device without a host sync; on a CPU, raise at once with the values in the message."""
    try:
        torch._assert_async(condition.all(), wrong)
    except RuntimeError:
        if values.device.type != "cpu":
            raise
        raise ValueError(f"{wrong}, got {values.min().item()} to {values.max().item()}") from None


def check_temperature(
    temperature: float | Tensor, rows: Tensor | None, num_rows: int, dtype: torch.dtype
) -> float | Tensor:
    """Return a positive float, or the selected rows' positive temperatures in the accumulation dtype."""
    if isinstance(temperature, Tensor):
        if temperature.requires_grad:
            raise ValueError("temperature: expected a constant, got a tensor that requires grad")
        if temperature.dim() == 0:
            temperature = temperature.expand(num_rows if rows is None else rows.shape[0])
        if temperature.dim() != 1 or not temperature.is_floating_point():
            expected, got = "a float or a one-dimensional float tensor", _describe(temperature)
            raise ValueError(f"temperature: expected {expected}, got {got}")
        temperature = select_per_row("temperature", temperature, rows, num_rows).to(dtype)
        if temperature.numel() and not is_fake(temperature):
            assert_all(temperature > 0, "temperature: expected values > 0", temperature)
        return temperature
    if not float(temperature) >= torch.finfo(torch.float32).tiny:
        raise ValueError(f"temperature: expected a value > 0 (in float32), got {temperature}")
    return float(temperature)


def checked_allowed(
    allowed: Any,
    num_rows: int,
    vocabulary: int | None,
    device: torch.device,
    *,
    whole_entropy: bool = True,
) -> AllowedIds | None:
    """Validate an `Allowed` or an equivalent tuple. Reads the offsets on the host: one sync on a GPU.

    whole_entropy: the value to use if the record has `whole_entropy=None`.
    """
    if allowed is None:
        return None
    if not isinstance(allowed, (tuple, list)) or len(allowed) not in (2, 3, 4):
        got = f"{len(allowed)} values" if isinstance(allowed, (tuple, list)) else type(allowed).__name__
        raise ValueError(f"allowed: expected (ids, offsets) or (ids, offsets, has_set), got {got}")
    ids, offsets, has_set, whole = Allowed(*allowed)
    whole_entropy = whole_entropy if whole is None else bool(whole)
    for name, value in (("ids", ids), ("offsets", offsets)):
        if value.dtype not in (torch.int32, torch.int64) or value.dim() != 1:
            got = f"{value.dtype} {tuple(value.shape)}"
            raise ValueError(f"allowed: expected one-dimensional int {name}, got {got}")
    if offsets.shape[0] != num_rows + 1:
        expected = f"{num_rows + 1} offsets for {num_rows} rows"
        raise ValueError(f"allowed: expected {expected}, got {offsets.shape[0]}")
    starts = offsets.tolist()
    rising = all(a <= b for a, b in pairwise(starts))
    if not rising or starts[0] != 0 or starts[-1] != ids.shape[0]:
        got = f"{starts[0]} to {starts[-1]}" + ("" if rising else ", not rising")
        raise ValueError(f"allowed: expected offsets that rise from 0 to {ids.shape[0]}, got {got}")
    everywhere = has_set is None
    if has_set is None:
        has_set = torch.ones(num_rows, dtype=torch.bool, device=device)
    if has_set.dtype != torch.bool or has_set.shape != (num_rows,):
        got = f"{has_set.dtype} {tuple(has_set.shape)}"
        raise ValueError(f"allowed: expected has_set bool [{num_rows}], got {got}")
    ids = to_device(ids, device).long()
    if ids.numel() and vocabulary is not None:
        check_range("allowed ids", ids, vocabulary)
    lengths = to_device(offsets, device).long().diff()
    row_of = torch.repeat_interleave(lengths, output_size=ids.shape[0])
    return AllowedIds(ids, row_of, starts, to_device(has_set, device), everywhere, whole_entropy)


def full_tensor(tensor: Any) -> Any:
    """Return the gathered value of a DTensor; other tensors are returned unchanged."""
    return gather_weight(tensor) if is_dtensor(tensor) else tensor


def is_dtensor(tensor: Any) -> bool:
    return type(tensor).__name__ == "DTensor" and hasattr(tensor, "placements")


def _describe(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def is_fake(tensor: Tensor) -> bool:
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"
