"""Text, also from strangers (traces, names in a repository), on a terminal, in Markdown and in CI logs."""

from __future__ import annotations

import textwrap

# A line that begins like this, after spaces, is a command to GitHub's and Azure's runners.
_COMMANDS = ("::", "##[", "##vso[")


def printable(text: str) -> str:
    """`text` on one line; control and formatting characters become escapes such as `\\x1b` and `\\n`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def for_terminal(text: str) -> str:
    """Several lines without control characters and without workflow commands."""
    return "\n".join(_terminal_line(line) for line in text.split("\n"))


def _terminal_line(line: str) -> str:
    line = "\t".join(printable(part) for part in line.split("\t"))
    words = line.lstrip()
    return line[: len(line) - len(words)] + "\\" + words if words.startswith(_COMMANDS) else line


def clip(text: str, width: int) -> str:
    """At most `width` characters; an ellipsis says that more were there."""
    return text if len(text) <= width else text[: max(width - 1, 1)] + "…"


def fold(text: str, width: int) -> str:
    """Break lines that are longer than `width` at spaces; what follows is indented by four more columns."""
    lines: list[str] = []
    for line in text.splitlines():
        if len(line) <= width:
            lines.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        # A path stays whole, so that it can be opened from the terminal.
        lines += textwrap.wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


def for_markdown(text: str) -> str:
    """A cell or a paragraph: no HTML, no new cell, no new line."""
    text = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text.replace("|", "\\|").replace("`", "\\`")


def code_for_markdown(text: str) -> str:
    """A code span that its content cannot leave; HTML inside a code span is shown, not read."""
    return "`" + printable(text).replace("`", "'").replace("|", "\\|") + "`"


def for_workflow(text: str, property: bool = False) -> str:
    """The message of a GitHub workflow command, or one of its properties."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text.replace(":", "%3A").replace(",", "%2C") if property else text
