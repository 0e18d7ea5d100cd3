"""Attack leanstep with hostile input, scripts and signals: `python tools/attacks.py [GROUP]...`.

Every attack runs in a process of its own, in an empty folder. It *survived* when the command did its work,
was *refused* when the command said why not in one line, and *failed* on a traceback, a hang, a leaked secret,
raw control characters, a replaced device, or anything that is left running or in the temporary folder. Prints
one table; exit code 1 when an attack failed. `--every N` runs each N-th attack, `--list` names them.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib
import io
import json
import os
import random
import resource
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from leanstep import cli  # noqa: E402
from leanstep.script import children, guard  # noqa: E402

SECRET = "hunter2-do-not-tell"
SURVIVED, REFUSED = "survived", "refused"
LIMIT_S = 120.0
# What the commands import when they run: once here, not in every fork.
IMPORTED = (
    "torch._dynamo",
    "leanstep.commands.diagnose",
    "leanstep.commands.prove",
    "leanstep.commands.bench",
    "leanstep.commands.train",
    "leanstep.diagnose.outputs.report_diff",
    "leanstep.diagnose.outputs.sarif",
    "leanstep.diagnose.traces.trace_report",
    "leanstep.prove.compare",
    "leanstep.prove.stopwatch",
    "leanstep.recipes.training_loop",
    "leanstep.report.page",
    "leanstep.report.updates",
)


class Failed(Exception):
    """What went wrong, in one line."""


@dataclass(frozen=True)
class Attack:
    """`run` gets an empty folder, which is the working directory, and returns `survived` or `refused`."""

    group: str
    name: str
    run: Callable[[Path], str]


# What every command must keep to.


@dataclass
class Ran:
    code: int
    out: str
    err: str


def command(folder: Path, *arguments: str) -> Ran:
    """`leanstep ARGUMENTS` in this process; its output is read back from files."""
    paths = [folder / name for name in ("stdout", "stderr")]
    for number, path in enumerate(paths, 1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), "utf-8", line_buffering=True)
        for number in (1, 2)
    )
    try:
        code = cli.run(list(arguments))
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 70
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return Ran(code, *(path.read_text(encoding="utf-8", errors="replace") for path in paths))


def forked(folder: Path, *arguments: str) -> Ran:
    """`command` in a process of its own, which the script may end."""
    pid = os.fork()
    if not pid:
        leave, code = os._exit, 70
        try:
            code = command(folder, *arguments).code
        finally:
            leave(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    texts = ((folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    return Ran(code, *texts)


def judged(ran: Ran, allowed: tuple[int, ...] = (0, 1, 2, 3)) -> str:
    """Survived or refused; raises Failed for a traceback, another exit code or raw text of an input."""
    text = ran.out + ran.err
    if "Traceback (most recent call last)" in text:
        raise Failed("traceback: " + text.strip().splitlines()[-1])
    if ran.code not in allowed:
        raise Failed(f"exit code {ran.code}: {text.strip()[-200:]}")
    if SECRET in text:
        raise Failed("a secret is on the terminal")
    for line in text.splitlines():
        if any(not (c.isprintable() or c == "\t") for c in line):
            raise Failed(f"control characters on the terminal: {line!r}"[:200])
        words = line.strip()
        if words.startswith(("::error", "##[")) or (
            words.startswith("::")
            and not words.startswith("::warning file=")
            and not words.startswith("::warning title=")
        ):
            raise Failed(f"a workflow command: {words[:100]}")
    if ran.code in (2, 3):
        lines = [line for line in ran.err.splitlines() if line.startswith("leanstep: ")]
        if ran.code == 2 and len(lines) != 1:
            raise Failed(f"expected one line that says why, got {len(lines)}")
        return REFUSED
    return SURVIVED


def no_secret(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file() and path.name.startswith("out.") and SECRET in path.read_text(errors="replace"):
            raise Failed(f"a secret is in {path.name}")


# Traces.

DEEP = json.loads("[" * 400 + "]" * 400)
ODD: dict[str, Any] = {
    "null": None,
    "huge": 10**400,
    "inf": float("inf"),
    "nan": float("nan"),
    "negative": -5,
    "text": "x\x1b[31m",
    "list": [1, [2]],
    "object": {"a": {"b": 1}},
    "deep": DEEP,
    "true": True,
    "empty": "",
    "big": 2**63,
}


def events(frame: str = "train.py(3): step") -> list[dict[str, Any]]:
    """Three steps of twenty products, each followed by a read that waits for the device."""
    result: list[dict[str, Any]] = []

    def add(cat: str, name: str, start: float, duration: float, tid: int = 1, **args: Any) -> None:
        result.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 1,
                "tid": tid,
                "ts": start,
                "dur": duration,
                "args": args,
            }
        )

    for step in range(3):
        at = 1000.0 * step
        add("user_annotation", f"ProfilerStep#{step}", at, 1000.0)
        add("python_function", frame, at + 1, 990.0)
        for number in range(20):
            start, link = at + 10 + 40 * number, 100 * step + number
            shapes = {
                "Input Dims": [[8, 8], [8, 8]],
                "Input type": ["float", "float"],
                "Input Strides": [[8, 1], [8, 1]],
            }
            add("cpu_op", "aten::mm", start, 10.0, **{"Call stack": frame, "Sequence number": link, **shapes})
            add("cpu_op", "aten::item", start + 12, 20.0, **{"Call stack": frame, "Fwd thread id": 1})
            add("cuda_runtime", "cudaLaunchKernel", start + 1, 2.0, correlation=link)
            add("cuda_runtime", "cudaStreamSynchronize", start + 13, 18.0, correlation=9000 + link)
            add("kernel", "gemm", start + 5, 20.0, tid=7, correlation=link, device=0, stream=7)
    return result


OUTPUTS = ("--json", "out.json", "--sarif", "out.sarif", "--markdown", "out.md", "--annotations", "--all")


def diagnosed(folder: Path, trace: bytes, *options: str, html: bool = False) -> str:
    (folder / "trace.json").write_bytes(trace)
    page = ("--html", "out.html") if html else ()
    verdict = judged(command(folder, "diagnose", "--trace", "trace.json", *OUTPUTS, *page, *options))
    no_secret(folder)
    if (folder / "out.md").exists():
        text = (folder / "out.md").read_text()
        rest = "".join(text.split("`")[::2])
        if "<script" in rest or "\x1b" in text:
            raise Failed("raw text in Markdown")
    return verdict


def packed(traced: list[Any]) -> bytes:
    return json.dumps({"traceEvents": traced}).encode()


def trace_fields() -> Iterator[Attack]:
    top = ("ts", "dur", "name", "cat", "ph", "pid", "tid", "args")
    inner = (
        "correlation",
        "Input Dims",
        "Input type",
        "Input Strides",
        "Call stack",
        "Sequence number",
        "Fwd thread id",
        "device",
        "stream",
    )
    for field in (*top, *inner):
        for kind, value in ODD.items():

            def run(folder: Path, field: str = field, value: Any = value) -> str:
                traced = events()
                for number, event in enumerate(traced):
                    if number % 3 == 1:
                        if field in top:
                            event[field] = value
                        elif field in event["args"]:
                            event["args"][field] = value
                return diagnosed(folder, packed(traced))

            yield Attack("trace fields", f"{field} = {kind}", run)


def trace_files() -> Iterator[Attack]:
    whole = packed(events())
    small = gzip.compress(whole)
    for share in range(0, 100, 10):
        yield Attack(
            "trace files",
            f"cut at {share} %",
            lambda f, n=share: diagnosed(f, whole[: len(whole) * n // 100]),
        )
        yield Attack(
            "trace files",
            f"gzip cut at {share} %",
            lambda f, n=share: diagnosed(f, small[: len(small) * n // 100]),
        )

    def flipped(folder: Path, seed: int) -> str:
        data, draw = bytearray(whole), random.Random(seed)
        for _ in range(20):
            data[draw.randrange(len(data))] = draw.randrange(256)
        return diagnosed(folder, bytes(data))

    for seed in range(20):
        yield Attack("trace files", f"20 random bytes, seed {seed}", lambda f, s=seed: flipped(f, s))
    texts = {
        "empty": b"",
        "number": b"7",
        "text": b'"x"',
        "null": b"null",
        "list": b"[]",
        "object": b"{}",
        "bare list": whole[16:-1],
        "zeros": bytes(1 << 20),
        "deep": b"[" * 200_000,
        "no events": b'{"traceEvents": 3}',
        "utf-16": whole.decode().encode("utf-16"),
        "zip": b"PK\x03\x04" + bytes(64),
        "pickle": b"\x80\x04cos\nsystem\n(S'touch out.pwned'\ntR.",
    }
    for name, data in texts.items():
        yield Attack("trace files", name, lambda f, d=data: diagnosed(f, d))

    def special(folder: Path, make: Callable[[Path], None]) -> str:
        make(folder / "odd.json")
        return judged(command(folder, "diagnose", "--trace", "odd.json"))

    yield Attack("trace files", "FIFO", lambda f: special(f, os.mkfifo))
    yield Attack("trace files", "folder", lambda f: special(f, Path.mkdir))
    yield Attack("trace files", "dangling link", lambda f: special(f, lambda p: p.symlink_to("nowhere")))
    yield Attack("trace files", "/dev/zero", lambda f: judged(command(f, "diagnose", "--trace", "/dev/zero")))


def trace_names() -> Iterator[Attack]:
    """Names and files of a third-party trace: nothing is read, nothing reaches a terminal or a runner."""
    texts = {
        "escape": "x\x1b]0;owned\x07\x1b[2J",
        "newline": "x\n::error file=a::owned",
        "return": "x\r::error::owned",
        "command": "::error::owned",
        "azure": "##[error]owned",
        "html": "<script>alert(1)</script><img src=x onerror=alert(1)>",
        "backticks": "`<script>alert(1)</script>`",
        "pipes": "a|b|c",
        "right to left": "x\u202egnp.exe",
        "separator": "a\u2028::error::b",
        "null byte": "a\x00b",
        "surrogate": "a\ud800b",
        "long": "x" * 5_000_000,
        "longer than a path": "x" * 5_000,
        "jinja": "{{ 7 * 7 }}{% raw %}",
        "rich": "[red]x[/red][link=x]",
    }
    for kind, text in texts.items():
        for place in ("op", "frame", "note", "file"):

            def run(folder: Path, text: str = text, place: str = place) -> str:
                traced = events(
                    f"{text}.py(3): step"
                    if place == "file"
                    else f"a.py(3): {text}"
                    if place == "frame"
                    else "a.py(3): f"
                )
                for event in list(traced):
                    if place == "op" and event["name"] == "aten::item":
                        event["args"].pop("Call stack")
                        event["name"] = "aten::item"
                    if place == "op" and event["name"] == "aten::mm":
                        event["name"] = text
                    if place == "note" and event["cat"] == "user_annotation":
                        traced.append({**event, "name": text})
                return diagnosed(folder, packed(traced), html=place == "file")

            yield Attack("trace names", f"{kind} in {place}", run)


def trace_reads() -> Iterator[Attack]:
    def outside(folder: Path) -> Path:
        secret = Path(tempfile.mkdtemp()) / "secret.py"
        secret.write_text(f"def f():\n    token = {SECRET!r}\n    return token\n")
        return secret

    def run(folder: Path, file: str) -> str:
        os.environ["SECRET_TOKEN"] = SECRET
        for number in (1, 2):
            verdict = diagnosed(
                folder, packed(events(f"{file}({number}): f")), "--explain", "1", html=number == 2
            )
        return verdict

    for file in (
        "/proc/self/environ",
        "/etc/passwd",
        "/bin/ls",
        "/dev/zero",
        "/proc/self/cmdline",
        "/dev/stdin",
    ):
        yield Attack("trace reads", file, lambda f, file=file: run(f, file))
    yield Attack("trace reads", "a file elsewhere", lambda f: run(f, str(outside(f))))
    yield Attack("trace reads", "../", lambda f: run(f, os.path.relpath(outside(f), f)))

    def linked(folder: Path) -> str:
        (folder / "link.py").symlink_to(outside(folder))
        return run(folder, "link.py")

    def hidden(folder: Path) -> str:
        (folder / ".env").write_text(f"TOKEN={SECRET}\nTOKEN={SECRET}\n")
        return run(folder, ".env")

    def fifo(folder: Path) -> str:
        os.mkfifo(folder / "pipe.py")
        return run(folder, "pipe.py")

    def module(folder: Path) -> str:
        # linecache looks for relative names on sys.path.
        sys.path.insert(0, str(outside(folder).parent))
        return run(folder, "secret.py")

    def chosen(folder: Path) -> str:
        (folder / "mine.py").write_text("def f():\n    return loss.item()\n")
        diagnosed(folder, packed(events("mine.py(1): f")))
        if "loss.item()" not in (folder / "out.json").read_text():
            raise Failed("a line of the working directory is not shown")
        return SURVIVED

    for name, attack in (
        ("link", linked),
        (".env", hidden),
        ("FIFO", fifo),
        ("sys.path", module),
        ("own file", chosen),
    ):
        yield Attack("trace reads", name, attack)


# Third-party reports, baselines and pages.


def reports() -> Iterator[Attack]:
    entry = {"rule": "host-sync", "file": "a.py", "line": 3, "code": "x.item()", "count": 2}
    whole = {"schema": 1, "findings": [entry]}

    def diffed(folder: Path, before: str, after: str) -> str:
        (folder / "a.json").write_text(before)
        (folder / "b.json").write_text(after)
        return judged(command(folder, "diagnose", "diff", "a.json", "b.json"))

    def baseline(folder: Path, text: str) -> str:
        (folder / "trace.json").write_bytes(packed(events()))
        (folder / "known.json").write_text(text)
        return judged(command(folder, "diagnose", "--trace", "trace.json", "--baseline", "known.json"))

    bad: dict[str, str] = {
        "deep": "[" * 100_000,
        "not JSON": "{",
        "empty": "",
        "null": "null",
        "list": "[]",
        "number": "7",
    }
    bad["escapes"] = json.dumps(
        {"findings": [{**entry, "file": "a\x1b[2J\n::error::x", "rule": "\n::error::owned"}]}
    )
    for field in entry:
        for kind in ("null", "inf", "object", "list", "text", "huge"):
            bad[f"{field} = {kind}"] = json.dumps({"findings": [{**entry, field: ODD[kind]}]})
    for name, text in bad.items():
        yield Attack("reports", f"diff: {name}", lambda f, t=text: diffed(f, json.dumps(whole), t))
        yield Attack("reports", f"baseline: {name}", lambda f, t=text: baseline(f, t))

    def page(folder: Path, data: str) -> str:
        start, end = '<script type="application/json" id="leanstep-data">', "</script>"
        (folder / "out.html").write_text(f"<html>{start}{data}{end}</html>")
        return diagnosed(folder, packed(events()), html=True)

    sections: dict[str, Any] = {
        "null": None,
        "list": [],
        "number": 3,
        "text": "x",
        "object": {},
        "findings": {"scripts": [{"findings": 3}]},
    }
    for kind in ("diagnose", "bench", "prove", "rehearse", "demo", "other"):
        for name, value in sections.items():
            text = json.dumps({"format": 1, "sections": {kind: value}})
            yield Attack("reports", f"page: {kind} = {name}", lambda f, t=text: page(f, t))
    for name, text in {
        "deep": "[" * 50_000,
        "not JSON": "{",
        "format": '{"format": 99, "sections": {}}',
    }.items():
        yield Attack("reports", f"page: {name}", lambda f, t=text: page(f, t))


# Where results go.


def outputs() -> Iterator[Attack]:
    options = (["--json"], ["--sarif"], ["--html"], ["--write-baseline", "--baseline"], ["--markdown"])

    def run(
        folder: Path, option: list[str], make: Callable[[Path], None], check: Callable[[Path], None]
    ) -> str:
        (folder / "trace.json").write_bytes(packed(events()))
        target = folder / "target"
        make(target)
        before = stat.S_IFMT(os.lstat(target).st_mode)
        verdict = judged(command(folder, "diagnose", "--trace", "trace.json", *option, "target"))
        if stat.S_IFMT(os.lstat(target).st_mode) != before:
            raise Failed("replaced by another kind of file")
        check(target)
        return verdict

    def device(minor: int) -> Callable[[Path], None]:
        return lambda path: os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))

    def link(path: Path) -> None:
        path.with_name("real").write_text("")
        path.symlink_to("real")

    def filled(path: Path) -> None:
        if not path.with_name("real").stat().st_size:
            raise Failed("the target of the link was not written")

    def fifo(path: Path) -> None:
        os.mkfifo(path)
        # Opened for both, so that no process waits for a reader.
        reader = os.open(path, os.O_RDWR)
        import fcntl

        fcntl.fcntl(reader, 1031, 1 << 20)  # F_SETPIPE_SZ

    kinds: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
        "link": (link, filled),
        "dangling link": (lambda path: path.symlink_to("real"), filled),
        "folder": (Path.mkdir, lambda path: None),
        "FIFO": (fifo, lambda path: None),
    }
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        kinds["null device"] = (device(3), lambda path: None)
        kinds["full device"] = (device(7), lambda path: None)
    for option in options:
        for name, (make, check) in kinds.items():
            if (name, option[0]) == ("FIFO", "--html"):
                continue  # a page is larger than a pipe holds without a reader
            yield Attack(
                "outputs", f"{option[-1]} {name}", lambda f, o=option, m=make, c=check: run(f, o, m, c)
            )


# Checkpoints, caches, settings.


class Doubling:
    """The smallest recipe: one weight."""

    name = "doubling"
    num_steps = 6

    def __init__(self) -> None:
        from leanstep.recipes.training_loop import Cadence

        self.cadence = Cadence(log=2, evaluate=0, save=2)
        self.settings = {"seed": 0}
        self.weight = torch.ones(3)

    def step(self, i: int) -> dict[str, Any]:
        self.weight *= 1.5
        return {"loss": self.weight.norm(), "tokens": 4}

    def evaluate(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight.copy_(state["weight"])


def checkpoints() -> Iterator[Attack]:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    from leanstep.recipes import checkpoint
    from leanstep.recipes.checkpoint import CheckpointError
    from leanstep.recipes.training_loop import run as train

    def attacked(folder: Path, damage: Callable[[Path], Any]) -> str:
        """Damage the newest of two checkpoints: the one before it is used, with a line."""
        out, said = folder / "run", []
        train(Doubling(), out, stop_after=4, say=said.append)
        newest = checkpoint.list_checkpoints(out / "checkpoints")[-1]
        damage(newest)
        said.clear()
        recipe = Doubling()
        try:
            outcome = train(recipe, out, resume=True, say=said.append)
        except (CheckpointError, OSError):
            return REFUSED  # the command says both in one line
        if outcome.resumed_from == 2 and not any("skipped" in line for line in said):
            raise Failed("passed over without a line")
        if not torch.allclose(recipe.weight, torch.full((3,), 1.5**6)):
            raise Failed("other weights than an undisturbed run")
        return SURVIVED

    def cut(path: Path, share: float) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])

    def flip(path: Path, seed: int) -> None:
        data = bytearray(path.read_bytes())
        data[random.Random(seed).randrange(len(data))] ^= 0xFF
        path.write_bytes(bytes(data))

    def replaced(path: Path, make: Callable[[Path], Any]) -> None:
        path.unlink()
        make(path)

    def sparse(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(200 << 30)

    def forged(path: Path, change: Callable[[dict[str, str]], None]) -> None:
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            header = dict(file.metadata())
        change(header)
        save_file(tensors, path, header)

    def state(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, str]], None]:
        def apply(header: dict[str, str]) -> None:
            tree = json.loads(header["state"])
            change(tree)
            header["state"] = json.dumps(tree)

        return apply

    def attack(name: str, damage: Callable[[Path], Any]) -> Attack:
        return Attack("checkpoints", name, lambda folder: attacked(folder, damage))

    for share in (0, 0.01, 0.3, 0.6, 0.99):
        yield attack(f"cut to {share:.0%}", lambda p, s=share: cut(p, s))
    for seed in range(10):
        yield attack(f"one byte flipped, seed {seed}", lambda p, s=seed: flip(p, s))
    for name, make in {
        "folder": Path.mkdir,
        "FIFO": os.mkfifo,
        "200 GiB of nothing": sparse,
        "empty": Path.touch,
    }.items():
        yield attack(name, lambda p, m=make: replaced(p, m))
    yield attack("link to itself", lambda p: replaced(p, lambda q: q.symlink_to(q.name)))
    yield attack("pickle with code", lambda p: p.write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR."))
    for key in ("settings", "state", "step", "format"):
        for value in ("null", "[]", "7", '"x"', "{", "-1", "[" * 5000):
            yield attack(
                f"{key} = {value[:8]}", lambda p, k=key, v=value: forged(p, lambda h: h.update({k: v}))
            )
    changes: dict[str, Callable[[dict[str, Any]], None]] = {
        "counts as text": lambda t: t["interval"][0]["counts"].update(loss="many"),
        "counts of 0": lambda t: t["interval"][0]["counts"].update(loss=0),
        "no counts": lambda t: t["interval"][0].update(counts={}),
        "tokens as text": lambda t: t["interval"][0].update(tokens="x"),
        "time not finite": lambda t: t.update(train_time_s=float("nan")),
        "random state of a wrong kind": lambda t: t["random"][0].update(python=[3, [1, 2], None]),
        "numpy state": lambda t: t["random"][0].update(numpy=["MT19937", [1], 5, 0, 0.0]),
        "numpy state as text": lambda t: t["random"][0].update(numpy="x"),
        "no random state": lambda t: t.update(random=[]),
        "weights elsewhere": lambda t: t["recipe"].update(weight={"~tensor": "nowhere"}),
        "code as a dtype": lambda t: t["recipe"].update(weight={"~dtype": "hub"}),
    }
    for name, change in changes.items():
        yield attack(name, lambda p, c=change: forged(p, state(c)))

    def locked(folder: Path) -> str:
        import fcntl

        (folder / "run").mkdir()
        held = os.open(folder / "run", os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            train(Doubling(), folder / "run", say=lambda line: None)
        except CheckpointError:
            return REFUSED
        raise Failed("two runs in one folder")

    yield Attack("checkpoints", "another run in the folder", locked)


def caches() -> Iterator[Attack]:
    from leanstep.gpt.corpus import standard_library_corpus

    def corpus(folder: Path) -> Any:
        source = folder / "source"
        source.mkdir(exist_ok=True)
        for number in range(4):
            (source / f"m{number}.py").write_text(f"def f{number}():\n    return {number}\n" * 40)
        return standard_library_corpus(300, root=source, folder=folder / "cache")

    def attacked(folder: Path, damage: Callable[[Path], Any]) -> str:
        target = corpus(folder).train_paths[0].parent
        before = {path.name: path.read_bytes() for path in target.iterdir()}
        damage(target)
        corpus(folder)
        if {path.name: path.read_bytes() for path in target.iterdir()} != before:
            raise Failed("the cache is not as it was built")
        left = [path.name for path in target.parent.iterdir() if path.name.startswith(".building-")]
        if left:
            raise Failed(f"left behind: {left[0]}")
        return SURVIVED

    names = ("corpus.json", "train.bin", "validation.bin", "tokenizer.json")
    for name in names:
        yield Attack(
            "caches", f"{name} empty", lambda f, n=name: attacked(f, lambda t: (t / n).write_text(""))
        )
        yield Attack("caches", f"{name} missing", lambda f, n=name: attacked(f, lambda t: (t / n).unlink()))
        yield Attack(
            "caches", f"{name} is {{}}", lambda f, n=name: attacked(f, lambda t: (t / n).write_text("{}"))
        )

    def leftover(target: Path) -> None:
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        (target.parent / f".building-{socket.gethostname()}-{pid}-x").mkdir()
        (target / "corpus.json").unlink()

    yield Attack("caches", "folder of a killed build", lambda f: attacked(f, leftover))


def settings() -> Iterator[Attack]:
    lines = {
        "lens width 47": ["lens", "--set", "width=47"],
        "lens width 1": ["lens", "--set", "width=1"],
        "grpo lr 1e30": ["grpo", "--lr", "1e30"],
        "unknown key": ["gpt", "--set", "x=1"],
        "no value": ["gpt", "--set", "width"],
        "lr nan": ["gpt", "--lr", "nan"],
        "negative steps": ["gpt", "--steps", "-1"],
        "seed too large": ["gpt", "--seed", str(2**64)],
        "out is a file": ["lens", "--out", "trace.json"],
        "deep record": ["lens", "--runs", "2", "--target", "1", "--against", "deep.json"],
    }
    for name, words in lines.items():

        def run(folder: Path, words: list[str] = words) -> str:
            (folder / "trace.json").write_text("x")
            (folder / "deep.json").write_text("[" * 100_000)
            tail = [] if "--steps" in words else ["--steps", "3"]
            return judged(command(folder, "train", *words, *tail))

        yield Attack("settings", name, run)


# Scripts.

LOOP = """
import os, sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 4); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    loss = model(torch.randn(5, 8)).square().mean(); optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(loss.item())
"""
HOSTILE = {
    "os._exit(0) at the end": LOOP + "os._exit(0)",
    "os._exit(0) in step 2": LOOP + "    if step == 1: os._exit(0)",
    "os._exit(0) first": "import os\nos._exit(0)\n" + LOOP,
    "os._exit(0) in a thread": LOOP
    + "    import threading; threading.Thread(target=os._exit, args=[0]).start()",
    "os.execv": LOOP + "    if step == 1: os.execv('/bin/true', ['true'])",
    "sys.exit(0) in step 2": LOOP + "    if step == 1: sys.exit(0)",
    "exception that cannot be printed": LOOP
    + "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
    "exception with escapes": LOOP + "raise ValueError('\\x1b[2J\\n::error::owned')",
    "closed standard output": LOOP + "sys.stdout.close()",
    "closed descriptors": LOOP + "os.close(1); os.close(2)",
    "standard output is None": LOOP + "sys.stdout = sys.stderr = None",
    "pickle.dumps patched": "import pickle\npickle.dumps = None\n" + LOOP,
    "json patched": LOOP + "import json; json.dumps = None",
    "working directory removed": "import os\nos.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')\n"
    + LOOP,
    "recursion": LOOP + "def f(): f()\nf()",
    "sys.modules emptied": LOOP + "sys.modules.pop('json', None)",
    "exit handler": LOOP + "import atexit; atexit.register(lambda: os._exit(0))",
    "syntax error": "def f(:\n",
    "null bytes": "x = 1\x00",
    "empty": "",
    "latin-1": "# -*- coding: latin-1 -*-\n# \xe9\n" + LOOP,
    "optimizer.step replaced": LOOP.replace("for step", "optimizer.step = lambda: None\nfor step"),
    "dtype changed": "import torch\ntorch.set_default_dtype(torch.float64)\n" + LOOP,
    "signal handlers": "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\n" + LOOP,
    "a daemon": "import subprocess\nsubprocess.Popen(['sleep', '300'], start_new_session=True)\n" + LOOP,
}


def scripts() -> Iterator[Attack]:
    def gate(folder: Path, text: str) -> str:
        """The script reads its loss in every step: a gate on that cannot be left open."""
        (folder / "script.py").write_bytes(text.encode("latin-1"))
        ran = forked(
            folder, "diagnose", "script.py", "--run-on", "--fail-on", "host-sync", "--json", "out.json"
        )
        if ran.code == 0:
            raise Failed("the gate is open")
        own = Path(__file__).parent.parent / "leanstep"
        if f'File "{own}' in ran.err:
            raise Failed("traceback of leanstep: " + ran.err.strip().splitlines()[-1])
        return SURVIVED if (folder / "out.json").exists() else REFUSED

    def proof(folder: Path, text: str) -> str:
        (folder / "plain.py").write_text(LOOP)
        (folder / "script.py").write_bytes(text.encode("latin-1"))
        ran = command(folder, "prove", "plain.py", "script.py")
        verdict = judged(ran)
        if "was killed" in ran.err or "ended with was" in ran.err:
            raise Failed(f"wrong words: {ran.err.strip()}")
        return verdict

    for name, text in HOSTILE.items():
        yield Attack("scripts", f"diagnose: {name}", lambda f, t=text: gate(f, t))
        yield Attack("scripts", f"prove: {name}", lambda f, t=text: proof(f, t))
    killed = LOOP + "    if step == 1: os.kill(os.getpid(), 9)"
    yield Attack(
        "scripts", "prove: SIGKILL to itself", lambda f: proof(f, killed.replace("step == 1", "step == 0"))
    )

    def without_folder(folder: Path) -> str:
        tempfile.tempdir = str(folder)
        pattern = str(folder / "leanstep-*")
        wipe = f"import glob, shutil\n[shutil.rmtree(path) for path in glob.glob({pattern!r})]\n"
        return proof(folder, wipe + LOOP)

    yield Attack("scripts", "prove: temporary folders removed", without_folder)


# Signals.

ENDLESS = """
import os, subprocess, time
from pathlib import Path
programs = [subprocess.Popen(["sleep", "1000"], start_new_session=own) for own in (False, True)]
fork = os.fork()
if not fork:
    time.sleep(1000)
Path("numbers.part").write_text(" ".join(map(str, [os.getpid(), fork, *(p.pid for p in programs)])))
Path("numbers.part").rename("numbers")
while True:
    time.sleep(0.01)
"""


def signals() -> Iterator[Attack]:
    commands = {
        "prove": ["prove", "plain.py", "endless.py"],
        "prove --same": ["prove", "endless.py", "--same", "a", "--same", "b"],
        "prove --invariant": ["prove", "endless.py", "--invariant"],
        "bench": ["bench", "--no-proof", "endless.py", "plain.py"],
        "fix": ["fix", "endless.py"],
        "rehearse": ["rehearse", "endless.py"],
        "demo": ["demo", "--only", "lens", "--no-peers"],
    }

    def ended(folder: Path, words: list[str], numbers: tuple[int, ...]) -> str:
        from leanstep.commands import example

        (folder / "temporary").mkdir()
        (folder / "lens").mkdir()
        for name in ("endless.py", "lens/before.py"):
            (folder / name).write_text(ENDLESS)
        (folder / "plain.py").write_text(LOOP)
        pid = os.fork()
        if not pid:
            try:
                os.setsid()
                nobody = os.open(os.devnull, os.O_RDWR)
                for number in range(3):
                    os.dup2(nobody, number)
                sys.stdout, sys.stderr = open(os.devnull, "w"), open(os.devnull, "w")  # noqa: PTH123
                tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "temporary")
                example.examples_folder = lambda: folder
                signal.signal(signal.SIGINT, signal.default_int_handler)
                sys.argv = ["leanstep", *words]
                cli.main()
            finally:
                children._guard.close()
                os._exit(0)
        waited = time.monotonic()
        while not (folder / "numbers").exists():
            if time.monotonic() - waited > LIMIT_S / 2:
                os.kill(pid, signal.SIGKILL)
                raise Failed("the script did not start")
            time.sleep(0.02)
        pids = {int(word) for word in (folder / "numbers").read_text().split()}
        for number in numbers:
            os.kill(pid, number)
            time.sleep(0.05)
        os.waitpid(pid, 0)
        deadline = time.monotonic() + 15
        while left := pids & guard.processes().keys() or list((folder / "temporary").glob("leanstep*")):
            if time.monotonic() > deadline:
                for each in pids:
                    with contextlib.suppress(OSError):
                        os.kill(each, signal.SIGKILL)
                raise Failed(f"left behind: {left}")
            time.sleep(0.05)
        return SURVIVED

    for name, words in commands.items():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL):
            yield Attack(
                "signals", f"{number.name} to {name}", lambda f, w=words, n=number: ended(f, w, (n,))
            )
    twice = (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL)
    yield Attack(
        "signals", "SIGTERM twice, then SIGKILL, to prove", lambda f: ended(f, commands["prove"], twice)
    )
    both = (signal.SIGINT, signal.SIGINT)
    yield Attack("signals", "SIGINT twice to bench", lambda f: ended(f, commands["bench"], both))


# Surroundings.


def surroundings() -> Iterator[Attack]:
    def traced(folder: Path) -> str:
        return diagnosed(folder, packed(events()))

    def encoded(folder: Path, encoding: str, words: list[str]) -> str:
        (folder / "trace.json").write_bytes(packed(events("schritt_ä→.py(3): prüfe")))
        (folder / "plain.py").write_text(LOOP)
        with (folder / "encoded").open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(n, "w", closefd=False), encoding) for n in (1, 2)
        )
        sys.argv = ["leanstep", *words]
        try:
            cli.main()
        except SystemExit as left:
            if left.code not in (0, 1):
                raise Failed(f"exit code {left.code}") from None
        text = (folder / "encoded").read_bytes().decode(encoding)
        if "Traceback" in text:
            raise Failed("traceback: " + text.strip().splitlines()[-1])
        if "-" in words:
            json.loads(text[text.index("{") :].rpartition("}")[0] + "}")
        return SURVIVED

    trace, pair = ["diagnose", "--trace", "trace.json"], ["prove", "plain.py", "plain.py"]
    for encoding in ("ascii", "latin-1", "cp1252", "utf-16", "shift-jis"):
        yield Attack(
            "surroundings", f"{encoding}: diagnose --trace", lambda f, e=encoding: encoded(f, e, trace)
        )
        yield Attack("surroundings", f"{encoding}: prove", lambda f, e=encoding: encoded(f, e, pair))

    def to_full(folder: Path, words: list[str]) -> str:
        (folder / "trace.json").write_bytes(packed(events()))
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, 1)
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8")
        with (folder / "stderr").open("wb") as file:
            os.dup2(file.fileno(), 2)
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8", line_buffering=True)
        sys.argv = ["leanstep", *words]
        try:
            cli.main()
        except SystemExit as left:
            said = (folder / "stderr").read_text()
            if "Traceback" in said or left.code != 2:
                raise Failed(f"exit code {left.code}: {said[-200:]}") from None
        return REFUSED

    if Path("/dev/full").exists():
        yield Attack("surroundings", "full output", lambda f: to_full(f, trace))
        yield Attack("surroundings", "full output, --json -", lambda f: to_full(f, [*trace, "--json", "-"]))

    def limited(folder: Path, which: int, value: int) -> str:
        resource.setrlimit(which, (value, value))
        return traced(folder)

    for files in (16, 24, 64):
        yield Attack(
            "surroundings", f"{files} files", lambda f, n=files: limited(f, resource.RLIMIT_NOFILE, n)
        )
    for size in (0, 1000, 4096):
        yield Attack("surroundings", f"files of {size} bytes", lambda f, n=size: _small_files(f, n))

    def environment(folder: Path, **values: str) -> str:
        os.environ.update(values)
        tempfile.tempdir = None
        (folder / "plain.py").write_text(LOOP)
        traced(folder)
        return judged(command(folder, "prove", "plain.py", "plain.py"))

    odd = {
        "no HOME": {"HOME": "/nowhere"},
        "TERM=dumb": {"TERM": "dumb"},
        "COLUMNS=0": {"COLUMNS": "0"},
        "COLUMNS=abc": {"COLUMNS": "abc"},
        "TMPDIR missing": {"TMPDIR": "/nowhere"},
        "LC_ALL=C": {"LC_ALL": "C"},
        "no PATH": {"PATH": ""},
        "RANK=x": {"RANK": "0", "WORLD_SIZE": "1"},
    }
    for name, values in odd.items():
        yield Attack("surroundings", name, lambda f, v=values: environment(f, **v))

    def long_folder(folder: Path) -> str:
        deep = folder / ("x" * 100) / ("y" * 100)
        deep.mkdir(parents=True)
        tempfile.tempdir = os.environ["TMPDIR"] = str(deep)
        (folder / "plain.py").write_text(LOOP)
        return judged(command(folder, "bench", "--no-proof", "--budget", "0.1", "plain.py", "plain.py"))

    yield Attack("surroundings", "long TMPDIR: bench", long_folder)


def _small_files(folder: Path, size: int) -> str:
    (folder / "trace.json").write_bytes(packed(events()))
    pid = os.fork()
    if not pid:
        code = 0
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            out, err = io.StringIO(), io.StringIO()
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = cli.run(["diagnose", "--trace", "trace.json", "--html", "out.html"])
            code = 0 if code == 2 and "Traceback" not in err.getvalue() else 9
        except BaseException:
            code = 8
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code or (folder / "out.html").exists() or list(folder.glob(".out.html*")):
        raise Failed(f"code {code}, or a part of the page is there")
    return REFUSED


GROUPS: dict[str, Callable[[], Iterator[Attack]]] = {
    "trace-fields": trace_fields,
    "trace-files": trace_files,
    "trace-names": trace_names,
    "trace-reads": trace_reads,
    "reports": reports,
    "outputs": outputs,
    "checkpoints": checkpoints,
    "caches": caches,
    "settings": settings,
    "scripts": scripts,
    "signals": signals,
    "surroundings": surroundings,
}


def _in_child(attack: Attack, folder: str, target: str) -> None:
    os.chdir(folder)
    with open(os.devnull, "w") as nobody:  # noqa: PTH123
        os.dup2(nobody.fileno(), 1)
        os.dup2(nobody.fileno(), 2)
    try:
        verdict, why = attack.run(Path(folder)), ""
    except Failed as failure:
        verdict, why = "failed", str(failure)
    except BaseException as error:
        verdict, why = "failed", f"{type(error).__name__}: {error} {traceback.format_exc()[-300:]}"
    Path(target).write_text(json.dumps([verdict, why]))


def try_attack(attack: Attack) -> tuple[str, str]:
    """`survived`, `refused` or `failed`, and why it failed."""
    with children.temporary_folder("attack-") as base:
        folder, target = base / "work", base / "verdict"
        folder.mkdir()
        child = children.start(_in_child, (attack, str(folder), str(target)), fork=True)
        with children.ended_afterwards([child]):
            children.wait_all([child], LIMIT_S)
        if not target.exists():
            return "failed", f"hung, or its process {children.how_it_ended(child.code)}"
        verdict, why = json.loads(target.read_text())
        return verdict, why


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], help="all by default")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", help="write every verdict to this file")
    options = parser.parse_args()
    for name in IMPORTED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    counts: dict[str, dict[str, int]] = {}
    rows, failures = [], []
    for group in options.groups or GROUPS:
        for number, attack in enumerate(GROUPS[group]()):
            if number % options.every:
                continue
            if options.list:
                print(f"{attack.group}: {attack.name}")
                continue
            verdict, why = try_attack(attack)
            count = counts.setdefault(attack.group, {"tried": 0, SURVIVED: 0, REFUSED: 0, "failed": 0})
            count["tried"] += 1
            count[verdict] += 1
            rows.append({"group": attack.group, "name": attack.name, "verdict": verdict, "why": why})
            if verdict == "failed":
                failures.append(f"{attack.group}: {attack.name}: {why}")
                print(f"FAILED {failures[-1]}", file=sys.stderr, flush=True)
    if options.list:
        return 0
    columns = ("tried", SURVIVED, REFUSED, "failed")
    print("| attacks | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for group, count in counts.items():
        print(f"| {group} | " + " | ".join(str(count[column]) for column in columns) + " |")
    totals = [str(sum(count[column] for count in counts.values())) for column in columns]
    print("| all | " + " | ".join(totals) + " |")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1, ensure_ascii=True) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
