"""`[tool.leanstep]`: what is written there is used, what is typed wins, and a mistake gets one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from leanstep import config
from leanstep.cli import run
from leanstep.diagnose.rules import RULE_IDS
from leanstep.files import BadInput

READS = """
import torch
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], 0.1)
for _ in range(6):
    loss = (weight * 2).sum()
    loss.item()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def write(folder: Path, text: str) -> Path:
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def test_every_setting_is_read(tmp_path: Path):
    write(
        tmp_path,
        '[tool.leanstep]\nselect = ["host-sync"]\nignore = ["float64"]\nfail-on = ["any"]\ndevice = "a100"\n'
        "[tool.leanstep.thresholds]\nop-storm.repeats = 64\n[tool.leanstep.budgets]\nhost_reads = 3\n",
    )
    read = config.read_config(tmp_path)
    assert (read.select, read.ignore, read.fail_on) == (("host-sync",), ("float64",), RULE_IDS)
    assert (read.device, read.thresholds, read.budgets) == (
        "a100",
        {"op-storm": {"repeats": 64}},
        {"host_reads": 3},
    )


def test_the_nearest_file_counts(tmp_path: Path):
    write(tmp_path, '[tool.leanstep]\ndevice = "a100"\n')
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert config.read_config(inner).device == "a100"
    # A project of its own, without settings.
    write(inner, "[project]\nname = 'x'\n")
    assert config.read_config(inner) == config.Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.leanstep]\nslect = []", "unknown key 'slect'; did you mean 'select'?"),
        ('[tool.leanstep]\nselect = "host-sync"', "select: expected a list of rules"),
        ('[tool.leanstep]\nignore = ["host-snyc"]', "ignore: unknown rule 'host-snyc'"),
        ("[tool.leanstep]\ndevice = 3", "device: expected a name"),
        ('[tool.leanstep]\ndevice = "nope"', "device: expected one of v100"),
        ("[tool.leanstep]\nthresholds = 3", "[tool.leanstep.thresholds]: expected a table, got 3"),
        ("[tool.leanstep.thresholds]\nop-storm = 3", "expected op-storm.NAME = NUMBER"),
        ("[tool.leanstep.thresholds]\nop-storm.repeat = 3", "op-storm has no 'repeat'"),
        ('[tool.leanstep.thresholds]\nop-storm.repeats = "x"', "op-storm.repeats: expected a number >= 0"),
        ("[tool.leanstep.budgets]\nhost_read = 3", "unknown key 'host_read'; did you mean 'host_reads'?"),
        ("[tool.leanstep.budgets]\nhost_reads = -1", "host_reads: expected a number >= 0, got -1"),
        ("tool = 3", "[tool]: expected a table, got 3"),
        ('[tool]\nleanstep = "on"', "[tool.leanstep]: expected a table, got 'on'"),
        ("select = [", "not valid TOML"),
        ("[tool.leanstep.budgets]\nhost_reads = 1" + "0" * 5000, "not valid TOML"),
        ("[tool.leanstep]\nignore = " + "[" * 3000 + "]" * 3000, "not valid TOML"),
    ],
)
def test_a_mistake_gets_one_line(tmp_path: Path, text: str, message: str):
    write(tmp_path, f"{text}\n")
    with pytest.raises(BadInput) as caught:
        config.read_config(tmp_path)
    assert message in str(caught.value) and str(tmp_path / "pyproject.toml") in str(caught.value)


def test_diagnose_takes_its_rules_from_the_file_and_the_command_line_wins(
    tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.chdir(write(tmp_path, '[tool.leanstep]\nfail-on = ["host-sync"]\n'))
    (tmp_path / "train.py").write_text(READS, encoding="utf-8")
    assert run(["diagnose", "train.py"]) == 1
    assert run(["diagnose", "train.py", "--fail-on", "dead-rows"]) == 0
    write(
        tmp_path,
        '[tool.leanstep]\nfail-on = ["host-sync"]\n[tool.leanstep.thresholds]\nhost-sync.reads = 2\n',
    )
    assert run(["diagnose", "train.py"]) == 0
    write(tmp_path, "[tool.leanstep]\nfial-on = []\n")
    capsys.readouterr()
    assert run(["diagnose", "train.py"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("leanstep: ") and "did you mean 'fail-on'?" in line


def test_rehearse_takes_its_device_from_the_file(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(write(tmp_path, '[tool.leanstep]\ndevice = "h1000"\n'))
    (tmp_path / "train.py").write_text(READS, encoding="utf-8")
    assert run(["rehearse", "train.py"]) == 2
    assert "device: expected one of" in capsys.readouterr().err


def test_budgets_of_tests_come_from_the_file(tmp_path: Path, monkeypatch):
    from leanstep.pytest_plugin import Leanstep

    monkeypatch.chdir(write(tmp_path, "[tool.leanstep.budgets]\nhost_reads = 2\nop_storms = 0\n"))
    assert Leanstep().budget().limits == {"host_reads": 2, "op_storms": 0}
    assert Leanstep().budget(host_reads=5).limits == {"host_reads": 5, "op_storms": 0}
