"""Check the Triton kernels of any file: compile its launches and run them in the interpreter.

The file, or another file, defines `launch()`: a function without arguments that calls the kernels on small
tensors, as a program would, and returns their results. It runs twice, each time in a separate process: once
with launches recorded and compiled for each target, once in Triton's interpreter with bounds and races
checked. `plain()`, if there is one, computes the same results in plain torch from the same seed; the results
of the interpreter must agree with it. No GPU is needed: tensors requested on "cuda" are allocated on the CPU,
and torch.cuda simulates one device.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from dev.kernel_checks.aot import SHARED_LIMITS, CompiledKernel
from dev.kernel_checks.bfloat16 import exact_bfloat16
from dev.kernel_checks.launch_variants import compile_variant, recorded_launches, variants_of
from dev.kernel_checks.memory_checks import Problem, checked_launches

DEFAULT_LAUNCH, DEFAULT_PLAIN = "launch", "plain"
# Relative error of a result: its distance from `plain()` divided by the norm of that.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
NEEDED = f"write {DEFAULT_LAUNCH}(), which calls the kernels on small tensors, or name one with --launch"


class FileProblem(Exception):
    """The file cannot be checked; the message is one line."""


@dataclass
class FileReport:
    """The results for one file."""

    compiled: list[CompiledKernel]
    problems: list[Problem]
    launches: dict[str, int] = field(default_factory=dict)
    not_launched: list[str] = field(default_factory=list)
    parity: list[dict[str, Any]] | None = (
        None  # per result: error, tolerance; None: there is no plain function
    )

    @property
    def complaints(self) -> list[str]:
        rows = [f"{row.kernel} for {row.target} {row.complaint}" for row in self.compiled if row.complaint]
        return [*rows, *map(str, self.problems), *self.disagreements]

    @property
    def disagreements(self) -> list[str]:
        wrong = [row for row in self.parity or [] if not row["error"] <= row["tolerance"]]
        return [
            f"result {row['result']} differs from {row['plain']}(): relative error {row['error']:.1e}, "
            f"expected at most {row['tolerance']:.0e}"
            for row in wrong
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [row.to_json() for row in self.compiled],
            "problems": [problem.to_json() for problem in self.problems],
            "launches": self.launches,
            "not_launched": self.not_launched,
            "parity": self.parity,
        }


def check_file(
    file: Path, launch: str | None, targets: tuple[str, ...], *, memory: bool = True, plain: str | None = None
) -> FileReport:
    """Compile and check the kernels that a file launches.

    Args:
        file: defines the kernels.
        launch: "FILE.py" or "FILE.py:FUNCTION" with the function to call; None: `launch` of the file itself.
        targets: names such as sm_90.
        memory: whether to also run the interpreter.
        plain: name of the function whose results `launch` must reproduce, in the same file as `launch`; None:
            `plain`, if there is one.

    Raises:
        FileProblem: if a file cannot be imported, has no such function or launches nothing.
    """
    where, _, function = (launch or str(file)).partition(":")
    request = {"file": str(file), "launch": where, "function": function or DEFAULT_LAUNCH, "targets": targets}
    request["plain"] = plain
    compiled = _in_process("compile", request)
    checked = _in_process("memory", request) if memory else {"problems": [], "launches": {}, "parity": None}
    return FileReport(
        [CompiledKernel(**row) for row in compiled["rows"]],
        [Problem.from_json(row) for row in checked["problems"]],
        checked["launches"],
        compiled["not_launched"],
        checked["parity"],
    )


def _in_process(mode: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run one mode in a separate process: Triton decides at import whether kernels are interpreted."""
    environment = os.environ | {"TRITON_INTERPRET": "1" if mode == "memory" else "0"}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", __name__, mode, json.dumps(request), str(answer)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if not answer.exists():
            reason = next(iter(done.stderr.strip().splitlines()[::-1]), f"exit code {done.returncode}")
            raise FileProblem(f"{request['file']}: the {mode} process ended: {reason}")
        result = json.loads(answer.read_text())
    if "refused" in result:
        raise FileProblem(result["refused"])
    return result


def main(mode: str, request_json: str, answer: str) -> None:
    """Entry point of the process that `_in_process` starts."""
    request = json.loads(request_json)
    try:
        with _without_gpu(request["targets"]):
            module, launch = _loaded(request)
            run = _compile if mode == "compile" else _check_memory
            result = run(request, module, launch)
    except FileProblem as problem:
        result = {"refused": str(problem)}
    Path(answer).write_text(json.dumps(result))


def _loaded(request: dict[str, Any]) -> tuple[types.ModuleType, Callable[[], Any]]:
    """Return the module with the kernels and the function that launches them."""
    module = _imported(request["file"])
    other = module if request["launch"] == request["file"] else _imported(request["launch"])
    function = getattr(other, request["function"], None)
    if not callable(function):
        raise FileProblem(f"{request['launch']}: does not define {request['function']}(); {NEEDED}")
    return module, function


def _imported(path: str) -> types.ModuleType:
    name = Path(path).stem
    sys.path.insert(0, str(Path(path).resolve().parent))
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except Exception as problem:
        raise FileProblem(f"{path}: {_one_line(problem, path)}") from None
    return module


def _one_line(problem: BaseException, path: str) -> str:
    """Return the type and message of an exception, with the last line of the user's file in its traceback."""
    frames = [
        f for f in traceback.extract_tb(problem.__traceback__) if Path(f.filename).name == Path(path).name
    ]
    where = f"line {frames[-1].lineno}: " if frames else ""
    message = str(problem).strip().splitlines() or [""]
    return f"{where}{type(problem).__name__}: {message[0]}"


def _launched(request: dict[str, Any], launch: Callable[[], Any]) -> Any:
    try:
        torch.manual_seed(0)
        return launch()
    except Exception as problem:
        cause = _one_line(problem, request["launch"])
        message = f"{request['launch']}: {request['function']}() failed: {cause}"
        if type(problem).__name__ == "InterpreterError":
            message += "; Triton's interpreter cannot run this kernel, --skip-memory only compiles it"
        raise FileProblem(message) from None


def _compile(request: dict[str, Any], module: types.ModuleType, launch: Callable[[], Any]) -> dict[str, Any]:
    with recorded_launches() as launches:
        _launched(request, launch)
    if not launches:
        raise FileProblem(f"{request['launch']}: {request['function']}() launched no Triton kernel")
    rows = [
        compile_variant(variant, target, shipped=False).to_json()
        for target in request["targets"]
        for variant in variants_of(launches, target)
    ]
    from triton.runtime.jit import JITFunction

    kernels = {
        name: value for name, value in vars(module).items() if isinstance(_innermost(value), JITFunction)
    }
    # A kernel that is called by other kernels is checked with them and need not be launched itself.
    called = {name for kernel in kernels.values() for name in _innermost(kernel).fn.__code__.co_names}
    launched = {id(one.kernel) for one in launches}
    missing = [
        name
        for name, value in kernels.items()
        if id(_innermost(value)) not in launched and name not in called
    ]
    return {"rows": rows, "not_launched": missing}


def _innermost(kernel: Any) -> Any:
    """Return the kernel inside autotune and heuristics."""
    while type(kernel).__name__ in ("Autotuner", "Heuristics"):
        kernel = kernel.fn
    return kernel


def _check_memory(
    request: dict[str, Any], module: types.ModuleType, launch: Callable[[], Any]
) -> dict[str, Any]:
    with exact_bfloat16(), _first_configuration(), checked_launches() as checked:
        results = _launched(request, launch)
    parity = _compare(request, results)
    problems = [p.to_json() for p in checked.problems]
    return {"problems": problems, "launches": dict(checked.launches), "parity": parity}


def _compare(request: dict[str, Any], results: Any) -> list[dict[str, Any]] | None:
    """Return the error of each result of `launch`; None without a plain function."""
    # Another launch function has other results: it is compared only with a function named for it.
    name = request["plain"] or (DEFAULT_PLAIN if request["function"] == DEFAULT_LAUNCH else "")
    plain = getattr(sys.modules[Path(request["launch"]).stem], name, None)
    if not callable(plain):
        if request["plain"]:
            raise FileProblem(f"{request['launch']}: does not define {name}()")
        return None
    expected = _launched({**request, "function": name}, plain)
    got, wanted = _named_tensors(results), _named_tensors(expected)
    if not wanted or set(got) != set(wanted):
        function = request["function"]
        raise FileProblem(
            f"{request['launch']}: expected {function}() and {name}() to return the same tensors, "
            f"got {sorted(got) or 'none'} and {sorted(wanted) or 'none'}"
        )
    rows = []
    for key, value in got.items():
        if value.shape != wanted[key].shape:
            shapes = f"{tuple(value.shape)} and {tuple(wanted[key].shape)}"
            raise FileProblem(f"{request['launch']}: result {key}: expected equal shapes, got {shapes}")
        truth, value_wide = wanted[key].double(), value.double()
        # NaN or infinity where the plain function has the same is no error; anywhere else it is an infinite
        # one.
        same = (value_wide == truth) | (value_wide.isnan() & truth.isnan())
        difference = (value_wide - truth).masked_fill(same, 0).nan_to_num(nan=float("inf"))
        scale = max(float(truth.nan_to_num(0, 0, 0).norm()), torch.finfo(torch.float32).tiny)
        error = float(difference.norm()) / scale
        rows.append(
            {"result": key, "plain": name, "error": error, "tolerance": TOLERANCES.get(value.dtype, 0.0)}
        )
    return rows


def _named_tensors(results: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a function returned: one, a sequence or a dict of them."""
    if isinstance(results, torch.Tensor):
        results = [results]
    pairs = results.items() if isinstance(results, dict) else enumerate(results or ())
    return {str(key): value.detach().cpu() for key, value in pairs if isinstance(value, torch.Tensor)}


@contextlib.contextmanager
def _first_configuration() -> Iterator[None]:
    """Run autotuned kernels with their first configuration; the interpreter cannot time them."""
    import triton.runtime.autotuner as autotuner

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, arguments, strict=False))
        return self.fn.run(*arguments, **options, **self.prune_configs(options)[0].all_kwargs())

    with mock.patch.object(autotuner.Autotuner, "run", run):
        yield


class _OnCPU(TorchFunctionMode):
    """Allocate tensors on the CPU that a program requests on a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", "") == "cuda":
            return args[0]
        kwargs = {k: _cpu(v) if k == "device" else v for k, v in (kwargs or {}).items()}
        if getattr(function, "__name__", "") == "to":
            args = tuple(map(_cpu, args))
        return function(*args, **kwargs)


def _cpu(device: Any) -> Any:
    is_cuda = isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"
    return torch.device("cpu") if is_cuda else device


@contextlib.contextmanager
def _without_gpu(targets: list[str]) -> Iterator[None]:
    """Simulate a device of the first target in torch.cuda."""
    digits = targets[0][3:] if targets[0].startswith("sm_") else "90"
    major, minor = int(digits[:-1]), int(digits[-1])
    properties = types.SimpleNamespace(
        name=targets[0],
        major=major,
        minor=minor,
        multi_processor_count=4,
        warp_size=32,
        total_memory=80 << 30,
        L2_cache_size=50 << 20,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=SHARED_LIMITS.get(targets[0], 101_376),
    )
    answers: dict[str, Any] = {
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (major, minor),
        "get_device_name": lambda *_: targets[0],
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "synchronize": lambda *_: None,
        "device": lambda *_: contextlib.nullcontext(),
        # Kernels in CUDA C++ are neither compiled nor run.
        "_compile_kernel": mock.MagicMock(),
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer, create=True))
        stack.enter_context(_OnCPU())
        yield


if __name__ == "__main__":
    main(*sys.argv[1:])
