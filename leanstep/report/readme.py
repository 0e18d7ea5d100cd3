"""The README's figures: measured here, kept in `results/`, written between markers, never by hand.

`leanstep bench --readme` measures every case of `LINES`, writes one result file each with the command that
repeats it, and rewrites the marked blocks. A test renders the blocks again from the committed files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from leanstep import units
from leanstep.case import limit_of
from leanstep.files import BadInput, write_text


class Line(NamedTuple):
    """One line of the table: a case, what the reader calls it, and the row that is leanstep's."""

    case: str
    size: str
    what: str
    impl: str = "leanstep"


# The order of the table.
LINES = (
    Line("logprob-linear", "cpu", "log-probs and entropy of a quarter of the rows, LM head included"),
    Line("logprob-linear", "cpu", "the same, logits recomputed in the backward", "leanstep-recompute"),
    Line("policy-loss", "cpu", "the whole policy objective on those rows"),
    Line("logprob-logits", "cpu", "log-probs and entropy from existing logits"),
    Line("lens-loss", "seed", "controller objective, 39 pairs of 1,831 entries"),
    Line("lens-step", "cpu", "training step with that controller"),
    Line("pair-loss", "cpu", "Bradley-Terry over 39 ragged groups"),
    Line("polar", "cpu", "Polar Express in float32, 768 × 3072"),
    Line("polar", "cpu", "the same in bfloat16, as `auto` picks on this CPU", "leanstep-bf16"),
    Line("polar", "square", "Polar Express in float32, 768 × 768"),
    Line("muon-step", "seed", "NorMuon step in float32, 12 of 768 × 3072 and 48 of 768 × 768"),
    Line("muon-step", "seed", "the same in bfloat16, as `auto` picks on this CPU", "leanstep-bf16"),
    Line("transpose-add", "cpu", "add a transposed 768 × 50,304 gradient"),
    Line("transpose-copy", "cpu", "copy it transposed"),
    Line("bank-access", "cpu", "weights of 11 layers out of a bank, and back"),
    Line("gpt-step", "tiny", "training step of the small GPT"),
    Line("grpo-step", "cpu", "GRPO step in TRL, Qwen's vocabulary, 25 % completion tokens"),
    Line("sft-step", "cpu", "supervised step in transformers, Qwen's vocabulary"),
)
# The script whose diagnosis the README shows.
SCREEN_SCRIPT = "examples/rl/before.py"
_BLOCK = re.compile(r"(<!-- (figures|screen):begin -->\n)(.*?)(<!-- \2:end -->)", re.DOTALL)

Data = dict[str, Any]


def repository() -> Path:
    """The checkout this package runs from; an installed copy has no README to write."""
    root = Path(__file__).parents[2]
    if not (root / "README.md").is_file() or not (root / "pyproject.toml").is_file():
        raise BadInput("--readme: this leanstep was not run from a checkout; there is no README.md to write")
    return root


def update_readme(console: Console, *, cases: Collection[str], budget_s: float = 20.0) -> None:
    """Measure the lines of these cases, write `results/*.json`, rewrite the blocks of README.md."""
    from leanstep.case import get_case
    from leanstep.measure.side_by_side import run_bench

    root = repository()
    (root / "results").mkdir(exist_ok=True)
    for name, size in dict.fromkeys((line.case, line.size) for line in LINES if line.case in cases):
        console.print(f"{name} {size}", markup=False)
        result = run_bench(get_case(name), size, budget_s=budget_s)
        if result.failed:
            raise BadInput(f"--readme: parity failed for {name} {result.failed[0].tensor}; nothing to write")
        command = f"leanstep bench {name} --size {size}"
        write_result(root, f"bench-{name}-{size}", command, result.to_json())
    write_result(
        root, "diagnose-rl-before", f"leanstep diagnose {SCREEN_SCRIPT} --stop", diagnose_screen(root)
    )
    rewrite(root)


def write_result(root: Path, name: str, command: str, result: Data) -> None:
    """One result file: the figures and the command that repeats them."""
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    text = json.dumps(
        {"command": command, "date": when, "result": result}, indent=1, ensure_ascii=False, allow_nan=False
    )
    write_text(root / "results" / f"{name}.json", text + "\n", "--readme")


def diagnose_screen(root: Path) -> Data:
    """What `leanstep diagnose` prints for the example, as it prints it to a file."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "leanstep", "diagnose", SCREEN_SCRIPT, "--stop"]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    if ran.returncode:
        raise BadInput(f"--readme: {' '.join(command[2:])} failed: {ran.stderr.strip()[-200:]}")
    return {"screen": ran.stdout.rstrip() + "\n"}


def rewrite(root: Path) -> None:
    """Write the blocks of README.md again from the result files."""
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    write_text(readme, rendered(text, load_results(root)), "--readme")


def load_results(root: Path) -> dict[str, Data]:
    return {
        p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted((root / "results").glob("*.json"))
    }


def rendered(text: str, results: dict[str, Data]) -> str:
    """The text with every marked block rendered from the results; a block without results stays empty."""
    blocks = {"figures": figures_table(results), "screen": screen_block(results)}
    return _BLOCK.sub(lambda m: m.group(1) + blocks[m.group(2)] + m.group(4), text)


def figures_table(results: dict[str, Data]) -> str:
    """The table of the README; under it what the named peers do differently, and the machine."""
    lines, environments = [], set()
    notes: list[str] = []
    for name, size, what, impl in LINES:
        held = results.get(f"bench-{name}-{size}")
        if held is None:
            continue
        result = held["result"]
        environments.add((result["device"], result["threads"], result["torch"]))
        rows = result["rows"]
        plain = next(r for r in rows if r["kind"] == "reference")
        fast = next((r for r in rows if r["impl"] == impl), None)
        if fast is None or not plain["available"] or not fast["available"]:
            continue
        link = f"[`{name}`](results/bench-{name}-{size}.json)"
        times = [units.seconds(plain["median_s"]), units.seconds(fast["median_s"])]
        faster = f"**{units.ratio(fast['time_ratio'])}**"
        extra = f"{units.size(plain['extra_bytes'])} → {units.size(fast['extra_bytes'])}"
        limit, peer = _limit(rows, impl), _best_peer(rows, notes)
        lines.append("| " + " | ".join([f"{what} ({link})", *times, faster, extra, peer, limit]) + " |")
    if not lines:
        return ""
    head = "| | plain code | leanstep | faster | extra memory | best peer | limit |"
    machines = "; ".join(
        f"{device}, {threads} threads, torch {torch}" for device, threads, torch in sorted(environments)
    )
    how = "Forward and backward, medians of one run per line; written by `leanstep bench --readme`."
    caption = f"{how} {machines}."
    footnotes = [f"<sup>{number}</sup> {note}." for number, note in enumerate(notes, 1)]
    below = [" ".join(["What the named peers do:", *footnotes]), ""] if notes else []
    return "\n".join([head, "|---|---|---|---|---|---|---|", *lines, "", *below, caption, ""])


def _best_peer(rows: list[Data], notes: list[str]) -> str:
    """The fastest peer; its note (what it leaves out, in which precision it works) goes to `notes`."""
    peers = [r for r in rows if r["kind"] == "peer" and r["available"] and r["median_s"]]
    best = min(peers, key=lambda r: r["median_s"], default=None)
    if best is None:
        return "-"
    # The time of a first call is about this run, not about what the peer computes.
    parts = [part for part in best["note"].split("; ") if part and not part.startswith("first call ")]
    mark = ""
    if parts:
        note = f"{best['impl']}: {'; '.join(parts)}"
        if note not in notes:
            notes.append(note)
        mark = f"<sup>{notes.index(note) + 1}</sup>"
    return f"{units.seconds(best['median_s'])} ({best['impl']}{mark})"


def _limit(rows: list[Data], impl: str) -> str:
    limit = limit_of({r["impl"]: r for r in rows}, impl)
    return units.seconds(limit["median_s"]) if limit else "-"


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
    return known


def _spellings(value: float) -> set[str]:
    if value != value or abs(value) == float("inf"):
        return set()
    texts = {units.seconds(value), units.size(value)} if value >= 0 else set()
    texts |= {f"{units.ratio(value)[:-1]} ×", f"{value:g} ×", f"{value:.0f} s", f"{value:.1f} s"}
    texts |= {f"{value / 2**30:.{digits}f} GiB" for digits in (0, 1, 2)}
    return texts
