"""Load scripts of `dev/`, which are scripts outside the package, by path and under their own names."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).parents[1] / "dev"


def load_tool(name: str) -> ModuleType:
    """Return the module of `dev/NAME.py`."""
    spec = importlib.util.spec_from_file_location(f"leanstep_dev_{name}", TOOLS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
