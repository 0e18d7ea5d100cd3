"""pytest plugin: fail a test if a training step exceeds its budget of waste.

    def test_step(leanstep):
        with leanstep.budget(host_reads=0, op_storms=0, peak_mib=512):
            step()

or, for the whole test, `@pytest.mark.leanstep(host_reads=0)`. The failure shows each line over budget with
its fix. pytest loads this file in every run: only pytest is imported until a test uses a budget.
"""

from __future__ import annotations

import math
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

_MARKER = "leanstep(host_reads=, op_storms=, peak_mib=, rules={id: lines}): budget of the test's step"
# Threads of progress bars, queues and timeouts, which do not compute.
_IDLE_THREADS = ("tqdm", "QueueFeeder", "TMonitor", "pymp", "pytest_timeout")
MIB = 2**20


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    marker = pyfuncitem.get_closest_marker("leanstep")
    if marker is None:
        return (yield)
    try:
        budget = Leanstep().budget(*marker.args, **marker.kwargs)
    except TypeError:
        options = [*map(repr, marker.args), *(f"{name}={value!r}" for name, value in marker.kwargs.items())]
        raise _refused(f"expected keywords of the mark {_MARKER}; got {', '.join(options)}") from None
    with budget:
        return (yield)


@pytest.fixture
def leanstep() -> Leanstep:
    """Provide `leanstep.budget(...)`, which limits the waste of a block."""
    return Leanstep()


class Leanstep:
    """The object that the fixture provides."""

    def budget(
        self,
        *,
        host_reads: int | None = None,
        op_storms: int | None = None,
        peak_mib: float | None = None,
        rules: Mapping[str, int] | None = None,
    ) -> Budget:
        """Record a block as one training step, and fail the test if it exceeds the budget.

        Args:
            host_reads: reads of a device value by the host, in the whole block.
            op_storms: lines that repeat a tiny op.
            peak_mib: memory above the level at the start of the block, in MiB.
            rules: rule of `leanstep diagnose` -> number of lines that may break it, such as {"dead-rows": 0}.

        What is not given comes from [tool.leanstep.budgets] in pyproject.toml. A line that says
        `# leanstep: ignore[host-sync]` is not counted. On the CPU the peak comes from torch's
        profiler, of which there is one per process.
        """
        passed = {"host_reads": host_reads, "op_storms": op_storms, "peak_mib": peak_mib}
        limits = {**_configured(), **{name: value for name, value in passed.items() if value is not None}}
        return Budget(limits, dict(rules or {}))


def _configured() -> dict[str, float]:
    """The budgets in pyproject.toml."""
    from leanstep.config import read_config
    from leanstep.files import BadInput

    try:
        return read_config().budgets
    except BadInput as error:
        raise _refused(str(error)) from None


class Budget:
    """A block and its budget. On exit `spent` has the figures and `findings` the lines."""

    def __init__(self, limits: dict[str, float], rules: dict[str, int]) -> None:
        self.limits: dict[str, float] = {}
        self.spent: dict[str, float] = {}
        self.findings: list[Any] = []
        for name, value in (*limits.items(), *rules.items()):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise _refused(f"{name}: expected a number >= 0, got {value!r}")
            self.limits[name] = value
        if not self.limits:
            raise _refused(
                "empty budget: pass host_reads=, op_storms=, peak_mib= or rules=, or set "
                "[tool.leanstep.budgets] in pyproject.toml"
            )
        if rules:
            from leanstep.diagnose.rules import RULE_IDS

            unknown = [name for name in rules if name not in RULE_IDS]
            if unknown:
                raise _refused(f"rules: unknown rule {unknown[0]!r}; expected some of {', '.join(RULE_IDS)}")

    def __enter__(self) -> Budget:
        import torch

        from leanstep.diagnose.watch import Watch

        self._stack = ExitStack()
        self._watch = Watch(steps=1, warmup=0)
        # The block is one step, even if several optimizers step in it.
        self._watch.boundary = "explicit"
        profiles = "peak_mib" in self.limits
        if profiles and torch.autograd._profiler_enabled():
            raise _refused(
                "peak_mib: a torch profiler is already running, and only one can run per process; "
                "omit peak_mib, or stop the profiler around the block"
            )
        try:
            self._stack.enter_context(self._watch)
        except RuntimeError:
            raise _refused(
                "another recording is running in this process (a budget inside a budget, tests in "
                "threads, or leanstep diagnose): only one can run at a time"
            ) from None
        self._threads: list[str] = []
        self._stack.enter_context(_noticed_threads(self._threads))
        self._timeline: list[tuple[float, int]] = []
        self._profiling = ExitStack()
        if profiles:
            from leanstep.measure.peaks import recorded_allocations

            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
                self._cuda_before = torch.cuda.memory_allocated()
            self._timeline = self._profiling.enter_context(recorded_allocations())
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        whole = error is None
        try:
            self._profiling.__exit__(kind, error, trace)
            if whole:
                self._watch.step()
        finally:
            self._stack.__exit__(kind, error, trace)
        if not whole:
            return
        self._count()
        if self._threads:
            names = ", ".join(sorted(set(self._threads))[:3])
            warnings.warn(
                f"leanstep.budget: other threads ran inside the block ({names}): their ops are not counted",
                pytest.PytestWarning,
                stacklevel=2,
            )
        over = [name for name, limit in self.limits.items() if self.spent[name] > limit]
        if over:
            pytest.fail(self._complaint(over), pytrace=False)

    def _count(self) -> None:
        from leanstep.diagnose.find import find
        from leanstep.diagnose.outputs import gate

        self.findings, _ = gate.without_ignored(find(self._watch.steps))
        for name in self.limits:
            if name == "peak_mib":
                self.spent[name] = self._peak_bytes() / MIB
            else:
                lines = self._lines_of(name)
                self.spent[name] = sum(f.count for f in lines) if name == "host_reads" else len(lines)

    def _lines_of(self, name: str) -> list[Any]:
        from leanstep.diagnose.rules import RULES

        removes = {"host_reads": "reads", "op_storms": "small ops"}.get(name, "")
        return [f for f in self.findings if f.rule == name or RULES[f.rule].removes == removes]

    def _peak_bytes(self) -> int:
        import torch

        if self._watch.accelerator and torch.cuda.is_available():
            return torch.cuda.max_memory_allocated() - self._cuda_before
        return max((level for _, level in self._timeline), default=0)

    def _complaint(self, over: list[str]) -> str:
        from leanstep.diagnose.outputs.screen import Entry

        heads = [f"{name} {_figure(self.spent[name])}, at most {_figure(self.limits[name])}" for name in over]
        lines = [f"leanstep.budget: {'; '.join(heads)}"]
        for name in over:
            if name == "peak_mib":
                lines += self._held_lines()
            for finding in self._lines_of(name):
                entry = Entry(finding)
                lines += [
                    f"  {entry.where}: {finding.rule}: {finding.amount}",
                    f"      {entry.inside}{finding.line.statement}",
                    f"    do: {finding.fix}",
                ]
        lines += [f"  not seen: {note['note']}" for note in self._watch.not_seen]
        return "\n".join(lines)

    def _held_lines(self, most: int = 3) -> list[str]:
        """Return the lines that hold the most memory for the backward, and the advice of a rule if any."""
        from leanstep.tape.lines import Line, short_path
        from leanstep.units import size

        held: dict[Line, int] = {}
        for step in self._watch.steps:
            for line, num_bytes in step.held_by_line.items():
                held[line] = held.get(line, 0) + num_bytes
        lines = []
        for line, num_bytes in sorted(held.items(), key=lambda item: -item[1])[:most]:
            lines += [
                f"  {short_path(line.file)}:{line.number}: {size(num_bytes)} held for the backward",
                f"      {line.statement}",
            ]
        advice = {f.fix for f in self.findings if f.work.held_bytes}
        return lines + [f"    do: {text}" for text in advice or {_LESS_MEMORY}]


_LESS_MEMORY = (
    "Use fewer samples per backward (accumulate gradients), or torch.utils.checkpoint on the layers "
    "that hold most."
)


class _noticed_threads:
    """Adds the threads that start inside the block to `names`, with `threading`'s profile hook."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __enter__(self) -> None:
        self._before: Callable[..., Any] | None = threading.getprofile()
        before = self._before

        def began(frame: Any, event: str, argument: Any) -> None:
            sys.setprofile(before)
            name = threading.current_thread().name
            if not name.startswith(_IDLE_THREADS):
                self.names.append(name)

        threading.setprofile(began)

    def __exit__(self, *error: Any) -> None:
        threading.setprofile(self._before)  # type: ignore[arg-type]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value == math.floor(value) or value >= 10 else f"{value:.2g}"


def _refused(text: str) -> BaseException:
    return pytest.fail.Exception(f"leanstep.budget: {text}", pytrace=False)
