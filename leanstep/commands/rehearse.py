"""`leanstep rehearse SCRIPT --device h100`: a training script on a GPU that is not there, predicted."""

from __future__ import annotations

import json as json_text
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from leanstep.commands import BadInput
from leanstep.commands.terminal import check_writable, console, write_json
from leanstep.rehearse.cuda_allocator import Replay, live_at, replay
from leanstep.rehearse.devices import DEVICES, Device, device_named
from leanstep.rehearse.events import Alloc, Event, Free, Launch, Recording, Request, Storage

_TARGET = Annotated[
    str, typer.Argument(help="A training script, a module (-m) or a registered case.", show_default=False)
]
_ARGS = Annotated[
    list[str] | None, typer.Argument(help="Arguments of the script, after --.", show_default=False)
]
_DEVICE = Annotated[str, typer.Option("--device", help="h100; or up to four to compare: h100,a100,4090.")]
_STEPS = Annotated[int, typer.Option("--steps", min=1, help="Steps to run; the last one is reported.")]
_RANKS = Annotated[int, typer.Option("--ranks", min=1, help="World size; this process is rank 0 of it.")]
_CLOCK = Annotated[bool, typer.Option("--clock", help="The script's own clock shows the predicted time.")]
_MODULE = Annotated[bool, typer.Option("-m", help="TARGET is a module, as in python -m.")]
SetOption = Annotated[
    str | None, typer.Option("--set", help="Of a case: tokens=205280,vocab=151936,dtype=bf16.")
]
_IMPL = Annotated[str | None, typer.Option("--impl", help="Of a case: which implementation.")]
_JSON = Annotated[str | None, typer.Option("--json", help="Write the result as JSON; - for standard output.")]
_HTML = Annotated[str | None, typer.Option("--html", help="Write or extend a report page.")]
_WHAT_IF = Annotated[
    str | None,
    typer.Option(
        "--what-if", help="Rehearse again with: lean_head, checkpoint, micro_batch, normuon; or all."
    ),
]
_HOST = Annotated[
    float | None, typer.Option("--host-us", min=0.1, help="Host microseconds of a call that launches.")
]
# Judged by a plan when none is named, smallest first.
JUDGED = ("rtx4090", "a100-40", "a100-80", "h100", "h200", "b200")
_EAGER_TOO_S = 60.0
_EAGER = Annotated[bool, typer.Option("--eager", help="Run torch.compile regions eagerly.")]


def rehearse(
    target: _TARGET,
    args: _ARGS = None,
    device: _DEVICE = "h100",
    steps: _STEPS = 3,
    ranks: _RANKS = 1,
    clock: _CLOCK = False,
    module: _MODULE = False,
    settings: SetOption = None,
    impl: _IMPL = None,
    json: _JSON = None,
    html: _HTML = None,
    what_if: _WHAT_IF = None,
    host_us: _HOST = None,
    eager: _EAGER = False,
) -> None:
    """Predict peak memory, step time and what bounds it on a GPU that is not there, from the script as it is.

    Exit code: 0 when the steps were seen, 3 when the script ended or was refused before; 2 for bad input.

    Example: leanstep rehearse --device h100,a100 train.py -- --batch_size=12
    """
    from leanstep.rehearse.devices import devices_named

    try:
        devices = devices_named(device)
    except ValueError as error:
        raise BadInput(f"--device: {str(error).removeprefix('device: ')}") from None
    for option, path in (("--json", json), ("--html", html)):
        check_writable(path, option)
    changes = _changes(what_if)
    is_case = not module and _is_case(target)
    if not is_case and (settings is not None or impl is not None):
        raise BadInput(f"--set, --impl: for registered cases; {target} is a script")
    request = Request(
        target=target,
        args=tuple(args or ()),
        module=module,
        case=is_case,
        device=devices[0].key,
        steps=steps,
        ranks=ranks,
        clock=clock,
        compiled=not eager,
        settings=_settings(settings),
        implementation=impl,
        host_us=host_us,
    )
    recording = run_request(request, json)
    report = _report(recording, devices, changes, json)
    console(json).print(_text(report), markup=False, highlight=False, soft_wrap=True)
    write_json(report, json)
    if html is not None:
        from leanstep.report import page

        page.add_section(html, "rehearse", report)
    raise typer.Exit(0 if recording.ended == "steps" else 3)


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
    from leanstep.rehearse.what_if import CHANGES

    if names is None:
        return []
    wanted = (
        list(CHANGES) if names == "all" else [name.strip().replace("-", "_") for name in names.split(",")]
    )
    for name in wanted:
        if name.partition(":")[0] not in CHANGES:
            raise BadInput(f"--what-if: expected {', '.join(CHANGES)} or all, got {name!r}")
    return wanted


def _settings(text: str | None) -> dict[str, Any]:
    """tokens=205280,response_frac=0.25,dtype=bf16 -> numbers where they are numbers."""
    found: dict[str, Any] = {}
    for pair in (text or "").split(","):
        if not pair.strip():
            continue
        name, equals, value = pair.strip().partition("=")
        if not equals or not name or not value:
            raise BadInput(f"--set: expected name=value pairs, got {pair.strip()!r}")
        for kind in (int, float, str):
            try:
                found[name] = kind(value)
                break
            except ValueError:
                continue
    return found


def run_request(request: Any, json: str | None, quiet: bool = False) -> Any:
    from leanstep.rehearse.stage import RehearsalError
    from leanstep.rehearse.stage import rehearse as run

    try:
        return run(request, quiet=quiet or json == "-")
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
    return f"{time['step_ms']:.1f} ms a step, bound by {time['bound_by']}"


@dataclass(frozen=True)
class Planned:
    """One job of a plan: its own allocations in a recording of many, as if nothing had run before."""

    events: Sequence[Event]
    storages: dict[int, Storage]
    input_bytes: int
    flops: float
    step_s: float

    def fits(self, capacity: int, resize: Callable[[Storage], int] | None = None) -> bool:
        return replay(self.events, self.storages, capacity, resize).failed is None

    def at_peak(self, peak: Replay) -> list[Storage]:
        return [self.storages[number] for number in live_at(self.events, peak.index)]

    def by_purpose(self) -> dict[str, int]:
        """Bytes of an optimizer step's peak."""
        found: dict[str, int] = dict.fromkeys(("weights", "gradients", "state", "scratch"), 0)
        names = {"parameter": "weights", "gradient": "gradients", "optimizer state": "state"}
        for storage in self.at_peak(replay(self.events, self.storages)):
            found[names.get(storage.category, "scratch")] += storage.nbytes
        return found


def rehearse_jobs(
    jobs: list[dict[str, Any]], device: Device, ranks: int = 1, timed: bool = False
) -> list[Planned]:
    """Every job of `plan_workloads` on a device that is not there, in one rehearsal."""
    from leanstep.rehearse.time_model import time_steps

    request = Request(
        "leanstep.commands.plan_workloads",
        (json_text.dumps(jobs),),
        module=True,
        device=device.key,
        steps=2 * len(jobs),
        ranks=ranks,
    )
    recording = _recorded(request)
    events, storages = recording.events, recording.storages
    # Taken once, at the first product of all jobs: each would take it.
    workspace = [e for e in events if isinstance(e, Alloc) and storages[e.storage].category == "library"]
    times = [0.0] * len(recording.steps)
    if timed:
        ends = [step.last for step in recording.steps]
        times = [timing.step_s for timing in time_steps(events, ends, device)]
    found = []
    for made, done in zip(recording.steps[::2], recording.steps[1::2], strict=True):
        launched = [e for e in events[made.last : done.last] if isinstance(e, Launch)]
        flops = sum(kernel.flops for launch in launched for kernel in launch.kernels)
        own = [e for e in events[made.first : done.last] if isinstance(e, Alloc | Free)]
        if any(kernel.kind == "gemm" for launch in launched for kernel in launch.kernels):
            own = [*workspace, *(e for e in own if e not in workspace)]
        inputs = sum(e.nbytes for e in events[made.first : made.last] if isinstance(e, Alloc))
        found.append(Planned(own, storages, inputs, flops, times[done.number]))
    return found


def _recorded(request: Request) -> Recording:
    recording: Recording = run_request(request, None, quiet=True)
    if recording.refused is not None or len(recording.steps) < request.steps:
        reason = recording.refused.reason if recording.refused is not None else "a step is missing"
        raise BadInput(f"plan: the rehearsal stopped: {reason}")
    return recording


def case_jobs(
    name: str, settings: str | None, device: Device, timed: bool
) -> tuple[dict[str, Any], list[tuple[str, str, Planned]]]:
    """A registered case, plain and fast, at its size for GPUs with some parameters replaced.

    Returns the parameters, and a name, a description and a job for each implementation.
    """
    from leanstep.case import get_case
    from leanstep.rehearse.time_model import time_steps

    case, given = get_case(name), {"dtype": "bf16", **_settings(settings)}
    dtype = given.pop("dtype")
    try:
        params = {**case.params("gpu", given), "dtype": dtype}
    except ValueError as reason:
        raise BadInput(f"--set: {str(reason).removeprefix('sweep: ')}") from None
    found = []
    for row in case.implementations:
        if row.kind not in ("reference", "fast"):
            continue
        # The first step makes the inputs as well: the second is the one that repeats.
        request = Request(
            name, case=True, device=device.key, steps=2, settings=params, implementation=row.name
        )
        recording = _recorded(request)
        events, (first, second) = recording.events, recording.steps
        launched = [e for e in events[first.last : second.last] if isinstance(e, Launch)]
        flops = sum(kernel.flops for launch in launched for kernel in launch.kernels)
        own = [e for e in events if isinstance(e, Alloc | Free)]
        # What outlives a step is what was given to it.
        inputs = sum(s.nbytes for s in recording.storages.values() if s.category == "buffer")
        ends = [first.last, second.last]
        step_s = time_steps(events, ends, device)[1].step_s if timed else 0.0
        found.append((row.name, row.note, Planned(own, recording.storages, inputs, flops, step_s)))
    return params, found


def head_jobs(
    tokens: int, vocab: int, hidden: int, dtype: str, chunk: int, jobs: Sequence[tuple[str, float]]
) -> list[dict[str, Any]]:
    """(method, kept fraction of the rows) -> jobs of `plan_workloads`."""
    shape = {"what": "head", "rows": tokens, "vocab": vocab, "width": hidden, "dtype": dtype, "chunk": chunk}
    return [{**shape, "method": method, "kept": round(fraction * tokens)} for method, fraction in jobs]


def longest_batch(job: Planned, rows: int, chunk: int, capacity: int) -> int:
    """The most rows that fit, by the replay that judges the plan's own rows: multiples of `chunk`.

    job: rehearsed with this many rows, a number that no other dimension has. Whatever has a dimension of it
    grows with it; the rest repeats with every chunk.
    """

    def fits(wanted: int) -> bool:
        def resize(storage: Storage) -> int:
            return storage.nbytes * wanted // rows if rows in storage.shape else storage.nbytes

        return job.fits(capacity, resize)

    low, high = 0, 1 + capacity // (job.input_bytes // rows or 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low - low % chunk if low >= chunk else low


def parse_devices(names: str | None, device_gb: float | None, reserve_gb: float) -> dict[str, int]:
    """Name -> bytes left for the plan, smallest device first."""
    if reserve_gb < 0:
        raise BadInput(f"--reserve-gb: expected 0 or more, got {reserve_gb:g}")
    if device_gb is not None and device_gb <= 0:
        raise BadInput(f"--device-gb: expected more than 0, got {device_gb:g}")
    wanted = JUDGED if device_gb is None else ()
    if names is not None:
        wanted = tuple(name.strip().lower() for name in names.split(","))
    chosen = {name: one_device(name, "--devices").memory_bytes for name in wanted}
    if device_gb is not None:
        chosen[f"{device_gb:g} GiB"] = round(device_gb * 2**30)
    reserve = round(reserve_gb * 2**30)
    return {name: max(size - reserve, 0) for name, size in sorted(chosen.items(), key=lambda item: item[1])}


def one_device(name: str, argument: str) -> Device:
    """The device of this name, or one line of bad input."""
    try:
        return device_named(name)
    except ValueError:
        raise BadInput(f"{argument}: no device {name!r}; there are {', '.join(DEVICES)}") from None
