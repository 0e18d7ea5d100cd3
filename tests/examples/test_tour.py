"""The notebook runs from top to bottom, in a kernel as Jupyter starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TOUR = ROOT / "examples" / "tour.ipynb"
FIRST_GPU = ROOT / "dev" / "first_gpu.ipynb"
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbformat.validate(notebook)
nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def test_the_tour_runs_and_says_what_its_text_says(tmp_path: Path):
    pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    target = tmp_path / "executed.ipynb"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(TOUR), str(target)],
        capture_output=True, text=True, timeout=280, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    cells = json.loads(target.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(o.get("text", "")) for cell in cells for o in cell.get("outputs", [])]
    named = next(text for text in texts if "dead-rows" in text)
    # 32 of the 128 positions of each of 4 sequences have a label, and the row before each of them is scored.
    assert "384 of 512" in named, named
    assert any("gradients agree" in text for text in texts)


@pytest.mark.parametrize("notebook", [TOUR, FIRST_GPU], ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(notebook: Path):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
