"""`leanstep diagnose --device h100`: what removing each finding would gain on that device, predicted.

The script is rehearsed once; a finding's gain is the step replayed without its waste, on its line. "0%: the
device is the bottleneck" is an answer: the host had time to spare, and the finding can wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from leanstep.commands import BadInput
from leanstep.diagnose.findings import Finding
from leanstep.diagnose.rules import RULES
from leanstep.rehearse import what_if
from leanstep.rehearse.cuda_allocator import memory_of
from leanstep.rehearse.devices import Device
from leanstep.rehearse.events import Event, HostWait, Kernel, Launch, Recording
from leanstep.tape.lines import Line
from leanstep.tape.run import Program
from leanstep.units import gib

Data = dict[str, Any]
Place = Callable[[Line | None], bool]


def at(file: str, number: int) -> Place:
    """Whether an event comes from this line of this file."""
    return lambda line: line is not None and (line.file, line.number) == (file, number)


def without_reads(here: Place) -> what_if.Transform:
    def transform(events: Sequence[Event]) -> Sequence[Event]:
        return [
            e
            for e in events
            if not (here(getattr(e, "line", None)) and (isinstance(e, HostWait) or _is_read(e)))
        ]

    return transform


def _is_read(event: Event) -> bool:
    return isinstance(event, Launch) and event.name == "to host"


def one_pass(here: Place) -> what_if.Transform:
    """The line's tiny kernels as one, forward and backward each: what a vectorised form would launch."""

    def transform(events: Sequence[Event]) -> Sequence[Event]:
        first: dict[str, int] = {}
        moved: dict[str, float] = {}
        out: list[Event] = []
        for event in events:
            if not (isinstance(event, Launch) and here(event.line)) or any(k.flops for k in event.kernels):
                out.append(event)
                continue
            phase = event.phase
            moved[phase] = moved.get(phase, 0.0) + sum(k.nbytes for k in event.kernels)
            if phase not in first:
                first[phase] = len(out)
                out.append(event)
        for phase, index in first.items():
            launch = out[index]
            assert isinstance(launch, Launch)
            out[index] = replace(launch, kernels=(Kernel("pointwise", moved[phase]),))
        return out

    return transform


def without_kernels(here: Place, *kinds: str) -> what_if.Transform:
    """Drop the line's kernels of these kinds."""

    def transform(events: Sequence[Event]) -> Sequence[Event]:
        def goes(event: Event) -> bool:
            if not isinstance(event, Launch) or not event.kernels or not here(event.line):
                return False
            return all(kernel.kind in kinds for kernel in event.kernels)

        return [event for event in events if not goes(event)]

    return transform


def fewer_rows(here: Place, share: float) -> what_if.Transform:
    """The line's kernels on a share of their rows."""

    def smaller(kernel: Kernel) -> Kernel:
        sizes = kernel.sizes
        if kernel.kind == "gemm" and len(sizes) == 4:
            # The rows are the longest side that is not the vocabulary's; in the weight's gradient, the sum.
            batch, m, n, k = sizes
            sizes = (batch, max(1, int(m * share)), n, k) if m >= k else (batch, m, n, max(1, int(k * share)))
        return kernel._replace(nbytes=kernel.nbytes * share, flops=kernel.flops * share, sizes=sizes)

    def transform(events: Sequence[Event]) -> Sequence[Event]:
        return [
            replace(e, kernels=tuple(smaller(k) for k in e.kernels))
            if isinstance(e, Launch) and here(e.line)
            else e
            for e in events
        ]

    return transform


def transform_for(finding: Data, recording: Recording, file: str) -> what_if.Transform | None:
    """The step without this finding's waste; None where a replay cannot tell."""
    here = at(file, int(finding["line"]))
    removes, evidence = RULES[finding["rule"]].removes, finding.get("evidence") or {}
    if removes == "reads":
        return without_reads(here)
    if removes == "small ops":
        return one_pass(here)
    if removes == "optimizer loop":
        return what_if.fused_optimizer(recording.storages)
    if removes in ("fill", "strided"):
        return without_kernels(here, removes)
    if removes == "cast":
        return without_kernels(here, "cast", "pointwise")
    if removes == "rows" and evidence.get("rows"):
        return fewer_rows(here, 1 - finding["count"] / evidence["rows"])
    return None


def gains(findings: Sequence[Data], files: Sequence[str], recording: Recording, device: Device) -> Data:
    """Per finding: milliseconds and share of the step that it costs on the device, and why."""
    now = what_if.update_step(recording, device)
    if now is None:
        reason = (
            recording.refused.reason if recording.refused is not None else "fewer than two steps were seen"
        )
        raise BadInput(f"--device: no step could be predicted: {reason}")
    entries = []
    for finding, file in zip(findings, files, strict=True):
        entry: Data = {"gain_ms": None, "gain_share": None, "why": ""}
        transform = transform_for(finding, recording, file)
        if transform is None:
            removes = RULES[finding["rule"]].removes
            entry["why"] = "a matter of this CPU" if removes == "this CPU" else "a replay cannot tell"
            if removes == "wide tensors":
                memory = memory_of(recording, device.memory_bytes, device.context_bytes, points=1)
                least = min(memory.without.values(), default=memory.allocated)
                entry["gain_bytes"] = memory.allocated - least
                entry["why"] = f"{gib(entry['gain_bytes'])} of {gib(memory.allocated)} peak"
        else:
            then = what_if.update_seconds(recording, device, transform)
            saved = max(0.0, now.step_s - then) if then is not None else 0.0
            entry["gain_ms"], entry["gain_share"] = saved * 1e3, saved / now.step_s
            if saved < 0.005 * now.step_s:
                bound = {
                    "device": "the device is the bottleneck",
                    "host": "other host work is the bottleneck",
                }
                entry["why"] = bound.get(now.bound_by, "hidden behind other work")
        entries.append(entry)
    return {
        "device": device.key,
        "predicted": True,
        "step_ms": now.step_s * 1e3,
        "bound_by": now.bound_by,
        "findings": entries,
    }


def text(report: Data, findings: Sequence[Data]) -> str:
    """Format the report: a header and one line per finding."""
    bound = "sync" if report["bound_by"] == "syncs" else report["bound_by"]
    lines = [f"on {report['device']} (predicted): {report['step_ms']:.2f} ms per step, {bound}-bound"]
    for finding, gain in zip(findings, report["findings"], strict=True):
        where = f"{finding['rule']} {finding['file']}:{finding['line']}"
        if gain["gain_ms"] is None:
            lines.append(f"  {where}: {gain['why']}")
        else:
            why = f": {gain['why']}" if gain["why"] else f", {gain['gain_ms']:.2f} ms less"
            lines.append(f"  {where}: {100 * gain['gain_share']:.0f}%{why}")
    return "\n".join(lines)


def add_gains(
    report: Data, findings: Sequence[Finding], program: Program, args: Sequence[str], device: Device
) -> str:
    """Rehearse the script, put `on` into the diagnose report, return the lines to show."""
    from leanstep.rehearse.events import Request
    from leanstep.rehearse.stage import RehearsalError, rehearse

    try:
        recording = rehearse(Request(program.name, tuple(args), device=device.key), quiet=True)
    except RehearsalError as error:
        raise BadInput(f"--device: {error}") from None
    if not any(isinstance(event, Launch) and event.kernels for event in recording.events):
        raise BadInput(
            f"--device: {program} launched nothing on the device: does it ask torch.cuda.is_available()?"
        )
    report["on"] = gains(report["findings"], [f.line.file for f in findings], recording, device)
    return text(report["on"], report["findings"])
