"""The prose lint reports its patterns, ignores the rest, and finds nothing in this project."""

from __future__ import annotations

from pathlib import Path

import pytest
from tool_loader import load_tool

prose = load_tool("prose")


def problems(tmp_path: Path, name: str, text: str) -> list[str]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return [line.partition(": ")[2] for line in prose.violations([path])]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It takes 4 ms a step.", "ms a step"),
        ("A GPU that is not there.", "GPU that is not there"),
        ("The fp64 twin of the script.", "fp64 twin"),
        ("A gradient that nobody reads.", "nobody"),
        ("The context is shown apart.", "shown apart"),
    ],
)
def test_a_pattern_is_found_in_pages_comments_docstrings_and_messages(tmp_path, text, words):
    for name, source in (
        ("page.md", f"# Title\n\n{text}\n"),
        ("comment.py", f"x = 1  # {text}\n"),
        ("docstring.py", f'def f():\n    """{text}"""\n'),
        ("message.py", f'raise ValueError("{text}")\n'),
    ):
        assert any(words in line for line in problems(tmp_path, name, source)), name


def test_code_in_pages_and_lines_marked_to_be_ignored_are_left_alone(tmp_path):
    assert not problems(tmp_path, "page.md", "```\n4 ms a step\n```\n\nCalled `the fp64 twin`.\n")
    assert not problems(tmp_path, "code.py", "x = 1  # 4 ms a step  # prose: ignore\n")
    assert not problems(tmp_path, "verb.py", "# It launches a kernel and calls an op.\n")
