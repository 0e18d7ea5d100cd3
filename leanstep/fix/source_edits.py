"""Queries and byte-level edits of a source file.

libcst parses the file; an edit replaces a span of bytes. Everything else stays the same, byte for byte. Edits
of several repairs can be combined if they do not overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import libcst as cst
from libcst.metadata import (
    ByteSpanPositionProvider,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    QualifiedNameProvider,
)

Node = TypeVar("Node", bound=cst.CSTNode)
Statement: TypeAlias = "cst.SimpleStatementLine | cst.BaseCompoundStatement"
# The import lines that repairs write: name -> module.
IMPORTS = {
    "apply_leanstep": "leanstep.integrations.transformers",
    "linear_cross_entropy": "leanstep.heads",
    "masked_token_logprobs": "leanstep",
    "model_logprobs": "leanstep",
}


class NotUnderstood(Exception):
    """Why a place is left alone, in a few words. is_other_code: the repair looks for something else."""

    def __init__(self, reason: str, *, is_other_code: bool = False) -> None:
        super().__init__(reason)
        self.is_other_code = is_other_code


@dataclass(frozen=True)
class Edit:
    """Bytes `start` to `end` of a file become `text`."""

    path: Path
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Repair:
    """One way to repair a finding."""

    title: str
    edits: tuple[Edit, ...]


def apply(data: bytes, edits: Iterable[Edit]) -> bytes:
    """Return the file after its edits; raise NotUnderstood if two overlap. Whole lines may repeat."""
    ordered = sorted(set(edits), key=lambda edit: (edit.start, edit.end, edit.text))
    for one, other in pairwise(ordered):
        lines = one.start == one.end and one.text.endswith("\n")
        if other.start < one.end or (other.start == one.start and not lines):
            raise NotUnderstood("two repairs change the same place")
    for edit in reversed(ordered):
        data = data[: edit.start] + edit.text.encode() + data[edit.end :]
    return data


class Source:
    """One file of the user's."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, path.read_bytes()
        try:
            self.module = cst.parse_module(self.data)
        except (cst.ParserSyntaxError, SyntaxError, UnicodeDecodeError) as error:
            raise NotUnderstood(f"{path.name} cannot be parsed") from error
        if self.module.encoding not in ("utf-8", "utf8") or self.module.bytes != self.data:
            raise NotUnderstood(f"{path.name} is not plain UTF-8")
        metadata = MetadataWrapper(self.module, unsafe_skip_copy=True).resolve_many(
            [ByteSpanPositionProvider, PositionProvider, ParentNodeProvider, QualifiedNameProvider]
        )
        self._spans: Any = metadata[ByteSpanPositionProvider]
        self._lines: Any = metadata[PositionProvider]
        self._parents: Any = metadata[ParentNodeProvider]
        self._names: Any = metadata[QualifiedNameProvider]
        self._nodes: list[cst.CSTNode] = list(_walk(self.module))
        self._used = {node.value for node in self._nodes if isinstance(node, cst.Name)}

    # Questions

    def all(self, kind: type[Node], inside: cst.CSTNode | None = None) -> list[Node]:
        """Yield nodes of a type in file order."""
        nodes = self._nodes if inside is None else _walk(inside)
        return [node for node in nodes if isinstance(node, kind)]

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        span = self._spans[node]
        return span.start, span.start + span.length

    def text(self, node: cst.CSTNode) -> str:
        start, end = self.span(node)
        return self.data[start:end].decode()

    def parent(self, node: cst.CSTNode) -> Any:
        """Return the parent node, or None for the module."""
        return self._parents.get(node)

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Return the parents, innermost first."""
        outer = self.parent(node)
        while outer is not None:
            yield outer
            outer = self.parent(outer)

    def enclosing(self, node: cst.CSTNode, kinds: Any) -> Any:
        """Return the innermost parent of the given types, or None."""
        return next((outer for outer in self.around(node) if isinstance(outer, kinds)), None)

    def holds(self, outer: cst.CSTNode, node: cst.CSTNode) -> bool:
        return node is outer or any(parent is outer for parent in self.around(node))

    def qualified(self, node: cst.CSTNode) -> set[str]:
        """Return qualified names such as torch.optim.AdamW, resolved through the imports of the file."""
        names = self._names.get(node)
        names = names() if callable(names) else names
        return {name.name for name in names or ()}

    def statement_at(self, number: int) -> Statement:
        """Return the simple statement on a line, or the compound statement whose header is there."""
        best: Statement | None = None
        for node in self._nodes:
            if isinstance(node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
                place = self._lines[node]
                if place.start.line <= number <= place.end.line:
                    best = node
        if best is None:
            raise NotUnderstood(f"no statement on line {number}")
        return best

    def block_of(self, statement: cst.CSTNode) -> tuple[list[Statement], int]:
        """Return the statements of the enclosing block, and the index of this statement."""
        block = self.parent(statement)
        if not isinstance(block, (cst.IndentedBlock, cst.Module)):
            raise NotUnderstood("a block on one line")
        body: Any = list(block.body)
        return body, next(i for i, other in enumerate(body) if other is statement)

    def only_one(self, statement: Statement, kind: type[Node]) -> Node:
        """Return the only small statement of a line; several on a line, or another type, are refused."""
        if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
            small = statement.body[0]
            if isinstance(small, kind):
                return small
        raise NotUnderstood("not a plain assignment on a line of its own")

    def uses(self, name: str, inside: cst.CSTNode | None = None) -> list[cst.Name]:
        """Return every mention of a plain name, including assignments, but no attributes or keywords."""
        mentions = []
        for node in self.all(cst.Name, inside):
            if node.value != name:
                continue
            outer = self.parent(node)
            if isinstance(outer, cst.Attribute) and outer.attr is node:
                continue
            if isinstance(outer, cst.Arg) and outer.keyword is node:
                continue
            mentions.append(node)
        return mentions

    def is_stored(self, node: cst.Name) -> bool:
        """Return whether a mention assigns, deletes or declares the name."""
        inner: cst.CSTNode = node
        for outer in self.around(node):
            if isinstance(outer, cst.AugAssign):
                return outer.target is inner
            if isinstance(outer, (cst.AssignTarget, cst.Param, cst.Del, cst.NameItem, cst.ImportAlias)):
                return True
            if isinstance(outer, (cst.For, cst.CompFor)):
                return outer.target is inner
            if isinstance(outer, (cst.NamedExpr, cst.AnnAssign)):
                return outer.target is inner
            if isinstance(outer, cst.AsName):
                return True
            if not isinstance(outer, (cst.Tuple, cst.List, cst.Element, cst.StarredElement)):
                return False
            inner = outer
        return False

    def is_changed(self, name: str, inside: cst.CSTNode) -> bool:
        """Return whether a name is assigned inside a node, or its tensor is written in place."""
        for node in self.uses(name, inside):
            if self.is_stored(node):
                return True
            outer = self.parent(node)
            if isinstance(outer, cst.Attribute):
                method = outer.attr.value
                if method.endswith("_") and isinstance(self.parent(outer), cst.Call):
                    return True
            target = self.enclosing(node, (cst.AssignTarget, cst.AugAssign, cst.Del))
            if isinstance(target, cst.AugAssign) and not self.holds(target.target, node):
                continue
            if target is not None and not isinstance(target, cst.AugAssign):
                return True
        return False

    def fresh(self, wish: str) -> str:
        """Return a name that the file does not use."""
        name, number = wish, 2
        while name in self._used:
            name, number = f"{wish}_{number}", number + 1
        return name

    # Edits

    def replace(self, node: cst.CSTNode, text: str) -> Edit:
        return Edit(self.path, *self.span(node), text)

    def insert_after(self, node: cst.CSTNode, text: str) -> Edit:
        _, end = self.span(node)
        return Edit(self.path, end, end, text)

    def insert_line_before(self, statement: cst.CSTNode, code: str) -> Edit:
        """Insert a line before the statement, with its indentation."""
        start, indent = self._line_start(statement)
        return Edit(self.path, start, start, indent + code + self.module.default_newline)

    def insert_line_after(self, statement: cst.CSTNode, code: str) -> Edit:
        """Insert a line after a simple statement, with its indentation."""
        _, indent = self._line_start(statement)
        _, end = self.span(statement)
        stop = self.data.find(b"\n", end) + 1
        if not stop:
            raise NotUnderstood("no line after the statement")
        return Edit(self.path, stop, stop, indent + code + self.module.default_newline)

    def delete_line(self, statement: cst.CSTNode) -> Edit:
        """Delete the statement with its lines and its trailing comment."""
        start, _ = self._line_start(statement)
        _, end = self.span(statement)
        stop = self.data.find(b"\n", end)
        return Edit(self.path, start, len(self.data) if stop < 0 else stop + 1, "")

    def delete_with_comments(self, statement: cst.CSTNode) -> Edit:
        """Delete the statement with the comments and blank lines directly above it."""
        line = self.delete_line(statement)
        start = line.start
        while start:
            above = self.data.rfind(b"\n", 0, start - 1) + 1
            text = self.data[above:start].strip()
            if text and not text.startswith(b"#"):
                break
            start = above
        return Edit(self.path, start, line.end, "")

    def _line_start(self, statement: cst.CSTNode) -> tuple[int, str]:
        begin, _ = self.span(statement)
        start = self.data.rfind(b"\n", 0, begin) + 1
        indent = self.data[start:begin].decode()
        if indent.strip():
            raise NotUnderstood("the statement shares its line")
        return start, indent

    def import_line(self, name: str) -> list[Edit]:
        """Add the import of one of our names after the last import at the top, unless it exists."""
        module, last = IMPORTS[name], None
        for statement in self.module.body:
            is_line = isinstance(statement, cst.SimpleStatementLine)
            first: Any = statement.body[0] if is_line else None
            if isinstance(first, cst.ImportFrom) and f"{module} import" in self.text(first):
                names = first.names if isinstance(first.names, (list, tuple)) else ()
                if any(isinstance(alias.name, cst.Name) and alias.name.value == name for alias in names):
                    return []
            if isinstance(first, (cst.Import, cst.ImportFrom)):
                last = statement
            elif last is not None:
                break
        if name in self._used:
            raise NotUnderstood(f"the file has a {name} of its own")
        if last is None:
            raise NotUnderstood("no import at the top of the file")
        _, end = self.span(last)
        stop = self.data.find(b"\n", end) + 1
        if not stop:
            raise NotUnderstood("no line after the imports")
        line = f"from {module} import {name}{self.module.default_newline}"
        return [Edit(self.path, stop, stop, line)]


def _walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _walk(child)


def method_call(node: cst.CSTNode, names: Iterable[str]) -> cst.Call | None:
    """Return the call if it is `something.name(...)` for one of the names."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value in names:
        return node
    return None


def keyword(call: cst.Call, name: str) -> cst.Arg | None:
    return next((arg for arg in call.args if arg.keyword is not None and arg.keyword.value == name), None)


def is_name(node: cst.CSTNode, value: str) -> bool:
    return isinstance(node, cst.Name) and node.value == value


def is_plain(node: cst.CSTNode) -> bool:
    """Return whether it is a name or a chain of attributes: `bank`, `self.bank`."""
    while isinstance(node, cst.Attribute):
        node = node.value
    return isinstance(node, cst.Name)
