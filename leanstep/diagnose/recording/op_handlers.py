"""Op-specific counters: one handler per kind of op, looked up once per overload.

Every counted op adds to the counters of its line. The ops listed in `HANDLERS` add more: matmuls their shape
and FLOPs, casts what they repeat, backward ops the buffers they fill, copies the layouts they change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from leanstep.diagnose.recording.buffers import LiveBytes
from leanstep.diagnose.recording.habits import MIN_BYTES
from leanstep.diagnose.recording.lineage import HEAD_RATIO, Product
from leanstep.diagnose.recording.ops import (
    OpInfo,
    OpRun,
    different_order,
    out_of_order,
    widens,
)
from leanstep.diagnose.recording.step import HeadProduct, StepState
from leanstep.diagnose.step_records import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE, HeadRecord, tally
from leanstep.flops import MATMULS, matmul_sizes
from leanstep.tape.lines import IN_LEANSTEP, Site

Handler = Callable[[StepState, OpRun], None]
MAX_CASTS = 200_000
# Backward ops that fill a buffer of zeros with a small gradient -> position of the gradient.
INTO_ZEROS = {
    "index_put": 2,
    "index_put_": 2,
    "_index_put_impl_": 2,
    "scatter_add": 3,
    "scatter_add_": 3,
    "index_add": 3,
    "index_add_": 3,
}


def handler_of(info: OpInfo) -> Handler | None:
    """Return the handler of an op, None for most ops."""
    if not info.schema_name.startswith("aten::"):
        return None
    return on_fused_products if info.products is not None else HANDLERS.get(info.name)


# Matmuls and the head


def on_matmul(state: StepState, op: OpRun) -> None:
    assert op.info.matmul is not None
    first, second = (op.args[position] for position in op.info.matmul)
    shape = matmul_shape(op.info.name, first, second)
    batch, rows, inner, width, _ = shape
    op.flops = 2 * batch * rows * inner * width
    key = (op.site, op.phase, op.direct, op.chain, first.dtype, shape)
    state.matmuls[key] = state.matmuls.get(key, 0) + 1
    weight = state.weight_of(second)
    if weight is not None:
        state.weight_matmuls += 1
    elif batch > 1 and op.phase == FORWARD:
        state.habits.on_scores(op.outs[0], width)
    if op.phase in (FORWARD, RECOMPUTE) and width >= HEAD_RATIO * inner and weight is not None:
        _follow_wide_product(state, op, Product(inner, width, weight[0], op.site))
    elif op.built_in and op.node is not None and state.head_nodes:
        _on_head_backward(state, op.node, first, second)
    if op.phase == BACKWARD and not op.built_in and not op.flags & IN_LEANSTEP:
        _on_backward_by_hand(state, first, second)


def matmul_shape(name: str, first: Tensor, second: Tensor) -> tuple[int, int, int, int, bool]:
    """(batch, rows, inner, columns, second factor is column-major) of a matmul."""
    batch, rows, inner, columns = matmul_sizes(name, first.shape, second.shape)
    transposed = second.ndim > 1 and second.stride(-1) != 1 and second.stride(-2) == 1
    return batch, rows, inner, columns, transposed or name == "linear"


def _follow_wide_product(state: StepState, op: OpRun, product: Product) -> None:
    """Record a matmul wide enough for a head: it is one if the loss reads its columns."""
    out = op.outs[0]
    state.products.of[out.untyped_storage()._cdata] = product
    state.wide.setdefault(product.width, LiveBytes())
    if op.grad:
        state.head_nodes[op.number - 1] = HeadProduct(op.site, tuple(out.shape), product.inner, product.width)


def _on_head_backward(state: StepState, node: Any, first: Tensor, second: Tensor) -> None:
    number = node._sequence_nr()
    head = state.head_nodes.get(number)
    if head is None or head.width != state.products.head_width:
        return
    if _count_dead_rows(state, first, head) or _count_dead_rows(state, second, head):
        del state.head_nodes[number]


def _on_backward_by_hand(state: StepState, gradient: Tensor, second: Tensor) -> None:
    """Handle a hand-written backward that multiplies the gradient of a logit tile by a slice of the head.

    A row that is dead in one tile is dead in all of them, so only the first slice of the weight counts.
    """
    weight = state.weight_of(second)
    head = state.products.heads.get(weight[0]) if weight is not None else None
    if weight is None or head is None or weight[1] or gradient.ndim != 2 or state.is_parameter(gradient):
        return
    if second.shape[-1] != head.inner or gradient.shape[-1] != second.shape[0]:
        return
    parameter = state.run.parameters.get(weight[0])
    tensor = parameter.tensor() if parameter is not None else None
    size = tensor.numel() if tensor is not None else state.frozen.get(weight[0], 0)
    width = max(size // head.inner, head.width)
    products = state.products
    if width >= products.head_width:
        products.head_width, products.head_inner = width, head.inner
    tile = HeadProduct(head.site, tuple(gradient.shape), head.inner, width)
    if _count_dead_rows(state, gradient, tile):
        state.heads[head.site].in_tiles = True


def _count_dead_rows(state: StepState, operand: Tensor, head: HeadProduct) -> bool:
    """Count the rows of exactly zero gradient; False if the operand is not the gradient of the logits."""
    shape, actual = head.shape, tuple(operand.shape)
    transposed = (*shape[:-2], shape[-1], shape[-2]) if len(shape) > 1 else shape
    if actual not in (shape, transposed) or operand.is_meta or state.is_parameter(operand):
        return False
    # For a square gradient the strides, not the shape, tell its orientation.
    square = shape == transposed and len(shape) > 1
    if actual != shape or (square and operand.stride(-1) > operand.stride(-2)):
        operand = operand.mT
    largest = torch.linalg.vector_norm(operand.detach(), ord=float("inf"), dim=-1)
    dead = (largest == 0).sum()
    record = state.heads.get(head.site)
    if record is None:
        record = HeadRecord(inner=head.inner, width=head.width, element_bytes=operand.itemsize)
        state.heads[head.site] = record
    record.rows += largest.numel()
    if operand.device.type == "cpu":
        record.dead += int(dead)
    else:
        state.pending_heads.append((record, dead))
    return True


def on_fused_products(state: StepState, op: OpRun) -> None:
    """Count matmuls inside another op: attention, grouped matmuls, convolutions."""
    assert op.info.products is not None
    counted = op.info.products.count(op.args, op.kwargs, op.outs)
    if counted is None:
        text = "attention over packed sequences: only the device knows how many FLOPs it computes"
        state.run.note("dropped", "", text)
        return
    for phase, flops in ((op.phase, counted.flops), (RECOMPUTE, counted.repeated)):
        key = (phase, op.chain, counted.dtype)
        state.fused[key] = state.fused.get(key, 0) + flops
    op.flops = counted.flops + counted.repeated


# Casts


def on_cast(state: StepState, op: OpRun) -> None:
    tensor, out = op.tensors[0], op.outs[0]
    if tensor.dtype == out.dtype or tensor.is_inference():
        return
    if len(state.casts) >= MAX_CASTS:
        text = f"more than {MAX_CASTS:,} casts in one step: later ones are not compared"
        state.run.note("dropped", "", text)
        return
    storage, out_storage = tensor.untyped_storage(), out.untyped_storage()
    version = tensor._version
    key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), version, out.dtype)
    if key not in state.casts:
        # A weak reference reserves the address and does not hold the memory.
        state.casts[key] = StorageWeakRef(storage)
    elif op.phase != RECOMPUTE:
        # A checkpoint recomputes its casts on purpose.
        tally(state.duplicate_casts, op.site, out.nbytes, 1, f"{_dtype(tensor)} to {_dtype(out)}")
    earlier = state.cast_results.get(storage._cdata)
    if earlier is not None and earlier[:2] == (out.dtype, version) and widens(out.dtype, tensor.dtype):
        tally(state.round_trips, op.site, out.nbytes, 1, f"{_dtype(out)} to {_dtype(tensor)} and back")
    state.cast_results[out_storage._cdata] = (tensor.dtype, out._version, StorageWeakRef(out_storage))
    weight = state.weight_of(tensor) if op.phase != OPTIMIZER else None
    if weight is not None:
        state.derived[out_storage._cdata] = (StorageWeakRef(out_storage), *weight)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# Backward ops that fill whole buffers


def on_zeros(state: StepState, op: OpRun) -> None:
    if op.phase == BACKWARD:
        state.zero_storages.add(op.outs[0].untyped_storage()._cdata)


def on_whole_buffer(state: StepState, op: OpRun) -> None:
    """Record a backward op that writes a whole buffer for a small gradient, its first argument."""
    if op.phase == BACKWARD:
        _count_zero_fill(state, op, op.args[0])


def on_write_into_zeros(state: StepState, op: OpRun) -> None:
    """Record a backward op that writes a small gradient into zeros that were allocated for it."""
    if op.phase != BACKWARD:
        return
    storage = op.args[0].untyped_storage()._cdata
    if storage in state.zero_storages:
        state.zero_storages.discard(storage)
        _count_zero_fill(state, op, op.args[INTO_ZEROS[op.info.name]])


def _count_zero_fill(state: StepState, op: OpRun, gradient: Tensor) -> None:
    num_bytes = op.outs[0].nbytes
    if num_bytes >= state.run.fill_ratio * gradient.nbytes:
        tally(state.zero_fills, op.site, num_bytes, 1, op.info.name)


# Copies across layouts, copies of weights


def on_clone(state: StepState, op: OpRun) -> None:
    if not op.direct:
        return
    source, out = op.tensors[0], op.outs[0]
    if op.written_bytes >= state.run.layout_bytes:
        contiguous = (op.kwargs or {}).get("memory_format") == torch.contiguous_format
        if contiguous and out_of_order(source):
            _count_layout_change(state, (source,), out.nbytes, op.site, "copy")
    if op.written_bytes >= MIN_BYTES and not op.in_engine and not op.flags & IN_LEANSTEP:
        storage = source.untyped_storage()._cdata
        if storage in state.run.parameters or storage in state.run.held:
            state.habits.on_clone(source, out, op.site)


def on_index(state: StepState, op: OpRun) -> None:
    """Record weight[ids]: rows of a matrix read by integer ids, with gradients."""
    if not op.direct or op.in_engine or op.phase != FORWARD or not op.created_node or op.flags & IN_LEANSTEP:
        return
    source, indices = op.args[0], op.args[1]
    if len(indices) != 1 or indices[0] is None or indices[0].dtype not in (torch.int64, torch.int32):
        return
    if source.dim() == 2 and source.untyped_storage()._cdata in state.run.parameters:
        shape = f"{list(source.shape)}[{list(indices[0].shape)}]"
        tally(state.habits.indexed, op.site, op.outs[0].nbytes, 1, shape)


def on_add(state: StepState, op: OpRun) -> None:
    if not op.direct or op.written_bytes < state.run.layout_bytes:
        return
    target, other = op.args[:2]
    if isinstance(other, Tensor) and different_order(target, other):
        kind = "copy" if op.info.name == "copy_" else "add"
        _count_layout_change(state, (target, other), op.outs[0].nbytes, op.site, kind)


def on_foreach_add(state: StepState, op: OpRun) -> None:
    if not op.direct or op.written_bytes < state.run.layout_bytes:
        return
    targets, others = op.args[:2]
    if not isinstance(others, (list, tuple)):
        return
    for target, other in zip(targets, others, strict=False):
        if isinstance(other, Tensor) and different_order(target, other):
            _count_layout_change(state, (target, other), target.nbytes, op.site, "add")


def _count_layout_change(
    state: StepState, operands: tuple[Tensor, ...], num_bytes: int, site: Site, kind: str
) -> None:
    if num_bytes < state.run.layout_bytes:
        return
    storages = {tensor.untyped_storage()._cdata for tensor in operands}
    of_state = storages & state.run.parameters.keys() or storages & state.held_by_optimizers()
    tally(state.state_copies if of_state else state.other_copies, site, num_bytes, 1, kind)


HANDLERS: dict[str, Handler] = {
    **dict.fromkeys(MATMULS, on_matmul),
    "_to_copy": on_cast,
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), on_zeros),
    **dict.fromkeys(
        ("select_backward", "slice_backward", "unfold_backward", "diagonal_backward"), on_whole_buffer
    ),
    **dict.fromkeys(INTO_ZEROS, on_write_into_zeros),
    "clone": on_clone,
    "index": on_index,
    **dict.fromkeys(("add", "add_", "sub", "sub_", "copy_"), on_add),
    **dict.fromkeys(
        ("_foreach_add_", "_foreach_add", "_foreach_sub_", "_foreach_sub", "_foreach_copy_"), on_foreach_add
    ),
}
