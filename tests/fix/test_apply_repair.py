"""A model that computes its loss from labels gets apply_leanstep where it is made; nothing runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("libcst", reason="libcst is not installed")

from leanstep.diagnose.advice import APPLY
from leanstep.fix.offers import changed_files, users_line
from leanstep.fix.repairs import Project, repairs_of
from leanstep.fix.source_edits import NotUnderstood
from leanstep.tape.lines import Line

BEFORE = """import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("name")


def make(config, name):
    if name:
        model = AutoModelForCausalLM.from_pretrained(
            name,
        )
    else:
        model = AutoModelForCausalLM.from_config(config)  # from scratch
    return model
"""
AFTER = """import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from leanstep.integrations.transformers import apply_leanstep

tokenizer = AutoTokenizer.from_pretrained("name")


def make(config, name):
    if name:
        model = AutoModelForCausalLM.from_pretrained(
            name,
        )
        apply_leanstep(model)
    else:
        model = AutoModelForCausalLM.from_config(config)  # from scratch
        apply_leanstep(model)
    return model
"""


def repaired(tmp_path: Path, text: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(text, encoding="utf-8")
    line = SimpleNamespace(file="site-packages/transformers/loss/loss_utils.py", number=42)
    finding = SimpleNamespace(rule="full-vocab", line=line, leanstep=APPLY)
    (variant,) = repairs_of(Project(path, [path]), finding)  # type: ignore[arg-type]
    return changed_files(variant.edits)[path].decode()


def test_a_line_behind_every_place_where_the_model_is_made(tmp_path: Path):
    assert repaired(tmp_path, BEFORE) == AFTER


@pytest.mark.parametrize(
    ("made", "name"),
    [
        ("model = transformers.LlamaForCausalLM(config)", "model"),
        ("self.model = transformers.AutoModelForCausalLM.from_pretrained('x')", "self.model"),
    ],
)
def test_classes_and_attributes(tmp_path: Path, made: str, name: str):
    assert f"{made}\napply_leanstep({name})\n" in repaired(tmp_path, f"import transformers\n{made}\n")


@pytest.mark.parametrize(
    "made",
    [
        "model = transformers.AutoModel.from_pretrained('x')",
        "model = Own.from_pretrained('x')",
        "model, tokenizer = load()",
        "models.append(transformers.LlamaForCausalLM(config))",
    ],
)
def test_what_is_no_assignment_of_a_causal_lm_is_left_alone(tmp_path: Path, made: str):
    with pytest.raises(NotUnderstood, match="apply_leanstep"):
        repaired(tmp_path, f"import transformers\n{made}\n")


def test_a_finding_in_a_library_is_shown_at_the_users_line():
    library, user = Line("site-packages/transformers/loss.py", 42, "loss"), Line("train.py", 7, "main")
    finding = SimpleNamespace(line=SimpleNamespace(library=True), callers=Counter({user: 2}))
    assert users_line(finding) is user  # type: ignore[arg-type]
    finding = SimpleNamespace(line=user, callers=Counter({library: 2}))
    assert users_line(finding) is user  # type: ignore[arg-type]
