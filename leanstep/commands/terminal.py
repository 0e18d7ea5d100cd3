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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

import leanstep
from leanstep.case import CASE_MODULES, Case, all_cases, get_case
from leanstep.commands import BadInput
from leanstep.escape import clip, fold
from leanstep.files import finite, is_written_through, write_text
from leanstep.script.run import Program

# A script may have replaced the module's.
_dumps = json.dumps

# The options that every command with a result has.
JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - = standard output.")
]
HtmlOption = Annotated[
    str | None, typer.Option("--html", metavar="FILE", help="Write the result into this report page.")
]

MarkdownOption = Annotated[
    str | None,
    typer.Option("--markdown", metavar="FILE", help="Append a summary, such as to $GITHUB_STEP_SUMMARY."),
]


SandboxOption = Annotated[
    bool,
    typer.Option(
        "--sandbox",
        help="Run scripts in a copy of the working directory: without it, files that they write are real.",
    ),
]


def enter_sandbox(context: typer.Context, outputs: list[str | None], scripts: list[str]) -> list[Any]:
    """Work in a copy until the command ends. Returns outputs and scripts as they are named there."""
    from leanstep.script.sandbox import inside, sandbox

    home = Path.cwd()
    absolute = [path if path in (None, "-") else str(home / path) for path in outputs]
    copy = context.with_resource(sandbox())
    return [*absolute, *(inside(script, home, copy) for script in scripts)]


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


def case_names() -> list[str]:
    """The cases by name, read from their files: a help text must not wait until all of them are imported."""
    package = Path(leanstep.__file__).parent
    files = [package.joinpath(*module.split(".")[1:]).with_suffix(".py") for module in CASE_MODULES]
    texts = [file.read_text(encoding="utf-8") for file in files if file.exists()]
    return sorted(name for text in texts for name in re.findall(r'\bCase\(\s*name="([\w-]+)"', text))


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


@contextlib.contextmanager
def kept_for_json(json_path: str | None) -> Iterator[None]:
    """While standard output carries the JSON object, what the measured code prints goes to standard error."""
    if json_path == "-":
        with contextlib.redirect_stdout(sys.stderr):
            yield
    else:
        yield


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


def add_markdown(text: str, path: str | None) -> None:
    """Append to a Markdown file, such as GitHub's step summary; do nothing for None."""
    if path is None:
        return
    try:
        with Path(path).open("a", encoding="utf-8") as target:
            target.write(text.rstrip("\n") + "\n\n")
    except OSError as error:
        raise BadInput(f"--markdown: cannot write {path}: {error.strerror}") from None


class Outputs:
    """Where the result about scripts goes besides the terminal; checked before the work."""

    def __init__(self, json: str | None, html: str | None, markdown: str | None) -> None:
        self.json, self.html, self.markdown = json, html, markdown
        for path, option in ((json, "--json"), (html, "--html"), (markdown, "--markdown")):
            check_writable(path, option)

    def write(self, title: str, result: dict[str, Any], summary: str) -> None:
        from leanstep.measure.timing import environment

        result = {**environment(), **result}
        write_json(result, self.json)
        add_markdown(summary, self.markdown)
        if self.html:
            from leanstep.report.page import add_section
            from leanstep.report.updates import page_section

            add_section(self.html, title, page_section(result))


def split_scripts(words: list[str] | None) -> tuple[list[str], list[str]]:
    """Scripts or folders at the front of what was typed, and the arguments behind; none: it names cases."""
    words = words or []
    count = 0
    while count < min(len(words), 2) and _is_script(words[count]):
        count += 1
    scripts, rest = words[:count], words[count:]
    for script in scripts:
        Program.find(script)
    return scripts, rest


def _is_script(word: str) -> bool:
    return word.endswith(".py") or (Path(word).is_dir() and word not in case_names())


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
def _plain_progress(title: str) -> Iterator[Callable[[str, float], None]]:
    """`prove: train.py in fp64, 20 s, about 10 s left`, every PLAIN_LINE_S seconds."""
    start, ended = time.monotonic(), threading.Event()
    running = ["", 0.0]

    def show() -> None:
        while not ended.wait(PLAIN_LINE_S):
            what, share, passed = running[0], float(running[1]), time.monotonic() - start
            left = f", about {passed * (1 / share - 1):.0f} s left" if share > 0.05 else ""
            end = f", {passed:.0f} s{left}"
            print(clip(f"{title}: {what}", MAX_LINE - len(end)) + end, file=sys.stderr, flush=True)

    def report(what: str, share: float) -> None:
        running[:] = [what, share]

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield report
    finally:
        ended.set()
        thread.join()


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def select_cases(names: list[str] | None) -> list[Case]:
    if not names:
        return list(all_cases().values())
    try:
        return [get_case(name) for name in names]
    except ValueError as error:
        raise BadInput(str(error)) from None


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


def check_implementations(cases: list[Case], names: tuple[str, ...] | None) -> None:
    """Every name must exist in at least one of the cases."""
    known = {i.name for case in cases for i in case.implementations}
    for name in names or ():
        if name not in known:
            raise BadInput(f"--impl: no implementation {name!r}; there are {', '.join(sorted(known))}")


def parse_dtypes(text: str | None) -> tuple[torch.dtype, ...] | None:
    names = split_list(text, "--dtype")
    if names is None:
        return None
    for name in names:
        if name not in DTYPES:
            raise BadInput(f"--dtype: no dtype {name!r}; it takes {', '.join(DTYPES)}")
    return tuple(DTYPES[name] for name in names)


def parse_device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise BadInput(f"--device: no device {text!r}; it takes cpu or cuda[:N]") from None
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"--device: expected cpu or cuda[:N], got {text!r}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            built = (
                "" if torch.version.cuda or torch.version.hip else f"; torch {torch.__version__} has no CUDA"
            )
            raise BadInput(f"--device: cuda is not available on this machine{built}")
        count = torch.cuda.device_count()
        if device.index is not None and device.index >= count:
            raise BadInput(f"--device: expected cuda:0 to cuda:{count - 1}, got {text!r}")
    return device


def parse_sweep(text: str | None, cases: list[Case]) -> list[dict[str, int | float]]:
    """`variants=3,6,12` -> one override per value; without --sweep one empty override."""
    if text is None:
        return [{}]
    key, equals, values = text.partition("=")
    items = [item.strip() for item in values.split(",")]
    if not equals or not key.strip() or not all(items):
        raise BadInput(f"--sweep: expected key=value,value, got {text!r}")
    key = key.strip()
    for case in cases:
        for name, params in case.sizes.items():
            if key not in params:
                raise BadInput(
                    f"--sweep: {case.name} has no parameter {key!r} at {name}; it has {', '.join(params)}"
                )
    return [{key: _number(item)} for item in items]


def _number(text: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise BadInput(f"--sweep: expected a number, got {text!r}")
