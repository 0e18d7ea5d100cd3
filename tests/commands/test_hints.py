"""What was probably meant: similar commands, options of the script; help in names, not in Python types."""

from __future__ import annotations

import pytest

from leanstep.cli import COMMANDS, run


@pytest.mark.parametrize(
    ("typed", "meant"), [("diagnos", "diagnose"), ("proove", "prove"), ("rehearce", "rehearse")]
)
def test_a_misspelt_command_is_suggested(capsys, typed, meant):
    assert run([typed]) == 2
    assert capsys.readouterr().err == f"leanstep: No such command '{typed}'. Did you mean {meant}?\n"


def test_what_resembles_nothing_is_not_guessed(capsys):
    assert run(["xyzzy"]) == 2
    assert "Did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["diagnose", "fix", "rehearse"])
def test_an_unknown_option_points_at_the_dashes(capsys, command):
    assert run([command, "train.py", "--batch_size=4"]) == 2
    error = capsys.readouterr().err
    assert "--batch_size" in error and "behind --" in error and error.count("\n") == 1


# What a command does and how long it takes, in its help.
SAYS = {
    "demo": ("before and after", "three minutes", "Edits nothing"),
    "fix": ("minutes",),
    "bench": ("alternation", "--budget seconds"),
    "prove": ("same parameter updates, up to rounding", "20 seconds"),
    "rehearse": ("ten seconds", "simulated GPU"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_how_long_it_takes_and_names_no_python_types(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "200")
    assert run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "Usage" in text and "list[str]" not in text and "{script}" not in text.lower()
    assert "{target}" not in text.lower() and "[[" not in text
    for words in SAYS.get(command, ()):
        assert words in " ".join(text.split())
