"""What users of command lines expect: rules, completion, --version, NO_COLOR, exit codes that stay."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import leanstep
from leanstep.cli import COMMANDS, run
from leanstep.commands import EXIT_CODES
from leanstep.commands.terminal import console
from leanstep.diagnose.rules import RULES

ROOT = Path(__file__).parent.parent.parent


def test_rules_lists_every_rule(capsys):
    assert run(["diagnose", "--explain", "all"]) == 0
    listed = re.findall(r"^([a-z0-9-]+)  ", capsys.readouterr().out, re.MULTILINE)
    assert set(RULES) <= set(listed)


def test_rules_as_json(capsys):
    assert run(["diagnose", "--explain", "all", "--json", "-"]) == 0
    entries = json.loads(capsys.readouterr().out)["rules"]
    assert [entry["rule"] for entry in entries] == list(RULES)
    (one,) = [entry for entry in entries if entry["rule"] == "op-storm"]
    assert one["thresholds"]["repeats"] == 32 and one["why"] == RULES["op-storm"].why


def test_one_rule_in_full_and_an_unknown_one(capsys):
    assert run(["diagnose", "--explain", "dead-rows"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert RULES["dead-rows"].fix in shown.replace("`", "") and "# leanstep: ignore[dead-rows]" in shown
    assert run(["diagnose", "--explain", "dead-row"]) == 2
    assert (
        "--explain: expected all, a rule or the number of an entry, got 'dead-row'" in capsys.readouterr().err
    )


def test_explain_refuses_what_is_neither_entry_nor_rule(tmp_path: Path, capsys):
    script = tmp_path / "train.py"
    script.write_text("", encoding="utf-8")
    for text, message in (
        ("0", "expected all, a rule or the number of an entry, got '0'"),
        ("dead-rows", "dead-rows needs no script"),
        ("all", "all needs no script"),
    ):
        assert run(["diagnose", str(script), "--explain", text]) == 2
        assert message in capsys.readouterr().err


def test_version_names_torch_and_the_device(capsys):
    assert run(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"leanstep {leanstep.__version__}, torch {torch.__version__}, ")
    if not torch.cuda.is_available():
        assert out.endswith(", cpu\n")


@pytest.mark.parametrize(
    ("words", "expected"), [("dia", {"diagnose"}), ("r", {"rehearse"}), ("", set(COMMANDS))]
)
def test_the_shell_completes_commands(monkeypatch, capsys, words: str, expected: set[str]):
    variables = {"_LEANSTEP_COMPLETE": "complete_bash", "COMP_WORDS": f"leanstep {words}", "COMP_CWORD": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        run([])
    assert set(capsys.readouterr().out.split()) == expected


def test_show_completion_prints_a_script_for_the_shell(monkeypatch, capsys):
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "bash")
    with pytest.raises(SystemExit) as ended:
        run(["--show-completion"])
    assert ended.value.code == 0
    assert "_LEANSTEP_COMPLETE=complete_bash" in capsys.readouterr().out


def test_no_color_is_honoured(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    console().print("[red]x[/red]")
    assert "\x1b[31m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    console().print("[red]x[/red]")
    assert "\x1b[31m" not in capsys.readouterr().out


def test_exit_codes_are_those_of_the_documentation():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert {int(code): meaning.replace("`", "") for code, meaning in rows} == EXIT_CODES


def test_the_citation_has_the_version_of_the_package():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [leanstep.__version__]
