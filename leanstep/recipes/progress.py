"""The progress bar of a run: steps, loss, tokens per second, time left. On a terminal only.

Piped output gets no bar and no control characters, only the lines that are said.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


class Progress:
    """A bar on standard error.

    Args:
        total: steps of the whole run.
        title: in front of the bar.
        show: false = never a bar.
        force: true = a bar even when standard error is no terminal.
    """

    def __init__(self, total: int, title: str, *, show: bool = True, force: bool = False) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._total, self._title = total, title
        self._wanted = show and (force or sys.stderr.isatty())
        self._force = force
        self._text = ""

    def __enter__(self) -> Progress:
        if self._wanted:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            console = Console(file=sys.stderr, force_terminal=True if self._force else None)
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[metrics]}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total, metrics="")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, done: int, metrics: Mapping[str, float | int] | None = None) -> None:
        """Move the bar; with metrics also the figures behind it."""
        if self._bar is None:
            return
        if metrics:
            self._text = describe(metrics)
        self._bar.update(self._task, completed=done, metrics=self._text)

    def say(self, line: str) -> None:
        """One line above the bar, or plainly on standard error when there is none."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)


def describe(metrics: Mapping[str, float | int]) -> str:
    """`loss 4.213 · 35,120 tok/s`"""
    parts = []
    if "loss" in metrics:
        parts.append(f"loss {metrics['loss']:.4f}")
    if "tokens_per_s" in metrics:
        parts.append(f"{metrics['tokens_per_s']:,.0f} tok/s")
    return " · ".join(parts)
