"""torch.cuda and torch internals, replaced for a simulated device.

`install` patches the process permanently: tables of names and their answers first, then what needs more.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.cpp_extension as extension
from torch import Tensor
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.optim.optimizer import _foreach_supported_types as _optimizer_types
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_map_only

from leanstep.rehearse.answers import convolutions, cuda_graphs, parameters
from leanstep.rehearse.answers.triton_launches import shared_memory_bytes
from leanstep.rehearse.branches import assumed_numbers
from leanstep.rehearse.events import HostWait
from leanstep.rehearse.refusals import EXPORT, NESTED, Refused
from leanstep.rehearse.shadows import check_ordinal, devices_here
from leanstep.rehearse.tape import Tape
from leanstep.tape.lines import LIBRARY, USER, judge_code

HALF = (torch.float16, torch.bfloat16)
FLASH_HEAD_SIZE = 256
# Added to simulated addresses: no machine has memory there.
NO_ADDRESS = 1 << 62
# torch returns this many streams round-robin.
NUM_STREAMS = 32
# Kernels of the simulated device; they are removed with this object.
_LIBRARY = torch.library.Library("aten", "IMPL")
# torch composes these ops from others unless the device has kernels for them, as CUDA does.
# `_fused_rms_norm` of torch 2.8, which has no backward, is for Metal only.
OWN_KERNELS = ["silu_backward", "mish_backward"]
if hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
    OWN_KERNELS.append("_fused_rms_norm")


class DeviceProperties(types.SimpleNamespace):
    """Result of `torch.cuda.get_device_properties`; a constant for Dynamo, like the real one."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return id(self)


def install(tape: Tape, device: Any) -> None:
    """Replace torch.cuda for `device` (a record of `devices.DEVICES`) and record the calls."""
    _torch_internals()
    for target, answers in _tables(tape, device):
        _set(target, **answers)
    _readings(tape)
    parameters.install(tape)
    convolutions.install()
    F.scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention = _attention(tape, device)  # pyright: ignore
    cuda_graphs.install(tape)
    _dynamo_constants()


# Names and their answers -------------------------------------------------------------------------------


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _true(*_: Any, **__: Any) -> bool:
    return True


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _check_device(*args: Any, **named: Any) -> None:
    """Check a device index (`torch.cuda.set_device` and similar); a wrong index raises."""
    check_ordinal((*args, *named.values())[-1])


def _exchange_device(index: int) -> int:
    """Replace what `with torch.cuda.device(0)` and `device_of` call; both remain torch's own."""
    check_ordinal(index)
    return 0


def _refused(sentence: str) -> Callable[..., Any]:
    def refused(*_: Any, **__: Any) -> Any:
        raise Refused(sentence)

    return refused


def _tables(tape: Tape, device: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return the objects whose attributes are replaced, and the replacements."""
    memory, streams, seeds = _memory(tape, device), _streams(tape), _seeds()
    nothing = dict.fromkeys("init _lazy_init _lazy_call".split(), _nothing)
    presence = {"is_available": _true, "device_count": devices_here}
    major, minor = device.capability
    has_bf16 = device.capability >= (8, 0)
    properties = _properties(device)
    allocator, synchronize = tape.configure_allocator, lambda *_: tape.wait("synchronize", mark=0)
    built_with = getattr(torch._C, "_cudnn", None)
    cudnn = (9, 10, 2) if built_with is None else built_with.getCompileVersion()
    generator = _generator_class()
    tables = [
        (torch.cuda, {**memory, **seeds, **streams, **nothing, **presence}),
        (
            torch.cuda,
            {
                "synchronize": synchronize,
                "is_initialized": _true,
                "_is_compiled": _true,
                "current_device": _zero,
                "set_device": _check_device,
                "_exchange_device": _exchange_device,
                "_maybe_exchange_device": _exchange_device,
                "can_device_access_peer": lambda *_: False,
                "default_generators": tuple(generator() for _ in range(devices_here())),
                "get_device_properties": lambda *_: properties,
                "get_device_name": lambda *_: device.name,
                "get_device_capability": lambda *_: device.capability,
                "get_arch_list": lambda: [f"sm_{major}{minor}"],
                "is_bf16_supported": lambda *_, **__: has_bf16,
                "is_tf32_supported": lambda *_, **__: has_bf16,
            },
        ),
        (torch.cuda.memory, {**memory, "_set_allocator_settings": allocator}),
        (torch.cuda.random, {k: v for k, v in seeds.items() if hasattr(torch.cuda.random, k)}),
        (torch.cuda.streams, {name: streams[name] for name in ("Stream", "Event")}),
        (torch.cuda.nvtx, dict.fromkeys(("range_push", "range_pop", "mark"), _nothing)),
        (torch.cuda.nvtx, {"range": lambda *_, **__: contextlib.nullcontext()}),
        (
            torch.accelerator,
            {
                **presence,
                "synchronize": synchronize,
                "current_device_index": _zero,
                "set_device_index": _check_device,
                "set_device_idx": _check_device,
                "current_accelerator": lambda *_, **__: torch.device("cuda"),
                "current_stream": streams["current_stream"],
            },
        ),
        (torch.backends.cuda, {"is_built": _true}),
        # An RNN would pack its weights by their addresses.
        (torch.backends.cudnn, {"is_acceptable": lambda tensor: False}),
        (torch.backends.cudnn, {"version": lambda: sum(map(int.__mul__, cudnn, (10_000, 100, 1)))}),
        (torch.version, {"cuda": torch.version.cuda or "12.8"}),
        # nn.DataParallel on the one device.
        (torch._C, {"_scatter": lambda tensor, *_: (tensor.to("cuda", non_blocking=True),)}),
        (torch._C, {"_accelerator_setAllocatorSettings": allocator}),
        (torch, {"Generator": generator, **_files(tape)}),
        (torch.Tensor, {"record_stream": lambda self, stream: None, **_pinned_memory(tape)}),
        (torch.UntypedStorage, _storages(tape)),
        (extension, _extensions()),
        (torch.export, dict.fromkeys(("export", "export_for_training"), _refused(EXPORT))),
    ]
    if not torch.distributed.is_nccl_available():  # asked before bf16 training and for DDP's bf16 hook
        tables.append((torch.distributed, {"is_nccl_available": _true}))
        tables.append((sys.modules["torch.cuda.nccl"], {"version": lambda: (2, 27, 5)}))
    with contextlib.suppress(ImportError):
        import safetensors.torch

        save = _files(tape)["save"]
        tables.append((safetensors.torch, {"save_file": save, "save_model": save}))
    return tables


def _memory(tape: Tape, device: Any) -> dict[str, Any]:
    def stats(*_: Any) -> dict[str, int]:
        return {
            "active_bytes.all.current": tape.live_bytes,
            "active_bytes.all.peak": tape.window_peak_bytes,
            "allocated_bytes.all.current": tape.live_bytes,
            "allocated_bytes.all.peak": tape.window_peak_bytes,
            "reserved_bytes.all.current": tape.memory.reserved(tape.live_bytes),
            "reserved_bytes.all.peak": tape.memory.peak_reserved(tape.window_peak_bytes),
            "num_alloc_retries": 0,
            "num_ooms": tape.memory.num_errors,
        }

    def reset_peak(*_: Any) -> None:
        tape.window_peak_bytes = tape.live_bytes
        tape.memory.reset_peak()

    def free_and_total(*_: Any) -> tuple[int, int]:
        taken = tape.memory.reserved(tape.live_bytes) + device.context_bytes
        return device.memory_bytes - taken, device.memory_bytes

    return {
        "memory_allocated": lambda *_: tape.live_bytes,
        "memory_reserved": lambda *_: tape.memory.reserved(tape.live_bytes),
        "max_memory_allocated": lambda *_: tape.window_peak_bytes,
        "max_memory_reserved": lambda *_: tape.memory.peak_reserved(tape.window_peak_bytes),
        "memory_stats": stats,
        "mem_get_info": free_and_total,
        "reset_peak_memory_stats": reset_peak,
        "reset_max_memory_allocated": reset_peak,
        "empty_cache": lambda *_: tape.memory.empty_cache(),
        "ipc_collect": _nothing,
        "memory_summary": lambda *_, **__: "",
        "memory_snapshot": lambda *_, **__: [],
        "set_per_process_memory_fraction": _nothing,
    }


def _seeds() -> dict[str, Any]:
    """Give the device's generators no state: the values they draw are never read."""

    def state(*_: Any) -> Tensor:
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    ignored = "manual_seed manual_seed_all seed seed_all set_rng_state set_rng_state_all".split()
    answers = {"get_rng_state": state, "get_rng_state_all": lambda: [state()], "initial_seed": _zero}
    return {**dict.fromkeys(ignored, _nothing), **answers}


def _generator_class() -> Any:
    real = torch._C.Generator

    class Kind(type(real)):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

    class Generator(real, metaclass=Kind):
        """Replace a device generator by a host one: the values it draws on the device are never read."""

        def __new__(cls, device: Any = "cpu"):
            return real.__new__(cls, "cpu")  # pyright: ignore[reportCallIssue]

    return Generator


def _properties(device: Any) -> DeviceProperties:
    shared = shared_memory_bytes(device)
    return DeviceProperties(
        name=device.name,
        major=device.capability[0],
        minor=device.capability[1],
        total_memory=device.memory_bytes,
        multi_processor_count=device.units,
        L2_cache_size=int(device.l2_bytes),
        warp_size=32,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65_536,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=shared,
        shared_memory_per_multiprocessor=shared + 1_024,
        gcnArchName="",
        uuid="0",
        is_integrated=0,
        is_multi_gpu_board=0,
        clock_rate=1_500_000,
    )


def _streams(tape: Tape) -> dict[str, Any]:
    numbers = itertools.cycle(range(1, NUM_STREAMS + 1))

    def number_of(stream: Any) -> int:
        return stream.stream_id if isinstance(stream, Stream) else tape.stream

    class Event:
        """A CUDA event: a mark on the clock of a stream."""

        def __init__(self, *_: Any, **__: Any):
            self.seconds, self.mark = 0.0, 0

        def record(self, stream: Any = None) -> None:
            number = number_of(stream)
            self.mark = tape.mark(number)
            self.seconds = max(tape.clock.stream_end(number), tape.clock.host)

        def synchronize(self) -> None:
            if self.mark:
                tape.wait("synchronize", mark=self.mark)

        def elapsed_time(self, other: Event) -> float:
            return 1e3 * (other.seconds - self.seconds)

        def wait(self, stream: Any = None) -> None:
            tape.hold_stream(self.mark, number_of(stream))

        query = _true

    class Stream:
        """A CUDA stream; stream 0 is the default."""

        device_index = priority = 0
        device_type = 1
        query = _true
        is_capturing = lambda self: False  # noqa: E731

        def __init__(self, *_: Any, stream_id: int | None = None, **__: Any):
            self.device = torch.device("cuda", 0)
            self.stream_id = self.cuda_stream = next(numbers) if stream_id is None else stream_id
            self._before: list[int] = []

        def wait_stream(self, stream: Any) -> None:
            tape.hold_stream(tape.mark(number_of(stream)), self.stream_id)

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self) -> None:
            tape.wait("synchronize", mark=tape.mark(self.stream_id))

        def __enter__(self) -> Stream:
            self._before.append(tape.stream)
            tape.stream = self.stream_id
            return self

        def __exit__(self, *_: Any) -> None:
            tape.stream = self._before.pop()

        def __hash__(self) -> int:
            return self.stream_id

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and other.stream_id == self.stream_id

    @contextlib.contextmanager
    def on_stream(stream: Any):
        with stream if isinstance(stream, Stream) else contextlib.nullcontext(stream):
            yield stream

    def set_stream(stream: Any) -> None:
        tape.stream = number_of(stream)

    return {
        "Stream": Stream,
        "Event": Event,
        "ExternalStream": Stream,
        "stream": on_stream,
        "current_stream": lambda *_: Stream(stream_id=tape.stream),
        "default_stream": lambda *_: Stream(stream_id=0),
        "set_stream": set_stream,
    }


def _pinned_memory(tape: Tape) -> dict[str, Any]:
    def pin_memory(self: Tensor, device: Any = None) -> Tensor:
        return tape.pin(self)

    def is_pinned(self: Tensor, device: Any = None) -> bool:
        return self.untyped_storage()._cdata in tape.pinned

    return {"pin_memory": pin_memory, "is_pinned": is_pinned}


def _storages(tape: Tape) -> dict[str, Any]:
    resize, address = torch.UntypedStorage.resize_, torch.UntypedStorage.data_ptr

    def resize_(self: Any, size: int) -> Any:
        out = resize(self, size)
        tape.resized(self)
        return out

    def data_ptr(self: Any) -> int:
        """Give each storage a unique, invalid address: programs compare them (FSDP1, tied weights)."""
        if self.device.type == "cpu":
            return address(self)
        return NO_ADDRESS | self._cdata if self.nbytes() else 0

    return {"resize_": resize_, "data_ptr": data_ptr}


def _files(tape: Tape) -> dict[str, Any]:
    """Write nothing on save. Load to the host first, because files hold no device storages."""
    real_load = torch.load

    def save(*_: Any, **__: Any) -> None:
        tape.notes["torch.save: nothing was written"] += 1

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        got = real_load(f, "cpu", *args, **kwargs)
        if map_location is not None and not callable(map_location) and "cuda" in str(map_location):
            got = tree_map_only(Tensor, lambda t: t.to("cuda"), got)
        return got

    return {"save": save, "load": load}


def _extensions() -> dict[str, Any]:
    """Build extensions for the host; refuse those for a device."""
    load, load_inline = extension.load, extension.load_inline
    refuse = _refused("a CUDA extension needs a real device")

    def load_sources(name: str, sources: Any, *args: Any, **kwargs: Any) -> Any:
        listed = [sources] if isinstance(sources, str) else sources
        if kwargs.get("with_cuda") or any(str(source).endswith((".cu", ".cuh")) for source in listed):
            refuse()
        return load(name, sources, *args, **kwargs)

    def load_text(name: str, cpp_sources: Any, cuda_sources: Any = None, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("with_cuda") or cuda_sources:
            refuse()
        return load_inline(name, cpp_sources, cuda_sources, *args, **kwargs)

    return {"load": load_sources, "load_inline": load_text}


# The internals of torch -----------------------------------------------------------------------------------


def _torch_internals() -> None:
    """Let torch's own code run for a device that does not exist."""
    torch._C._jit_override_can_fuse_on_gpu(False)  # TorchScript's fused kernels need a real device
    fake_tensor.init_gpu_context = lambda device: None
    # `torch.tensor(x, device="cuda")` in a captured graph: its value must not be used for device computation.
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)  # pyright: ignore
    proxy_tensor.CONSTANT_NUMEL_LIMIT = -1
    # Without FakeTensor in these lists the optimizers fall back to one launch per tensor.
    for supported in (_foreach_utils._foreach_supported_types, _optimizer_types):
        if FakeTensor not in supported:
            supported.append(FakeTensor)
    # In a CPU build, the kernels that only CUDA has, so that these calls are recorded whole.
    off_tape = _refused("a device kernel was called where the rehearsal cannot record it")
    for name in OWN_KERNELS:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            _LIBRARY.impl(name, off_tape, "CUDA")
    _no_real_kernels()
    _lift_from_host()
    if torch.__version__.startswith("2.8."):

        @fake_impls.register_op_impl(torch.ops.aten.mm.dtype)
        def mm(mode: Any, func: Any, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
            """`torch.mm(a, b, out_dtype=...)`: the fake implementation does not take the third argument."""
            return torch.ops.aten.mm.default(a, b).new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


def _no_real_kernels() -> None:
    """Refuse ops without a fake implementation: torch would run them on real zeros on the device."""
    run = fake_tensor.run_fallback_kernel

    def run_on_host(mode: Any, func: Any, flat_args: Any, *args: Any) -> Any:
        if any(isinstance(t, FakeTensor) and t.fake_device.type == "cuda" for t in flat_args):
            raise fake_tensor.UnsupportedOperatorException(func)
        return run(mode, func, flat_args, *args)

    for module in (fake_tensor, fake_impls):
        _set(module, run_fallback_kernel=run_on_host)


def _lift_from_host() -> None:
    """Build `torch.tensor(x, device="cuda")` on the host and copy it. torch holds this flag per thread, and
    starts its own threads for backward."""
    from torch.autograd.function import BackwardCFunction

    run = BackwardCFunction.apply

    def apply(self: Any, *args: Any) -> Any:
        torch._C._set_only_lift_cpu_tensors(True)
        return run(self, *args)

    BackwardCFunction.apply = apply
    torch._C._set_only_lift_cpu_tensors(True)


# Functions that Dynamo would trace, or refuse to trace, and their replacements.
_replaced: list[tuple[types.FunctionType, types.FunctionType]] = []


def _set(target: Any, **answers: Any) -> None:
    for name, answer in answers.items():
        original = getattr(target, name, None)
        if isinstance(answer, types.FunctionType):
            # One object per name: Dynamo has rules by object and rejects an object with two rules.
            code, variables, closure = answer.__code__, answer.__globals__, answer.__closure__
            answer = types.FunctionType(code, variables, answer.__name__, answer.__defaults__, closure)
            if isinstance(original, types.FunctionType):
                _replaced.append((original, answer))
        setattr(target, name, answer)


def _dynamo_constants() -> None:
    """Register the functions that Dynamo folds into constants: it identifies them by object."""
    from torch._dynamo import utils
    from torch._dynamo.variables import torch as known

    of_cuda = "get_device_properties is_available current_device is_initialized".split()
    of_any = "is_available current_accelerator current_device_index".split()
    folded = [getattr(torch.cuda, name) for name in of_cuda] + [getattr(torch.accelerator, n) for n in of_any]
    known.constant_fold_functions.update(dict.fromkeys(folded))  # pyright: ignore
    utils.common_constant_types.add(DeviceProperties)


def refuse_what_dynamo_refuses() -> None:
    """Give each replacement Dynamo's rule for the original function.

    Dynamo has rules by object and does not trace torch's own files: without a rule, a replacement would pass
    inside `fullgraph=True` where the original does not. Called only if a program compiles, because the table
    of rules is slow to build.
    """
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import SkipFunctionVariable, ctx_manager

    # Dynamo's own `with torch.cuda.device(0)` holds references taken when it was imported.
    context: Any = ctx_manager.CUDADeviceVariable
    context._exchange_fn = staticmethod(torch.cuda._exchange_device)
    context._maybe_exchange_fn = staticmethod(torch.cuda._maybe_exchange_device)

    rules = trace_rules.get_torch_obj_rule_map()
    for original, answer in _replaced:
        rule = rules.get(original)
        if rule is None and trace_rules.check(original, is_inlined_call=True):
            rule = SkipFunctionVariable
        if rule is not None:
            rules.setdefault(answer, rule)


# Values that the host reads ------------------------------------------------------------------------------


def _readings(tape: Tape) -> None:
    """Record what a dispatch mode does not see: lists of tensors, prints, addresses."""
    shadows, plain_item, represent = tape.shadows, torch.Tensor.item, FakeTensor.__repr__
    reporting = assumed_numbers(shadows.branches, tape.lines.here)
    needs_address = _refused("data_ptr() of a device tensor needs a real device")

    def on_device(tensor: FakeTensor) -> bool:
        return tensor.fake_device.type == "cuda"

    def by_program() -> bool:
        """Whether the program called the function that asks; torch's own messages and checks do not sync."""
        caller = sys._getframe(2).f_code
        return bool(judge_code(caller.co_filename, caller.co_name) & (USER | LIBRARY))

    def read(tensor: Tensor) -> Any:
        """Record the reads of `torch.tensor([a, b])`; one sync in the source causes several waits."""
        place, events = tape.lines.place(), tape.recording.events
        last = events[-1] if events else None
        again = isinstance(last, HostWait) and (last.kind, last.line) == ("torch.tensor", place.line)
        tape.wait("torch.tensor", place, counts=not again)
        return shadows.item(tensor, place.line)

    def describe(self: FakeTensor, spec: str) -> str:
        if self.dim() == 0:
            return format(self.item(), spec)
        if on_device(self):
            tape.wait("print")
        return format(str(tuple(self.shape)), spec)

    def printed(self: FakeTensor, **options: Any) -> str:
        if on_device(self) and by_program():
            tape.wait("print")
        return represent(self, **options)

    def numpy(self: FakeTensor, *_: Any, **__: Any) -> Any:
        if on_device(self):
            raise TypeError("numpy(): expected a host tensor, got one on cuda:0; use .cpu() first")
        return torch.ones(self.shape, dtype=self.dtype, device="cpu").numpy()

    def item(self: FakeTensor) -> Any:
        """Report the branches that an unknown number decides."""
        shadows.read_assumed, shadows.wraps_reads = False, True
        try:
            value = plain_item(self)
        finally:
            shadows.wraps_reads = False
        return reporting(value) if shadows.read_assumed else value

    def data_ptr(self: FakeTensor) -> int:
        """Return addresses to torch, which compares them. Refuse programs: they pass them to device code."""
        if by_program():
            needs_address()
        return self.untyped_storage().data_ptr() + int(self.storage_offset()) * self.element_size()

    _set(FakeTensor, item=item, numpy=numpy, tolist=lambda self: self.cpu().tolist())
    _set(FakeTensor, __format__=describe, __repr__=printed, data_ptr=data_ptr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a CUDA build says that its kernel is replaced
        _LIBRARY.impl("_local_scalar_dense", read, "CUDA")

    from torch.nested._internal import nested_tensor

    plain_size = nested_tensor.get_tensor_symint

    def ragged_size(tensor: Tensor, *, coeff: int = 1) -> Any:
        if isinstance(tensor, FakeTensor) and on_device(tensor):
            raise Refused(NESTED)
        return plain_size(tensor, coeff=coeff)

    nested_tensor.get_tensor_symint = ragged_size


def _attention(tape: Tape, device: Any) -> Callable[..., Tensor]:
    """Select the attention kernel that a GPU would use: a CPU build always uses the unfused one."""
    plain = F.scaled_dot_product_attention
    aten, switches = torch.ops.aten, torch.backends.cuda
    has_flash = device.capability >= (8, 0)

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        rest = (dropout_p, is_causal)
        if query.device.type != "cuda":
            return plain(query, key, value, attn_mask, *rest, scale=scale, enable_gqa=enable_gqa)
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            if attn_mask is not None and attn_mask.dtype != torch.bool:
                attn_mask = attn_mask.to(dtype)
        four = query.dim() == 4
        fits_flash = has_flash and four and query.dtype in HALF and query.shape[-1] <= FLASH_HEAD_SIZE
        flash, efficient, unfused = (
            switches.flash_sdp_enabled(),
            switches.mem_efficient_sdp_enabled(),
            switches.math_sdp_enabled(),
        )
        # cuDNN's kernel is tried last: torch uses it only if all others are disabled.
        only_cudnn = switches.cudnn_sdp_enabled() and not (flash or efficient or unfused)
        if fits_flash and attn_mask is None and (flash or only_cudnn):
            tape.notes[f"attention: {'cuDNN' if only_cudnn else 'flash'} kernel"] += 1
            run = aten._scaled_dot_product_flash_attention
            return run(query, key, value, *rest, False, scale=scale)[0]
        if enable_gqa and key.shape[-3] != query.shape[-3]:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        if four and efficient:
            tape.notes["attention: memory-efficient kernel"] += 1
            if attn_mask is not None:
                if attn_mask.dtype == torch.bool:
                    blocked = attn_mask.logical_not()
                    empty = torch.zeros_like(attn_mask, dtype=query.dtype)
                    attn_mask = empty.masked_fill_(blocked, -torch.inf)
                attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
            run = aten._scaled_dot_product_efficient_attention
            return run(query, key, value, attn_mask, torch.is_grad_enabled(), *rest, scale=scale)[0]
        if not unfused:
            raise RuntimeError("No available kernel. Aborting execution.")
        tape.notes["attention: unfused"] += 1
        return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, *rest, scale=scale)[0]

    attention.__name__ = plain.__name__  # context_parallel replaces it by its name
    return attention


def use_by_default() -> None:
    """Create tensors that name no device on the GPU: for programs that select none."""
    torch.set_default_device("cuda")
    from_numpy = torch.from_numpy
    torch.from_numpy = lambda array: from_numpy(array).cuda()
