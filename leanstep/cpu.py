"""CPU tuning: one job per core, lazily allocated zeros, C++ built once per machine.

Jobs. Two threads on one matrix product synchronize after every call; two jobs with one thread each
synchronize once, at the end. torch releases the GIL inside its operations, so Python threads are enough.

Zeros. torch.zeros writes every page. Memory mapped from the system is already zero and uses only the pages
that are written.

C++. A source file is compiled on first use, in a second or two. The library is stored in the user's cache,
named after source, compiler, flags and processor, next to its sha256. A damaged file, or one that another
user could have written, is never loaded. With `LEANSTEP_NATIVE=0`, or without a compiler, every path uses
torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import platform
import shutil
import subprocess
import sys
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


def one_thread_each() -> contextlib.AbstractContextManager[None]:
    """Limit torch to one thread per operation inside this block.

    Use it around several calls of `run_on_cores`: a thread that torch uses for an operation between them
    spins for milliseconds afterwards (libgomp), on a core that the next call needs.
    """
    return _one_thread_each.block()


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
    """Return the folder of leanstep's per-machine cache: `LEANSTEP_CACHE`, or the user's cache.

    If that is not writable, a private folder in the temporary directory.
    """
    override = os.environ.get("LEANSTEP_CACHE")
    if override:
        return Path(override)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "leanstep"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leanstep"
    return folder if can_write(folder) else _temporary_cache()


def can_write(folder: Path) -> bool:
    """Return whether this user can create or write the folder, judged by the nearest existing parent."""
    # os.access: Path.exists raises if a parent folder is not accessible.
    while not os.access(folder, os.F_OK) and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK)


@functools.cache
def _temporary_cache() -> Path:
    shared = Path(tempfile.gettempdir()) / f"leanstep-cache-{os.getuid()}"
    with contextlib.suppress(OSError):
        shared.mkdir(mode=0o700, exist_ok=True)
        if not shared.is_symlink() and _is_private(shared) and os.access(shared, os.W_OK):
            return shared
    return Path(tempfile.mkdtemp(prefix="leanstep-cache-"))


# Below this size torch's allocator reuses pages that it already has.
LAZY_BYTES = 4 << 20


def sparse_zeros(like: Tensor) -> Tensor:
    """Return contiguous zeros of the same shape, of which only a few will be written.

    Equivalent to:
        zeros = torch.zeros_like(like, memory_format=torch.contiguous_format)

    On a CPU, large tensors use pages that the system allocates at the first write: a [V, D] gradient with a
    hundredth of its rows written costs about a hundredth. While a profiler or dispatch mode is active, torch
    allocates the tensor, so that its bytes are counted.
    """
    num_bytes = like.numel() * like.element_size()
    plain = like.device.type != "cpu" or not has_memory(like) or is_watched()
    if plain or num_bytes < LAZY_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The tensor references the mapping, which is unmapped when the tensor is freed.
    return torch.frombuffer(pages, dtype=like.dtype).view(like.shape)


BASE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
# The first set that compiles is used: glibc's vector functions if available, else scalar ones.
FLAG_SETS = (
    ("-march=native", "-fopenmp-simd", "-lmvec", "-lm"),
    ("-march=native", "-fopenmp-simd", "-lm"),
    ("-lm",),
)


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


def build_library(source: Path, flag_sets: Sequence[Sequence[str]] | None = None) -> Path:
    """Build or reuse the shared library for this source, these flags, this compiler and this processor.

    Args:
        source: a C++ file.
        flag_sets: compiler arguments after the source; the first set that compiles is used. None: fast
            arithmetic for this processor.

    Raises OSError with a one-line message if the build fails. If the cache is not writable, or if others can
    write it, a private temporary folder is used instead.
    """
    compiler = find_compiler()
    if compiler is None:
        raise OSError("no C++ compiler (c++, g++ or clang++) found")
    commands = [[*BASE_FLAGS, *extra] for extra in FLAG_SETS] if flag_sets is None else list(flag_sets)
    # Machines may share a home folder: code for one processor must not be loaded on another.
    content = f"{source.read_text(encoding='utf-8')}{compiler}{commands}{_processor()}"
    name = f"{source.parent.name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"
    # A subfolder: a group of users may share the cache itself.
    folder = cache_folder() / "native"
    target = folder / name
    if _is_intact(target):
        return target
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_private(folder):
            raise PermissionError(f"{folder} can be written by others")
        return _compile(compiler, source, commands, target)
    except PermissionError:
        private = _temporary_cache() / name
        return private if _is_intact(private) else _compile(compiler, source, commands, private)


def _compile(compiler: str, source: Path, commands: Sequence[Sequence[str]], target: Path) -> Path:
    said = ""
    for flags in commands:
        handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
        os.close(handle)
        built = Path(name)
        try:
            # Libraries must follow the file that needs them; the position of other flags does not matter.
            command = [compiler, str(source), "-o", name, *flags]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                built.chmod(0o700)
                _write_digest(built, target)
                built.replace(target)
                return target
        finally:
            built.unlink(missing_ok=True)
        said = (done.stderr.strip().splitlines() or ["no message"])[0]
    raise OSError(f"{compiler} failed: {said}")


def _digest_of(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _write_digest(built: Path, target: Path) -> None:
    """Write the digest before the library: a library without a matching digest is rebuilt, not loaded."""
    handle, name = tempfile.mkstemp(suffix=".sha256", dir=target.parent)
    with os.fdopen(handle, "w") as file:
        file.write(hashlib.sha256(built.read_bytes()).hexdigest())
    Path(name).replace(_digest_of(target))


def _is_intact(library: Path) -> bool:
    """Return whether the file is byte for byte the one that was built and only this user can change it.

    A truncated library loads, but its first use ends the process with a bus error.
    """
    try:
        if not (_is_private(library) and _is_private(library.parent)):
            return False
        expected = _digest_of(library).read_text()
        return hashlib.sha256(library.read_bytes()).hexdigest() == expected
    except (OSError, UnicodeDecodeError):
        return False


def _is_private(path: Path) -> bool:
    """Return whether this user (or root) owns the path and no other user may write it; True on Windows."""
    if not hasattr(os, "getuid"):
        return True
    status = path.stat()
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o022


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = [platform.processor()]
    return next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
