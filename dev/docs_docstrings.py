"""Code in docstrings as code on the API pages: a griffe extension that mkdocs.yml names.

Docstrings have indented code under lines such as "Equivalent to:", and >>> sessions. Markdown needs fences.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

# Sections that griffe reads by itself.
_READ_BY_GRIFFE = ("Args:", "Returns:", "Raises:", "Yields:", "Attributes:")
_SECTION = re.compile(r"^(?P<title>[A-Z][^\n]*:)\n(?P<code>(?:    [^\n]*\n?|\n(?=    ))+)", re.MULTILINE)
_SESSION = re.compile(r"(?:^>>> [^\n]*(?:\n(?!\n)[^\n]*)*)", re.MULTILINE)


def with_fences(text: str) -> str:
    """The docstring with its code blocks fenced.

    >>> print(with_fences("Sum.\\n\\nEquivalent to:\\n    a + b").replace("`", "'"))
    Sum.
    <BLANKLINE>
    Equivalent to:
    <BLANKLINE>
    '''python
    a + b
    '''
    <BLANKLINE>
    """

    def fenced(match: re.Match[str]) -> str:
        if match["title"] in _READ_BY_GRIFFE:
            return match[0]
        code = textwrap.dedent(match["code"]).strip("\n")
        return f"{match['title']}\n\n```python\n{code}\n```\n\n"

    text = _SECTION.sub(fenced, text)
    return text if "```" in text else _SESSION.sub(lambda m: f"```pycon\n{m[0]}\n```", text)


class FencedCode(griffe.Extension):
    """Applies `with_fences` to every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_fences(obj.docstring.value)
