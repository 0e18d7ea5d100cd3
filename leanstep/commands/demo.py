"""`leanstep demo`: three training steps before and after a change; one table, one page."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from leanstep import units
from leanstep.commands import BadInput, FellShort
from leanstep.commands.terminal import check_writable, console, write_json
from leanstep.extras import MissingExtra

# The page takes about half a megabyte; the new one is written next to the old one before replacing it.
PAGE_BYTES = 2 * 2**20
# Updates that are proven; the scripts make five.
STEPS = 2
# Seconds of timing per example.
BUDGET_S = 8.0


def demo(
    out: Annotated[str, typer.Option(metavar="DIR", help="Where to write index.html.")] = "leanstep-report",
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the result as JSON; - = standard output.")
    ] = None,
) -> None:
    """Compare three bundled training steps, each before and after a change, and write an HTML report.

    Diagnoses both versions, checks that they make the same update, measures time and memory, and rehearses
    one of them on a simulated H100. Takes about three minutes. Edits nothing.

    Example: leanstep demo --out report
    """
    from leanstep.commands.example import EXAMPLES, compare, readable_examples
    from leanstep.report.page import check_installed

    check_writable(json, "--json")
    page = _page_path(out)
    examples = readable_examples(page.parent)

    screen = console(json)
    chosen = [example for example in EXAMPLES if _runs(example.require, screen)]
    writes_page = _runs(check_installed, screen)
    started = time.perf_counter()
    board = Board(chosen, screen)
    results: list[dict[str, Any]] = []
    with board, _interrupt_in_one_line():
        for example in board.examples:
            result = compare(
                example,
                examples,
                steps=STEPS,
                budget_s=BUDGET_S,
                report=lambda what, name=example.name: board.show(name, what),
            )
            results.append(result)
            board.finish(result)
        sections, foreseen = _rehearse(board, examples)
    seconds = time.perf_counter() - started
    payload = _payload(results, seconds)
    screen.print(closing_table(results))
    for line in foreseen:
        screen.print(line, markup=False, highlight=False, soft_wrap=True)
    if writes_page:
        _write_page(page, payload, sections)
    write_json({"demo": payload, **sections}, json)
    place = f" · the page: {page.resolve().as_uri()}" if writes_page else ""
    screen.print(f"{units.duration(seconds)}{place}", soft_wrap=True, markup=False)
    failed = [f"{e['name']} {row['tensor']}" for e in results for row in e["proof"] if not row["ok"]]
    if failed:
        raise FellShort(f"demo: the proof failed for {len(failed)} tensors, first {failed[0]}")


def _runs(check: Callable[[], None], screen: Console) -> bool:
    """False where `check` misses a package; one line says what is left out and how to get it."""
    try:
        check()
    except MissingExtra as error:
        screen.print(f"left out: {error}", markup=False, highlight=False, soft_wrap=True)
        return False
    return True


@contextlib.contextmanager
def _interrupt_in_one_line() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print("leanstep: interrupted; no page was written", file=sys.stderr)
        raise typer.Exit(130) from None


def _page_path(out: str) -> Path:
    """Return the path of the page, DIR/index.html; fail early if it is not writable."""
    from leanstep.report.page import read_page

    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"--out: {out} is a file; expected a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out: cannot make the folder {out}: {error.strerror}") from None
    page = folder / "index.html"
    check_writable(str(page), "--out")
    free = shutil.disk_usage(folder).free
    if free < PAGE_BYTES:
        raise BadInput(f"--out: {units.size(free)} free in {out}; the page needs {units.size(PAGE_BYTES)}")
    read_page(page)
    return page


def _payload(results: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    from leanstep.measure.timing import environment

    return {**environment(), "seconds": seconds, "examples": results}


def _write_page(page: Path, payload: dict[str, Any], sections: dict[str, Any]) -> None:
    """Write all sections at once."""
    from leanstep.report.page import add_sections

    add_sections(page, {"demo": payload, **sections})


def _rehearse(board: Board, examples: Path) -> tuple[dict[str, Any], list[str]]:
    """The RL example on an H100, predicted; why not, where it cannot run."""
    from leanstep.commands.rehearse import rehearse_example

    board.show("rehearse", "rehearsal on a simulated H100")
    try:
        section, lines = rehearse_example(examples)
        return {"rehearse": section}, lines
    except BadInput as error:
        return {"rehearse": {"runs": []}}, [f"no rehearsal: {error}"]


class Board:
    """The live display: one line per example with its current stage or its result.

    It redraws only when something changes: a drawing thread would disturb the clock and the recorder.
    """

    def __init__(self, examples: list[Any], screen: Console) -> None:
        self.examples = examples
        self.screen = screen
        self.results: dict[str, dict[str, Any]] = {}
        self.now: tuple[str, str] = ("", "")
        self.started = time.perf_counter()
        self.live = Live(console=screen, auto_refresh=False, transient=True) if screen.is_terminal else None

    def __enter__(self) -> Board:
        if self.live:
            self.live.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        if self.live:
            self.live.__exit__(*details)

    def show(self, name: str, what: str) -> None:
        changed = self.now != (name, what)
        self.now = (name, what)
        if self.live:
            self.live.update(self.table(), refresh=True)
        elif changed and "round" not in what:
            self.screen.print(f"{self.elapsed()}  {name}: {what}", markup=False)

    def finish(self, result: dict[str, Any]) -> None:
        self.results[result["name"]] = result
        self.screen.print(findings_text(result))
        if self.live:
            self.live.update(self.table(), refresh=True)

    def elapsed(self) -> str:
        minutes, seconds = divmod(int(time.perf_counter() - self.started), 60)
        return f"{minutes}:{seconds:02d}"

    def table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("", "example", "now", self.elapsed()):
            table.add_column(column)
        for example in self.examples:
            done, active = example.name in self.results, example.name == self.now[0]
            mark = Text("✓", "green") if done else Text("▸", "bold") if active else Text("·", "dim")
            line = (
                headline(self.results[example.name]) if done else Text(self.now[1] if active else "", "dim")
            )
            table.add_row(mark, Text(example.name, "bold" if active else ""), line, "")
        if self.now[0] == "rehearse":
            table.add_row(Text("▸", "bold"), Text("rehearse", "bold"), Text(self.now[1], "dim"), "")
        return table


def headline(result: dict[str, Any]) -> Text:
    figure, words = units.memory_change(result["memory_ratio"])
    return Text.assemble((units.ratio(result["time_ratio"]), "bold green"), f" faster, {figure} {words}")


def findings_text(result: dict[str, Any], shown: int = 3) -> Text:
    """Return the most expensive findings of `before.py`, and how many findings `after.py` has."""
    before, after = (result[side]["diagnose"]["findings"] for side in ("before", "after"))
    text = Text.assemble((result["title"], "bold"), f"  (examples/{result['name']})\n")
    for finding in sorted(before, key=lambda f: f["rank"])[:shown]:
        place = f"{Path(finding['file']).name}:{finding['line']}"
        text.append(f"  {finding['rule']:<20}", "yellow")
        text.append(f"{place:<20} ")
        text.append(f"{finding['count']:,} per step\n", "dim")
        text.append(f"      {finding['code'][:92]}\n", "dim")
    some = f" ({shown} shown)" if len(before) > shown else ""
    passed = sum(row["ok"] for row in result["proof"])
    text.append(f"  {len(before)} findings before{some}, {len(after)} after. ")
    proven = passed == len(result["proof"])
    text.append(
        f"Loss, gradients and updates: {passed} of {len(result['proof'])} within tolerance of fp64.\n",
        "green" if proven else "bold red",
    )
    return text


def closing_table(results: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title="before → after", title_justify="left")
    table.add_column("training step")
    for name in ("findings", "time", "time ratio", "peak above start", "memory ratio", "same update"):
        table.add_column(name, justify="right")
    for result in results:
        before, after = result["before"], result["after"]
        ok = all(row["ok"] for row in result["proof"])
        table.add_row(
            result["name"],
            f"{len(before['diagnose']['findings'])} → {len(after['diagnose']['findings'])}",
            f"{units.seconds(before['median_s'])} → {units.seconds(after['median_s'])}",
            Text(units.ratio(result["time_ratio"]), "bold green"),
            f"{units.size(before['peak_bytes'])} → {units.size(after['peak_bytes'])}",
            units.ratio(result["memory_ratio"]),
            Text("yes", "green") if ok else Text("NO", "bold red"),
        )
    return table
