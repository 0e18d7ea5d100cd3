"""`leanstep prove` on scripts: exit codes, one clear line for what cannot be compared, outputs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from prove.captured_scripts import SCRIPTS

from leanstep.cli import run

POLICY, CUTS = str(SCRIPTS / "policy.py"), str(SCRIPTS / "cuts.py")
STEP = "m = nn.Linear(3, 2)\no = torch.optim.SGD(m.parameters(), lr=0.1)\n"
HEAD = "import torch\nfrom torch import nn\ntorch.manual_seed(0)\n"
LOOP = """for i in range(3):
    x = torch.ones(4, 3) * (i + 1)
    m(x).square().mean().backward()
    o.step()
"""


def script(folder: Path, name: str, *parts: str) -> str:
    path = folder / name
    path.write_text(HEAD + "".join(parts))
    return str(path)


def verdict(capfd) -> str:
    """The last line of standard output; standard error says nothing of it."""
    captured = capfd.readouterr()
    assert "leanstep:" not in captured.err
    return captured.out.splitlines()[-1]


def lines(capfd) -> list[str]:
    return [line for line in capfd.readouterr().err.splitlines() if line.startswith("leanstep:")]


def test_a_pair_is_proven_and_written(tmp_path: Path, capfd):
    output = tmp_path / "proof.json"
    options = ["--json", str(output)]
    good = script(tmp_path, "good.py", STEP, LOOP)
    assert run(["prove", good, good, "--steps", "2", *options]) == 0
    assert "the same update" in capfd.readouterr().out
    result = json.loads(output.read_text())
    assert result["ok"] and result["steps"] == 2 and result["parameters"] == 2 and result["rows"]
    worse = script(tmp_path, "worse.py", STEP, LOOP.replace("mean()", "sum()"))
    assert run(["prove", good, worse, *options]) == 1
    line = verdict(capfd)
    assert line.startswith("not the same update") and "first at step 1" in line and "weight" in line


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (STEP, "after.py never calls optimizer.step()"),
        (STEP.replace("3, 2", "3, 5") + LOOP, "the scripts train different parameters; weight has shapes"),
        ("torch.manual_seed(9)\n" + STEP + LOOP, "start from different weights: weight differs by"),
        (STEP + LOOP.replace("i + 1", "i + 5"), "read different data: the first layer's input in step 1"),
        (
            STEP + LOOP.replace("o.step()", "o.step(); assert i < 1"),
            "ended with AssertionError after 2 updates",
        ),
        (
            "raise RuntimeError('no data here')\n",
            "RuntimeError before its first update: RuntimeError: no data",
        ),
        (
            "raise RuntimeError(\"backend='inductor' raised:\\nOSError: no g++\\n\\nSet VERBOSE=1\")\n",
            "before its first update: RuntimeError: backend='inductor' raised: OSError: no g++",
        ),
        (STEP + LOOP.replace("mean()", "mean().mul(float('nan'))"), "has a loss of nan in step 1"),
    ],
)
def test_what_cannot_be_compared_is_one_line(tmp_path: Path, capfd, after: str, message: str):
    before = script(tmp_path, "before.py", STEP, LOOP)
    report = tmp_path / "kept.json"
    other = script(tmp_path, "after.py", after)
    assert run(["prove", before, other, "--steps", "3", "--json", str(report)]) == 2
    (line,) = lines(capfd)
    assert message in line
    assert len(json.loads(report.read_text())["losses"]["before"]) == 3


@pytest.mark.parametrize("command", ["prove", "bench"])
def test_a_script_that_does_not_compile_is_found_before_anything_runs(tmp_path: Path, capfd, command: str):
    before = script(tmp_path, "before.py", f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    after = script(tmp_path, "after.py", "x = (\n")
    assert run([command, before, after]) == 2
    (line,) = lines(capfd)
    assert "(after.py, line 4)" in line and "SyntaxError: " in line and not (tmp_path / "ran").exists()


def test_versions_of_a_package_that_the_script_never_loads_are_not_judged(tmp_path: Path, capfd):
    for version in ("old", "new"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "scaled.py").write_text("factor = 2\n")
    uses = script(tmp_path, "uses.py", "import scaled\n", STEP, LOOP)
    never = script(tmp_path, "never.py", STEP, LOOP)
    versions = ["--with", str(tmp_path / "old"), "--with", str(tmp_path / "new")]
    assert run(["prove", uses, *versions, "--steps", "1"]) == 0
    assert run(["prove", never, *versions, "--steps", "1"]) == 2
    (line,) = lines(capfd)
    assert "never.py loads no module that --with brings: both runs are the same program" in line


def test_ctrl_c_keeps_what_was_seen(tmp_path: Path, capfd):
    before = script(tmp_path, "before.py", STEP, LOOP)
    # The script presses Ctrl-C on us in its second step.
    press = "o.step()\n    if i == 1:\n        import os, time; os.kill(os.getppid(), 2); time.sleep(60)"
    after = script(tmp_path, "after.py", STEP, LOOP.replace("o.step()", press))
    report = tmp_path / "kept.json"
    # A background shell ignores Ctrl-C and its children inherit that: start from the default.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run(["prove", before, after, "--steps", "3", "--json", str(report)]) == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    assert lines(capfd) == ["leanstep: interrupted"]
    result = json.loads(report.read_text())
    assert result["problem"] == "interrupted" and not result["ok"]
    assert (len(result["losses"]["before"]), len(result["losses"]["after"])) == (3, 2)


def test_cuts_from_the_command_line(capfd):
    base = ["prove", CUTS, "--args", "--micro 1", "--args", "--micro 2"]
    assert run(base) == 0
    assert run([*base, "--", "--bug", "verl-3332"]) == 1
    line = verdict(capfd)
    assert "2 = accumulation steps" in line


def test_two_flags_are_compared_for_several_steps(tmp_path: Path, capfd):
    flag = "import sys\nlate = sys.argv[1] == 'late'\n"
    grow = LOOP.replace("mean()", "mean().mul(2 if late and i else 1)") + "    o.zero_grad()\n"
    path = script(tmp_path, "flags.py", flag, STEP, grow)
    base = ["prove", path, "--args", "never", "--args", "late"]
    assert run([*base, "--steps", "1"]) == 0
    assert run(base) == 1
    line = verdict(capfd)
    assert "late does not make the update of never: in step 2, a constant factor: 2" in line
    rates = script(tmp_path, "rates.py", flag, STEP.replace("0.1", "0.2 if late else 0.1"), LOOP)
    assert run(["prove", rates, *base[2:]]) == 1
    line = verdict(capfd)
    assert "the same gradients, another lr: 0.1 before, 0.2 after" in line
    ends = script(tmp_path, "ends.py", flag, STEP, LOOP.replace("range(3)", "range(1 + late)"))
    assert run(["prove", ends, *base[2:]]) == 2
    (line,) = lines(capfd)
    assert "never made 1 updates, late 2" in line


def test_drift_of_two_flags(tmp_path: Path, capfd):
    flag = "import sys\nlate = sys.argv[1] == 'late'\n"
    path = script(tmp_path, "flags.py", flag, STEP, LOOP.replace("mean()", "mean().mul(1 + late * (i > 1))"))
    base = ["prove", path, "--args", "never", "--args", "late", "--drift", "--runs", "2"]
    assert run([*base, "--steps", "2"]) == 0
    assert "loss after 2 steps, 2 paired runs: shift +0.00e+00" in capfd.readouterr().out
    assert run([*base, "--steps", "3"]) in (0, 1)
    assert "loss after 3 steps, 2 paired runs: shift +0.00e+00" not in capfd.readouterr().out
    crash = script(tmp_path, "crash.py", flag, STEP, LOOP, "assert not late\n")
    assert run(["prove", crash, *base[2:], "--steps", "9"]) == 2
    (line,) = lines(capfd)
    assert "late ended with AssertionError after 3 updates" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prove", "nowhere.py", POLICY], "SCRIPT: no such file: nowhere.py"),
        (["prove", POLICY], "one script, .*policy.py; expected a second one to compare with"),
        (["prove", POLICY, "--args", "--micro 2"], "--args: expected at least two runs"),
        (["prove", POLICY, POLICY, "--args", "a", "--args", "b"], "expected one script, got 2"),
        (["prove", POLICY, "--ranks", "1,x"], "--ranks: expected numbers of processes"),
        (
            ["prove", POLICY, "--drift", "--args", "a", "--args", "b", "--args", "c"],
            "--drift: expected two runs to compare, got 3",
        ),
        (["prove", POLICY, "--invariant", "--drift"], "--drift: only for two scripts, or one with --args"),
        (["prove", POLICY, POLICY, "--steps", "0"], "--steps: expected at least 1, got 0"),
    ],
)
def test_bad_input_is_one_line(capfd, arguments: list[str], message: str):
    assert run(arguments) == 2
    (line,) = lines(capfd)
    assert re.search(message, line), line


RANKS = """import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
m = DDP(nn.Linear(3, 2))
o = torch.optim.SGD(m.parameters(), lr=0.1)
for i in range(7):
    m(torch.ones(4, 3) * (dist.get_rank() + i)).square().FACTOR.backward()
    o.step()
    o.zero_grad()
dist.destroy_process_group()
"""


def test_two_scripts_over_ranks(tmp_path: Path, capfd):
    good = script(tmp_path, "good.py", RANKS.replace("FACTOR", "mean()"))
    same = script(tmp_path, "same.py", RANKS.replace("FACTOR", "sum().div(8)"))
    wrong = script(tmp_path, "wrong.py", RANKS.replace("FACTOR", "mean().mul(dist.get_rank())"))

    # In processes of their own, as from a shell: forked from the session, ranks inherit its threads' locks.
    def shell(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "leanstep", *arguments], capture_output=True, text=True)

    assert shell("prove", good, same, "--ranks", "2").returncode == 0
    assert shell("prove", good, wrong, "--ranks", "2").returncode == 1
    assert shell("bench", good, same, "--ranks", "2", "--no-proof", "--budget", "0.2").returncode == 0
    assert run(["prove", good, same, "--ranks", "1,2"]) == 2
    assert run(["bench", good, same, "--ranks", "two"]) == 2
    assert lines(capfd) == [
        "leanstep: --ranks: expected one number of processes with two scripts, got '1,2'",
        "leanstep: --ranks: expected numbers of processes such as 1,2,4, got 'two'",
    ]
