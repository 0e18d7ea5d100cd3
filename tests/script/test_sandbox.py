"""In a sandbox a script writes into a copy of the working directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from leanstep import cli
from leanstep.files import BadInput
from leanstep.script import sandbox

SCRIPT = """
from pathlib import Path
import torch
Path("log.txt").write_text("written")
Path("data/table.csv").write_text("changed")
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "table.csv").write_text("original")
    (folder / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(folder)
    return folder


def test_prove_leaves_the_files_as_they_are_and_writes_its_own(project):
    script = str(project / "train.py")  # an absolute path leads into the copy as well
    assert cli.run(["prove", "train.py", script, "--sandbox", "--json", "out.json"]) == 0
    assert Path.cwd() == project
    assert (project / "data" / "table.csv").read_text() == "original"
    assert sorted(path.name for path in project.iterdir()) == ["data", "out.json", "train.py"]


def test_without_it_writes_are_real(project):
    assert cli.run(["prove", "train.py", "train.py"]) == 0
    assert (project / "data" / "table.csv").read_text() == "changed"


def test_links_stay_inside_or_are_copied(project, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "weights").write_text("original")
    (project / "inside").symlink_to("data")
    (project / "outside").symlink_to(elsewhere)
    (project / "loop").symlink_to("..")
    (project / "nowhere").symlink_to("missing")
    with sandbox.sandbox() as copy:
        assert Path.cwd() == copy
        Path("inside/table.csv").write_text("changed")
        Path("outside/weights").write_text("changed")
        assert Path("data/table.csv").read_text() == "changed"
        assert not Path("loop").exists()
    assert not copy.exists()
    assert (elsewhere / "weights").read_text() == "original"
    assert (project / "data" / "table.csv").read_text() == "original"


def test_too_little_room_is_one_line(project, monkeypatch):
    monkeypatch.setattr(sandbox, "_size", lambda folder, seen: 1 << 60)
    with pytest.raises(BadInput, match="--sandbox: the working directory holds"), sandbox.sandbox():
        pass
    assert Path.cwd() == project
