"""Compiled steps: findings on the lines where the waste survives, breaks and recompilations by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diagnose.test_steps import Expected, expected

from leanstep.cpu import find_compiler
from leanstep.diagnose.compiled import after_compiler
from leanstep.diagnose.compiled_code import CompiledCode, Graph, Kernel, Saved, first_sentence
from leanstep.diagnose.find import finding_of
from leanstep.diagnose.findings import Hit
from leanstep.diagnose.outputs import screen
from leanstep.diagnose.rules import RULES, Limits
from leanstep.diagnose.watch import Watch
from leanstep.tape.lines import Line

PLANTED = """\
import torch
import torch.nn.functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
bank = torch.nn.Parameter(torch.randn(12, 64, 64) / 8)
layers = [torch.nn.Parameter(torch.randn(64, 64) / 8) for _ in range(40)]
head = torch.nn.Parameter(torch.randn(64, 1024) / 8)
forgotten = torch.nn.Parameter(torch.randn(64, 64) / 8)
optimizer = torch.optim.AdamW([bank, *layers, head], lr=1e-3, foreach=False)
x, labels = torch.randn(256, 64), torch.randint(0, 1024, (256,))
labels[:192] = -100


@torch.compile(backend="{backend}")
def loss_of(x):
    h = x
    for layer in range(12):
        h = h + torch.tanh(h @ bank[layer])  # expect: zero-fill count=12
    for weight in layers:
        h = h + torch.tanh(h @ weight)
    h = h + h @ forgotten  # expect: unused-grad count=1
    half = h.bfloat16()
    h = h + half.float()
    h = h - half.float()  # expect: duplicate-cast count=1
    means = h.mean(0)
    penalty = torch.zeros(())
    for i in range(64):
        penalty = penalty + means[i].square()  # expect: op-storm count=128
    logits = h @ head  # expect: dead-rows count=192
    return F.cross_entropy(logits, labels) + penalty


for _ in range(4):
    optimizer.zero_grad()
    loss = loss_of(x)
    loss.backward()
    optimizer.step()  # expect: unbatched-optimizer count=378
    loss.item()  # expect: host-sync count=1
"""


def watched_region(write_script, watched, backend: str) -> tuple[Path, Watch]:
    torch._dynamo.reset()
    script = write_script(PLANTED.format(backend=backend))
    return script, watched(script)


def found_in(watch: Watch) -> Expected:
    return {(f.rule, f.line.file, f.line.number, f.count) for f in watch.findings()}


def test_a_backend_that_runs_calls_as_they_stand_keeps_every_finding(write_script, watched):
    """A loop over layers stays clean inside a compiled region as well."""
    script, watch = watched_region(write_script, watched, "eager")
    assert found_in(watch) == expected(script, slow=set())
    assert watch.compiled.removed == [] and watch.not_seen == []
    assert [(graph.function, graph.backend) for graph in watch.compiled.graphs] == [("loss_of", "eager")]


def test_a_backend_below_autograd_takes_the_second_cast_for_the_first(write_script, watched):
    """AOTAutograd finds common subexpressions: of the planted faults aot_eager repairs one."""
    script, watch = watched_region(write_script, watched, "aot_eager")
    planted = expected(script, slow=set())
    (cast,) = [mark for mark in planted if mark[0] == "duplicate-cast"]
    assert found_in(watch) == planted - {cast}
    ((removed, why),) = watch.compiled.removed
    assert (removed.rule, removed.line.number, why) == (cast[0], cast[2], "nothing remains (ATen calls)")


FUSED = """\
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
bank = torch.nn.Parameter(torch.randn(4, 128, 128) / 8)
optimizer = torch.optim.SGD([bank], lr=0.1)
x = torch.randn(32, 128)


@torch.compile
def loss_of(h):
    for layer in range(4):
        h = torch.tanh(h @ bank[layer])
    for _ in range(40):
        h = h * 0.9 + 0.1
    return h.mean()


for _ in range(4):
    optimizer.zero_grad()
    loss = loss_of(x)
    loss.backward()
    optimizer.step()
    loss.item()  # expect: host-sync count=1
"""


@pytest.mark.timeout(300)
def test_inductor_removes_what_it_fuses(write_script, watched, device):
    """Eager runs have a storm of 80 ops and four fills of the bank; the compiled step has neither.

    The fixture skips it on a pretended device, which Inductor asks for more than it has.
    """
    if find_compiler() is None:
        pytest.skip("Inductor needs a C++ compiler")
    torch._dynamo.reset()
    script = write_script(FUSED)
    watch = watched(script)
    assert found_in(watch) == expected(script, slow=set())
    removed = {(f.rule, f.line.number, f.count) for f, _ in watch.compiled.removed}
    assert removed == {("zero-fill", 13, 4), ("op-storm", 15, 80)}
    (graph,) = watch.compiled.graphs
    assert (graph.backend, graph.level) == ("inductor", "kernels")
    assert {kernel.backward for kernel in graph.kernels} == {False, True}


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
