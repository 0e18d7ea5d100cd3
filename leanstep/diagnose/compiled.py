"""Decide which findings on compiled regions the compiler has removed.

The rules judge the step as it runs eagerly, with values, gradients and host reads. A finding on a line of a
compiled region is then looked up in the graphs (`compiled_code`): the kernels that the backend launches for
that line, or the tensors it saves for its backward. What counts is data of the rule, `Rule.compiled`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from leanstep.diagnose.compiled_code import CompiledCode, Graph, Kernel, Place, place_of_line
from leanstep.diagnose.findings import Finding, Launches
from leanstep.diagnose.rules import RULES, Limits
from leanstep.tape.lines import short_path
from leanstep.units import size


@dataclass
class CompiledReport:
    """Effect of the compiler on the step: shown below the findings, and a field of the JSON report."""

    graphs: list[Graph] = field(default_factory=list)
    interruptions: list[Any] = field(default_factory=list)
    removed: list[tuple[Finding, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.graphs or self.interruptions)

    def as_dict(self) -> dict[str, Any]:
        shown = [{**one.as_dict(), "file": short_path(one.file)} for one in self.interruptions]
        graphs = [graph.as_dict() for graph in self.graphs]
        return {
            "graphs": [
                {**graph, "file": short_path(graph["file"]) if graph["file"] else ""} for graph in graphs
            ],
            "interruptions": shown,
            "removed": [
                {"rule": f.rule, "file": short_path(f.line.file), "line": f.line.number, "why": why}
                for f, why in self.removed
            ],
        }

    def lines(self) -> list[str]:
        """Return the lines for the terminal."""
        if not self:
            return []
        backends = ", ".join(sorted({graph.backend for graph in self.graphs})) or "no graph"
        kernels = sum(len(graph.kernels) for graph in self.graphs if graph.level == "kernels")
        launched = f", {kernels} kernels" if kernels else ""
        count = len(self.graphs)
        spent = sum(graph.seconds for graph in self.graphs)
        text = [
            f"compiled: {count} graph{'s' * (count != 1)} ({backends}){launched}, {spent:.1f} s to compile"
        ]
        for one in self.interruptions:
            often = f" × {one.count}" if one.count > 1 else ""
            cost = f", {one.seconds:.2g} s to compile" if one.seconds else ""
            text.append(f"  {one.kind}{often}  {short_path(one.file)}:{one.line}  {one.reason}{cost}")
        for finding, why in self.removed:
            place = f"{short_path(finding.line.file)}:{finding.line.number}"
            text.append(f"  removed by the compiler: {finding.rule}  {place}  {why}")
        return text


def after_compiler(
    findings: Sequence[Finding], code: CompiledCode, limits: Limits
) -> tuple[list[Finding], CompiledReport]:
    """Return the findings that remain in the compiled step, and why the others do not."""
    report = CompiledReport(code.graphs, code.interruptions())
    remaining = []
    for finding in findings:
        taken = {place_of_line(other.line) for other in findings if other.rule == finding.rule}
        why = _removed(finding, code, limits[finding.rule], taken) if finding.compiled else None
        if why is None:
            remaining.append(finding)
        else:
            report.removed.append((finding, why))
    return remaining, report


def _removed(
    finding: Finding, code: CompiledCode, limits: Mapping[str, float], taken: set[Place]
) -> str | None:
    """Return why a finding has disappeared; None if it survives or nothing is known about its line."""
    place = place_of_line(finding.line)
    graphs = [graph for graph in code.graphs if graph.level != "calls"]
    wanted = RULES[finding.rule].compiled
    if wanted is None or not graphs or not _is_in(place, graphs):
        return None
    if isinstance(wanted, Launches):
        launches = sum(
            _launches(finding, wanted, graph, limits) * max(code.runs_per_step(graph), 1.0)
            for graph in graphs
        )
        if launches >= (limits[wanted.limit] if wanted.limit else 1):
            return None
        left = f"{launches:.0f} of {finding.count} remain" if launches else "nothing remains"
        return f"{left} ({graphs[0].level})"
    return _too_few_bytes(finding, graphs, limits, taken)


def _launches(finding: Finding, wanted: Launches, graph: Graph, limits: Mapping[str, float]) -> int:
    """Return the kernels of a graph that do what the rule is about on the finding's line."""
    place = place_of_line(finding.line)
    least = limits[wanted.bytes] if wanted.bytes else 0.0
    if wanted.as_large:
        # Not a small one of another op on the line.
        least = max(least, finding.evidence["bytes"] / finding.count / 2)
    large = (kernel for kernel in graph.kernels if kernel.bytes >= least)
    return sum(_counts(kernel, _names_on(kernel, place), wanted) for kernel in large)


def _counts(kernel: Kernel, names: set[str], wanted: Launches) -> bool:
    if not names or wanted.backward not in (None, kernel.backward):
        return False
    return names <= wanted.ops if wanted.only else not wanted.ops or bool(names & wanted.ops)


def _too_few_bytes(
    finding: Finding, graphs: Sequence[Graph], limits: Mapping[str, float], taken: set[Place]
) -> str | None:
    """Return why a saved-tensor finding is gone, or None; the threshold applies to all lines together."""
    place = place_of_line(finding.line)
    saved = [tensor for graph in graphs for tensor in graph.saved]
    on_line = sum(tensor.bytes for tensor in saved if tensor.place == place)
    # A compiler may save the product instead of a tensor computed from it: equally wide, on a line that is
    # not a finding itself. Shapes have the form "[1024, 8192] float32".
    shapes = finding.evidence.get("shapes", ())
    widths = {text.partition("]")[0].rpartition(" ")[2].strip("[") for text in shapes}
    elsewhere = sum(
        tensor.bytes
        for tensor in saved
        if tensor.place not in taken and tensor.shape and str(tensor.shape[-1]) in widths
    )
    need = min(limits["bytes"], finding.evidence.get("bytes", limits["bytes"]))
    return None if max(on_line, elsewhere) >= need else f"{size(on_line)} saved for the backward"


def _is_in(place: Place, graphs: Sequence[Graph]) -> bool:
    """Return whether a graph contains code of the finding's file: a removed line has no node."""
    files = {p[0] for graph in graphs for kernel in graph.kernels for _, p in kernel.ops}
    return place[0] in files


def _names_on(kernel: Kernel, place: Place) -> set[str]:
    return {name for name, where in kernel.ops if where == place}
