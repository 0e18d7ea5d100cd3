"""torch.distributed under names that last: means, and the calls torch 2.13 renamed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Group = Any


class Pending:
    """A collective under way; `wait` finishes it and divides a sum into a mean."""

    def __init__(self, work: Any, result: Tensor, divisor: int = 1) -> None:
        self._work, self._result, self._divisor = work, result, divisor

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._divisor > 1:
                self._result.div_(self._divisor)
        return self._result


def chunk(length: int, rank: int, world_size: int) -> tuple[int, int]:
    """(begin, end) of a rank's rows, cut as DTensor cuts: equal parts, the last ones shorter or empty."""
    size = -(-length // world_size)
    return min(length, rank * size), min(length, (rank + 1) * size)


# A sum divided by the number of ranks: gloo knows no mean before torch 2.13, and for a power of two the
# result is the same to the bit.
def all_reduce_mean(tensor: Tensor, group: Group) -> Pending:
    """tensor <- mean over the ranks, in place."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return Pending(work, tensor, dist.get_world_size(group))


def reduce_scatter_mean(rows: Tensor, group: Group) -> Pending:
    """The mean of this rank's equal share of `rows` (dimension 0 divisible by the number of ranks)."""
    world = dist.get_world_size(group)
    out = rows.new_empty(rows.size(0) // world, *rows.shape[1:])
    return Pending(_reduce_scatter(out, rows, group=group, async_op=True), out, world)


def all_gather(part: Tensor, group: Group) -> Pending:
    """Every rank's `part`, joined along dimension 0."""
    out = part.new_empty(part.size(0) * dist.get_world_size(group), *part.shape[1:])
    return Pending(_all_gather(_bytes(out), _bytes(part.contiguous()), group=group, async_op=True), out)


def broadcast(tensor: Tensor, source: int, group: Group) -> None:
    """tensor <- the one of rank `source` of the group."""
    dist.broadcast(_bytes(tensor), group=group, group_src=source)


def _bytes(tensor: Tensor) -> Tensor:
    # Neither gloo nor NCCL knows 16-bit integers; moving bytes needs no arithmetic.
    return tensor.view(torch.uint8) if tensor.dtype == torch.int16 else tensor


def all_to_all(send: Tensor, send_sizes: list[int], receive_sizes: list[int], group: Group) -> Tensor:
    """Send `send_sizes[r]` elements to each rank r; returns what came, in rank order."""
    out = send.new_empty(sum(receive_sizes))
    dist.all_to_all_single(out, send, receive_sizes, send_sizes, group=group)
    return out


def agree(finite: bool, num_grads: int, device: torch.device, group: Group) -> bool:
    """Whether every rank saw finite gradients; raises on all ranks if they differ in how many there are."""
    flags = torch.tensor([float(finite), num_grads, -num_grads], device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=group)
    everywhere, fewest, most = flags.tolist()
    if fewest != -most:
        raise ValueError(
            f"gradients: expected the same parameters with a gradient on every rank, "
            f"got between {int(fewest)} and {int(-most)}"
        )
    return bool(everywhere)
