"""Extract the code in docstrings and pages, for the tests that run it."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path


def code_blocks(doc: str) -> list[str]:
    """Return the indented blocks after lines that begin with Equivalent or Example."""
    pattern = r"^(?:Equivalent|Example)[^\n]*:\n((?:    [^\n]*\n|\n(?=    ))+)"
    return [textwrap.dedent(block) for block in re.findall(pattern, doc + "\n", re.M)]


def python_blocks(page: Path) -> list[str]:
    """Return the Python code blocks of a Markdown page."""
    parts = page.read_text(encoding="utf-8").split("```python\n")[1:]
    return [part.partition("```")[0] for part in parts]
