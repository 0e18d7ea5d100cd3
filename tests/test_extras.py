"""The core works without the packages of the extras; what needs one says in one line which."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from leanstep.extras import MissingExtra, require

ROOT = Path(__file__).parent.parent
HIDDEN = ("numpy", "scipy", "jinja2", "libcst", "safetensors", "tokenizers")
TRAIN = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(6):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# One process for all command lines: an import of torch takes seconds.
RUN = f"""
import contextlib, io, json, sys
for name in {HIDDEN!r}:
    sys.modules[name] = None
from leanstep import cli
results = []
for line in json.loads(sys.argv[1]):
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = cli.run(line)
    results.append((code, out.getvalue(), errors.getvalue()))
print(json.dumps(results))
"""
LINES = {
    "fix train.py": 'leanstep: fix needs libcst: pip install "leanstep[fix]"',
    "diagnose train.py --html page.html": "leanstep: the report page needs jinja2: "
    'pip install "leanstep[report]"',
    "diagnose --trace trace.json": 'leanstep: --trace needs numpy: pip install "leanstep[trace]"',
    "prove before.py after.py --drift": 'leanstep: --drift needs scipy: pip install "leanstep[stats]"',
}


@pytest.fixture(scope="module")
def without_extras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    folder = tmp_path_factory.mktemp("core")
    for name in ("train", "before", "after"):
        (folder / f"{name}.py").write_text(TRAIN, encoding="utf-8")
    (folder / "trace.json").write_text("{}", encoding="utf-8")
    lines = [*LINES, "diagnose train.py --steps 1"]
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps([line.split() for line in lines])],
        capture_output=True, text=True, cwd=folder, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    return {line: tuple(result) for line, result in zip(lines, results, strict=True)}


@pytest.mark.parametrize("line", LINES)
def test_a_command_names_the_extra_it_needs_and_exits_2(without_extras, line: str):
    code, _, errors = without_extras[line]
    assert (code, errors.strip().splitlines()) == (2, [LINES[line]])


def test_diagnose_works_on_the_core(without_extras):
    code, out, errors = without_extras["diagnose train.py --steps 1"]
    assert code == 0, errors
    assert "1 step recorded after 1" in out


def test_require_passes_on_what_a_broken_package_lacks(monkeypatch, tmp_path: Path):
    (tmp_path / "half_installed.py").write_text("import not_there_at_all\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all") as caught:
        require("x", "fix", "half_installed")
    assert not isinstance(caught.value, MissingExtra)


def requirements() -> dict[str, list[str]]:
    """Names of the packages in pyproject.toml: the core's under "", the extras' under their names."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    core = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    extras = text[text.index("[project.optional-dependencies]") : text.index("[project.scripts]")]
    lists = {"": core[1] if core else ""}
    lists |= dict(re.findall(r"^(\w+) = \[(.*?)\](?:\s*#[^\n]*)?$", extras, re.DOTALL | re.MULTILINE))
    return {name: re.findall(r'"([\w-]+)', items) for name, items in lists.items()}


def test_the_core_has_three_direct_dependencies_and_one_on_python_3_10():
    assert requirements()[""] == ["torch", "typer", "rich", "tomli"]


def test_every_required_module_is_in_the_extra_that_is_named():
    known = requirements()
    calls = []
    for path in (ROOT / "leanstep").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        calls += re.findall(r'\brequire\("[^"]+", "(\w+)", ("[\w", ]+)\)', text)
    assert len(calls) >= 5
    for extra, modules in calls:
        assert set(re.findall(r"\w+", modules)) <= set(known[extra]), (extra, modules)
    extras = ("report", "fix", "train", "trace", "stats")
    assert set(HIDDEN) == {name for extra in extras for name in known[extra]}
    assert known["all"] == ["leanstep"]
