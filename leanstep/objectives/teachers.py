"""Teachers: another head, precomputed log-probs, the top k of them, or soft labels; read tile by tile."""

# T rows · T' selected rows · D' the teacher's width · V local vocabulary · k listed outcomes

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.logprob import LMHead, LoRA, Transform, VocabShards
from leanstep.logprob.checks import (
    assert_all,
    build_head,
    check_float,
    check_vocabulary,
    full_tensor,
    is_fake,
)
from leanstep.logprob.engine.lm_head import Head, RowSource
from leanstep.logprob.inputs import unpack_head
from leanstep.objectives.divergences import log_one_minus_exp


@dataclass(frozen=True)
class TeacherHead:
    """A frozen model: its hidden states and its LM head; its width may differ from the student's.

    Args:
        hidden: [T, D'], or [T', D'] for only the selected rows.
        weight: [V, D'], or any head that `linear_logprobs` accepts.
        transform: the teacher's scale and softcap.
    """

    hidden: Tensor
    weight: Any
    transform: Transform | None = None


@dataclass(frozen=True)
class TeacherLogProbs:
    """Log-probs of the whole vocabulary at the temperature of the call; used unchanged.

    Args:
        log_probs: [T, V] or [T', V]; with shards, this rank's columns.
    """

    log_probs: Tensor


@dataclass(frozen=True)
class TeacherTopK:
    """The teacher's top k outcomes; its remaining mass is one more outcome, the tail.

    Args:
        ids: [T, k] or [T', k] global ids, distinct within a row.
        log_probs: the same shape; at the temperature of the call.
        tail: False omits the remaining mass from the divergence, on both sides.
    """

    ids: Tensor
    log_probs: Tensor
    tail: bool = True


@dataclass(frozen=True)
class SoftLabels:
    """Probability targets as in torch's cross-entropy; for divergence="cross_entropy" only.

    Args:
        probabilities: [T, V] or [T', V]; they need not sum to 1.
        label_smoothing: eps: (1 - eps) q + eps / V.
        class_weights: [V], factors on the columns.
    """

    probabilities: Tensor
    label_smoothing: float = 0.0
    class_weights: Tensor | None = None


Teacher = TeacherHead | TeacherLogProbs | TeacherTopK | SoftLabels


class HeadTiles:
    """Logits of a teacher's head; their softmax is known only after all tiles."""

    has_logits = True

    def __init__(self, teacher: TeacherHead, student: Head, source: RowSource, shards: VocabShards | None):
        head, tensors = build_head(teacher.hidden.detach(), teacher.weight, teacher.transform, shards)
        if head.weight.shape[0] != student.weight.shape[0] or head.columns != student.columns:
            wanted = f"[{student.weight.shape[0]}, D'] like the student's"
            raise ValueError(f"teacher.weight: expected {wanted}, got {tuple(head.weight.shape)}")
        if teacher.transform is not None and teacher.transform.label_smoothing:
            smoothing = teacher.transform.label_smoothing
            raise ValueError(f"teacher.transform: expected label_smoothing 0, got {smoothing}")
        if head.weight.device != student.weight.device:
            raise ValueError(
                f"teacher.weight: expected device {student.weight.device}, got {head.weight.device}"
            )
        head.temperature, head.dtype = student.temperature, student.dtype
        head.__post_init__()
        self.head, rows = head, _own_rows("teacher.hidden", len(teacher.hidden), source)
        self.source = RowSource(teacher.hidden.detach(), rows)
        self.low = None if tensors[3] is None else RowSource(tensors[3].detach(), rows)

    def read(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states of some rows and those of the LoRA branch; gathers once per chunk."""
        dtype = self.head.operand_dtype
        return self.source.chunk(rows, dtype), None if self.low is None else self.low.chunk(rows, dtype)


class GivenTiles:
    """Columns of a precomputed tensor: log-probs, or soft labels (then `is_probability`)."""

    has_logits = False

    def __init__(self, teacher: TeacherLogProbs | SoftLabels, student: Head, source: RowSource) -> None:
        self.is_probability = isinstance(teacher, SoftLabels)
        name = "probabilities" if isinstance(teacher, SoftLabels) else "log_probs"
        values = getattr(teacher, name).detach()
        check_float(f"teacher.{name}", values, 2)
        if values.shape[1] not in (student.weight.shape[0], student.columns):
            expected = f"[rows, {student.weight.shape[0]}]"
            raise ValueError(f"teacher.{name}: expected {expected}, got {tuple(values.shape)}")
        self.values, self.rows = values, _own_rows(f"teacher.{name}", len(values), source)
        self.keep, self.added, self.factors = 1.0, 0.0, None
        if isinstance(teacher, SoftLabels):
            self._soften(teacher, student)

    def _soften(self, teacher: SoftLabels, student: Head) -> None:
        if teacher.label_smoothing:
            vocabulary = check_vocabulary(student, "for label_smoothing")
            self.keep = 1.0 - teacher.label_smoothing
            self.added = teacher.label_smoothing / vocabulary
        if teacher.class_weights is not None:
            start = student.shard.start
            self.factors = teacher.class_weights[start : start + student.columns].to(
                student.weight.device, student.dtype
            )

    def tile(self, rows: slice, columns: slice, out: Tensor) -> Tensor:
        """Write values [R, W] of some rows and columns to `out`."""
        values = (
            self.values[rows, columns]
            if self.rows is None
            else self.values[:, columns].index_select(0, self.rows[rows])
        )
        out.copy_(values)
        if self.keep != 1.0:
            out.mul_(self.keep).add_(self.added)
        return out if self.factors is None else out.mul_(self.factors[columns])


def _own_rows(name: str, length: int, source: RowSource) -> Tensor | None:
    """Return the selected rows' indices in a teacher's tensor; None for a tensor of only the selected rows.

    If as many rows are selected as there are, both interpretations agree only if they are selected in order.
    """
    rows, num_rows = source.rows, source.hidden.shape[0]
    if rows is None and length == num_rows:
        return None
    if rows is not None and length == num_rows == source.num_rows:
        if not is_fake(rows):
            in_order = rows == torch.arange(num_rows, device=rows.device)
            expected = "every row in order if as many rows are selected as there are"
            assert_all(in_order, f"rows: expected {expected} ({name} has one row for each)", rows)
        return None
    if rows is not None and length == num_rows:
        return rows
    if rows is not None and length == source.num_rows:
        return None
    expected = f"{num_rows} rows"
    if rows is not None:
        expected += f" or {source.num_rows} (selected)"
    raise ValueError(f"{name}: expected {expected}, got {length}")


def checked_top_k(teacher: TeacherTopK, source: RowSource) -> tuple[Tensor, Tensor]:
    """Return ids and log-probs of the selected rows, [T', k] each."""
    ids, log_probs = teacher.ids, teacher.log_probs.detach()
    check_float("teacher.log_probs", log_probs, 2)
    if ids.shape != log_probs.shape:
        raise ValueError(f"teacher.ids: expected {tuple(log_probs.shape)}, got {tuple(ids.shape)}")
    rows = _own_rows("teacher.log_probs", len(log_probs), source)
    ids = ids.long()
    return (ids, log_probs) if rows is None else (ids.index_select(0, rows), log_probs.index_select(0, rows))


def open_teacher(
    teacher: Any, student: Head, source: RowSource, shards: VocabShards | None
) -> HeadTiles | GivenTiles:
    """Return an object that yields the teacher's tiles."""
    if isinstance(teacher, TeacherHead):
        return HeadTiles(teacher, student, source, shards)
    if isinstance(teacher, (TeacherLogProbs, SoftLabels)):
        return GivenTiles(teacher, student, source)
    expected = "TeacherHead, TeacherLogProbs or a single TeacherTopK"
    raise ValueError(f"teacher: expected {expected}, got {type(teacher).__name__}")


def tail_log_mass(log_probs: Tensor) -> Tensor:
    """Return log(1 - sum of the probabilities), [N]; -inf where no mass is left, without gradient there."""
    return log_one_minus_exp(torch.logsumexp(log_probs, -1).clamp(max=0.0))


def flat_teacher(teacher: Any) -> tuple[str, list[Tensor], list[float]]:
    """Flatten a teacher to an op's arguments: a word with its kind and parts, its tensors, three numbers."""
    if isinstance(teacher, TeacherHead):
        tensor, bias, lora = unpack_head(teacher.weight)
        word, tensors = "head", [teacher.hidden, full_tensor(tensor)]
        if bias is not None:
            word, tensors = f"{word}.bias", [*tensors, full_tensor(bias)]
        if lora is not None:
            word, tensors = f"{word}.lora", [*tensors, lora.down, lora.up]
        transform = teacher.transform or Transform()
        scaling = 1.0 if lora is None else float(lora.scaling)
        return word, tensors, [scaling, transform.scale, transform.softcap or 0.0]
    if isinstance(teacher, TeacherLogProbs):
        return "log_probs", [teacher.log_probs], [0.0] * 3
    if isinstance(teacher, TeacherTopK):
        return "top_k.tail" if teacher.tail else "top_k", [teacher.ids, teacher.log_probs], [0.0] * 3
    if isinstance(teacher, SoftLabels):
        numbers = [float(teacher.label_smoothing), 0.0, 0.0]
        if teacher.class_weights is None:
            return "soft", [teacher.probabilities], numbers
        return "soft.classes", [teacher.probabilities, teacher.class_weights], numbers
    expected = "TeacherHead, TeacherLogProbs, TeacherTopK or SoftLabels"
    raise ValueError(f"teacher: expected {expected}, got {type(teacher).__name__}")


def teacher_of(word: str, tensors: Iterator[Tensor], numbers: Iterator[float]) -> Any:
    """Return the record that `flat_teacher` describes."""
    kind, *parts = word.split(".")
    first, second, third = next(numbers), next(numbers), next(numbers)
    if kind == "head":
        hidden, weight = next(tensors), next(tensors)
        bias = next(tensors) if "bias" in parts else None
        lora = LoRA(next(tensors), next(tensors), first) if "lora" in parts else None
        return TeacherHead(hidden, LMHead(weight, bias, lora), Transform(second, third or None))
    if kind == "log_probs":
        return TeacherLogProbs(next(tensors))
    if kind == "top_k":
        return TeacherTopK(next(tensors), next(tensors), bool(parts))
    return SoftLabels(next(tensors), first, next(tensors) if parts else None)
