"""CPU tuning: one job per core, C++ built once per machine.

Jobs. Two threads on one matrix product synchronize after every call; two jobs with one thread each
synchronize once, at the end. torch releases the GIL inside its operations, so Python threads are enough.

C++. A source file is compiled on first use, in a second or two, into a private folder of the user's cache,
under a name made from source, flags, compiler and processor. With `LEANSTEP_NATIVE=0`, without a compiler or
without such a folder, every path uses torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

# OpenMP's omp_pause_hard: threads end instead of idling.
OMP_PAUSE_HARD = 2

# Called with the index of its worker, which may have its own scratch memory.
Job = Callable[[int], None]


def is_watched() -> bool:
    """Return whether a profiler or a dispatch mode is active; they see only the calling thread."""
    return torch.autograd._profiler_enabled() or torch._C._len_torch_dispatch_stack() > 0


class _OneThreadEach:
    """Limits torch to one thread per operation while at least one block is open, in any Python thread.

    The thread count is process-wide, so the first block saves it and the last one restores it: overlapping
    calls must not mistake each other's single thread for the user's setting.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open_blocks = 0
        self.saved = 1

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        with self.lock:
            if not self.open_blocks:
                self.saved = torch.get_num_threads()
            self.open_blocks += 1
            torch.set_num_threads(1)
        try:
            yield
        finally:
            with self.lock:
                self.open_blocks -= 1
                if not self.open_blocks:
                    torch.set_num_threads(self.saved)

    def forget(self) -> None:
        """Reset in a forked child, where the threads that held the lock or a block do not exist.

        The child keeps the single thread it was forked with: OpenMP's workers do not exist either.
        """
        self.lock, self.open_blocks = threading.Lock(), 0


_one_thread_each = _OneThreadEach()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_one_thread_each.forget)


def end_idle_threads() -> None:
    """End idle OpenMP workers; the next parallel operation starts new ones.

    Call it before a fork: the workers do not exist in the child, where libgomp would wait for them forever.
    """
    for library in _gnu_openmp():
        if hasattr(library, "omp_pause_resource_all"):
            library.omp_pause_resource_all(OMP_PAUSE_HARD)


@functools.cache
def _gnu_openmp() -> tuple[ctypes.CDLL, ...]:
    """Return the loaded copies of libgomp (torch and others include one); other runtimes survive a fork."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(
        ctypes.CDLL(path) for path in sorted({line.split()[-1] for line in lines if "/libgomp" in line})
    )


def num_threads() -> int:
    """Return torch's thread count as the user set it, even while `run_on_cores` runs in another thread."""
    with _one_thread_each.lock:
        return _one_thread_each.saved if _one_thread_each.open_blocks else torch.get_num_threads()


def run_on_cores(jobs: Sequence[Job], cores: int) -> None:
    """Run every job once on `cores` workers, in list order, with one thread per torch operation.

    Equivalent to:
        for index, job in enumerate(jobs):
            job(index % cores)

    While a profiler or dispatch mode is active the jobs run exactly like that, in sequence on this thread and
    with one thread per operation: same bits, and the scratch of every worker is recorded. Workers inherit
    inference mode; grad mode is off. The first error stops the jobs that have not started and is raised here.
    """
    watched, inference = is_watched(), torch.is_inference_mode_enabled()
    lock = threading.Lock()
    queue = iter(enumerate(jobs))
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        # A new thread starts with the default counts of OpenMP and MKL: without this call its first products
        # would run on all cores, concurrently with the other workers.
        torch.set_num_threads(1)
        # Grad mode and inference mode are per thread; a new thread does not inherit the caller's.
        with torch.inference_mode(inference), torch.no_grad():
            while not failures:
                with lock:
                    index, job = next(queue, (0, None))
                if job is None:
                    return
                try:
                    job(index % cores if watched else worker)
                except BaseException as failure:
                    failures.append(failure)

    with _one_thread_each.block():
        others = [threading.Thread(target=work, args=(n,)) for n in range(1, 1 if watched else cores)]
        for thread in others:
            thread.start()
        work(0)
        for thread in others:
            thread.join()
    if failures:
        raise failures[0]


@functools.cache
def cpu_bfloat16_speedup() -> float:
    """Return the speed of bfloat16 products relative to float32 on this CPU (measured once, milliseconds)."""
    side, times = 256, {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(side, side, dtype=dtype)
        best = float("inf")
        for trial in range(6):
            begin = time.perf_counter()
            torch.mm(x, x)
            elapsed = time.perf_counter() - begin
            # The first call builds the primitive; it is enough to recognize a CPU that emulates bfloat16.
            best = min(best, elapsed) if trial else best
            if trial == 0 and elapsed > 0.05:
                best = elapsed
                break
        times[dtype] = best
    return times[torch.float32] / times[torch.bfloat16]


def cache_folder() -> Path:
    """Return the folder of leanstep's cache, which may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leanstep"


BASE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)


def _flag_sets() -> tuple[tuple[str, ...], ...]:
    """Return sets of flags, of which the first that compiles is used: with glibc's vector functions, without.

    Where torch is limited to AVX2 (`ATEN_CPU_CAPABILITY=avx2`, or an older processor), so is C++.
    """
    march = "-march=haswell" if torch.backends.cpu.get_cpu_capability() == "AVX2" else "-march=native"
    return ((march, "-fopenmp-simd", "-lmvec", "-lm"), (march, "-fopenmp-simd", "-lm"), ("-lm",))


def has_memory(tensor: Tensor) -> bool:
    """Return whether `data_ptr` points to the values: False while tracing, planning or transforming."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and not is_functorch_wrapped_tensor(tensor)
    return plain and not torch.compiler.is_compiling()


def native_wanted() -> bool:
    """Return whether the user allows native code (`LEANSTEP_NATIVE`)."""
    return os.environ.get("LEANSTEP_NATIVE", "1") != "0"


def find_compiler() -> str | None:
    """Return the C++ compiler of this machine: `CXX`, else c++, g++ or clang++; None if there is none."""
    return shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")


def load_library(source: Path, declare: Callable[[ctypes.CDLL], None] | None = None) -> ctypes.CDLL | str:
    """Return the library built from a C++ file, or why that failed; `declare` types its functions."""
    return _load(source, declare) if native_wanted() else "LEANSTEP_NATIVE is 0"


@functools.cache
def _load(source: Path, declare: Callable[[ctypes.CDLL], None] | None) -> ctypes.CDLL | str:
    try:
        library = ctypes.CDLL(str(build_library(source)))
    except (OSError, RuntimeError) as reason:
        return str(reason)
    if declare is not None:
        declare(library)
    return library


def build_library(
    source: Path, flag_sets: Sequence[Sequence[str]] | None = None, folder: Path | None = None
) -> Path:
    """Build or reuse the shared library for this source, these flags, this compiler and this processor.

    Args:
        source: a C++ file.
        flag_sets: compiler arguments after the source; the first set that compiles is used. None: fast
            arithmetic for this processor.
        folder: where it is built. None: a private folder of the user's cache.

    Raises OSError with a one-line message if that fails; it has an `errno` if the folder is the reason.
    """
    compiler = find_compiler()
    if compiler is None:
        raise OSError("no C++ compiler (c++, g++ or clang++) found")
    commands = [[*BASE_FLAGS, *extra] for extra in _flag_sets()] if flag_sets is None else list(flag_sets)
    # Machines may share a home folder: code for one processor must not be loaded on another.
    content = f"{source.read_text(encoding='utf-8')}{commands}{_version(compiler)}{_processor()}"
    name = f"{source.parent.name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"
    target = (folder or _private_folder()) / name
    if not target.exists():
        _compile(compiler, source, commands, target)
    return target


def _private_folder() -> Path:
    """Return the folder for libraries: this user owns it and no other user may write it."""
    folder = cache_folder() / "native"
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if not hasattr(os, "getuid") or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EACCES, "expected a folder that only this user can write", str(folder))
    return folder


def _compile(compiler: str, source: Path, commands: Sequence[Sequence[str]], target: Path) -> None:
    said = ""
    for flags in commands:
        handle, name = tempfile.mkstemp(suffix=".part", dir=target.parent)
        try:
            os.close(handle)
            # Libraries must follow the file that needs them; the position of other flags does not matter.
            code, said = _run([compiler, str(source), "-o", name, *flags])
            if code == 0:
                Path(name).replace(target)
                return
        finally:
            Path(name).unlink(missing_ok=True)
    raise OSError(f"{compiler} failed: {(said.strip().splitlines() or ['no message'])[0]}")


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Run a compiler; return its exit code and its messages. An exception ends it with its own processes."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            said = process.communicate()[1]
        except BaseException:
            # A compiler removes its temporary files on SIGTERM.
            os.killpg(process.pid, signal.SIGTERM)
            raise
    return process.returncode, said


def _version(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return compiler + done.stdout


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    return next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
