"""Source lines for a page: coloured excerpts, and the difference of two scripts."""

from __future__ import annotations

import difflib
import html
import io
import keyword
import tokenize
from pathlib import Path
from typing import Any

# Lines shown before and after the one a finding points at.
CONTEXT = 5
# A training script is read in full to show a few lines; anything larger is not a script.
MAX_BYTES = 2_000_000


def excerpt(file: str, line: int, code: str = "", *, folder: Path | None = None) -> dict[str, Any]:
    """Return lines around `file:line` as `{"start", "line", "lines", "note"}`.

    Falls back to `code` alone if the file cannot be read or has changed at that line.
    """
    alone = without_file(line, code)
    path = Path(file) if folder is None else folder / file
    try:
        if not path.is_file():
            return alone | {"note": f"{file} is no longer readable"}
        if path.stat().st_size > MAX_BYTES:
            return alone | {"note": f"{file} is too large to show"}
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return alone | {"note": f"{file} is no longer readable"}
    if not 1 <= line <= len(lines) or (code.strip() and code.strip() not in lines[line - 1]):
        return alone | {"note": f"{file} has since changed"}
    first = max(1, line - CONTEXT)
    return {"start": first, "line": line, "lines": lines[first - 1 : line + CONTEXT], "note": ""}


def without_file(line: int, code: str) -> dict[str, Any]:
    """Return the excerpt for a file that is not read."""
    return {"start": line, "line": line, "lines": [code], "note": ""}


def colour(lines: list[str]) -> list[str]:
    """Return each line as HTML with `<span class="k|s|c|n">` for keywords, strings, comments and numbers.

    An excerpt may begin inside a bracket or a string: text that cannot be tokenised stays plain.
    """
    marks: list[list[tuple[int, int, str]]] = [[] for _ in lines]
    try:
        for token in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
            kind = _kind(token)
            if not kind:
                continue
            (first, start), (last, stop) = token.start, token.end
            for row in range(first, last + 1):
                begin = start if row == first else 0
                end = stop if row == last else len(lines[row - 1])
                marks[row - 1].append((begin, end, kind))
    except (tokenize.TokenError, SyntaxError):
        # An excerpt often ends inside a statement; the text before is coloured.
        pass
    return [_wrap(line, spans) for line, spans in zip(lines, marks, strict=True)]


def _kind(token: tokenize.TokenInfo) -> str:
    if token.type == tokenize.COMMENT:
        return "c"
    if token.type == tokenize.STRING or tokenize.tok_name[token.type].startswith("FSTRING"):
        return "s"
    if token.type == tokenize.NUMBER:
        return "n"
    return "k" if token.type == tokenize.NAME and keyword.iskeyword(token.string) else ""


def _wrap(line: str, spans: list[tuple[int, int, str]]) -> str:
    out, at = [], 0
    for begin, end, kind in spans:
        if begin < at:
            continue
        out += [html.escape(line[at:begin]), f'<span class="{kind}">{html.escape(line[begin:end])}</span>']
        at = end
    return "".join(out) + html.escape(line[at:])


def difference(before: str, after: str, *, context: int = 2) -> list[dict[str, Any]]:
    """Return the changed lines of two scripts: `{"sign": "+|-| |…", "number", "text"}`, `…` between hunks."""
    old, new = before.splitlines(), after.splitlines()
    rows: list[dict[str, Any]] = []
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(context):
        if rows:
            rows.append({"sign": "…", "number": None, "text": ""})
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                rows += [{"sign": " ", "number": j + 1, "text": new[j]} for j in range(j1, j2)]
                continue
            rows += [{"sign": "-", "number": i + 1, "text": old[i]} for i in range(i1, i2)]
            rows += [{"sign": "+", "number": j + 1, "text": new[j]} for j in range(j1, j2)]
    return rows


def changed_lines(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Return how many lines were removed and added."""
    return sum(row["sign"] == "-" for row in rows), sum(row["sign"] == "+" for row in rows)
