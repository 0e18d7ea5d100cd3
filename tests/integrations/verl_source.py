"""Load verl's functions from its source: importing the package needs many dependencies."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch


def verl_functions(path: str, names: list[str], **globals_: Any) -> SimpleNamespace:
    """Return the functions `names` of a file of verl, without decorators; `globals_` extend their namespace.

    Skips the test if verl is not installed.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None or spec.origin is None:
        pytest.skip("verl is not installed")
    file = Path(spec.origin).parent / path
    space = {"torch": torch, "math": math, "Optional": Optional, "Any": Any, **globals_}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list = []
        elif not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        with contextlib.suppress(NameError, ImportError):
            exec(compile(ast.Module([node], []), str(file), "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


def masked_functions() -> SimpleNamespace:
    """`masked_sum` and `masked_mean`, which its losses call as `verl_F`."""
    return verl_functions("utils/torch_functional.py", ["masked_sum", "masked_mean"])


def agg_loss() -> Any:
    """Its aggregation of a matrix of token losses."""
    return verl_functions("trainer/ppo/core_algos.py", ["agg_loss"], verl_F=masked_functions()).agg_loss
