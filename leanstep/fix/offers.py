"""`leanstep fix`: applies repairs to a copy, proves and measures them, and offers those that pass.

1. Diagnose the script. 2. `repairs.py` lists edits that may remove a finding. 3. Apply each one to a copy
(a folder of links plus the changed files). The copy must no longer have the finding, must make the same
update as the script (`leanstep.prove`) and must not be slower (`stopwatch`). 4. Repairs that pass alone
must also pass together. Every run is a separate process, and the user's files are only read until `write`.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leanstep.diagnose.findings import Finding
from leanstep.diagnose.outputs import gate
from leanstep.diagnose.watch import Watch
from leanstep.files import BadInput, write_atomically
from leanstep.fix import repairs
from leanstep.fix.source_edits import Edit, NotUnderstood, apply
from leanstep.prove.captured import Captured
from leanstep.prove.compare import PairProof, judge
from leanstep.prove.script_jobs import Job, module_path, run_job
from leanstep.prove.stopwatch import MIN_ROUNDS, PairBench, SideRow, bench_scripts
from leanstep.tape.children import call_in_child, log_to, temporary_folder
from leanstep.tape.lines import USER, Line, judge_code, short_path
from leanstep.tape.run import Program, Stop, run_script

# A finding must hold on this many recorded steps.
STEPS = 2
# Scripts with few updates are timed in several runs.
SHORT_RUNS = 3
# What the proof of an offer covers, and what it does not.
PROVEN = "the gradients and parameter updates of the steps that were compared, against the fp64 reference"
NOT_PROVEN = "printed and logged values, later steps, branches that were not taken"
# Medians this close count as equal; otherwise the spread of the samples decides.
SAME_TIME = 1.03
NO_TIME = "no time left; a larger --budget tries it"


@dataclass
class Diagnosis:
    """The result of one run of the script, as a child process sends it."""

    findings: list[Finding]
    files: list[Path]
    steps: int
    ended: str | None = None

    def counts(self) -> Counter[str]:
        return Counter(f.rule for f in self.findings)


@dataclass
class Offer:
    """One repair that passed: its edits, proof and measurement."""

    findings: list[Finding]
    title: str
    edits: tuple[Edit, ...]
    proof: PairProof
    bench: PairBench

    def as_dict(self) -> dict[str, Any]:
        return {
            "findings": [_place(f) for f in self.findings],
            "fix": self.title,
            "proof": self.proof.sentence(),
            "measured": self.bench.to_json(),
        }


@dataclass
class Fixes:
    """The result: offers, refusals (finding, reason) and the changed files."""

    script: str
    offers: list[Offer] = field(default_factory=list)
    refused: list[tuple[Finding, str]] = field(default_factory=list)
    together: Offer | None = None
    changed: dict[Path, tuple[bytes, bytes]] = field(default_factory=dict)

    def diff(self) -> str:
        """Return a unified diff for `patch -p1` and `git apply`, relative to the working directory."""
        text = ""
        for path, (old, new) in self.changed.items():
            name = short_path(str(path)).lstrip("/")
            before, after = (data.decode().splitlines(keepends=True) for data in (old, new))
            for line in difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"):
                text += line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
        return text

    def write(self) -> list[Path]:
        """Apply the offers. If any file changed since it was read, write nothing."""
        for path, (old, _) in self.changed.items():
            if path.read_bytes() != old:
                raise BadInput(f"--write: {path} has changed in the meantime; run the command again")
        for path, (_, new) in self.changed.items():
            write_atomically(path.resolve(), new)
        return list(self.changed)

    def as_dict(self) -> dict[str, Any]:
        return {
            "script": self.script,
            "offers": [offer.as_dict() for offer in self.offers],
            "together": self.together.as_dict() if self.together is not None else None,
            "refused": [{**_place(finding), "reason": why} for finding, why in self.refused],
            "proof_covers": [PROVEN, NOT_PROVEN],
            "diff": self.diff(),
        }


def users_line(finding: Finding) -> Line:
    """Return the line of a finding; for a line in a library, the user's line that called it."""
    callers = finding.callers.most_common(1) if finding.line.library else []
    return callers[0][0] if callers else finding.line


def _place(finding: Finding) -> dict[str, Any]:
    line = users_line(finding)
    return {"rule": finding.rule, "file": short_path(line.file), "line": line.number, "code": line.code}


@dataclass(frozen=True)
class Settings:
    """Limits of one run of `leanstep fix`.

    updates: how many are compared. timing_s: seconds of timing per repair (0: none). Children are forked or
    fresh processes. budget_s: seconds in total; a repair that is not finished by then is not offered.
    """

    rules: tuple[str, ...] = ()
    updates: int = 2
    timing_s: float = 5.0
    budget_s: float = math.inf
    fork: bool = False


class _TimeIsUp(Exception):
    """The budget is used up."""


@contextlib.contextmanager
def _until(deadline: float) -> Iterator[None]:
    """Raise _TimeIsUp when `deadline` passes; outside the main thread only on entry and exit."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise _TimeIsUp
    if math.isinf(left) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise _TimeIsUp

    old = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, left)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, old)


def find_fixes(
    script: Path,
    argv: Sequence[str] = (),
    settings: Settings | None = None,
    report: Callable[[str], None] | None = None,
    on_offer: Callable[[Offer], None] | None = None,
) -> Fixes:
    """Diagnose the script and try every mechanical repair. No file of the user's is changed.

    report: called with the name of the next stage. on_offer: called with each repair that passes alone.
    """
    settings, say = settings or Settings(), report or (lambda what: None)
    deadline = time.monotonic() + settings.budget_s
    bench = _Workbench(script.absolute(), tuple(argv), settings, say)
    fixes = Fixes(str(script))
    say(f"diagnose {script.name}")
    try:
        with _until(deadline):
            bench.diagnosis = bench.diagnose(bench.script)
    except _TimeIsUp:
        raise BadInput(
            f"--budget: {script.name} was not diagnosed within {settings.budget_s:.0f} seconds"
        ) from None
    if not bench.diagnosis.steps:
        ended = bench.diagnosis.ended or "without a training step"
        raise BadInput(f"fix: {script.name} ended {ended}; nothing can be fixed")
    of_rules = gate.selected(bench.diagnosis.findings, settings.rules, ())
    project = repairs.Project(bench.script, bench.diagnosis.files)
    tried: dict[frozenset[Edit], Offer | str] = {}
    for finding in gate.without_ignored(of_rules)[0]:
        try:
            variants = repairs.repairs_of(project, finding)
        except NotUnderstood as error:
            fixes.refused.append((finding, str(error)))
            continue
        outcome: Offer | str = "no fix to try"
        for variant in variants:
            key = frozenset(variant.edits)
            if key not in tried:
                try:
                    with _until(deadline):
                        tried[key] = bench.attempt(finding, variant.title, variant.edits)
                except _TimeIsUp:
                    tried[key] = f"{variant.title}: {NO_TIME}"
            outcome = tried[key]
            if isinstance(outcome, Offer):
                break
        if isinstance(outcome, str):
            fixes.refused.append((finding, outcome))
        elif outcome not in fixes.offers:
            fixes.offers.append(outcome)
            if on_offer is not None:
                on_offer(outcome)
        else:
            outcome.findings.append(finding)
    try:
        with _until(deadline):
            _join(fixes, bench)
    except _TimeIsUp:
        # Each passes alone. The first belongs to the most expensive finding and is offered.
        for offer in fixes.offers[1:]:
            fixes.refused += [
                (finding, f"{offer.title}: passes alone; {NO_TIME}") for finding in offer.findings
            ]
        fixes.offers, fixes.together = fixes.offers[:1], None
        fixes.changed = _changes(fixes)
    return fixes


def _join(fixes: Fixes, bench: _Workbench) -> None:
    """Try the repairs that pass alone together; drop one that fails with those before it."""
    if len(fixes.offers) > 1:
        bench.say("all repairs together")
        joined = bench.attempt_all(fixes.offers)
        if isinstance(joined, str):
            passing = [fixes.offers[0]]
            for offer in fixes.offers[1:]:
                tried = bench.attempt_all([*passing, offer])
                if isinstance(tried, Offer):
                    passing, joined = [*passing, offer], tried
                else:
                    why = f"fails together with the other fixes: {tried}"
                    fixes.refused += [(finding, why) for finding in offer.findings]
            fixes.offers = passing
        fixes.together = joined if isinstance(joined, Offer) else None
    fixes.changed = _changes(fixes)


def _changes(fixes: Fixes) -> dict[Path, tuple[bytes, bytes]]:
    edits = [edit for offer in fixes.offers for edit in offer.edits]
    return {path: (path.read_bytes(), data) for path, data in changed_files(edits).items()}


def changed_files(edits: Sequence[Edit]) -> dict[Path, bytes]:
    paths = sorted({edit.path for edit in edits})
    return {path: apply(path.read_bytes(), [edit for edit in edits if edit.path == path]) for path in paths}


class _Workbench:
    """One script with its findings, its captured updates and their fp64 reference."""

    def __init__(
        self, script: Path, argv: tuple[str, ...], settings: Settings, say: Callable[[str], None]
    ) -> None:
        self.script, self.argv, self.settings, self.say = script, argv, settings, say
        self.diagnosis = Diagnosis([], [], 0)
        self._runs: tuple[Captured, Captured] | None = None

    def job(self, script: Path, twin: bool = False, path: tuple[str, ...] = ()) -> Job:
        return Job(str(script), self.argv, self.settings.updates, twin=twin, path=path)

    def diagnose(self, script: Path, path: tuple[str, ...] = (), timed: bool = True) -> Diagnosis:
        """timed: also time a step, so that findings are ranked by their share of it."""
        with temporary_folder() as folder:
            log, fork = folder / "log", self.settings.fork
            return call_in_child(_diagnosed, str(script), self.argv, path, log, timed, fork=fork)

    def attempt_all(self, offers: list[Offer]) -> Offer | str:
        findings = [finding for offer in offers for finding in offer.findings]
        edits = tuple(edit for offer in offers for edit in offer.edits)
        return self.attempt(findings[0], f"{len(offers)} fixes", edits, findings)

    def attempt(
        self, finding: Finding, title: str, edits: tuple[Edit, ...], findings: list[Finding] | None = None
    ) -> Offer | str:
        """Return the offer, or the reason why there is none."""
        findings = findings or [finding]
        try:
            changed = changed_files(edits)
        except NotUnderstood as error:
            return str(error)
        with overlaid(self.script, repairs.project_root(self.script), changed) as (copy, path):
            self.say(f"{finding.rule}: diagnose the copy")
            after = self.diagnose(copy, path, timed=False)
            if after.ended is not None:
                return f"{title}: tried, the copy ended {after.ended}"
            if _remains(self.diagnosis, after, findings):
                return f"{title}: tried, the finding remains"
            own = self.job(copy, path=path)
            self.say(f"{finding.rule}: prove the copy")
            proof = self._proven(own)
            if not proof.ok:
                return f"{title}: tried, {proof.sentence()}"
            self.say(f"{finding.rule}: proven; measure the copy")
            bench = measured(self.job(self.script), own, self.settings)
        bench.proven, bench.verdict = True, proof.sentence()
        if is_slower(bench):
            assert bench.time_ratio is not None
            return f"{title}: the copy is slower ({1 / bench.time_ratio:.2f}× the time)"
        return Offer(list(findings), title, edits, proof, bench)

    def _proven(self, job: Job) -> PairProof:
        fork = self.settings.fork
        if self._runs is None:
            (plain,), (truth,) = (run_job(self.job(self.script, twin), fork=fork) for twin in (False, True))
            self._runs = plain, truth
        proof = PairProof(self.script.name, "the copy")
        (own,) = run_job(job, fork=fork)
        return judge(proof, self._runs[0], own, self._runs[1])


def _remains(before: Diagnosis, after: Diagnosis, findings: list[Finding]) -> bool:
    """Whether the copy has not fewer findings of a rule than the script."""
    old, new = before.counts(), after.counts()
    return any(new[rule] > old[rule] - wanted for rule, wanted in Counter(f.rule for f in findings).items())


def _diagnosed(
    script: str, argv: tuple[str, ...], path: tuple[str, ...], log: Path, timed: bool
) -> Diagnosis:
    """Run in a child: return the findings of a few steps and the user's files. Output goes to `log`."""

    def stop() -> None:
        raise Stop

    watch = Watch(STEPS, timed_warmup=True, on_done=stop, timed=timed)
    with log_to(log), module_path(path):
        outcome = run_script(Program(script), argv, watch)
    said = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    ended = None
    if outcome.exception is not None or outcome.code:
        last = outcome.said or (said[-1].strip() if said else "")
        ended = f"with {outcome.exception or f'exit code {outcome.code}'}: {last}"
    paths = {Path(script)}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        # Some torch modules have file names that do not exist.
        if isinstance(file, str) and Path(file).is_file() and judge_code(file, "") & USER:
            paths.add(Path(os.path.abspath(file)))  # noqa: PTH100  without `..`, links as they are
    return Diagnosis(list(watch.findings()), sorted(paths), len(watch.steps), ended)


def measured(before: Job, after: Job, settings: Settings) -> PairBench:
    """Time steps of both scripts in turn; repeat scripts that make few short updates."""
    if not settings.timing_s:
        return PairBench(SideRow(before.label), SideRow(after.label))
    options = {"budget_s": settings.timing_s, "fork": settings.fork, "min_rounds": 1}
    end = time.monotonic() + 4 * settings.timing_s
    runs = [bench_scripts(before, after, **options)]
    while runs[0].before.samples < MIN_ROUNDS and len(runs) < SHORT_RUNS and time.monotonic() < end:
        runs.append(bench_scripts(before, after, **options))
    return sorted(runs, key=lambda run: run.time_ratio or 0.0)[len(runs) // 2]


def is_slower(bench: PairBench) -> bool:
    """Return whether it is slower beyond noise: by the medians, with samples that do not overlap."""
    before, after = bench.before, bench.after
    if not before.median_s or not after.median_s:
        return False
    apart = (after.p20_s or 0.0) > (before.p80_s or 0.0)
    return after.median_s > SAME_TIME * before.median_s and apart


# The copy.


@contextlib.contextmanager
def overlaid(script: Path, root: Path, changed: dict[Path, bytes]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Create the copy of a project: a folder of links that contains the changed files.

    The script still finds files that it opens by path, relative to itself or to the working directory, which
    does not change. Yields the script's copy and the sys.path on which changed modules are found.
    """
    files = {path.relative_to(root): data for path, data in changed.items()}
    files.setdefault(script.relative_to(root), script.read_bytes())
    with temporary_folder("leanstep-fix-") as temporary:
        copy = temporary / (root.name or "root")
        _link(root, copy, files)
        yield (
            copy / script.relative_to(root),
            tuple(_on_copy(place, root, copy, changed) for place in sys.path),
        )


def _on_copy(place: str, root: Path, copy: Path, changed: dict[Path, bytes]) -> str:
    """Return the copy of a folder of sys.path if a changed file is in it."""
    if not place or not any(path.is_relative_to(place) for path in changed):
        return place
    return str(copy / Path(place).relative_to(root)) if Path(place).is_relative_to(root) else place


def _link(folder: Path, copy: Path, files: dict[Path, bytes]) -> None:
    copy.mkdir()
    tops = {path.parts[0] for path in files}
    for entry in folder.iterdir():
        # Compiled files belong to the source next to them.
        if entry.name not in tops and entry.name != "__pycache__":
            (copy / entry.name).symlink_to(entry)
    for top in tops:
        if Path(top) in files:
            (copy / top).write_bytes(files[Path(top)])
        else:
            inner = {path.relative_to(top): data for path, data in files.items() if path.parts[0] == top}
            _link(folder / top, copy / top, inner)
