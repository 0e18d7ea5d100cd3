"""A program runs as Python itself would run it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leanstep.files import BadInput
from leanstep.tape.children import call_in_child
from leanstep.tape.run import Program, run_script

SAYS = """import json, sys
facts = [sys.argv, sys.path[0], __file__, __name__]
print(json.dumps(facts))
"""


def _said(name: str, module: bool, folder: str) -> str:
    target = Path(folder) / "said"
    with target.open("w") as file, contextlib.redirect_stdout(file):
        run_script(Program.find(name, module), ["--a", "1"], contextlib.nullcontext())
    return target.read_text()


@pytest.mark.parametrize("name", ["train.py", "folder", "-m package.main"])
def test_arguments_path_and_file_are_pythons(tmp_path: Path, monkeypatch, name: str):
    monkeypatch.chdir(tmp_path)
    for path in ("train.py", "folder/__main__.py", "package/main.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(SAYS)
    module = name.startswith("-m ")
    command = [sys.executable, *name.split(), "--a", "1"]
    expected = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    got = call_in_child(_said, name.removeprefix("-m "), module, str(tmp_path), fork=True)
    assert json.loads(got) == json.loads(expected)


def test_a_folder_without_main_runs_its_train_py(tmp_path: Path):
    (tmp_path / "train.py").write_text(SAYS)
    assert Program.find(str(tmp_path)).file == tmp_path / "train.py"
    (tmp_path / "__main__.py").write_text(SAYS)
    assert Program.find(str(tmp_path)).file == tmp_path / "__main__.py"


def test_what_cannot_be_run_is_one_line(tmp_path: Path):
    with pytest.raises(BadInput, match="SCRIPT: no such file: "):
        Program.find(str(tmp_path / "none.py"))
    with pytest.raises(BadInput, match=r"has no train\.py and no __main__\.py"):
        Program.find(str(tmp_path))


@pytest.mark.parametrize(
    "call", ["os._exit(3)", "os.execv('/bin/true', ['true'])", "os.execlp('true', 'true')"]
)
def test_a_script_that_ends_its_process_ends_only_itself(tmp_path, capfd, call):
    script = tmp_path / "leaves.py"
    script.write_text(f"import os\n{call}\n")
    before = os._exit, os.execv, os.execve
    outcome = run_script(Program(str(script)), [], contextlib.nullcontext())
    assert outcome.code == (3 if "_exit" in call else 1)
    assert "leanstep: the script called os." in capfd.readouterr().err
    assert (os._exit, os.execv, os.execve) == before


def test_a_fork_of_the_script_leaves_as_ever(tmp_path):
    script = tmp_path / "forks.py"
    forks = "import os, sys\npid = os.fork()\nif not pid:\n    os._exit(7)\n"
    script.write_text(forks + "sys.exit(os.waitpid(pid, 0)[1] >> 8)\n")
    assert run_script(Program(str(script)), [], contextlib.nullcontext()).code == 7


def test_an_exception_that_cannot_be_printed_has_a_name(tmp_path):
    script = tmp_path / "odd.py"
    script.write_text(
        "class Odd(Exception):\n    def __str__(self):\n        raise ValueError\n\nraise Odd\n"
    )
    outcome = run_script(Program(str(script)), [], contextlib.nullcontext())
    assert (outcome.exception, outcome.said) == ("Odd", "Odd: (its message cannot be printed)")
