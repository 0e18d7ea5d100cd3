"""One process of many: the shapes of rank 0 of N. Collectives are recorded with their bytes, nothing is sent.

`torch.distributed` runs on torch's own fake process group. DistributedDataParallel is a stand-in that fills
buckets and reduces them as they become ready; FSDP2 and DTensor run as they are.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from leanstep.rehearse.answers.stand_ins import after_import
from leanstep.rehearse.events import Alloc, Free, Kernel
from leanstep.rehearse.kernel_costs import register_cost
from leanstep.rehearse.refusals import Refused
from leanstep.rehearse.shadows import device_tensors, shape_of, storage_key
from leanstep.rehearse.tape import Tape

# DistributedDataParallel's defaults: a small first bucket, so that the first reduction starts early.
FIRST_BUCKET_BYTES = 1 << 20
# Name of the hook by which its gradients arrive.
REDUCES = "leanstep_bucket_arrived"
# Collective -> c10d calls; the payload is the larger of a call's input and output.
_NAMES = {
    "all_reduce": "allreduce_ allreduce_coalesced_ all_reduce all_reduce_ all_reduce_coalesced "
    "all_reduce_coalesced_ reduce_",
    "all_gather": "_allgather_base_ allgather_ allgather_into_tensor_coalesced_ all_gather_into_tensor "
    "all_gather_into_tensor_out all_gather_into_tensor_coalesced gather_",
    "reduce_scatter": "_reduce_scatter_base_ reduce_scatter_ reduce_scatter_tensor reduce_scatter_tensor_out "
    "reduce_scatter_tensor_coalesced reduce_scatter_tensor_coalesced_",
    "broadcast": "broadcast broadcast_ scatter_",
    "send": "send",
    "receive": "recv_",
    "all_to_all": "alltoall_ alltoall_base_ all_to_all_single",
}
COLLECTIVES = {name: kind for kind, names in _NAMES.items() for name in names.split()}


def install(tape: Tape, ranks: int) -> None:
    """Replace torch.distributed for rank 0 of `ranks`, or of the WORLD_SIZE that the program sets."""
    torch.nn.parallel.DistributedDataParallel = _ddp_class(tape)  # pyright: ignore[reportAttributeAccessIssue]
    if not dist.is_available():
        return
    start, another = dist.init_process_group, dist.new_group
    backends: dict[Any, str] = {}  # group -> what the program asked for

    def init_process_group(backend: str | None = None, *_: Any, **kwargs: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        size = max(1, int(os.environ.get("WORLD_SIZE") or kwargs.get("world_size") or ranks))
        if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::_allgather_base_", "Meta"):
            # Before 2.13, only this torch tool registers fake implementations of the collectives.
            importlib.import_module("torch.distributed._tools.fake_collectives")
        if not dist.is_initialized():
            start("fake", store=FakeStore(), rank=0, world_size=size)
            backends[dist.group.WORLD] = str(backend or dist.Backend.UNDEFINED).lower()
        tape.ranks = size

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **kwargs: Any) -> Any:
        group = another(
            ranks, timeout, "fake", **kwargs
        )  # including gloo groups beside NCCL, which programs use for flags
        backends[group] = str(backend or backends[dist.group.WORLD]).lower()
        return group

    def get_backend(group: Any = None) -> str:
        real = dist.distributed_c10d.get_backend(group)
        return backends.get(group or dist.group.WORLD, backends.get(dist.group.WORLD, real))

    # torch's own functions must know that the group is fake; they call the function in distributed_c10d.
    dist.get_backend = get_backend
    # A mesh creates the group itself if the program has not.
    for module in (dist, dist.distributed_c10d, dist.device_mesh):
        for name, answer in (("init_process_group", init_process_group), ("new_group", new_group)):
            if hasattr(module, name):
                setattr(module, name, answer)
    _answer_spawn(tape)
    _answer_objects()
    _remember_reductions()
    _leave_out_shapes(tape)
    _price_copies()
    _wait_at_first_use()
    after_import("torch.distributed._symmetric_memory", _share_nothing)
    pending = _Pending(tape)
    tape.collective = lambda name, args, out: _collective(tape, pending, name, args, out)


def _price_copies() -> None:
    """Register the cost of FSDP2's copies into and out of its buffers: 16-byte accesses, each byte once."""

    def size(tensors: list[Tensor]) -> int:
        return sum(shape_of(t).nbytes for t in tensors)

    costs: dict[str, Callable[[Any], int]] = {
        "fsdp::all_gather_copy_in": lambda arguments: 2 * size(arguments["all_gather_inputs"]),
        "fsdp::split_with_sizes_copy": lambda arguments: 2 * arguments["all_gather_output"].nbytes,
        "fsdp::chunk_cat": lambda arguments: size(arguments["tensors"]) + arguments["out"].nbytes,
    }
    for name, nbytes in costs.items():
        register_cost(name, lambda arguments, nbytes=nbytes: Kernel("pointwise", nbytes(arguments)))


def _share_nothing(module: Any) -> None:
    """Symmetric memory needs the other ranks; `async_products` models what a compiler does with it."""
    module.enable_symm_mem_for_group = lambda group_name: None


def _wait_at_first_use() -> None:
    """Wait for results of functional collectives when they are read.

    The fake implementation of torch's own wrapper (since 2.13) returns a tensor that never waits.
    """
    import torch.distributed._functional_collectives as functional

    plain = functional._maybe_wrap_tensor

    def wrapped(self: Tensor) -> Tensor:
        if functional._are_we_tracing():
            return plain(self)
        if self.requires_grad:  # the wrapper is not part of the graph
            return functional.wait_tensor(self)
        return functional.AsyncCollectiveTensor(self)

    functional._maybe_wrap_tensor = wrapped  # pyright: ignore[reportPrivateImportUsage]


def _leave_out_shapes(tape: Tape) -> None:
    """Ignore DTensor's extra run of each new call for its global shape: it does no device work."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    find = ShardingPropagator._propagate_tensor_meta_non_cached

    def untaped(self: Any, op_schema: Any) -> Any:
        record, peaks = tape.recording, (tape.peak_bytes, tape.window_peak_bytes)
        taped, record.events = record.events, []
        try:
            return find(self, op_schema)
        finally:
            ours = [e for e in record.events if isinstance(e, Alloc | Free)]
            times = Counter(e.storage for e in ours)  # in both: allocated and freed in between
            record.events = taped + [e for e in ours if times[e.storage] == 1]
            tape.peak_bytes, tape.window_peak_bytes = peaks

    ShardingPropagator._propagate_tensor_meta_non_cached = untaped


def _answer_spawn(tape: Tape) -> None:
    """`mp.spawn(worker, args, nprocs)`: rank 0 runs here; new processes would not have the device."""
    import torch.multiprocessing as multiprocessing

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        tape.notes[f"mp.spawn of {nprocs}: only rank 0 ran, in this process"] += 1
        fn(0, *args)

    multiprocessing.spawn = spawn  # pyright: ignore[reportAttributeAccessIssue]


def _answer_objects() -> None:
    """Send nothing: every rank is assumed to hold the same object as this one."""

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if object_gather_list is not None:
            all_gather_object(object_gather_list, obj)

    def scatter_object_list(
        scatter_object_output_list: list[Any], scatter_object_input_list: list[Any], *_: Any, **__: Any
    ) -> None:
        scatter_object_output_list[0] = scatter_object_input_list[0]

    def recv_object_list(*_: Any, **__: Any) -> None:
        raise Refused("recv_object_list: the object exists only on another rank")

    dist.all_gather_object, dist.gather_object = all_gather_object, gather_object
    dist.scatter_object_list, dist.recv_object_list = scatter_object_list, recv_object_list
    dist.broadcast_object_list = dist.send_object_list = lambda *_, **__: None


# The reduction of the last `all_reduce` call.
_asked: dict[str, Any] = {"op": None}


def _remember_reductions() -> None:
    """Store the reduction: in torch 2.8 the group gets an object that does not expose it."""
    plain = dist.all_reduce

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        _asked["op"] = op
        return plain(tensor, op, *args, **kwargs)

    if torch.__version__.startswith("2.8."):
        dist.all_reduce = dist.distributed_c10d.all_reduce = all_reduce


class _Pending:
    """Collectives that the program may wait for: end marks, by handle and by result."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._works: dict[
            int, tuple[Any, int]
        ] = {}  # the handle stays referenced, so its address is not reused
        self._results: dict[int, int] = {}  # storage -> mark
        self._last = 0
        native: Any = torch._C
        fake: Any = getattr(native._distributed_c10d, "FakeWork", None)
        if fake is not None:
            self._watch(fake)

    def _watch(self, fake: Any) -> None:
        plain = fake.wait

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            self.tape.hold_stream(self._mark_of(work), self.tape.stream)
            return plain(work, *args, **kwargs)

        fake.wait = wait
        of_fake = fake.get_future
        fake.get_future = lambda work: _Result(self.tape, self._mark_of(work), of_fake(work).value())

    def _mark_of(self, work: Any) -> int:
        """Return the mark of a handle's collective; the last one's if the handle is for coalesced calls."""
        _, mark = self._works.pop(id(work), (None, self._last))
        return mark

    def issued(self, mark: int, args: Any, out: Any) -> None:
        """mark: 0 for host tensors. Blocking calls wait on their handle, as the program does."""
        self._last = mark or self._last
        if isinstance(args[-1], str):  # a functional one: `wait_tensor` waits for its result
            for tensor in device_tensors(out):
                self._results[storage_key(tensor)] = mark
            return
        handle = next((a for a in _flat(out) if isinstance(a, torch.ScriptObject)), None)
        if handle is not None:
            work = dist.Work.unbox(handle)  # pyright: ignore[reportAttributeAccessIssue]
            self._works[id(work)] = (work, mark)

    def waited(self, tensor: Any) -> None:
        self.tape.hold_stream(self._results.pop(storage_key(tensor), 0), self.tape.stream)


class _Result(torch.futures.Future):
    """The future of a collective: on a device its `wait` holds the stream, not the host."""

    def __init__(self, tape: Tape, mark: int, value: Any) -> None:
        super().__init__()
        self._tape, self._mark = tape, mark
        self.set_result(value)

    def wait(self) -> Any:
        self._tape.hold_stream(self._mark, self._tape.stream)
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        self._tape.hold_stream(self._mark, self._tape.stream)
        return super().then(callback)


def _flat(out: Any) -> Sequence[Any]:
    return out if isinstance(out, list | tuple) else (out,)


def _collective(tape: Tape, pending: _Pending, name: str, args: Any, out: Any) -> None:
    """Record one c10d call."""
    kind = COLLECTIVES.get(name)
    if name == "wait_tensor":
        tape.shadows.put(out, tape.shadows.get(args[0]))
        pending.waited(args[0])
    if kind is None:  # barrier, wait_tensor
        return
    tensors = device_tensors((args, out))
    if not tensors:
        pending.issued(0, args, out)
        return
    sides = [device_tensors(a) for a in (*args, out)]
    payload = max((sum(shape_of(t).nbytes for t in side) for side in sides), default=0)
    known = _as_on_this_rank(tape, name, args, out)
    sizes = _peer(name, args) if kind in ("send", "receive") else sizes_of(_group(args))
    mark = _reduce(tape, kind, payload, tensors, sizes, forget=not known)
    pending.issued(mark, args, out)
    for tensor, value, factor in known:
        tape.shadows.received(tensor, value, factor)
        tape.shadows.assume(tape.lines.here(), kind, "the same on every rank")


def _group(args: Any) -> Any:
    """Return the ranks of a call: a mesh dimension has fewer ranks than the world."""
    boxed = next((a for a in args if isinstance(a, torch.ScriptObject)), None)  # before the reduction kind
    if boxed is not None:
        return dist.ProcessGroup.unbox(boxed)  # pyright: ignore[reportArgumentType]
    group = args[-1]  # functional collectives name their group last
    return _resolve_process_group(group) if isinstance(group, str) else group  # pyright: ignore


def sizes_of(group: Any) -> tuple[int, int]:
    """Return the number of ranks in a group and their stride: neighbouring ranks share a machine."""
    ranks = sorted(dist.get_process_group_ranks(group))
    return len(ranks), min((b - a for a, b in itertools.pairwise(ranks)), default=1)


def _peer(name: str, args: Any) -> tuple[int, int]:
    """Return two ranks and their distance."""
    group, peer = _group(args), args[2]  # both have (tensors, group, peer, tag)
    return 2, abs(dist.get_global_rank(group, peer) - dist.get_rank()) or 1


def _as_on_this_rank(tape: Tape, name: str, args: Any, out: Any) -> list[tuple[Tensor, Tensor, int]]:
    """Return the host-known results if every rank sends what this one does: counts, flags, lengths.

    As (result, what this rank sends, factor of a sum); empty if one of the results is unknown.
    """
    if name == "broadcast_":
        pairs, factor = [(t, t) for t in args[0]], 1
    elif name == "allreduce_":
        op, kinds = args[2].op() if args[2]._has_method("op") else _asked["op"], dist.ReduceOp
        if op not in (kinds.SUM, kinds.AVG, kinds.MIN, kinds.MAX):
            return []
        factor = dist.ProcessGroup.unbox(args[1]).size() if op == kinds.SUM else 1
        pairs = [(t, t) for t in args[0]]
    elif name in ("_allgather_base_", "allgather_"):
        outs, sent = (args[0], args[1]) if name == "allgather_" else ([[args[0]]], [args[1]])
        pairs, factor = [(t, mine) for some, mine in zip(outs, sent, strict=True) for t in some], 1
    elif name in ("alltoall_base_", "all_to_all_single"):
        return _exchanged(tape, name, args, out)
    else:
        return []
    contributions = [(t, tape.shadows.in_part(mine), factor) for t, mine in pairs]
    return [] if any(value is None for _, value, _ in contributions) else contributions  # pyright: ignore


def _exchanged(tape: Tape, name: str, args: Any, out: Any) -> list[tuple[Tensor, Tensor, int]]:
    """Return the same for an all-to-all of equal parts, such as token counts per expert."""
    target, sent, splits = (
        (args[0], args[1], args[3:5]) if name == "alltoall_base_" else (out, args[0], args[1:3])
    )
    ranks = _group(args).size()
    value = tape.shadows.in_part(sent)
    uneven = any(len(set(sizes)) > 1 for sizes in splits if sizes)
    if value is None or uneven or not value.numel() or value.shape[0] % ranks:
        return []
    group = dist.ProcessGroup.unbox(args[2]) if name == "alltoall_base_" else _resolve_process_group(args[-1])
    return [(target, value.chunk(ranks)[group.rank()].clone(), 1)]


def _reduce(
    tape: Tape, kind: str, payload: int, tensors: list[Any], sizes: tuple[int, int], forget: bool = True
) -> int:
    """Record a collective and return the mark of its end."""
    kernel = Kernel("collective", payload, 0.0, str(tensors[0].dtype)[6:], sizes, name=kind)
    return tape.transfer(kernel, tensors, forget)


def _ddp_class(tape: Tape) -> type[torch.nn.Module]:
    class DistributedDataParallel(torch.nn.Module):
        """Gradient buckets from the last parameter to the first, each reduced on its last gradient."""

        def __init__(
            self,
            module: torch.nn.Module,
            *_: Any,
            gradient_as_bucket_view: bool = False,
            bucket_cap_mb: float | None = None,
            process_group: Any = None,
            **__: Any,
        ):
            super().__init__()
            self.module, self.require_backward_grad_sync = module, True
            sizes = (tape.ranks, 1) if process_group is None else sizes_of(process_group)
            params = [p for p in module.parameters() if p.requires_grad]
            cap = int((bucket_cap_mb or 25) * (1 << 20))
            self._buckets = [
                _Bucket(tape, bucket, sizes, copies=not gradient_as_bucket_view)
                for bucket in _split_into_buckets(params, cap)
            ]
            for bucket in self._buckets:
                bucket.watch(self)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

        @contextlib.contextmanager
        def no_sync(self):
            before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
            try:
                yield
            finally:
                self.require_backward_grad_sync = before

    return DistributedDataParallel


def _split_into_buckets(params: Sequence[Tensor], cap: int) -> list[list[Tensor]]:
    """Fill buckets from the last parameter to the first; a bucket is full when it reaches its byte limit."""
    buckets: list[list[Tensor]] = [[]]
    limit = FIRST_BUCKET_BYTES
    for p in reversed(params):
        if buckets[-1] and sum(q.numel() * q.element_size() for q in buckets[-1]) >= limit:
            buckets.append([])
            limit = cap
        buckets[-1].append(p)
    return [bucket for bucket in buckets if bucket]


class _Bucket:
    """Gradients that are reduced together. `copies`: in a separate buffer, not in the gradients."""

    def __init__(self, tape: Tape, params: list[Tensor], sizes: tuple[int, int], *, copies: bool) -> None:
        self.tape, self.params, self.sizes = tape, params, sizes
        self.missing: set[int] = set()  # gradients of this backward that have not arrived
        self.flat: Tensor | None = None
        if copies:
            size = sum(p.numel() for p in params)
            self.flat = torch.empty(size, dtype=params[0].dtype, device=params[0].device)
            tape.classify([self.flat], "communication")

    def watch(self, owner: Any) -> None:
        """Reduce when the last gradient has arrived, unless the owner is inside `no_sync`."""

        def arrived(p: Tensor) -> None:
            if owner.require_backward_grad_sync:
                self._arrived(p)

        arrived.__name__ = REDUCES
        for p in self.params:
            p.register_post_accumulate_grad_hook(arrived)

    def _arrived(self, p: Tensor) -> None:
        if not self.missing:
            self.missing.update(id(q) for q in self.params)
        if self.flat is not None and p.grad is not None:
            copied = Kernel("pointwise", 2 * shape_of(p.grad).nbytes)
            self.tape.custom("bucket copy", [copied], [p.grad], [self.flat])
        self.missing.discard(id(p))
        if not self.missing:
            self._reduce()

    def _reduce(self) -> None:
        """Start the reduction; the end of the backward pass waits for it."""
        grads = [q.grad for q in self.params if q.grad is not None]
        into = grads if self.flat is None else [self.flat]
        nbytes = sum(shape_of(t).nbytes for t in into)
        mark = _reduce(self.tape, "all_reduce", nbytes, into, self.sizes)

        def finish() -> None:
            self.tape.hold_stream(mark, self.tape.stream)
            if self.flat is not None:  # and back into the gradients
                copied = Kernel("multi", 2 * shape_of(self.flat).nbytes)
                self.tape.custom("bucket copy", [copied], [self.flat], grads)

        engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportAttributeAccessIssue]
        engine.queue_callback(finish)
