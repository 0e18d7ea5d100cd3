"""The figures of README and docs: measured here, kept in `results/`, written between markers, never by hand.

    python dev/readme.py                 # measure every line, write results/ and the tables
    python dev/readme.py polar sft-step  # only these cases
    python dev/readme.py --screens       # run only the commands whose output the README shows
    python dev/readme.py --render        # the tables again from results/, nothing is measured

Each case gives one result file with the command that repeats it and the roofline of its rows, measured in the
same run. A test renders the tables again from the committed files.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "dev")]

from roofline import roofline_s  # noqa: E402

from benchmarks.harness import Benchmark, limit_of  # noqa: E402
from benchmarks.harness import measure as run_benchmark  # noqa: E402
from leanstep import units  # noqa: E402
from leanstep.commands.terminal import coloured  # noqa: E402
from leanstep.escape import clip  # noqa: E402
from leanstep.files import BadInput, write_text  # noqa: E402


class Line(NamedTuple):
    """One line of a table: a case, what the reader calls it, and the row that is leanstep's.

    `also`: a row other than the reference that the factor is given against as well, and its name in words.
    """

    case: str
    size: str
    what: str
    impl: str = "leanstep"
    also: tuple[str, str] | None = None


# The README's table: at most five lines.
README_LINES = (
    Line("logprob-linear", "cpu", "log-probs and entropy of 25 % of the rows, LM head included"),
    Line("sft-step", "cpu", "SFT step in transformers"),
    Line("grpo-step", "cpu", "GRPO step in TRL, 25 % completion tokens"),
    Line("muon-step", "seed", "NorMuon step, 60 matrices, bfloat16", "leanstep-bf16"),
)
# The table of docs/measuring.md: the README's lines and these.
MORE_LINES = (
    Line("logprob-logits", "cpu", "log-probs and entropy from existing logits"),
    Line("policy-loss", "cpu", "the whole policy objective on those rows"),
    Line("lens-loss", "seed", "controller loss, loops of an older MegaContext", also=("eager", "eager ops")),
    Line("lens-step", "cpu", "training step with a controller"),
    Line("polar", "cpu", "Polar Express in float32, 768 × 3072"),
    Line("polar", "cpu", "the same in bfloat16, as `auto` picks on this CPU", "leanstep-bf16"),
    Line("polar", "square", "Polar Express in float32, 768 × 768"),
    Line("muon-step", "seed", "the NorMuon step in float32"),
    Line("transpose-copy", "cpu", "copy a 768 × 50,304 matrix transposed"),
    Line("transpose-add", "cpu", "add a transposed 768 × 50,304 gradient"),
    Line("bank-access", "cpu", "weights of 11 layers out of a bank, and back"),
)
# The table of docs/objectives.md.
OBJECTIVE_LINES = (
    Line("distill", "cpu", "JSD to a wider teacher's head, V = 32,000, a quarter of 2,048 rows"),
    Line("distill", "all", "the same, all of 1,024 rows"),
    Line("dpo", "cpu", "DPO with a reference head, a quarter of 2,048 positions are completions"),
)
LINES = (*README_LINES, *MORE_LINES, *OBJECTIVE_LINES)
PAGES = ("README.md", "docs/measuring.md", "docs/objectives.md")
# The commands whose output the README shows: one as a picture, one as text.
SCREEN_SCRIPT = "examples/rl/before.py"
DIAGNOSE = f"leanstep diagnose {SCREEN_SCRIPT}"
REHEARSE = f"leanstep rehearse {SCREEN_SCRIPT} --device h100"
PICTURE = "docs/diagnose.svg"
_BLOCK = re.compile(r"(<!-- ((?:\w+-)?figures|verdict):begin -->\n)(.*?)(<!-- \2:end -->)", re.DOTALL)

Data = dict[str, Any]


def measure(cases: Collection[str], budget_s: float) -> None:
    """Measure the lines of these cases, write `results/*.json`, rewrite the tables."""
    (ROOT / "results").mkdir(exist_ok=True)
    for name, size in dict.fromkeys((line.case, line.size) for line in LINES if line.case in cases):
        print(name, size, flush=True)
        module = f"benchmarks.{name.replace('-', '_')}"
        benchmark = importlib.import_module(module).BENCHMARK
        shown, failed = run_benchmark(benchmark, size, budget_s=budget_s)
        if failed:
            raise BadInput(f"{name}: parity failed for {failed[0].tensor}; nothing to write")
        impls = [line.impl for line in LINES if (line.case, line.size) == (name, size)]
        command = f"python -m {module} --size {size}"
        rooflines = {
            impl: least for impl in impls if (least := roofline(benchmark, size, impl, shown["rows"]))
        }
        write_result(ROOT, f"bench-{name}-{size}", command, shown, roofline_s=rooflines)


def roofline(benchmark: Benchmark, size: str, impl: str, rows: Sequence[Data]) -> float | None:
    """The least seconds of a row: what its limit does, at the fastest this machine can do it."""
    named = {row["impl"]: row for row in rows}
    limit = limit_of(named, impl)
    # A row this machine leaves out (emulated bfloat16, say) needs no bound, which would take minutes to find.
    if limit is None or not named[impl]["median_s"]:
        return None
    workload = benchmark.workload(benchmark.params(size), benchmark.bench_dtype)
    # A row in half precision may use the faster of both: the limit counts FLOPs in the bench's own dtype.
    dtypes = (torch.bfloat16, torch.float32) if impl.endswith("bf16") else ()
    bound = roofline_s(benchmark.row(limit["impl"]), workload, faster_dtypes=dtypes)
    # The limit row itself was measured, too: its fastest fifth may be below what was found apart from it.
    return min(bound, limit["p20_s"])


def write_result(root: Path, name: str, command: str, result: Data, **more: Any) -> None:
    """One result file: the figures and the command that repeats them."""
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    held = {"command": command, "date": when, **more, "result": result}
    text = json.dumps(held, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(root / "results" / f"{name}.json", text + "\n", "results")


def run_screens(root: Path) -> None:
    """Run the commands that the README shows and write what they print."""
    write_result(root, "diagnose-rl-before", DIAGNOSE, {"screen": printed_by(DIAGNOSE, "leanstep diagnose ")})
    write_result(root, "rehearse-rl-before", REHEARSE, {"screen": printed_by(REHEARSE, "predicted on ")})


def printed_by(command: str, first: str) -> str:
    """Return what the command prints from the line that starts with `first` on."""
    words = [sys.executable, "-m", *command.split()]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if ran.returncode:
        raise BadInput(f"{command} failed: {ran.stderr.strip()[-200:]}")
    return ran.stdout[ran.stdout.index(first) :].rstrip() + "\n"


def write_picture(root: Path, screen: str) -> None:
    """Draw a terminal that shows the command and what it prints."""
    console = Console(
        record=True, width=96, file=io.StringIO(), color_system="truecolor", force_terminal=True
    )
    console.print(coloured(f"$ {screen}"), soft_wrap=True)
    svg = console.export_svg(title="leanstep", unique_id="leanstep")
    write_text(root / PICTURE, svg, PICTURE)


def rewrite(root: Path) -> None:
    """Write the marked blocks of the pages again from the result files."""
    results = load_results(root)
    for name in PAGES:
        page = root / name
        write_text(page, rendered(page.read_text(encoding="utf-8"), results), name)
    write_picture(root, results["diagnose-rl-before"]["result"]["screen"])


def load_results(root: Path) -> dict[str, Data]:
    return {
        p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted((root / "results").glob("*.json"))
    }


def rendered(text: str, results: dict[str, Data]) -> str:
    """The text with every marked block rendered from the results; a block without results stays empty."""
    blocks = {
        "figures": figures_table(results, README_LINES, "results", brief=True),
        "more-figures": figures_table(results, (*README_LINES, *MORE_LINES), "../results"),
        "objective-figures": figures_table(results, OBJECTIVE_LINES, "../results"),
        "verdict": verdict_block(results),
    }
    return _BLOCK.sub(lambda m: m.group(1) + blocks[m.group(2)] + m.group(4), text)


def figures_table(results: dict[str, Data], lines: Sequence[Line], folder: str, brief: bool = False) -> str:
    """A table of figures; under it what the named peers do differently, and the machine.

    brief: without the roofline, what the other libraries compute and the explanation of the columns.
    """
    shown, environments = [], set()
    notes: list[str] = []
    for line in lines:
        name = f"bench-{line.case}-{line.size}"
        held = results.get(name)
        if held is None:
            continue
        result = held["result"]
        rows = {row["impl"]: row for row in result["rows"]}
        plain, fast = result["rows"][0], rows.get(line.impl)
        if fast is None or not plain["median_s"] or not fast["median_s"]:
            continue
        environments.add((result["device"], result["threads"], result["torch"]))
        link = f"[`{line.case}`]({folder}/{name}.json)"
        bound = held.get("roofline_s", {}).get(line.impl)
        cells = [
            f"{line.what} ({link})",
            units.seconds(plain["median_s"]),
            units.seconds(fast["median_s"]),
            _factor(line, fast, rows),
            f"{units.size(plain['extra_bytes'])} → {units.size(fast['extra_bytes'])}",
            _best_peer(result["rows"], notes),
            units.seconds(bound),
        ]
        if brief:
            cells.pop()
        shown.append("| " + " | ".join(cells) + " |")
    if not shown:
        return ""
    columns = ["", "plain code", "leanstep", "faster", "extra memory", "fastest other library", "roofline"]
    if brief:
        columns.pop()
    head = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    machines = "; ".join(
        f"{device}, {threads} threads, torch {torch}" for device, threads, torch in sorted(environments)
    )
    how = "Forward and backward, median of alternating repetitions in one process."
    if not brief:
        how += (
            " Written by `python dev/readme.py`. The fastest other library is listed if it is faster than "
            "the plain code. Roofline: the unavoidable matrix products (or bytes) at the highest rate that "
            "this machine reached in the same run."
        )
    if brief:
        shown, notes = [re.sub(r"<sup>\d+</sup>", "", row) for row in shown], []
    footnotes = [f"<sup>{number}</sup> {note}." for number, note in enumerate(notes, 1)]
    below = [" ".join(["Other libraries:", *footnotes]), ""] if notes else []
    return "\n".join([*head, *shown, "", *below, f"{how} {machines}.", ""])


def _factor(line: Line, fast: Data, rows: dict[str, Data]) -> str:
    """How many times faster than the plain code, and than another row where the line names one."""
    factor = f"**{units.ratio(fast['time_ratio'])}**"
    other = rows.get(line.also[0]) if line.also else None
    if line.also is None or other is None or not other["median_s"]:
        return factor
    return f"{factor}; {units.ratio(other['median_s'] / fast['median_s'])} against {line.also[1]}"


def _best_peer(rows: Sequence[Data], notes: list[str]) -> str:
    """The fastest peer that beats the plain code; its note (what it leaves out, its precision) to `notes`."""
    plain = rows[0]["median_s"]
    peers = [r for r in rows if r["kind"] == "peer" and r["median_s"] and r["median_s"] < plain]
    best = min(peers, key=lambda r: r["median_s"], default=None)
    if best is None:
        return "-"
    # The time of a first call is about this run, not about what the peer computes.
    parts = [part for part in best["note"].split("; ") if part and not part.startswith(("first call ", "> "))]
    mark = ""
    if parts:
        note = f"{best['impl']}: {'; '.join(parts)}"
        if note not in notes:
            notes.append(note)
        mark = f"<sup>{notes.index(note) + 1}</sup>"
    return f"{units.seconds(best['median_s'])} ({best['impl']}{mark})"


def verdict_block(results: dict[str, Data]) -> str:
    """The first lines that `leanstep rehearse` prints for the example, clipped to the page."""
    held = results.get("rehearse-rl-before")
    if held is None:
        return ""
    lines = [clip(line, 110) for line in held["result"]["screen"].splitlines()[:4]]
    return "\n".join(["```", f"$ {REHEARSE}", *lines, "  …", "```", ""])


# Figures in running text: a ratio, a time, or a size, outside code.
_FIGURE = re.compile(r"(?<![\w.,/-])(\d[\d,]*(?:\.\d+)?)\s?(×|ms|µs|s|KiB|MiB|GiB)(?![\w/])")


def figures_in(text: str) -> list[str]:
    """Every figure with a unit in a page of Markdown, code and shape products (768 × 3072) left out."""
    text = re.sub(r"```.*?```|`[^`\n]*`", " ", text, flags=re.DOTALL)
    text = re.sub(r"\d[\d,]* ×(?= ?[\d\w])(?: ?[\d,]+)?", " ", text)
    return [f"{number} {unit}" for number, unit in _FIGURE.findall(text)]


def known_figures(results: dict[str, Data]) -> set[str]:
    """Every figure that the result files support, in the ways the pages write them."""
    known: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)
        elif isinstance(value, str):
            known.update(figures_in(value))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            known.update(_spellings(float(value)))

    for held in results.values():
        walk(held)
    # The tables hold quotients of what the files hold.
    for lines in (README_LINES, MORE_LINES, OBJECTIVE_LINES):
        known.update(figures_in(figures_table(results, lines, "results")))
    return known


def _spellings(value: float) -> set[str]:
    if value != value or abs(value) == float("inf"):
        return set()
    texts = {units.seconds(value), units.size(value)} if value >= 0 else set()
    texts |= {f"{units.ratio(value)[:-1]} ×", f"{value:g} ×", f"{value:.0f} s", f"{value:.1f} s"}
    texts |= {f"{value / 2**30:.{digits}f} GiB" for digits in (0, 1, 2)}
    return texts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", help="cases to measure; all by default")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of timing per case")
    parser.add_argument("--render", action="store_true", help="rewrite the tables, measure nothing")
    parser.add_argument(
        "--screens", action="store_true", help="run the commands that the README shows, then --render"
    )
    options = parser.parse_args()
    known = {line.case for line in LINES}
    unknown = sorted(set(options.cases) - known)
    if unknown:
        print(
            f"readme: no line for {', '.join(unknown)}; there are {', '.join(sorted(known))}", file=sys.stderr
        )
        return 2
    try:
        if options.screens or not (options.render or options.cases):
            run_screens(ROOT)
        if not (options.render or options.screens):
            measure(set(options.cases) or known, options.budget)
        rewrite(ROOT)
    except BadInput as error:
        print(f"readme: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
