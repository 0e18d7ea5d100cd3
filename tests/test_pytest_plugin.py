"""The pytest plugin, run by pytest in a separate process, as a user's project would load it."""

from __future__ import annotations

from pathlib import Path

import pytest

import leanstep

pytest_plugins = ["pytester"]

ROOT = Path(leanstep.__file__).parents[1]
STEP = """\
import sys
import threading

import pytest
import torch

model = torch.nn.Linear(64, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(256, 64)


def step(look=False):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    if look:
        return loss.item()  # line 18


"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """run(text, *options): pytest over one test file, with this plugin and no other installed one."""
    # By name and not by its entry point, which a checkout that is not installed does not have.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def start(text: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_waste=text)
        return pytester.runpytest_subprocess(
            "-p", "leanstep.pytest_plugin", "--strict-markers", "-W", "error", *options
        )

    return start


def test_the_entry_point_names_the_plugin():
    tomllib = pytest.importorskip("tomllib", reason="came with Python 3.11")
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert entries["pytest11"] == {"leanstep": "leanstep.pytest_plugin"}


def test_loading_costs_nothing(run):
    """Not even the fixture imports torch: the block does."""
    result = run(
        "import sys\n"
        "def test_plain(): assert 'torch' not in sys.modules\n"
        "def test_fixture(leanstep): assert 'torch' not in sys.modules\n"
    )
    result.assert_outcomes(passed=2)


def test_budgets_hold_break_and_refuse(run):
    result = run(
        STEP
        + """\
def test_within(leanstep):
    with leanstep.budget(host_reads=0, op_storms=0, peak_mib=8, rules={"unused-grad": 0}) as budget:
        step()
    # 256 x 512 activations and as much for their squares and gradients, far below 8 MiB.
    assert 0.5 <= budget.spent["peak_mib"] < 8
    assert budget.spent["host_reads"] == 0


def test_read_after_the_optimizer(leanstep):
    with leanstep.budget(host_reads=0):
        step(look=True)


def test_two_steps_are_one_block(leanstep):
    with leanstep.budget(host_reads=2) as budget:
        step(look=True)
        step(look=True)
    assert budget.spent == {"host_reads": 2}


def test_allowed_line(leanstep):
    with leanstep.budget(host_reads=0):
        model(x).sum().item()  # leanstep: ignore[host-sync]


def test_allowed_in_a_string(leanstep):
    with leanstep.budget(host_reads=0):
        print(model(x).sum().item(), "# leanstep: ignore[host-sync]")


def test_storm(leanstep):
    with leanstep.budget(op_storms=0):
        total = 0.0
        for row in model(x):
            total = total + row.sum()  # a storm
        total.backward()


def test_peak(leanstep):
    with leanstep.budget(peak_mib=1):
        hidden = model(x)
        (hidden.exp() * hidden.sin()).sum().backward()


@pytest.mark.leanstep(host_reads=0)
def test_marked():
    step()


@pytest.mark.leanstep(rules={"host-sync": 0})
def test_marked_over():
    step(look=True)


def test_error_wins(leanstep):
    with leanstep.budget(host_reads=0):
        model(x).sum().item()
        raise KeyError("the test's own")


def test_profiler(leanstep):
    with torch.profiler.profile():
        with leanstep.budget(host_reads=0):
            step()
        with leanstep.budget(peak_mib=8):
            step()


def test_nested(leanstep):
    with leanstep.budget(host_reads=0):
        with leanstep.budget(host_reads=0):
            step()


def test_nested_leaves_the_outer_one_whole(leanstep):
    with leanstep.budget(host_reads=0):
        step()


def test_threads(leanstep):
    with leanstep.budget(host_reads=0):
        thread = threading.Thread(target=step, args=(True,), name="loader")
        thread.start()
        thread.join()


def test_nothing_to_hold(leanstep):
    leanstep.budget()


def test_negative(leanstep):
    leanstep.budget(host_reads=-1)


def test_unknown_rule(leanstep):
    leanstep.budget(rules={"host-reads": 0})


@pytest.mark.leanstep(reads=0)
def test_unknown_keyword():
    step()


def test_nothing_stays_behind():
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert threading.getprofile() is None and not torch.autograd._profiler_enabled()
"""
    )
    result.assert_outcomes(passed=6, failed=13)
    result.stdout.fnmatch_lines(
        [
            "leanstep.budget: host_reads 1, at most 0",
            "  test_waste.py:18: host-sync: 1 read",
            "      return loss.item()  # line 18",
            "    do: Keep the value on the device*",
            "leanstep.budget: op_storms 1, at most 0",
            "  test_waste.py:*: op-storm: * tiny ops",
            "      *# a storm",
            "    do: Replace the loop by tensor ops*",
            "leanstep.budget: peak_mib *, at most 1",
            "  test_waste.py:*: * held for the backward",
            "    do: Use fewer samples per backward*",
            "leanstep.budget: host-sync 1, at most 0",
            '*KeyError: "the test\'s own"',
        ]
    )
    # Resources that exist once per process, and empty budgets, are refused in one line.
    refusals = [
        "peak_mib: a torch profiler is already running",
        "another recording is running in this process",
        "other threads ran inside the block (loader): their ops are not counted",
        "empty budget",
        "host_reads: expected a number >= 0, got -1",
        "rules: unknown rule 'host-reads'; expected some of host-sync",
        "expected keywords of the mark leanstep(host_reads=",
    ]
    for text in refusals:
        result.stdout.fnmatch_lines([f"*leanstep.budget: {text}*"])
