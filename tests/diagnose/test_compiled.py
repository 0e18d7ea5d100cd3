"""Compiled steps: findings on the lines where the waste survives, breaks and recompilations by name."""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
from pathlib import Path

import pytest
import torch
from diagnose.conftest import run_beside
from diagnose.test_steps import SCRIPTS, STEPS, Expected, expected, slow_dtypes

from leanstep.diagnose.compiled import after_compiler
from leanstep.diagnose.compiled_code import CompiledCode, Graph, Kernel, Saved, first_sentence
from leanstep.diagnose.find import finding_of
from leanstep.diagnose.findings import Hit
from leanstep.diagnose.outputs import screen
from leanstep.diagnose.rules import RULES, Limits
from leanstep.diagnose.watch import Watch
from leanstep.tape.lines import Line


def with_compiled_region(script: Path, backend: str):
    """The script with everything between its zero_grad() and its backward() in a compiled function.

    Lines keep their numbers: findings of both scripts can be compared.
    """
    tree = ast.parse(script.read_text(encoding="utf-8"), str(script))
    *outer, body = around_backward(tree)
    end = next(i for i, s in enumerate(body) if is_backward(s))
    first = next((i + 1 for i, s in enumerate(body[:end]) if ".zero_grad(" in ast.unparse(s)), 0)
    inside, last = body[first:end], body[end]
    assert isinstance(last, ast.Expr) and isinstance(last.value, ast.Call)
    assert isinstance(last.value.func, ast.Attribute)
    nested = [*outer, body]
    # The statement of each list that holds the next one.
    holders = [next(s for s in one if two in lists_of(s)) for one, two in itertools.pairwise(nested)]
    earlier = [one[: one.index(holder)] for one, holder in zip(outer, holders, strict=True)]
    before = set().union(*map(stored_in, [*earlier, body[:first]]))
    stored = sorted(stored_in(inside))
    # Local to the region, given to it and handed back: what it stores in a global ends a graph.
    given, names = ", ".join(n for n in stored if n in before), "".join(f"{n}, " for n in stored)
    made = ast.parse(
        f"def region({given}):\n    return None, ({names})\n"
        f"region = torch.compile(region, backend={backend!r})\nvalue, ({names}) = region({given})\nvalue"
    )
    for node in ast.walk(made):
        if hasattr(node, "lineno"):
            ast.copy_location(node, last)
            node.end_lineno, node.end_col_offset = last.lineno, last.col_offset + 1
    region, wrapped, call, value = made.body
    assert isinstance(region, ast.FunctionDef) and isinstance(value, ast.Expr)
    handed = region.body[0]
    assert isinstance(handed, ast.Return) and isinstance(handed.value, ast.Tuple)
    handed.value.elts[0] = last.value.func.value
    region.body = [*inside, handed]
    last.value.func.value = value.value
    body[first : end + 1] = [call, last]
    # Made where its names are known: once in the module, or in the function that trains, before its loop.
    place = outer[0].index(holders[0]) if outer else first
    nested[0][place:place] = [region, wrapped]
    return compile(tree, str(script), "exec")


def around_backward(tree: ast.Module) -> list[list[ast.stmt]]:
    """Nested lists of statements, the innermost with a backward() of its own; functions begin anew."""
    found = [tree.body]
    while not any(map(is_backward, found[-1])):
        inner, statements = next(
            (s, b)
            for s in found[-1]
            for b in lists_of(s)
            if any(calls_backward(n) for t in b for n in ast.walk(t))
        )
        found = [*([] if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) else found), statements]
    return found


def lists_of(statement: ast.stmt) -> list[list[ast.stmt]]:
    return [getattr(statement, name) for name in ("body", "orelse") if getattr(statement, name, None)]


def is_backward(statement: ast.stmt) -> bool:
    """A call on its own, of a loss: a gradient that is handed in belongs to a backward by hand."""
    return isinstance(statement, ast.Expr) and calls_backward(statement.value)


def calls_backward(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr == "backward" and not node.args


def stored_in(statements: list[ast.stmt]) -> set[str]:
    """Names that statements assign themselves, not functions and comprehensions inside them."""
    inner = (
        ast.FunctionDef,
        ast.ClassDef,
        ast.Lambda,
        ast.ListComp,
        ast.GeneratorExp,
        ast.DictComp,
        ast.SetComp,
    )
    found: set[str] = set()
    todo: list[ast.AST] = list(statements)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if not isinstance(node, inner):
            todo += ast.iter_child_nodes(node)
    return found


def watched_region(script: Path, backend: str) -> Watch:
    torch._dynamo.reset()
    watch = Watch(timed_warmup=True)
    code = with_compiled_region(script, backend)
    with run_beside(script), contextlib.redirect_stdout(io.StringIO()), watch:
        exec(code, {"__name__": "__main__", "__file__": str(script)})
    assert watch.recorder.errors == []
    return watch


def found_in(watch: Watch) -> Expected:
    return {(f.rule, f.line.file, f.line.number, f.count) for f in watch.findings()}


# One script per kind of waste; the others of the folder behave as these do (docs/diagnose.md).
AS_IT_STANDS = [
    "clean_lm", "dead_rows_folder", "dead_rows_sft", "duplicate_cast", "sync_in_loop", "zero_fill_bank",
    "storm_pairs", "unused_grad", "unbatched_adamw", "clean_accumulation", "sync_metrics",
]  # fmt: skip


@pytest.mark.parametrize("name", AS_IT_STANDS)
def test_a_backend_that_runs_calls_as_they_stand_keeps_every_finding(name: str):
    script = next(s for s in SCRIPTS if name in (s.stem, s.parent.name))
    watch = watched_region(script, "eager")
    assert found_in(watch) == expected(script, slow_dtypes(watch))
    assert watch.compiled.graphs and watch.compiled.removed == []
    assert watch.not_seen == []
    assert {graph.backend for graph in watch.compiled.graphs} == {"eager"}


def test_a_backend_below_autograd_takes_the_second_cast_for_the_first():
    """AOTAutograd finds common subexpressions: the one practice script that aot_eager repairs."""
    watch = watched_region(STEPS / "duplicate_cast.py", "aot_eager")
    assert found_in(watch) == set()
    ((removed, why),) = watch.compiled.removed
    assert (removed.rule, removed.line.number, why) == (
        "duplicate-cast", 16, "nothing remains (ATen calls)",
    )  # fmt: skip


BREAKS = """\
import torch

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@torch.compile(backend="eager")
def total(h):
    h = h * 2
    if h.sum() > 0:
        h = h + 1
    print("rows", h.shape[0])
    return h.mean()


@torch.compile(backend="eager", dynamic=False)
def widths(h):
    return h.square().mean()


for step in range(6):
    x = torch.randn(4 + step % 2, 8)
    optimizer.zero_grad()
    loss = total(model(x[:4])) + widths(model(x))
    loss.backward()
    optimizer.step()
"""


def test_breaks_and_recompilations_have_a_line_a_reason_and_a_price(write_script, watched):
    torch._dynamo.reset()
    script = write_script(BREAKS)
    watch = watched(script)
    watch.findings()
    found = {(one.kind, one.line): one for one in watch.compiled.interruptions}
    assert all(one.file == str(script) for one in found.values())
    branch, printed = found["graph break", 11], found["graph break", 13]
    assert "branch on a tensor" in branch.reason
    assert "print" in printed.reason.lower()
    assert branch.seconds > 0
    text = screen.screen(watch, watch.findings(), str(script))
    assert "graph break" in text and "train.py:11" in text
    # The eager recording counts the branch's read as well: the two say the same of one line.
    assert ("host-sync", str(script), 11, 1) in found_in(watch)


def test_a_recompilation_names_the_guard_that_failed(write_script, watched):
    torch._dynamo.reset()
    text = BREAKS.replace("range(6)", "range(9)").replace("total(model(x[:4])) + ", "")
    script = write_script(text)
    watch = Watch(steps=2, warmup=3, timed_warmup=True)
    watched(script, watch)
    watch.findings()
    (one,) = [one for one in watch.compiled.interruptions if one.kind == "recompilation"]
    assert (one.file, one.line) == (str(script), 17) and "leanstep" not in one.reason
    assert "size" in one.reason and one.seconds > 0


def test_the_first_lines_of_an_explanation_are_kept():
    reason = "Data-dependent branching\n  Explanation: Detected a branch on a tensor.\n  Hint: none"
    assert first_sentence(reason) == "Data-dependent branching: Detected a branch on a tensor."
    assert first_sentence("  ") == "no reason given"


HERE, OTHER = ("/step.py", 7), ("/step.py", 8)


def kernels(name: str, count: int, backward: bool = False, num_bytes: int = 1 << 20) -> list[Kernel]:
    return [Kernel(frozenset({(name, HERE), ("mul", OTHER)}), backward, num_bytes) for _ in range(count)]


@pytest.mark.parametrize(
    ("rule", "graph", "survives"),
    [
        ("op-storm", kernels("add", 2), False),
        ("op-storm", kernels("add", 40), True),
        ("zero-fill", kernels("select_scatter", 1, backward=True), False),
        ("zero-fill", kernels("select_scatter", 12), False),
        ("zero-fill", kernels("select_scatter", 12, backward=True), True),
        ("zero-fill", kernels("full", 12, backward=True, num_bytes=0), False),
        ("duplicate-cast", [], False),
        ("duplicate-cast", kernels("convert_element_type", 1), True),
        ("gelu-by-hand", kernels("tanh", 1), False),
        ("alloc-churn", kernels("add", 20, num_bytes=100), False),
        ("alloc-churn", kernels("add", 20), True),
        ("dead-rows", [], True),
        ("host-sync", [], True),
    ],
)
def test_what_the_compiler_left_decides(rule: str, graph: list[Kernel], survives: bool):
    code = compiled(graph)
    kept, report = after_compiler([finding(rule)], code, Limits())
    assert (len(kept), len(report.removed)) == ((1, 0) if survives else (0, 1))


def test_runs_of_a_graph_count():
    """A compiled layer that runs twenty times a step launches its kernels twenty times."""
    code = compiled(kernels("add", 2))
    code._graphs["f", HERE].runs, code._steps = 40, 2
    assert after_compiler([finding("op-storm")], code, Limits())[1].removed == []


@pytest.mark.parametrize(
    ("place", "shape", "num_bytes", "survives"),
    [
        (HERE, (1024, 8192), 64 << 20, True),
        (HERE, (1024, 8192), 1 << 20, False),
        (OTHER, (1024, 8192), 64 << 20, True),
        (OTHER, (8192, 1024), 64 << 20, False),
    ],
)
def test_what_is_kept_for_the_backward_decides(place, shape, num_bytes: int, survives: bool):
    """On the line itself, or as wide on another: the product in place of its softmax."""
    code = compiled(kernels("exp", 1))
    code._graphs["f", HERE].saved.append(Saved(place, shape, num_bytes))
    wide = finding("full-vocab")
    wide.evidence.update(bytes=64 << 20, shapes={"[1024, 8192] float32": 1})
    kept, _ = after_compiler([wide], code, Limits())
    assert bool(kept) is survives


def test_lines_outside_compiled_regions_are_left_alone():
    eager = finding("op-storm", compiled=False)
    assert after_compiler([eager], compiled([]), Limits())[0] == [eager]


def compiled(found: list[Kernel]) -> CompiledCode:
    code = CompiledCode()
    other = Kernel(frozenset({("mul", OTHER)}), False, 4)
    code._graphs["f", HERE] = Graph("f", HERE, "inductor", 3, 0.1, "kernels", [*found, other])
    return code


def finding(rule: str, compiled: bool = True):
    evidence = {
        "kinds": {"item": 1}, "forward_ops": 1, "backward_ops": 1, "repeats": {"add": 1}, "mean_bytes": 1.0,
        "rows": 2, "inner": 1, "width": 1, "ops": {"add": 1}, "bytes": 1, "casts": {"a": 1},
        "shapes": {"a": 1}, "all_saved_bytes": 1, "calls": 1,
    }  # fmt: skip
    if rule == "unbatched-optimizer":
        evidence["ops"] = 1
    hit = Hit(Line(*HERE), 120, evidence=evidence, compiled=compiled)
    return finding_of(RULES[rule], [hit])
