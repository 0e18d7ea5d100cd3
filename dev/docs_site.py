"""The pages of the site that are generated: rules, API, and a gallery of report pages.

mkdocs calls the `on_*` functions (mkdocs.yml names this file as a hook). Nothing is copied by hand: rule
pages come from the rules, API pages from docstrings, report pages from the files in results/.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Page -> modules whose public names it lists.
API = {
    "heads": ["leanstep.heads"],
    "muon": ["leanstep.muon"],
    "lens": ["leanstep.lens"],
    "diagnose": ["leanstep.diagnose", "leanstep.pytest_plugin"],
    "prove": ["leanstep.prove"],
    "transformers": ["leanstep.integrations.transformers", "leanstep.integrations.causal_lm"],
    "trl": ["leanstep.integrations.trl"],
}
# File in site/gallery -> title, what it shows, result files by section.
REPORTS = {
    "demo": ("The demo", "`leanstep demo`: three training steps before and after", {"": ["demo.json"]}),
}
_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]*)(?:#[^)]*)?\)")


def on_config(config: Any) -> Any:
    """Fill the navigation's lists of generated pages."""
    from leanstep.diagnose.rules import RULES

    for part in config.nav:
        if "Rules" in part:
            part["Rules"] = ["rules/index.md", *({name: f"rules/{name}.md"} for name in RULES)]
        for entry in part.get("Library", []):
            if "API" in entry:
                entry["API"] = ["api/index.md", *({name: f"api/{name}.md"} for name in API)]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    from mkdocs.structure.files import File

    pages = {**rule_pages(), **api_pages(), "gallery.md": gallery_page()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for name, (_, _, sections) in REPORTS.items():
        text = report_page(sections)
        if text is not None:
            files.append(File.generated(config, f"gallery/{name}.html", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A link to a file of the repository outside docs/ becomes its path: the site has no such page."""
    return _LINK.sub(lambda link: _outside(link[1], link[2]), markdown)


def _outside(text: str, target: str) -> str:
    path = target.removeprefix("../").rstrip("/")
    return text if path in text else f"{text} (`{path}` in the repository)"


def rule_pages() -> dict[str, str]:
    """One page per rule, and a list of them."""
    from leanstep.diagnose import explain
    from leanstep.diagnose.rules import RULES

    pages = {f"rules/{name}.md": explain.as_markdown(name) for name in RULES}
    lines = [
        "# Rules",
        "",
        "`leanstep diagnose --explain all` prints this list, `--explain RULE` a page.",
        "",
    ]
    lines += ["| rule | fires when | do |", "|---|---|---|"]
    for entry in map(explain.as_dict, RULES):
        name = entry["rule"]
        lines.append(f"| [{name}]({name}.md) | {entry['fires_when']} | {entry['short_fix']} |")
    return {"rules/index.md": "\n".join(lines) + "\n", **pages}


def api_pages() -> dict[str, str]:
    lines = ["# API", "", "Every public name with its docstring, by package.", ""]
    pages = {}
    for name, modules in API.items():
        lines.append(f"- [{', '.join(modules)}]({name}.md)")
        pages[f"api/{name}.md"] = f"# {name}\n\n" + "\n\n".join(f"::: {module}" for module in modules) + "\n"
    return {"api/index.md": "\n".join(lines) + "\n", **pages}


def gallery_page() -> str:
    lines = [
        "# Report gallery",
        "",
        "Pages that leanstep's commands write with `--html`. Each is one file without",
    ]
    lines += ["scripts or styles from elsewhere.", "", "| page | shows |", "|---|---|"]
    for name, (title, shows, sections) in REPORTS.items():
        if _result_files(sections):
            # The address on the site; the file exists only there.
            lines.append(f'| <a href="{name}.html">{title}</a> | {shows} |')
    return "\n".join(lines) + "\n"


def _result_files(sections: dict[str, list[str]]) -> list[tuple[str, Path]]:
    """(section, file) of the results that are there."""
    return [
        (section, path)
        for section, patterns in sections.items()
        for pattern in patterns
        for path in sorted((ROOT / "results").glob(pattern))
    ]


def report_page(sections: dict[str, list[str]]) -> str | None:
    """The report page of these results, as the commands write it; None without results."""
    from leanstep.report.page import add_sections

    payloads: dict[str, Any] = {}
    for section, path in _result_files(sections):
        content = json.loads(path.read_text(encoding="utf-8"))
        result = content.get("result", content)
        if section == "":
            payloads |= result
        elif section == "bench":
            payloads.setdefault("bench", {"results": []})["results"] += _bench_results(result)
        elif section == "published":
            payloads.setdefault("published", {"rows": []})["rows"].append(result)
    if not payloads:
        return None
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        add_sections(page, payloads)
        return page.read_text(encoding="utf-8")


def _bench_results(result: dict[str, Any]) -> list[dict[str, Any]]:
    return result["results"] if "results" in result else [result]
