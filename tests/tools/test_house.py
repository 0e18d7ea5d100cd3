"""The rules of a room hold, and the checks that say so can fail."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tool_loader import load_tool

ROOT = Path(__file__).parent.parent.parent


def test_the_rules_of_a_room_hold():
    rooms = load_tool("rooms").read_rooms(ROOT / "leanstep")
    assert not rooms.broken, rooms.figures() + "\n" + "\n".join(rooms.broken)


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"room/long.py": "x = 1\n" * 451}, "has 451 lines"),
        ({f"room/part_{n}.py": "" for n in range(13)}, "has 13 files"),
        ({"room/part.py": "", "other/part.py": ""}, "part.py occurs 2 times"),
        ({"room/wide.py": f"def call({', '.join(f'a{n}' for n in range(13))}): ..."}, "13 parameters"),
        ({"room/hidden.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING: ..."}, "TYPE_CHECKING"),
        ({"room/tuned.py": "import torch\ntorch.set_num_threads(1)"}, "belongs into cpu.py"),
    ],
)
def test_a_broken_rule_is_named(tmp_path: Path, files: dict[str, str], complaint: str):
    for name, text in {"__init__.py": "", **files}.items():
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (sentence,) = load_tool("rooms").read_rooms(tmp_path / "package").broken
    assert complaint in sentence


def test_files_of_the_same_word_may_repeat(tmp_path: Path):
    for room in ("one", "two"):
        (tmp_path / room).mkdir()
        for name in ("reference", "kernel", "cases", "peers", "__init__"):
            (tmp_path / room / f"{name}.py").write_text("")
    assert load_tool("rooms").read_rooms(tmp_path).broken == []


def test_the_readme_names_every_module():
    text = (ROOT / "README.md").read_text()
    tree = text[text.index("\nleanstep/\n") :]
    words = set(re.findall(r"\w+", tree[: tree.index("```")]))
    modules = {path.stem for path in (ROOT / "leanstep").rglob("*.py")} - load_tool("rooms").REPEATED
    assert not modules - words


def test_a_reader_visits_few_files():
    walk = load_tool("walk")
    found = walk.measure()
    assert found.keys() == walk.BOUNDS.keys()
    for name, (files, changes) in found.items():
        bound = walk.BOUNDS[name]
        assert 1 <= files <= bound.files and 1 <= changes <= bound.changes, f"{name}: {files}, {changes}"


def test_a_walk_counts_files_and_changes():
    walk = load_tool("walk")
    from leanstep.cpu import num_threads

    assert walk.walk(num_threads) == (1, 1)
    assert walk.walk(lambda: None) == (0, 0)


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
