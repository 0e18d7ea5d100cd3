"""`leanstep rehearse` around the engine: options, JSON, exit codes, bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import typer
from rehearse.test_verdict import recorded

from leanstep.commands import BadInput
from leanstep.commands import rehearse as command
from leanstep.rehearse.events import Recording, Refusal, Request

OPTIONS: dict[str, Any] = {
    "args": None,
    "device": "h100",
    "steps": 3,
    "ranks": 1,
    "clock": False,
    "module": False,
    "settings": None,
    "impl": None,
    "sweep": None,
    "reserve_gb": 0.0,
    "json": None,
    "html": None,
    "what_if": None,
    "host_us": None,
    "eager": False,
    "sandbox": False,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The engine replaced by a recording made by hand; the requests that reach it."""
    seen: list[Request] = []

    def run(request: Request, json: str | None, quiet: bool = False) -> Recording:
        seen.append(request)
        return replace(recorded(), request=request)

    monkeypatch.setattr(command, "run_request", run)
    return seen


def rehearse(**options: Any) -> int:
    with pytest.raises(typer.Exit) as left:
        command.rehearse(**{"context": None, "target": "train.py", **OPTIONS, **options})
    return left.value.exit_code


def test_standard_output_carries_the_json_object_alone(asked: list[Request], capsys: pytest.CaptureFixture):
    assert rehearse(json="-", device="h100,a100", args=["--batch_size=4"]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert report["predicted"] is True and [d["device"] for d in report["devices"]] == ["h100", "a100"]
    assert "predicted on h100" in shown.err
    assert asked[0].args == ("--batch_size=4",) and asked[0].device == "h100"


def test_what_ifs_rehearse_again_with_the_change(asked: list[Request], capsys: pytest.CaptureFixture):
    rehearse(what_if="checkpoint,lean-head", json="-")
    assert [request.changes for request in asked] == [(), ("checkpoint",), ("lean_head",)]
    changes = json.loads(capsys.readouterr().out)["what_if"]["changes"]
    assert [c["change"] for c in changes] == ["checkpoint", "lean_head"] and changes[0]["step_ms"] > 0


def test_an_early_end_exits_with_three(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    ended = Recording(Request("train.py"), "2.13", refused=Refusal(None, "reads data_ptr()"), ended="refused")
    monkeypatch.setattr(command, "run_request", lambda *_, **__: ended)
    assert rehearse() == 3
    assert "reads data_ptr()" in capsys.readouterr().out


def test_a_case_gets_its_bare_products_and_the_ratio(asked: list[Request], capsys: pytest.CaptureFixture):
    rehearse(target="logprob-linear", settings="tokens=512,response_frac=0.25,dtype=bf16", json="-")
    report = json.loads(capsys.readouterr().out)
    assert asked[0].settings == {"tokens": 512, "response_frac": 0.25, "dtype": "bf16"} and asked[0].case
    assert asked[1].implementation == "limit"
    assert report["ratio"] == pytest.approx(report["time"]["step_ms"] / report["bare_gemm_ms"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "h1000"}, r"--device: expected one of .*h100.*, got 'h1000'"),
        ({"device": "h100,a100,v100,t4,b200"}, "--device: expected 1 to 4 devices"),
        ({"settings": "tokens=4"}, "--set, --impl, --sweep: for registered cases; train.py is a script"),
        (
            {"target": "logprob-linear", "settings": "tokens"},
            "--set: expected name=value pairs, got 'tokens'",
        ),
        ({"what_if": "magic"}, "--what-if: expected lean_head, .* or all, got 'magic'"),
        ({"json": "/nowhere/x.json"}, "--json: the folder /nowhere does not exist"),
    ],
)
def test_bad_input_is_one_line(options: dict[str, Any], message: str, asked: list[Request]):
    with pytest.raises(BadInput, match=message):
        command.rehearse(**{"context": None, "target": "train.py", **OPTIONS, **options})
