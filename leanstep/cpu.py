"""Machine tuning for CPUs, all of it: one job per core, zeros that cost nothing, C++ built once per machine.

Jobs. Two threads on one matrix product synchronise after every call; two jobs on one thread each synchronise
once, at the end. torch releases the interpreter lock inside its operations, so Python threads are enough.

Zeros. torch.zeros writes every page; memory straight from the system is zero already, and takes up no more
pages than are written.

C++. A source file is compiled on first use, in a second or two. The library stays in the user's cache, named
after source, compiler, flags and processor, beside its sha256: a file that is damaged, or that somebody else
could have written, is never loaded. `LEANSTEP_NATIVE=0` keeps every path in torch; so does a machine
without a compiler.
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

# OpenMP's name for it: threads end, not only rest.
OMP_PAUSE_HARD = 2

# Called with the number of its worker: scratch memory may be kept per worker.
Job = Callable[[int], None]


def is_watched() -> bool:
    """Whether a profiler or a dispatch mode is on: they see the calling thread only."""
    return torch.autograd._profiler_enabled() or torch._C._len_torch_dispatch_stack() > 0


class _OneThreadEach:
    """torch works with one thread per operation while at least one block is open, in any Python thread.

    The count is process-wide, so the first block saves it and the last one restores it: two calls that
    overlap must not take each other's single thread for the user's setting.
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
        """In a forked child: the threads that held the lock or a block do not exist here.

        The child keeps the single thread it was forked with: OpenMP's workers did not survive either.
        """
        self.lock, self.open_blocks = threading.Lock(), 0


_one_thread_each = _OneThreadEach()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_one_thread_each.forget)


def one_thread_each() -> contextlib.AbstractContextManager[None]:
    """torch works with one thread per operation inside this block.

    Around calls of `run_on_cores` and what lies between them: a thread that torch wakes there for a vector
    operation spins for milliseconds after it (libgomp), on a core of the next call.
    """
    return _one_thread_each.block()


def end_idle_threads() -> None:
    """End OpenMP's workers that have nothing to do; the next parallel operation starts new ones.

    Before a fork: the child has none of them, and GNU's library would wait for them there for ever.
    """
    for library in _gnu_openmp():
        if hasattr(library, "omp_pause_resource_all"):
            library.omp_pause_resource_all(OMP_PAUSE_HARD)


@functools.cache
def _gnu_openmp() -> tuple[ctypes.CDLL, ...]:
    """The loaded copies of GNU's OpenMP (torch and others bring one); other runtimes survive a fork."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    return tuple(
        ctypes.CDLL(path) for path in sorted({line.split()[-1] for line in lines if "/libgomp" in line})
    )


def num_threads() -> int:
    """torch's thread count as the user set it, also while `run_on_cores` is at work in another thread."""
    with _one_thread_each.lock:
        return _one_thread_each.saved if _one_thread_each.open_blocks else torch.get_num_threads()


def run_on_cores(jobs: Sequence[Job], cores: int) -> None:
    """Run every job once on `cores` workers, in the order of the list, with one thread per torch operation.

    Equivalent to:
        for index, job in enumerate(jobs):
            job(index % cores)

    While a profiler or dispatch mode watches this thread the jobs do run like that, in a row on this thread
    and with one thread per operation: same bits, and the scratch of every worker is seen. Workers inherit
    inference mode; grad mode is off. The first error stops the jobs that have not begun and is raised here.
    """
    watched, inference = is_watched(), torch.is_inference_mode_enabled()
    lock = threading.Lock()
    queue = iter(enumerate(jobs))
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        # A new thread has OpenMP's and MKL's own counts until torch is told there: its first products would
        # run on all cores beside those of the other workers.
        torch.set_num_threads(1)
        # Grad mode and inference mode belong to a thread; a new one has neither of the caller's.
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
    """How many times faster this CPU multiplies bfloat16 than float32 (measured once, some milliseconds)."""
    side, times = 256, {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(side, side, dtype=dtype)
        best = float("inf")
        for trial in range(6):
            begin = time.perf_counter()
            torch.mm(x, x)
            elapsed = time.perf_counter() - begin
            # The first call builds the primitive; a CPU that emulates bfloat16 is recognised by then.
            best = min(best, elapsed) if trial else best
            if trial == 0 and elapsed > 0.05:
                best = elapsed
                break
        times[dtype] = best
    return times[torch.float32] / times[torch.bfloat16]


def cache_folder() -> Path:
    """Where leanstep keeps what is worth making once per machine: `LEANSTEP_CACHE`, or the user's cache.

    Where that cannot be written, a folder of this user's under the temporary one.
    """
    override = os.environ.get("LEANSTEP_CACHE")
    if override:
        return Path(override)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "leanstep"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leanstep"
    return folder if can_write(folder) else _temporary_cache()


def can_write(folder: Path) -> bool:
    """Whether this user can make or fill the folder, judged by the nearest one that exists."""
    # os.access: Path.exists raises where a folder on the way may not be entered.
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


# Below this torch's allocator has the pages at hand.
LAZY_BYTES = 4 << 20


def sparse_zeros(like: Tensor) -> Tensor:
    """Contiguous zeros of the same shape, of which few will be written.

    Equivalent to:
        zeros = torch.zeros_like(like, memory_format=torch.contiguous_format)

    Large ones on a CPU come as pages that the system fills in at their first touch: a [V, D] gradient with a
    hundredth of its rows written costs about a hundredth. While a profiler or dispatch mode watches, torch
    makes them, so that their bytes are counted.
    """
    num_bytes = like.numel() * like.element_size()
    plain = like.device.type != "cpu" or not has_memory(like) or is_watched()
    if plain or num_bytes < LAZY_BYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros_like(like, memory_format=torch.contiguous_format)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The tensor keeps the mapping alive, and its end unmaps it.
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
# The first set that compiles is used: vector functions of glibc, else plain ones.
FLAG_SETS = (
    ("-march=native", "-fopenmp-simd", "-lmvec", "-lm"),
    ("-march=native", "-fopenmp-simd", "-lm"),
    ("-lm",),
)


def has_memory(tensor: Tensor) -> bool:
    """Whether `data_ptr` leads to the values: not while tracing, planning or transforming."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and not is_functorch_wrapped_tensor(tensor)
    return plain and not torch.compiler.is_compiling()


def native_wanted() -> bool:
    """Whether the user allows code that is not torch's."""
    return os.environ.get("LEANSTEP_NATIVE", "1") != "0"


def find_compiler() -> str | None:
    """The C++ compiler of this machine: `CXX`, else c++, g++ or clang++; None where there is none."""
    return shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")


def load_library(source: Path, declare: Callable[[ctypes.CDLL], None] | None = None) -> ctypes.CDLL | str:
    """The library built from a C++ file, or the reason why there is none; `declare` types its functions."""
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
    """The shared library for this source, these flags, this compiler and this processor.

    Args:
        source: a C++ file.
        flag_sets: what follows the source on the compiler's command line; the first set that compiles is
            used. None: fast arithmetic for this processor.

    Raises OSError with one line where it cannot be built. A cache that cannot be written, or that others can
    write, is passed over for a private temporary folder.
    """
    compiler = find_compiler()
    if compiler is None:
        raise OSError("no C++ compiler (c++, g++ or clang++) found")
    commands = [[*BASE_FLAGS, *extra] for extra in FLAG_SETS] if flag_sets is None else list(flag_sets)
    # A home folder may be shared by machines: code for one processor must not reach another.
    made_of = f"{source.read_text(encoding='utf-8')}{compiler}{commands}{_processor()}"
    name = f"{source.parent.name}-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    # A folder of its own: the cache itself may be one that a group shares.
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
        made = Path(name)
        try:
            # Libraries follow the file that needs them, other flags may stand anywhere.
            command = [compiler, str(source), "-o", name, *flags]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                made.chmod(0o700)
                _write_digest(made, target)
                made.replace(target)
                return target
        finally:
            made.unlink(missing_ok=True)
        said = (done.stderr.strip().splitlines() or ["no message"])[0]
    raise OSError(f"{compiler} failed: {said}")


def _digest_of(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _write_digest(made: Path, target: Path) -> None:
    """The digest goes first: a library without its own digest beside it is built again, not loaded."""
    handle, name = tempfile.mkstemp(suffix=".sha256", dir=target.parent)
    with os.fdopen(handle, "w") as file:
        file.write(hashlib.sha256(made.read_bytes()).hexdigest())
    Path(name).replace(_digest_of(target))


def _is_intact(library: Path) -> bool:
    """Whether the file is the one that was built, byte for byte, and only this user could have changed it.

    A truncated library does not fail to load: it kills the process with a bus error at its first use.
    """
    try:
        if not (_is_private(library) and _is_private(library.parent)):
            return False
        expected = _digest_of(library).read_text()
        return hashlib.sha256(library.read_bytes()).hexdigest() == expected
    except (OSError, UnicodeDecodeError):
        return False


def _is_private(path: Path) -> bool:
    """Whether this user (or root) owns the path and nobody else may write it; always so on Windows."""
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
