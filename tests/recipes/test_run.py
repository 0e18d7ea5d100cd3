"""What the recipes share: options, checkpoints, exact resuming, metrics."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import pytest
import torch
from killing import assert_same_bits, without_times

from recipes.run import list_checkpoints, read_checkpoint, start


@dataclass
class Settings:
    steps: int = 12
    seed: int = 0
    lr: float = 0.5
    bias: bool = True
    form: str = "plain"

    def __post_init__(self):
        if self.form not in ("plain", "odd"):
            raise ValueError(f"form: expected plain or odd, got {self.form!r}")


PRESETS = {"tiny": {}, "long": {"steps": 90, "lr": 0.25}}


def train(*arguments, at=None):
    """Train two numbers with momentum and noise from the global generator; `at(step)` may interfere."""
    s, run = start("Toy.", Settings, PRESETS, list(arguments), log_every=4, eval_every=5, save_every=3)
    torch.manual_seed(s.seed)
    weight = torch.nn.Parameter(torch.randn(2))
    optimizer = torch.optim.SGD([weight], lr=s.lr, momentum=0.5)
    if (state := run.load()) is not None:
        weight.data.copy_(state["weight"])
        optimizer.load_state_dict(state["optimizer"])
    if run.step == 0:
        run.evaluation(val_loss=float(weight.detach().norm()))
    for step in run.steps():
        loss = (weight - torch.randn(2)).square().sum()
        loss = loss if at is None else loss + (at(step) or 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss, **({"rare": step} if step % 3 == 0 else {}))
        if run.eval_due:
            run.evaluation(val_loss=float(weight.detach().norm()))
        if run.save_due:
            run.save({"weight": weight.detach(), "optimizer": optimizer.state_dict()})
    return s, run


def test_options_presets_and_their_errors(tmp_path, capsys):
    s, run = train("--out", str(tmp_path), "--preset", "long", "--steps", "2", "--bias", "false")
    assert (s.steps, s.lr, s.bias, run.step) == (2, 0.25, False, 2)
    for bad, message in [
        (["--lr", "nan"], "expected a finite number, got 'nan'"),
        (["--bias", "maybe"], "expected true or false, got 'maybe'"),
        (["--form", "round"], "form: expected plain or odd, got 'round'"),
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (["--log-every", "-1"], "expected a whole number, 0 or more, got '-1'"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            train("--out", str(tmp_path / "new"), *bad)
        assert stopped.value.code == 2 and message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train("--help")
    assert "--save-every" in (text := capsys.readouterr().out) and "--form VALUE" in text


def test_stopped_and_resumed_equals_one_run(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train("--out", str(whole))
    for stop in ("5", "8", "12"):
        train("--out", str(parts), "--resume", "--stop-after", stop)
    ends = [read_checkpoint(list_checkpoints(out)[-1]) for out in (whole, parts)]
    for name in ("step", "state", "ranks"):
        assert_same_bits(ends[0][name], ends[1][name], name)
    lines = without_times(parts)
    assert lines == without_times(whole)
    assert [x["step"] for x in lines] == [0, 4, 5, 8, 10, 12, 12] and lines[1]["rare"] == (0 + 3) / 2
    assert [p.name for p in list_checkpoints(parts)] == [f"step-{n:08d}.pt" for n in (8, 9, 12)]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, capsys):
    train("--out", str(tmp_path), "--stop-after", "6")
    (tmp_path / ".metrics.jsonl.1-ab.partial").write_text("left by a kill")
    newest = list_checkpoints(tmp_path)[-1]
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 4
    newest.write_bytes(data)
    (tmp_path / "step-00000009.pt").write_bytes(data[: len(data) // 3])
    _, run = train("--out", str(tmp_path), "--resume", "--stop-after", "7")
    said = capsys.readouterr().err
    assert "step-00000009.pt skipped" in said and "step-00000006.pt skipped" in said and run.step == 7
    assert not list(tmp_path.glob(".*"))
    for path in list_checkpoints(tmp_path):
        path.write_bytes(b"no checkpoint")
    with pytest.raises(SystemExit, match="no usable checkpoint"):
        train("--out", str(tmp_path), "--resume")


def test_another_run_in_the_folder_is_not_overwritten(tmp_path):
    train("--out", str(tmp_path))
    with pytest.raises(SystemExit, match="already holds a run"):
        train("--out", str(tmp_path))
    with pytest.raises(SystemExit, match=r"form was 'plain', now 'odd'; lr was 0\.5, now 0\.1"):
        train("--out", str(tmp_path), "--resume", "--lr", "0.1", "--form", "odd")


def test_a_loss_that_is_not_finite_is_never_saved(tmp_path):
    with pytest.raises(SystemExit, match="loss: not finite at step 6/12"):
        train("--out", str(tmp_path), at=lambda step: float("nan") if step == 4 else 0.0)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-00000003.pt"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_a_save(tmp_path, number):
    before = signal.getsignal(number)

    def interrupt(step):
        if step == 7:
            os.kill(os.getpid(), number)

    if number == signal.SIGINT:
        with pytest.raises(SystemExit, match="130"):
            train("--out", str(tmp_path), at=interrupt)
    else:
        assert train("--out", str(tmp_path), at=interrupt)[1].step == 8
    assert list_checkpoints(tmp_path)[-1].name == "step-00000008.pt"
    assert signal.getsignal(number) == before
