"""Source lines: excerpts that admit when the file changed, colours that never break the text, differences."""

from __future__ import annotations

import html
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from leanstep.report.excerpts import changed_lines, colour, difference, excerpt


def write(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_excerpt_surrounds_the_line(tmp_path: Path):
    file = write(tmp_path, "\n".join(f"x{i} = {i}" for i in range(1, 31)))
    found = excerpt(file, 12, "x12 = 12")
    assert found["start"] == 7 and found["line"] == 12 and found["note"] == ""
    assert found["lines"] == [f"x{i} = {i}" for i in range(7, 18)]


def test_changed_or_missing_source_shows_the_recorded_code(tmp_path: Path):
    file = write(tmp_path, "a = 1\n")
    for name, line in ((file, 1), (file, 99), (str(tmp_path / "gone.py"), 1)):
        found = excerpt(name, line, "logits = head(hidden)")
        assert found["lines"] == ["logits = head(hidden)"] and found["note"]


def test_colours_mark_keywords_strings_comments_and_numbers():
    (line,) = colour(["return f('<b>', 3.5)  # why"])
    assert '<span class="k">return</span>' in line
    assert "&lt;b&gt;" in line and "<b>" not in line
    assert '<span class="n">3.5</span>' in line and '<span class="c"># why</span>' in line


@given(
    st.lists(
        st.text(
            st.characters(codec="utf-8", exclude_characters="\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\x00")
        ),
        max_size=6,
    )
)
def test_colours_never_change_the_text(lines: list[str]):
    shown = [html.unescape(re.sub(r'</?span(?: class="\w")?>', "", line)) for line in colour(lines)]
    assert shown == lines


def test_difference_shows_hunks_with_numbers():
    before = "\n".join("abcdefghijkl")
    after = before.replace("b", "B").replace("k", "K")
    rows = difference(before, after, context=1)
    assert [row["sign"] for row in rows] == [" ", "-", "+", " ", "…", " ", "-", "+", " "]
    assert [(row["number"], row["text"]) for row in rows if row["sign"] == "+"] == [(2, "B"), (11, "K")]
    assert changed_lines(rows) == (2, 2)
