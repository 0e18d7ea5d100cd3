"""Compile Triton kernels without a GPU and read registers, spills and shared memory from the binaries.

Each fast path's `kernel.py` lists its shipped configurations in AOT_KERNELS; `variants` adds other values of
a kernel's flags. NVIDIA figures come from the tools bundled with Triton (cuobjdump for registers, ptxas -v
for spills), AMD figures from the assembly's metadata. Shared memory is the figure that Triton reports:
cuobjdump omits the dynamic part. The machine code for sm_90 must pass the checks of `sass.py`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dev.kernel_checks import sass
from leanstep.rehearse.devices import SHARED_LIMITS

_ROOT = Path(__file__).parents[2]


def kernel_modules() -> tuple[str, ...]:
    """Return every `kernel.py` and `kernels.py`: the only modules that may import Triton at module level."""
    return tuple(
        ".".join(path.relative_to(_ROOT).with_suffix("").parts)
        for package in ("leanstep", "recipes")
        for path in sorted((_ROOT / package).rglob("kernel*.py"))
        if path.name in ("kernel.py", "kernels.py")
    )


KERNEL_MODULES = kernel_modules()
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
# The AMD pipeliner uses one buffer less than NVIDIA's; more than two stages only cost memory there.
MAX_AMD_STAGES = 2
# A shipped configuration must not spill. A variant may spill this much: a few values across a loop. A tile
# that does not fit spills a kilobyte.
VARIANT_SPILL_BYTES = 32


@dataclass(frozen=True)
class CompiledKernel:
    """Resources of a kernel configuration on one target; `shortfall`: checks that its machine code fails."""

    package: str
    kernel: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    num_stages: int
    error: str | None = None
    shortfall: str = ""
    shipped: bool = True

    @property
    def complaint(self) -> str:
        """Why this kernel is not acceptable; empty if it is."""
        if self.error:
            return f"did not compile: {self.error}"
        if self.spill_bytes > (0 if self.shipped else VARIANT_SPILL_BYTES):
            return f"spills {self.spill_bytes} bytes of registers"
        limit = SHARED_LIMITS.get(self.target)
        if limit is not None and self.shared_bytes > limit:
            return f"needs {self.shared_bytes:,} bytes of shared memory, the device has {limit:,}"
        return self.shortfall

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_target(name: str) -> Any:
    """Return Triton's GPUTarget for `sm_90` or `gfx942`."""
    from triton.backends.compiler import GPUTarget

    if re.fullmatch(r"sm_\d{2,3}", name):
        return GPUTarget("cuda", int(name[3:]), 32)
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", name):
        # CDNA (gfx9) has wavefronts of 64, RDNA of 32.
        return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)
    raise ValueError(f"targets: expected names like {', '.join(TARGETS)}, got {name!r}")


def shipped_kernels(
    modules: tuple[str, ...] = KERNEL_MODULES, *, every_variant: bool = False
) -> list[tuple[str, dict[str, Any]]]:
    """Return (package, AOT_KERNELS entry) of every kernel module; `every_variant` adds flag variants."""
    entries = []
    for name in modules:
        listed = importlib.import_module(name).AOT_KERNELS
        # The top-level package of the kernel, not a folder inside it.
        entries += [(name.split(".")[1], entry) for entry in (variants(listed) if every_variant else listed)]
    return entries


def variants(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries plus a variant for every other value of their flags.

    A flag is a constexpr that is True or False in the registry.
    """
    result, known = list(entries), {_identity(entry) for entry in entries}
    for entry in entries:
        flags = [k for k, v in entry["constexprs"].items() if isinstance(v, bool)]
        for values in itertools.product((False, True), repeat=len(flags)):
            chosen = dict(zip(flags, values, strict=True))
            other = {**entry, "constexprs": {**entry["constexprs"], **chosen}}
            changed = [f"{name}={int(v)}" for name, v in chosen.items() if v != entry["constexprs"][name]]
            other |= {"name": " ".join([entry["name"], *changed]), "shipped": False}
            if _identity(other) not in known:
                known.add(_identity(other))
                result.append(other)
    return result


def _identity(entry: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key that is equal for entries that compile to the same code."""
    parts = (entry["signature"], entry["constexprs"])
    listed = (tuple(sorted((str(k), str(v)) for k, v in part.items())) for part in parts)
    return (entry["fn"].__name__, *listed, entry["num_warps"], entry["num_stages"])


def compile_kernel(package: str, entry: dict[str, Any], target_name: str) -> CompiledKernel:
    """Compile one AOT_KERNELS entry for one target; a compiler error becomes a row, not an exception."""
    from triton.compiler import ASTSource

    target = parse_target(target_name)
    function, names = entry["fn"], entry["fn"].arg_names
    signature = {name: entry["signature"].get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in entry["constexprs"].items()}
    # Pointers and sizes of real tensors are multiples of 16; at a launch Triton detects that by itself.
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or signature[name] in ("i32", "i64")
    }
    stages = entry["num_stages"] if target.backend == "cuda" else min(entry["num_stages"], MAX_AMD_STAGES)
    options = {"num_warps": entry["num_warps"], "num_stages": stages}
    source = ASTSource(function, signature, constants, attributes)
    shipped = entry.get("shipped", True)
    return compile_source(package, entry["name"], source, target_name, options, shipped=shipped, gates=True)


def compile_source(
    package: str,
    name: str,
    source: Any,
    target_name: str,
    options: dict[str, Any],
    *,
    shipped: bool = True,
    gates: bool = False,
) -> CompiledKernel:
    """Compile one `ASTSource` for one target; `gates`: check its sm_90 machine code with sass.py."""
    import triton

    target = parse_target(target_name)
    warps, stages = options["num_warps"], options["num_stages"]
    row = functools.partial(
        CompiledKernel, package, name, target_name, num_warps=warps, num_stages=stages, shipped=shipped
    )
    try:
        kernel = triton.compile(source, target=target, options=options)
        registers, spills = (
            _nvidia(kernel, target) if target.backend == "cuda" else _amd(kernel.asm["amdgcn"])
        )
        missed = sass.check(kernel, warps) if gates and target_name == sass.GATED_TARGET else []
    except Exception as problem:
        line = str(problem).strip().splitlines() or [type(problem).__name__]
        return row(0, 0, 0, error=f"{type(problem).__name__}: {line[0]}")
    # Spills are reported as a figure of their own.
    missed = [sentence for sentence in missed if not (spills and sentence.endswith(sass.LOCAL))]
    return row(registers, spills, kernel.metadata.shared, shortfall="; ".join(missed))


def compile_all(
    targets: tuple[str, ...] = TARGETS,
    modules: tuple[str, ...] = KERNEL_MODULES,
    progress: Callable[[str, float], None] | None = None,
    every_variant: bool = False,
) -> Iterator[CompiledKernel]:
    """Compile every shipped kernel for every target.

    Raises:
        RuntimeError: under TRITON_INTERPRET, which compiles nothing.
        ValueError: for a target that this version of Triton does not support.
    """
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 replaces kernels by Python; unset it to compile them")
    for target in targets:
        parse_target(target)
    # LLVM aborts the process on some unknown targets, so an untested target gets its own process.
    for target in targets:
        if target not in TARGETS:
            if progress:
                progress(target, 0.0)
            yield from _compile_in_child(target, modules)
    tested = [target for target in targets if target in TARGETS]
    shipped = shipped_kernels(modules, every_variant=every_variant)
    work = [(package, entry, target) for package, entry in shipped for target in tested]
    for index, (package, entry, target) in enumerate(work):
        if progress:
            progress(f"{entry['name']} {target}", index / len(work))
        yield compile_kernel(package, entry, target)


def _compile_in_child(target: str, modules: tuple[str, ...]) -> list[CompiledKernel]:
    """Compile all kernels for a target in a child process, which may abort; ValueError if the first fails."""
    import triton

    code = f"from dev.kernel_checks import aot; aot._print_rows({target!r}, {modules!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        rows, said = [], next(iter(done.stderr.strip().splitlines()[::-1]), "no message")
    else:
        # Triton prints PTX that its assembler rejects; the rows are the last line.
        rows = [CompiledKernel(**row) for row in json.loads(done.stdout.splitlines()[-1])]
        said = rows[0].error
    if said is not None:
        raise ValueError(f"targets: Triton {triton.__version__} does not compile for {target}: {said}")
    return rows


def _print_rows(target: str, modules: tuple[str, ...]) -> None:
    """Compile and print rows as JSON, in the child process of `_compile_in_child`."""
    rows: list[CompiledKernel] = []
    for package, entry in shipped_kernels(modules):
        rows.append(compile_kernel(package, entry, target))
        if rows[0].error:
            break
    print(json.dumps([row.to_json() for row in rows]))


def _assembler(arch: int) -> str:
    """Return the path of the ptxas that Triton uses for `arch`."""
    from triton.backends.nvidia.compiler import get_ptxas

    # Up to Triton 3.5 there is one ptxas for all architectures.
    tool: Any = get_ptxas(arch) if inspect.signature(get_ptxas).parameters else get_ptxas()  # type: ignore[call-arg]
    return str(tool.path)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _nvidia(kernel: Any, target: Any) -> tuple[int, int]:
    """Return (registers per thread, spill bytes) of a compiled CUDA kernel."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder) / "kernel.cubin", Path(folder) / "kernel.ptx"
        cubin.write_bytes(kernel.asm["cubin"])
        ptx.write_text(kernel.asm["ptx"])
        usage = _run(str(knobs.nvidia.cuobjdump.path), "-res-usage", str(cubin))
        arch = re.search(r"\.target\s+(sm_\w+)", kernel.asm["ptx"])
        assert arch, "PTX names no target"
        registers, stack = re.search(r"REG:(\d+)", usage), re.search(r"STACK:(\d+)", usage)
        assert registers and stack, f"cuobjdump printed no registers: {usage!r}"
        report = ""
        if int(stack.group(1)):  # nothing can spill without a stack frame: the assembler need not run again
            out = str(Path(folder) / "out")
            report = _run(_assembler(target.arch), "-v", f"--gpu-name={arch.group(1)}", str(ptx), "-o", out)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
    return int(registers.group(1)), max([0, *map(int, spills)])


def _amd(assembly: str) -> tuple[int, int]:
    """Return (vector registers, spill bytes per lane) from the metadata in AMD assembly."""
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly)
    assert registers and spills, "AMD assembly contains no register counts"
    return int(registers.group(1)), 4 * int(spills.group(1))
