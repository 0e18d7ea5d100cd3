"""`bench before.py after.py`: steps take turns, the counts are right, and no ratio without a proof."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from leanstep.cli import run
from leanstep.report.updates import bench_lines

SCRIPT = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scale = 1.0
for step in range({steps}):
    x = torch.ones(32, 64)
    loss = scale * model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def scripts(folder: Path, change=("", ""), steps: int = 400) -> list[str]:
    text = SCRIPT.format(steps=steps)
    for name, body in (("before.py", text), ("after.py", text.replace(*change) if change[0] else text)):
        (folder / name).write_text(body)
    return [str(folder / "before.py"), str(folder / "after.py")]


def bench(folder: Path, *arguments: str) -> tuple[int, dict]:
    target = folder / "bench.json"
    code = run(["bench", *arguments, "--budget", "0.05", "--json", str(target)])
    return code, json.loads(target.read_text()) if target.exists() else {}


def test_a_pair_is_measured_in_turns(tmp_path: Path, capfd):
    slower = ("    loss.backward()", "    loss.item(); loss.item()\n    loss.backward()")
    code, result = bench(tmp_path, *scripts(tmp_path, slower))
    assert code == 0 and result["proven"] is True and result["time_ratio"] > 0
    before, after = result["rows"]
    assert before["samples"] == after["samples"] >= 3
    assert (before["host_syncs"], after["host_syncs"]) == (0, 2)
    # The two reads are ops as well.
    assert after["ops"] - before["ops"] == 2 and before["ops"] > 10
    assert before["peak_bytes"] > 64 * 64 * 4
    # How the pair is measured is ours; which of them is faster is the machine's affair.
    words = "faster" if result["time_ratio"] >= 1 else "slower"
    assert words in capfd.readouterr().out


def test_a_factor_below_one_is_said_the_other_way_round():
    row = {"script": "x.py", "median_s": 1.0, "p20_s": 1.0, "p80_s": 1.0, "samples": 3, "peak_bytes": 1}
    result = {"rows": [row | {"host_syncs": 0, "ops": 1}], "proven": True, "verdict": "the same update"}
    result |= {"notes": [], "before": "b", "after": "a", "time_ratio": 0.8, "memory_ratio": 5.41}
    console = Console(width=120, file=io.StringIO())
    console.print(bench_lines(result))
    assert (
        "1.25× slower, 5.41× less memory above the step's start; the same update" in console.file.getvalue()
    )


def test_no_ratio_without_a_proof(tmp_path: Path, capfd):
    wrong = scripts(tmp_path, ("scale = 1.0", "scale = 1.1"))
    code, result = bench(tmp_path, *wrong)
    assert code == 1 and result["proven"] is False and result["time_ratio"] is None
    assert result["rows"][0]["median_s"] > 0
    assert "bench: no ratio, not the same update" in capfd.readouterr().err
    code, result = bench(tmp_path, *wrong, "--no-proof")
    assert code == 0 and result["proven"] is None and result["time_ratio"] > 0
    assert "not proven: --no-proof was given" in result["verdict"]


@pytest.mark.parametrize(
    ("steps", "message"),
    [(0, "never calls optimizer.step()"), (3, "measured steps; expected at least 5 updates from it")],
)
def test_a_script_that_ends_too_early_is_one_line(tmp_path: Path, capfd, steps: int, message: str):
    code, _ = bench(tmp_path, *scripts(tmp_path, steps=steps))
    assert code == 2
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("leanstep:")]
    assert message in line
