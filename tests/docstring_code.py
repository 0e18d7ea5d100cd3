"""The code in docstrings, for the tests that run it."""

from __future__ import annotations

import re
import textwrap


def code_blocks(doc: str) -> list[str]:
    """The indented blocks behind lines that begin with Equivalent or Example."""
    pattern = r"^(?:Equivalent|Example)[^\n]*:\n((?:    [^\n]*\n|\n(?=    ))+)"
    return [textwrap.dedent(block) for block in re.findall(pattern, doc + "\n", re.M)]
