"""Convert JSON payloads to template data for the page: merging, source lines, labels, charts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from leanstep import units
from leanstep.report import charts, excerpts

Data = dict[str, Any]

ENVIRONMENT = ("leanstep", "torch", "python", "device", "threads")


def prepare(kind: str, payload: Data) -> Data:
    """Return a payload with all that the page needs later: source lines are read while the script exists."""
    if kind == "diagnose":
        scripts = payload["scripts"] if "scripts" in payload else [payload]
        return {"scripts": [_with_source(script) for script in scripts]}
    if kind == "demo":
        examples = [
            {**example, **{side: _side(example[side]) for side in ("before", "after")}}
            for example in payload["examples"]
        ]
        return {**payload, "examples": examples}
    return payload if "runs" in payload else {"runs": [payload]}


def _side(side: Data) -> Data:
    return {**side, "diagnose": _with_source(side["diagnose"]), "timeline": charts.thin(side["timeline"])}


def _with_source(report: Data) -> Data:
    folder = Path(report.get("folder", "."))
    findings = []
    for finding in report["findings"]:
        if "source" not in finding:
            lines = excerpts.excerpt(finding["file"], finding["line"], finding["code"], folder=folder)
            finding = {**finding, "source": lines}
        findings.append(finding)
    return {**report, "findings": findings}


def merge(kind: str, held: Data | None, new: Data) -> Data:
    """Merge payloads: a newer one replaces the older one of the same script and device."""
    if held is None or kind == "demo":
        return new
    if kind == "diagnose":
        return {"scripts": _by_key(held["scripts"], new["scripts"], lambda s: s["script"])}
    runs = _by_key(held["runs"], new["runs"], lambda r: (r["script"], r["device"]))
    return {**held, **new, "runs": runs}


def _by_key(held: list[Data], new: list[Data], key: Any) -> list[Data]:
    merged = {key(item): item for item in held}
    merged.update((key(item), item) for item in new)
    return list(merged.values())


def view(sections: dict[str, Data]) -> Data:
    """Return the template data, section by section."""
    shown: Data = {}
    if "demo" in sections:
        shown["demo"] = _demo(sections["demo"])
    if "diagnose" in sections:
        shown["diagnose"] = [findings_view(script) for script in sections["diagnose"]["scripts"]]
    if "rehearse" in sections:
        shown["rehearse"] = [_rehearsal(run) for run in sections["rehearse"]["runs"]]
        shown["rehearse_tables"] = sections["rehearse"].get("tables", [])
    shown["environments"] = _environments(sections)
    return shown


def findings_view(report: Data) -> Data:
    """Return the findings of one script with labels and coloured source."""
    findings = []
    # Ranks count from 1 here: findings that a command omitted as too small leave no gap.
    for rank, finding in enumerate(sorted(report["findings"], key=lambda f: f["rank"]), 1):
        excerpt = finding["source"]
        cost = finding.get("cost") or {}
        findings.append(
            {
                **finding,
                "rank": rank,
                "place": f"{Path(finding['file']).name}:{finding['line']}",
                "share": cost.get("share") or 0.0,
                "cost": cost_label(cost),
                "basis": cost.get("basis", ""),
                "rows": [
                    {"number": number, "html": html, "hit": number == excerpt["line"]}
                    for number, html in enumerate(excerpts.colour(excerpt["lines"]), excerpt["start"])
                ],
                "note": excerpt["note"],
                "callers": [f"{Path(c['file']).name}:{c['line']}" for c in finding.get("called_from", [])],
            }
        )
    steps = report.get("steps", {})
    return {
        **report,
        "name": Path(report["script"]).name,
        "findings": findings,
        "steps": steps,
        "phase_shares": _phase_shares(steps.get("phases") or [], "seconds", 1.0),
    }


def _phase_shares(phases: list[Data], field: str, unit_s: float) -> Data | None:
    """Return rollout, scoring and update as parts of one bar; None if fewer than two were timed."""
    timed = [(p["phase"], p[field] * unit_s) for p in phases if p.get(field)]
    return charts.shares(timed, units.seconds) if len(timed) > 1 else None


def cost_label(cost: Data) -> str:
    """`3 ms`, `58 GiB`, `3 ms, 12 MiB`; empty if no cost is known."""
    parts = [units.seconds(cost["seconds"])] if cost.get("seconds") else []
    parts += [units.size(cost["bytes"])] if cost.get("bytes") else []
    return ", ".join(parts)


def _demo(payload: Data) -> Data:
    examples = []
    for example in payload["examples"]:
        before, after = example["before"], example["after"]
        gone, came = excerpts.changed_lines(example["diff"])
        coloured = zip(
            example["diff"], excerpts.colour([row["text"] for row in example["diff"]]), strict=True
        )
        examples.append(
            {
                **example,
                "before_findings": findings_view(before["diagnose"]),
                "after_findings": findings_view(after["diagnose"]),
                "diff_rows": [{**row, "html": html} for row, html in coloured],
                "memory_figure": units.memory_change(example["memory_ratio"]),
                "gone": gone,
                "came": came,
                "rules_gone": _rules_gone(before["diagnose"], after["diagnose"]),
                "proof_ok": all(row["ok"] for row in example["proof"]),
                "time_chart": charts.before_after(
                    before["median_s"],
                    after["median_s"],
                    (units.seconds(before["median_s"]), units.seconds(after["median_s"])),
                    "time per training step",
                ),
                "memory_chart": charts.before_after(
                    before["peak_bytes"],
                    after["peak_bytes"],
                    (units.size(before["peak_bytes"]), units.size(after["peak_bytes"])),
                    "peak memory above the start of the step",
                ),
                "timeline_chart": charts.memory_timeline(
                    {"before": before["timeline"], "after": after["timeline"]}
                ),
            }
        )
    return {**payload, "examples": examples}


def _rules_gone(before: Data, after: Data) -> list[Data]:
    """Return the number of findings per rule before and after."""
    rules = dict.fromkeys(f["rule"] for f in before["findings"] + after["findings"])
    count = lambda report, rule: sum(f["rule"] == rule for f in report["findings"])  # noqa: E731
    return [{"rule": rule, "before": count(before, rule), "after": count(after, rule)} for rule in rules]


def _rehearsal(run: Data) -> Data:
    """Return charts and tables of a rehearsal; all values are predicted."""
    memory, time, what = run["memory"], run["time"], run["what_if"]
    shown = {
        **run,
        "name": Path(run["script"]).name,
        "timeline_chart": charts.stacked_timeline(memory["timeline"], memory["capacity_bytes"]),
        "owners_chart": charts.ranked(
            [(o["line"], o["bytes"]) for o in memory["owners"]], units.size, "bytes"
        ),
        "devices_chart": None,
        "phase_shares": _phase_shares((run.get("iteration") or {}).get("phases", []), "ms", 1e-3),
        "what_ifs": [],
    }
    if time is None:
        return shown
    milliseconds = _milliseconds
    shown["classes_chart"] = charts.ranked(list(time["class_ms"].items()), milliseconds, "device time")
    lines = [(entry["line"], entry["device_ms"]) for entry in run["lines"]]
    shown["lines_chart"] = charts.ranked(lines, milliseconds, "device time")
    timed = [d for d in run["devices"] if d["step_ms"] is not None]
    if len(timed) > 1:
        steps = [(d["device"] + ("" if d["fits"] else " (does not fit)"), d["step_ms"]) for d in timed]
        shown["devices_chart"] = charts.ranked(steps, milliseconds, "predicted step", in_order=True)
    names = {
        "no_syncs_ms": "no host syncs",
        "fused_ms": "fused elementwise kernels (ideal)",
        "fused_optimizer_ms": "fused optimizer",
        "free_host_ms": "zero host cost",
    }
    shown["what_ifs"] = [
        {"name": name, "step": milliseconds(what[key]), "gain": 1 - what[key] / time["step_ms"]}
        for key, name in names.items()
        if what.get(key) is not None
    ]
    return shown


def _milliseconds(value: float) -> str:
    return units.seconds(value * 1e-3)


def _environments(sections: dict[str, Data]) -> list[Data]:
    """Return the environments of the measurements, without duplicates."""
    places: dict[tuple[Any, ...], list[str]] = {}
    for kind, payload in sections.items():
        heads = [payload, *payload.get("scripts", [])]
        for head in heads:
            if "torch" in head:
                values = tuple(head.get(key) for key in ENVIRONMENT)
                known = places.setdefault(values, [])
                if kind not in known:
                    known.append(kind)
    return [
        {"parts": ", ".join(kinds), "values": [(k, v) for k, v in zip(ENVIRONMENT, values, strict=True) if v]}
        for values, kinds in places.items()
    ]
