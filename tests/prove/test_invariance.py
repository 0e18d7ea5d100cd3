"""`prove --invariant` names the line of planted faults and accepts rows of elementwise ops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from prove.captured_scripts import SCRIPTS, job

from leanstep.cli import run
from leanstep.prove.invariance import row_invariance, script_invariance

FAULTS = {
    "product": ("alone", "by different ops"),
    "statistic": ("alone", "whole batch"),
    "chunks": ("alone", "the value itself"),
    "padding": ("with padding behind it", "the value itself"),
    "norm": ("alone", "whole batch"),
    "read": ("alone", "whole batch"),
    "branch": ("alone", "by ops that only the original batch runs"),
    "helper": ("alone", "the value itself"),
}


def fault_line(fault: str) -> int:
    text = (SCRIPTS / "rows.py").read_text().splitlines()
    return next(n for n, line in enumerate(text, 1) if line.endswith(f"# FAULT {fault}"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_by_its_line(fault: str):
    proof = script_invariance(job("rows.py", "--fault", fault))
    assert not proof.ok and proof.problem is None
    first, (variant, kind) = proof.rows[0], FAULTS[fault]
    assert (Path(first.file).name, first.line) == ("rows.py", fault_line(fault)), first
    assert kind in first.kind
    assert variant in {row.variant for row in proof.rows}


def test_rows_of_elementwise_ops_keep_their_bits():
    proof = script_invariance(job("rows.py"))
    assert proof.ok, proof.sentence()
    assert proof.variants == 6 and proof.ops >= 4


def test_other_ops_for_another_batch_are_no_fault():
    proof = script_invariance(job("rows.py", "--fault", "honest"))
    assert proof.ok, proof.sentence()
    assert any("only ops of both runs are compared" in note for note in proof.notes)


def test_a_function_of_tensors():
    proof = row_invariance(lambda x: (x - x.mean(0)).tanh(), torch.randn(4, 6))
    assert proof.rows[0].op == "mean" and proof.rows[0].kind.startswith("the value itself")
    assert row_invariance(lambda x, y: x.sin() * y, torch.randn(4, 6), torch.randn(4, 1)).ok
    with pytest.raises(ValueError, match="args: expected at least one tensor"):
        row_invariance(lambda: None)


def test_a_variant_that_the_model_refuses_is_skipped():
    def short(tokens):
        if tokens.shape[1] > 9:
            raise IndexError("no such position")
        return tokens.float().sin()

    proof = row_invariance(short, torch.arange(36).view(4, 9))
    assert proof.ok and proof.variants == 5
    assert proof.notes == ["with padding behind it: skipped, the model raised IndexError: no such position"]


def test_from_the_command_line(tmp_path: Path, capfd):
    script = str(SCRIPTS / "rows.py")
    assert run(["prove", script, "--invariant", "--", "--fault", "statistic"]) == 1
    captured = capfd.readouterr()
    assert "x.mean((0, 1))" in captured.out and captured.out.splitlines()[-1].startswith("rows.py:")
    assert run(["prove", script, "--invariant"]) == 0
    empty = tmp_path / "empty.py"
    empty.write_text("print('no model')\n")
    assert run(["prove", str(empty), "--invariant"]) == 2
    assert "calls no model with a batch before its first backward()" in capfd.readouterr().err
