"""`leanstep rehearse` around the engine: options, JSON, exit codes, bad input."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from rehearse.test_verdict import recorded

from leanstep.cli import run
from leanstep.commands import rehearse as command
from leanstep.rehearse.events import Recording, Refusal, Request


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The engine replaced by a recording made by hand; the requests that reach it."""
    seen: list[Request] = []

    def answer(request: Request, json: str | None, quiet: bool = False) -> Recording:
        seen.append(request)
        return replace(recorded(), request=request)

    monkeypatch.setattr(command, "run_request", answer)
    return seen


def test_standard_output_carries_the_json_object_alone(asked: list[Request], capsys: pytest.CaptureFixture):
    options = ["--json", "-", "--device", "h100,a100"]
    assert run(["rehearse", *options, "train.py", "--", "--batch_size=4"]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert report["predicted"] is True and [d["device"] for d in report["devices"]] == ["h100", "a100"]
    assert "predicted on h100" in shown.err
    assert asked[0].args == ("--batch_size=4",) and asked[0].device == "h100"


def test_an_early_end_exits_with_three(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    ended = Recording(Request("train.py"), "2.13", refused=Refusal(None, "reads data_ptr()"), ended="refused")
    monkeypatch.setattr(command, "run_request", lambda *_, **__: ended)
    assert run(["rehearse", "train.py"]) == 3
    shown = capsys.readouterr()
    assert not shown.out and shown.err == "leanstep: rehearse: train.py: reads data_ptr()\n"


def test_the_first_line_says_that_the_script_selects_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    request = Request("train.py", default_device=True)
    monkeypatch.setattr(command, "run_request", lambda *_, **__: replace(recorded(), request=request))
    assert run(["rehearse", "train.py"]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first == "train.py selects no GPU: rehearsed with the GPU as torch's default device"
    assert second.startswith("predicted on h100")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--device=h1000", r"--device: expected one of .*h100.*, got 'h1000'"),
        ("--device=h100,a100,v100,t4,b200", "--device: expected 1 to 4 devices"),
        ("--json=/nowhere/x.json", "--json: the folder /nowhere does not exist"),
    ],
)
def test_bad_input_is_one_line(option: str, message: str, asked: list[Request], capsys):
    assert run(["rehearse", "train.py", option]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("leanstep: ") and re.search(message, line) and not asked
