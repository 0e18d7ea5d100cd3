"""Read a torch.profiler (Kineto, Chrome) trace in chunks and store the columns that the rules need.

A trace is one JSON object whose `traceEvents` holds millions of small objects. Only one chunk of text and one
event are in memory at a time. For each event a few numbers are stored in arrays; names, shapes and stacks are
stored once each. If a file has more events than fit, consecutive complete steps from its middle are used: the
file is not sorted by time, so it is read again once the steps are known.
"""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import math
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from leanstep.escape import printable

CHUNK = 1 << 20
# About 160 bytes each, including the timeline's and the rules' data.
MAX_EVENTS = 1_000_000
# No event of a real trace is longer; text that does not close within it is not JSON.
MAX_VALUE = 1 << 25
# Characters stored of a name; elements of a tensor.
MAX_NAME, MAX_DIM = 8192, 2**48
# Step marks have a name and times, but no shapes or stacks.
MAX_MARK = 1 << 14
_MARK = re.compile(r'"(ProfilerStep#\d+|Optimizer\.step#[^"]*)"')
_SPACE = re.compile(r"[\s,]*")
_DELIMITERS = tuple(" \t\r\n,]}")
_DECODER = json.JSONDecoder(strict=False)

OP, NOTE, FRAME, RUNTIME, KERNEL, COPY, FILL = range(7)
# Older traces use capitals and other words for the categories.
_CATEGORIES = {
    "cpu_op": OP, "operator": OP, "user_annotation": NOTE, "python_function": FRAME,
    "cuda_runtime": RUNTIME, "cuda_driver": RUNTIME, "runtime": RUNTIME, "hip_runtime": RUNTIME,
    "kernel": KERNEL, "gpu_memcpy": COPY, "memcpy": COPY, "gpu_memset": FILL, "memset": FILL,
}  # fmt: skip
ON_DEVICE = (KERNEL, COPY, FILL)
_ADDRESS = re.compile(r" object at 0x([0-9a-f]+)")
# Dims, dtypes and strides of an op's arguments, as the trace writes them.
Shape = tuple[Any, Any, Any]
# The name of what marks a step, its start and its end; a step's start and end.
Mark = tuple[str, float, float]
Window = tuple[float, float]
DTYPES = {
    "float": torch.float32, "double": torch.float64, "c10::BFloat16": torch.bfloat16,
    "c10::Half": torch.float16, "long int": torch.int64, "long": torch.int64, "int": torch.int32,
    "bool": torch.bool, "short": torch.int16, "unsigned char": torch.uint8, "signed char": torch.int8,
    "c10::complex<float>": torch.complex64, "c10::Float8_e4m3fn": torch.float8_e4m3fn,
    "c10::Float8_e5m2": torch.float8_e5m2,
}  # fmt: skip


class Truncated(ValueError):
    """The file is truncated."""


class TooMany(Exception):
    """There are more events than fit, and the steps are not known yet."""


@dataclass(frozen=True)
class Part:
    """Steps `first` to `last` (from 1) of `total`, in microseconds; `until`: what they launched has run."""

    first: int
    last: int
    total: int
    start: float
    end: float
    until: float


class Names:
    """Stores each text (or shape) once and identifies it by a number."""

    def __init__(self) -> None:
        self.texts: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, text: Any) -> int:
        known = self._numbers.get(text)
        if known is None:
            known = self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return known


class Trace:
    """Columns of all complete events, in the order of the file. Times are microseconds."""

    def __init__(self, path: str, part: Part | None = None) -> None:
        self.path, self.part = path, part
        self.facts: dict[str, Any] = {}
        self.names, self.shapes, self.stacks = Names(), Names(), Names()
        self.threads = Names()
        self.kind, self.name, self.thread = array("b"), array("i"), array("i")
        self.start, self.duration = array("d"), array("d")
        # Of an op its shapes, of a frame the address of the object that it is a method of.
        self.detail = array("q")
        # Of an op its sequence number, of a launch and a kernel their correlation.
        self.link = array("q")
        # Ops with a `Call stack`, and the thread that autograd says the forward ran on.
        self.stack_of: dict[int, int] = {}
        self.forward_thread: dict[int, int] = {}
        # Bytes of copies between host and device, where the trace has them.
        self.bytes_of: dict[int, int] = {}
        self.shapes.number(None)

    def __len__(self) -> int:
        return len(self.kind)

    def add(self, event: dict[str, Any]) -> None:
        kind = _CATEGORIES.get(str(event.get("cat", "")).lower())
        if kind is None or event.get("ph") != "X" or "name" not in event:
            return
        try:
            start, duration = float(event["ts"]), float(event.get("dur", 0.0))
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        if not (math.isfinite(start) and math.isfinite(duration)):
            return
        part = self.part
        if part is not None and (start > part.until or start + duration < part.start):
            return
        args = event.get("args")
        args = args if isinstance(args, dict) else {}
        name, detail, link = printable(str(event["name"])[:MAX_NAME]), 0, -1
        # Torch 2.8 adds a second frame for a function that was running when the profiler started.
        if kind == FRAME and name.startswith("<function "):
            return
        index = len(self.kind)
        if kind == OP:
            detail = self._shape(args)
            link = _integer(args.get("Sequence number", args.get("seq")))
            forward = _integer(args.get("Fwd thread id"))
            if forward > 0:
                self.forward_thread[index] = forward
            stack = args.get("Call stack")
            if stack:
                self.stack_of[index] = self.stacks.number(printable(str(stack)))
        elif kind == FRAME:
            # An address in the name would give every object's method a separate name.
            match = _ADDRESS.search(name)
            if match:
                detail = int(match[1], 16) & 0x7FFFFFFFFFFFFFFF
                name = name[: match.start()] + name[match.end() :]
        elif kind != NOTE:
            link = _integer(args.get("correlation", args.get("External id")))
            if kind == COPY:
                self.bytes_of[index] = max(_integer(args.get("bytes", args.get("size"))), 0)
        thread = (
            (_integer(args.get("device")), _integer(args.get("stream")))
            if kind in ON_DEVICE
            else (str(event.get("pid")), str(event.get("tid")))
        )
        self.kind.append(kind)
        self.name.append(self.names.number(name))
        self.thread.append(self.threads.number(thread))
        self.start.append(start)
        self.duration.append(max(duration, 0.0))
        self.detail.append(detail)
        self.link.append(link)

    def _shape(self, args: dict[str, Any]) -> int:
        dims = args.get("Input Dims", args.get("Input dims"))
        if not isinstance(dims, list):
            return 0
        others = (args.get(name) for name in ("Input type", "Input Strides"))
        types, strides = (_frozen(other) if isinstance(other, list) else () for other in others)
        return self.shapes.number((_frozen(dims), types, strides))


def _frozen(value: Any, depth: int = 0) -> Any:
    """Return lists as tuples, and values the profiler never writes (objects, deep lists) as None."""
    if isinstance(value, list) and depth < 8:
        return tuple(_frozen(item, depth + 1) for item in value)
    return value if isinstance(value, (int, float, str)) else None


def _integer(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    # Sequence numbers are unsigned in C++; what does not fit is "none".
    return number if -(2**63) <= number < 2**63 else -1


class Tensors:
    """An op's tensor arguments as stored in a trace: dims, dtypes, strides."""

    __slots__ = ("bytes", "dims", "strides", "types")

    def __init__(self, shape: Any) -> None:
        dims, types, strides = shape
        self.dims, self.types, self.strides = [], [], []
        self.bytes: list[int] = []
        strides = strides if len(strides) == len(dims) else ((),) * len(dims)
        types = types if len(types) == len(dims) else ("",) * len(dims)
        for dim, kind, stride in zip(dims, types, strides, strict=True):
            if isinstance(dim, tuple) and dim and isinstance(dim[0], tuple):
                # A list of tensors: their dtype is not written; take the most common.
                for inner in dim:
                    self._add(inner, "float", ())
            elif kind in DTYPES:
                self._add(dim, kind, stride)
            elif not kind and isinstance(dim, tuple) and dim:
                self._add(dim, "float", stride)

    def _add(self, dim: Any, kind: str, stride: Any) -> None:
        if not isinstance(dim, tuple) or not all(type(size) is int and 0 <= size <= MAX_DIM for size in dim):
            return
        if math.prod(dim) > MAX_DIM:
            return
        stride = stride if isinstance(stride, tuple) and all(type(s) is int for s in stride) else ()
        self.dims.append(dim)
        self.types.append(kind)
        self.strides.append(stride)
        self.bytes.append(int(np.prod(dim, dtype=np.int64)) * DTYPES[kind].itemsize)


def different_order(dims: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two tensors of one shape store their dimensions in different orders."""
    if len(one) != len(dims) or len(other) != len(dims):
        return False
    used = [d for d, size in enumerate(dims) if size > 1 and one[d] and other[d]]
    return sorted(used, key=lambda d: -one[d]) != sorted(used, key=lambda d: -other[d])


class _Text:
    """The text of a file, one buffer at a time."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.buffer, self.at, self.read, self.ended = "", 0, 0, False

    def more(self) -> bool:
        """Drop consumed text and read on; return False at the end."""
        if self.ended:
            return False
        try:
            data = self._source.read(CHUNK)
        except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
            raise Truncated(str(error)) from None
        self.ended = not data
        self.read += len(data)
        self.buffer = self.buffer[self.at :] + self._decode(data, final=self.ended)
        self.at = 0
        return not self.ended

    def peek(self) -> str:
        """Return the next character that is neither space nor comma; empty at the end."""
        while True:
            space = _SPACE.match(self.buffer, self.at)
            self.at = space.end() if space else self.at
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if not self.more():
                return ""

    def value(self) -> Any:
        """Return one JSON value. A number at the end of the buffer may continue in the next one."""
        while True:
            character = self.peek()
            if not character:
                raise Truncated("the text ends where a value is expected")
            try:
                value, end = _DECODER.raw_decode(self.buffer, self.at)
                if character in '{["' or self.ended or self.buffer[end : end + 1] in _DELIMITERS:
                    self.at = end
                    return value
            except (json.JSONDecodeError, RecursionError) as error:
                if self.ended:
                    raise Truncated(str(error)) from None
                if len(self.buffer) - self.at > MAX_VALUE:
                    raise ValueError(
                        f"not JSON near byte {self.read - len(self.buffer) + self.at:,}"
                    ) from None
            self.more()

    def take(self, expected: str) -> None:
        character = self.peek()
        if not character:
            raise Truncated("the text ends early")
        if character != expected:
            raise ValueError(f"not JSON: expected {expected!r}, got {character!r}")
        self.at += 1


def _events(text: _Text, facts: dict[str, Any]) -> Iterator[Any]:
    """Yield the events one by one; the object's other keys go into `facts`."""
    first = text.peek()
    if first == "[":
        # Chrome's other form: a bare list, which may lack its end.
        yield from _items(text)
        return
    text.take("{")
    has_events = False
    while text.peek() != "}":
        key = text.value()
        text.take(":")
        if key == "traceEvents" and text.peek() == "[":
            has_events = True
            yield from _items(text)
        else:
            facts[str(key)] = text.value()
    if not has_events:
        raise ValueError("it has no traceEvents")


def _items(text: _Text) -> Iterator[Any]:
    text.take("[")
    while text.peek() != "]":
        yield text.value()
    text.take("]")


def _marks(text: _Text) -> Iterator[Mark]:
    """Yield the step marks in a text without parsing the rest. Some occur twice."""
    while _read_on(text) or text.buffer:
        # A mark's event may continue in the next chunk, and it starts before its name.
        whole = len(text.buffer) if text.ended else max(len(text.buffer) - MAX_MARK, 0)
        for match in _MARK.finditer(text.buffer, 0, whole):
            try:
                event, _ = _DECODER.raw_decode(text.buffer, text.buffer.rindex("{", 0, match.start()))
                if _CATEGORIES.get(str(event["cat"]).lower()) == NOTE:
                    yield match[1], float(event["ts"]), float(event["ts"]) + float(event["dur"])
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue
        if text.ended:
            return
        text.at = max(whole - MAX_MARK, 0)


def _read_on(text: _Text) -> bool:
    try:
        return text.more()
    except Truncated:
        # Reported when its events are read.
        text.ended = True
        return False


def profiler_steps(marks: Iterable[Mark]) -> list[Window]:
    return sorted((start, end) for name, start, end in marks if name.startswith("ProfilerStep#"))


def optimizer_steps(marks: Iterable[Mark]) -> list[Window]:
    """Return steps from one optimizer step's end to the next, using the last optimizer of a step."""
    steps = sorted((m for m in marks if m[0].startswith("Optimizer.step#")), key=lambda mark: mark[2])
    return list(itertools.pairwise(end for name, _, end in steps if name == steps[-1][0]))


def _part(text: _Text, share_of: Callable[[int], float]) -> Part | None:
    """Return as many complete steps from the middle as fit; None if the trace has no steps."""
    marks = set(_marks(text))
    windows = profiler_steps(marks) or optimizer_steps(marks)
    if not windows:
        return None
    keep = max(1, int(len(windows) * share_of(text.read)))
    first = (len(windows) - keep) // 2
    (start, _), (begin, end) = windows[first], windows[first + keep - 1]
    # The device lags behind the host: kernels of the last step have run by the end of the next one.
    return Part(first + 1, first + keep, len(windows), start, end, end + (end - begin))


def read_trace(path: str) -> Trace:
    """Return the columns of a trace, `.gz` or not. Raise a one-line ValueError that says what is wrong."""
    file = Path(path)
    if file.exists() and not file.is_file() and not file.is_dir():
        raise ValueError(f"{path} is not a regular file; expected a trace of torch.profiler")
    if file.is_dir():
        raise ValueError(f"{path} is a folder; expected a trace.json or trace.json.gz of torch.profiler")
    try:
        with _opened(file) as source:
            text = _Text(source)
            try:
                return _read(Trace(path), text, MAX_EVENTS)
            except TooMany:
                read = text.read
        with _opened(file) as source:
            part = _part(_Text(source), lambda size: read / size)
        with _opened(file) as source:
            return _read(Trace(path, part), _Text(source))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    with file.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        with gzip.open(raw) if packed else raw as source:
            yield source  # pyright: ignore[reportReturnType]


def _read(trace: Trace, text: _Text, most: int | None = None) -> Trace:
    path, count = trace.path, 0
    try:
        if not text.peek():
            raise ValueError(f"{path} is empty; expected a trace of torch.profiler (export_chrome_trace)")
        for event in _events(text, trace.facts):
            count += 1
            if isinstance(event, dict):
                trace.add(event)
                if most is not None and len(trace) > most:
                    raise TooMany
    except Truncated:
        whole = f"{count:,} events" if count else "no event"
        raise ValueError(
            f"{path} is truncated: {whole} and {text.read:,} bytes of text read; expected a complete file "
            "(writing or copying it was interrupted)"
        ) from None
    except ValueError as error:
        if str(error).startswith(path):
            raise
        raise ValueError(f"{path} is not a torch.profiler trace: {error}") from None
    if not len(trace):
        raise ValueError(
            f"{path} is not a torch.profiler trace: none of its {count:,} events is an op or a kernel"
        )
    return trace
