"""`prove --splits` finds the arguments that split a batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from leanstep.files import BadInput
from leanstep.prove.splits import choose_splits

SCRIPT = """parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--accumulation_steps", type=int, default=2)
"""


def test_splits_come_from_defaults_or_arguments(tmp_path: Path):
    file = tmp_path / "train.py"
    file.write_text(SCRIPT)
    splits, rest = choose_splits(str(file), ["--lr", "1"])
    assert splits == [f"--batch-size {b} --accumulation_steps {n}" for b, n in ((8, 1), (4, 2), (1, 8))]
    assert rest == ["--lr", "1"]
    splits, rest = choose_splits(str(file), ["--batch-size=6", "--accumulation_steps", "1", "--lr", "1"])
    assert splits[0] == "--batch-size 6 --accumulation_steps 1" and rest == ["--lr", "1"]
    file.write_text("from transformers import TrainingArguments\n")
    splits, _ = choose_splits(str(file), [])
    assert splits[1] == "--per_device_train_batch_size 4 --gradient_accumulation_steps 2"


def test_a_script_without_the_arguments_is_refused(tmp_path: Path):
    file = tmp_path / "train.py"
    file.write_text("batch_size = 4\n")
    with pytest.raises(BadInput, match="has no argument for the batch size"):
        choose_splits(str(file), [])
