"""Imports go one way; a fast-path folder imports only a few other files, so that it can be copied."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "leanstep"
FAST_PATHS = ("heads", "lens", "muon")
OUTSIDE = ("benchmarks", "recipes", "dev", "tests", "museum")
# folder -> what it may import from leanstep besides itself.
ALLOWED = {
    "lens": set(),
    "heads": {"cpu", "output_buffers", "triton_driver"},
    "muon": {"cpu", "output_buffers", "triton_driver"},
    "measure": {"tape", "extras"},
    "diagnose": {"tape", "flops", "files", "units", "escape", "extras"},
    "prove": {"units", "measure", "diagnose", "tape", "files", "cpu"},
    # The user's script: runs below every command that watches it.
    "tape": {"files", "flops", "cpu", "escape", "units"},
    "fix": {"diagnose", "prove", "tape", "files", "extras"},
    "report": {"escape", "measure", "diagnose", "rehearse", "files", "units", "extras"},
    "rehearse": {"units", "cpu", "tape", "flops", "files"},
    # A callback records the steps of a trainer and holds them against the table of devices.
    "integrations": {
        "heads",
        "muon",
        "lens",
        "diagnose",
        "rehearse",
        "flops",
        "units",
    },
}


def leanstep_imports(path: Path) -> set[str]:
    """First-level leanstep modules that a file imports, anywhere in it."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
            if node.module == "leanstep":
                names = [f"leanstep.{alias.name}" for alias in node.names]
        modules |= {name.split(".")[1] for name in names if name.startswith("leanstep.")}
    return modules - {"__version__"}


@pytest.mark.parametrize("folder", [f for f in ALLOWED if (PACKAGE / f).is_dir()])
def test_imports_go_one_way(folder: str):
    for path in (PACKAGE / folder).rglob("*.py"):
        allowed = ALLOWED[folder] | {folder}
        extra = leanstep_imports(path) - allowed
        assert not extra, f"{path.relative_to(PACKAGE)} imports leanstep.{extra}"


def test_the_package_imports_nothing_that_stays_in_the_clone():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            assert not any(name.split(".")[0] in OUTSIDE for name in names), path


@pytest.mark.parametrize("folder", [f for f in FAST_PATHS if (PACKAGE / f).is_dir()])
def test_only_kernel_files_import_triton_at_the_top(folder: str):
    for path in (PACKAGE / folder).rglob("*.py"):
        if path.name in ("kernel.py", "kernels.py"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "triton" for name in names), path


def test_packages_import_without_triton():
    block = "import sys; sys.modules['triton'] = None\n"
    code = block + "".join(
        f"import leanstep.{name}\n" for name in FAST_PATHS if (PACKAGE / name / "__init__.py").exists()
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_no_module_is_called_after_nothing():
    names = {path.stem for path in PACKAGE.rglob("*.py")}
    assert not names & {"utils", "helpers", "common", "misc", "base"}
