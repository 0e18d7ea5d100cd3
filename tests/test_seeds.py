"""`dev/seeds.md`: every row names code, a test and a command that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from leanstep.cli import COMMANDS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "dev" / "seeds.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| on the list")
]


def test_the_three_write_ups_are_there():
    assert PAGE.count("\n| on the list |") == 3 and len(ROWS) >= 35


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_code_tests_and_commands_exist(row):
    text = " | ".join(row)
    code, tests = row[2], row[3]
    for path in re.findall(r"`((?:leanstep|recipes|benchmarks|dev|examples|tests)/[\w./-]*)", text):
        assert (ROOT / path).exists(), path
    for page in re.findall(r"\]\(\.\./(docs/[\w]+\.md)", text):
        assert (ROOT / page).exists(), page
    assert re.search(r"`(leanstep|recipes|benchmarks|dev|examples)/", code), code
    assert re.search(r"`tests/", tests), tests
    for module in re.findall(r"python -m ((?:benchmarks|recipes|dev)[\w.]*)", text):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module
    for command in re.findall(r"`(?:\w+=\S+ )?leanstep (\w[\w-]*)", text):
        assert command in COMMANDS, command
