"""From a trace to findings: the rules' verdicts, with costs from the trace's device and idle time.

`TraceRun` replaces the `Watch` of a live diagnosis: the same screen, JSON, SARIF and gates read it.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from leanstep.diagnose.compiled import CompiledReport
from leanstep.diagnose.cost import SYNC_SECONDS, gpu_step_seconds
from leanstep.diagnose.find import find
from leanstep.diagnose.findings import Finding
from leanstep.diagnose.iteration_times import IterationClock, PhaseTotal
from leanstep.diagnose.rules import RULES, Limits
from leanstep.diagnose.step import Step, steps_of
from leanstep.diagnose.traces.timeline import Gap, Timeline, each, is_launch
from leanstep.diagnose.traces.trace_file import KERNEL, NOTE, OP, read_trace
from leanstep.diagnose.traces.trace_lines import Places
from leanstep.diagnose.traces.trace_tape import TraceTape
from leanstep.escape import printable
from leanstep.tape.events import BACKWARD, FORWARD, IDLE, OPTIMIZER, Event
from leanstep.tape.lines import UNKNOWN_LINE, Line, Site
from leanstep.units import seconds as in_words

# The innermost line with this share of a gap's idle time is its place.
MOSTLY = 0.7
_COLLECTIVE = re.compile(r"nccl|all_?reduce|reduce_?scatter|all_?gather", re.IGNORECASE)


class TraceRun:
    """The findings of one trace."""

    def __init__(self, path: str, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        trace = read_trace(path)
        if not any(kind == OP for kind in trace.kind):
            raise ValueError(
                f"{path} has no host ops, so nothing can be attributed: profile with activities="
                "[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
            )
        self.timeline = Timeline(trace)
        self.places = Places(self.timeline, Path(path).resolve().parent)
        self.events = TraceTape(self.timeline, self.places)
        self._add_idle()
        self.tape = self.events.tape()
        self.steps: list[Step] = steps_of(self.tape)
        # The attributes of a Watch that the screen and the JSON read.
        self.warmup_done, self.num_warmup = 0, 0
        self.boundary, self.iterations = self.timeline.boundary, None
        self.step_seconds, self.step_is_bound = self.timeline.step_us / 1e6, False
        self.waited_seconds = 0.0
        self.accelerator = self.timeline.has_device
        self.clock = SimpleNamespace(parts=None)
        self.phases: list[PhaseTotal] = []
        self.iteration_clock, self.iteration_seconds, self.has_loader = IterationClock(), None, True
        self.compiled = CompiledReport()

    @property
    def device(self) -> str:
        devices = self.timeline.trace.facts.get("deviceProperties")
        names = [d.get("name") for d in devices if isinstance(d, dict)] if isinstance(devices, list) else []
        if names and names[0]:
            return printable(str(names[0]))
        return "a GPU" if self.timeline.has_device else "CPU only"

    @property
    def facts(self) -> list[str]:
        """Return the header: what was read."""
        line = self.timeline
        count = len(self.steps)
        part = line.trace.part
        parts = [self.device, f"{len(line.trace):,} events" + " held" * (part is not None)]
        if part is not None:
            parts.append(f"steps {part.first} to {part.last} of {part.total}")
        parts.append(f"{count} step{'s' * (count != 1)} of {in_words(self.step_seconds)}")
        if line.has_device:
            idle, span = line.idle()
            causes = [f"{us / span:.0%} {cause}" for cause, us in idle.items() if us >= 0.01 * span]
            parts.append(
                f"device idle {sum(idle.values()) / span:.0%}" + f" ({', '.join(causes)})" * bool(causes)
            )
            names = line.trace.names.texts
            shared = np.array([bool(_COLLECTIVE.search(name)) for name in names], bool)[
                line.name[line.active]
            ]
            together = float((line.end - line.start)[line.active][shared].sum())
            if together >= 0.1 * span:
                parts.append(f"collectives {together / span:.0%}")
        return parts

    @property
    def not_seen(self) -> list[dict[str, str]]:
        line, notes = self.timeline, []
        texts = line.trace.names.texts
        if not line.has_device:
            notes.append(("dropped", "device events: reads are counted, their cost on a GPU is assumed"))
        if not self.events.has_shapes:
            notes.append(
                ("dropped", "shapes (record_shapes=True): layouts and vocabulary-wide tensors need them")
            )
        if not self.places.has_lines and not line.trace.stack_of:
            notes.append(
                ("dropped", "stacks (with_stack=True): places are call paths of ops, not source lines")
            )
        if self.places.has_lines:
            notes.append(
                ("dropped", "lines (the profiler records functions): a place is a function's first line")
            )
        if line.num_devices > 1:
            notes.append(("rank", f"{line.num_devices - 1} other devices: the busiest one is judged"))
        if any("GraphLaunch" in text for text in texts):
            notes.append(("cuda-graph", "each CUDA graph counts as one launch"))
        if any(text.startswith(("Torch-Compiled Region", "CompiledFunction")) for text in texts):
            notes.append(("compiled", "compiled regions: their kernels have the region's line"))
        return [{"kind": kind, "where": "", "note": note} for kind, note in notes]

    # Idle time

    def _add_idle(self) -> None:
        """Assign every gap of the device to one line: waits already have theirs."""
        line = self.timeline
        loops = self._loops()
        self._pauses: list[dict[Line, tuple[float, Counter[str]]]] = [{} for _ in line.windows]
        stretches: list[dict[str, list[Gap]]] = [defaultdict(list) for _ in self.timeline.windows]
        for gap in line.gaps:
            number = line.step_at(float(line.start[gap.launch])) if gap.launch >= 0 else -1
            if number < 0:
                continue
            if gap.data_us > 0:
                self._pause(number, gap)
            if gap.cause in ("launch", "optimizer"):
                site, direct = self.places.site(gap.launch)
                if site.line in loops[number]:
                    self.events.busy[number]["op", site.line] += gap.length
                else:
                    phase = (
                        OPTIMIZER if gap.cause == "optimizer" else self.events.phase_of(gap.launch, direct)
                    )
                    stretches[number][phase if phase in (FORWARD, OPTIMIZER) else BACKWARD].append(gap)
        launches = self._launches()
        for number, phases in enumerate(stretches):
            for phase, gaps in phases.items():
                where = self._common_place(gaps, phase)
                idle_us = sum(gap.length for gap in gaps)
                self._idle(number, gaps[0].start, "launch", where, phase, launches[number][phase], idle_us,
                           self._launched_by(gaps))  # fmt: skip
        pauses = [dict(idle) for idle in self._pauses]
        if len(pauses) > 1 and not pauses[0]:
            # The time before the first step is not in the trace.
            pauses[0] = pauses[1]
        for number, idle in enumerate(pauses):
            for line_, (idle_us, by) in idle.items():
                self._idle(number, 0.0, "pause", line_, FORWARD, by.total(), idle_us, by)

    def _idle(
        self, number: int, start: float, name: str, line: Line, phase: str, count: int, idle_us: float,
        by: Counter[str],
    ) -> None:  # fmt: skip
        """Add idle time of the device as an event."""
        took, named = round(1e3 * idle_us), tuple(by.items())
        event = Event(IDLE, name, Site(line), phase, named=named, value=count, took_ns=took)
        self.events.add(number, start, event)

    def _loops(self) -> list[set[Line]]:
        """Return the lines that launch many small kernels: idle time between these is theirs."""
        rules = [rule for rule in RULES.values() if rule.removes in ("small ops", "optimizer loop")]
        return [
            {hit.line for rule in rules for hit in rule.check(step, self.limits[rule.name])}
            for step in steps_of(self.events.tape())
        ]

    def _launches(self) -> list[Counter[str]]:
        line = self.timeline
        launches: list[Counter[str]] = [Counter() for _ in self.timeline.windows]
        for activity in each(line.active[line.kind[line.active] == KERNEL]):
            call = line.call_of(activity)
            number = line.step_at(float(line.start[call])) if call >= 0 else -1
            if number >= 0 and is_launch(line.text(call)):
                phase = self.events.phase_of(call)
                launches[number][phase if phase in (FORWARD, OPTIMIZER) else BACKWARD] += 1
        return launches

    def _pause(self, number: int, gap: Gap) -> None:
        line = self.timeline
        notes = np.flatnonzero((line.kind == NOTE) & (line.end > gap.start) & (line.start < gap.end))
        loaders = [i for i in notes.tolist() if line.text(i).startswith("enumerate(DataLoader)")]
        site = self.places.site(loaders[0])[0] if loaders else Site(Line("between steps", 0))
        entry = self._pauses[number].setdefault(site.line, (0.0, Counter()))
        by = entry[1] + Counter({"DataLoader" if loaders else "no op ran": 1})
        self._pauses[number][site.line] = (entry[0] + gap.data_us, by)

    def _common_place(self, gaps: list[Gap], phase: str) -> Line:
        """Return the innermost line that leads to most of the idle time, or the phase if there is none."""
        total = sum(gap.length for gap in gaps)
        idle: dict[tuple[Line, ...], float] = defaultdict(float)
        for gap in gaps:
            path = tuple(self.places.path_of(gap.launch))
            for depth in range(1, len(path) + 1):
                idle[path[:depth]] += gap.length
        paths = [path for path, us in idle.items() if us >= MOSTLY * total]
        if paths:
            return max(paths, key=len)[-1]
        return self._backward_line(gaps) or Line(phase, 0, phase)

    def _backward_line(self, gaps: list[Gap]) -> Line | None:
        """Return the line that called backward(): on a GPU the nodes run on a thread without frames."""
        line = self.timeline
        middle = gaps[len(gaps) // 2].start
        calls = [
            number
            for number, text in enumerate(line.trace.names.texts)
            if text.startswith("torch/_tensor.py(") and text.endswith(": backward")
        ]
        around = np.flatnonzero(np.isin(line.name, calls) & (line.start <= middle) & (line.end >= middle))
        return self.places.site(int(around[0]))[0].line if len(around) else None

    def _launched_by(self, gaps: list[Gap]) -> Counter[str]:
        """Return how many gaps end with a launch of each op."""
        line = self.timeline
        ops: Counter[str] = Counter()
        for gap in gaps:
            owner = int(line.shown[gap.launch])
            ops[line.text(owner if owner >= 0 else gap.launch).removeprefix("aten::")] += 1
        return Counter(dict(ops.most_common(3)))

    # Verdict

    def findings(self) -> list[Finding]:
        """Return the findings that hold on every step, most expensive first."""
        names = [name for name, rule in RULES.items() if rule.traces or rule.needs == "trace"]
        ranked = [f for f in find(self.steps, self.limits, names) if f.line is not UNKNOWN_LINE]
        on_gpu = gpu_step_seconds(self.steps)
        for finding in ranked:
            self._price(finding, on_gpu)
        ranked.sort(key=lambda f: (-(f.share or 0.0), -(f.seconds or 0.0), -f.count))
        for number, finding in enumerate(ranked, 1):
            finding.rank = number
        return ranked

    def _price(self, finding: Finding, on_gpu: float) -> None:
        removes = RULES[finding.rule].removes
        held = finding.work.held_bytes or finding.work.strided_bytes / 2
        finding.bytes = int(held) or finding.evidence.get("bytes")
        finding.basis = "measured"
        if removes == "reads" and not self.timeline.has_device:
            low, high = SYNC_SECONDS
            middle = finding.count * (low + high) / 2
            finding.seconds_range = (finding.count * low, finding.count * high)
            finding.basis, finding.share = "assumed", middle / (middle + on_gpu)
            return
        if finding.work.seconds is None:
            finding.work.seconds = statistics.median(self._spent_us(finding.line, removes)) / 1e6
        finding.seconds = finding.work.seconds
        # A trace measures time: a memory figure would hide it on the screen.
        finding.work.held_bytes = 0
        finding.share = finding.seconds / self.step_seconds if self.step_seconds else None
        finding.what = self._what(finding, removes)

    def _spent_us(self, line: Line, removes: str | None) -> list[float]:
        """Return the microseconds per step that a line kept the device busy, or idle where it waits."""
        if removes == "wide tensors":
            widths = [step.heads.width for step in self.steps]
            spent = zip(self.events.wide, widths, strict=True)
            return [by_line.get((line, width), 0.0) for by_line, width in spent]
        kind = {"reads": "wait", "strided": "layout"}.get(removes or "", "op")
        return [busy.get((kind, line), 0.0) for busy in self.events.busy]

    def _what(self, finding: Finding, removes: str | None) -> str:
        spent = in_words(finding.seconds)
        if removes == "reads":
            waited = statistics.median(b.get(("held", finding.line), 0.0) for b in self.events.busy) / 1e6
            return f"{finding.what} The host waits {in_words(waited)}, the device idles {spent}."
        if removes == "wide tensors":
            shapes = ", ".join(f"{n} × {shape}" for shape, n in finding.evidence["shapes"].items())
            return f"Vocabulary-wide tensors are written here: {shapes}; ops on them take {spent}."
        if RULES[finding.rule].needs == "trace" and "share" in finding.evidence:
            return finding.what
        place = "device, including idle gaps between its launches" if self.timeline.has_device else "host"
        return f"{finding.what} In the trace: {spent} of the {place}."
