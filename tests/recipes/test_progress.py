"""The bar: figures on a terminal, silence in a pipe."""

from __future__ import annotations

from leanstep.recipes.progress import Progress, describe


def test_piped_output_has_said_lines_and_nothing_else(capsys):
    with Progress(10, "gpt") as progress:
        progress.update(3, {"loss": 1.0})
        progress.say("step:3/10 [bracketed]")
        progress.update(10)
    out, err = capsys.readouterr()
    assert out == "" and err == "step:3/10 [bracketed]\n"


def test_a_terminal_shows_loss_and_speed(capsys):
    with Progress(10, "gpt", force=True) as progress:
        progress.update(3, {"loss": 1.23456, "tokens_per_s": 12345.6})
        progress.say("hello")
    err = capsys.readouterr().err
    assert "loss 1.2346 · 12,346 tok/s" in err and "3/10" in err and "hello" in err


def test_figures_that_are_missing_are_left_out():
    assert describe({"tokens_per_s": 5.0}) == "5 tok/s" and describe({}) == ""
