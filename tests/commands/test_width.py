"""With 80 columns no command prints a longer line: scripts with long names, arguments and code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from leanstep import cli
from leanstep.escape import clip, fold

COLUMNS = 80
# Names of parameters and of the script are as long as those of others.
SCRIPT = """\
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
try:
    device = torch.zeros(1, device="cuda").device
except (AssertionError, RuntimeError):  # no GPU, or one that is only pretended
    device = torch.device("cpu")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first_projection_of_the_feed_forward = torch.nn.Linear(64, 64, device=device)

    def forward(self, activations):
        return activations + torch.tanh(self.first_projection_of_the_feed_forward(activations)) * 0.5


layers_of_the_model = torch.nn.Sequential(*(Block() for _ in range(10)))
optimizer = torch.optim.AdamW(layers_of_the_model.parameters(), lr=1e-3, weight_decay=0.0)
for number_of_the_step in range(12):
    activations = torch.randn(32, 64, device=device)
    loss_of_this_step = layers_of_the_model(activations).square().mean() + activations.mean() * 0.0
    loss_of_this_step.backward()
    optimizer.step()
    optimizer.zero_grad()
    value_that_is_logged = loss_of_this_step.item() + layers_of_the_model[0](activations).mean().item()
"""
ARGUMENTS = ["--", "--configuration", "an/argument/with/a/long/path.yaml", "--learning-rate", "0.001"]


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Switched off: a recording would see the fill."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("a_training_script_before.py", "a_training_script_after.py"):
        (tmp_path / name).write_text(SCRIPT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "command",
    [
        ["diagnose", "a_training_script_before.py", "--explain", "1", "--all"],
        ["prove", "a_training_script_before.py", "a_training_script_after.py"],
        ["bench", "a_training_script_before.py", "a_training_script_after.py", "--budget", "0.1"],
        ["fix", "a_training_script_before.py"],
        ["rehearse", "a_training_script_before.py", "--device", "h100,a100"],
    ],
    ids=lambda words: words[0],
)
def test_lines_fit_into_the_terminal(command: list[str], folder: Path, capfd) -> None:
    if command[0] == "fix":
        # In a process without other tests: their modules would be files of the script's own.
        root = str(Path(cli.__file__).parents[1])
        words = [sys.executable, "-m", "leanstep", *command, *ARGUMENTS]
        done = subprocess.run(words, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True)
        code, texts = done.returncode, (done.stdout, done.stderr)
    else:
        code, texts = cli.run([*command, *ARGUMENTS]), capfd.readouterr()
    assert code == 0
    lines = [line for text in texts for line in text.splitlines()]
    # A diff keeps its lines, or it could not be applied.
    source = {f"{sign}{line}" for sign in " +-" for line in SCRIPT.splitlines()}
    long = [line for line in lines if len(line) > COLUMNS and line not in source and "fused=True" not in line]
    assert len(lines) > 2 and long == []


def test_what_is_folded_keeps_its_words_and_its_indentation() -> None:
    text = "short\n  a line that is longer than it may be, with a/very/long/path/that/stays/whole.py:12 in it"
    lines = fold(text, 40).splitlines()
    assert lines[0] == "short" and lines[1].startswith("  a line") and lines[2].startswith("      ")
    assert " ".join(fold(text, 40).split()) == " ".join(text.split())
    assert max(map(len, lines)) <= 45 and "      a/very/long/path/that/stays/whole.py:12" in "\n".join(lines)
    assert clip("twelve chars", 12) == "twelve chars" and clip("thirteen char", 12) == "thirteen ch…"
