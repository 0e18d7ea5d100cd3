"""Published measurements beside what `leanstep rehearse` predicts for them: the open table.

    python dev/published.py                       # rehearse rows without a current result, write the page
    python dev/published.py mpt-1b torchtune      # only rows whose names contain one of these words
    python dev/published.py --again --jobs 2      # every row once more, two at a time
    python dev/published.py --speedrun CHECKOUT   # the logs of modded-nanogpt too, from your own clone
    python dev/published.py --page                # only write docs/published.md from results/published

A row comes from one file in `dev/publications`: a training script in own words and a literal table named
PUBLISHED (docs/published.md says what is in it). Each row gives `results/published/ROW.json`.
With `--recordings DIR` recordings are kept; `--replay` then prices them with the present code, in seconds.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import pickle
import re
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import published_page
import speedrun_logs

import leanstep
from leanstep.files import BadInput, write_text
from leanstep.rehearse.cuda_allocator import memory_of
from leanstep.rehearse.devices import Device, device_named
from leanstep.rehearse.events import Alloc, Event, Free, Recording, Refusal, Request, Step
from leanstep.rehearse.links import device_of, machine_named
from leanstep.rehearse.stage import RehearsalError, rehearse
from leanstep.rehearse.time_model import HostCosts, Timing, time_steps
from leanstep.rehearse.what_if import step_events, update_step
from leanstep.tape.marks import spans

ROOT = Path(__file__).parents[1]
PUBLICATIONS, RESULTS = ROOT / "dev" / "publications", ROOT / "results" / "published"
PAGE = ROOT / "docs" / "published.md"
TABLE = "PUBLISHED"
# Pages with the sentence about blind rows, and their link to the table.
QUOTED = {"README.md": "docs/published.md", "docs/accuracy.md": "published.md"}
QUOTE = re.compile(r"(<!-- published:begin -->\n).*?(<!-- published:end -->)", re.DOTALL)
Data = dict[str, Any]

REQUIRED = ("source", "date", "role", "class", "device")
ROLES = ("development", "blind")
# Published figure -> unit on the page. A rate (`per_s`) needs `per_step`; kernels_* map a label to a figure.
METRICS = {
    "step_ms": "ms",
    "device_ms": "ms",
    "per_s": "per s",
    "allocated_gib": "GiB",
    "reserved_gib": "GiB",
    "kernels_ms": "ms",
    "kernels_mib": "MiB",
    "kernels_extra_mib": "MiB",
}
ABOUT = ("source", "date", "role", "class", "note", "url")
# sets: the constant of the time model that was chosen with this row in view.
OPTIONS = ("args", "note", "per_step", "mean_of", "without", "log", "url", "sets")
_REQUEST = tuple(f.name for f in fields(Request) if f.name not in ("target", "args"))


@dataclass(frozen=True)
class Row:
    """One rehearsal and the published figures that it is compared with."""

    name: str
    script: Path
    entries: Data = field(hash=False)
    digest: str = ""

    @property
    def published(self) -> Data:
        return {name: self.entries[name] for name in METRICS if name in self.entries}

    @property
    def request(self) -> Request:
        more = {name: self.entries[name] for name in _REQUEST if name in self.entries}
        return Request(str(self.script), tuple(str(self.entries.get("args", "")).split()), **more)


def read_rows(folder: Path) -> list[Row]:
    """The rows of every file in `folder` that has a table; nothing in it is run."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}
    tables = {path: _table(path, text) for path, text in texts.items()}
    shared = "".join(text for path, text in texts.items() if tables[path] is None)
    rows: list[Row] = []
    for path, parts in tables.items():
        if parts is None:
            continue
        table, code = parts
        common = {name: value for name, value in table.items() if name != "rows"}
        for name, own in table.get("rows", {}).items():
            entries = {**common, **own}
            _check(f"{path.name}: row {name!r}", entries)
            entries.pop("sets", None)
            digest = _digest([shared, code, json.dumps(entries, sort_keys=True)])
            rows.append(Row(name, path, entries, digest))
    names = [row.name for row in rows]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInput(f"row {twice[0]!r}: expected one row of this name, got {names.count(twice[0])}")
    return rows


def _table(path: Path, text: str) -> tuple[Data, str] | None:
    """The literal table of a file and the rest of its text."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == [TABLE]:
            try:
                table = ast.literal_eval(node.value)
            except ValueError:
                raise BadInput(f"{path.name}: {TABLE}: expected a literal dict, got an expression") from None
            return table, text.replace(ast.get_source_segment(text, node) or "", "")
    return None


def _check(where: str, entries: Data) -> None:
    if lacking := [name for name in REQUIRED if name not in entries]:
        raise BadInput(f"{where}: expected {', '.join(REQUIRED)}; lacks {', '.join(lacking)}")
    known = {*REQUIRED, *METRICS, *OPTIONS, *_REQUEST}
    if unknown := sorted(set(entries) - known):
        raise BadInput(f"{where}: unknown entry {unknown[0]!r}; known: {', '.join(sorted(known))}")
    if entries["role"] not in ROLES:
        raise BadInput(f"{where}: role: expected {' or '.join(ROLES)}, got {entries['role']!r}")
    if "sets" in entries and entries["role"] == "blind":
        raise BadInput(f"{where}: role: a row that sets {entries['sets']} is a development row, got 'blind'")
    if not any(name in entries for name in METRICS):
        raise BadInput(f"{where}: expected a published figure: {', '.join(METRICS)}")
    if "per_s" in entries and "per_step" not in entries:
        raise BadInput(f"{where}: per_s: expected per_step beside it: tokens or images of one step and rank")
    device_named(entries["device"])
    if entries.get("machine") and machine_named(entries["machine"]).device != entries["device"]:
        raise BadInput(f"{where}: machine: {entries['machine']} has another device than {entries['device']}")


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def engine() -> str:
    """A digest of the code that rehearses."""
    package = ROOT / "leanstep"
    files = [*(package / "rehearse").rglob("*.py"), *(package / "rehearse").rglob("*.cpp")]
    files += [*(package / "tape").rglob("*.py"), package / "flops.py"]
    return _digest(path.read_text(encoding="utf-8") for path in sorted(files))


def rehearse_row(row: Row, recordings: Path | None, replay: bool, checkout: Path | None) -> Data:
    """The result of a row; a recording that exists is priced again under `replay`."""
    file = recordings / f"{row.name}.pkl" if recordings is not None else None
    started = time.monotonic()
    if replay and file is not None and file.exists():
        recorded_by, seconds, recording = pickle.loads(file.read_bytes())
    else:
        with speedrun_logs.prepared(row.entries.get("log"), checkout) as script:
            request = replace(row.request, target=str(script)) if script else row.request
            recording = _rehearsed(request)
        recorded_by, seconds = engine(), time.monotonic() - started
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(pickle.dumps((recorded_by, seconds, recording)))
    figures = [] if recording.refused else compare(row, recording)
    return {
        "row": row.name,
        **{name: row.entries[name] for name in REQUIRED},
        **{name: row.entries[name] for name in ("ranks", "note", "log", "url") if name in row.entries},
        "command": f"python dev/published.py {row.name}",
        "figures": figures,
        **_first(row, figures),
        "published": row.published,
        "stopped": _stopped(recording),
        "leanstep": leanstep.__version__,
        "torch": recording.torch,
        "recorded_by": recorded_by,
        "engine": engine(),
        "digest": row.digest,
        "seconds": round(seconds, 1),
    }


def _first(row: Row, figures: list[Data]) -> Data:
    """The first prediction of a blind row, which later versions do not replace."""
    if row.entries["role"] != "blind":
        return {}
    path = RESULTS / f"{row.name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {"first": before.get("first") or {"figures": figures, "engine": engine()}}


def _rehearsed(request: Request) -> Recording:
    """What was recorded; a rehearsal that fails itself stops its row, not the table."""
    try:
        return rehearse(request, quiet=True)
    except RehearsalError as error:
        return Recording(request, "", refused=Refusal(None, str(error)), ended="refused")


def _stopped(recording: Recording) -> str | None:
    if recording.refused is not None:
        return " ".join(recording.refused.reason.split())[:200]
    return None if len(recording.steps) >= 2 else "the script ended before its second step"


def compare(row: Row, recording: Recording) -> list[Data]:
    """One entry per published figure: predicted, interval, ratio."""
    entries = row.entries
    device = device_of(device_named(entries["device"]).key, entries.get("machine"))
    figures: list[Data] = []

    def add(label: str, unit: str, published: float, predicted: float, span: Sequence[float] = ()) -> None:
        figure: Data = {"label": label, "unit": unit, "published": published, "predicted": predicted}
        figure["ratio"] = predicted / published
        if span:
            figure |= {"interval": list(span), "inside": span[0] <= published <= span[1]}
        figures.append({k: _short(v) for k, v in figure.items()})

    count = len(recording.steps) if "kernels_ms" in row.published else entries.get("mean_of", 1)
    last = timings = time_steps_of(recording, device, count, entries.get("without"))
    if count == 1 and (update := update_step(recording, device)) is not None:
        last = [update]
    step = [statistics.fmean(t.step_s * 1e3 for t in last)]
    step += [statistics.fmean(t.interval_s[end] * 1e3 for t in last) for end in (0, 1)]
    for metric, published in row.published.items():
        unit = METRICS[metric]
        if metric == "step_ms":
            add("step", unit, published, step[0], step[1:])
        elif metric == "per_s":
            add("step", "ms", 1e3 * entries["per_step"] / published, step[0], step[1:])
        elif metric == "device_ms":
            scale = last[-1].device_s * 1e3 / step[0]
            add("kernels", unit, published, step[0] * scale, [s * scale for s in step[1:]])
        elif metric == "kernels_ms":
            for (label, value), timing in zip(published.items(), timings[1::2], strict=True):
                add(label, unit, value, timing.step_s * 1e3, [s * 1e3 for s in timing.interval_s])
        elif metric in ("kernels_mib", "kernels_extra_mib"):
            peaks = list(step_peaks(recording.events, [s.last for s in recording.steps]))[1::2]
            for (label, value), (before, peak) in zip(published.items(), peaks, strict=True):
                add(label, unit, value, (peak - (before if "extra" in metric else 0)) / 2**20)
        else:
            memory = memory_of(recording, device.memory_bytes, device.context_bytes, points=1)
            add(metric.split("_")[0], unit, published, getattr(memory, metric.split("_")[0]) / 2**30)
    return figures


def time_steps_of(
    recording: Recording, device: Device, count: int, without: str | None = None
) -> list[Timing]:
    """The times of the last `count` steps, played after the step before them, which fills the queue."""
    played: list[Event] = []
    ends: list[int] = []
    for step in recording.steps[-count - 1 :]:
        pieces = spans(recording.phases, step.first, step.last) if without else [("", step.first, step.last)]
        for phase, first, last in pieces:
            if not without or phase != without:
                played += step_events(recording, Step(step.number, first, last))
        ends.append(len(played))
    return time_steps(played, ends, device, HostCosts.of(recording.request.host_us))[-count:]


def step_peaks(events: Sequence[Event], ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Live bytes when each step begins, and the most in it."""
    sizes: dict[int, int] = {}
    live = index = 0
    for end in ends:
        before = peak = live
        for event in events[index:end]:
            if isinstance(event, Alloc):
                sizes[event.storage] = event.nbytes
                live += event.nbytes
            elif isinstance(event, Free):
                live -= sizes.pop(event.storage, 0)
            peak = max(peak, live)
        index = end
        yield before, peak


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(v) for v in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def run(rows: Sequence[Row], jobs: int, recordings: Path | None, replay: bool, checkout: Path | None) -> None:
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        futures = {pool.submit(rehearse_row, row, recordings, replay, checkout): row for row in rows}
        for future in as_completed(futures):
            row, result = futures[future], future.result()
            RESULTS.mkdir(parents=True, exist_ok=True)
            text = json.dumps(result, indent=1) + "\n"
            write_text(RESULTS / f"{row.name}.json", text, "results")
            shown = ", ".join(f"{f['label']} {f['ratio']:.2f}" for f in result["figures"][:4])
            print(f"{row.name}: {result['stopped'] or shown} ({result['seconds']:.0f} s)", flush=True)


def is_current(row: Row) -> bool:
    path = RESULTS / f"{row.name}.json"
    if not path.exists():
        return False
    result = json.loads(path.read_text(encoding="utf-8"))
    return result["digest"] == row.digest and result["engine"] == engine()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="rows whose names contain one of them; all without")
    parser.add_argument("--again", action="store_true", help="rows with a current result too")
    parser.add_argument("--jobs", type=int, default=1, help="rehearsals at a time")
    parser.add_argument("--recordings", type=Path, help="keep recordings in this folder")
    parser.add_argument("--replay", action="store_true", help="price recordings of that folder again")
    parser.add_argument("--speedrun", type=Path, metavar="CHECKOUT", help="a clone of modded-nanogpt")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    try:
        rows = read_rows(PUBLICATIONS)
        if options.replay and options.recordings is None:
            raise BadInput("--replay: expected --recordings DIR beside it")
        if options.jobs < 1:
            raise BadInput(f"--jobs: expected at least 1, got {options.jobs}")
        chosen = [row for row in rows if not options.words or any(w in row.name for w in options.words)]
        if not chosen:
            raise BadInput(f"{' '.join(options.words)}: no row has this in its name")
        if options.speedrun is None and not options.replay:
            chosen = [row for row in chosen if "log" not in row.entries]
        if not options.page:
            todo = [row for row in chosen if options.again or options.replay or not is_current(row)]
            print(f"{len(todo)} of {len(rows)} rows to rehearse", flush=True)
            run(todo, options.jobs, options.recordings, options.replay, options.speedrun)
        write_page()
    except (BadInput, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def load_results(folder: Path = RESULTS) -> list[Data]:
    """The results of rows that exist, with the role, class and note that their tables have now."""
    rows = {row.name: row.entries for row in read_rows(PUBLICATIONS)}
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [
        {**result, **{name: rows[result["row"]][name] for name in ABOUT if name in rows[result["row"]]}}
        for result in results
        if result["row"] in rows
    ]


def write_page() -> None:
    results = load_results()
    write_text(PAGE, published_page.page(results), "page")
    for name, link in QUOTED.items():
        page = ROOT / name
        sentence = published_page.quoted(results, link)
        text = QUOTE.sub(rf"\g<1>{sentence}\n\g<2>", page.read_text(encoding="utf-8"))
        write_text(page, text, name)


if __name__ == "__main__":
    sys.exit(main())
