"""What a test costs, read from its source: nobody marks a test by hand.

The names that a test uses are those in its body, in the fixtures that it takes and in the functions of
`tests/` that these call: variables, dotted names, imports, strings. `NAMES` says what they cost. `make test`
selects `quick`: the tests without a cost, and `SMOKE`, at least one test per cost and per command. Tests
that start a process although no name says so fail (tests/conftest.py).
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

TESTS = Path(__file__).parent
# Where test files find each other: pytest's `pythonpath`.
FOLDERS = (TESTS, TESTS / "recipes", TESTS / "dev")
# Marker -> names. `process` lists the functions of leanstep that start one, and the commands that do.
NAMES: dict[str, set[str]] = {
    "process": {
        *("subprocess.run", "subprocess.Popen", "multiprocessing", "os.fork", "fork", "runpytest_subprocess"),
        *("call_in_child", "start_program", "children", "wait_all", "rehearse", "rehearse_row", "prepared"),
        *("run_job", "prove_scripts", "prove_drift", "prove_invariance", "bench_scripts"),
    },
    "ranks": {"run_ranks"},
    "hf": {"transformers", "trl", "peft", "verl", "ray", "megatron", "lightning"},
    "compile": {"torch.compile", "torch._dynamo", "torch._inductor", "MIN_COMPILED_ELEMENTS"},
    "interpreter": {"triton", "leanstep.muon.kernel", "recipes.speedrun.kernels", "triton_passes"},
    "browser": {"browser"},
}
# Commands that start processes, as words of a command line: for tests that use leanstep.cli.
COMMANDS = {"prove", "bench", "rehearse", "demo", "fix"}
# What a file imports at its top costs all of its tests.
BY_FILE = ("hf", "interpreter")
# Costs of which processes are a part.
STARTERS = ("process", "ranks", "browser", "compile")
# Programs and forks of this process since the test began.
started: list[str] = []
# Tests that `make test` runs whatever they cost: files, functions or single cases.
SMOKE = (
    # Commands: one real process each for exit codes and signals, the rest forked from the session.
    "tests/commands/test_bench_prove.py",
    "tests/commands/test_demo.py::test_demo_writes_the_page_and_prints_the_table",
    "tests/commands/test_diagnose.py::test_ctrl_c_from_outside",
    "tests/commands/test_interrupt.py::test_a_signal_is_one_line_and_leaves_no_file[bench-15]",
    "tests/commands/test_interrupt.py::test_a_signal_is_one_line_and_leaves_no_file[fix-2]",
    "tests/commands/test_interrupt.py::test_a_signal_is_one_line_and_leaves_no_file[invariant-1]",
    "tests/commands/test_interrupt.py::test_a_signal_is_one_line_and_leaves_no_file[rehearse-2]",
    "tests/commands/test_rehearse.py",
    "tests/fix/test_offers.py::test_bad_input_is_one_line",
    "tests/fix/test_offers.py::test_the_command_prints_a_diff_and_writes_it",
    "tests/prove/test_commands.py::test_a_pair_is_proven_and_written",
    "tests/prove/test_commands.py::test_bad_input_is_one_line",
    "tests/prove/test_commands.py::test_cuts_from_the_command_line",
    "tests/prove/test_commands.py::test_what_cannot_be_compared_is_one_line",
    "tests/prove/test_difference.py",
    "tests/prove/test_functions.py",
    "tests/prove/test_invariance.py",
    "tests/prove/test_sharded.py::test_every_pair_of_a_drift_has_a_seed_of_its_own",
    "tests/prove/test_stopwatch.py::test_a_pair_is_measured_in_turns",
    # Two rehearsals that many tests look at, and those of the allocator's limit.
    "tests/rehearse/test_out_of_memory.py",
    "tests/rehearse/test_shadows.py",
    "tests/rehearse/test_tape.py",
    "tests/rehearse/test_torch_cuda.py",
    # Ranks.
    "tests/heads/test_parallel.py",
    "tests/muon/test_sharded.py::test_ranks_follow_one_process",
    "tests/test_ranks.py",
    # Trainers.
    "tests/integrations/test_causal_lm.py::test_values_and_gradients_equal_the_models_own_logits",
    "tests/integrations/test_transformers.py::test_training_gives_the_stock_losses_and_weights_with_accumulation",
    # Compiled graphs and interpreted kernels.
    "tests/heads/test_kernels.py",
    "tests/heads/test_linear.py::test_a_compiled_step_gives_the_numbers_of_eager_for_any_number_of_rows",
    "tests/lens/test_loss.py::test_the_objective_compiles_into_one_graph_and_operations_do_not_grow",
    "tests/muon/test_kernel.py",
    "tests/muon/test_traced.py::test_momentum_and_polar",
    "tests/browser/test_page.py::test_a_click_on_a_finding_shows_its_source_line",
)


def _note(event: str, arguments: tuple) -> None:
    # Other programs, such as a compiler, run once per machine or process: which test starts them is chance.
    foreign = event == "subprocess.Popen" and "python" not in Path(str(arguments[0])).name
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn") and not foreign:
        started.append(f"{event}{arguments[:2]}"[:200])


# It cannot be removed: this module is imported once.
sys.addaudithook(_note)


@functools.cache
def _parsed(path: Path) -> tuple[dict[str, frozenset[str]], frozenset[str], tuple[Path, ...]]:
    """Return a file's definitions with the names in each, its imports, and the test files among these."""
    defined: dict[str, frozenset[str]] = {}
    imported: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = _names(node)
            continue
        imported |= _names(node, imports=True)
        if isinstance(node, ast.Assign):
            defined |= {
                target.id: _names(node.value) for target in node.targets if isinstance(target, ast.Name)
            }
    parts = [name.removeprefix("tests.").replace(".", "/") for name in imported]
    files = {folder / f"{part}.py" for part in parts for folder in FOLDERS} - {path}
    return defined, frozenset(imported), tuple(file for file in sorted(files) if file.exists())


def _names(tree: ast.AST, imports: bool = False) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {part for alias in node.names for part in _prefixes(alias.name)}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= _prefixes(node.module) | {f"{node.module}.{alias.name}" for alias in node.names}
            names |= set() if imports else {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and imports and ast.unparse(node.func).endswith("importorskip"):
            names |= {p for a in node.args[:1] if isinstance(a, ast.Constant) for p in _prefixes(a.value)}
        elif imports:
            continue
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.Attribute):
            names |= _prefixes(ast.unparse(node)) | {node.attr}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A script's text counts as a whole; a word is a command or a package.
            names |= set(re.findall(r"torch\.compile|torch\._\w+|os\.fork", node.value))
            names |= _prefixes(node.value) if re.fullmatch(r"[\w.]+", node.value) else set()
    return frozenset(names)


def _prefixes(dotted: str) -> set[str]:
    parts = dotted.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts) + 1)}


@functools.cache
def _scope(path: Path) -> dict[str, frozenset[str]]:
    """Return the functions that a test file can name: its conftests', those of files it imports, its own."""
    folders = [f for f in reversed(path.parents) if f == TESTS or f.is_relative_to(TESTS)]
    scope: dict[str, frozenset[str]] = {}
    for other in (*(f / "conftest.py" for f in folders), *_parsed(path)[2], path):
        if other.exists():
            scope |= _parsed(other)[0]
    return scope


def names_in(path: Path, function: str) -> frozenset[str]:
    """Return the names that a test function uses, itself or through others."""
    scope, used, waiting = _scope(path), set(), [function]
    while waiting:
        for name in scope.get(waiting.pop(), ()):
            if name not in used:
                used.add(name)
                waiting.append(name)
    return frozenset(used)


@functools.cache
def modules_in(path: Path) -> frozenset[str]:
    """Return the modules that a test file imports at its top, itself or through others of `tests/`."""
    _, imported, files = _parsed(path)
    return imported.union(*map(modules_in, files))


@functools.cache
def costs(path: Path, function: str) -> frozenset[str]:
    """Return the markers of a test."""
    used, modules = names_in(path, function), modules_in(path)
    markers = {m for m, names in NAMES.items() if used & names or (m in BY_FILE and modules & names)}
    if "leanstep.cli" in used | modules and used & COMMANDS:
        markers.add("process")
    return frozenset(markers)


def is_smoke(nodeid: str) -> bool:
    return any(nodeid == name or nodeid.startswith((f"{name}::", f"{name}[")) for name in SMOKE)


def has_quick(path: Path) -> bool:
    """Return whether `make test` may run a test of a file; without importing it."""
    name = path.relative_to(TESTS.parent).as_posix()
    return any(smoke.startswith(f"{name}::") or smoke == name for smoke in SMOKE) or any(
        function.startswith(("test_", "Test")) and not costs(path, function) for function in _parsed(path)[0]
    )
