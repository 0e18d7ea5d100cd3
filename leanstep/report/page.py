"""One self-contained HTML page that several commands write into.

The page contains its own data: a JSON block with every section's payload. Adding a section reads that block,
merges the new payload and renders the page again, so `diagnose` and `demo` can write to the same file, in any
order. Scripts and styles are inlined; nothing is fetched.
"""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import leanstep
from leanstep import units
from leanstep.extras import require
from leanstep.files import BadInput, finite, write_text
from leanstep.report import sections

FORMAT = 1
TEMPLATES = Path(__file__).parent / "templates"
_DATA = re.compile(r'<script type="application/json" id="leanstep-data">(.*?)</script>', re.DOTALL)
_EXPECTED = "expected a new file or a leanstep page"

Data = dict[str, Any]


def check_installed() -> None:
    """Raise MissingExtra if the page cannot be written."""
    require("the report page", "report", "jinja2")


def add_section(path: str | Path, kind: str, payload: Data) -> None:
    """Add `payload` (the JSON contract of `leanstep KIND --json`) to the page at `path`, or create the page.

    Existing sections stay; a new result of the same script replaces the old one. A file that
    is not a leanstep page is refused, never overwritten.
    """
    add_sections(path, {kind: payload})


def add_sections(path: str | Path, payloads: dict[str, Data]) -> None:
    """`add_section` for several kinds at once: the page is written once, with all of them or not at all."""
    data = read_page(path)
    is_new = not data["sections"]
    try:
        for kind, payload in payloads.items():
            held = data["sections"].get(kind)
            data["sections"][kind] = sections.merge(kind, held, sections.prepare(kind, payload))
        data["written"] = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        text = render(data)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RecursionError, ArithmeticError):
        if is_new:
            raise
        raise BadInput(f"--html: {path} has unreadable sections; {_EXPECTED}") from None
    write_text(path, text, "--html")


def read_page(path: str | Path) -> Data:
    """Return the data of an existing page, or new data if there is no file (or an empty one)."""
    target = Path(path)
    fresh: Data = {"format": FORMAT, "sections": {}}
    try:
        # A device or a FIFO is written, not read.
        text = target.read_text(encoding="utf-8") if target.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadInput(f"--html: cannot read {path}: {reason}; {_EXPECTED}") from None
    if not text.strip():
        return fresh
    match = _DATA.search(text)
    try:
        data = json.loads(match.group(1)) if match else None
    except (json.JSONDecodeError, RecursionError):
        data = None
    if not isinstance(data, dict) or not _are_objects(data.get("sections")):
        raise BadInput(f"--html: {path} is not a page that leanstep wrote; {_EXPECTED}")
    if data.get("format") != FORMAT:
        raise BadInput(f"--html: {path} has page format {data.get('format')}, this leanstep writes {FORMAT}")
    return data


def _are_objects(sections: Any) -> bool:
    return isinstance(sections, dict) and all(isinstance(section, dict) for section in sections.values())


def render(data: Data) -> str:
    """Return the whole page as text."""
    check_installed()
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "seconds": units.seconds,
        "duration": units.duration,
        "size": units.size,
        "ratio": units.ratio,
        "small": units.small,
        "json_block": json_block,
    }
    return environment.get_template("page.html.j2").render(
        view=sections.view(data["sections"]),
        data=data,
        written=data.get("written", ""),
        version=leanstep.__version__,
        style=(TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=(TEMPLATES / "page.js").read_text(encoding="utf-8"),
    )


def json_block(value: Any) -> Any:
    """Return JSON that cannot end its script element, whatever strings it contains. NaN becomes null."""
    from markupsafe import Markup

    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # U+2028 and U+2029 are newlines to some parsers; "<" could open a comment or close the element.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
