"""Help texts say what a command does, and how long it takes."""

from __future__ import annotations

import contextlib
import io

import pytest

from leanstep.cli import COMMANDS, run

# What the first screen of the help must contain.
SAYS = {
    "demo": ("before and after", "three minutes", "Edits nothing"),
    "fix": ("minutes",),
    "bench": ("alternation", "--budget seconds"),
    "prove": ("same parameter updates, up to rounding", "20 seconds"),
    "rehearse": ("ten seconds", "simulated GPU"),
}


@pytest.mark.parametrize("command", SAYS)
def test_the_help_says_what_happens_and_how_long_it_takes(command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert command in COMMANDS
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert run([command, "--help"]) == 0
    text = " ".join(said.getvalue().split())
    for words in SAYS[command]:
        assert words in text, text
