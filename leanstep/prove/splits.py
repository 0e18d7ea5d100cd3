"""Choose splits of a batch for `prove train.py --splits`, from arguments that the script has."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from leanstep.files import BadInput

SIZES = ("per_device_train_batch_size", "batch_size", "micro_batch_size", "device_batch_size")
ACCUMULATIONS = (
    "gradient_accumulation_steps",
    "accumulation_steps",
    "grad_accum_steps",
    "accumulate_grad_batches",
)
# What transformers' TrainingArguments has if the script's arguments are parsed into it.
_TRAINER = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
MOST_SPLITS = 3


def choose_splits(script: str, argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return script arguments, one string per split, and the other arguments.

    The batch is what the script would use: its size times its accumulation steps.
    """
    declared = _declared(script)
    rest = list(argv)
    pairs: list[tuple[str, int]] = []
    for names, other in ((SIZES, 0), (ACCUMULATIONS, 1)):
        flag, value, rest = _given(names, rest)
        if flag is None:
            name = next((name for name in declared if name.replace("-", "_") in names), None)
            if name is None:
                raise BadInput(
                    f"--splits: {Path(script).name} has no argument for the "
                    f"{'batch size' if not other else 'accumulation steps'}, such as --{names[0]}; use --args"
                )
            flag, value = f"--{name}", declared[name]
        if value is None:
            raise BadInput(f"--splits: expected a value for {flag}: add {flag} N behind --")
        pairs.append((flag, value))
    (size_flag, size), (steps_flag, steps) = pairs
    batch = size * steps
    if batch < 2:
        raise BadInput(f"--splits: a batch of {batch} cannot be split; expected {size_flag} of at least 2")
    counts = [n for n in range(1, batch + 1) if batch % n == 0]
    # The whole batch, halves, and the smallest micro-batches up to eight.
    chosen = dict.fromkeys([1, counts[1], max(n for n in counts if n <= max(8, counts[1]))])
    splits = [f"{size_flag} {batch // n} {steps_flag} {n}" for n in list(chosen)[:MOST_SPLITS]]
    return splits, rest


def _given(names: Sequence[str], argv: list[str]) -> tuple[str | None, int | None, list[str]]:
    """Find `--name 8` or `--name=8`; return the flag, its value and the other arguments."""
    for place, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag.lstrip("-").replace("-", "_") not in names or not flag.startswith("-"):
            continue
        taken = 1 if equals else 2
        value = value if equals else argv[place + 1] if place + 1 < len(argv) else ""
        return flag, int(value) if value.isdigit() else None, argv[:place] + argv[place + taken :]
    return None, None, argv


def _declared(script: str) -> dict[str, int | None]:
    """Return the arguments that the script declares, by name, with their defaults where they are numbers."""
    path = Path(script)
    path = path / "train.py" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        tree = ast.parse(text)
    except (OSError, SyntaxError):
        return {}
    options: dict[str, int | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            flags = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            default = next((k.value for k in node.keywords if k.arg == "default"), None)
            value = default.value if isinstance(default, ast.Constant) else None
            for flag in flags:
                if flag.startswith("--"):
                    options[flag[2:]] = value if isinstance(value, int) else None
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            options[node.target.id] = value if isinstance(value, int) else None
    if "TrainingArguments" in text or "HfArgumentParser" in text or "TrlParser" in text:
        return {**_TRAINER, **options}
    return options
