"""A progress bar on a terminal, nothing when piped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


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
