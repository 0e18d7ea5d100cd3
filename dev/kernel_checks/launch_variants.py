"""Record launches, bind their arguments as Triton does, and compile each variant once.

    with recorded_launches() as launches:
        program()                                   # nothing is launched
    for variant in variants_of(launches, "sm_90"):
        row = compile_variant(variant, "sm_90")

A variant is what Triton's launcher compiles for these arguments: their types, which pointers and sizes are
multiples of 16, which sizes are 1, and the constants. Binding uses Triton's own binder for each target.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from dev.kernel_checks.aot import CompiledKernel, compile_source, parse_target


@dataclass(frozen=True)
class Pointer:
    """A tensor argument of a recorded launch, with the three properties that Triton's binder reads."""

    dtype: torch.dtype
    address: int
    storage_bytes: int

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return self.storage_bytes


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch: a kernel (or its "module:name") and its arguments, with tensors as `Pointer`."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def to_json(self) -> list[Any]:
        name = f"{self.kernel.fn.__module__}:{self.kernel.fn.__qualname__}"
        return [
            name,
            [_encoded(a) for a in self.arguments],
            {k: _encoded(v) for k, v in self.options.items()},
        ]

    @classmethod
    def from_json(cls, row: list[Any]) -> RecordedLaunch:
        module, name = row[0].split(":")
        kernel = getattr(importlib.import_module(module), name)
        return cls(kernel, tuple(map(_decoded, row[1])), {k: _decoded(v) for k, v in row[2].items()})


@dataclass(frozen=True)
class Variant:
    """What Triton compiles for a launch and one target."""

    kernel: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: Any

    @property
    def key(self) -> tuple[str, ...]:
        parts = (self.signature, self.constants, self.attributes, self.options.__dict__)
        return (self.name, *(str(sorted((str(k), str(v)) for k, v in part.items())) for part in parts))

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


def _encoded(value: Any) -> Any:
    if isinstance(value, Pointer):
        return {"dtype": str(value.dtype)[6:], "address": value.address, "bytes": value.storage_bytes}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a launch with an argument of type {type(value).__name__} cannot be written as JSON")


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        return Pointer(getattr(torch, value["dtype"]), value["address"], value["bytes"])
    return value


def _pointer(value: Any) -> Any:
    """Replace a tensor by a `Pointer` without its memory; return other arguments unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    # Allocations are aligned to 512 bytes; only the offset within one may be unaligned.
    address = 512 + int(value.storage_offset()) * value.element_size() % 16
    return Pointer(value.dtype, address, value.untyped_storage().nbytes())


@contextlib.contextmanager
def recorded_launches(then: Callable[..., Any] | None = None) -> Iterator[list[RecordedLaunch]]:
    """Record Triton's launches instead of running them; `then`, if set, is called with each one.

    An autotuned kernel is recorded with each of its configurations.
    """
    import triton.runtime.autotuner as autotuner
    import triton.runtime.jit as jit

    launches: dict[str, RecordedLaunch] = {}

    def run(self: Any, *arguments: Any, grid: Any = None, warmup: bool = False, **options: Any) -> Any:
        launch = RecordedLaunch(
            self, tuple(map(_pointer, arguments)), {k: _pointer(v) for k, v in options.items()}
        )
        launches.setdefault(repr((id(self), launch.arguments, sorted(options.items(), key=str))), launch)
        return None if then is None else then(self, *arguments, grid=grid, warmup=warmup, **options)

    def every_configuration(self: Any, *arguments: Any, **options: Any) -> None:
        self.nargs = dict(zip(self.arg_names, arguments, strict=False))
        for configuration in self.prune_configs(options):
            self.fn.run(*arguments, **options, **configuration.all_kwargs())

    run.records_only = getattr(then, "records_only", False)  # type: ignore[attr-defined]
    recorded: list[RecordedLaunch] = []
    with mock.patch.object(jit.JITFunction, "run", run):
        with mock.patch.object(autotuner.Autotuner, "run", every_configuration):
            yield recorded
    recorded += launches.values()


def variants_of(launches: Iterable[RecordedLaunch], target_name: str) -> list[Variant]:
    """Return the distinct variants of these launches for one target."""
    variants: dict[tuple[str, ...], Variant] = {}
    for launch in launches:
        variant = _bound(launch, target_name)
        variants.setdefault(variant.key, variant)
    return list(variants.values())


def _bound(launch: RecordedLaunch, target_name: str) -> Variant:
    import triton.runtime.jit as jit
    from triton.compiler import make_backend

    kernel, backend = launch.kernel, make_backend(parse_target(target_name))
    options = {**launch.options, "debug": False, "instrumentation_mode": ""}
    binder = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = binder(*launch.arguments, **options)
    packed = kernel._pack_args(backend, options, bound, specialization, rest)
    parsed, signature, constants, attributes = packed
    return Variant(kernel, signature, constants, attributes, parsed)


def compile_variant(variant: Variant, target_name: str, *, shipped: bool = True) -> CompiledKernel:
    """Compile one variant; a compiler error becomes a row, not an exception."""
    from triton.compiler import ASTSource

    source = ASTSource(variant.kernel, variant.signature, variant.constants, variant.attributes)
    package = variant.kernel.fn.__module__
    options = variant.options.__dict__
    return compile_source(package, _described(variant), source, target_name, options, shipped=shipped)


def _described(variant: Variant) -> str:
    """Return the kernel's name with its constants."""
    names = variant.kernel.arg_names
    constants = {names[path[0]]: value for path, value in variant.constants.items()}
    annotated = {n: v for n, v in constants.items() if variant.signature[n] == "constexpr" and n.isupper()}
    return " ".join([variant.name, *(f"{name}={value}" for name, value in annotated.items())])
