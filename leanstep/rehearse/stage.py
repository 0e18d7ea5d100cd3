"""Run one rehearsal in its own, permanently patched process, and stop it after N steps.

`rehearse` is called in the user's process. The first call starts a fresh interpreter that loads the stub and
imports torch (seconds); each rehearsal is a fork of it and writes its recording to a file. The program's own
output passes through.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import gc
import logging
import os
import pickle
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from leanstep.files import BadInput
from leanstep.rehearse import refusals
from leanstep.rehearse.answers import fake_device
from leanstep.rehearse.answers.fake_device import RehearsalError
from leanstep.rehearse.events import OOM_MODES, Launch, Recording, Refusal, Request
from leanstep.tape.children import end_with, leave, start_program, temporary_folder, write_result
from leanstep.tape.lines import IN_LEANSTEP, USER, Line, nearest_line, traceback_frames
from leanstep.tape.run import Program, as_main

__all__ = ["RehearsalError", "rehearse"]

_ROOT = str(Path(__file__).parent.parent.parent)
# Import the package from the same folder as in this process, then remove that folder from the path.
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from leanstep.tape.children import end_with; "
    "end_with(int(sys.argv.pop(2))); from leanstep.rehearse import stage; "
    "sys.path.remove(sys.argv[1]); stage._serve(*sys.argv[2:])"
)
# Torch and Python read these when they start: another value needs another interpreter.
_READ_AT_START = ("PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCH_LOGS")
# Exit code of a rehearsal that failed, and the file to which Python writes the stack of a crash.
_OWN_FAILURE, _FAULTS = 70, "faults"
UNUSED = Refusal(None, "the script creates no tensor on the GPU: select it with torch.cuda.is_available()")
NO_GROUP = "the script created no process group: every rank runs the same single-GPU step"
# Seconds within which an interrupted program must exit.
_LEAVE_S = 5.0


def rehearse(
    request: Request, *, quiet: bool = False, show: Callable[[str], None] | None = None
) -> Recording:
    """Run a program on a simulated device and return its recording.

    Args:
        request: what to run, for which device, how many steps.
        quiet: discard the program's own output.
        show: called about once per second with what is running.

    Raises RehearsalError (one line) if it cannot start: no such file, no compiler, another torch.
    A program that stops before its steps returns a Recording with `ended` and `refused`. One that does not
    use the GPU runs again with the GPU as torch's default device; `Recording.request` says so.
    """
    _validate(request)
    try:
        recording = _rehearsed(request, quiet, show)
        if recording.refused == UNUSED:
            recording = _rehearsed(replace(request, default_device=True), quiet, show)
        return recording
    except BadInput as error:
        raise RehearsalError(str(error)) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RehearsalError(f"TMPDIR: cannot write {error.filename}: {error.strerror}") from None


def _rehearsed(request: Request, quiet: bool, show: Callable[[str], None] | None) -> Recording:
    with temporary_folder("leanstep-rehearse-") as folder:
        asked, answered = folder / "request", folder / "recording"
        environment = {**os.environ, **_rank_environment(request), "PYTHONUNBUFFERED": "1"}
        environment["PATH"] = _tools(folder, request.device) + os.environ.get("PATH", "")
        environment.pop("TRITON_INTERPRET", None)
        # The program stops halfway: temporary files that it does not remove are deleted with this folder.
        environment["TMPDIR"] = str(folder / "tmp")
        (folder / "tmp").mkdir()
        asked.write_bytes(pickle.dumps((request, environment, str(Path.cwd()))))
        errors = folder / "stderr"
        code = _server(folder).run(asked, answered, errors if quiet else None, _Watcher(answered, show))
        got = pickle.loads(answered.read_bytes()) if answered.exists() else _lost(request, code, folder)
        if quiet and isinstance(got, Recording) and got.refused is not None:
            got.refused = _with_last_words(got.refused, errors)
    if isinstance(got, RehearsalError):
        raise got
    return got


def _with_last_words(refused: Refusal, errors: Path) -> Refusal:
    """Add the last line on standard error, which was not shown, for a program that ended itself."""
    words = errors.read_text(errors="replace").strip().splitlines() if errors.exists() else []
    if not words or not refused.reason.startswith("the program ended"):
        return refused
    return refused._replace(reason=f"{refused.reason}: {words[-1].strip()[:200]}")


def _lost(request: Request, code: int, folder: Path) -> Recording | RehearsalError:
    """Report a program that ended its own process by `os._exit` or a signal."""
    if code == os.EX_IOERR or not folder.is_dir():
        return RehearsalError("TMPDIR: cannot write the recording: the folder is full or missing")
    if code == _OWN_FAILURE:
        return RehearsalError(f"{request.target}: the rehearsal itself failed, see above")
    fault = folder / _FAULTS
    frames = re.findall(r'File "(.+)", line (\d+) in (.+)', fault.read_text() if fault.exists() else "")
    line = nearest_line(((file, int(number), name) for file, number, name in reversed(frames)), USER)
    how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    refused = Refusal(line, f"the program ended its own process with {how}")
    return Recording(request, fake_device.torch_version()[0], refused=refused, ended="refused")


class _Watcher:
    """Forwards the progress of a rehearsal."""

    def __init__(self, answered: Path, show: Callable[[str], None] | None) -> None:
        self.file, self.show, self.started = _progress_file(answered), show, time.monotonic()

    def look(self) -> None:
        if self.show is not None and self.file.exists():
            self.show(f"{self.file.read_text()}, {time.monotonic() - self.started:.0f} s")


def _progress_file(answered: Path) -> Path:
    return answered.with_name("progress")


class _Server:
    """The interpreter that rehearsals are forked from; ends when this process does."""

    def __init__(self, stub: Path):
        self.start = [os.environ.get(name) for name in _READ_AT_START]
        self.lock = threading.Lock()
        self.line, theirs = socket.socketpair()
        arguments = [_ROOT, str(os.getpid()), str(stub), str(theirs.fileno())]
        command = [sys.executable, "-P", "-c", _START, *arguments]
        if sys.version_info < (3, 11):
            command.remove("-P")
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self.process = start_program(
            command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        atexit.register(self.end)

    def fits(self) -> bool:
        same = self.start == [os.environ.get(name) for name in _READ_AT_START]
        return same and self.process.poll() is None

    def run(self, asked: Path, answered: Path, errors: Path | None, watcher: _Watcher) -> int:
        """Fork a rehearsal, wait for it and return its exit code.

        errors: discard its output, and write its standard error here.
        """
        with self.lock, Path(os.devnull).open("r+b") as null, (errors or Path(os.devnull)).open("wb") as file:
            sinks = [null.fileno(), file.fileno()] if errors is not None else [1, 2]
            try:
                # One rehearsal at a time: one message in each direction.
                socket.send_fds(self.line, [f"{asked}\n{answered}".encode()], [null.fileno(), *sinks])
                while not select.select([self.line], [], [], 1.0)[0]:
                    watcher.look()
                return int(self.line.recv(64) or b"-1")
            except OSError:
                return -1
            except KeyboardInterrupt:
                self._interrupt()
                self.end()
                raise
            except BaseException:
                self.end()
                raise

    def _interrupt(self) -> None:
        """Forward Ctrl-C, which reaches only this process, to the program and give it time to exit."""
        self.process.interrupt()
        self.line.settimeout(_LEAVE_S)
        with contextlib.suppress(OSError):
            self.line.recv(64)

    def end(self) -> None:
        atexit.unregister(self.end)
        self.line.close()
        self.process.kill()


_servers: list[_Server] = []


def _server(folder: Path) -> _Server:
    """Return the running interpreter; start one if there is none or its environment has changed.

    folder: may receive the stub; the interpreter needs the file only until it has loaded it.
    """
    if _servers and not _servers[-1].fits():
        _servers.pop().end()
    if not _servers:
        _servers.append(_Server(fake_device.library(folder)))
    return _servers[-1]


def _validate(request: Request) -> None:
    if request.oom not in OOM_MODES:
        raise RehearsalError(f"oom: expected {', '.join(OOM_MODES)}, got {request.oom!r}")
    try:
        Program.find(request.target, request.module)
    except BadInput as error:
        raise RehearsalError(str(error).removeprefix("SCRIPT: ")) from None


def _tools(folder: Path, device: str) -> str:
    """Create an `nvidia-smi` for programs that log its output; return "" if there is a real one."""
    if shutil.which("nvidia-smi") is not None or os.name != "posix":
        return ""
    tool = folder / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\necho 'leanstep rehearse: {device}, simulated; no device is installed'\n")
    tool.chmod(0o755)
    return f"{tool.parent}{os.pathsep}"


def _rank_environment(request: Request) -> dict[str, str]:
    """Return torchrun's variables for rank 0."""
    from leanstep.rehearse.links import device_of

    ranks = request.ranks
    if ranks == 1:
        return {}
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(min(ranks, device_of(request.device, request.machine).node)),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }


def _serve(stub: str, descriptor: str) -> None:
    """Load what every rehearsal needs, then fork one rehearsal per message until the socket closes."""
    unusable: RehearsalError | None = None
    fake_device.hide_devices()
    try:
        fake_device.load(Path(stub))
        import torch._dynamo  # the first call on a fake tensor would import it  # noqa: F401
    except RehearsalError as reason:
        unusable = reason
    line = socket.socket(fileno=int(descriptor))
    # Interrupts go to the program, and SIGTERM to what it leaves running.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = os.getpid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(line, 1 << 14, 3)
        if not message:
            os._exit(0)
        child = os.fork()
        if not child:
            end_with(server)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            line.close()
            for number, passed in enumerate(descriptors):
                os.dup2(passed, number)
            asked, answered = message.decode().split("\n")
            _child(asked, answered, unusable)
        for passed in descriptors:
            os.close(passed)
        _, status = os.waitpid(child, 0)
        os.killpg(0, signal.SIGTERM)
        line.send(str(os.waitstatus_to_exitcode(status)).encode())


def _child(asked: str, answered: str, unusable: RehearsalError | None = None) -> None:
    try:
        if unusable is not None:
            raise unusable
        request, environment, folder = pickle.loads(Path(asked).read_bytes())
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # read the environment again
        os.chdir(folder)
        faulthandler.enable(Path(answered).with_name(_FAULTS).open("w"), all_threads=False)
        fake_device.check()
        # It logs tracebacks of internals for shape errors; the verdict gives the reason.
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        got: Any = _run(request, _progress_file(Path(answered)))
    except RehearsalError as reason:
        got = reason
    except BaseException:
        traceback.print_exc()
        leave(_OWN_FAILURE)
    write_result(Path(answered), got)
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.flush()
    leave(0)  # without the program's threads and exit handlers


def _run(request: Request, progress: Path) -> Recording:
    import torch

    from leanstep.rehearse.answers import (
        compiled,
        process_group,
        stand_ins,
        torch_cuda,
        triton_launches,
        unsupported,
    )
    from leanstep.rehearse.answers.loaders import Loaders
    from leanstep.rehearse.links import device_of
    from leanstep.rehearse.out_of_memory import DeviceMemory
    from leanstep.rehearse.steps import Steps, StepsDone
    from leanstep.rehearse.tape import Tape
    from leanstep.rehearse.time_model import Clock

    device = device_of(request.device, request.machine)
    recording = Recording(request, torch.__version__)
    memory = DeviceMemory(device.memory_bytes - device.context_bytes, request.oom, threading.get_ident())
    tape = Tape(recording, Clock(device, request.host_us), memory, device.workspace_bytes)
    torch_cuda.install(tape, device)
    compiled.install(tape, capture=request.compiled)
    triton_launches.install(tape, device)
    stand_ins.install(tape)
    unsupported.install()
    batches = Loaders(tape)
    batches.install()
    process_group.install(tape, request.ranks)
    _follow_threads(tape)
    steps = Steps(tape, request.steps, progress)
    steps.watch()
    started = time.perf_counter()
    real_time = time.perf_counter
    if request.clock:
        epoch = time.time()
        time.time = lambda: epoch + tape.clock.host
        time.perf_counter = lambda: tape.clock.host
        time.monotonic = lambda: tape.clock.host
    program = _script_program(request)
    if request.default_device:
        torch_cuda.use_by_default()
    gc.collect()
    gc.freeze()  # the collector skips torch's own objects from here on
    try:
        with tape, _normal_exit():
            variables = program()  # kept alive: the parameters show the end of the last step
        recording.ended = "early"
        steps.marker.finish()
        del variables
    except StepsDone:
        recording.ended = "steps"
    except BaseException as failure:
        recording.refused = _refusal(failure, tape)
        if os.environ.get("LEANSTEP_REHEARSE_TRACEBACK"):
            traceback.print_exc()
    if recording.refused is None and not any(isinstance(e, Launch) for e in recording.events):
        recording.refused = UNUSED
    if recording.refused is not None:
        recording.ended = "refused"
    recording.host_s = real_time() - started
    steps.close()
    if recording.steps:
        recording.batches = batches.report()
        if request.ranks > 1 and tape.ranks == 1:
            tape.notes[NO_GROUP] += 1
    return tape.finish()


@contextlib.contextmanager
def _normal_exit():
    """Treat `sys.exit()` as a normal end."""
    try:
        yield
    except SystemExit as left:
        if left.code not in (None, 0):
            raise


def _follow_threads(tape: Any) -> None:
    """Enable the dispatch mode, which is per thread, in the program's loader and prefetch threads too."""
    import torch

    run = threading.Thread.run

    def on_tape(self: threading.Thread) -> None:
        tape.lines.started.add(threading.get_ident())
        torch._C._set_only_lift_cpu_tensors(True)
        with tape:
            run(self)

    threading.Thread.run = on_tape


def _script_program(request: Request) -> Callable[[], Any]:
    program = Program.find(request.target, request.module)

    def run() -> object:
        with as_main(program, request.args):
            return program.run()

    return run


def _refusal(failure: BaseException, tape: Any) -> Refusal:
    """Return one sentence, and the program's own line nearest to the failure."""
    from leanstep.rehearse.branches import NoUpdate

    frames = traceback_frames(failure.__traceback__)
    line, deepest = nearest_line(frames, USER), nearest_line(frames) or nearest_line(frames, IN_LEANSTEP)
    if isinstance(failure, SyntaxError) and failure.filename:  # in a file that never ran
        line = deepest = Line(failure.filename, failure.lineno or 0, "<module>")
    if isinstance(failure, NoUpdate):
        return Refusal(failure.line or line, str(failure))
    sentence = refusals.reason(failure)
    if line is not None and deepest != line:
        return Refusal(line, f"{sentence[:240]} (in {deepest})")
    return Refusal(deepest, sentence[:300])
