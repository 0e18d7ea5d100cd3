"""Bounds and race checks of Triton kernels, access by access, in Triton's interpreter.

    with checked_launches() as checked:
        launch()                        # kernels run on CPU tensors, TRITON_INTERPRET=1
    assert not checked.problems

Programs run in a shuffled order. Three things are checked for every load, store and atomic:

- bounds: the address is inside the storage of the tensor whose pointer it was computed from;
- programs: no program accesses what another one writes, unless both accesses are atomic;
- lanes: since the last barrier, no lane accesses what another lane of the same program wrote, or writes what
  another lane read. Elements at the same position of two blocks with equal shape and element size belong to
  the same lane; a scalar is a separate lane. Lanes that write the same value to one address do not conflict.

Each storage gets a separate address range of 2^52 bytes: an out-of-bounds offset cannot reach another tensor
by chance, and arithmetic that wraps at 2^31 leaves every range. Out-of-bounds accesses are reported and
skipped.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import numpy as np

# Addresses: the range number is in the top bits, tensors are in the middle of their range. Real addresses
# have fewer than 52 bits: a pointer that a kernel loads from memory has range 0 and is not checked.
_RANGE_BITS, _PAGE_BITS = 52, 8
_MIDDLE = 1 << (_RANGE_BITS - 1)
_PAGE = 1 << _PAGE_BITS
# Marks an entry of a table with more than one program or lane.
_SEVERAL = -1


@dataclass(frozen=True)
class Problem:
    """One kind of problem at one line of a kernel; `count`: accesses, `program`: the first one affected."""

    kernel: str
    line: int
    what: str
    count: int
    program: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kernel}, line {self.line}: {self.what} ({self.count} times, first in {self.program})"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Problem:
        program = tuple(row["program"])
        return cls(row["kernel"], row["line"], row["what"], row["count"], program)


class MemoryProblem(AssertionError):
    """The first problem of a kernel, raised if it ends the launch."""


@dataclass
class CheckedLaunches:
    """The number of launches per kernel, and their problems."""

    stop_at_first: bool = False
    launches: Counter[str] = field(default_factory=Counter)
    _problems: dict[tuple[str, int, str], Problem] = field(default_factory=dict)

    @property
    def problems(self) -> list[Problem]:
        return list(self._problems.values())

    def add(self, kernel: str, line: int, what: str, program: tuple[int, ...]) -> None:
        key = (kernel, line, what)
        first = self._problems.get(key)
        count = 1 if first is None else first.count + 1
        self._problems[key] = Problem(*key, count, program if first is None else first.program)
        if self.stop_at_first:
            raise MemoryProblem(str(self._problems[key]))


class _Tables:
    """The accesses of each byte: program numbers from 1 on, lanes, and the barrier interval of the access."""

    NAMES = ("writer", "reader", "atomic", "write_lane", "write_interval", "read_lane", "read_interval")

    def __init__(self) -> None:
        self.pages: dict[int, int] = {}
        self.columns = {name: np.zeros(0, dtype=np.int64) for name in self.NAMES}

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def indices(self, addresses: np.ndarray) -> np.ndarray:
        """Return the indices of byte addresses in the tables, which grow with the accessed pages."""
        pages, inverse = np.unique(addresses >> _PAGE_BITS, return_inverse=True)
        for page in pages.tolist():
            self.pages.setdefault(page, len(self.pages))
        needed = len(self.pages) * _PAGE
        if needed > len(self.columns["writer"]):
            self.columns = {
                name: np.concatenate([column, np.zeros(2 * needed - len(column), dtype=np.int64)])
                for name, column in self.columns.items()
            }
        starts = np.array([self.pages[page] for page in pages.tolist()], dtype=np.int64) << _PAGE_BITS
        return starts[inverse] + (addresses & (_PAGE - 1))


class _Launch:
    """The state of one launch: storages, tables, the running program and its barrier interval."""

    def __init__(self, kernel: str, files: set[str], result: CheckedLaunches) -> None:
        self.kernel, self.files, self.result = kernel, files, result
        self.ranges: dict[int, int] = {}
        self.first: list[int] = [0]
        self.last: list[int] = [1 << _RANGE_BITS]
        self.shift: list[int] = [0]
        self.tables = _Tables()
        self.program, self.number, self.interval = (0, 0, 0), 0, 0
        self.blocks: dict[tuple[Any, int], int] = {}
        self.order: list[tuple[int, ...]] = []
        self.grid: tuple[int, ...] = (1, 1, 1)

    def address_of(self, tensor: Any) -> int:
        """Return the simulated address of a tensor's first element in this launch."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start not in self.ranges:
            number = self.ranges[start] = len(self.first)
            assert number < 1 << (64 - _RANGE_BITS), "a launch with more storages than address ranges"
            # Keep the alignment of the real address.
            first = (number << _RANGE_BITS) + _MIDDLE + start % _PAGE
            self.first.append(first)
            self.last.append(first + storage.nbytes())
            self.shift.append(start - first)
        return tensor.data_ptr() - self.shift[self.ranges[start]]

    def start_program(self, number: int) -> tuple[int, ...]:
        self.number, self.program = number + 1, self.order[number]
        self.interval += 1
        return self.program

    def barrier(self) -> None:
        self.interval += 1

    def report(self, what: str) -> None:
        self.result.add(self.kernel, self._line(), what, self.program)

    def _line(self) -> int:
        """Return the current line in the kernel's file."""
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_filename not in self.files:
            frame = frame.f_back  # type: ignore[assignment]
        return frame.f_lineno if frame is not None else 0

    def access(
        self, pointers: Any, mask: Any, kind: str, values: Any = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Check one access; return real addresses and the mask without out-of-bounds elements."""
        fake = np.asarray(pointers.data).astype(np.uint64)
        active = np.broadcast_to(np.asarray(getattr(mask, "data", mask)), fake.shape).astype(bool)
        size = _element_bytes(pointers)
        inside = active.copy()
        flat, ranges = fake.ravel(), (fake.ravel() >> np.uint64(_RANGE_BITS)).astype(np.int64)
        known = np.minimum(ranges, len(self.first) - 1)
        first, last = (np.array(side, dtype=np.uint64)[known] for side in (self.first, self.last))
        legal = (ranges == known) & (flat >= first) & (flat + np.uint64(size) <= last)
        if (active.ravel() & ~legal).any():
            self.report(f"{kind} out of bounds")
            inside &= legal.reshape(fake.shape)
        shift = np.array(self.shift, dtype=np.int64)[known].astype(np.uint64)
        real = np.where(inside.ravel(), flat + shift, 0).reshape(fake.shape)
        checked = np.flatnonzero(inside.ravel() & (ranges > 0))
        if len(checked):
            stored = None
            if values is not None:
                stored = np.broadcast_to(np.asarray(values.data), fake.shape).ravel()[checked]
            self._conflicts(flat[checked], checked, size, fake.shape, kind, stored, real.ravel()[checked])
        return real, inside

    def _conflicts(
        self,
        addresses: np.ndarray,
        positions: np.ndarray,
        size: int,
        shape: tuple[int, ...],
        kind: str,
        stored: np.ndarray | None,
        real: np.ndarray,
    ) -> None:
        """Compare with earlier accesses of the same bytes, then record this one."""
        tables, block = self.tables, self.blocks.setdefault((shape, size), len(self.blocks) + 1)
        spread = (addresses[:, None] + np.arange(size, dtype=np.uint64)).ravel().astype(np.int64)
        at = tables.indices(spread)
        lane = np.repeat((block << 40) + positions, size)
        self._between_programs(at, kind)
        if kind == "load":
            if ((tables["write_interval"][at] == self.interval) & (tables["write_lane"][at] != lane)).any():
                self.report("a lane loads what another lane stored, with no barrier between")
            first = (tables["read_interval"][at] != self.interval) | (tables["read_lane"][at] == lane)
            tables["read_lane"][at] = np.where(first, lane, _SEVERAL)
            # Two lanes of this same load.
            tables["read_lane"][at[tables["read_lane"][at] != lane]] = _SEVERAL
            tables["read_interval"][at] = self.interval
            return
        read_by_others = (tables["read_interval"][at] == self.interval) & (tables["read_lane"][at] != lane)
        if read_by_others.any():
            self.report("a lane stores where another lane loaded, with no barrier between")
        if kind == "store":
            assert stored is not None
            self._same_store(at, lane, size, stored, real)
            tables["write_lane"][at] = lane
            tables["write_interval"][at] = self.interval

    def _same_store(
        self, at: np.ndarray, lane: np.ndarray, size: int, stored: np.ndarray, real: np.ndarray
    ) -> None:
        """Report lanes that store different values to one address, in one store or since the last barrier."""
        tables = self.tables
        data = np.ascontiguousarray(stored).view(np.uint8).reshape(-1)
        width = stored.dtype.itemsize
        assert width == size, f"a store of {width} bytes through a pointer to {size}"
        _, first, inverse = np.unique(at, return_index=True, return_inverse=True)
        if len(first) != len(at) and (data[first][inverse] != data).any():
            self.report("two lanes of one store write different values to one address")
        other = (tables["write_interval"][at] == self.interval) & (tables["write_lane"][at] != lane)
        if other.any():
            byte_addresses = np.repeat(real, size) + np.tile(np.arange(size, dtype=np.uint64), len(real))
            if (_bytes_at(byte_addresses[other]) != data[other]).any():
                self.report("two lanes store different values to one address, with no barrier between")

    def _between_programs(self, at: np.ndarray, kind: str) -> None:
        """Report conflicts with other programs' accesses to these bytes, then record this access."""
        tables, me = self.tables, self.number

        def others(name: str) -> bool:
            who = tables[name][at]
            return bool(((who != 0) & (who != me)).any())

        if others("writer"):
            self.report(f"{kind} where another program stores")
        if kind != "atomic" and others("atomic"):
            self.report(f"{kind} where another program has an atomic")
        if kind != "load" and others("reader"):
            self.report(f"{kind} where another program loads")
        column = tables[{"load": "reader", "store": "writer", "atomic": "atomic"}[kind]]
        who = column[at]
        column[at] = np.where((who == 0) | (who == me), me, _SEVERAL)


def _element_bytes(pointers: Any) -> int:
    return max(1, pointers.get_element_ty().primitive_bitwidth // 8)


def _bytes_at(addresses: np.ndarray) -> np.ndarray:
    from triton._C.libtriton import interpreter as memory  # type: ignore[import-not-found]

    everything = np.ones(addresses.shape, dtype=bool)
    return memory.load(addresses, everything, np.zeros(addresses.shape, dtype=np.uint8), np.dtype(np.uint8))


def _order(grid: tuple[int, ...], most: int | None, shuffle: random.Random) -> list[tuple[int, ...]]:
    """Return the programs of a grid in random order; at most `most`, including the first and the last."""
    total = grid[0] * grid[1] * grid[2]
    if most is None or total <= most:
        numbers = list(range(total))
    else:
        numbers = [0, total - 1, *(shuffle.randrange(total) for _ in range(most - 2))]
        numbers = list(dict.fromkeys(numbers))
    shuffle.shuffle(numbers)
    return [(n % grid[0], n // grid[0] % grid[1], n // (grid[0] * grid[1])) for n in numbers]


@contextlib.contextmanager
def checked_launches(
    most_programs: int | None = None, stop_at_first: bool = False
) -> Iterator[CheckedLaunches]:
    """Check every launch of the interpreter inside this context.

    Args:
        most_programs: run at most this many programs of a grid, including the first and the last.
        stop_at_first: whether the first problem raises an exception inside the launch.

    Raises:
        RuntimeError: without TRITON_INTERPRET=1, because compiled kernels cannot be checked.
    """
    import triton.runtime.interpreter as interpreter
    from triton import knobs

    if not knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET: expected 1 before the kernels are imported, got 0")
    hooks = _Hooks(interpreter, CheckedLaunches(stop_at_first), random.Random(0), most_programs)
    with contextlib.ExitStack() as stack:
        for owner, name, function in hooks.replacements():
            stack.enter_context(mock.patch.object(owner, name, function))
        yield hooks.result


class _Hooks:
    """Replacements for parts of the interpreter: arguments, grid and memory operations of a launch."""

    def __init__(
        self, interpreter: Any, result: CheckedLaunches, shuffle: random.Random, most: int | None
    ) -> None:
        self.interpreter, self.result, self.shuffle, self.most = interpreter, result, shuffle, most
        self.running: list[_Launch] = []
        self.original: dict[str, Callable[..., Any]] = {}

    def replacements(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        builder, executor = self.interpreter.InterpreterBuilder, self.interpreter.GridExecutor
        methods = {
            "create_masked_load": (builder, self.load),
            "create_masked_store": (builder, self.store),
            "create_atomic_rmw": (builder, self.atomic_rmw),
            "create_atomic_cas": (builder, self.atomic_cas),
            "create_barrier": (builder, self.barrier),
            "set_grid_dim": (builder, self.set_grid_dim),
            "set_grid_idx": (builder, self.set_grid_idx),
            "__call__": (executor, self.call),
            "_implicit_cvt": (self.interpreter, self.convert),
        }
        self.original = {name: getattr(owner, name) for name, (owner, _) in methods.items()}
        # A plain function becomes a method of the class it is assigned to; a bound method does not.
        return [
            (owner, name, lambda *args, method=method, **options: method(*args, **options))
            for name, (owner, method) in methods.items()
        ]

    def call(self, executor: Any, *arguments: Any, **options: Any) -> Any:
        """Run one launch: the interpreter's loop over a 1-D grid, one iteration per program in `order`."""
        name, requested = executor.fn.__name__, executor.grid
        launch = _Launch(name, {executor.fn.__code__.co_filename}, self.result)

        def grid(bound: dict[str, Any]) -> tuple[int, int, int]:
            whole: Any = requested(bound) if callable(requested) else requested
            launch.grid = (*whole, *itertools.repeat(1, 3 - len(whole)))
            launch.order = _order(launch.grid, self.most, self.shuffle)
            return len(launch.order), 1, 1

        executor.grid = grid
        self.running.append(launch)
        self.result.launches[name] += 1
        try:
            return self.original["__call__"](executor, *arguments, **options)
        finally:
            self.running.pop()
            executor.grid = requested

    def set_grid_dim(self, builder: Any, *_: int) -> None:
        self.original["set_grid_dim"](builder, *self.running[-1].grid)

    def set_grid_idx(self, builder: Any, number: int, *_: int) -> None:
        self.original["set_grid_idx"](builder, *self.running[-1].start_program(number))

    def convert(self, argument: Any) -> Any:
        """Convert a tensor to an address in its storage's range and a float to float32, as on a GPU."""
        converted = self.original["_implicit_cvt"](argument)
        if self.running and isinstance(argument, float):
            tl = self.interpreter.tl
            number = self.interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
            return tl.tensor(number, tl.float32)
        if self.running and hasattr(argument, "data_ptr"):
            tensor = self.interpreter._unwrap_tensor(argument)
            converted.handle.data = np.array([self.running[-1].address_of(tensor)], dtype=np.uint64)
        return converted

    def load(self, builder: Any, pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        addresses, inside = self._checked(pointers, mask, "load")
        return self.original["create_masked_load"](builder, addresses, inside, *rest, **options)

    def store(self, builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        addresses, inside = self._checked(pointers, mask, "store", value)
        return self.original["create_masked_store"](builder, addresses, value, inside, *rest, **options)

    def atomic_rmw(
        self, builder: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        addresses, inside = self._checked(pointers, mask, "atomic")
        return self.original["create_atomic_rmw"](builder, operation, addresses, value, inside, *rest)

    def atomic_cas(self, builder: Any, pointers: Any, *rest: Any) -> Any:
        addresses, inside = self._checked(pointers, True, "atomic")
        if not inside.data.all():
            raise IndexError("tl.atomic_cas out of bounds")
        return self.original["create_atomic_cas"](builder, addresses, *rest)

    def barrier(self, builder: Any, *rest: Any) -> Any:
        self.running[-1].barrier()
        return self.original["create_barrier"](builder, *rest)

    def _checked(self, pointers: Any, mask: Any, kind: str, value: Any = None) -> tuple[Any, Any]:
        """Return real addresses and the mask of in-bounds elements as interpreter handles."""
        real, inside = self.running[-1].access(pointers, mask, kind, value)
        handle = self.interpreter.TensorHandle
        return handle(real, pointers.dtype), handle(inside, self.interpreter.tl.int1)
