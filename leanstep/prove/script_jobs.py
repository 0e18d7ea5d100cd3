"""Run a script in its own process, or as several ranks, with fixed seeds, and capture its updates.

The script's output goes to a log. The child process writes its capture to a file, even if the script raises,
exits or is interrupted.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from leanstep.prove.capture import Captured, Recorder
from leanstep.prove.interpret import interpret_kernels
from leanstep.prove.twin import Twin
from leanstep.prove.watch import Values
from leanstep.tape.children import (
    Child,
    ended_afterwards,
    how_it_ended,
    interrupt_all,
    log_to,
    start,
    temporary_folder,
    wait_all,
    write_result,
)
from leanstep.tape.run import Program, Stop, run_script


@dataclass(frozen=True)
class Job:
    """One run of a script.

    Args:
        script, argv: as after `python`; a folder may contain a train.py instead of a `__main__.py`.
        steps: number of updates to capture before the script is stopped.
        twin: run in fp64. `dropout` False: without dropout.
        parts: capture each backward call separately.
        explain: also capture values with their lines and the summands of the loss.
        full: store full tensors.
        seed: set before the script starts, and added to every seed that the script sets.
        ranks: number of processes, started as torchrun does; None = one process without its environment.
        path: replaces sys.path in the process of the script; empty = as in this process.
        name: shown instead of the script's name.
    """

    script: str
    argv: tuple[str, ...] = ()
    steps: int = 2
    twin: bool = False
    dropout: bool = True
    parts: bool = False
    explain: bool = False
    full: bool = False
    seed: int = 0
    ranks: int | None = None
    path: tuple[str, ...] = ()
    name: str = ""

    @property
    def program(self) -> Program:
        return Program.find(self.script)

    @property
    def label(self) -> str:
        return " ".join([self.name or Path(self.script).name, *self.argv])


def run_job(job: Job, *, fork: bool = False) -> list[Captured]:
    """Run the job and return the capture of each rank, rank 0 first."""
    Program.find(job.script)
    processes: list[Child] = []
    with temporary_folder() as folder, ended_afterwards(processes):
        count = job.ranks or 1
        port = free_port() if job.ranks else 0
        for rank in range(count):
            processes.append(start(_captured_child, (job, rank, port, str(folder)), fork=fork))
        try:
            wait_all(processes)
        except KeyboardInterrupt:
            interrupt_all(processes)
            _raise_with(KeyboardInterrupt(), _read_all(folder, processes))
        return _read_all(folder, processes)


def _raise_with(error: BaseException, captured: list[Captured]) -> None:
    error.captured = captured  # type: ignore[attr-defined]
    raise error


def _read_all(folder: Path, processes: Sequence[Child]) -> list[Captured]:
    return [_read(folder, rank, child) for rank, child in enumerate(processes)]


def _read(folder: Path, rank: int, child: Child) -> Captured:
    log = folder / f"{rank}.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    try:
        captured = pickle.loads((folder / f"{rank}.pickle").read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        captured = Captured(error=how_it_ended(child.code), is_lost=True)
        if child.code == os.EX_IOERR or not folder.is_dir():
            captured.error = "could not write its capture: the folder for temporary files is full or missing"
    said = [line for line in text.strip().splitlines() if line.strip()]
    if not captured.said and said:
        captured.said = said[-1].strip()
    return captured


def _captured_child(job: Job, rank: int, port: int, folder: str) -> None:
    with log_to(Path(folder) / f"{rank}.log"):
        if job.ranks:
            os.environ.update(rank_environment(rank, job.ranks, port))
        interpret_kernels()
        captured = capture_script(job)
        captured.rank, captured.world_size = rank, job.ranks or 1
    write_result(Path(folder) / f"{rank}.pickle", captured)


def capture_script(job: Job) -> Captured:
    """Run the script of `job` in this process."""

    def stop() -> None:
        raise Stop

    values = Values() if job.explain else None
    recorder = Recorder(job.steps, parts=job.parts, values=values, full=job.full, on_done=stop)
    in_fp64 = None
    if job.twin:
        in_fp64 = Twin(
            dropout=job.dropout,
            count=recorder.count,
            note_targets=recorder.note_targets,
            note_draw=recorder.note_draw if job.parts else None,
        )

    @contextlib.contextmanager
    def recorded() -> Iterator[None]:
        with recorder, in_fp64 or contextlib.nullcontext(), values or contextlib.nullcontext():
            yield

    # A script may change the default dtype: restore it for the next script in this process.
    dtype = torch.get_default_dtype()
    added = [entry for entry in job.path if entry not in sys.path]
    with seeded(job.seed), module_path(job.path), eager_random_numbers(), contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, dtype)
        outcome = run_script(job.program, job.argv, recorded())
    captured = recorder.captured
    captured.overlaid = _loaded_from(added)
    if outcome.exception is not None:
        place = f" ({outcome.where})" if outcome.where else ""
        captured.error, captured.said = outcome.exception, outcome.said + place
    elif outcome.code:
        captured.error = f"exit code {outcome.code}"
    if in_fp64 is not None:
        if in_fp64.fallbacks:
            captured.notes.append("no fp64 kernel, ran in fp32: " + ", ".join(sorted(in_fp64.fallbacks)))
        if job.parts and not job.dropout:
            captured.notes.append("dropout is off: its masks depend on how the batch is split")
    return captured


def _loaded_from(folders: Sequence[str]) -> bool:
    """Return whether a module of this process comes from one of `folders`."""
    # The dict of a module: an attribute of a lazy one would import others.
    files = (getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values()))
    inside = tuple(folder + os.sep for folder in folders)
    return any(isinstance(file, str) and file.startswith(inside) for file in files)


@contextlib.contextmanager
def module_path(path: Sequence[str]) -> Iterator[None]:
    """Set sys.path to `path` inside the block; an empty `path` changes nothing."""
    old = list(sys.path)
    sys.path[:] = path or old
    try:
        yield
    finally:
        sys.path[:] = old


@contextlib.contextmanager
def seeded(offset: int) -> Iterator[None]:
    """Seed all generators with `offset`, and add it to every seed that the program sets itself."""
    torch.manual_seed(offset)
    random.seed(offset)
    places: list[tuple[Any, str]] = [(torch, "manual_seed"), (random, "seed")]
    numpy = sys.modules.get("numpy")  # torch imports it if it is installed
    if numpy is not None:
        numpy.random.seed(offset)
        places.append((numpy.random, "seed"))
    if not offset:
        yield
        return
    with contextlib.ExitStack() as stack:
        for place, name in places:
            original = getattr(place, name)

            def with_offset(seed: Any = None, *args: Any, original: Any = original, **kwargs: Any) -> Any:
                return original(seed + offset if isinstance(seed, int) else seed, *args, **kwargs)

            setattr(place, name, with_offset)
            stack.callback(setattr, place, name, original)
        yield


@contextlib.contextmanager
def eager_random_numbers() -> Iterator[None]:
    """Make Inductor draw random numbers as eager code does, so that dropout masks are comparable."""
    original = torch.compile
    with contextlib.ExitStack() as stack:

        def compiled(*args: Any, **kwargs: Any) -> Any:
            # Imported here: a script that compiles nothing does not load the compiler.
            import torch._inductor.config as config

            stack.callback(setattr, config, "fallback_random", config.fallback_random)
            config.fallback_random = True
            return original(*args, **kwargs)

        torch.compile = compiled
        stack.callback(setattr, torch, "compile", original)
        yield


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
