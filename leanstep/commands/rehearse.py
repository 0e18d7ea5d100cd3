"""`leanstep rehearse SCRIPT --device h100`: predicts a training script on a simulated GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from leanstep.case import get_case
from leanstep.commands import BadInput
from leanstep.commands.sweep import check_settings, parse_settings, typed_sweep
from leanstep.commands.sweep import run as run_sweep
from leanstep.commands.terminal import (
    SandboxOption,
    check_writable,
    console,
    enter_sandbox,
    live_line,
    print_text,
    write_json,
)
from leanstep.config import read_config
from leanstep.rehearse.devices import Device
from leanstep.rehearse.events import Request
from leanstep.rehearse.what_if import CHANGES

_TARGET = Annotated[
    str, typer.Argument(help="A training script, a module (-m) or a registered case.", show_default=False)
]
_ARGS = Annotated[
    list[str] | None, typer.Argument(help="Arguments of the script, after --.", show_default=False)
]
_DEVICE = Annotated[
    str | None,
    typer.Option("--device", help="h100 (or pyproject.toml's); up to four to compare: h100,a100,4090."),
]
_MACHINE = Annotated[
    str | None,
    typer.Option("--machine", help="dgx-h100, p4d, gb200-nvl72, ...: a device and the links of its node."),
]
_NODES = Annotated[
    int | None, typer.Option("--nodes", min=1, help="World size: this many nodes of the machine.")
]
_STEPS = Annotated[
    int | None,
    typer.Option("--steps", min=1, help="Steps to run (3; 2 with --sweep); the last one is reported."),
]
_RANKS = Annotated[int | None, typer.Option("--ranks", min=1, help="World size (1, or as --nodes says).")]
_RANK = Annotated[int, typer.Option("--rank", min=0, help="Which rank to rehearse: pipeline stages differ.")]
_CLOCK = Annotated[bool, typer.Option("--clock", help="The script's own clock shows the predicted time.")]
_MODULE = Annotated[bool, typer.Option("-m", help="TARGET is a module, as in python -m.")]
_SET = Annotated[
    str | None,
    typer.Option("--set", help="Of a case: its parameters, as tokens=205280,vocab=151936,dtype=bf16."),
]
_IMPL = Annotated[
    str | None, typer.Option("--impl", help="Of a case: which implementation; several with --sweep.")
]
_SWEEP = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="NAME=V,V,…",
        help="Of a case: a table of all implementations at these values of a parameter; "
        "tokens=fit finds the largest one that fits.",
    ),
]
_RESERVE = Annotated[
    float,
    typer.Option("--reserve-gb", help="With --sweep: GiB that the rest (model, optimizer) already holds."),
]
_JSON = Annotated[str | None, typer.Option("--json", help="Write the result as JSON; - for standard output.")]
_HTML = Annotated[str | None, typer.Option("--html", help="Write or extend a report page.")]
_WHAT_IF = Annotated[
    str | None,
    typer.Option("--what-if", help=f"Rehearse again with: {', '.join(CHANGES)}; or all."),
]
_HOST = Annotated[
    float | None, typer.Option("--host-us", min=0.1, help="Host microseconds of a call that launches.")
]
_PATIENCE = Annotated[
    float, typer.Option("--patience", min=1, help="Seconds without an update after which the script is left.")
]
_OOM = Annotated[
    str,
    typer.Option(
        "--oom",
        help="When the device is full: raise torch.OutOfMemoryError, report it only, "
        "or auto: raise where the script catches it.",
    ),
]
_EAGER_TOO_S = 60.0
_EVERY = Annotated[
    bool,
    typer.Option("--every-call", help="Run every model call of a rollout; the default extrapolates repeats."),
]
_EAGER = Annotated[bool, typer.Option("--eager", help="Run torch.compile regions eagerly.")]


def rehearse(
    context: typer.Context,
    target: _TARGET,
    args: _ARGS = None,
    device: _DEVICE = None,
    machine: _MACHINE = None,
    steps: _STEPS = None,
    ranks: _RANKS = None,
    nodes: _NODES = None,
    rank: _RANK = 0,
    clock: _CLOCK = False,
    module: _MODULE = False,
    settings: _SET = None,
    impl: _IMPL = None,
    sweep: _SWEEP = None,
    reserve_gb: _RESERVE = 0.0,
    json: _JSON = None,
    html: _HTML = None,
    what_if: _WHAT_IF = None,
    host_us: _HOST = None,
    eager: _EAGER = False,
    sandbox: SandboxOption = False,
    patience: _PATIENCE = 600.0,
    oom: _OOM = "auto",
    every_call: _EVERY = False,
) -> None:
    """Predict peak memory, step time and what bounds it on a GPU that you do not have.

    The script runs for real: the files that it writes are written, unless --sandbox is given.

    Exit code: 0 when the steps were seen, 3 when the script ended or was refused before; 2 for bad input.

    Example: leanstep rehearse --device h100,a100 train.py -- --batch_size=12
    Example: leanstep rehearse --machine dgx-h100 --nodes 4 train.py
    Example: leanstep rehearse logprob-linear --set tokens=205280,dtype=bf16 --sweep response_frac=1,0.25
    """
    devices = _devices(device, machine)
    for option, path in (("--json", json), ("--html", html)):
        check_writable(path, option)
    changes = _changes(what_if)
    is_case = not module and _is_case(target)
    if not is_case and (settings is not None or impl is not None or sweep):
        raise BadInput(f"--set, --impl, --sweep: for registered cases; {target} is a script")
    if sandbox:
        if is_case:
            raise BadInput("--sandbox: expected a script; a case writes no files")
        json, html, target = enter_sandbox(context, [json, html], [target])
    request = Request(
        target=target,
        args=tuple(args or ()),
        module=module,
        case=is_case,
        device=devices[0].key,
        machine=machine.strip().lower() if machine else None,
        steps=steps or (2 if sweep else 3),
        ranks=_ranks(ranks, nodes, devices[0]),
        rank=rank,
        clock=clock,
        compiled=not eager,
        settings=parse_settings(settings),
        implementation=None if sweep else impl,
        host_us=host_us,
        patience_s=patience,
        oom=oom,
        every_call=every_call,
    )
    if sweep:
        if changes:
            raise BadInput("--what-if: expected no --sweep beside it")
        raise typer.Exit(run_sweep(typed_sweep(request, sweep, devices, impl, reserve_gb), json, html))
    if reserve_gb:
        raise BadInput("--reserve-gb: expected --sweep beside it")
    if is_case:
        check_settings(get_case(target), dict(request.settings), "--set")
    recording = run_request(request, json)
    report = _report(recording, devices, changes, json)
    print_text(console(json), _text(report))
    write_json(report, json)
    if html is not None:
        from leanstep.report import page

        page.add_section(html, "rehearse", report)
    raise typer.Exit(0 if recording.ended == "steps" else 3)


def _devices(names: str | None, machine: str | None) -> list[Device]:
    from leanstep.rehearse.devices import devices_named
    from leanstep.rehearse.links import machine_named

    if machine is not None and names is not None:
        raise BadInput("--device: expected none beside --machine, which has its own")
    try:
        if machine is not None:
            return [machine_named(machine).as_device()]
        return devices_named(names or read_config().device or "h100")
    except ValueError as error:
        raise BadInput(f"--{error}") from None


def _ranks(ranks: int | None, nodes: int | None, device: Device) -> int:
    if ranks is not None and nodes is not None:
        raise BadInput(f"--nodes: expected no --ranks beside it, got --ranks {ranks}")
    return ranks or (nodes or 0) * device.node or 1


def _is_case(target: str) -> bool:
    if Path(target).suffix == ".py" or Path(target).exists():
        return False
    from leanstep.commands.terminal import select_cases

    try:
        select_cases([target])
    except BadInput:
        return False
    return True


def _changes(names: str | None) -> list[str]:
    if names is None:
        return []
    wanted = (
        list(CHANGES) if names == "all" else [name.strip().replace("-", "_") for name in names.split(",")]
    )
    for name in wanted:
        if name.partition(":")[0] not in CHANGES:
            raise BadInput(f"--what-if: expected {', '.join(CHANGES)} or all, got {name!r}")
    return wanted


def run_request(request: Any, json: str | None, quiet: bool = False) -> Any:
    from leanstep.rehearse.stage import RehearsalError
    from leanstep.rehearse.stage import rehearse as run

    try:
        with live_line(f"leanstep rehearse {request.target}") as show:
            return run(request, quiet=quiet or json == "-", show=show)
    except RehearsalError as error:
        raise BadInput(f"rehearse: {error}") from None


def _report(recording: Any, devices: Any, changes: list[str], json: str | None) -> dict[str, Any]:
    from leanstep.rehearse import verdict

    def again(request: Any) -> Any:
        change = ", ".join(request.changes) or " ".join(request.args)
        print(f"leanstep: rehearsing again{' with ' + change if change else ''}", file=sys.stderr)
        return run_request(request, json, quiet=True)

    # The figure beside a compiled one takes as long again: only where that is short.
    quick = bool(recording.regions and recording.steps) and recording.host_s <= _EAGER_TOO_S
    eager = again(replace(recording.request, compiled=False)) if quick else None
    report = verdict.judge(recording, devices, eager=eager)

    if changes:
        report["what_if"]["changes"] = verdict.compared(recording, devices[0], changes, again)
    if not report["memory"]["fits"] and recording.steps:
        rerun = None if recording.request.case else again
        report["to_fit"] = verdict.what_fits(recording, devices[0], rerun)
    if recording.request.case:
        _add_bare_products(report, recording, devices[0], json)
    return report


def _add_bare_products(report: dict[str, Any], recording: Any, device: Any, json: str | None) -> None:
    """`bare_gemm_ms`: the case's own limit (its products alone) at the same rates, and the ratio to it."""
    from leanstep.rehearse import what_if

    bare = None
    limit = run_request(replace(recording.request, implementation="limit"), json, quiet=True)
    if limit.refused is None and limit.steps:
        timing = what_if.last_step(limit, device)
        bare = timing.device_s if timing is not None else None
    report["bare_gemm_ms"] = bare * 1e3 if bare else None
    report["ratio"] = report["time"]["step_ms"] / (bare * 1e3) if bare and report["time"] else None


def _text(report: dict[str, Any]) -> str:
    from leanstep.rehearse.verdict import text

    shown = text(report)
    if report.get("bare_gemm_ms"):
        shown += f"\nbare products {report['bare_gemm_ms']:.2f} ms predicted; ratio {report['ratio']:.2f}"
    return shown


# The seed's size: one buffer of its logits takes 58 GiB in fp32.
SEED_SIZE = {"tokens": 205_280, "vocab": 76_032, "hidden": 2_560, "response_frac": 0.25, "dtype": "fp32"}


def rehearse_example(folder: Path, device: str = "h100") -> tuple[dict[str, Any], list[str]]:
    """The RL example before and after on a device, and what fits at the seed's size: section and lines.

    folder: of the examples. Takes four rehearsals, some seconds each.
    """
    from leanstep.rehearse import verdict
    from leanstep.rehearse.devices import device_named

    target = device_named(device)
    runs, lines = [], [f"Rehearsal on an {target.name}: predicted, nothing was measured"]
    for side in ("before", "after"):
        recording = run_request(Request(str(folder / "rl" / f"{side}.py"), device=device), None, quiet=True)
        report = verdict.judge(recording, [target])
        runs.append({**report, "script": f"examples/rl/{side}.py"})
        peak = report["memory"]["allocated"] / 2**20
        lines.append(f"  rl/{side}.py  {_short(report)}, peak {peak:,.0f} MiB")
    for implementation, text in (("gather-after", "full logits, rows gathered after"), (None, "leanstep")):
        request = Request(
            "logprob-linear",
            case=True,
            device=device,
            steps=2,
            settings=SEED_SIZE,
            implementation=implementation,
        )
        report = verdict.judge(run_request(request, None, quiet=True), [target])
        runs.append({**report, "script": f"logprob-linear at the seed's size: {text}"})
        needed = (report["memory"]["reserved"] + report["memory"]["context"]) / 2**30
        fits = "fits" if report["memory"]["fits"] else "does not fit"
        lines.append(f"  seed's size, {text}: {fits}, {needed:.1f} GiB of {target.memory_bytes / 2**30:.0f}")
    return {"runs": runs}, lines


def _short(report: dict[str, Any]) -> str:
    time = report["time"]
    if time is None:
        return f"stopped: {report['refused']['reason']}" if report["refused"] else "no step"
    return f"{time['step_ms']:.1f} ms per step, {time['bound_by']}-bound"
