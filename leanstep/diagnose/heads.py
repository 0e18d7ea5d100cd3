"""Which matmul is the head, which rows of it are dead, and which tensors are as wide.

A head is a matmul with a weight whose output the loss reads over its columns: a softmax, or a lookup of the
target's column. Width alone is not enough: the widest layer of a small model is its MLP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from leanstep.tape.events import BACKWARD, FORWARD, NO_STORAGE, OPTIMIZER, RECOMPUTE, TensorInfo
from leanstep.tape.lines import IN_FUNCTION, UNKNOWN, Site

if TYPE_CHECKING:
    from leanstep.diagnose.step import Op, Step

# Ops that read a row over its classes -> position of the dimension among the arguments; None: see `_reads`.
CLASS_READS: dict[str, int | None] = {
    "_log_softmax": 1,
    "_softmax": 1,
    "logsumexp": 1,
    "gather": 1,
    "nll_loss_forward": None,
    "nll_loss2d_forward": None,
    "index": None,
}
_READS_COLUMNS = {*CLASS_READS, "cross_entropy_loss", "argmax", "max", "topk"} - {"index"}
# A matmul narrower than this many times its inner dimension is a router or a classifier of a few classes: the
# rows of such a head cost less than the layers before it.
HEAD_RATIO = 2
# Smaller tensors without gradients do not matter.
MIN_BYTES = 16 * 1024


class Product(NamedTuple):
    """Rows of `inner` columns times a weight, or a slice of one: `width` columns."""

    inner: int
    width: int
    weight: int
    site: Site


@dataclass
class Head:
    """The backward of a head: rows seen, rows of zero gradient. `in_tiles`: no [N, V] is ever held."""

    inner: int
    width: int
    rows: int = 0
    dead: int = 0
    element_bytes: int = 4
    in_tiles: bool = False


class Unsaved(NamedTuple):
    """A tensor as wide as a product, written without gradients."""

    site: Site
    tensor: TensorInfo


class HeadWalk:
    """One walk over a step's ops.

    width: of the head; 0 if the step has none. heads: by line, only those of this width. unsaved: by width.
    derived: casts of weights -> storage and offset of the weight. weight_matmuls: places of their matmuls.
    first_product: place of the first matmul that may be a head.
    """

    def __init__(self, step: Step) -> None:
        self.width = self.first_product = 0
        self.derived: dict[int, tuple[int, int]] = {}
        self.weight_matmuls: list[int] = []
        self._run = step.run
        self._of: dict[int, Product] = {}
        # Storage of a weight -> a product that the loss reads.
        self._by_weight: dict[int, Product] = {}
        self._nodes: dict[int, Product] = {}
        self._heads: dict[Site, Head] = {}
        self._unsaved: list[tuple[int, Unsaved]] = []
        for op in step.ops:
            self._follow(op)
        if not step.tape.has_storages:
            self.width = _width_by_shapes(step)
        self.heads = {site: head for site, head in self._heads.items() if head.width == self.width}
        self.unsaved = [entry for width, entry in self._unsaved if width == self.width]

    def weight_of(self, tensor: TensorInfo) -> tuple[int, int] | None:
        """Return storage and offset of the weight that a tensor is, is a slice of, or was cast from."""
        if tensor.storage in self._run.parameters or tensor.storage in self._run.frozen:
            return tensor.storage, tensor.offset
        return self.derived.get(tensor.storage)

    def _follow(self, op: Op) -> None:
        product = None
        if not op.built_in:
            product = next((self._of[t.storage] for t in op.tensors if t.storage in self._of), None)
            for out in op.outs:
                self._of.pop(out.storage, None)
            if product is not None:
                self._follow_product(op, product)
        if op.matmul is not None:
            self._on_matmul(op)
        elif op.name == "_to_copy" and op.phase != OPTIMIZER and op.outs:
            weight = self.weight_of(op.tensors[0])
            if weight is not None and op.tensors[0].dtype != op.outs[0].dtype:
                self.derived[op.outs[0].storage] = weight
        if op.direct and op.phase == FORWARD and not op.event.grad and self._of and not op.in_leanstep:
            self._look_for_unsaved(op)

    def _follow_product(self, op: Op, product: Product) -> None:
        width = product.width
        if op.name in CLASS_READS and _reads(op.name, op.event.args, width):
            # The latest one: a model that generates and is trained in one step reads its head twice.
            self._by_weight[product.weight] = product
            self.width = max(self.width, width)
        for out in op.outs:
            if out.shape[-1:] == (width,):
                self._of[out.storage] = product

    def _on_matmul(self, op: Op) -> None:
        assert op.matmul is not None
        second = op.factors[1]
        weight = self.weight_of(second)
        if weight is not None:
            self.weight_matmuls.append(op.index)
        inner, width = op.matmul.inner, op.matmul.columns
        if op.phase in (FORWARD, RECOMPUTE) and width >= HEAD_RATIO * inner and weight is not None:
            product = Product(inner, width, weight[0], op.site)
            self._of[op.outs[0].storage] = product
            self.first_product = self.first_product or op.index
            if op.event.node >= 0:
                self._nodes[op.event.node] = product
        elif op.event.value is not None and op.phase == BACKWARD:
            if op.built_in:
                head = self._nodes.get(op.event.node)
                if head is not None and head.width == self.width:
                    self._count(op, head, head.width)
            elif weight is not None and not weight[1]:
                self._count_tile(op, weight[0], second)

    def _count_tile(self, op: Op, weight: int, second: TensorInfo) -> None:
        """Count the rows of a logit tile's gradient in a backward written by hand.

        A row that is dead in one tile is dead in all of them, so only the first slice of the weight counts.
        """
        head = self._by_weight.get(weight)
        gradient = op.factors[0]
        if head is None or gradient.ndim != 2 or self.weight_of(gradient) is not None:
            return
        if second.shape[-1] != head.inner or gradient.shape[-1] != second.shape[0]:
            return
        width = max(self._run.numel.get(weight, 0) // head.inner, head.width)
        self.width = max(self.width, width)
        self._count(op, head, width).in_tiles = True

    def _count(self, op: Op, product: Product, width: int) -> Head:
        rows, dead = op.event.value
        head = self._heads.get(product.site)
        if head is None:
            size = op.factors[0].dtype.itemsize
            head = self._heads[product.site] = Head(product.inner, width, element_bytes=size)
        head.rows += rows
        head.dead += dead
        return head

    def _look_for_unsaved(self, op: Op) -> None:
        """Note logits, or a tensor of their size, without gradients: old log-probs, an entropy."""
        if op.written_bytes < MIN_BYTES or op.event.flags & IN_FUNCTION or op.site is UNKNOWN:
            return
        for out in op.outs:
            product = self._of.get(out.storage) if out.ndim > 1 and out.storage != NO_STORAGE else None
            if product is not None and product.width == out.shape[-1]:
                self._unsaved.append((product.width, Unsaved(op.site, out)))


def _width_by_shapes(step: Step) -> int:
    """Return the head's width in a trace: some op reads a product of this shape over its columns."""
    forward = [op for op in step.ops if op.phase in (FORWARD, RECOMPUTE) and op.tensors]
    read = {
        (math.prod(op.tensors[0].shape[:-1]), op.tensors[0].shape[-1])
        for op in forward
        if op.name in _READS_COLUMNS and op.tensors[0].ndim > 1
    }
    products = [op.matmul for op in forward if op.matmul is not None and op.matmul.batch == 1]
    wide = [p.columns for p in products if p.columns >= HEAD_RATIO * p.inner and (p.rows, p.columns) in read]
    return max(wide, default=0)


def _reads(name: str, args: tuple[Any, ...], width: int) -> bool:
    """Return whether an op reads its first argument over `width` columns."""
    logits, position = args[0], CLASS_READS[name]
    if name == "index":
        # logits[rows, targets]: an index for the last dimension as well.
        indices = args[1]
        return len(indices) == logits.ndim and indices[-1] is not None and logits.shape[-1] == width
    if position is None:
        return logits.shape[1 if logits.ndim > 1 else 0] == width
    dims = args[position] if isinstance(args[position], tuple) else (args[position],)
    return any(logits.ndim and logits.shape[dim] == width for dim in dims)
