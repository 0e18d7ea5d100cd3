"""Triton and NVRTC kernels: not run, but priced by a registered cost, else as one pass over their tensors.

The costs of leanstep's own kernels are registered here, from what each kernel reads and writes.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Mapping
from typing import Any

import torch

from leanstep.rehearse.answers.triton_products import has_products, product_flops
from leanstep.rehearse.devices import SHARED_LIMITS
from leanstep.rehearse.events import Kernel
from leanstep.rehearse.kernel_costs import one_pass, register_cost, registered_cost
from leanstep.rehearse.shadows import device_tensors, shape_of, with_shapes
from leanstep.rehearse.tape import Tape


def install(tape: Tape, device: Any) -> None:
    """Record launches instead of compiling them."""
    if hasattr(torch.cuda, "_compile_kernel"):
        torch.cuda._compile_kernel = lambda source, name, *_, **__: CompiledKernel(tape, name)  # pyright: ignore
    try:
        import triton.runtime.autotuner as autotuner
        import triton.runtime.jit as jit
    except ImportError:
        return
    _register_own_costs()

    def launch(self: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        if not warmup:
            named = dict(zip(getattr(self, "arg_names", ()), args, strict=False))
            named = {**named, **kwargs}
            blocks = {k: tuple(v.block_shape) for k, v in named.items() if hasattr(v, "block_shape")}
            # A TMA descriptor is replaced by the tensor that it describes.
            named = {k: v.base if k in blocks else v for k, v in named.items()}
            _launched(tape, _name(self), {**named, "grid": _grid(grid, named)}, self, blocks)

    def first_config(self: Any, *args: Any, **kwargs: Any) -> None:
        options = self.configs[0].all_kwargs() if self.configs else {}
        options.update(kwargs)
        self.fn.run(*args, **options)

    def with_heuristics(self: Any, *args: Any, **kwargs: Any) -> None:
        self.fn.run(*args, **kwargs)

    launch.records_only = True  # type: ignore[attr-defined]
    jit.JITFunction.run = launch
    autotuner.Autotuner.run = first_config
    autotuner.Heuristics.run = with_heuristics
    with contextlib.suppress(ImportError):
        from triton.tools.tensor_descriptor import TensorDescriptor

        TensorDescriptor.__post_init__ = lambda self: None  # its checks look at addresses
    _install_driver(device)
    _analyse_once()


def _analyse_once() -> None:
    """Bound the time of torch's analysis of what a captured launch writes.

    torch 2.13 follows every path from a store back to the arguments, which is exponential in a long kernel.
    Here each value is followed once, and equal launches are analysed once. The list of reads is then
    incomplete; a capture uses only the writes.
    """
    from torch._higher_order_ops import triton_kernel_wrap as wrap

    analysis: Any = getattr(wrap, "analyze_kernel_access", None)
    if analysis is not None:
        analyse, tma_stores = analysis.fn, wrap.get_tma_stores

        def follow_once(functions: Any, name: str, *args: Any) -> Any:
            tma_stores(functions, name)  # fills torch's cache; this analysis reads the dict's values as well
            return analyse({**functions, name: _EachOnce(functions[name])}, name, *args)

        analysis.fn = follow_once
    for name in ("identify_accessed_tensors", "identify_mutated_tensors"):  # from torch 2.11; before
        if hasattr(wrap, name):
            setattr(wrap, name, _by_argument_types(getattr(wrap, name)))


class _EachOnce(dict[Any, list[Any]]):
    """The operations behind each value; empty on the second lookup."""

    def __init__(self, operations: Mapping[Any, list[Any]]):
        super().__init__(operations)
        self.seen: set[Any] = set()

    def __getitem__(self, value: Any) -> list[Any]:
        if value in self.seen:
            return []
        self.seen.add(value)
        return super().__getitem__(value)


def _by_argument_types(identify: Any) -> Any:
    """An analysis of a kernel that runs once for equal constants and types of its arguments."""
    results: dict[Any, Any] = {}

    def describe(value: Any) -> Any:
        return ("tensor", value.dtype) if isinstance(value, torch.Tensor) else (type(value), repr(value))

    def identified(kernel: Any, arguments: dict[str, Any], *others: Any) -> Any:
        described = tuple((name, describe(value)) for name, value in arguments.items())
        key = (kernel, described, repr(others))
        if key not in results:
            results[key] = identify(kernel, arguments, *others)
        return results[key]

    return identified


class CompiledKernel:
    """Result of `torch.cuda._compile_kernel` (NVRTC), priced like a Triton kernel."""

    def __init__(self, tape: Tape, name: str):
        self.tape, self.name = tape, name

    def __call__(
        self, grid: Any = (1, 1, 1), block: Any = (1, 1, 1), args: Any = (), *_: Any, **__: Any
    ) -> None:
        _launched(self.tape, self.name, {**{str(i): a for i, a in enumerate(args or ())}, "grid": grid})

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None: ...


def captured(tape: Tape, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Record a Triton launch in a captured graph. It writes its outputs in place, as in Inductor."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel = kernel_side_table.get_kernel(arguments["kernel_idx"])
    constants = kernel_side_table.get_constant_args(arguments["constant_args_idx"])
    grid = arguments["grid"][0] if arguments["grid"] else None
    named = {**constants, **arguments["kwargs"]}
    described = arguments.get("tma_descriptor_metadata") or {}
    blocks = {k: tuple(v[1][0]) for k, v in described.items() if v[0] == "stable"}
    _launched(tape, _name(kernel), {**named, "grid": _grid(grid, named)}, kernel, blocks)
    if "tensors_to_clone" not in arguments:
        return None
    return {name: arguments["kwargs"][name] for name in arguments["tensors_to_clone"]}


def _launched(
    tape: Tape,
    name: str,
    arguments: dict[str, Any],
    function: Any = None,
    blocks: Mapping[str, tuple[int, ...]] = types.MappingProxyType({}),
) -> None:
    """Record a launch, priced by its registered cost, by its products, else as one pass over its tensors."""
    tensors = list({id(t): t for t in device_tensors(list(arguments.values()))}.values())
    kernels = registered_cost(name, with_shapes(arguments))
    if kernels is None:
        pass_ = one_pass(name, [shape_of(t) for t in tensors])
        product = _product(name, arguments, function, blocks, pass_, tensors)
        if product is not None:
            tape.notes[f"Triton kernel {name}: not run, priced by the products in its source"] += 1
        else:
            unknown = function is not None and _has_products(function)
            but = "; the time of its matrix products is unknown and not in the prediction" if unknown else ""
            tape.notes[f"Triton kernel {name}: not run, priced as one pass over its tensors{but}"] += 1
        kernels = (product or pass_,)
    tape.custom(f"triton::{name}", kernels, tensors, tensors)


def _product(
    name: str, arguments: dict[str, Any], function: Any, blocks: Any, pass_: Kernel, tensors: Any
) -> Kernel | None:
    """Return the kernel of a launch whose source contains matrix products that can be counted."""
    grid = arguments.get("grid")
    if function is None or not grid or not _has_products(function):
        return None
    while hasattr(function, "fn") and not hasattr(function, "arg_names"):
        function = function.fn
    flops = product_flops(function, arguments, tuple(grid), blocks)
    if not flops:
        return None
    narrow = min(tensors, key=lambda t: t.element_size())
    out = max(tensors, key=lambda t: t.numel())
    m, n = (out.shape[-2], out.shape[-1]) if out.dim() > 1 else (out.numel(), 1)
    inner = max(1, round(flops / (2.0 * m * n)))
    return pass_._replace(
        kind="gemm", flops=flops, dtype=str(narrow.dtype)[6:], sizes=(1, int(m), int(n), inner), name=name
    )


def _has_products(function: Any) -> bool:
    while hasattr(function, "fn") and not hasattr(function, "arg_names"):
        function = function.fn
    try:
        return has_products(function)
    except (OSError, TypeError, SyntaxError, StopIteration):
        return False


def _name(function: Any) -> str:
    return getattr(function, "__name__", None) or getattr(getattr(function, "fn", None), "__name__", "kernel")


def _grid(grid: Any, arguments: dict[str, Any]) -> Any:
    """Return the grid if it can be computed from the passed arguments."""
    if not callable(grid):
        return grid
    try:
        return grid(arguments)
    except KeyError:
        return None


def shared_memory_bytes(device: Any) -> int:
    """Return the shared memory that a block may use on a device of the table."""
    major, minor = device.capability
    return SHARED_LIMITS[
        f"gfx9{minor}" + "02"[minor == 4] if device.vendor == "amd" else f"sm_{major}{minor}"
    ]


def _install_driver(device: Any) -> None:
    """The part of Triton's driver that libraries query before they launch."""
    import triton.runtime

    try:
        from triton.backends.compiler import GPUTarget
    except ImportError:
        return
    major, minor = device.capability
    properties = {
        "max_shared_mem": shared_memory_bytes(device),
        "multiprocessor_count": device.units,
        "warpSize": 32,
        "max_num_regs": 65_536,
        "sm_clock_rate": 1_500_000,
        "mem_clock_rate": 1_500_000,
        "mem_bus_width": 5120,
    }
    vendor = "hip" if getattr(device, "vendor", "") == "amd" else "cuda"
    driver: Any = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget(vendor, major * 10 + minor, 32),
        get_current_device=lambda: 0,
        set_current_device=lambda index: None,
        get_current_stream=lambda index=0: 0,
        get_device_capability=lambda index=0: device.capability,
        is_active=lambda: True,
        utils=types.SimpleNamespace(get_device_properties=lambda index: properties),
    )
    triton.runtime.driver.set_active(driver)


def _register_own_costs() -> None:
    register_cost("stats_kernel", _statistics)
    register_cost("grads_kernel", _gradients)
    register_cost("xxt_kernel", _symmetric_product)
    register_cost("xtx_kernel", _symmetric_product)
    register_cost("transpose_kernel", _transpose)
    register_cost("softcap_rows_kernel", _softcap_rows)
    register_cost("relu_product_kernel", _relu_product)
    # Kernels of other packages that contain matrix products or make more than one pass.
    register_cost("_cce_lse_forward_kernel", functools.partial(_fused_head, 1))
    register_cost("_cce_backward_kernel", functools.partial(_fused_head, 3))
    register_cost("liger_cross_entropy_kernel", _liger_cross_entropy)
    register_cost("_forward_kernel", functools.partial(_trl_head, 1))
    register_cost("_backward_kernel", functools.partial(_trl_head, 2))


def _programs(arguments: Mapping[str, Any]) -> int:
    grid = arguments.get("grid") or (1,)
    product = 1
    for n in grid:
        product *= n
    return product


def _statistics(arguments: Mapping[str, Any]) -> Kernel:
    """heads: each logit is read once; seven numbers per row are read or written."""
    rows, z = _programs(arguments), arguments["z_ptr"]
    moved = rows * (arguments["num_columns"] * z.width + 8 + 4 * 6)
    return Kernel("reduce", moved, 0.0, z.dtype, name="stats_kernel")


def _gradients(arguments: Mapping[str, Any]) -> Kernel:
    """heads: reads each logit, writes each gradient."""
    rows, z, out = _programs(arguments), arguments["z_ptr"], arguments["out_ptr"]
    moved = rows * (arguments["num_columns"] * (z.width + out.width) + 8 + 4 * 7)
    return Kernel("pointwise", moved, 0.0, z.dtype, name="grads_kernel")


def _trl_head(passes: int, arguments: Mapping[str, Any]) -> Kernel | None:
    """trl: reads a tile of logits once forward, reads and overwrites it backward; others share the names."""
    tile = arguments.get("mm_ptr")
    if tile is None:
        return None
    rows = tile.size[0] if len(tile.size) > 1 else 1
    moved = rows * (passes * arguments["n_cols"] * tile.width + 32)
    return Kernel("reduce" if passes == 1 else "pointwise", moved, 0.0, tile.dtype, name="trl head")


def _symmetric_product(arguments: Mapping[str, Any]) -> Kernel:
    """muon: X X^T or X^T X; computes half of the tiles and stores each twice."""
    x, out = arguments["x_ptr"], arguments["out_ptr"]
    batch = x.size[0] if len(x.size) == 3 else 1
    size = out.size[-1]
    inner = x.numel // max(1, batch * size)
    moved = x.nbytes + out.numel * out.width
    flops = batch * size * size * inner
    return Kernel(
        "gemm",
        moved,
        float(flops),
        x.dtype,
        (batch, size, max(1, size // 2), inner),
        name="symmetric product",
    )


def _transpose(arguments: Mapping[str, Any]) -> Kernel:
    """muon: reads and writes once; with ADD, reads the target as well."""
    src, dst = arguments["src_ptr"], arguments["dst_ptr"]
    adds = bool(arguments.get("ADD"))
    moved = src.numel * src.width + dst.numel * dst.width * (2 if adds else 1)
    return Kernel("pointwise", moved, 0.0, src.dtype, name="transpose_kernel")


def _softcap_rows(arguments: Mapping[str, Any]) -> Kernel:
    """gpt: reads a row of products, rereads it mostly from cache (like softmax rows), and writes it."""
    u, grad, elements = (
        arguments["u_ptr"],
        arguments["grad_ptr"],
        _programs(arguments) * arguments["num_columns"],
    )
    moved = elements * (1.4 * u.width + grad.width if arguments["HAS_GRAD"] else u.width)
    return Kernel("pointwise", moved, 0.0, u.dtype, name="softcap_rows_kernel")


def _relu_product(arguments: Mapping[str, Any]) -> Kernel:
    """gpt: a matrix product whose tile is also squared, or multiplied by the slope."""
    a, b, pre, out = (arguments[f"{name}_ptr"] for name in ("a", "b", "pre", "out"))
    sizes = (1, arguments["rows"], arguments["cols"], arguments["inner"])
    moved = a.nbytes + b.nbytes + pre.nbytes + out.nbytes
    flops = 2.0 * sizes[1] * sizes[2] * sizes[3]
    return Kernel("gemm", moved, flops, a.dtype, sizes, name="relu_product_kernel")


def _fused_head(products: int, arguments: Mapping[str, Any]) -> Kernel:
    """cut-cross-entropy: hidden x weight without storing the logits; backward recomputes them."""
    hidden, weight = arguments["E"], arguments["C"]
    rows, vocab, width = int(arguments["B"]), int(arguments["V"]), int(arguments["D"])
    moved = products * (hidden.nbytes + weight.nbytes)
    one = 2.0 * rows * vocab * width
    return Kernel(
        "gemm",
        moved,
        products * one,
        hidden.dtype,
        (products, rows, vocab, width),
        name="cut-cross-entropy",
        repeated=one if products > 1 else 0.0,
    )


def _liger_cross_entropy(arguments: Mapping[str, Any]) -> Kernel:
    """liger: reads a row of logits for its sum, reads it again and overwrites it with its gradient."""
    logits = arguments["X_ptr"]
    passes = 3 if arguments.get("HAS_GRADIENTS") else 1
    rows = (_programs(arguments), int(arguments["n_cols"]))
    return Kernel(
        "softmax", passes * logits.nbytes, 0.0, logits.dtype, rows, name="liger_cross_entropy_kernel"
    )
