"""The figures of README and docs: kept in `results/`, written between markers, never by hand.

    python dev/readme.py sft_step.json ...   # take results (--json) into results/, then --render
    python dev/readme.py --screens [NAME]    # run commands whose output the pages show, then --render
    python dev/readme.py --render            # the tables again from results/, nothing is measured

Measured rows come from `python -m benchmarks.NAME --json FILE`, predicted ones from `predicted_rows.py`. A
test renders the tables again from the committed files.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "dev")]

from leanstep import units  # noqa: E402
from leanstep.commands.terminal import coloured  # noqa: E402
from leanstep.escape import clip  # noqa: E402
from leanstep.files import BadInput, write_text  # noqa: E402


class Line(NamedTuple):
    """One row of the README's table: two implementations, measured on a CPU and predicted for GPUs.

    what: the workload in words; the sizes are those of the benchmarks `cpu` and `gpu`.
    measured: a result file. predicted: keys in `predicted-rows.json`; "{}" is the row's name.
    before, after: names of the rows that are compared.
    """

    what: str
    measured: str
    predicted: str
    before: str
    after: str = "leanstep"


README_LINES = (
    Line("SFT in transformers, 25 % scored", "bench-sft-step-cpu", "sft_step {}", "transformers"),
    Line("SFT, 100 % scored", "bench-sft-step-all-cpu", "sft_step {} response_frac=1.0", "transformers"),
    Line("GRPO in TRL, 25 % scored", "bench-grpo-step-cpu", "grpo_step {}", "trl"),
    Line("head alone, 25 % scored", "bench-logprob-linear-cpu", "logprob_linear {}", "plain"),
    Line(
        "head, against cut-cross-entropy",
        "bench-logprob-linear-cpu", "logprob_linear {}", "cut-cross-entropy",
    ),
    Line("NorMuon, plain: matrix by matrix", "bench-muon-step-cpu", "muon_step {}", "plain"),
)  # fmt: skip
MEASURED = tuple(dict.fromkeys(line.measured for line in README_LINES))
PREDICTED = "predicted-rows"
PAGES = ("README.md", "docs/measuring.md", "docs/rehearse.md", "docs/tutorial.md")


class Screen(NamedTuple):
    """A command whose output a page shows, from the line that starts with `first`, at most `most` lines."""

    command: str
    first: str
    most: int = 40


_SFT = "examples/sft"
_REHEARSE = "leanstep rehearse {} --device h100 -- --batch-size 64"
SCREENS = {
    "diagnose": Screen(f"leanstep diagnose {_SFT}/before.py", "leanstep diagnose "),
    "fix": Screen(f"leanstep fix {_SFT}/before.py --select dead-rows,full-vocab", "full-vocab"),
    "prove": Screen(f"leanstep prove {_SFT}/before.py {_SFT}/after.py", "before.py  →"),
    "rehearse-before": Screen(_REHEARSE.format(f"{_SFT}/before.py"), "predicted on ", 6),
    "rehearse-after": Screen(_REHEARSE.format(f"{_SFT}/after.py"), "predicted on ", 6),
    "sweep": Screen(
        f"leanstep rehearse {_SFT}/before.py --device 4090 --sweep batch-size=fit", "predicted on "
    ),
}
PICTURE, PICTURED = "docs/diagnose.svg", "diagnose"
_BLOCK = re.compile(
    r"(<!-- (figures|rows|predictions|screen [\w-]+(?: \d+)?):begin -->\n)(.*?)(<!-- \2:end -->)", re.DOTALL
)

Data = dict[str, Any]


def take(root: Path, file: Path) -> None:
    """Write the result of one benchmark (`--json`) to `results/`, with the command that repeats it."""
    result = json.loads(file.read_text(encoding="utf-8"))
    if slow := [row["impl"] for row in result["rows"] if (row["samples"] or 0) < 5]:
        raise BadInput(f"{file}: fewer than five samples of {', '.join(slow)}")
    size, *changes = result["size"].split(", ")
    module = result["case"].replace("-", "_")
    names = [row["impl"] for row in result["rows"]]
    policy = f"OMP_WAIT_POLICY={result['omp_wait_policy']} " if "omp_wait_policy" in result else ""
    words = [f"{policy}python -m benchmarks.{module} --impl {','.join(names)}"]
    words += [f"--budget {result['budget_s']:g}"]
    words += [f"--set {change}" for change in changes]
    name = file.stem.replace("_", "-")
    write_result(root, f"bench-{name}-{size}", " ".join(words), result)


def write_result(root: Path, name: str, command: str, result: Data) -> None:
    """Write one result file: the figures and the command that repeats them."""
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    text = json.dumps({"command": command, "date": when, "result": result}, indent=1, ensure_ascii=False)
    write_text(root / "results" / f"{name}.json", text + "\n", "results")


def run_screens(root: Path, names: Sequence[str]) -> None:
    """Run commands that the pages show and write what they print."""
    held = load_results(root).get("screens", {})
    for name in names:
        screen = SCREENS[name]
        held[name] = {"command": screen.command, "screen": printed_by(screen.command, screen.first)}
        text = json.dumps(held, indent=1, ensure_ascii=False) + "\n"
        write_text(root / "results" / "screens.json", text, "results")


def printed_by(command: str, first: str) -> str:
    """Return what the command prints from the line that starts with `first` on."""
    words = [sys.executable, "-m", *command.split()]
    wide = {**os.environ, "COLUMNS": "110"}
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900, env=wide)
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
    write_picture(root, results["screens"][PICTURED]["screen"])


def load_results(root: Path) -> dict[str, Data]:
    return {
        p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted((root / "results").glob("*.json"))
    }


def rendered(text: str, results: dict[str, Data]) -> str:
    """Return the text with every marked block rendered from the results."""
    blocks = {
        "figures": lambda: readme_table(results),
        "rows": lambda: rows_table(results),
        "predictions": lambda: predictions_table(results),
    }

    def block(match: re.Match[str]) -> str:
        kind, _, name = match.group(2).partition(" ")
        shown = screen_block(results, *name.split()) if kind == "screen" else blocks[kind]()
        return match.group(1) + shown + match.group(4)

    return _BLOCK.sub(block, text)


def readme_table(results: dict[str, Data]) -> str:
    """Return the README's table: memory first, then time, measured and predicted."""
    rows = ["| one step of | CPU, measured | H100, predicted |", "|---|---|---|"]
    for line in README_LINES:
        measured = "not measured"
        if line.measured in results:
            before, after = measured_rows(results, line)
            peaks, times = ((before[key], after[key]) for key in ("peak_bytes", "median_s"))
            measured = _cell(peaks, times)
        old, new = predicted_rows(results, line, "h100")
        predicted = _cell((old["peak_bytes"], new["peak_bytes"]), (old["step_s"], new["step_s"]))
        rows.append(f"| {line.what} | {measured} | {predicted} |")
    return "\n".join(rows) + "\n"


def _cell(peaks: tuple[int, int], times: tuple[float, float]) -> str:
    memory = " → ".join(units.size(peak) for peak in peaks)
    time = " → ".join(units.seconds(t) for t in times)
    return f"{memory}; {time} (**{units.ratio(times[0] / times[1])}**)"


def measured_rows(results: dict[str, Data], line: Line) -> tuple[Data, Data]:
    rows = {row["impl"]: row for row in results[line.measured]["result"]["rows"]}
    return rows[line.before], rows[line.after]


def predicted_rows(results: dict[str, Data], line: Line, device: str) -> tuple[Data, Data]:
    rows = results[PREDICTED]["rows"]
    before, after = (f"{line.predicted.format(name)} on {device}" for name in (line.before, line.after))
    return rows[before], rows[after]


def rows_table(results: dict[str, Data]) -> str:
    """Return every measured row of the files behind the README's table."""
    lines = [
        "| benchmark | row | time: median (p20 to p80) | peak | extra | error | note |",
        "|---" * 7 + "|",
    ]
    names = [name for name in MEASURED if name in results]
    for name in names:
        for row in results[name]["result"]["rows"]:
            median, low, high = (units.seconds(row[key]) for key in ("median_s", "p20_s", "p80_s"))
            time = f"{median} ({low} to {high})"
            sizes = f"{units.size(row['peak_bytes'])} | {units.size(row['extra_bytes'])}"
            lines.append(
                f"| [`{name}`](../results/{name}.json) | {row['impl']} | {time} | {sizes} | "
                f"{units.small(row['error'])} | {row['note']} |"
            )
    places = {_place(results[name]["result"]) for name in names}
    return "\n".join([*lines, "", f"Measured on {'; '.join(sorted(places))}.", ""])


def _place(result: Data) -> str:
    return (
        f"{result['device']}, {result['threads']} threads, torch {result['torch']}, "
        f"leanstep {result['leanstep']}"
    )


def predictions_table(results: dict[str, Data]) -> str:
    """Return every predicted row, with its interval."""
    lines = ["| row | fits | peak | time per step (interval) | bound by |", "|---" * 5 + "|"]
    for name, row in results[PREDICTED]["rows"].items():
        low, high = (units.seconds(t) for t in row["interval_s"])
        time = f"{units.seconds(row['step_s'])} ({low} to {high})"
        fits = "yes" if row["fits"] else "**no**"
        lines.append(f"| {name} | {fits} | {units.size(row['peak_bytes'])} | {time} | {row['bound_by']} |")
    return "\n".join([*lines, ""])


def screen_block(results: dict[str, Data], name: str, lines_shown: str = "") -> str:
    """Return the command and the first lines of what it printed, clipped to the page."""
    held, most = results["screens"][name], int(lines_shown or SCREENS[name].most)
    lines = [clip(line, 110) for line in held["screen"].splitlines()]
    more = ["  …"] if len(lines) > most else []
    return "\n".join(["```", f"$ {held['command']}", *lines[:most], *more, "```", ""])


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
    if PREDICTED in results:
        known.update(figures_in(readme_table(results)))
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
    parser.add_argument("files", nargs="*", type=Path, help="results of benchmarks")
    parser.add_argument("--render", action="store_true", help="rewrite the tables only")
    parser.add_argument("--screens", nargs="*", choices=SCREENS, help="run commands that the pages show: all")
    options = parser.parse_args()
    try:
        for file in options.files:
            take(ROOT, file)
        if options.screens is not None:
            run_screens(ROOT, options.screens or list(SCREENS))
        rewrite(ROOT)
    except BadInput as error:
        print(f"readme: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
