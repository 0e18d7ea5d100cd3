"""A progress bar on a terminal, nothing but the lines that are said when piped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


def say_above(console: Console, line: str) -> None:
    """One line above the console's bar, or plainly when there is none."""
    if console.is_terminal:
        console.print(line, markup=False, highlight=False)
    else:
        print(line, file=console.file, flush=True)


@contextlib.contextmanager
def progress_bar(console: Console, title: str) -> Iterator[Callable[[str, float], None]]:
    """Yield `report(what, share)`, with share from 0 to 1."""
    if not console.is_terminal:
        yield lambda what, share: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[what]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=1.0, what="")
        yield lambda what, share: bar.update(task, completed=share, what=what)
