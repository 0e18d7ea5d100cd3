"""Jobs run once each and restore torch's threads; C++ is built once, into a private folder."""

from __future__ import annotations

import multiprocessing
import os
import platform
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from leanstep import cpu
from leanstep.cpu import (
    cache_folder,
    is_watched,
    num_threads,
    run_on_cores,
)
from leanstep.measure.peaks import measure_peak
from leanstep.tape.children import start, wait_all

needs_compiler = pytest.mark.skipif(cpu.find_compiler() is None, reason="no C++ compiler")
SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(monkeypatch, tmp_path):
    """A small C++ file, an empty cache beside it and nothing loaded, whatever the session says about C++."""
    monkeypatch.delenv("LEANSTEP_NATIVE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cpu._load.cache_clear()
    path = tmp_path / "things" / "native.cpp"
    path.parent.mkdir()
    path.write_text(SOURCE)
    yield path
    cpu._load.cache_clear()


def built(source):
    """Everything in the cache, temporary files too."""
    return sorted((source.parent.parent / "cache" / "leanstep" / "native").iterdir())


@needs_compiler
def test_a_library_is_built_once(source):
    assert cpu.load_library(source).answer() == 42
    (library,) = built(source)
    before = library.stat().st_mtime_ns
    cpu._load.cache_clear()
    assert cpu.load_library(source).answer() == 42
    assert [path.stat().st_mtime_ns for path in built(source)] == [before]
    assert library.name.startswith("things-") and library.parent.stat().st_mode & 0o777 == 0o700


@needs_compiler
def test_another_source_is_another_library(source):
    assert cpu.load_library(source).answer() == 42
    source.write_text(SOURCE.replace("42", "43"))
    cpu._load.cache_clear()
    assert cpu.load_library(source).answer() == 43 and len(built(source)) == 2


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="not an x86 processor")
def test_code_uses_avx512_only_where_torch_does(source, monkeypatch):
    source.write_text(
        """\
extern "C" int answer() {
#if defined(__AVX512F__)
    return 512;
#elif defined(__AVX2__) && defined(__FMA__)
    return 2;
#else
    return 0;
#endif
}
"""
    )
    # Under `make test-avx2` this is AVX2 on every machine that has it.
    torchs = torch.backends.cpu.get_cpu_capability()
    if torchs in ("AVX2", "AVX512"):
        assert cpu.load_library(source).answer() == {"AVX2": 2, "AVX512": 512}[torchs]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    # The flags are part of the name: code for AVX-512 in the same cache is not loaded.
    cpu._load.cache_clear()
    assert cpu.load_library(source).answer() == 2


def test_no_compiler_is_named(source, monkeypatch):
    monkeypatch.setattr(cpu.shutil, "which", lambda name: None)
    assert "no C++ compiler" in cpu.load_library(source)


def test_a_compiler_that_fails_is_named_and_leaves_nothing_behind(source, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    assert "false failed" in cpu.load_library(source)
    assert built(source) == []


def test_a_user_can_opt_out(source, monkeypatch):
    monkeypatch.setenv("LEANSTEP_NATIVE", "0")
    assert cpu.load_library(source) == "LEANSTEP_NATIVE is 0"
    assert not (source.parent.parent / "cache").exists()


def test_tensors_without_memory_are_recognised():
    x = torch.zeros(3)
    assert cpu.has_memory(x) and cpu.has_memory(torch.nn.Parameter(x))
    with FakeTensorMode() as mode:
        assert not cpu.has_memory(mode.from_tensor(x))
    seen = []
    torch.func.vmap(lambda row: seen.append(cpu.has_memory(row)) or row)(torch.zeros(2, 3))
    assert seen == [False]


@needs_compiler
@pytest.mark.parametrize("other", ["processor", "compiler"])
def test_another_machine_with_the_same_home_builds_its_own(source, monkeypatch, other):
    first = cpu.build_library(source)
    name, value = ("_processor", lambda: "other") if other == "processor" else ("_version", lambda _: "other")
    monkeypatch.setattr(cpu, name, value)
    assert sorted([first, cpu.build_library(source)]) == built(source) and len(built(source)) == 2


def test_a_folder_that_others_can_write_is_not_used(source):
    folder = source.parent.parent / "cache" / "leanstep" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert "only this user" in cpu.load_library(source)
    assert built(source) == []


def test_a_folder_of_another_user_is_not_used(source, monkeypatch):
    other = os.getuid() + 1
    monkeypatch.setattr(cpu.os, "getuid", lambda: other)
    assert "only this user" in cpu.load_library(source)
    assert built(source) == []


def test_a_folder_that_cannot_be_made_is_not_used(source):
    (source.parent.parent / "cache").write_text("a file")
    assert "cache" in cpu.load_library(source)


def test_an_interrupted_build_leaves_nothing_behind(source, monkeypatch, tmp_path):
    """The compiler, and a process that it started, end too."""
    number = tmp_path / "number"
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit\nsleep 300 &\necho $! > {number}\nwait\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    communicate = subprocess.Popen.communicate

    def interrupted(self, *args, **kwargs):
        if self.args[1] == "--version":
            return communicate(self, *args, **kwargs)
        while not (number.exists() and number.read_text().endswith("\n")):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cpu.load_library(source)
    assert built(source) == []
    status, deadline = Path(f"/proc/{number.read_text().strip()}/stat"), time.monotonic() + 60
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_overlapping_calls_from_two_threads_give_the_threads_back():
    torch.set_num_threads(2)
    try:
        first_in, second_in, seen = threading.Event(), threading.Event(), []

        def outer(_core):
            first_in.set()
            assert second_in.wait(20)

        def inner(_core):
            second_in.set()
            seen.append(num_threads())

        other = threading.Thread(target=lambda: run_on_cores([outer], 1))
        other.start()
        assert first_in.wait(20)
        # The first call ends while the second is running; the second ends last.
        run_on_cores([inner, lambda _core: other.join(20)], 1)
        assert seen == [2] and torch.get_num_threads() == 2 and num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_inside_a_call_can_run_jobs():
    children = []

    def child():
        done = []
        run_on_cores([lambda _core: done.append(1)] * 3, 2)
        os._exit(0 if done == [1, 1, 1] else 1)

    def job(_core):
        # The worst case: another thread holds the lock of the thread count.
        with cpu._one_thread_each.lock:
            children.append(multiprocessing.get_context("fork").Process(target=child))
            children[-1].start()

    run_on_cores([job], 1)
    children[0].join(30)
    hung = children[0].is_alive()
    children[0].kill()
    assert not hung and children[0].exitcode == 0


def test_every_job_runs_once_with_one_thread_and_torch_threads_are_restored():
    threads, done, cores = torch.get_num_threads(), [0] * 20, set()

    def job(index, core):
        done[index] += 1
        cores.add(core)
        assert torch.get_num_threads() == 1 and not torch.is_grad_enabled()

    run_on_cores([lambda core, i=i: job(i, core) for i in range(20)], 3)
    assert done == [1] * 20 and cores <= {0, 1, 2}
    assert torch.get_num_threads() == threads and torch.is_grad_enabled()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_child_that_was_forked_after_parallel_work_works_in_parallel():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.ones(1 << 20).add_(1)
        child = start(lambda: x.add_(1).sum(), (), fork=True)
        wait_all([child], 60)
    finally:
        torch.set_num_threads(threads)
    assert child.poll() == 0 and x.add_(1).sum() == 3 << 20


def test_workers_multiply_with_one_thread_from_their_first_product_on():
    """OpenMP's thread count is per thread, and torch sets it only on request: a product does not."""
    omp = next((library for library in cpu._gnu_openmp() if "torch" in library._name), None)
    if omp is None:
        pytest.skip("torch brought no OpenMP of GNU's along")
    seen = []
    meeting = threading.Barrier(2, timeout=20)

    def job(_core):
        meeting.wait()
        seen.append(omp.omp_get_max_threads())

    run_on_cores([job] * 2, 2)
    assert seen == [1, 1]


def test_an_error_stops_the_rest_and_reaches_the_caller():
    threads, begun = torch.get_num_threads(), []

    def job(core):
        begun.append(core)
        raise ValueError("broken job")

    with pytest.raises(ValueError, match="broken job"):
        run_on_cores([job] * 50, 2)
    assert len(begun) <= 2 and torch.get_num_threads() == threads


def test_inference_mode_reaches_every_core():
    with torch.inference_mode():
        x = torch.zeros(4)
        run_on_cores([lambda core, i=i: x[i].add_(1) for i in range(4)], 2)
    assert x.tolist() == [1.0] * 4


def test_a_profiler_sees_the_memory_of_every_core():
    scratch, watched = {}, []

    def job(core):
        if core not in scratch:
            scratch[core] = torch.empty(1 << 18)

    def step():
        watched.append(is_watched())
        run_on_cores([job] * 4, 2)
        scratch.clear()
        return {}

    assert measure_peak(step, {}).peak_bytes == 2 * 4 * (1 << 18)
    assert watched == [False, True]


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "leanstep"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "leanstep"


@pytest.mark.parametrize(
    ("bfloat16_s", "speedup"),
    [
        # The first call builds the primitive and never counts; of the others the fastest does.
        ([1e-4, 3e-3, 1e-3, 2e-3, 5e-3, 4e-3], 4.0),
        # An emulated type is recognised by its first call: there is no second one.
        ([0.2], 0.02),
    ],
)
def test_the_bfloat16_speedup_compares_the_fastest_calls(monkeypatch, bfloat16_s, speedup):
    now = [0.0]
    durations = {torch.float32: iter([2e-4, 6e-3, 5e-3, 4e-3, 7e-3, 8e-3]), torch.bfloat16: iter(bfloat16_s)}

    def product(x, y):
        now[0] += next(durations[x.dtype])

    monkeypatch.setattr(cpu, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(torch, "mm", product)
    assert cpu.cpu_bfloat16_speedup.__wrapped__() == pytest.approx(speedup)
    assert not any(list(rest) for rest in durations.values())
