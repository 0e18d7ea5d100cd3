"""Kills the processes and removes the folders that a leanstep process leaves behind, however it ended.

`children` runs this file as a program in a separate session. Its standard input is a pipe whose other end
only the leanstep process holds; the lines are `+process PID MARK`, `+folder PATH`, and the same with `-`.
When that process ends, by SIGKILL too, the pipe closes: what is still listed is ended and removed.

Imports the standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

# Grace period for helpers of a killed script: Python's resource tracker removes shared memory and semaphores.
PATIENCE_S = 1.0
# Set in the environment of a child and its descendants, to find those that moved to other sessions.
MARK = "LEANSTEP_CHILD"


def processes() -> dict[int, tuple[int, int]]:
    """All running processes: pid -> (parent, session). Zombies are not listed."""
    if not Path("/proc/self/stat").is_file():
        return _listed_by_ps()
    table = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                # The name of the program, in parentheses, may hold anything.
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                state, parent, _, session = fields[:4]
                if state not in (b"Z", b"X"):
                    table[int(folder.name)] = int(parent), int(session)
    return table


def _listed_by_ps() -> dict[int, tuple[int, int]]:
    """List processes without /proc (macOS), with process groups in place of sessions."""
    command = ["ps", "-axo", "pid=,ppid=,pgid=,stat="]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        rows = [line.split() for line in done.stdout.splitlines()]
        return {int(row[0]): (int(row[1]), int(row[2])) for row in rows if len(row) > 3 and row[3][0] != "Z"}
    return {}


def _is_marked(pid: int, mark: str) -> bool:
    with contextlib.suppress(OSError):
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False


def family(root: int, mark: str) -> set[int]:
    """Return the session of `root`, processes with its mark, their descendants and their sessions."""
    table = processes()
    own = table.get(os.getpid(), (0, 0))[1]
    sessions, members = {root}, {pid for pid in table if _is_marked(pid, mark)} - {os.getpid()}
    # The pid of a process that ended may have been reused.
    if root in table and (table[root][1] == root or table[root][0] == os.getpid()):
        members.add(root)
    while True:
        more = {
            pid
            for pid, (parent, session) in table.items()
            if pid not in members and (parent in members or session in sessions)
        } - {os.getpid()}
        if not more:
            return members
        members |= more
        sessions |= {table[pid][1] for pid in more} & members - {own}


def end(root: int, mark: str) -> None:
    """Kill the session leader `root` and its family. Return when none of them runs.

    If `root` is this process, kill only the others.
    """
    members = family(root, mark)
    if root != os.getpid():
        _send(signal.SIGKILL, members & {root})
    _send(signal.SIGTERM, members - {root})
    deadline = time.monotonic() + PATIENCE_S
    while members := (members & processes().keys() | family(root, mark)) - {root}:
        if time.monotonic() > deadline:
            _send(signal.SIGKILL, members)
        time.sleep(0.01)


def _send(number: int, members: set[int]) -> None:
    for pid in members:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def remove(folder: str) -> None:
    """Remove a folder, even if a process still writes into it."""
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        if not Path(folder).exists():
            return
        time.sleep(0.05)


def main() -> None:
    # Only the end of the pipe ends the guard.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    listed: dict[str, None] = {}
    for line in sys.stdin.buffer:
        entry = os.fsdecode(line[1:-1])
        if line.startswith(b"+"):
            listed[entry] = None
        else:
            listed.pop(entry, None)
    for entry in listed:
        kind, _, value = entry.partition(" ")
        if kind == "process":
            pid, mark = value.split()
            end(int(pid), mark)
    for entry in listed:
        kind, _, value = entry.partition(" ")
        if kind == "folder":
            remove(value)


if __name__ == "__main__":
    main()
