"""The package keeps the rules of tools/house.py, and each rule can fail."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tool_loader import load_tool

ROOT = Path(__file__).parent.parent.parent


def test_the_package_keeps_the_rules():
    assert load_tool("house").violations(ROOT / "leanstep") == []


BRANCHES = "".join(f"    if x == {n}: return {n}\n" for n in range(25))
WIDE = ", ".join(f"a{n}" for n in range(13))


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"knotted.py": f"def f(x):\n{BRANCHES}"}, "f has complexity 26"),
        ({"knotted.py": f"def f(x):\n  def g():\n{BRANCHES}  return g"}, "f has complexity 26"),
        ({"wide.py": f"def call({WIDE}): ..."}, "call has 13 parameters"),
        ({"wide.py": f"class A:\n  def call(self, {WIDE}): ..."}, "A.call has 13 parameters"),
        ({"wide.py": f"class A:\n  def __init__(self, *, {WIDE}): ..."}, "A.__init__ has 13 parameters"),
        ({"packed.py": "f(*(1, 2))"}, "packed.py:1 unpacks"),
        ({"packed.py": "f(**{'x': 1})"}, "packed.py:1 unpacks"),
        ({"packed.py": "x = (*('a', 'b'), 'c')"}, "packed.py:1 unpacks"),
        ({"packed.py": "x = {**{'a': 1}, 'b': 2}"}, "packed.py:1 unpacks"),
        ({"hidden.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING: ..."}, "TYPE_CHECKING"),
        ({"tuned.py": "import torch\ntorch.set_num_threads(1)"}, "belongs in cpu.py"),
        (
            {
                "a.py": "from package import b",
                "b.py": "def f():\n  from package.c import x",
                "c.py": "import package.a",
            },
            "import cycle: package.a, package.b, package.c",
        ),
    ],
)
def test_a_broken_rule_is_named(tmp_path: Path, files: dict[str, str], complaint: str):
    sentences = load_tool("house").violations(write_package(tmp_path, files))
    assert complaint in sentences[0]
    assert len({sentence.split(":")[0] for sentence in sentences}) == 1


@pytest.mark.parametrize(
    "files",
    [
        {"kernel.py": f"def some_kernel({WIDE}): ..."},
        {"commands/train.py": f"def train({WIDE}): ..."},
        {"wide.py": f"def _private({WIDE}): ..."},
        {"a.py": "from package import b", "b.py": "from package import c", "c.py": ""},
        {"a.py": "from package.b import x", "b/__init__.py": "from package.b.c import x", "b/c.py": "x = 1"},
        {"plain.py": "f(*pair, **options)\nx = {**options, 'a': [*pair]}"},
    ],
)
def test_what_the_rules_allow(tmp_path: Path, files: dict[str, str]):
    assert load_tool("house").violations(write_package(tmp_path, files)) == []


def write_package(folder: Path, files: dict[str, str]) -> Path:
    for name, text in {"__init__.py": "", **files}.items():
        path = folder / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "package"


def test_the_module_map_names_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", text[text.index("\nleanstep/\n") :]))
    same_everywhere = {"__init__", "__main__", "reference", "kernel", "cases", "peers"}
    modules = {path.stem for path in (ROOT / "leanstep").rglob("*.py") if "examples" not in path.parts}
    assert not modules - same_everywhere - words


def test_every_exception_to_the_parameter_rule_is_needed():
    house = load_tool("house")
    names = [
        name
        for name in house.WIDE
        if not any(
            f" {name} has " in sentence
            for path, tree in house.read_package(ROOT / "leanstep").items()
            for sentence in house.wide_functions(path, tree, exceptions={})
        )
    ]
    assert names == []


def test_fingerprints_show_what_moved(capsys: pytest.CaptureFixture[str]):
    fingerprint = load_tool("fingerprint")
    key = "threads=1,native=0 case/tiny/float32/leanstep/logp"
    assert fingerprint.compare({key: "a"}, {key: "a"}) == 0
    assert fingerprint.compare({key: "a"}, {key: "b"}) == 1
    assert "changed: case/tiny/float32/leanstep" in capsys.readouterr().out


def unguarded_launches(source: str) -> list[str]:
    """Launches `..._kernel[grid](...)` outside a `with` that makes a tensor's device the current one."""
    found = []

    def visit(node: ast.AST, guarded: bool) -> None:
        if isinstance(node, ast.With):
            opened = " ".join(ast.unparse(item.context_expr) for item in node.items)
            guarded = guarded or any(f"{g}(" in opened for g in ("device_of", "cuda.device"))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and not guarded:
            name = ast.unparse(node.func.value)
            if name.endswith("kernel"):
                found.append(f"{node.lineno}: {name}")
        for child in ast.iter_child_nodes(node):
            # A function's body runs where it is called.
            visit(child, guarded and not isinstance(child, ast.FunctionDef))

    visit(ast.parse(source), False)
    return found


def test_every_kernel_is_launched_on_its_tensors_device():
    # Triton launches on the current device: tensors on cuda:1 would be read from cuda:0.
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "leanstep").rglob("*.py")}
    launching = [path for path, text in sources.items() if "kernel[" in text]
    assert len(launching) >= 5
    assert {path.name: found for path, text in sources.items() if (found := unguarded_launches(text))} == {}
    assert unguarded_launches("def f(x):\n    some_kernel[(1,)](x)") == ["2: some_kernel"]
    assert unguarded_launches("with torch.cuda.device_of(x):\n    some_kernel[(1,)](x)") == []
