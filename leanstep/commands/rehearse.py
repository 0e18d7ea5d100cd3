"""`leanstep rehearse SCRIPT --device h100`: predicts a training script on a simulated GPU."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import leanstep
from leanstep.commands import BadInput
from leanstep.commands.terminal import check_writable, console, live_line, print_text, write_json
from leanstep.config import read_config
from leanstep.escape import printable
from leanstep.files import BadInput as FileError
from leanstep.rehearse.devices import Device
from leanstep.rehearse.events import Request

_TARGET = Annotated[str, typer.Argument(help="A training script, or a module (-m).", show_default=False)]
_ARGS = Annotated[
    list[str] | None, typer.Argument(help="Arguments of the script, after --.", show_default=False)
]
_DEVICE = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Simulated GPU: h100, a100, 4090, ...; up to four to compare (default: pyproject.toml's, h100).",
    ),
]
_MACHINE = Annotated[
    str | None,
    typer.Option("--machine", help="dgx-h100, p4d, gb200-nvl72, ...: a device and the links of its node."),
]
_NODES = Annotated[
    int | None, typer.Option("--nodes", min=1, help="World size: this many nodes of the machine.")
]
_STEPS = Annotated[int, typer.Option("--steps", min=1, help="Steps to run; the last one is reported.")]
_RANKS = Annotated[
    int | None, typer.Option("--ranks", min=1, help="World size (1, or --nodes times the node).")
]
_CLOCK = Annotated[bool, typer.Option("--clock", help="Let the script's own clock show predicted time.")]
_MODULE = Annotated[bool, typer.Option("-m", help="TARGET is a module, as in python -m.")]
_JSON = Annotated[str | None, typer.Option("--json", help="Write the result as JSON; - for standard output.")]
_HOST = Annotated[
    float | None, typer.Option("--host-us", min=0.1, help="Host microseconds of a call that launches.")
]
_OOM = Annotated[
    str,
    typer.Option(
        "--oom",
        help="When the device is full: raise torch.OutOfMemoryError, report it only, "
        "or auto: raise where the script catches it.",
    ),
]
_SWEEP = Annotated[
    str | None,
    typer.Option("--sweep", help="An argument of the script: batch-size=4,8,16, or batch-size=fit."),
]
_TIMELINE = Annotated[
    str | None, typer.Option("--timeline", help="Write the predicted step as a Chrome trace (Perfetto).")
]
_SNAPSHOT = Annotated[
    str | None, typer.Option("--snapshot", help="Write the allocations for pytorch.org/memory_viz.")
]
_EAGER_TOO_S = 60.0
_EAGER = Annotated[bool, typer.Option("--eager", help="Run torch.compile regions eagerly.")]


def rehearse(
    target: _TARGET,
    args: _ARGS = None,
    device: _DEVICE = None,
    machine: _MACHINE = None,
    steps: _STEPS = 3,
    ranks: _RANKS = None,
    nodes: _NODES = None,
    clock: _CLOCK = False,
    module: _MODULE = False,
    json: _JSON = None,
    host_us: _HOST = None,
    eager: _EAGER = False,
    oom: _OOM = "auto",
    sweep: _SWEEP = None,
    timeline: _TIMELINE = None,
    snapshot: _SNAPSHOT = None,
) -> None:
    """Predict peak memory, step time and what bounds it on a GPU that you do not have.

    Runs the script on a simulated GPU: ten seconds for a small model, about a minute for a 70B model or a
    compiled one. The files that it writes are written.

    Exit code: 0 when the steps were recorded, 3 when the script ended or stopped before; 2 for bad input.

    Example: leanstep rehearse --device h100,a100 train.py -- --batch_size=12
    Example: leanstep rehearse --machine dgx-h100 --nodes 4 train.py
    Example: leanstep rehearse --device 4090 --sweep batch-size=fit train.py -- --epochs 1
    """
    from leanstep.rehearse import verdict

    devices = _devices(device, machine)
    check_writable(json, "--json")
    check_writable(timeline, "--timeline")
    check_writable(snapshot, "--snapshot")
    request = Request(
        target=target,
        args=tuple(args or ()),
        module=module,
        device=devices[0].key,
        machine=machine.strip().lower() if machine else None,
        steps=steps,
        ranks=_ranks(ranks, nodes, devices[0]),
        clock=clock,
        compiled=not eager,
        host_us=host_us,
        oom=oom,
    )
    if sweep is not None:
        if timeline is not None or snapshot is not None:
            raise BadInput("--sweep: cannot be combined with --timeline or --snapshot")
        raise typer.Exit(_sweep(sweep, request, devices[0], json))
    recording = run_request(request, json)
    report = verdict.judge(recording, devices)
    if not report["memory"]["fits"] and recording.steps:
        report["to_fit"] = verdict.what_fits(recording, devices[0])
    if recording.refused is not None and not recording.steps and report["memory"]["fits"]:
        write_json(report, json)
        raise _stopped(report)
    print_text(console(json), verdict.text(report))
    _export(recording, devices[0], timeline, snapshot)
    # The eager figure takes a second rehearsal: only where that is short.
    if recording.regions and recording.steps and recording.host_s <= _EAGER_TOO_S:
        without = run_request(replace(request, compiled=False), json, quiet=True)
        report["time"]["eager_ms"] = verdict.eager_ms(without, devices[0])
        print_text(console(json), verdict.eager_line(report))
    write_json(report, json)
    raise typer.Exit(0 if recording.ended == "steps" else 3)


def _stopped(report: dict[str, Any]) -> typer.Exit:
    """Print one line for a script that stopped before a step ended: it has no figures."""
    where = report["refused"]["line"]
    place = report["script"] if where == "?" else where
    default = "; the GPU was torch's default device" if report["default_device"] else ""
    line = f"leanstep: rehearse: {place}: {report['reason']}{default}"
    print(printable(" ".join(line.split())), file=sys.stderr)
    return typer.Exit(3)


def _export(recording: Any, device: Device, timeline: str | None, snapshot: str | None) -> None:
    from leanstep.rehearse import exports, what_if
    from leanstep.rehearse.cuda_allocator import memory_of

    if timeline is not None:
        step = what_if.timed_step(recording, device)
        if step is None:
            raise BadInput("--timeline: expected a step to write, the script made none")
        write_json(exports.chrome_trace(recording, device, step), timeline)
    if snapshot is not None:
        memory = memory_of(recording, device.memory_bytes, device.context_bytes, points=1)
        with Path(snapshot).open("wb") as file:
            pickle.dump(exports.memory_snapshot(recording, memory), file)


def _sweep(text: str, request: Request, device: Device, json: str | None) -> int:
    from leanstep.rehearse import sweep, verdict

    try:
        name, values = sweep.parse(text)
    except FileError as error:
        raise BadInput(str(error)) from None

    out = console(json)
    print_text(out, sweep.heading(name, device.key))
    rows = _rows(request, name, values, device, lambda row: print_text(out, sweep.line(row)), json)
    if values is None:
        print_text(out, sweep.conclusion(name, rows))
    head = {"schema": verdict.SCHEMA, "leanstep": leanstep.__version__, "device": device.key}
    write_json({**head, "predicted": True, "sweep": name, "rows": rows}, json)
    return 0 if any(row["fits"] for row in rows) else 3


def _rows(
    request: Request,
    name: str,
    values: list[str] | None,
    device: Device,
    show: Callable[[dict[str, Any]], None],
    json: str | None = None,
) -> list[dict[str, Any]]:
    """Return a row per value of an argument of the script."""
    from leanstep.rehearse import sweep, verdict

    def judge(value: str) -> dict[str, Any]:
        args = sweep.with_value(request.args, name, value)
        return verdict.judge(run_request(replace(request, args=args), json, quiet=True), [device], points=1)

    return sweep.run(values, judge, show, sweep.start(request.args, name))


def _devices(names: str | None, machine: str | None) -> list[Device]:
    from leanstep.rehearse.devices import devices_named
    from leanstep.rehearse.links import machine_named

    if machine is not None and names is not None:
        raise BadInput("--device: cannot be combined with --machine, which has its own")
    try:
        if machine is not None:
            return [machine_named(machine).as_device()]
        return devices_named(names or read_config().device or "h100")
    except ValueError as error:
        raise BadInput(f"--{error}") from None


def _ranks(ranks: int | None, nodes: int | None, device: Device) -> int:
    if ranks is not None and nodes is not None:
        raise BadInput(f"--nodes: cannot be combined with --ranks, got --ranks {ranks}")
    return ranks or (nodes or 0) * device.node or 1


def run_request(request: Any, json: str | None, quiet: bool = False) -> Any:
    from leanstep.rehearse.stage import RehearsalError
    from leanstep.rehearse.stage import rehearse as run

    try:
        with live_line(f"leanstep rehearse {request.target}") as show:
            return run(request, quiet=quiet or json == "-", show=show)
    except RehearsalError as error:
        raise BadInput(f"rehearse: {error}") from None


def rehearse_example(folder: Path, device: str = "h100") -> tuple[dict[str, Any], list[str]]:
    """The RL example before and after on a device, and the memory of a long batch: section and lines.

    folder: of the examples. Takes eight rehearsals, some seconds each.
    """
    from leanstep.rehearse import verdict
    from leanstep.rehearse.devices import device_named

    target = device_named(device)
    runs, lines = [], [f"Rehearsal on an {target.name}: predicted, nothing was measured"]
    for side in ("before", "after"):
        recording = run_request(Request(str(folder / "rl" / f"{side}.py"), device=device), None, quiet=True)
        report = verdict.judge(recording, [target])
        runs.append({**report, "script": f"examples/rl/{side}.py"})
        peak = report["memory"]["allocated_bytes"] / 2**20
        lines.append(f"  rl/{side}.py  {_short(report)}, peak {peak:,.0f} MiB")
    long_batch = device_named("h200")
    script = str(folder / "rl" / "long_batch.py")
    tables = []
    for head in ("plain", "leanstep"):
        request = Request(script, ("--head", head), device=long_batch.key, steps=2)
        rows = _rows(request, "response-fraction", ["1", "0.25", "0.1"], long_batch, lambda row: None)
        tables.append({"head": head, "device_name": long_batch.name, "rows": rows})
    return {"runs": runs, "tables": tables}, lines


def _short(report: dict[str, Any]) -> str:
    time = report["time"]
    if time is None:
        return f"stopped: {report['refused']['reason']}" if report["refused"] else "no step"
    return f"{time['step_ms']:.1f} ms per step, {time['bound_by']}-bound"
