"""What the log-prob functions return, and the checks they share at the door."""

# N rows of the input · R selected rows (all of them without `rows`) · K targets per row

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from leanstep.logprob.parallel import VocabShard, resolve_group

Entropy = Literal["none", "metric", "grad"]
ENTROPY_MODES = ("none", "metric", "grad")


class LogProbs(NamedTuple):
    """Per-row results; fields that were not asked for are None.

    logp: [R] or [R, K]. entropy: [R]. lse, z_loss (lse squared), kl, reverse_kl: [R], differentiable.
    argmax: [R] ids. top_k: values and ids, [R, k], largest first. Both detached.
    """

    logp: Tensor
    entropy: Tensor | None = None
    lse: Tensor | None = None
    z_loss: Tensor | None = None
    argmax: Tensor | None = None
    top_k: tuple[Tensor, Tensor] | None = None
    kl: Tensor | None = None
    reverse_kl: Tensor | None = None


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """fp64 when anything is fp64, else fp32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def check_entropy(entropy: str) -> None:
    if entropy not in ENTROPY_MODES:
        raise ValueError(f"entropy: expected one of {', '.join(ENTROPY_MODES)}, got {entropy!r}")


def check_float(name: str, tensor: Tensor, dims: int) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.dim() != dims:
        got = _describe(tensor)
        raise ValueError(f"{name}: expected a floating-point tensor with {dims} dimensions, got {got}")


def check_rows(rows: Tensor | None, device: torch.device) -> None:
    if rows is None:
        return
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
        raise ValueError(f"rows: expected a one-dimensional int64 tensor, got {_describe(rows)}")
    if rows.device != device:
        raise ValueError(f"rows: expected device {device}, got {rows.device}")


def select_per_row(name: str, values: Tensor, rows: Tensor | None, num_rows: int) -> Tensor:
    """`values` for the selected rows: given for those already, or for all rows of the input."""
    selected = num_rows if rows is None else rows.shape[0]
    if values.shape[0] == selected:
        return values
    if rows is not None and values.shape[0] == num_rows:
        # Sequence parallelism has its rows on the host.
        return values.index_select(0, rows.to(values.device))
    expected = f"{selected}" if rows is None else f"{selected} (selected rows) or {num_rows} (all rows)"
    raise ValueError(f"{name}: expected length {expected}, got {values.shape[0]}")


def check_tokens(
    tokens: Tensor, rows: Tensor | None, num_rows: int, vocabulary: int | None, dims: tuple[int, ...] = (1,)
) -> Tensor:
    """Targets of the selected rows; ids outside the vocabulary are an error, on a GPU an asynchronous one."""
    integers = isinstance(tokens, Tensor) and tokens.dtype in (torch.int64, torch.int32)
    if not integers or tokens.dim() not in dims:
        wanted = " or ".join(map(str, dims))
        raise ValueError(
            f"tokens: expected an int64 tensor with {wanted} dimensions, got {_describe(tokens)}"
        )
    tokens = select_per_row("tokens", tokens.long(), rows, num_rows).contiguous()
    if tokens.numel() and vocabulary is not None:
        check_range("tokens", tokens, vocabulary)
    return tokens


def check_range(name: str, ids: Tensor, stop: int) -> None:
    """Refuse ids outside [0, stop)."""
    if not _is_fake(ids):
        wrong = f"{name}: expected ids in [0, {stop})"
        _assert_all((ids >= 0).logical_and_(ids < stop), wrong, ids)


def _assert_all(condition: Tensor, wrong: str, values: Tensor) -> None:
    """The device asserts, the host need not look; on a CPU at once, with the values in the message."""
    try:
        torch._assert_async(condition.all(), wrong)
    except RuntimeError:
        if values.device.type != "cpu":
            raise
        raise ValueError(f"{wrong}, got {values.min().item()} to {values.max().item()}") from None


def check_temperature(
    temperature: float | Tensor, rows: Tensor | None, num_rows: int, dtype: torch.dtype
) -> float | Tensor:
    """A positive float, or the positive temperatures of the selected rows in the accumulation dtype."""
    if isinstance(temperature, Tensor):
        if temperature.requires_grad:
            raise ValueError("temperature: expected a constant, got a tensor that requires grad")
        if temperature.dim() == 0:
            temperature = temperature.expand(num_rows if rows is None else rows.shape[0])
        if temperature.dim() != 1 or not temperature.is_floating_point():
            raise ValueError(
                "temperature: expected a float or a one-dimensional float tensor, "
                f"got {temperature.dtype} {tuple(temperature.shape)}"
            )
        temperature = select_per_row("temperature", temperature, rows, num_rows).to(dtype)
        if temperature.numel() and not _is_fake(temperature):
            _assert_all(temperature > 0, "temperature: expected values > 0", temperature)
        return temperature
    if not float(temperature) > 0:
        raise ValueError(f"temperature: expected a value > 0, got {temperature}")
    return float(temperature)


def vocabulary_size(
    shard: VocabShard, group: Any, vocab_start: int | None, vocab_total: int | None
) -> int | None:
    """The real vocabulary, or None when only the ranks together know it (unequal shards, no total given)."""
    if vocab_total is not None:
        return vocab_total
    process_group = resolve_group(group)
    if process_group is None:
        return shard.start + shard.width
    return None if vocab_start is not None else shard.width * process_group.size()


def _describe(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _is_fake(tensor: Tensor) -> bool:
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"
