"""Patterns that make text hard to read: `python dev/prose.py` lists them and exits 1 if there are any.

Reads Markdown outside code blocks, comments, docstrings and messages in Python, YAML, TOML, the Makefile and
shell scripts, and the text of HTML templates. Files or folders named on the command line replace the default
list. The rules are the ones that readers stumbled over most often; they
are no substitute for reading. A line that ends in `prose: ignore` is left alone.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READ_BY_PEOPLE = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "SKILL.md",
    "llms.txt",
    "CITATION.cff",
    "Makefile",
    "action.yml",
    "mkdocs.yml",
    "pyproject.toml",
    ".pre-commit-hooks.yaml",
    ".github",
    ".ci/run",
    "docs",
    "leanstep",
    "examples",
    "recipes",
    "benchmarks",
    "dev",
)
# Practice scripts that imitate other people's code, the patterns themselves, and printed verdicts.
SKIPPED = ("tests/diagnose/steps", "dev/prose.py", "docs/museum.md")

UNITS = (
    r"ms|µs|us|ns|seconds|minutes|GiB|MiB|KiB|GB|MB|bytes|FLOPs?|kernels|once|twice|times|tokens|rows|copies"
    r"|(?:\d+|one|two|three) (?:calls?|launch(?:es)?|waits?|syncs?|ops?|lines?|blocks?|kernels?)"
)
WHOLES = (
    "step|row|token|call|block|channel|thread|kernel|line|rank|second|minute|tile|column|op|launch|layer|sequence"
    "|group|update|matrix|parameter|element|device|micro-batch|iteration|sample"
)
RULES: tuple[tuple[str, str], ...] = (
    (rf"\b(?:{UNITS}) an? (?:{WHOLES})\b", 'write "per": ms per step, one kernel per row'),
    (
        r"\b(?:GPU|device|machine|tensor|memory|row)s? (?:that|which) (?:is|are) not there\b",
        'write "simulated", "missing"',
    ),
    (r"\bin (?:other|bad|good) company\b", 'write "in another batch"'),
    (r"\bdepends? on the cut\b", 'write "depends on how the batch is split"'),
    (r"\b(?:is|are|was|were) born\b", 'write "allocated" or "created"'),
    (r"\b(?:fp64|float64|a|the|its) twins?\b", 'write "fp64 reference" or "copy"'),
    (r"\b(?:lies|lie) (?!detector)", 'write "is", "is stored", "is in"'),
    (r"\b(?:stands?) (?:in|on|beside|there|for itself|before|after|at|under)\b", 'write "is"'),
    (r"\btravels?\b|\bgo(?:es)? home\b|\bon (?:its|their) way\b", 'write "is copied", "is sent"'),
    (r"\b(?:minds|remembers|remembered|wants)\b", 'write what the code does: "stores", "needs", "expects"'),
    (r"\bmakes? room\b|\bhas room\b|\bhave room\b|\broom for\b", 'write "space", "fits"'),
    (
        r"\b(?:told|kept|shown|reported|counted|captured|stated|listed|printed|stored|held) apart\b",
        'write "separately"',
    ),
    (r"\bthe door\b|\ba door\b|\bdoors\b", "name the function"),
    (r"\b(?:nobody|somebody|everybody)\b", "name who or what does it, or use the passive"),
    (r"\b(?:what|which) comes? back\b", 'write "the result"'),
    (r"\bone after the other\b", 'write "in turn" or "one at a time"'),
    (r"\bneed no thought\b|\bneeds no thought\b", 'write "mechanical"'),
    (r"\bstrangers?(?:'s?)?\b", 'write "third-party" or "somebody else\'s"'),
    (r"\bof another kind\b|\bof the same kind as\b", "name the kind"),
    (r"\bas long as (?:one|it) likes\b|\bat home\b|\bby hand of\b", "write it plainly"),
    (r"\b(?:die|dies|died)\b(?! (?:with|by) (?:exit|signal))", 'write "exits", "ends", "is freed"'),
    (r"\bnot seen (?:yet|before)\b(?! by)", 'write "new" or "unseen"'),
)
# Only in pages, templates and YAML: code has its own names and a longer history.
PAGE_RULES: tuple[tuple[str, str], ...] = (
    (r"\bbesides?\b", 'write "next to", "in addition to" or "compared with"'),
    (r"\bat once\b", 'write "immediately" or "at the same time"'),
    (r"\bdearest\b", 'write "most expensive"'),
    (r"\bthe (?:fp64|float64) truth\b", 'write "fp64 reference"'),
    (
        r"\bhands? over\b|\b(?:is|are) handed\b|\bheld against\b|\bhears\b",
        'write "passes", "is compared with"',
    ),
    (
        r"\blabelled\b|\bnormalis|\borthogonalis|\brecognis|\bsummaris|\boptimis[ei]|\bvectoris|\butilisation",
        "American spelling: -ize",
    ),
    (r"\bcolours?\b|\bbehaviour|\bneighbour|\blicence\b|\bmodelled\b|\bcancelled\b", "American spelling"),
)
PATTERNS, PAGE_PATTERNS = (
    [(re.compile(pattern, re.IGNORECASE), advice) for pattern, advice in rules]
    for rules in (RULES, PAGE_RULES)
)
VAGUE_NAMES = {"found", "kept", "made", "given"}
IGNORE = "prose: ignore"
FENCE = re.compile(r"^\s*(```|~~~)")
INLINE_CODE = re.compile(r"`[^`]*`")


def violations(paths: list[Path]) -> list[str]:
    """One line per broken rule: file, line, what was read and what to write."""
    lines = []
    for path in text_files(paths):
        text = path.read_text(encoding="utf-8")
        pieces = READERS.get(path.suffix, plain_lines)(text)
        ignored = {number for number, line in enumerate(text.splitlines(), 1) if IGNORE in line}
        patterns = PATTERNS if path.suffix == ".py" else PATTERNS + PAGE_PATTERNS
        problems = [*broken_patterns(pieces, patterns), *(vague_names(text) if path.suffix == ".py" else ())]
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        lines += [
            f"{shown}:{number}: {problem}" for number, problem in sorted(problems) if number not in ignored
        ]
    return lines


def text_files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        files = sorted(f for f in path.rglob("*") if f.suffix in READERS) if path.is_dir() else [path]
        for file in files:
            if not any(skipped in file.as_posix() for skipped in SKIPPED):
                yield file


def markdown_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines outside code blocks, without inline code."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            yield number, INLINE_CODE.sub("``", line)


def template_lines(text: str) -> Iterator[tuple[int, str]]:
    """The text of an HTML template: no tags, no expressions, no styles and scripts."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        inside = (inside or re.match(r"\s*<(?:style|script)\b", line) is not None) and not re.search(
            r"</(?:style|script)>", line
        )
        if not inside:
            yield number, re.sub(r"\{[%#].*?[%#]\}|<[^<>]*>", " ", line)


def plain_lines(text: str) -> Iterator[tuple[int, str]]:
    """Every line, without inline code: YAML, TOML, shell."""
    for number, line in enumerate(text.splitlines(), 1):
        yield number, INLINE_CODE.sub("``", line)


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Comments, docstrings and string literals of more than one word, line by line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], INLINE_CODE.sub("``", token.string)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            # The parts of an f-string share its first line in older versions of Python.
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, INLINE_CODE.sub("``", line)


READERS = {
    ".md": markdown_lines,
    ".py": python_texts,
    ".j2": template_lines,
    **dict.fromkeys((".yml", ".yaml", ".toml", ".cff", ".txt", ".sh"), plain_lines),
}


def broken_patterns(
    pieces: Iterator[tuple[int, str]], patterns: list[tuple[re.Pattern[str], str]]
) -> Iterator[tuple[int, str]]:
    for number, line in pieces:
        for pattern, advice in patterns:
            if match := pattern.search(line):
                yield number, f'"{match.group().strip()}": {advice}'


def vague_names(source: str) -> Iterator[tuple[int, str]]:
    """Variables, parameters, attributes and functions whose names say nothing about what they hold."""
    for node in ast.walk(ast.parse(source)):
        name = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name
        if name in VAGUE_NAMES:
            yield node.lineno, f'name "{name}": say what it holds'


def main(arguments: list[str]) -> int:
    paths = [Path(a).resolve() for a in arguments] or [ROOT / name for name in READ_BY_PEOPLE]
    lines = violations(paths)
    print("\n".join(lines) if lines else "prose: nothing to say")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
