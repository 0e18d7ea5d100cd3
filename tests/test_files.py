"""A file is written whole or not at all."""

from __future__ import annotations

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
