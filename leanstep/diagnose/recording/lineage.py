"""Origins of a step's tensors, by storage: which matmul the loss reads, and which data is on the host.

A head is a matmul with a weight whose output the loss reads over its columns: a softmax, or a lookup of the
target's column. Width alone is not enough: the widest layer of a small model is its MLP.

Tensors used together in one op are on one device, except for scalars. So host data is data that is never used
together with the model, neither itself nor anything computed from it or with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leanstep.tape.lines import Site

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
# A matmul narrower than this many times its inner dimension is a router or a classifier of a few classes: the
# rows of such a head cost less than the layers before it.
HEAD_RATIO = 2


@dataclass(frozen=True)
class Product:
    """Rows of `inner` columns times a weight, or a slice of one: `width` columns."""

    inner: int
    width: int
    weight: int
    site: Site


class Products:
    """Outputs of matmuls with a weight, tracked through ops that preserve their width, and their readers."""

    def __init__(self) -> None:
        # storage of a tensor -> the product it comes from
        self.of: dict[int, Product] = {}
        self.head_width = self.head_inner = 0
        # storage of a weight -> a product that the loss reads
        self.heads: dict[int, Product] = {}

    def follow(self, name: str, args: Sequence[Any], product: Product, outs: Iterable[Tensor]) -> None:
        """Record that an op reads a tensor that comes from `product`."""
        width = product.width
        if name in CLASS_READS and self._reads(name, args, width):
            # The latest one: a model that generates and is trained in one step reads its head twice.
            self.heads[product.weight] = product
            if width > self.head_width:
                self.head_width, self.head_inner = width, product.inner
        for out in outs:
            if out.ndim and out.shape[-1] == width:
                self.of[out.untyped_storage()._cdata] = product

    @staticmethod
    def _reads(name: str, args: Sequence[Any], width: int) -> bool:
        logits = args[0]
        position = CLASS_READS[name]
        if name == "index":
            # logits[rows, targets]: an index for the last dimension as well.
            indices = args[1]
            return len(indices) == logits.ndim and indices[-1] is not None and logits.shape[-1] == width
        if position is None:
            return logits.shape[1 if logits.ndim > 1 else 0] == width
        dims = args[position] if isinstance(args[position], (list, tuple)) else (args[position],)
        return any(logits.ndim and logits.shape[dim] == width for dim in dims)


class Family:
    """Tensors on one device because an op used them together; `met`: the model is among them."""

    __slots__ = ("met", "on_host", "parent")

    def __init__(self) -> None:
        self.parent: Family | None = None
        self.met = self.on_host = False

    def root(self) -> Family:
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    @property
    def is_hosts_own(self) -> bool:
        return self.on_host or not self.root().met


class Families:
    """The families of tensors that depend on no parameter, by storage."""

    def __init__(self) -> None:
        self._known: dict[int, Family] = {}
        # Before the first op of the model, existing tensors may include its loss.
        self.model_seen = True

    def of(self, storage: int) -> Family:
        family = self._known.get(storage)
        if family is None:
            family = self._known[storage] = Family()
            family.met = not self.model_seen
        return family

    def create(self, storage: int) -> None:
        """Record a new allocation: whatever had this storage address before is gone."""
        self._known[storage] = Family()

    def meet_model(self, tensors: Iterable[tuple[int, Tensor]]) -> None:
        """Record an op that reads these together with a value of the model.

        A scalar may come from the host.
        """
        for storage, tensor in tensors:
            if tensor.ndim:
                self.of(storage).root().met = True

    def join(self, tensors: Sequence[tuple[int, Tensor]], outs: Iterable[int]) -> None:
        """Record an op that reads these and no value of the model, and writes `outs`."""
        if not tensors:
            for storage in outs:
                self.create(storage)
            return
        joined = [s for s, tensor in tensors if tensor.ndim] or [s for s, _ in tensors]
        first = self.of(joined[0]).root()
        for storage in joined[1:]:
            other = self.of(storage).root()
            if other is not first:
                other.parent = first
                first.met |= other.met
        for storage in outs:
            self._known[storage] = first

    def leave_host(self, storage: int) -> None:
        """Record `.to(device)`: all earlier reads of the tensor were on the host."""
        family = self._known.pop(storage, None)
        if family is not None:
            family.on_host = True


def moves_to_device(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of `Tensor.to` names a device, as device-independent scripts do."""
    return any(isinstance(arg, (str, torch.device)) for arg in (*args[1:], kwargs.get("device")))


def count_distinct(values: Sequence[int], spans: Iterable[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """len(set(values[start:stop])) of every span, in about len(values) + len(spans) * sqrt(len(values)).

    A script of many lines has as many spans, each nearly as long as the step: counting them one by one
    would be quadratic.
    """
    result: dict[tuple[int, int], int] = {}
    # 1 where a value occurs for the last time so far; the number of ones in each block.
    is_last = bytearray(len(values))
    block = max(1, math.isqrt(len(values)))
    in_block = [0] * (len(values) // block + 1)
    last: dict[int, int] = {}
    done = 0
    for start, stop in sorted(spans, key=lambda span: span[1]):
        for index in range(done, stop):
            earlier = last.get(values[index])
            if earlier is not None:
                is_last[earlier] = 0
                in_block[earlier // block] -= 1
            last[values[index]] = index
            is_last[index] = 1
            in_block[index // block] += 1
        done = max(done, stop)
        first = -(-start // block)
        whole = sum(in_block[first:]) if first * block < stop else 0
        result[start, stop] = whole + is_last.count(1, start, min(first * block, len(values)))
    return result
