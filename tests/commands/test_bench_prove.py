"""bench and prove on the command line: exit codes, one-line errors, options of --drift."""

from __future__ import annotations

import pytest

from leanstep.cli import run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "logprob-linear"], "bench: expected two scripts, got logprob-linear"),
        (["prove", "logprob-linear"], "prove: expected a script, got logprob-linear"),
        (["bench"], "Missing argument"),
        (["train", "gpt"], "No such command 'train'"),
        (["prove", "a.py", "b.py", "--lr", "1"], "leanstep prove before.py after.py -- --lr ..."),
    ],
)
def test_what_went_is_an_error_in_one_line(capsys, arguments, said):
    assert run(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("leanstep: ") and said in line


@pytest.mark.parametrize(
    ("options", "compared", "trained"),
    [(["--drift"], 2, 60), (["--drift", "--steps", "9"], 2, 9), (["--steps", "3"], 3, None)],
)
def test_drift_of_two_scripts_trains_long_enough_to_see_one(
    tmp_path, monkeypatch, capsys, options, compared, trained
):
    from leanstep.prove import compare

    seen = {}

    def same_update(before, after, **_):
        seen["compared"] = before.steps, after.steps
        return compare.PairProof(before.label, after.label)

    def drift(before, after, *, runs, fork):
        seen["trained"] = before.steps, after.steps
        numbers = {"shift": 0.0, "shift_low": 0.0, "shift_high": 0.0, "p_value": 1.0, "detectable_shift": 0.1}
        return {"runs": runs, "steps": before.steps, "first_divergence": None, "ok": True, **numbers}

    monkeypatch.setattr(compare, "prove_scripts", same_update)
    monkeypatch.setattr(compare, "prove_drift", drift)
    monkeypatch.setattr(compare.PairProof, "ok", property(lambda self: True))
    scripts = []
    for name in ("before.py", "after.py"):
        (tmp_path / name).write_text("import torch\n")
        scripts.append(str(tmp_path / name))
    run(["prove", *scripts, *options])
    assert seen["compared"] == (compared, compared)
    assert seen.get("trained") == (None if trained is None else (trained, trained))
    assert (trained is None) or f"loss after {trained} steps, 8 paired runs" in capsys.readouterr().out


def test_drift_of_two_scripts_needs_two_runs(tmp_path, capsys):
    (tmp_path / "a.py").write_text("import torch\n")
    assert run(["prove", str(tmp_path / "a.py"), str(tmp_path / "a.py"), "--drift", "--runs", "1"]) == 2
    assert "--runs: expected at least 2 paired runs, got 1" in capsys.readouterr().err
