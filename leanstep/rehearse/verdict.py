"""The report of a rehearsal: the verdict, then memory, time, syncs and what-ifs; as JSON and as text.

Every figure is labelled as a prediction. The JSON object follows the specification; the text shows the same
in at most 40 lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import leanstep
from leanstep import units
from leanstep.rehearse import iterations, what_if
from leanstep.rehearse.cuda_allocator import Memory, memory_of, place
from leanstep.rehearse.devices import Device
from leanstep.rehearse.events import Extrapolated, Launch, Recording, Step
from leanstep.rehearse.time_model import Clock, Timing
from leanstep.tape.marks import ROLLOUT
from leanstep.units import gib, ms

GIB = 2**30
# Of the JSON object; a key that is renamed or removed raises it.
SCHEMA = 1
_STATUS = {"steps": "ok", "early": "ended early", "refused": "stopped"}
LINES = 40
_OWNER = ("line", "when", "category", "bytes", "storages", "largest")
_PHASE = ("kernels", "calls", "flops", "peak_bytes")
_MOST_ASIDE = 4
_SHARD_RANKS = (2, 4, 8, 16, 32, 64)
Data = dict[str, Any]


def judge(recording: Recording, devices: Sequence[Device], points: int = 240) -> Data:
    """Return the JSON object of a recording: the first device in full, the others as a comparison."""
    device = devices[0]
    memory = memory_of(recording, device.memory_bytes, device.context_bytes, points)
    step = what_if.timed_step(recording, device)
    timing = what_if.update_step(recording, device, step=step)
    refused = recording.refused
    report: Data = {
        "schema": SCHEMA,
        "leanstep": leanstep.__version__,
        "status": _STATUS[recording.ended],
        "reason": refused.reason if refused is not None else "",
        "default_device": recording.request.default_device,
        "device": device.key,
        "device_name": device.name,
        "device_has_rows": device.has_rows,
        "torch": recording.torch,
        "script": recording.request.target,
        "args": list(recording.request.args),
        "ranks": recording.request.ranks,
        "steps": len(recording.steps),
        "iterations": recording.iterations,
        "predicted": True,
        "requested_steps": recording.request.steps,
        "memory": _memory(memory),
        "time": _time(recording, device, timing),
        "aside": _aside(recording, device),
        "iteration": _iteration(recording, iterations.last_iteration(recording, device)),
        "lines": _lines(recording, device, step),
        "host_syncs": [vars(gain) for gain in what_if.sync_gains(recording, device, timing)],
        "what_if": _what_if(recording, device, memory, timing),
        "devices": [
            _summary(device, memory, timing),
            *(_summary(other, *_on(recording, other)) for other in devices[1:]),
        ],
        "assumed": [{**a._asdict(), "line": place(a.line)} for a in recording.assumed],
        "branches": [{**b._asdict(), "line": place(b.line)} for b in recording.branches],
        "notes": [f"{note} ({count})" if count > 1 else note for note, count in recording.notes.items()],
        "batches": recording.batches,
        "refused": {"line": place(refused.line), "reason": refused.reason} if refused is not None else None,
    }
    report["verdict"] = verdict(report)
    return report


def _memory(memory: Memory) -> Data:
    return {
        "allocated_bytes": memory.allocated,
        "reserved_bytes": memory.reserved,
        "context_bytes": memory.context,
        "capacity_bytes": memory.capacity,
        "fits": memory.fits,
        "failed_line": memory.failed_line,
        "advice": memory.advice,
        "at": {"step": memory.step, "line": memory.line},
        "category_bytes": memory.categories,
        "owners": [dict(zip(_OWNER, owner, strict=True)) for owner in memory.owners[:40]],
        "timeline": [{"event": event, **by} for event, by in memory.timeline],
    }


def _time(recording: Recording, device: Device, timing: Timing | None) -> Data | None:
    if timing is None:
        return None
    by_type = timing.flops.by_type
    entry = {
        "step_ms": timing.step_s * 1e3,
        "interval_ms": [t * 1e3 for t in timing.interval_s],
        "device_ms": timing.device_s * 1e3,
        "host_ms": timing.host_s * 1e3,
        "link_ms": timing.link_s * 1e3,
        "exposed_ms": timing.exposed_s * 1e3,
        "bound_by": timing.bound_by,
        "kernels": timing.kernels,
        "calls": timing.calls,
        "host_syncs": timing.waits,
        "flops": timing.flops.model,
        "mfu": timing.mfu(device),
        # Of most of the model's FLOPs.
        "mfu_dtype": max(by_type, key=lambda name: by_type[name], default="bfloat16"),
        "class_ms": {k: v * 1e3 for k, v in sorted(timing.classes.items(), key=lambda item: -item[1])},
        "compiled": bool(recording.regions),
    }
    return {**entry, "eager_ms": None} if recording.regions else entry


def eager_ms(recording: Recording, device: Device) -> float | None:
    """Return the step of a program that was rehearsed without torch.compile."""
    plain = what_if.update_step(recording, device, compiled=False)
    return plain.step_s * 1e3 if plain is not None else None


def eager_line(report: Data) -> str:
    eager = report["time"]["eager_ms"]
    return f"  without torch.compile: {ms(eager) if eager is not None else 'no step'} per step, predicted"


def _aside(recording: Recording, device: Device) -> list[Data]:
    """Return the steps that contain forwards without gradients, and the time of those."""
    return [
        {"step": step.number, "ms": 1e3 * what_if.aside_seconds(recording, device, step)}
        for step in recording.steps[-_MOST_ASIDE:]
        if any(not is_update for is_update, _ in what_if.pieces_of(recording, step))
    ]


def _iteration(recording: Recording, iteration: iterations.Iteration | None) -> Data | None:
    """Return rollout, scoring and update; None for a script that only makes updates.

    rollout: "none", "priced" or "not priced" (vLLM and similar tools run it in a separate engine).
    """
    if iteration is None:
        return None
    recorded, extrapolated = recording.model_calls
    priced = any(entry.phase == ROLLOUT for entry in iteration.phases)
    return {
        "ms": iteration.seconds * 1e3,
        "steps": len(iteration.steps),
        "whole": iteration.whole,
        "rollout": "none" if not recording.iterations else "priced" if priced else "not priced",
        "last_step_has_rollout": iterations.has_rollout(recording, recording.steps[-1]),
        "model_calls": recorded + extrapolated,
        "extrapolated_calls": extrapolated,
        "phases": [
            {
                "phase": entry.phase,
                "ms": entry.seconds * 1e3,
                "device_ms": entry.device_s * 1e3,
                "host_ms": entry.host_s * 1e3,
                "host_syncs": entry.waits,
                **{name: getattr(entry, name) for name in _PHASE},
            }
            for entry in iteration.phases
        ],
    }


def _lines(recording: Recording, device: Device, step: Step | None) -> list[Data]:
    clock = Clock(device)
    times: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for event in what_if.update_events(recording, step) if step is not None else ():
        parts: Iterable[Any] = event.parts if isinstance(event, Extrapolated) else ()
        if isinstance(event, Launch):
            parts = [(event.line, kernel, 1) for kernel in event.kernels]
        for where, kernel, repeats in parts:
            line = place(where)
            times[line] = times.get(line, 0.0) + repeats * clock.price(kernel)
            counts[line] += repeats * kernel.launches
    return [
        {"line": line, "device_ms": time * 1e3, "kernels": counts[line]}
        for line, time in sorted(times.items(), key=lambda item: -item[1])[:20]
    ]


def _what_if(recording: Recording, device: Device, memory: Memory, timing: Timing | None) -> Data:
    entry: Data = {"without_bytes": {str(width): size for width, size in memory.without.items()}}
    if timing is None:
        return entry

    def milliseconds(transform: what_if.Transform) -> float | None:
        then = what_if.update_seconds(recording, device, transform)
        return then * 1e3 if then is not None else None

    entry["no_syncs_ms"] = milliseconds(what_if.without_waits())
    # A call that was not run has no neighbours to fuse.
    last = recording.steps[-1]
    if not any(isinstance(e, Extrapolated) for e in recording.events[last.first : last.last]):
        entry["fused_ms"] = milliseconds(what_if.fused)
    entry["fused_optimizer_ms"] = milliseconds(what_if.fused_optimizer(recording.storages))
    entry["free_host_ms"] = timing.device_s * 1e3
    return entry


def _on(recording: Recording, device: Device) -> tuple[Memory, Timing | None]:
    """Return memory and time of the same recording on another device."""
    memory = memory_of(recording, device.memory_bytes, device.context_bytes, points=1)
    return memory, what_if.update_step(recording, device)


def _summary(device: Device, memory: Memory, timing: Timing | None) -> Data:
    """Return one device of the comparison."""
    return {
        "device": device.key,
        "name": device.name,
        "fits": memory.fits,
        "needed_bytes": memory.needed,
        "capacity_bytes": device.memory_bytes,
        "step_ms": timing.step_s * 1e3 if timing is not None else None,
        "interval_ms": [t * 1e3 for t in timing.interval_s] if timing is not None else None,
        "bound_by": timing.bound_by if timing is not None else None,
        "mfu": timing.mfu(device) if timing is not None else None,
    }


def verdict(report: Data) -> str:
    """Say in one sentence whether it fits, the time per step and what bounds it."""
    memory, time = report["memory"], report["time"]
    needed = memory["reserved_bytes"] + memory["context_bytes"]
    needs = f"{needed / GIB:.1f} of {memory['capacity_bytes'] / GIB:.1f} GiB"
    parts = [f"fits: {needs}" if memory["fits"] else f"DOES NOT FIT: {needs} at {memory['failed_line']}"]
    if memory["advice"]:
        parts.append(memory["advice"])
    if time is not None:
        low, high = time["interval_ms"]
        parts.append(
            f"{ms(time['step_ms'])} per step ({ms(low)} to {ms(high)}), {_BOUND[time['bound_by']]}-bound"
        )
        if report["aside"] and not report["iterations"]:
            most = max(report["aside"], key=lambda entry: entry["ms"])
            parts.append(f"plus {ms(most['ms'])} of forwards without gradients in step {most['step']}")
        if report["iteration"] is not None and report["iterations"]:
            parts.append(_iteration_text(report["iteration"]))
        if report["status"] == "ended early":
            parts.append(f"the script ended after {report['steps']} of {report['requested_steps']} steps")
        if report["iterations"]:
            parts.append(f"recorded: {units.steps(report['steps'], report['iterations'])}")
        if decides := list(dict.fromkeys(b["line"] for b in report["branches"] if b["decides_update"])):
            more = f" and {len(decides) - 1} more" if len(decides) > 1 else ""
            parts.append(f"updates depend on an assumed value at {decides[0]}{more}")
    elif report["refused"] is not None:
        stopped = f"stopped at {report['refused']['line']}: {report['refused']['reason']}"
        parts = [stopped] if memory["fits"] else [*parts, stopped]
    else:
        parts.append(f"the script ended after {report['steps']} steps; two are needed for a step time")
    return f"predicted on {report['device']}: " + "; ".join(parts)


def _iteration_text(iteration: Data) -> str:
    """Describe the phases of an iteration, and say when the quoted step has no rollout."""
    phases = ", ".join(f"{entry['phase']} {ms(entry['ms'])}" for entry in iteration["phases"])
    steps = units.steps(iteration["steps"]) + ("" if iteration["whole"] else " so far")
    without = ""
    if iteration["rollout"] == "not priced":
        without = " (excluding the rollout, which runs in a separate engine)"
    elif iteration["rollout"] == "priced" and not iteration["last_step_has_rollout"]:
        without = " (this step has no rollout)"
    return f"an iteration of {steps} {ms(iteration['ms'])}: {phases}{without}"


_BOUND = {"device": "device", "host": "host", "syncs": "sync", "link": "communication"}


# What makes it fit -----------------------------------------------------------------------------------


def what_fits(recording: Recording, device: Device) -> list[Data]:
    """Return the first size that makes a step fit, and bf16 state; both replay the recording."""
    room = device.memory_bytes - device.context_bytes
    changes = [("bf16_state", "optimizer state in bf16")]
    changes += [(f"zero1:{n}", f"optimizer state sharded over {n} ranks") for n in _SHARD_RANKS[:3]]
    changes += [
        (f"fsdp:{n}", f"parameters, gradients and state sharded over {n} ranks") for n in _SHARD_RANKS
    ]
    replayed: list[Data] = []
    for change, text in changes:
        got = what_if.resized_replay(recording, room, change)
        fits = got.failed is None and got.reserved <= room
        if not fits and change != "bf16_state":
            continue
        needed = got.reserved + device.context_bytes if fits else None
        replayed.append({"change": change, "text": text, "needed_bytes": needed, "fits": fits})
        if fits and change != "bf16_state":
            break
    return replayed


# Text ------------------------------------------------------------------------------------------------


def text(report: Data) -> str:
    """Return the report as at most 40 lines of text, the verdict first."""
    lines = [report["verdict"]]
    if report["default_device"]:
        lines.insert(
            0, f"{report['script']} selects no GPU: rehearsed with the GPU as torch's default device"
        )
    if report["batches"]:
        lines.append(f"  {report['batches']}")
    if any("compile" in note for note in report["notes"]) or (report["time"] or {}).get("compiled"):
        lines.append(_compiled_line(report))
    if report["refused"] is not None and report["time"] is not None:
        lines.append(f"  stopped at {report['refused']['line']}: {report['refused']['reason']}")
    if len(report["devices"]) > 1:
        lines += _device_lines(report["devices"])
    lines += _memory_lines(report["memory"])
    lines += _time_lines(report)
    lines += _phase_lines(report["iteration"])
    lines += _what_if_lines(report)
    branches = [
        f"{b['line']} `{b['code'][:60]}` with {b['value']} (x{b['count']})"
        + (" decides an update" if b["decides_update"] else "")
        for b in report["branches"]
    ]
    assumed = [f"{a['kind']} = {a['value']} at {a['line']} (x{a['count']})" for a in report["assumed"]]
    tail = [
        f"{label}  {'; '.join(entries[:2])}"
        + (f"; {len(entries) - 2} more in the JSON" if len(entries) > 2 else "")
        for label, entries in (("branches on assumed values", branches), ("assumed values", assumed))
        if entries
    ]
    # Notes about what did not run as requested come first.
    first = ("counted as eager code", "created no process group")
    notes = sorted(report["notes"], key=lambda note: not any(text in note for text in first))
    tail += [f"note  {note}" for note in notes[:3]]
    if not report["device_has_rows"]:
        tail.append(f"note  no row yet: no published figure of {report['device_name']} was compared")
    tail.append("All figures are predicted from shapes and published device figures; nothing was measured.")
    return "\n".join([*lines[: LINES - len(tail)], *tail])


def _compiled_line(report: Data) -> str:
    if any("ran eagerly" in note for note in report["notes"]):
        return "  torch.compile ran eagerly"
    eager = (report["time"] or {}).get("eager_ms")
    other = f"eager: {ms(eager)} predicted" if eager is not None else "--eager predicts it without compiling"
    return f"  torch.compile: pointwise ops between matrix products are priced as fused (ideal); {other}"


def _device_lines(devices: Sequence[Data]) -> list[str]:
    lines = []
    for d in devices:
        fits = "fits" if d["fits"] else "NO   "
        step = ms(d["step_ms"]) if d["step_ms"] is not None else "-"
        bound = f"{_BOUND[d['bound_by']]}-bound" if d["bound_by"] else "-"
        mfu = f"{100 * d['mfu']:.0f}% MFU" if d["mfu"] else ""
        needs = f"{d['needed_bytes'] / GIB:.1f} of {d['capacity_bytes'] / GIB:.1f} GiB"
        lines.append(f"  {d['device']:8s} {fits:5s} {needs:22s} {step:>10s} per step, {bound}  {mfu}")
    return lines


def _memory_lines(memory: Data) -> list[str]:
    at = memory["at"]
    lines = [
        f"memory (predicted)  allocated {gib(memory['allocated_bytes'])}, "
        f"reserved {gib(memory['reserved_bytes'])}, plus {gib(memory['context_bytes'])} CUDA context; "
        f"peak in step {at['step']} at {at['line']}",
        "  " + ", ".join(f"{name} {gib(size)}" for name, size in memory["category_bytes"].items()),
    ]
    for owner in memory["owners"][:6]:
        lines.append(
            f"  {gib(owner['bytes']):>10s}  {owner['storages']:5d} x {owner['category']:15s}"
            f" {owner['when']:9s} {owner['line']}  largest {owner['largest']}"
        )
    return lines


def _time_lines(report: Data) -> list[str]:
    time = report["time"]
    if time is None:
        return []
    link = ""
    if time["link_ms"]:
        link = f", links {ms(time['link_ms'])} ({ms(time['exposed_ms'])} not hidden)"
    lines = [
        f"time (predicted)  device {ms(time['device_ms'])}, host {ms(time['host_ms'])}{link}; "
        f"{time['kernels']:,} kernels, {time['calls']:,} calls, {time['host_syncs']} host syncs; "
        f"MFU {100 * time['mfu']:.0f}% of {time['mfu_dtype']}",
        "  " + ", ".join(f"{name} {ms(value)}" for name, value in list(time["class_ms"].items())[:8]),
    ]
    lines += [
        f"  {ms(e['device_ms']):>10s}  {e['kernels']:5d} kernels  {e['line']}" for e in report["lines"][:6]
    ]
    for sync in report["host_syncs"][:4]:
        gain = ms(sync["saved_ms"]) if sync["saved_ms"] >= 1e-3 else "nothing"
        lines.append(
            f"  host sync  {sync['count']:4d} x {sync['kind']:16s} {sync['line']}  removing it saves {gain}"
        )
    return lines


def _phase_lines(iteration: Data | None) -> list[str]:
    if iteration is None:
        return []
    steps = units.steps(iteration["steps"]) + ("" if iteration["whole"] else ", not complete")
    lines = [f"phases (predicted)  {ms(iteration['ms'])} for {steps}"]
    if iteration["extrapolated_calls"]:
        lines[0] += (
            f"; {iteration['extrapolated_calls']:,} of {iteration['model_calls']:,} model calls without "
            "gradients extrapolated from the others"
        )
    for entry in iteration["phases"]:
        flops = f", {entry['flops'] / 1e12:,.2f} TFLOP" if entry["flops"] else ""
        lines.append(
            f"  {ms(entry['ms']):>10s}  {entry['phase']}: {entry['kernels']:,} kernels, {entry['calls']:,} "
            f"calls, {entry['host_syncs']:,} host syncs{flops}, peak {gib(entry['peak_bytes'])}"
        )
    return lines


def _what_if_lines(report: Data) -> list[str]:
    lines, what = [], report["what_if"]
    if report["time"] is not None:
        parts = [
            f"{name} {ms(what[key])}"
            for key, name in (
                ("no_syncs_ms", "no host syncs"),
                ("fused_ms", "fused pointwise kernels (ideal)"),
                ("fused_optimizer_ms", "fused optimizer"),
                ("free_host_ms", "zero host cost"),
            )
            if what.get(key) is not None
        ]
        lines.append("what if (predicted)  " + ", ".join(parts))
    for width, size in what["without_bytes"].items():
        lines.append(
            f"  no activation [..., {width}]: peak {gib(size)}"
            f" instead of {gib(report['memory']['allocated_bytes'])}"
        )
    for entry in report.get("to_fit", []):
        got = f"fits, {gib(entry['needed_bytes'])}" if entry["fits"] else "still too much"
        lines.append(f"  to fit: {entry['text']}: {got} (replay of sizes)")
    return lines
