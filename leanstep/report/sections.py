"""Convert JSON payloads to template data for the page: merging, source lines, labels, charts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from leanstep import units
from leanstep.case import limit_of
from leanstep.report import charts, excerpts

Data = dict[str, Any]

ORDER = ("demo", "diagnose", "rehearse", "published", "sweep", "bench", "ablations", "prove")
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
    if kind == "sweep":
        return {"sweeps": payload["sweeps"] if "sweeps" in payload else [payload]}
    if kind in ("rehearse", "ablations"):
        return {"runs": payload["runs"] if "runs" in payload else [payload]}
    return payload


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
    """Merge payloads: a newer one replaces the older one of the same case and size, script or sweep."""
    if held is None or kind == "demo":
        return new
    if kind == "bench":
        return {"results": _by_key(held["results"], new["results"], lambda r: (r["case"], r["size"]))}
    if kind == "prove":
        merged = {**held, **new}
        for field in ("rows", "drift"):
            fresh = {(row["case"], row["impl"]) for row in new.get(field, [])}
            older = [row for row in held.get(field, []) if (row["case"], row["impl"]) not in fresh]
            if older or field in new:
                merged[field] = older + list(new.get(field, []))
        return merged
    if kind == "diagnose":
        return {"scripts": _by_key(held["scripts"], new["scripts"], lambda s: s["script"])}
    if kind == "sweep":
        return {"sweeps": _by_key(held["sweeps"], new["sweeps"], _sweep_title)}
    if kind == "published":
        return {"rows": _by_key(held["rows"], new["rows"], lambda r: r["row"])}
    if kind == "ablations":
        return {"runs": _by_key(held["runs"], new["runs"], lambda r: (r["recipe"], r["preset"]))}
    if kind == "rehearse":
        return {"runs": _by_key(held["runs"], new["runs"], lambda r: (r["script"], r["device"]))}
    return new


def _sweep_title(sweep: Data) -> str:
    return sweep.get("title") or f"{sweep['case']}: predicted peak by {sweep['sweep'].replace('_', ' ')}"


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
    if "sweep" in sections:
        shown["predicted_sweeps"] = [_sweep(sweep) for sweep in sections["sweep"]["sweeps"]]
    if "bench" in sections:
        shown["bench"], shown["sweeps"] = _bench(sections["bench"]["results"])
    if "published" in sections:
        shown["published"] = _published(sections["published"]["rows"])
    if "ablations" in sections:
        shown["ablations"] = [_ablation(run) for run in sections["ablations"]["runs"]]
    if "prove" in sections:
        shown["prove"] = _prove(sections["prove"])
    others = {kind: payload for kind, payload in sections.items() if kind not in ORDER}
    shown["others"] = [{"title": kind, "tables": tables_of(payload)} for kind, payload in others.items()]
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
    """`3 ms`, `58 GiB`, `3 ms, 12 MiB`; a dash if no cost is known."""
    parts = [units.seconds(cost["seconds"])] if cost.get("seconds") else []
    parts += [units.size(cost["bytes"])] if cost.get("bytes") else []
    return ", ".join(parts) or "-"


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
                    "peak memory of the step",
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


def _bench(results: list[Data]) -> tuple[list[Data], list[Data]]:
    """Return results with their charts, and the sweeps among them."""
    swept: dict[tuple[str, str, str], list[Data]] = {}
    shown = []
    for result in results:
        base, _, override = result["size"].partition(", ")
        if override:
            swept.setdefault((result["case"], base, override.partition("=")[0]), []).append(result)
        else:
            shown.append(_with_charts(result))
    sweeps = []
    for (case, base, key), members in swept.items():
        if len(members) == 1:
            shown.append(_with_charts(members[0]))
            continue
        sweeps.append(
            {
                "case": case,
                "size": base,
                "key": key.replace("_", " "),
                "results": members,
                "time_chart": charts.sweep(members, key, "median_s"),
                "memory_chart": charts.sweep(members, key, "extra_bytes"),
            }
        )
    return shown, sweeps


def _with_charts(result: Data) -> Data:
    fast = [r for r in result["rows"] if r["kind"] == "fast" and r["available"] and r["time_ratio"]]
    best = max(fast, key=lambda r: r["time_ratio"], default=None)
    limit = limit_of({r["impl"]: r for r in result["rows"]}, best["impl"]) if best else None
    headroom = best["median_s"] / limit["median_s"] if best and limit else None
    return {
        **result,
        "best": best,
        "headroom": headroom,
        "time_chart": charts.bench_time(result),
        "memory_chart": charts.bench_memory(result),
    }


def _prove(payload: Data) -> Data:
    groups: dict[tuple[str, str, str], list[Data]] = {}
    for row in payload["rows"]:
        groups.setdefault((row["case"], row["impl"], row["dtype"]), []).append(row)
    shown = []
    for (case, impl, dtype), rows in groups.items():
        failed = [row for row in rows if not row["ok"]]
        worst = max(failed or rows, key=_closeness)
        shown.append(
            {
                "case": case,
                "impl": impl,
                "dtype": dtype,
                "passed": len(rows) - len(failed),
                "total": len(rows),
                "worst": worst,
                "ok": not failed,
            }
        )
    return {"groups": shown, "drift": payload.get("drift", []), "failed": sum(not g["ok"] for g in shown)}


def _published(results: list[Data]) -> list[Data]:
    """Return published and predicted figures, largest error first; `place` is the ratio's position."""
    rows = [
        {
            "name": f"{result['row']}: {figure['label']}" if figure.get("label") else result["row"],
            "device": result["device"],
            "published": _with_unit(figure["published"], figure["unit"]),
            "predicted": _with_unit(figure["predicted"], figure["unit"]),
            "ratio": figure["ratio"],
            "place": charts.ratio_place(figure["ratio"]),
            "inside": figure.get("inside"),
            "role": result["role"],
        }
        for result in results
        for figure in result["figures"]
    ]
    return sorted(rows, key=lambda row: -abs(math.log(row["ratio"])))


def _with_unit(value: float, unit: str) -> str:
    """`1.6e4 MiB` -> `15.6 GiB`; units other than bytes and milliseconds are unchanged."""
    scale = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    if unit in scale:
        return units.size(value * scale[unit])
    return units.seconds(value * 1e-3) if unit == "ms" else f"{value:,.4g} {unit}"


def _ablation(run: Data) -> Data:
    """Return paired runs with and without a change: each difference with its interval on one scale."""
    rows = [row for row in run["rows"] if "shift" in row]
    ends = [abs(row[end]) for row in rows for end in ("shift_low", "shift_high")]
    scale = max(ends, default=0.0) or 1.0
    shown = [
        {**row, "left": 50 + 50 * row["shift_low"] / scale, "right": 50 + 50 * row["shift_high"] / scale}
        for row in rows
    ]
    unchanged = [row["loss"] for row in run["rows"] if "shift" not in row]
    return {**run, "rows": shown, "unchanged": unchanged[0] if unchanged else None}


def _closeness(row: Data) -> float:
    error = float("inf") if row["error"] is None else row["error"]
    return error / row["bound"] if row["bound"] else error


def _rehearsal(run: Data) -> Data:
    """Return charts and tables of a rehearsal; all values are predicted."""
    memory, time, what = run["memory"], run["time"], run["what_if"]
    shown = {
        **run,
        "name": Path(run["script"]).name,
        "timeline_chart": charts.stacked_timeline(memory["timeline"], memory["capacity"]),
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
    shown["classes_chart"] = charts.ranked(list(time["classes"].items()), milliseconds, "device time")
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
    shown["what_ifs"] += [
        {"name": c["text"], "step": milliseconds(c["step_ms"]), "gain": 1 - c["step_ms"] / time["step_ms"]}
        for c in what.get("changes", [])
        if c["step_ms"] is not None
    ]
    return shown


def _milliseconds(value: float) -> str:
    return units.seconds(value * 1e-3)


def _sweep(sweep: Data) -> Data:
    """Return a case's predicted peaks over a parameter: a table, and a chart if the values are numbers."""
    drawn = [
        {"method": row["impl"], "kind": row["kind"], "x": got["value"], "peak_bytes": got["peak_bytes"]}
        for row in sweep["rows"]
        for got in row["cells"]
        if got["why"] is None and isinstance(got["value"], (int, float))
    ]
    chart = None
    if drawn and sweep["values"] != "fit":
        devices = {key.upper(): device["room_bytes"] for key, device in sweep["devices"].items()}
        chart = charts.capacity(drawn, devices, x_title=sweep["sweep"].replace("_", " "))
    rows = [_sweep_row(sweep, row, got) for row in sweep["rows"] for got in row["cells"]]
    params = ", ".join(f"{key} {cell(key, value)}" for key, value in sweep["params"].items())
    return {
        "title": _sweep_title(sweep),
        "summary": sweep.get("summary", params),
        "chart": chart,
        "tables": tables_of({"rows": rows}),
    }


def _sweep_row(sweep: Data, row: Data, got: Data) -> Data:
    """Return one table row: a value of an implementation, and whether it fits each device."""
    shown = {"implementation": row["impl"], sweep["sweep"]: got["value"], "peak_bytes": got.get("peak_bytes")}
    for key in sweep["devices"]:
        there = got.get("devices", {}).get(key)
        step_s = there["step_ms"] / 1e3 if there and there["fits"] else None
        shown |= {f"{key} fits": there["fits"] if there else None, f"{key} step_s": step_s}
    return {**shown, "note": got["why"] or row["note"]}


def tables_of(payload: Data) -> list[Data]:
    """Return any payload as tables: one per list of objects, then the remaining values as pairs."""
    tables, plain = [], []
    for key, value in payload.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            columns = list(dict.fromkeys(name for item in value for name in item))
            cells = [[cell(name, item.get(name)) for name in columns] for item in value]
            tables.append({"title": key, "columns": [c.replace("_", " ") for c in columns], "rows": cells})
        elif key not in ENVIRONMENT:
            plain.append([key.replace("_", " "), cell(key, value)])
    return tables + ([{"title": "", "columns": [], "rows": plain}] if plain else [])


def cell(name: str, value: Any) -> str:
    """Format a value by the unit in its name."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        if name.endswith("_bytes") or name == "bytes":
            return units.size(value)
        if name.endswith("_s") or name == "seconds":
            return units.seconds(value)
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {cell(key if key else name, item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(name, item) for item in value)
    return str(value)


def _environments(sections: dict[str, Data]) -> list[Data]:
    """Return the environments of the measurements, without duplicates."""
    places: dict[tuple[Any, ...], list[str]] = {}
    for kind, payload in sections.items():
        heads = [
            payload,
            *payload.get("results", []),
            *payload.get("scripts", []),
            *payload.get("sweeps", []),
        ]
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
