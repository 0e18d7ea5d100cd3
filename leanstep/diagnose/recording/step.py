"""The state of the step being recorded, and its conversion to a `StepRecord`."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections import Counter
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from leanstep.diagnose.recording.buffers import Churn, LiveBytes
from leanstep.diagnose.recording.habits import MIN_BYTES, Habits
from leanstep.diagnose.recording.lineage import Families, Family, Products, count_distinct
from leanstep.diagnose.recording.ops import OpRun, storage_of
from leanstep.diagnose.step_records import (
    FORWARD,
    OPTIMIZER,
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
from leanstep.tape.lines import IN_LEANSTEP, Line, Site

# Outputs of at least this size may dominate the step's memory; never below `MIN_BYTES`.
LARGE_BYTES = 1024 * 1024
# The parameters read between the runs of an op are counted after this many runs.
MIN_REPEATS = 8
# Python code in torch 2.13; a method in C, which has no frame, in 2.15.
_APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)


class OpCounts:
    """Runs of one op on one line in one phase, and the span of the log of parameter reads they cover."""

    __slots__ = (
        "chain", "count", "direct", "first_read", "flops", "last_read", "max_bytes", "name", "phase", "site",
        "small", "tiny", "total_bytes", "written_bytes",
    )  # fmt: skip

    def __init__(self, op: OpRun) -> None:
        self.site, self.name, self.phase = op.site, op.info.name, op.phase
        self.direct, self.chain = op.direct, op.chain
        self.count = self.tiny = self.small = 0
        self.max_bytes = self.total_bytes = self.written_bytes = self.flops = 0
        self.first_read, self.last_read = op.first_read, 0

    @property
    def repeats(self) -> bool:
        """Return whether a line may dispatch the op in a loop: then parameters read meanwhile are counted."""
        return self.direct and self.count >= MIN_REPEATS

    @property
    def reads(self) -> tuple[int, int]:
        return self.first_read, self.last_read

    def as_record(self, parameters: int) -> OpRecord:
        return OpRecord(
            count=self.count,
            tiny=self.tiny,
            small=self.small,
            max_bytes=self.max_bytes,
            total_bytes=self.total_bytes,
            written_bytes=self.written_bytes,
            flops=self.flops,
            parameters=parameters,
        )


class Amount(NamedTuple):
    """Recorded work."""

    ops: int = 0
    flops: int = 0
    written_bytes: int = 0


class HeadProduct(NamedTuple):
    """A matmul with a weight that may be the head: its line, the shape of the logits, the input sizes."""

    site: Site
    shape: tuple[int, ...]
    inner: int
    width: int


class StepState:
    """Counters in the form that is cheapest to update. One object serves the whole recording."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run
        self.tainted: set[int] = set()
        # Storages of the gradients of the running backward.
        self.gradients_under_way: set[int] = set()
        self.churn = Churn()
        # Ops, FLOPs and written bytes of the whole recording.
        self.total = Amount()
        self.reset()

    def reset(self) -> None:
        self.ops: dict[tuple[Any, ...], OpCounts] = {}
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
        # Modules whose buffers are known to be on the model's device.
        self.called: set[int] = set()
        # Parameters read since the last backward: only these can get a gradient from the next one.
        self.used: set[int] = set()
        self.written: set[int] = set()
        self.unused: dict[int, Site] = {}
        # Parameters in the order they are read; slices of a bank differ by their offset.
        self.read_log: list[int] = []
        self.head_nodes: dict[int, HeadProduct] = {}
        self.products, self.families = Products(), Families()
        self.wide: dict[int, LiveBytes] = {}
        self.habits = Habits()
        self.again: dict[Site, Tally] = {}
        self.no_context: dict[Site, Tally] = {}
        self.unsaved: dict[tuple[Site, int], Tally] = {}
        # Sites whose ops depend on a trained parameter, and sites that depend only on other parameters.
        self.trained: set[int] = set()
        self.trained_sites: set[Site] = set()
        self.idle_sites: set[Site] = set()
        # Reads of values that depend on no parameter: their origin is known only at the end of the step.
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

    def meet_buffers(self, module: torch.nn.Module) -> None:
        """Record that a model's buffers are on its device, also those that it only reads."""
        if id(module) not in self.called:
            self.called.add(id(module))
            for buffer in module.buffers():
                if buffer.layout is torch.strided:
                    self.families.of(buffer.untyped_storage()._cdata).root().met = True

    # Ops

    def count(self, op: OpRun) -> None:
        """Count one run of an op that launches a kernel."""
        info = op.info
        written = op.written_bytes
        self.num_ops += 1
        self.written_bytes += written
        if info.handler is not None and not op.opaque:
            info.handler(self, op)
        total = self.total
        self.total = Amount(total.ops + 1, total.flops + op.flops, total.written_bytes + written)
        if written >= MIN_BYTES:
            self._on_large_output(op)
        limits = self.run
        largest = op.max_bytes
        if info.makes_buffer and not op.in_engine and not op.grad and largest >= limits.churn_bytes:
            self.churn.add(op.outs, op.site, limits.churn_bytes, self.weight_matmuls)
        key = (op.site, info, op.phase, op.direct, op.chain)
        counts = self.ops.get(key)
        if counts is None:
            counts = self.ops[key] = OpCounts(op)
        counts.count += 1
        if largest <= limits.tiny_bytes:
            counts.tiny += 1
        if largest <= limits.small_bytes:
            counts.small += 1
        if largest > counts.max_bytes:
            counts.max_bytes = largest
        counts.total_bytes += op.read_bytes + written
        counts.written_bytes += written
        counts.flops += op.flops
        counts.last_read = len(self.read_log)

    def _on_large_output(self, op: OpRun) -> None:
        if self.wide and op.written_bytes >= LARGE_BYTES:
            self._add_wide(op.outs)
        if op.direct and not op.flags & IN_LEANSTEP:
            if op.phase == FORWARD and not op.grad and self.products.of:
                self._on_unsaved(op)
            self.habits.on_op(op.info, op.args, op.outs, op.site, op.phase)

    def _on_unsaved(self, op: OpRun) -> None:
        """Record logits, or a tensor of their size, without gradients: old-policy log-probs, an entropy."""
        for out in op.outs:
            product = self.products.of.get(storage_of(out)) if out.ndim > 1 else None
            if product is None or product.width != out.shape[-1] or _in_autograd_function():
                continue
            rows = out.numel() // product.width
            if rows >= self.run.unsaved_rows:
                shape = f"{list(out.shape)} {str(out.dtype).removeprefix('torch.')}"
                entry = self.unsaved.setdefault((op.site, product.width), Tally())
                entry.add(Tally(1, out.nbytes, Counter({shape: 1})))

    def _add_wide(self, outs: Sequence[Tensor]) -> None:
        """Add outputs of a wide matmul's width to the bytes that are alive at once."""
        for out in outs:
            live = self.wide.get(out.shape[-1]) if out.ndim else None
            if live is not None:
                live.add(out)

    # Weights

    def is_parameter(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()._cdata
        return storage in self.run.parameters or storage in self.derived

    def _is_narrower(self) -> bool:
        """Return whether some parameter is not float64: a model in float64 is intended."""
        tensors = [parameter.tensor() for parameter in self.run.parameters.values()]
        return any(tensor is not None and tensor.dtype is not torch.float64 for tensor in tensors)

    def weight_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return storage and offset of the weight that `tensor` is, is a slice of, or was cast from."""
        storage = tensor.untyped_storage()._cdata
        if storage in self.run.parameters or storage in self.frozen:
            return storage, int(tensor.storage_offset())
        return self.derived[storage][1:] if storage in self.derived else None

    def held_by_optimizers(self) -> set[int]:
        """Return the storages of gradients and optimizer state, looked up once per backward."""
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
        """Record the end of a backward: its saved tensors are freed."""
        self.backward_runs += 1
        self.zero_storages.clear()
        self.gradients_under_way.clear()
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
            record.held = max(record.held, count)
            record.held_bytes = max(record.held_bytes, num_bytes)
            record.held_rows = max(record.held_rows, rows)
        self.saved_bytes += self.window_bytes
        self.peak_saved_bytes = max(self.peak_saved_bytes, self.window_bytes)
        self.window, self.window_storages, self.window_bytes = [], set(), 0

    def close(self) -> StepRecord:
        """Turn the counters into a record and reset them."""
        self._close_window()
        for head, dead in self.pending_heads:
            head.dead += int(dead)
        for site, kind, phase, family in self.reads_of_data:
            if not family.is_hosts_own:
                self.count_read(site, kind, phase, "of data")
        head_width = self.products.head_width
        record = StepRecord(
            ops={},
            matmuls={},
            products=self._fused_products(),
            reads=self.reads,
            heads={site: head for site, head in self.heads.items() if head.width == head_width},
            zero_fills=self.zero_fills,
            state_copies=self.state_copies,
            other_copies=self.other_copies,
            duplicate_casts=self.duplicate_casts,
            round_trips=self.round_trips,
            saved=self.saved,
            churn=self.churn.close(),
            unused_grads=self._unused_gradients(),
            attention=self.habits.attention,
            doubles=self.habits.doubles if self._is_narrower() else {},
            clones=self.habits.clones,
            indexed=self.habits.indexed,
            retained=self.habits.retained,
            compiled=self.compiled,
            again=self.again,
            no_context=self.no_context,
            unsaved=self.unsaved,
            head_width=head_width,
            head_inner=self.products.head_inner,
            peak_wide_bytes=self.wide[head_width].peak if head_width in self.wide else 0,
            backward_runs=self.backward_runs,
            num_ops=self.num_ops,
            written_bytes=self.written_bytes,
            saved_bytes=self.saved_bytes,
            peak_saved_bytes=self.peak_saved_bytes,
        )
        self._close_ops(record)
        self._close_matmuls(record)
        self.reset()
        return record

    def _close_ops(self, record: StepRecord) -> None:
        """Fill in the step's ops, its FLOPs and the work of backwards that train nothing."""
        idle_sites = self.idle_sites - self.trained_sites
        spans = {counts.reads for counts in self.ops.values() if counts.repeats and not counts.chain}
        distinct = count_distinct(self.read_log, spans)
        for counts in self.ops.values():
            op = counts.as_record(_parameters_read(counts, distinct))
            record.flops += op.flops
            if not counts.direct and counts.site in idle_sites:
                record.idle_flops += op.flops
                record.idle_bytes += op.total_bytes if not op.flops else 0
            phase = self._final_phase(counts.phase, counts.chain)
            key = OpKey(counts.site, counts.name, phase, counts.direct)
            if key in record.ops:
                record.ops[key].add(op)
            else:
                record.ops[key] = op

    def _close_matmuls(self, record: StepRecord) -> None:
        for (site, phase, direct, chain, dtype, shape), count in self.matmuls.items():
            phase = self._final_phase(phase, chain)
            key = MatmulKey(site, phase, direct, dtype, shape)
            record.matmuls[key] = record.matmuls.get(key, 0) + count
            record.products[phase, dtype] += 2 * count * math.prod(shape[:4])

    def _fused_products(self) -> Counter[tuple[str, torch.dtype]]:
        products: Counter[tuple[str, torch.dtype]] = Counter()
        for (phase, chain, dtype), flops in self.fused.items():
            products[self._final_phase(phase, chain), dtype] += flops
        return products

    def _final_phase(self, phase: str, chain: tuple[int, ...]) -> str:
        """Return the phase: a function that wrote a parameter is an optimizer, known only after the step."""
        return OPTIMIZER if chain and not self.run.writers.isdisjoint(chain) else phase

    def _unused_gradients(self) -> dict[Site, Tally]:
        unused: dict[Site, Tally] = {}
        for storage, site in self.unused.items():
            if storage not in self.written:
                parameter = self.run.parameters.get(storage)
                tensor = parameter.tensor() if parameter is not None else None
                tally(unused, site, tensor.nbytes if tensor is not None else 0)
        return unused


def _in_autograd_function() -> bool:
    """Return whether a `torch.autograd.Function` forward runs: gradients are off inside."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _APPLY or (_APPLY is None and code.co_name == "forward" and _is_functions(code)):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=1024)
def _is_functions(code: CodeType) -> bool:
    """Return whether this is the forward of a `torch.autograd.Function`."""
    kinds = [torch.autograd.Function]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return any(getattr(inspect.unwrap(kind.forward), "__code__", None) is code for kind in kinds)


def _parameters_read(counts: OpCounts, distinct: dict[tuple[int, int], int]) -> int:
    """Return how many parameters the step read between the first and the last run of a repeated op."""
    if not counts.repeats:
        return 0
    if counts.chain:
        # Without gradients, a model that runs repeatedly decodes or acts. That loop is not a storm, so every
        # read counts, not every parameter.
        return counts.last_read - counts.first_read
    return distinct[counts.reads]
