"""The figures of README and docs: measured here, kept in `results/`, written between markers, never by hand.

    python tools/readme.py                 # measure every line, write results/ and the tables
    python tools/readme.py polar sft-step  # only these cases
    python tools/readme.py --render        # the tables again from results/, nothing is measured

Each case gives one result file with the command that repeats it and the roofline of its rows, measured in the
same run. A test renders the tables again from the committed files.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))

from roofline import roofline_s

from leanstep import units
from leanstep.case import Case, get_case, limit_of
from leanstep.files import BadInput, write_text
from leanstep.measure.side_by_side import run_bench

ROOT = Path(__file__).parents[1]


class Line(NamedTuple):
    """One line of a table: a case, what the reader calls it, and the row that is leanstep's.

    `also`: a row other than the reference that the factor is given against as well, and its name in words.
    """

    case: str
    size: str
    what: str
    impl: str = "leanstep"
    also: tuple[str, str] | None = None


# The README's table: at most eight lines.
README_LINES = (
    Line("logprob-linear", "cpu", "log-probs and entropy of a quarter of the rows, LM head included"),
    Line("logprob-logits", "cpu", "log-probs and entropy from existing logits"),
    Line(
        "lens-loss",
        "seed",
        "controller objective, 39 pairs of 1,831 entries; the whole call is 39–59 times as fast as the "
        "seed's own commit ([megacontext.md](docs/megacontext.md)); plain code of this row: per-entry "
        "loops with `.item()` of an older commit",
        also=("eager", "eager autograd"),
    ),
    Line(
        "muon-step",
        "seed",
        "NorMuon step in bfloat16, as `auto` picks on this CPU, 12 of 768 × 3072 and 48 of 768 × 768",
        "leanstep-bf16",
    ),
    Line("transpose-add", "cpu", "add a transposed 768 × 50,304 gradient"),
    Line("bank-access", "cpu", "weights of 11 layers out of a bank, and back"),
    Line("grpo-step", "cpu", "GRPO step in TRL, Qwen's vocabulary, 25 % completion tokens"),
    Line("sft-step", "cpu", "supervised step in transformers, Qwen's vocabulary"),
)
# The table of docs/measuring.md: all others.
MORE_LINES = (
    Line("logprob-linear", "cpu", "the first line of the README, logits recomputed", "leanstep-recompute"),
    Line("policy-loss", "cpu", "the whole policy objective on those rows"),
    Line("lens-step", "cpu", "training step with a controller"),
    Line("pair-loss", "cpu", "Bradley-Terry over 39 ragged groups"),
    Line("polar", "cpu", "Polar Express in float32, 768 × 3072"),
    Line("polar", "cpu", "the same in bfloat16, as `auto` picks on this CPU", "leanstep-bf16"),
    Line("polar", "square", "Polar Express in float32, 768 × 768"),
    Line("muon-step", "seed", "NorMuon step of the README in float32"),
    Line("transpose-copy", "cpu", "copy a 768 × 50,304 matrix transposed"),
    Line("gpt-step", "tiny", "training step of the small GPT"),
)
# The table of docs/objectives.md.
OBJECTIVE_LINES = (
    Line("distill", "cpu", "JSD to a wider teacher's head, V = 32,000, a quarter of 2,048 rows"),
    Line("distill", "all", "the same, all of 1,024 rows"),
    Line("dpo", "cpu", "DPO with a reference head, a quarter of 2,048 positions are completions"),
    Line("masked-head", "cpu", "replayed sampling masks, V = 151,936, mean 8 ids a row"),
)
LINES = (*README_LINES, *MORE_LINES, *OBJECTIVE_LINES)
PAGES = ("README.md", "docs/measuring.md", "docs/objectives.md")
# The script whose diagnosis the README shows.
SCREEN_SCRIPT = "examples/rl/before.py"
_BLOCK = re.compile(r"(<!-- ((?:\w+-)?figures|screen):begin -->\n)(.*?)(<!-- \2:end -->)", re.DOTALL)

Data = dict[str, Any]


def measure(cases: Collection[str], budget_s: float) -> None:
    """Measure the lines of these cases, write `results/*.json`, rewrite the tables."""
    (ROOT / "results").mkdir(exist_ok=True)
    for name, size in dict.fromkeys((line.case, line.size) for line in LINES if line.case in cases):
        print(name, size, flush=True)
        case = get_case(name)
        result = run_bench(case, size, budget_s=budget_s)
        if result.failed:
            raise BadInput(f"{name}: parity failed for {result.failed[0].tensor}; nothing to write")
        shown = result.to_json()
        impls = [line.impl for line in LINES if (line.case, line.size) == (name, size)]
        command = f"leanstep bench {name} --size {size}"
        rooflines = {impl: found for impl in impls if (found := roofline(case, size, impl, shown["rows"]))}
        write_result(ROOT, f"bench-{name}-{size}", command, shown, roofline_s=rooflines)
    command = f"leanstep diagnose {SCREEN_SCRIPT}"
    write_result(ROOT, "diagnose-rl-before", command, diagnose_screen(ROOT))


def roofline(case: Case, size: str, impl: str, rows: Sequence[Data]) -> float | None:
    """The least seconds of a row: what its limit does, at the fastest this machine can do it."""
    named = {row["impl"]: row for row in rows}
    limit = limit_of(named, impl)
    # A row this machine leaves out (emulated bfloat16, say) needs no bound, which would take minutes to find.
    if limit is None or not named[impl]["median_s"]:
        return None
    workload = case.workload(case.params(size), case.bench_dtype)
    # A row in half precision may use the faster of both: the limit counts FLOPs in the bench's own dtype.
    dtypes = (torch.bfloat16, torch.float32) if impl.endswith("bf16") else ()
    bound = roofline_s(case.implementation(limit["impl"]), workload, faster_dtypes=dtypes)
    # The limit row itself was measured, too: its fastest fifth may be below what was found apart from it.
    return min(bound, limit["p20_s"])


def write_result(root: Path, name: str, command: str, result: Data, **more: Any) -> None:
    """One result file: the figures and the command that repeats them."""
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    held = {"command": command, "date": when, **more, "result": result}
    text = json.dumps(held, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(root / "results" / f"{name}.json", text + "\n", "results")


def diagnose_screen(root: Path) -> Data:
    """What `leanstep diagnose` prints for the example, without the script's own lines."""
    command = [sys.executable, "-m", "leanstep", "diagnose", SCREEN_SCRIPT]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    if ran.returncode:
        raise BadInput(f"{' '.join(command[2:])} failed: {ran.stderr.strip()[-200:]}")
    screen = ran.stdout[ran.stdout.index("leanstep diagnose ") :]
    return {"screen": screen.rstrip() + "\n"}


def rewrite(root: Path) -> None:
    """Write the marked blocks of the pages again from the result files."""
    results = load_results(root)
    for name in PAGES:
        page = root / name
        write_text(page, rendered(page.read_text(encoding="utf-8"), results), name)


def load_results(root: Path) -> dict[str, Data]:
    return {
        p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted((root / "results").glob("*.json"))
    }


def rendered(text: str, results: dict[str, Data]) -> str:
    """The text with every marked block rendered from the results; a block without results stays empty."""
    blocks = {
        "figures": figures_table(results, README_LINES, "results"),
        "more-figures": figures_table(results, MORE_LINES, "../results"),
        "objective-figures": figures_table(results, OBJECTIVE_LINES, "../results"),
        "screen": screen_block(results),
    }
    return _BLOCK.sub(lambda m: m.group(1) + blocks[m.group(2)] + m.group(4), text)


def figures_table(results: dict[str, Data], lines: Sequence[Line], folder: str) -> str:
    """A table of figures; under it what the named peers do differently, and the machine."""
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
        shown.append("| " + " | ".join(cells) + " |")
    if not shown:
        return ""
    head = "| | plain code | leanstep | faster | extra memory | best peer | roofline |"
    machines = "; ".join(
        f"{device}, {threads} threads, torch {torch}" for device, threads, torch in sorted(environments)
    )
    how = (
        "Forward and backward, medians of one run per line; written by `python tools/readme.py`. Best peer: "
        "the fastest that is faster than the plain code. Roofline: the products (or bytes) that cannot be "
        "avoided, at the fastest this machine multiplied (or copied) in the same run."
    )
    footnotes = [f"<sup>{number}</sup> {note}." for number, note in enumerate(notes, 1)]
    below = [" ".join(["What the named peers do:", *footnotes]), ""] if notes else []
    return "\n".join([head, "|---|---|---|---|---|---|---|", *shown, "", *below, f"{how} {machines}.", ""])


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


def screen_block(results: dict[str, Data]) -> str:
    held = results.get("diagnose-rl-before")
    return f"```\n{held['result']['screen'].rstrip()}\n```\n" if held else ""


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
    options = parser.parse_args()
    known = {line.case for line in LINES}
    unknown = sorted(set(options.cases) - known)
    if unknown:
        print(
            f"readme: no line for {', '.join(unknown)}; there are {', '.join(sorted(known))}", file=sys.stderr
        )
        return 2
    try:
        if not options.render:
            measure(set(options.cases) or known, options.budget)
        rewrite(ROOT)
    except BadInput as error:
        print(f"readme: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
