"""A file is written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from leanstep import files
from leanstep.files import BadInput, write_text


def test_write_replaces_and_leaves_nothing_beside_it(tmp_path: Path):
    target = tmp_path / "page.html"
    write_text(target, "old")
    target.chmod(0o750)
    write_text(target, "new ×")
    assert target.stat().st_mode & 0o777 == 0o750
    assert target.read_text(encoding="utf-8") == "new ×"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_missing_folder_is_one_line_that_names_the_argument(tmp_path: Path):
    with pytest.raises(BadInput, match=r"--html: cannot write to .*nowhere: No such file"):
        write_text(tmp_path / "nowhere" / "page.html", "x", "--html")


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_in_the_middle_keeps_the_old_file(tmp_path: Path, monkeypatch, failure: BaseException):
    target = tmp_path / "page.html"
    write_text(target, "old")

    def fail(descriptor: int) -> None:
        raise failure

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(BadInput if isinstance(failure, OSError) else KeyboardInterrupt):
        write_text(target, "new")
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_a_link_stays_and_its_target_is_replaced_whole(tmp_path: Path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to("real")
    write_text(link, "new")
    assert link.is_symlink() and real.read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_fifo_is_written_through(tmp_path: Path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    write_text(fifo, "new")
    assert os.read(reader, 10) == b"new"
    os.close(reader)
    assert stat.S_ISFIFO(fifo.lstat().st_mode)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names a descriptor through /proc")
def test_a_file_behind_a_descriptor_is_added_to(tmp_path: Path):
    log = tmp_path / "log"
    with log.open("w") as file:
        file.write("before\n")
        file.flush()
        write_text(f"/proc/self/fd/{file.fileno()}", "new\n")
    assert log.read_text() == "before\nnew\n"
