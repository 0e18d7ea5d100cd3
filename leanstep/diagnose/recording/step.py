"""The state of the step that is being recorded, and what becomes of it: a `StepRecord`."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from leanstep.diagnose.recording.buffers import Churn, LiveBytes
from leanstep.diagnose.recording.fused_products import Counted
from leanstep.diagnose.recording.habits import Habits
from leanstep.diagnose.recording.lineage import (
    HEAD_RATIO,
    Families,
    Family,
    Product,
    Products,
    count_distinct,
)
from leanstep.diagnose.recording.ops import OpInfo, different_order, out_of_order, widens
from leanstep.diagnose.step_records import (
    FORWARD,
    OPTIMIZER,
    RECOMPUTE,
    HeadRecord,
    MatmulKey,
    OpKey,
    OpRecord,
    RunRecord,
    SavedRecord,
    StepRecord,
    Tally,
    tally,
)
from leanstep.script.lines import Line, Site

MAX_CASTS = 200_000
# Below this many runs of an op nobody asks which parameters were read meanwhile.
MIN_REPEATS = 8


class StepState:
    """Counters in the form that is cheapest to add to. One object serves the whole recording."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run
        self.tainted: set[int] = set()
        self.churn = Churn()
        self.reset()

    def reset(self) -> None:
        self.ops: dict[tuple[Any, ...], list[int]] = {}
        self.matmuls: dict[tuple[Any, ...], int] = {}
        # FLOPs of attention, grouped products and convolutions: phase, chain, dtype.
        self.fused: dict[tuple[str, tuple[int, ...], torch.dtype], int] = {}
        self.reads: dict[Site, Tally] = {}
        self.num_reads = 0
        self.heads: dict[Site, HeadRecord] = {}
        self.zero_fills: dict[Site, Tally] = {}
        self.state_copies: dict[Site, Tally] = {}
        self.other_copies: dict[Site, Tally] = {}
        self.duplicate_casts: dict[Site, Tally] = {}
        self.round_trips: dict[Site, Tally] = {}
        self.saved: dict[tuple[Site, int], SavedRecord] = {}
        self.churn.new_step()
        # Weights that need no gradient here, with their sizes.
        self.frozen: dict[int, int] = {}
        self.weight_matmuls = 0
        self.compiled: set[Line] = set()
        self.first_uses: dict[int, Site] = {}
        # Parameters read since the last backward: only these can get a gradient from the next one.
        self.used: set[int] = set()
        self.written: set[int] = set()
        self.unused: dict[int, Site] = {}
        # Parameters in the order they are read; slices of a bank are told apart by their offset.
        self.read_log: list[int] = []
        self.head_nodes: dict[int, tuple[Site, tuple[int, ...], int, int]] = {}
        self.products, self.families = Products(), Families()
        self.wide: dict[int, LiveBytes] = {}
        self.habits = Habits()
        # Sites whose ops a trained parameter leads to, and sites of ops that only others lead to.
        self.trained: set[int] = set()
        self.trained_sites: set[Site] = set()
        self.idle_sites: set[Site] = set()
        # Reads of what depends on no parameter: whose they are is known when the step is over.
        self.reads_of_data: list[tuple[Site, str, str, Family]] = []
        self.pending_heads: list[tuple[HeadRecord, Tensor]] = []
        # Casts of weights -> storage and offset of the weight.
        self.derived: dict[int, tuple[StorageWeakRef, int, int]] = {}
        self.casts: dict[tuple[Any, ...], StorageWeakRef] = {}
        self.cast_results: dict[int, tuple[torch.dtype, int, StorageWeakRef]] = {}
        self.zero_storages: set[int] = set()
        self.gradients: tuple[int, set[int]] = (-1, set())
        self.window: list[tuple[Site, int, int, int, int, str]] = []
        self.window_storages: set[int] = set()
        self.window_bytes = self.saved_bytes = self.peak_saved_bytes = 0
        self.backward_runs = self.num_ops = self.written_bytes = 0
        if len(self.tainted) > 100_000:
            self.tainted.clear()

    # Reads

    def count_read(self, site: Site, kind: str, phase: str, of: str) -> None:
        tally(self.reads, site, 0, 1, kind)
        detail = self.reads[site].detail
        detail[f"phase {phase}"] += 1
        detail[of] += 1

    # Matmuls and the head

    def on_matmul(
        self, info: OpInfo, args: Any, outs: Any, shape: tuple[int, int, int, int, bool],
        site: Site, phase: str, direct: bool, chain: tuple[int, ...], number: int, node: Any,
    ) -> None:  # fmt: skip
        assert info.matmul is not None
        first, second = args[info.matmul[0]], args[info.matmul[1]]
        key = (site, phase, direct, chain, first.dtype, shape)
        self.matmuls[key] = self.matmuls.get(key, 0) + 1
        width, inner = shape[3], shape[2]
        weight = self.weight_of(second)
        if weight is not None:
            self.weight_matmuls += 1
        elif shape[0] > 1 and phase == FORWARD:
            self.habits.on_scores(outs[0], width)
        if phase in (FORWARD, RECOMPUTE) and width >= HEAD_RATIO * inner and weight is not None:
            product = Product(inner, width, weight[0], site)
            self.products.of[outs[0].untyped_storage()._cdata] = product
            self.wide.setdefault(width, LiveBytes())
            if torch.is_grad_enabled():
                self.head_nodes[number - 1] = (site, tuple(outs[0].shape), inner, width)
        elif node is not None and self.head_nodes:
            head = self.head_nodes.get(node._sequence_nr())
            if head is not None and head[3] == self.products.head_width:
                for operand in (first, second):
                    if self._count_dead_rows(operand, head):
                        del self.head_nodes[node._sequence_nr()]
                        break

    def on_fused(self, counted: Counted | None, phase: str, chain: tuple[int, ...]) -> int:
        """Products inside another op; their FLOPs."""
        if counted is None:
            text = "attention over packed sequences: only the device knows how many products it makes"
            self.run.note("dropped", "", text)
            return 0
        for name, flops in ((phase, counted.flops), (RECOMPUTE, counted.repeated)):
            key = (name, chain, counted.dtype)
            self.fused[key] = self.fused.get(key, 0) + flops
        return counted.flops + counted.repeated

    def on_large(self, outs: Any) -> None:
        """Large outputs: those of a product's width may be what the step holds most of."""
        for out in outs:
            live = self.wide.get(out.shape[-1]) if out.ndim else None
            if live is not None:
                live.add(out)

    def is_parameter(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()._cdata
        return storage in self.run.parameters or storage in self.derived

    def _is_narrower(self) -> bool:
        """Whether some parameter is no float64: a model in float64 is so on purpose."""
        tensors = [parameter.tensor() for parameter in self.run.parameters.values()]
        return any(tensor is not None and tensor.dtype is not torch.float64 for tensor in tensors)

    def weight_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """Storage and offset of the weight that `tensor` is, is a piece of or was cast from."""
        storage = tensor.untyped_storage()._cdata
        if storage in self.run.parameters or storage in self.frozen:
            return storage, int(tensor.storage_offset())
        return self.derived[storage][1:] if storage in self.derived else None

    def on_backward_product(self, info: OpInfo, args: Any) -> None:
        """A backward written by hand multiplies the gradient of a tile of logits with a slice of the head.

        A row that is dead in one tile is dead in all of them: the first slice of the weight is counted.
        """
        assert info.matmul is not None
        gradient, second = args[info.matmul[0]], args[info.matmul[1]]
        weight = self.weight_of(second)
        head = self.products.heads.get(weight[0]) if weight is not None else None
        if weight is None or head is None or weight[1] or gradient.ndim != 2 or self.is_parameter(gradient):
            return
        if second.shape[-1] != head.inner or gradient.shape[-1] != second.shape[0]:
            return
        parameter = self.run.parameters.get(weight[0])
        tensor = parameter.tensor() if parameter is not None else None
        size = tensor.numel() if tensor is not None else self.frozen.get(weight[0], 0)
        width = max(size // head.inner, head.width)
        products = self.products
        if width >= products.head_width:
            products.head_width, products.head_inner = width, head.inner
        shape = tuple(gradient.shape)
        if self._count_dead_rows(gradient, (head.site, shape, head.inner, width)):
            self.heads[head.site].in_tiles = True

    def _count_dead_rows(self, operand: Tensor, head: tuple[Site, tuple[int, ...], int, int]) -> bool:
        site, shape, inner, width = head
        # A square gradient says nothing about its orientation by shape: its strides do.
        turned = (*shape[:-2], shape[-1], shape[-2]) if len(shape) > 1 else shape
        actual = tuple(operand.shape)
        if actual not in (shape, turned) or operand.is_meta or self.is_parameter(operand):
            return False
        gradient = operand
        if actual != shape or (
            shape == turned and len(shape) > 1 and operand.stride(-1) > operand.stride(-2)
        ):
            gradient = operand.mT
        largest = torch.linalg.vector_norm(gradient.detach(), ord=float("inf"), dim=-1)
        dead = (largest == 0).sum()
        record = self.heads.get(site)
        if record is None:
            record = self.heads[site] = HeadRecord(inner=inner, width=width, element_bytes=operand.itemsize)
        record.rows += largest.numel()
        if gradient.device.type == "cpu":
            record.dead += int(dead)
        else:
            self.pending_heads.append((record, dead))
        return True

    # Casts

    def on_cast(self, tensor: Tensor, out: Tensor, site: Site, phase: str) -> None:
        if tensor.dtype == out.dtype or tensor.is_inference():
            return
        if len(self.casts) >= MAX_CASTS:
            self.run.note(
                "dropped", "", f"more than {MAX_CASTS:,} casts in one step: later ones are not compared"
            )
            return
        storage = tensor.untyped_storage()
        version = tensor._version
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), version, out.dtype)
        # A weak reference keeps the address from being given away, and the memory free.
        out_storage = out.untyped_storage()
        if key in self.casts:
            # A checkpoint recomputes its casts on purpose.
            if phase != RECOMPUTE:
                tally(self.duplicate_casts, site, out.nbytes, 1, f"{_name(tensor)} to {_name(out)}")
        else:
            self.casts[key] = StorageWeakRef(storage)
        earlier = self.cast_results.get(storage._cdata)
        if (
            earlier is not None
            and earlier[0] == out.dtype
            and earlier[1] == version
            and widens(out.dtype, tensor.dtype)
        ):
            tally(self.round_trips, site, out.nbytes, 1, f"{_name(out)} to {_name(tensor)} and back")
        self.cast_results[out_storage._cdata] = (tensor.dtype, out._version, StorageWeakRef(out_storage))
        weight = self.weight_of(tensor) if phase != OPTIMIZER else None
        if weight is not None:
            self.derived[out_storage._cdata] = (StorageWeakRef(out_storage), *weight)

    # Backward ops that fill whole buffers

    def on_backward_write(self, info: OpInfo, args: Any, outs: Any, site: Site) -> None:
        if info.zeros:
            self.zero_storages.add(outs[0].untyped_storage()._cdata)
        elif info.whole_buffer:
            if outs[0].nbytes >= self.run.fill_ratio * args[0].nbytes:
                tally(self.zero_fills, site, outs[0].nbytes, 1, info.name)
        elif info.into_zeros is not None:
            storage = args[0].untyped_storage()._cdata
            if storage in self.zero_storages:
                self.zero_storages.discard(storage)
                if outs[0].nbytes >= self.run.fill_ratio * args[info.into_zeros].nbytes:
                    tally(self.zero_fills, site, outs[0].nbytes, 1, info.name)

    # Copies across layouts

    def on_layout(self, info: OpInfo, args: Any, kwargs: Any, outs: Any, site: Site) -> None:
        if info.clone:
            if (kwargs or {}).get("memory_format") == torch.contiguous_format and out_of_order(args[0]):
                self._count_layout(args[:1], outs[0].nbytes, site, "copy")
        elif info.adds:
            if isinstance(args[1], Tensor) and different_order(args[0], args[1]):
                self._count_layout(args[:2], outs[0].nbytes, site, "copy" if info.name == "copy_" else "add")
        elif info.foreach_adds and isinstance(args[1], (list, tuple)):
            for mine, theirs in zip(args[0], args[1], strict=False):
                if (
                    isinstance(theirs, Tensor)
                    and mine.nbytes >= self.run.layout_bytes
                    and different_order(mine, theirs)
                ):
                    self._count_layout((mine, theirs), mine.nbytes, site, "add")

    def _count_layout(self, operands: Any, num_bytes: int, site: Site, kind: str) -> None:
        if num_bytes < self.run.layout_bytes:
            return
        storages = {tensor.untyped_storage()._cdata for tensor in operands}
        known = storages & self.run.parameters.keys() or storages & self._held_by_optimizers()
        tally(self.state_copies if known else self.other_copies, site, num_bytes, 1, kind)

    def _held_by_optimizers(self) -> set[int]:
        """Storages of gradients and optimizer state; looked up once per run of the backward."""
        stamp = self.backward_runs
        if self.gradients[0] != stamp:
            storages = set()
            for parameter in self.run.parameters.values():
                tensor = parameter.tensor()
                if tensor is not None and tensor.grad is not None:
                    storages.add(tensor.grad.untyped_storage()._cdata)
            for reference in self.run.optimizers.values():
                optimizer = reference()
                for values in optimizer.state.values() if optimizer is not None else ():
                    if isinstance(values, dict):
                        storages |= {
                            v.untyped_storage()._cdata for v in values.values() if isinstance(v, Tensor)
                        }
            self.gradients = (stamp, storages)
        return self.gradients[1]

    # Ends

    def end_backward(self) -> None:
        """The backward has run: what was saved for it is free again."""
        self.backward_runs += 1
        self.zero_storages.clear()
        for storage in self.used:
            parameter = self.run.parameters.get(storage)
            tensor = parameter.tensor() if parameter is not None else None
            if tensor is not None and tensor.grad is not None and tensor.grad.layout is torch.strided:
                self.tainted.add(tensor.grad.untyped_storage()._cdata)
        self.used.clear()
        self._close_window()

    def _close_window(self) -> None:
        totals: dict[tuple[Site, int], list[int]] = {}
        for site, width, rows, num_bytes, storage, shape in self.window:
            if storage in self.run.parameters or storage in self.derived:
                continue
            total = totals.setdefault((site, width), [0, 0, 0])
            total[0] += 1
            total[1] += num_bytes
            total[2] += rows
            record = self.saved.setdefault((site, width), SavedRecord())
            record.shapes[shape] += 1
            record.count += 1
            record.bytes += num_bytes
        for key, (count, num_bytes, rows) in totals.items():
            record = self.saved[key]
            record.kept = max(record.kept, count)
            record.kept_bytes = max(record.kept_bytes, num_bytes)
            record.kept_rows = max(record.kept_rows, rows)
        self.saved_bytes += self.window_bytes
        self.peak_saved_bytes = max(self.peak_saved_bytes, self.window_bytes)
        self.window, self.window_storages, self.window_bytes = [], set(), 0

    def close(self) -> StepRecord:
        """Turn the counters into a record and start afresh."""
        self._close_window()
        for record, dead in self.pending_heads:
            record.dead += int(dead)
        for site, kind, phase, family in self.reads_of_data:
            if not family.is_hosts_own:
                self.count_read(site, kind, phase, "of data")
        head_width = self.products.head_width
        idle = self.idle_sites - self.trained_sites
        writers = self.run.writers
        ops: dict[OpKey, OpRecord] = {}
        flops = idle_flops = idle_bytes = 0
        spans = {
            (entry[7], entry[8])
            for (_, _, _, direct, chain), entry in self.ops.items()
            if direct and not chain and entry[0] >= MIN_REPEATS
        }
        distinct = count_distinct(self.read_log, spans)
        for (site, info, phase, direct, chain), entry in self.ops.items():
            if chain and not writers.isdisjoint(chain):
                phase = OPTIMIZER
            parameters = 0
            if direct and entry[0] >= MIN_REPEATS:
                # Without gradients a model that runs again and again decodes or acts: that loop is no storm,
                # so there every read counts, not every parameter.
                span = (entry[7], entry[8])
                parameters = span[1] - span[0] if chain else distinct[span]
            found = OpRecord(*entry[:7], parameters=parameters)
            flops += found.flops
            if not direct and site in idle:
                idle_flops += found.flops
                idle_bytes += found.total_bytes if not found.flops else 0
            key = OpKey(site, info.name, phase, direct)
            if key in ops:
                ops[key].add(found)
            else:
                ops[key] = found
        matmuls: dict[MatmulKey, int] = {}
        products: Counter[tuple[str, torch.dtype]] = Counter()
        for (phase, chain, dtype), count in self.fused.items():
            products[OPTIMIZER if chain and not writers.isdisjoint(chain) else phase, dtype] += count
        for (site, phase, direct, chain, dtype, shape), count in self.matmuls.items():
            if chain and not writers.isdisjoint(chain):
                phase = OPTIMIZER
            key = MatmulKey(site, phase, direct, dtype, shape)
            matmuls[key] = matmuls.get(key, 0) + count
            products[phase, dtype] += 2 * count * math.prod(shape[:4])
        unused: dict[Site, Tally] = {}
        for storage, site in self.unused.items():
            if storage not in self.written:
                parameter = self.run.parameters.get(storage)
                tensor = parameter.tensor() if parameter is not None else None
                tally(unused, site, tensor.nbytes if tensor is not None else 0)
        record = StepRecord(
            ops=ops,
            matmuls=matmuls,
            products=products,
            reads=self.reads,
            heads={site: head for site, head in self.heads.items() if head.width == head_width},
            zero_fills=self.zero_fills,
            state_copies=self.state_copies,
            other_copies=self.other_copies,
            duplicate_casts=self.duplicate_casts,
            round_trips=self.round_trips,
            saved=self.saved,
            churn=self.churn.close(),
            unused_grads=unused,
            attention=self.habits.attention,
            doubles=self.habits.doubles if self._is_narrower() else {},
            clones=self.habits.clones,
            retained=self.habits.retained,
            compiled=self.compiled,
            head_width=head_width,
            head_inner=self.products.head_inner,
            peak_wide_bytes=self.wide[head_width].peak if head_width in self.wide else 0,
            idle_flops=idle_flops,
            idle_bytes=idle_bytes,
            backward_runs=self.backward_runs,
            num_ops=self.num_ops,
            written_bytes=self.written_bytes,
            saved_bytes=self.saved_bytes,
            peak_saved_bytes=self.peak_saved_bytes,
            flops=flops,
        )
        self.reset()
        return record


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
