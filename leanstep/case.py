"""The registry of cases: one reference with its fast paths, peers, physical limit and workloads.

Tests, `prove`, `bench`, `demo`, the README table and the HTML page all read this registry, so a registered
fast path is automatically tested, proven and measured.

An implementation is a `build` function: it takes a `Workload` and returns a `step`, a callable without
arguments that runs the computation once (forward and backward) and returns named tensors. One-time setup
(creating an optimizer, unpacking) belongs in `build`; only `step` is timed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from leanstep.extras import MissingExtra

Kind = Literal["reference", "fast", "peer", "limit"]
Outputs = dict[str, Tensor]
Step = Callable[[], Outputs]
Params = Mapping[str, Any]

# These modules register cases; they are imported on the first lookup.
CASE_MODULES = (
    "leanstep.lens.cases",
    "leanstep.objectives.ragged.cases",
    "leanstep.logprob.cases",
    "leanstep.objectives.cases",
    "leanstep.muon.cases",
    "leanstep.gpt.cases",
    "leanstep.integrations.cases",
)


@dataclass(frozen=True)
class Workload:
    """Inputs of one call: tensors by name, and constants that are not tensors.

    A tensor called `upstream:NAME` is the incoming gradient of output NAME.
    """

    tensors: dict[str, Tensor]
    constants: dict[str, Any] = field(default_factory=dict)

    def cast(self, dtype: torch.dtype) -> Workload:
        """Return the same workload with every floating-point tensor in `dtype`; widening is exact."""
        cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in self.tensors.items()}
        return Workload(cast, self.constants)

    @property
    def num_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.tensors.values())


@dataclass(frozen=True)
class Implementation:
    """One row of a bench.

    Args:
        name: short, unique within the case: `reference`, `leanstep`, `trl-chunked`, `limit`.
        kind: reference | fast | peer | limit.
        build: Workload -> step. A limit's step may return no tensors; then nothing is compared.
        requires: modules that must be importable; otherwise the row is `available: false`.
        devices: device types it runs on; on others the row is `available: false`.
        unavailable: params -> the reason why this row cannot run at this size, or None.
        time_scale: the step does 1/time_scale of the workload (for a peer that would take hours);
            the reported time is multiplied by it, and `note` must say so.
        dtypes: the dtypes that `prove` checks; None = those of the case.
        on_request: why this row runs only if it is named (`bench --impl`, `prove --impl`).
        note: one line for the table.
    """

    name: str
    kind: Kind
    build: Callable[[Workload], Step]
    requires: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    unavailable: Callable[[Params], str | None] | None = None
    time_scale: float = 1.0
    dtypes: tuple[torch.dtype, ...] | None = None
    on_request: str = ""
    note: str = ""

    def missing(
        self, params: Params, device: torch.device | str = "cpu", *, named: bool = False
    ) -> str | None:
        """Return why this implementation does not run here, or None if it does; named: the user named it."""
        if self.on_request and not named:
            return f"{self.on_request}; runs if it is named"
        kind = torch.device(device).type
        if kind not in self.devices:
            return f"runs on {' and '.join(self.devices)} only, not on {kind}"
        for module in self.requires:
            try:
                is_installed = importlib.util.find_spec(module) is not None
            except (ImportError, ValueError):
                is_installed = False
            if not is_installed:
                return f"{module} is not installed"
        return self.unavailable(params) if self.unavailable else None


@dataclass(frozen=True)
class Case:
    """One replaceable piece of a training step.

    Args:
        name: as on the command line.
        summary: one sentence.
        make: (params, dtype, device, generator) -> Workload. All randomness from `generator`, on the CPU.
        implementations: the first is the reference.
        sizes: named parameter sets; `tiny` always exists. Others: `seed`, `cpu`, `gpu`, `large`, `odd`.
        prove_sizes: the sizes that `prove` and the tests check.
        dtypes: the dtypes that `prove` checks by default.
        bench_dtype: the dtype of `bench`.
        error_baseline: the plain computation whose error is the baseline; None = the reference in the dtype
            under test. (Polar: the plain bf16 iteration.)
        truth: build for the fp64 reference if the reference is third-party code that cannot run in fp64;
            None = the reference.
        floor: absolute term of the bound, relative to the largest |truth| of the tensor.
        drift: (implementation name, seed, steps) -> losses of a tiny training run; for `prove --drift`.
        annotate: rows by name -> additional notes by name, called when all rows are measured.
        default_size: the default size of `bench` on a CPU; on a GPU `gpu`, if it exists.
        truth_size: the size at which `bench` compares with fp64; None = the measured size. For cases whose
            fp64 reference would take minutes.
    """

    name: str
    summary: str
    make: Callable[[Params, torch.dtype, torch.device, torch.Generator], Workload]
    implementations: tuple[Implementation, ...]
    sizes: Mapping[str, Params]
    prove_sizes: tuple[str, ...] = ("tiny",)
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    bench_dtype: torch.dtype = torch.float32
    error_baseline: Callable[[Workload], Step] | None = None
    truth: Callable[[Workload], Step] | None = None
    floor: float | None = None
    drift: Callable[[str, int, int], list[float]] | None = None
    annotate: Callable[[dict[str, dict[str, Any]]], dict[str, str]] | None = None
    default_size: str = "cpu"
    truth_size: str | None = None

    def __post_init__(self) -> None:
        names = [i.name for i in self.implementations]
        assert self.implementations and self.implementations[0].kind == "reference", self.name
        assert len(set(names)) == len(names), f"{self.name}: implementation names repeat: {names}"
        assert "tiny" in self.sizes and set(self.prove_sizes) <= set(self.sizes), self.name
        assert self.default_size in self.sizes, f"{self.name}: no size {self.default_size!r}"

    @property
    def reference(self) -> Implementation:
        return self.implementations[0]

    def implementation(self, name: str) -> Implementation:
        for candidate in self.implementations:
            if candidate.name == name:
                return candidate
        known = ", ".join(i.name for i in self.implementations)
        raise ValueError(f"implementation: {self.name} has no {name!r}; it has {known}")

    def size_on(self, device: torch.device | str) -> str:
        """Return the default size of `bench` on this device."""
        return "gpu" if torch.device(device).type == "cuda" and "gpu" in self.sizes else self.default_size

    def dtype_on(self, device: torch.device | str) -> torch.dtype:
        """Return the dtype of `bench`: bf16 on a GPU if `prove` checks the case in bf16."""
        on_gpu = torch.device(device).type == "cuda"
        return torch.bfloat16 if on_gpu and torch.bfloat16 in self.dtypes else self.bench_dtype

    def params(self, size: str, overrides: Params = MappingProxyType({})) -> dict[str, Any]:
        """Return the parameters of a named size, with some replaced (`--sweep`)."""
        if size not in self.sizes:
            raise ValueError(f"size: {self.name} has no {size!r}; it has {', '.join(self.sizes)}")
        params = dict(self.sizes[size])
        for key, value in overrides.items():
            if key not in params:
                raise ValueError(f"sweep: {self.name} has no parameter {key!r}; it has {', '.join(params)}")
            params[key] = value
        return params

    def workload(
        self, params: Params, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> Workload:
        return self.make(params, dtype, torch.device(device), torch.Generator().manual_seed(seed))


def limit_of(rows: Mapping[str, Mapping[str, Any]], impl: str) -> Mapping[str, Any] | None:
    """Return the limit of a row: the one named after it (limit-x for leanstep-x), else the first."""
    limits = [name for name, row in rows.items() if row["kind"] == "limit" and row["median_s"]]
    own = min(limits, key=lambda name: name != impl.replace("leanstep", "limit"), default=None)
    return None if own is None else rows[own]


def with_gradients(
    function: Callable[[dict[str, Tensor], dict[str, Any]], Outputs], wrt: tuple[str, ...]
) -> Callable[[Workload], Step]:
    """Turn a forward function into a `build` whose step runs forward and backward and returns gradients.

    `function(tensors, constants)` receives new leaves (no copy) for the names in `wrt`; the step returns the
    outputs and `grad:NAME`. The incoming gradient of every output that requires grad is `upstream:NAME` of
    the workload, or ones.
    """

    def build(workload: Workload) -> Step:
        def step() -> Outputs:
            leaves = {name: workload.tensors[name].detach().requires_grad_() for name in wrt}
            outputs = function({**workload.tensors, **leaves}, workload.constants)
            roots = [(name, t) for name, t in outputs.items() if t.requires_grad]
            upstream = [
                workload.tensors[key].to(t.dtype)
                if (key := f"upstream:{name}") in workload.tensors
                else torch.ones_like(t)
                for name, t in roots
            ]
            grads = torch.autograd.grad(
                [t for _, t in roots], list(leaves.values()), upstream, allow_unused=True
            )
            result = {name: t.detach() for name, t in outputs.items()}
            for name, leaf, grad in zip(leaves, leaves.values(), grads, strict=True):
                result[f"grad:{name}"] = torch.zeros_like(leaf) if grad is None else grad
            return result

        return step

    return build


_REGISTRY: dict[str, Case] = {}
_loaded = False
# Why modules of CASE_MODULES were not loaded: the packages of an extra are not installed.
_left_out: list[str] = []


def register(case: Case) -> Case:
    """Add a case with a new name to the registry."""
    if case.name in _REGISTRY:
        raise ValueError(f"case: {case.name!r} is registered twice")
    _REGISTRY[case.name] = case
    return case


def unregister(name: str) -> None:
    """Remove a case (tests register deliberately broken ones)."""
    _REGISTRY.pop(name, None)


def all_cases() -> dict[str, Case]:
    """Return every registered case by name; imports the packages' `cases.py` on first use."""
    global _loaded
    if not _loaded:
        for module in CASE_MODULES:
            try:
                present = importlib.util.find_spec(module) is not None
            except MissingExtra as error:
                _left_out.append(str(error))
                present = False
            except ModuleNotFoundError:
                # A vendored copy may not contain the package's folder.
                present = False
            if present:
                importlib.import_module(module)
        # Set only now: a module that fails to import must fail again on the next lookup, not be skipped.
        _loaded = True
    return dict(_REGISTRY)


def get_case(name: str) -> Case:
    cases = all_cases()
    if name not in cases:
        left_out = f" (not loaded: {'; '.join(_left_out)})" if _left_out else ""
        raise ValueError(f"case: no case {name!r}; there are {', '.join(sorted(cases))}{left_out}")
    return cases[name]
