"""Between a command and the terminal: what was typed, how far it is, and where its results go."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from leanstep.commands import BadInput
from leanstep.escape import clip, fold
from leanstep.files import finite, is_written_through, write_text
from leanstep.tape.run import Program, one_line

# A script may have replaced the module's.
_dumps = json.dumps

# The option that every command with a result has.
JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - = standard output.")
]


def console(json_path: str | None = None) -> Console:
    """The console for humans; standard error when standard output carries the JSON object."""
    plain = Console(stderr=json_path == "-", highlight=False)
    # A pipe has no width; the usual guess of 80 columns would break every row of a table in three.
    return plain if _has_width(plain) else Console(stderr=json_path == "-", highlight=False, width=160)


def _has_width(out: Console) -> bool:
    return out.is_terminal or "COLUMNS" in os.environ


def print_text(out: Console, text: str) -> None:
    """Plain text within the width of the terminal; what goes into a file or a pipe keeps its lines."""
    shown = fold(text, out.width) if _has_width(out) else text
    out.print(coloured(shown), markup=False, highlight=False, soft_wrap=True)


# What a reader looks for first, and its style. Rich drops styles for pipes and under NO_COLOR.
_STYLES = (
    (re.compile(r"^ {1,3}\d+  [a-z]+(?:-[a-z]+)+", re.MULTILINE), "bold yellow"),
    (re.compile(r"[\w./-]+\.py:\d+(?:–\d+)?"), "cyan"),
    (re.compile(r"(?<= )→ .*$", re.MULTILINE), "green"),
    (re.compile(r"\bfits: [\d.]+ of [\d.]+ GiB"), "bold green"),
    (re.compile(r"\bDOES NOT FIT\b|\bFAILED\b"), "bold red"),
)


def coloured(text: str) -> Text:
    """Mark rules, lines, advice and verdicts with colours."""
    marked = Text(text)
    for pattern, style in _STYLES:
        for match in pattern.finditer(text):
            marked.stylize(style, *match.span())
    return marked


# A pipe gets a line so often, a terminal one line that changes.
PLAIN_LINE_S = 10.0
# Columns of such a line.
MAX_LINE = 80


@contextlib.contextmanager
def live_line(title: str) -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is running: live on a terminal, else one from time to time."""
    screen = Console(stderr=True, highlight=False)
    if screen.is_terminal:
        with screen.status(title) as status:
            yield lambda text: status.update(clip(f"{title}: {text}", screen.width - 4))
        return
    shown = [time.monotonic()]

    def show(text: str) -> None:
        if time.monotonic() - shown[0] >= PLAIN_LINE_S:
            shown[0] = time.monotonic()
            print(clip(f"{title}: {text}", MAX_LINE), file=sys.stderr, flush=True)

    yield show


def check_writable(path: str | None, argument: str) -> None:
    """Refuse an output that cannot be written before the long work starts, not after it."""
    if path is None or path == "-":
        return
    if argument == "--html":
        from leanstep.report.page import check_installed

        check_installed()
    target = Path(path)
    if target.is_dir():
        raise BadInput(f"{argument}: {path} is a folder; expected a file name")
    if is_written_through(target):
        if not os.access(target, os.W_OK):
            raise BadInput(f"{argument}: cannot write {path}: Permission denied")
        return
    folder = Path(os.path.realpath(target)).parent
    if not folder.is_dir():
        missing = folder if target.is_symlink() else target.parent
        raise BadInput(f"{argument}: the folder {missing} does not exist")
    # Root may write anywhere os.access says no to, and a read-only mount says yes to root: try it.
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(f"{argument}: cannot write to {folder}: {error.strerror}") from None


def write_json(obj: Any, path: str | None) -> None:
    """Print one JSON object (`-`) or write it to a file; nothing for None. NaN and infinity become null."""
    if path is None:
        return
    # An output that cannot hold every character gets JSON's own escapes.
    ascii_only = path == "-" and "utf" not in (sys.stdout.encoding or "").lower()
    text = _dumps(finite(obj), indent=1, ensure_ascii=ascii_only, allow_nan=False)
    if path == "-":
        try:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        except OSError as error:
            drop_standard_output()
            raise BadInput(f"--json: cannot write to standard output: {error.strerror}") from None
    else:
        write_text(path, text + "\n", "--json")


def drop_standard_output() -> None:
    """After a failed write: Python would try again at its end and say so in a traceback."""
    with contextlib.suppress(OSError, ValueError):
        nobody = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nobody, sys.stdout.fileno())
        os.close(nobody)


def split_scripts(words: list[str] | None) -> tuple[list[str], list[str]]:
    """Split the words into at most two leading scripts or folders, and their arguments."""
    words = words or []
    count = 0
    while count < min(len(words), 2) and _is_script(words[count]):
        count += 1
    scripts, rest = words[:count], words[count:]
    for script in scripts:
        _check_syntax(Program.find(script).file)
    return scripts, rest


def _check_syntax(file: Path) -> None:
    """Refuse a script that Python cannot compile before another one has run for minutes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise BadInput(f"SCRIPT: {file}: {one_line(error)}") from None
    except OSError as error:
        raise BadInput(f"SCRIPT: cannot read {file}: {error.strerror}") from None


def _is_script(word: str) -> bool:
    return word.endswith(".py") or (Path(word).is_dir())


def say_above(console: Console, line: str) -> None:
    """One line above the console's bar, or plainly when there is none."""
    if console.is_terminal:
        console.print(line, markup=False, highlight=False)
    else:
        print(line, file=console.file, flush=True)


@contextlib.contextmanager
def progress_bar(
    console: Console, title: str, *, plain_lines: bool = False
) -> Iterator[Callable[[str, float], None]]:
    """Yield `report(what, share)`, with share from 0 to 1.

    plain_lines: without a terminal a line on standard error says from time to time what is running.
    """
    if not console.is_terminal:
        with _plain_progress(title) if plain_lines else contextlib.nullcontext(_silent) as report:
            yield report
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[what]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=1.0, what="")
        yield lambda what, share: bar.update(task, completed=share, what=clip(what, console.width // 2))


def _silent(what: str, share: float) -> None:
    pass


@contextlib.contextmanager
def progress_line(
    title: str, text: Callable[[], str], left: Callable[[float], str] = lambda passed: ""
) -> Iterator[None]:
    """Print `prove: train.py in fp64, 20 s` every PLAIN_LINE_S seconds on standard error.

    text: what is running. left: how long it still takes, from the seconds that passed.
    """
    start, ended = time.monotonic(), threading.Event()

    def show() -> None:
        while not ended.wait(PLAIN_LINE_S):
            passed = time.monotonic() - start
            end = f", {passed:.0f} s{left(passed)}"
            print(clip(f"{title}: {text()}", MAX_LINE - len(end)) + end, file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def _plain_progress(title: str) -> Iterator[Callable[[str, float], None]]:
    """`prove: train.py in fp64, 20 s, about 10 s left`."""
    running: list[Any] = ["", 0.0]

    def left(passed: float) -> str:
        share = float(running[1])
        return f", about {passed * (1 / share - 1):.0f} s left" if 0.05 < share < 1 else ""

    def text() -> str:
        # At a share of one, the work that was foreseen is done: there is no estimate for the rest.
        return "still " * (running[1] >= 1) + running[0]

    def report(what: str, share: float) -> None:
        running[:] = [what, share]

    with progress_line(title, text, left):
        yield report


def split_list(text: str | None, argument: str) -> tuple[str, ...] | None:
    """`a,b` -> ("a", "b"); an empty item is a typing error."""
    if text is None:
        return None
    items = tuple(item.strip() for item in text.split(","))
    if not all(items):
        raise BadInput(f"{argument}: expected names separated by commas, got {text!r}")
    return items


def parse_ranks(text: str | None) -> list[int | None]:
    """`1,2` -> [1, 2]; [None], one process without torchrun's environment, where nothing is given."""
    words = split_list(text, "--ranks")
    if words is None:
        return [None]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise BadInput(f"--ranks: expected numbers of processes such as 1,2,4, got {text!r}")
    return [int(word) for word in words]
