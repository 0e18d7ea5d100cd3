"""`leanstep`: demo · diagnose · fix · bench · prove · rehearse.

Exit codes: `leanstep.commands.EXIT_CODES`; bad input is 2, with one line and no traceback.
The commands' bodies live in `leanstep/commands/`, one module each.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import io
import os
import re
import signal
import sys
import warnings
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup

import leanstep
from leanstep.commands import BadInput, FellShort
from leanstep.escape import printable
from leanstep.extras import MissingExtra
from leanstep.measure.busy import sleep_while_waiting
from leanstep.tape.children import Ended, forking, received

SUMMARY = "Check PyTorch training scripts of language models without a GPU, and make them cheaper."

# Below these levels kineto prints its own start and stop on standard error, and the profiler warns about
# memory that was there before it; torch reads them once, when loaded.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# The core needs no numpy; torch says so on every start without it.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

# command -> (module, attribute); a Typer is mounted as a group. Each is imported only when it is asked for.
COMMANDS = {
    "demo": ("leanstep.commands.demo", "demo"),
    "diagnose": ("leanstep.commands.diagnose", "diagnose"),
    "fix": ("leanstep.commands.fix", "fix"),
    "bench": ("leanstep.commands.bench", "bench"),
    "prove": ("leanstep.commands.prove", "prove"),
    "rehearse": ("leanstep.commands.rehearse", "rehearse"),
}

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HELP = {"help_option_names": ["-h", "--help"]}

# typer >= 0.20 carries its own click: reach the exceptions through typer, so that either arrangement works.
_CommandLineError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class _Interrupted(Exception):
    """Ctrl-C under a name that typer does not turn into a silent exit."""


class _LazyCommands(TyperGroup):
    """A group that imports a command's module when it is asked for: `leanstep --help` needs no torch."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name]
        # Signals wait: numpy and torch swallow exceptions in their imports, or abort on them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            target: Any = getattr(importlib.import_module(module), attribute)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if isinstance(target, typer.Typer):
            command = typer.main.get_command(target)
        else:
            settings = {**HELP, **(getattr(target, "context_settings", None) or {})}
            single = typer.Typer(add_completion=False)
            single.command(context_settings=settings)(target)
            command = typer.main.get_command(single)
        _plain_help(command, ctx)
        command.name = cmd_name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _plain_help(self, ctx)
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _Interrupted from None


def _plain_help(command: Any, ctx: Any) -> None:
    """Names instead of Python types: no value for a switch, `SCRIPT [ARGS]...` for arguments."""
    for param in (*command.params, command.get_help_option(ctx)):
        if param is not None and getattr(param, "is_flag", False):
            param.metavar = " "
        elif param is not None and param.param_type_name == "argument":
            usage = param.metavar
            if usage is None:
                param.metavar = param.name.upper()
                usage = param.metavar if param.required else f"[{param.metavar}]"
                usage += "..." * (param.nargs != 1)
            param.display_type_rich = lambda ctx: None
            param._usage_display_name = lambda usage=usage: usage


app = typer.Typer(
    cls=_LazyCommands,
    no_args_is_help=True,
    add_completion=True,
    context_settings=HELP,
)


def _print_version(value: bool) -> None:
    if value:
        print(f"leanstep {leanstep.__version__}, torch {_torch_and_device()}")
        raise typer.Exit


def _torch_and_device() -> str:
    """`2.13.0+cpu, cpu`: what a bug report needs."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"cannot be imported ({error})"
    if not torch.cuda.is_available():
        return f"{torch.__version__}, cpu"
    return f"{torch.__version__}, {torch.cuda.get_device_name()}"


@app.callback(help=SUMMARY)
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
    ),
) -> None:
    """The options before a command."""


def _hint(error: Any) -> str:
    """What was probably meant: a command with a similar name, an option of the script."""
    option = getattr(error, "option_name", None)
    if option is not None and type(error).__name__ == "NoSuchOption":
        return _behind_dashes(error.ctx, option)
    name = re.search(r"No such command '([^']*)'", error.format_message())
    close = difflib.get_close_matches(name[1], COMMANDS, n=1) if name else []
    return f" Did you mean {close[0]}?" if close else ""


def _behind_dashes(context: Any, option: str) -> str:
    """Show where the command that ran takes the options of the script; empty if it runs none."""
    first = next((p for p in context.command.params if p.param_type_name == "argument"), None)
    if first is None:
        return ""
    scripts = "before.py after.py" if first.nargs == -1 else "train.py"
    called = f"{context.command_path} {scripts} -- {option} ..."
    return f"; options of your script go behind --, as in: {called}"


def run(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    return run_command(typer.main.get_command(app), "leanstep", arguments)


def run_command(command: Any, name: str, arguments: list[str] | None = None, **context: Any) -> int:
    """Run a click command; errors of the user become one line and an exit code."""
    try:
        result = command.main(args=arguments, prog_name=name, standalone_mode=False, **context)
        return result if isinstance(result, int) else 0
    except (BadInput, MissingExtra) as error:
        return _one_line(str(error), 2)
    except FellShort as error:
        return _one_line(str(error), 1)
    except _CommandLineError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)
            return 2
        return _one_line(error.format_message() + _hint(error), 2)
    except (_Interrupted, typer.Abort, KeyboardInterrupt):
        return _say_signal(signal.SIGINT)
    except Ended as error:
        return _say_signal(error.number)
    except typer.Exit as error:
        return error.exit_code
    except Exception as error:
        # An import that swallows the exception of a signal, as in numpy, fails later with its own.
        if received:
            return _say_signal(received[-1])
        # A full disk or a closed pipe behind what is printed, or a full folder for temporary files.
        if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE):
            raise
        place = f" {error.filename}" if error.filename else " the output"
        return _one_line(f"cannot write{place}: {error.strerror}", 2)


def _say_signal(number: int) -> int:
    said = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    return _one_line(said, 128 + number)


def _one_line(message: str, code: int) -> int:
    with contextlib.suppress(OSError):
        print("leanstep: " + printable(" ".join(message.split())), file=sys.stderr)
    return code


def _end(number: int, frame: FrameType | None) -> None:
    """Handle a signal by an exception, so that `with` and `finally` blocks run."""
    received.append(number)
    if forking:
        return
    raise KeyboardInterrupt if number == signal.SIGINT else Ended(number)


def _default_signals() -> None:
    """In a fork: SIGTERM and SIGHUP end it as usual, unless the script handles them itself."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _end:
            signal.signal(number, signal.SIG_DFL)


def main() -> None:
    for number in _SIGNALS:
        # A caller that ignores one means it: nohup SIGHUP, a background job of a shell Ctrl-C.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _end)
    os.register_at_fork(after_in_child=_default_signals)
    for stream in (sys.stdout, sys.stderr):
        # An output of few characters (ASCII, Latin-1) shows the others as escapes.
        if isinstance(stream, io.TextIOWrapper) and "utf" not in stream.encoding.lower():
            stream.reconfigure(errors="backslashreplace")
    if sys.argv[1:2] and sys.argv[1] in COMMANDS and not {"-h", "--help"} & set(sys.argv):
        sleep_while_waiting()
    code = run()
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, OSError) and error.errno != errno.EPIPE:
            code = code or _one_line(f"cannot write the output: {error.strerror}", 2)
    sys.exit(code)
