"""The report of a machine with a GPU: proofs, bench and syncs of every case, compared with predictions.

Predictions come from rehearsals (`leanstep.rehearse`), which take minutes, so they are computed in advance:
`leanstep gpu-report --predict FILE` writes them, and the package contains the file of its release. Each
rehearsal covers every known device; the report uses the one nearest to the current device.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import leanstep
from leanstep.case import Case, Step
from leanstep.diagnose.recording.torch_hooks import SYNC_WARNING, sync_debug_mode
from leanstep.files import finite, write_text
from leanstep.measure.parity import dtype_name, prove_case
from leanstep.measure.side_by_side import BenchResult, run_bench
from leanstep.measure.timing import current_device, environment

Data = dict[str, Any]
Say = Callable[[str], None]
PREDICTIONS = Path(__file__).with_name("gpu_predictions.json")


def predict(cases: Sequence[Case], size: str | None = None, say: Say = lambda line: None) -> Data:
    """Rehearse every fast path and limit of the cases and predict times on every known device.

    Args:
        cases: cases with a size for GPUs.
        size: overrides the size for GPUs.
        say: called with a line for each rehearsal.

    Returns:
        {"leanstep", "torch", "predicted": True, "rows": [{"case", "size", "dtype", "impl", "launches",
        "host_waits", "above_bytes", "peak_bytes", "step_s": {device: seconds}}, ...]}; above_bytes: peak
        above the inputs; peak_bytes: with them.
    """
    from leanstep.rehearse import Request, rehearse

    rows: list[Data] = []
    for case in cases:
        chosen = size or case.size_on("cuda")
        dtype = dtype_name(case.dtype_on("cuda"))
        for implementation in case.implementations:
            # A reference may read every value in a loop: rehearsing it would take minutes.
            wanted = implementation.kind in ("fast", "limit")
            if not wanted or implementation.missing(case.params(chosen), "cuda") is not None:
                continue
            say(f"{case.name}, {implementation.name}, {chosen}, {dtype}")
            request = Request(
                case.name,
                case=True,
                steps=2,
                settings={"size": chosen, "dtype": dtype},
                implementation=implementation.name,
            )
            figures = _predicted(rehearse(request, quiet=True))
            if figures is not None:
                head = {"case": case.name, "size": chosen, "dtype": dtype, "impl": implementation.name}
                rows.append({**head, **figures})
    versions = {"leanstep": leanstep.__version__, "torch": torch.__version__}
    return {**versions, "predicted": True, "rows": rows}


def _predicted(recording: Any) -> Data | None:
    """Return counts of a rehearsal's last step, and its seconds from an idle device; None without a step."""
    from leanstep.rehearse.devices import DEVICES
    from leanstep.rehearse.events import Alloc, Free, HostWait, Launch
    from leanstep.rehearse.what_if import last_step

    if recording.refused is not None or not recording.steps:
        return None
    last = recording.steps[-1]
    launches = waits = peak = 0
    # Storages of the previous call may be freed in this one: only those allocated here count.
    live: dict[int, int] = {}
    for event in recording.events[last.first : last.last]:
        if isinstance(event, Launch):
            launches += sum(kernel.launches for kernel in event.kernels)
        elif isinstance(event, HostWait):
            waits += 1
        elif isinstance(event, Alloc):
            live[event.storage] = event.nbytes
            peak = max(peak, sum(live.values()))
        elif isinstance(event, Free):
            live.pop(event.storage, None)
    # `bench` measures one call from an idle device: nothing is queued before it.
    alone = replace(recording, steps=[last])
    timings = {key: last_step(alone, device) for key, device in DEVICES.items()}
    seconds = {key: float(f"{timing.step_s:.5g}") for key, timing in timings.items() if timing is not None}
    counts = {"launches": launches, "host_waits": waits, "above_bytes": peak}
    return {**counts, "peak_bytes": _peak_bytes(recording.events[: last.last]), "step_s": seconds}


def _peak_bytes(events: Sequence[Any]) -> int:
    """Return the peak bytes of a rehearsal's storages, including its inputs."""
    from leanstep.rehearse.events import Alloc, Free

    live: dict[int, int] = {}
    total = peak = 0
    for event in events:
        if isinstance(event, Alloc):
            live[event.storage] = event.nbytes
            total += event.nbytes
            peak = max(peak, total)
        elif isinstance(event, Free):
            total -= live.pop(event.storage, 0)
    return peak


def load_predictions(path: Path | None = None) -> Data:
    """Return the predictions of this release, or those of a file that `--predict` wrote."""
    path = path or PREDICTIONS
    if not path.exists():
        return {"leanstep": leanstep.__version__, "torch": "", "predicted": True, "rows": []}
    return json.loads(path.read_text(encoding="utf-8"))


def nearest_device(properties: Any) -> str:
    """Return the key of the most similar known device: by name, else by generation, units and memory."""
    from leanstep.rehearse.devices import DEVICES

    name = properties.name.lower()
    same = [device for device in DEVICES.values() if device.name.lower() == name]
    named = same or [d for d in DEVICES.values() if d.key.partition("-")[0] in name.replace("-", " ").split()]
    vendor = "amd" if getattr(properties, "gcnArchName", "") else "nvidia"

    def distance(device: Any) -> float:
        apart = abs(math.log(properties.multi_processor_count / device.units))
        apart += abs(math.log(properties.total_memory / device.memory_bytes))
        apart += 2.0 * ((properties.major, properties.minor) != device.capability)
        return apart + 10.0 * (vendor != device.vendor)

    return min(named or DEVICES.values(), key=distance).key


def count_syncs(step: Step, device: torch.device) -> tuple[int, str]:
    """Return how often one call makes the host wait, by torch's sync debugging, and the first place."""
    for _ in range(2):
        step()
    torch.cuda.synchronize(device)
    with sync_debug_mode("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    sync_warnings = [warning for warning in caught if SYNC_WARNING in str(warning.message)]
    first = f"{Path(sync_warnings[0].filename).name}:{sync_warnings[0].lineno}" if sync_warnings else ""
    return len(sync_warnings), first


def run_report(
    cases: Sequence[Case],
    device: torch.device,
    *,
    size: str | None = None,
    budget_s: float = 10.0,
    predictions: Data | None = None,
    say: Say = lambda line: None,
) -> Data:
    """Prove, measure and watch every case on the device; return the object that `gpu-report` writes.

    Args:
        cases: the cases to run; a failed case becomes a row in "problems", the others continue.
        device: a CUDA device.
        size: of every case; None: its size for GPUs.
        budget_s: seconds of timing per case.
        predictions: None: those of this release.
        say: called with a line for each part.
    """
    predictions = load_predictions() if predictions is None else predictions
    near = nearest_device(torch.cuda.get_device_properties(device))
    report: Data = {**environment(device), "nearest": near}
    versions = {key: predictions[key] for key in ("leanstep", "torch")}
    report |= {
        "predicted_with": versions,
        "figures": [],
        "syncs": [],
        "prove": [],
        "bench": [],
        "problems": [],
    }
    parts: dict[str, Callable[[Case], None]] = {
        "prove": lambda case: report["prove"].extend(r.to_json() for r in prove_case(case, device=device)),
        "bench": lambda case: _bench(case, report, device, size, budget_s, predictions),
        "syncs": lambda case: report["syncs"].extend(_syncs(case, device, size, predictions)),
    }
    with current_device(device):
        for case in cases:
            for part, run in parts.items():
                say(f"{case.name}: {part}")
                try:
                    run(case)
                except Exception as problem:
                    # On a device that was never tested, the other results are still worth having.
                    said = next(iter(str(problem).strip().splitlines()), "")
                    trouble = f"{type(problem).__name__}: {said[:200]}"
                    report["problems"].append({"case": case.name, "part": part, "trouble": trouble})
                    torch.cuda.empty_cache()
    return report


def _bench(
    case: Case, report: Data, device: torch.device, size: str | None, budget_s: float, predictions: Data
) -> None:
    chosen = size or case.size_on(device)
    result = run_bench(case, chosen, device=device, budget_s=budget_s)
    report["bench"].append(result.to_json())
    report["figures"] += compare(result, predictions, report["nearest"])


def compare(result: BenchResult, predictions: Data, device: str) -> list[Data]:
    """Return bench figures with their predictions for `device`: measured, predicted, measured / predicted."""
    known = _by_call(predictions)
    figures: list[Data] = []
    for row in result.rows:
        expected = known.get((result.case, result.size, result.environment.get("dtype"), row.impl))
        if row.median_s is None or row.kind not in ("fast", "limit"):
            continue
        above = None if row.peak_bytes is None else row.peak_bytes - result.input_bytes
        for figure, measured, predicted in (
            ("time_s", row.median_s, expected and expected["step_s"].get(device)),
            ("peak above inputs_bytes", above, expected and expected["above_bytes"]),
            ("host waits", row.host_syncs, expected and expected["host_waits"]),
        ):
            ratio = measured / predicted if measured and predicted else None
            head = {"case": result.case, "impl": row.impl, "figure": figure}
            figures.append({**head, "measured": measured, "predicted": predicted, "ratio": ratio})
    return figures


def _by_call(predictions: Data) -> dict[tuple[Any, ...], Any]:
    return {(row["case"], row["size"], row["dtype"], row["impl"]): row for row in predictions["rows"]}


def _syncs(case: Case, device: torch.device, size: str | None, predictions: Data) -> list[Data]:
    """Return counted and predicted syncs of every fast path; None if there is no prediction."""
    size, dtype = size or case.size_on(device), case.dtype_on(device)
    params, known = case.params(size), _by_call(predictions)
    workload = case.workload(params, dtype, device)
    rows = []
    for implementation in case.implementations:
        if implementation.kind != "fast" or implementation.missing(params, device) is not None:
            continue
        count, first = count_syncs(implementation.build(workload), device)
        expected = known.get((case.name, size, dtype_name(dtype), implementation.name))
        predicted = None if expected is None else expected["host_waits"]
        head = {"case": case.name, "impl": implementation.name}
        rows.append({**head, "syncs": count, "predicted": predicted, "first_at": first})
    return rows


def shortfalls(report: Data) -> list[str]:
    """Return one sentence per failure: proofs, more waits than predicted, parts that did not run."""
    wrong = [row for row in report["prove"] if not row["ok"]]
    waits = [row for row in report["syncs"] if row["syncs"] > (row["predicted"] or 0)]
    said = [f"{len(wrong)} proofs failed, first {wrong[0]['case']}/{wrong[0]['impl']}"] if wrong else []
    if waits:
        first = waits[0]
        said.append(
            f"{len(waits)} fast paths wait more often than predicted, first {first['case']}/{first['impl']} "
            f"at {first['first_at']}: {first['syncs']} instead of {first['predicted'] or 0}"
        )
    said += [f"{p['case']}: {p['part']} did not run: {p['trouble']}" for p in report["problems"]]
    return said


def write_report(report: Data, folder: Path) -> None:
    """Write `report.json` and one page, `index.html`, to `folder`."""
    from leanstep.report import page

    text = json.dumps(finite(report), indent=1, ensure_ascii=False, allow_nan=False)
    write_text(folder / "report.json", text + "\n", "--out")
    head = {key: report[key] for key in ("leanstep", "torch", "device", "threads")}
    first = {**head, "nearest known device": report["nearest"], "accelerator": report["accelerator"]}
    first |= {"figures": [_shown(row) for row in report["figures"]]}
    first |= {"syncs by torch's own debugging": report["syncs"], "problems": report["problems"]}
    payloads: dict[str, Data] = {"gpu-report: measured and predicted": first}
    if report["bench"]:
        payloads["bench"] = {"results": report["bench"]}
    if report["prove"]:
        payloads["prove"] = {**head, "rows": report["prove"]}
    (folder / "index.html").unlink(missing_ok=True)
    page.add_sections(folder / "index.html", payloads)


def _shown(row: Data) -> Data:
    """Return a figure with its unit, as the page shows it."""
    from leanstep.report.sections import cell

    texts = {key: cell(row["figure"], row[key]) for key in ("measured", "predicted")}
    figure = row["figure"].removesuffix("_s").removesuffix("_bytes")
    return {**row, **texts, "figure": figure}
