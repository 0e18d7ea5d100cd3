"""Costs are read from what a test uses; a process that no name announces fails its test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import costs
import pytest

from leanstep.cli import COMMANDS

SOURCE = """
import pytest
from heads.conftest import shrink
from leanstep.cli import run
import subprocess

TEXT = "loss = torch.compile(model)"

def helper(text):
    return deeper(text)

def deeper(text):
    return subprocess.run(text)

@pytest.fixture
def ranks(run_ranks):
    return run_ranks(2, helper)

def test_plain(monkeypatch): shrink(monkeypatch)
def test_through_two_functions(): helper("x")
def test_through_a_fixture(ranks): assert ranks
def test_of_a_text(tmp_path): (tmp_path / "a.py").write_text(TEXT)
def test_of_a_package(): pytest.importorskip("trl.trainer")
def test_of_a_command(): run(["prove", "a.py"])
def test_of_a_command_in_process(): run(["diagnose", "a.py"])
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", set()),
        ("through_two_functions", {"process"}),
        ("through_a_fixture", {"ranks", "process"}),
        ("of_a_text", {"compile"}),
        ("of_a_package", {"hf"}),
        ("of_a_command", {"process"}),
        ("of_a_command_in_process", set()),
    ],
)
def test_costs_follow_functions_fixtures_texts_and_commands(tmp_path: Path, name: str, expected: set[str]):
    file = tmp_path / "test_it.py"
    file.write_text(SOURCE)
    assert costs.costs(file, f"test_{name}") == expected


def test_imports_at_the_top_cost_every_test_of_the_file(tmp_path: Path):
    (tmp_path / "test_it.py").write_text("from transformers import Trainer\ndef test_it(): pass\n")
    assert costs.costs(tmp_path / "test_it.py", "test_it") == {"hf"}
    (tmp_path / "test_other.py").write_text(
        "from integrations.tiny_models import VOCAB\ndef test_it(): pass\n"
    )
    assert costs.costs(tmp_path / "test_other.py", "test_it") == {"hf"}


def test_every_cost_and_every_command_has_a_smoke_test():
    seen = set()
    for name in costs.SMOKE:
        file, _, function = name.partition("[")[0].partition("::")
        defined = costs._parsed(costs.TESTS.parent / file)[0]
        functions = [function] if function else [f for f in defined if f.startswith("test_")]
        assert functions and set(functions) <= set(defined), name
        for each in functions:
            seen |= costs.costs(costs.TESTS.parent / file, each)
            used = costs.names_in(costs.TESTS.parent / file, each)
            seen |= {f"leanstep {command}" for command in COMMANDS if command in used}
    assert seen >= {*costs.NAMES, *(f"leanstep {command}" for command in COMMANDS)}


def test_a_process_without_a_name_is_noticed():
    costs.started.clear()
    vars(subprocess)["run"]([sys.executable, "-c", ""], check=True)
    assert len(costs.started) == 1
    costs.started.clear()
