"""`bench --json -` and `prove --json -` of every registered case: exactly the contract's object on stdout."""

from __future__ import annotations

import json
import math

import jsonschema
import pytest
from toy_case import fast, implementation, toy_case

from leanstep.case import all_cases, register, unregister
from leanstep.cli import run
from leanstep.measure import side_by_side


@pytest.fixture(autouse=True)
def no_time_box(monkeypatch):
    """A busy machine may take longer than the time box for a check."""
    monkeypatch.setattr(side_by_side, "MIN_BOX_S", 1_000.0)


NUMBER = {"type": ["number", "null"], "minimum": 0}
COUNT = {"type": ["integer", "null"], "minimum": 0}
TEXT = {"type": "string", "minLength": 1}


def exactly(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


ENVIRONMENT = {"leanstep": TEXT, "torch": TEXT, "device": TEXT, "threads": {"type": "integer", "minimum": 1}}
BENCH = exactly(
    **ENVIRONMENT,
    case=TEXT,
    size=TEXT,
    rows={
        "type": "array",
        "minItems": 2,
        "items": exactly(
            impl=TEXT,
            kind={"enum": ["reference", "fast", "peer", "limit"]},
            available={"type": "boolean"},
            median_s=NUMBER,
            p20_s=NUMBER,
            p80_s=NUMBER,
            time_ratio=NUMBER,
            peak_bytes=COUNT,
            extra_bytes=COUNT,
            memory_ratio=NUMBER,
            host_syncs=COUNT,
            max_error=NUMBER,
            note={"type": "string"},
        ),
    },
)
PROVE = exactly(
    **ENVIRONMENT,
    rows={
        "type": "array",
        "minItems": 1,
        "items": exactly(
            case=TEXT,
            impl=TEXT,
            dtype={"enum": ["fp64", "fp32", "fp16", "bf16"]},
            tensor=TEXT,
            error=NUMBER,
            reference_error=NUMBER,
            bound=NUMBER,
            ok={"type": "boolean"},
        ),
    },
)

# Optional packages and profilers warn about themselves; the object on standard output is what counts here.
pytestmark = pytest.mark.filterwarnings("ignore")


def printed(capfd, arguments, schema):
    assert run([*arguments, "--json", "-"]) == 0
    result = json.loads(capfd.readouterr().out, parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))
    jsonschema.validate(result, schema)
    return result


@pytest.mark.parametrize("name", all_cases())
def test_bench_prints_the_contracts_object(capfd, name, available_case):
    case = available_case(name)
    # Peers and rows on request are left out for time: they compile. Their rows come from the same record.
    chosen = [i for i in case.implementations if i.kind in ("fast", "limit") and not i.on_request]
    arguments = ["--size", "tiny", "--budget", "0.001", "--impl", ",".join(i.name for i in chosen)]
    result = printed(capfd, ["bench", name, *arguments], BENCH)
    assert (result["case"], result["size"]) == (name, "tiny")
    rows = {row["impl"]: row for row in result["rows"]}
    assert list(rows) == [i.name for i in case.implementations if i in chosen or i.kind == "reference"]
    measured = [row for row in rows.values() if row["available"]]
    assert {"reference", "fast"} <= {row["kind"] for row in measured}
    plain = rows[case.reference.name]
    for row in measured:
        assert 0 < row["p20_s"] <= row["median_s"] <= row["p80_s"]
        assert math.isclose(row["time_ratio"], plain["median_s"] / row["median_s"], rel_tol=1e-9)
        assert math.isclose(row["memory_ratio"], plain["peak_bytes"] / row["peak_bytes"], rel_tol=1e-9)
    for row in rows.values():
        if not row["available"]:
            assert row["note"] and row["median_s"] is None and row["time_ratio"] is None


# All cases are proven in tests/measure/test_parity.py; the rows of every case are made by the same code.
@pytest.mark.parametrize("name", ["logprob-logits", "muon-step", "pair-loss"])
def test_prove_prints_the_contracts_object(capfd, name):
    result = printed(capfd, ["prove", name], PROVE)
    case = all_cases()[name]
    fast_paths = {i.name for i in case.implementations if i.kind == "fast"}
    assert {row["case"] for row in result["rows"]} == {name}
    assert {row["impl"] for row in result["rows"]} <= fast_paths
    assert "leanstep" in {row["impl"] for row in result["rows"]}
    assert all(row["error"] <= row["bound"] for row in result["rows"])


@pytest.mark.parametrize("command", ["bench", "prove"])
def test_what_an_implementation_prints_stays_off_standard_output(capfd, command):
    def noisy(tensors, constants):
        print("a banner")
        return fast(tensors, constants)

    register(toy_case("toy-noisy", implementation("noisy", noisy)))
    try:
        budget = ["--budget", "0.001"] if command == "bench" else []
        assert run([command, "toy-noisy", *budget, "--json", "-"]) == 0
    finally:
        unregister("toy-noisy")
    captured = capfd.readouterr()
    assert json.loads(captured.out)["rows"] and "a banner" in captured.err
