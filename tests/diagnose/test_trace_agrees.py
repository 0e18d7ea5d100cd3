"""On the practice scripts a trace made on the CPU names the functions that the recorder names lines of."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest
from diagnose.test_steps import STEPS, expected
from diagnose.trace_maker import profiled

from leanstep.diagnose.traces.trace_report import TraceRun

# Rules that a trace can answer; the others need values, storages or which leaf an optimizer holds.
KNOWN = ("host-sync", "op-storm", "unbatched-optimizer", "transposed-copy", "full-vocab", "retained-chunks")
# (script, rule) -> why a trace cannot know it.
CANNOT = {
    ("clean_host_data", "host-sync"): "whether a tensor lives on the host: on a CPU all do",
    ("storm_after_layers", "op-storm"): "the loop is in the function that runs the layers",
}
# `unbatched_by_hand` has no optimizer: nothing marks where a step ends.
PLANTED = ("sync_", "storm_", "unbatched_a", "unbatched_m", "transposed_", "full_vocab_", "retained_")
CLEAN = ("clean_checkpoint", "clean_chunk_backward", "clean_average_then_layers", "clean_host_data")
SCRIPTS = sorted(path for path in STEPS.glob("*.py") if path.stem.startswith((*PLANTED, *CLEAN)))


# Rules that count ops: other ops of the function count too.
AT_LEAST = ("op-storm", "unbatched-optimizer")


def first_line(node: ast.FunctionDef | ast.ListComp) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


def by_function(script: Path) -> Counter[tuple[str, int]]:
    """(rule, first line of the function around a mark; 0 for the module) -> count."""
    functions = [
        node
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.ListComp))
    ]
    counts: Counter[tuple[str, int]] = Counter()
    for rule, _, number, count in expected(script, slow=set()):
        around = [first_line(f) for f in functions if first_line(f) <= number <= (f.end_lineno or 0)]
        counts[rule, max(around, default=0)] += count
    return counts


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_trace_and_recorder_agree(script: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(STEPS)
    run = TraceRun(str(profiled(script, tmp_path / "trace.json")))
    rules = [rule for rule in KNOWN if (script.stem, rule) not in CANNOT]
    found = {(f.rule, f.line.number): f.count for f in run.findings() if f.rule in rules}
    planted = {mark: count for mark, count in by_function(script).items() if mark[0] in rules}
    assert found.keys() == planted.keys()
    for mark, count in planted.items():
        assert found[mark] >= count if mark[0] in AT_LEAST else found[mark] == count, mark
    assert len(run.steps) == 3
