"""The bar: figures on a terminal, silence in a pipe."""

from __future__ import annotations

import sys
import threading

from rich.console import Console

from leanstep.commands import terminal
from leanstep.commands.terminal import progress_bar, say_above


def test_piped_output_has_said_lines_and_nothing_else(capsys):
    console = Console(stderr=True)
    with progress_bar(console, "gpt") as report:
        report("3/10 loss 1.0", 0.3)
        say_above(console, "step:3/10 [bracketed]" + 100 * " long")
        report("10/10", 1.0)
    out, err = capsys.readouterr()
    assert out == "" and err == "step:3/10 [bracketed]" + 100 * " long" + "\n"


def test_a_terminal_shows_the_figures(capsys):
    console = Console(file=sys.stderr, force_terminal=True, width=120)
    with progress_bar(console, "gpt") as report:
        report("3/10 loss 1.2346 · 12,346 tok/s", 0.3)
        say_above(console, "hello [bracketed]")
    err = capsys.readouterr().err
    assert "3/10 loss 1.2346 · 12,346 tok/s" in err and "gpt" in err and "hello [bracketed]" in err


def test_long_work_says_what_is_running_without_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "PLAIN_LINE_S", 0.05)
    written = threading.Event()
    monkeypatch.setattr(terminal, "print", lambda text, **options: (lines.append(text), written.set()), False)
    lines: list[str] = []
    with progress_bar(Console(file=sys.stdout), "prove", plain_lines=True) as report:
        report("train.py in fp64", 0.5)
        assert written.wait(30)
    assert lines[0].startswith("prove: train.py in fp64, 0 s, about 0 s left")
    written.clear()
    lines.clear()
    with progress_bar(Console(file=sys.stdout), "prove", plain_lines=True) as report:
        report("classifying the difference", 1.0)
        assert written.wait(30)
    assert lines[0] == "prove: still classifying the difference, 0 s"
    assert capsys.readouterr().out == ""
