"""Escape untrusted text (traces, names in a repository) for terminals, Markdown and CI logs."""

from __future__ import annotations

import textwrap

# GitHub's and Azure's runners treat a line that begins like this, after spaces, as a command.
_COMMANDS = ("::", "##[", "##vso[")


def printable(text: str) -> str:
    """Return `text` on one line; control characters become escapes such as `\\x1b` and `\\n`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def for_terminal(text: str) -> str:
    """Return the lines of `text` without control characters and workflow commands."""
    return "\n".join(_terminal_line(line) for line in text.split("\n"))


def _terminal_line(line: str) -> str:
    line = "\t".join(printable(part) for part in line.split("\t"))
    words = line.lstrip()
    return line[: len(line) - len(words)] + "\\" + words if words.startswith(_COMMANDS) else line


def clip(text: str, width: int) -> str:
    """Return at most `width` characters; an ellipsis marks truncated text."""
    return text if len(text) <= width else text[: max(width - 1, 1)] + "…"


def fold(text: str, width: int) -> str:
    """Break lines longer than `width` at spaces; continuation lines are indented by four more columns."""
    lines: list[str] = []
    for line in text.splitlines():
        if len(line) <= width:
            lines.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        # Do not break paths, so that they can be opened from the terminal.
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


def for_workflow(text: str, property: bool = False) -> str:
    """Escape the message of a GitHub workflow command, or one of its properties."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text.replace(":", "%3A").replace(",", "%2C") if property else text
