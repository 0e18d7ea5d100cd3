"""Rules that keep the package readable: `python tools/house.py` lists what breaks them and exits 1.

- A function has a cyclomatic complexity of at most 25; nested functions count towards the outer one.
- Modules form no import cycle; imports inside functions count.
- A public function or method has at most 12 parameters. Triton kernels and commands are exempt: a kernel has
  one parameter per pointer and stride, a command one per option. `WIDE` lists other exceptions with reasons.
- No literal is unpacked on the spot, in a call or a display, as in `f(*(a, b))` or `{**{"x": 1}}`.
- No import hides under `TYPE_CHECKING`, and only cpu.py sets thread counts or builds C++.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Container, Iterator
from pathlib import Path

MAX_COMPLEXITY = 25
MAX_PARAMETERS = 12
# Public functions with more parameters, each with the reason.
WIDE = {"NorMuon.__init__": "every option of the optimizer is part of its interface, as in torch.optim"}
# Calls that tune the process for one machine.
TUNING_CALLS = {"set_num_threads", "set_num_interop_threads", "build_library"}
BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.match_case,
    ast.Assert,
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_package(package: Path) -> dict[Path, ast.Module]:
    """The syntax tree of every module, by its path relative to the package."""
    files = sorted(path for path in package.rglob("*.py") if "examples" not in path.parts)
    return {path.relative_to(package): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def violations(package: Path) -> list[str]:
    """One sentence per broken rule."""
    modules = read_package(package)
    sentences = [f"import cycle: {', '.join(cycle)}" for cycle in import_cycles(modules, package.name)]
    for path, tree in modules.items():
        sentences += complex_functions(path, tree)
        sentences += wide_functions(path, tree)
        sentences += unpacked_literals(path, tree)
        sentences += hidden_imports_and_tuning(path, tree)
    return sentences


def complexity(function: Function) -> int:
    """McCabe's number: one, plus one per branch and per further operand of `and` and `or`."""
    total = 1
    for node in ast.walk(function):
        if isinstance(node, BRANCHES):
            total += 1
        elif isinstance(node, ast.comprehension):
            total += 1 + len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
    return total


def complex_functions(path: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, Function) and (number := complexity(node)) > MAX_COMPLEXITY:
            yield f"{path}:{node.lineno} {node.name} has complexity {number}, at most {MAX_COMPLEXITY}"


def wide_functions(path: Path, tree: ast.Module, exceptions: Container[str] = WIDE) -> Iterator[str]:
    if path.stem == "kernel" or path.parts[0] == "commands":
        return
    for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node in owner.body:
            if not isinstance(node, Function) or (node.name.startswith("_") and node.name != "__init__"):
                continue
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len([name for name in names if name not in ("self", "cls")])
            name = f"{owner.name}.{node.name}" if isinstance(owner, ast.ClassDef) else node.name
            if count > MAX_PARAMETERS and name not in exceptions:
                yield f"{path}:{node.lineno} {name} has {count} parameters, at most {MAX_PARAMETERS}"


def unpacked_literals(path: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        values: list[ast.expr] = []
        if isinstance(node, ast.Starred):
            values = [node.value]
        elif isinstance(node, ast.Call):
            values = [keyword.value for keyword in node.keywords if keyword.arg is None]
        elif isinstance(node, ast.Dict):
            values = [value for key, value in zip(node.keys, node.values, strict=True) if key is None]
        if any(isinstance(value, ast.Tuple | ast.List | ast.Dict) for value in values):
            yield f"{path}:{node.lineno} unpacks a literal"


def hidden_imports_and_tuning(path: Path, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING":
            yield f"{path}:{node.lineno} hides an import under TYPE_CHECKING"
        elif isinstance(node, ast.Attribute) and node.attr in TUNING_CALLS and path.name != "cpu.py":
            yield f"{path}:{node.lineno} calls {node.attr}, which belongs in cpu.py"


def import_cycles(modules: dict[Path, ast.Module], package: str) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others (Tarjan's algorithm).

    An import of a package counts as an import of the modules named, not of its `__init__`, which only
    re-exports them.
    """
    names = {_module_name(path, package): path for path in modules}
    edges = {name: _imports(modules[path], names) - {name} for name, path in names.items()}
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for target in sorted(edges[module]):
            if target not in order:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], order[target])
        if lowest[module] == order[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                cycles.append(sorted(group))

    for module in sorted(edges):
        if module not in order:
            visit(module)
    return cycles


def _module_name(path: Path, package: str) -> str:
    parts = [package, *path.with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module, names: dict[str, Path]) -> set[str]:
    targets: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            targets |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
    return {name for name in targets if name in names and names[name].name != "__init__.py"}


def main() -> int:
    package = Path(__file__).parent.parent / "leanstep"
    sentences = violations(package)
    for sentence in sentences:
        print(sentence)
    modules = read_package(package)
    lines = sum(len((package / path).read_text(encoding="utf-8").splitlines()) for path in modules)
    print(f"{len(modules)} modules, {lines} lines, {len(sentences)} broken rules")
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
