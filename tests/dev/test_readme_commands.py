"""Every command of the README runs in the environment that the README makes.

Of the set-up commands (git, make, pip) the targets and extras are checked. The others run as they are
written, next to a copy of the examples.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from contract import OPTIONS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """The lines of the command blocks, without comments, prompts and printed output."""
    lines = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE):
        shown = block.splitlines() if not language else []
        if not shown:
            continue
        if shown[0].startswith("$ "):
            shown = [shown[0][2:]]
        lines += [line.partition("  #")[0].strip() for line in shown]
    return [line for line in lines if line]


LEANSTEP = [line for line in commands() if line.startswith("leanstep ")]


def test_the_first_commands_set_everything_up():
    first = commands()[:3]
    assert first[0].startswith("git clone ") and first[1:] == ["make demo", "make test"]
    assert ". .venv/bin/activate" in commands()
    assert len(LEANSTEP) >= 4
    known = {*first, ". .venv/bin/activate", *LEANSTEP}
    assert set(commands()) == known, "a command that no test runs"


def test_the_targets_and_extras_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z][\w-]*)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    named = re.search(r"\[Extras\]\(.*?\):(.*?)\.\s", README, re.DOTALL)
    assert named and {"all", "integrations"} <= set(re.findall(r"`(\w+)`", named[1])) <= extras


@pytest.mark.parametrize("line", LEANSTEP)
def test_a_command_runs_as_it_is_written(line: str, tmp_path: Path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run(
        [sys.executable, "-m", *shlex.split(line)],
        capture_output=True, text=True, timeout=280, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    expected = {"prove": "the same update", "rehearse": "predicted on h100: fits", "diagnose": "dead-rows"}
    assert expected[line.split()[1]] in ran.stdout


@pytest.mark.parametrize("name", ["SKILL.md", "dev/try_dist"])
def test_commands_elsewhere_have_these_options(name: str):
    text = (ROOT / name).read_text(encoding="utf-8")
    lines = re.findall(r'(?:`|bin/)leanstep"? ([a-z]+)(.*?)(?: -- |`|$)', text, re.MULTILINE)
    assert len(lines) >= 5
    for command, rest in lines:
        assert set(re.findall(r" (--[a-z-]+)", rest)) <= set(OPTIONS[command].split()), (command, rest)
