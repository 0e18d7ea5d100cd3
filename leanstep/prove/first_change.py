"""Find the first op whose output for a row depends on the rest of the batch, from two runs of one model.

Ops of both runs are paired by name and line; a branch or a longer loop leaves some ops without a partner. A
pair with a row dimension is compared row by row. An op without a row dimension (a statistic over the batch)
or without a partner is a suspect. When a row computed from suspects differs, the earliest of them is
reported.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Size, Tensor

from leanstep.measure.parity import same_bits
from leanstep.tape.lines import Line, short_path

# A relative difference up to this is rounding; above it the value itself depends on the rest of the batch.
ROUNDING = 1e-3
# The op behind `.item()`.
READ = "_local_scalar_dense"


@dataclass
class InvarianceRow:
    """The first op whose bits for a row differ between the batch and one variant of it."""

    variant: str
    row: int
    op: str
    file: str
    line: int
    code: str
    called_from: str
    shape: list[int]
    variant_shape: list[int]
    difference: float
    kind: str
    model: str
    op_number: int


@dataclass
class TapedOp:
    name: str
    line: Line | None
    caller: Line | None
    inputs: tuple[int, ...]
    outputs: list[Tensor]


@dataclass(frozen=True)
class Variant:
    """A changed batch: row i is row `rows[i]` of the original, followed by `added` padding positions."""

    name: str
    rows: tuple[int, ...]
    added: int = 0


def first_change(
    plain: list[TapedOp],
    other: list[TapedOp],
    variant: Variant,
    batch: int,
    length: int | None,
    learned: dict[int, list[tuple[int, int] | None]],
) -> InvarianceRow | None:
    """Compare the ops of a variant with those of the batch; None if every row has the same bits.

    `learned` stores the row dimension of each output per op; variants with another batch size reveal it.
    """
    pairs = _aligned(plain, other)
    matched = {place for _, place in pairs}
    # Ops of the variant that the batch does not run, or whose result has no rows and differs.
    suspects = {place for place in range(len(other)) if place not in matched}
    only_batch = sorted(set(range(len(plain))) - {index for index, _ in pairs})
    for index, place in pairs:
        a, b = plain[index], other[place]
        for number, (x, y) in enumerate(zip(a.outputs, b.outputs, strict=True)):
            dims = learned.setdefault(index, [])
            while len(dims) <= number:
                dims.append(None)
            if len(variant.rows) != batch:
                dims[number] = _batch_dim(x.shape, y.shape, batch, len(variant.rows))
            dim = dims[number]
            if dim is None:
                if not (x.shape == y.shape and same_bits(x, y)) and not variant.added:
                    suspects.add(place)
                continue
            for spot, row in enumerate(variant.rows):
                readings = list(_rows_of(x, y, dim, row, spot, variant, length))
                if readings and not any(same_bits(p, q) for p, q in readings):
                    skipped = next((plain[n] for n in only_batch if n < index), None)
                    pair = readings[0]
                    return _blame(other, place, suspects, matched, skipped, variant, row, (x, y), pair)
    return None


def _aligned(plain: list[TapedOp], other: list[TapedOp]) -> list[tuple[int, int]]:
    """Return index pairs of the ops that both runs execute, matched by op and line."""
    left, right = ([(op.name, op.line, len(op.outputs)) for op in ops] for ops in (plain, other))
    if left == right:
        return [(n, n) for n in range(len(left))]
    matcher = difflib.SequenceMatcher(None, left, right, autojunk=False)
    blocks = matcher.get_matching_blocks()
    return [(block.a + n, block.b + n) for block in blocks for n in range(block.size)]


def _batch_dim(shape: Size, other: Size, batch: int, rows: int) -> tuple[int, int] | None:
    """Return (dimension, elements per row) of the dimension that has `batch` and `rows` rows; else None."""
    if len(shape) != len(other):
        return None
    differing = [d for d in range(len(shape)) if shape[d] != other[d]]
    if len(differing) != 1:
        return None
    (d,) = differing
    if shape[d] % batch or other[d] % rows or shape[d] // batch != other[d] // rows:
        return None
    return d, shape[d] // batch


def _rows_of(
    x: Tensor, y: Tensor, dim: tuple[int, int], row: int, place: int, variant: Variant, length: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the row in both tensors; several pairs if a flattened dimension can be read in several ways."""
    d, per_row = dim
    if not variant.added:
        yield x.narrow(d, row * per_row, per_row), y.narrow(d, place * per_row, per_row)
        return
    assert length is not None
    longer = length + variant.added
    for outer in (True, False):
        a, b = x, y
        for axis in range(x.dim()):
            if a.shape[axis] == b.shape[axis]:
                continue
            parts = a.shape[axis] // length
            if a.shape[axis] != parts * length or b.shape[axis] != parts * longer:
                return
            sizes = (parts, longer) if outer else (longer, parts)
            b = b.unflatten(axis, sizes).narrow(axis + int(outer), 0, length).flatten(axis, axis + 1)
        if a.shape != b.shape:
            return
        # In a flattened dimension the rows of one sample are not contiguous: compare all of them.
        yield a, b


def _blame(
    ops: list[TapedOp],
    place: int,
    suspects: set[int],
    matched: set[int],
    skipped: TapedOp | None,
    variant: Variant,
    row: int,
    results: tuple[Tensor, Tensor],
    pair: tuple[Tensor, Tensor],
) -> InvarianceRow:
    """Report the op that changed the row's bits: the op itself, or the earliest suspect it depends on."""
    a, b = (t.double() for t in pair)
    difference = float((a - b).abs().max() / a.abs().max().clamp(min=1e-300))
    kind = "rounding" if difference <= ROUNDING else "the value itself"
    first, pending = place, [place]
    while pending:
        sources = [n for n in ops[pending.pop()].inputs if n in suspects]
        pending += sources
        first = min([first, *sources])
    op = ops[first]
    if first == place:
        reads = [n for n in range(place) if ops[n].name == READ and suspects.intersection(ops[n].inputs)]
        if reads:
            # A value read by the host cannot be traced back through tensors.
            op = ops[min(n for n in ops[reads[-1]].inputs if n in suspects)]
            kind += ", through a value over the whole batch"
        elif skipped is not None:
            op, kind = skipped, kind + ", by ops that only the original batch runs"
    elif first in matched:
        kind += ", through a value over the whole batch"
    else:
        kind += ", by different ops"
    shape, other = (list(t.shape) for t in results)
    return _row_of(op, variant, row, shape, other, difference, kind, first)


def _row_of(
    op: TapedOp,
    variant: Variant,
    row: int,
    shape: list[int],
    other: list[int],
    difference: float,
    kind: str,
    number: int,
) -> InvarianceRow:
    line = op.line or Line("<unknown>", 0)
    caller = f"{short_path(op.caller.file)}:{op.caller.number}" if op.caller else ""
    return InvarianceRow(
        variant.name, row, op.name, short_path(line.file), line.number, line.code, caller, shape, other,
        difference, kind, "", number,
    )  # fmt: skip
