"""One bundled example: a training step in plain code and with leanstep, compared.

Each example is a folder with `before.py` and `after.py`, two ordinary scripts. What the demo says about
them is what `leanstep diagnose`, `prove` and `bench` say about yours.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import leanstep
from leanstep.commands import BadInput, FellShort
from leanstep.extras import require

SIDES = ("before", "after")
Report = Callable[[str], None]


@dataclass(frozen=True)
class Example:
    name: str
    title: str
    summary: str
    # Packages of the extra `train` that its scripts import.
    modules: tuple[str, ...] = ()

    def require(self) -> None:
        """Raise MissingExtra where a package is not installed."""
        require(f"the example {self.name}", "train", *self.modules)


EXAMPLES = (
    Example(
        "lens",
        "A controller trained from preferences",
        "The objective loops over pairs of contexts and over their entries, and reads one number at a time "
        "from the device. The fast path is one block of tensor ops with the same value and gradient.",
        modules=("numpy",),
    ),
    Example(
        "rl",
        "A GRPO update with long prompts",
        "Logits are computed for every position, then all but the sampled response is thrown away. The fast "
        "path selects rows before the LM head and works tile by tile: no tokens-by-vocabulary tensor exists.",
    ),
    Example(
        "speedrun",
        "A GPT on parameter banks with Muon",
        "Indexing a bank inside the layer loop makes autograd write a zero-filled gradient of the whole bank "
        "per use, and Muon goes matrix by matrix. The fast path takes banks apart once and works by shape.",
    ),
)


def examples_folder() -> Path:
    """Return the folder with the examples: inside an installed package, or next to it in a checkout."""
    package = Path(leanstep.__file__).parent
    for folder in (package / "examples", package.parent / "examples"):
        if all((folder / e.name / f"{side}.py").is_file() for e in EXAMPLES for side in SIDES):
            return folder
    raise BadInput(f"demo: the bundled examples are missing next to {package}; run it from a clone")


def readable_examples(out: Path) -> Path:
    """The examples as a user's own files: from an installed package they are copied to `out/examples` first.

    `diagnose` names the user's lines and passes over installed packages; and the reader can open them there.
    """
    folder = examples_folder()
    if folder.parent != Path(leanstep.__file__).parent:
        return folder
    target = out / "examples"
    try:
        shutil.copytree(folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise BadInput(f"--out: cannot copy the examples to {target}: {error}") from None
    return target.resolve()


def diagnose_script(path: Path, *, steps: int = 2) -> dict[str, Any]:
    """What `leanstep diagnose PATH --json` gives, with the script's own output kept away from the screen."""
    from leanstep.diagnose import Limits
    from leanstep.diagnose.cost import worth_a_line
    from leanstep.diagnose.outputs import screen
    from leanstep.diagnose.watch import Watch
    from leanstep.tape.run import Program, Stop, run_script

    def stop() -> None:
        raise Stop

    watch = Watch(steps, 1, Limits(), timed_warmup=True, on_done=stop)
    said = io.StringIO()
    with _siblings_forgotten(path.parent), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        outcome = run_script(Program(str(path)), [], watch)
    if outcome.exception == "KeyboardInterrupt":
        raise KeyboardInterrupt
    if outcome.code:
        last = said.getvalue().strip().splitlines()[-1:] or [f"exit code {outcome.code}"]
        raise FellShort(f"demo: {path} failed: {last[0]}")
    # What costs less than half a percent of the step is not worth a line.
    findings = worth_a_line(watch.findings(), watch.steps)
    return screen.as_json(watch, findings, str(path))


@contextlib.contextmanager
def _siblings_forgotten(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)


def compare(
    example: Example, examples: Path, *, steps: int, budget_s: float, report: Report
) -> dict[str, Any]:
    """Everything about one of the `examples`, as the page's `demo` section holds it."""
    from leanstep.prove.compare import prove_scripts
    from leanstep.prove.script_jobs import Job
    from leanstep.prove.stopwatch import bench_scripts
    from leanstep.report.excerpts import difference
    from leanstep.tape.children import call_in_child

    folder = examples / example.name
    before, after = (folder / f"{side}.py" for side in SIDES)
    comparison: dict[str, Any] = {side: {} for side in SIDES}
    for side, path in zip(SIDES, (before, after), strict=True):
        report(f"diagnose {side}.py")
        # In a process of its own, as the others are: this one must not have run anything when it forks.
        comparison[side]["diagnose"] = call_in_child(diagnose_script, path, fork=True)
    jobs = [Job(str(path), steps=steps) for path in (before, after)]
    report("prove the update")
    proof = prove_scripts(*jobs, fork=True, report=lambda what: report(f"prove: {what}"))
    if proof.problem is not None:
        raise FellShort(f"demo: {proof.problem}")
    figures = bench_scripts(*jobs, budget_s=budget_s, fork=True, report=lambda what, share: report(what))
    for side, row in zip(SIDES, (figures.before, figures.after), strict=True):
        comparison[side] |= {
            "losses": proof.losses[side],
            "median_s": row.median_s,
            "p20_s": row.p20_s,
            "p80_s": row.p80_s,
            "peak_bytes": row.peak_bytes or 0,
            "timeline": [list(point) for point in row.timeline],
        }
    return {
        "name": example.name,
        "title": example.title,
        "summary": example.summary,
        "diff": difference(before.read_text(encoding="utf-8"), after.read_text(encoding="utf-8")),
        **comparison,
        "time_ratio": comparison["before"]["median_s"] / comparison["after"]["median_s"],
        "memory_ratio": comparison["before"]["peak_bytes"] / max(comparison["after"]["peak_bytes"], 1),
        "proof": [
            {
                "case": example.name,
                "impl": "after",
                "dtype": "fp32",
                "tensor": f"step {row.step} {row.what} {row.parameter}".strip(),
                "error": row.error,
                "reference_error": row.reference_error,
                "bound": row.bound,
                "ok": row.ok,
            }
            for row in proof.rows
        ],
    }
