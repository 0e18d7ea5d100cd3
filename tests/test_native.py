"""C++ sources are built once per machine; whatever prevents it is named and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from leanstep import native

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(monkeypatch, tmp_path):
    """A small C++ file, an empty cache beside it and nothing loaded."""
    monkeypatch.setenv("LEANSTEP_CACHE", str(tmp_path / "cache"))
    native._load.cache_clear()
    path = tmp_path / "things" / "native.cpp"
    path.parent.mkdir()
    path.write_text(SOURCE)
    yield path
    native._load.cache_clear()


def built(source):
    return sorted((source.parent.parent / "cache").iterdir())


def test_a_library_is_built_once(source):
    assert native.load(source).answer() == 42
    (library,) = built(source)
    before = library.stat().st_mtime_ns
    native._load.cache_clear()
    assert native.load(source).answer() == 42
    assert [path.stat().st_mtime_ns for path in built(source)] == [before]
    assert library.name.startswith("things-")


def test_another_source_is_another_library(source):
    assert native.load(source).answer() == 42
    source.write_text(SOURCE.replace("42", "43"))
    native._load.cache_clear()
    assert native.load(source).answer() == 43 and len(built(source)) == 2


def test_no_compiler_is_named(source, monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert "no C++ compiler" in native.load(source)


def test_a_compiler_that_fails_is_named_and_leaves_nothing_behind(source, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    assert "false failed" in native.load(source)
    assert built(source) == []


def test_a_user_can_opt_out(source, monkeypatch):
    monkeypatch.setenv("LEANSTEP_NATIVE", "0")
    assert native.load(source) == "LEANSTEP_NATIVE is 0"
    assert not (source.parent.parent / "cache").exists()


def test_tensors_without_memory_are_recognised():
    x = torch.zeros(3)
    assert native.has_memory(x) and native.has_memory(torch.nn.Parameter(x))
    with FakeTensorMode() as mode:
        assert not native.has_memory(mode.from_tensor(x))
    seen = []
    torch.func.vmap(lambda row: seen.append(native.has_memory(row)) or row)(torch.zeros(2, 3))
    assert seen == [False]
