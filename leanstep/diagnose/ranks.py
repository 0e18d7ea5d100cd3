"""Several ranks under `torchrun`: each records itself; rank 0 reports, for itself or for all of them.

Reports meet in a folder of the machine's temporary directory, because the process group may be gone by the
time the script has ended. Ranks on other machines are therefore not merged.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from leanstep.files import write_atomically

_STARTED = time.time()


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    return rank() == 0


def gather(report: dict[str, Any], timeout_s: float = 60.0) -> dict[str, Any] | None:
    """On rank 0 the reports of all ranks, merged by line; None on the others."""
    if world_size() == 1:
        return merge([report])
    job = "-".join(os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
    folder = Path(tempfile.gettempdir()) / f"leanstep-ranks-{os.getuid()}-{job}"
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"{rank()}.json"
    write_atomically(target, json.dumps(report).encode())
    if not is_first():
        return None
    files = [folder / f"{number}.json" for number in range(world_size())]
    deadline = time.monotonic() + timeout_s
    while not all(map(_is_fresh, files)) and time.monotonic() < deadline:
        time.sleep(0.05)
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in files if _is_fresh(file)]
    for file in files:
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
    merged = merge(reports)
    if len(reports) < world_size():
        note = (
            f"{world_size() - len(reports)} of {world_size()} ranks gave no report within {timeout_s:.0f} s"
        )
        merged["not_seen"].append({"kind": "rank", "where": "", "note": note})
    return merged


def _is_fresh(file: Path) -> bool:
    """Written by this run, not left behind by one that was killed."""
    return file.exists() and file.stat().st_mtime >= _STARTED


def merge(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """One report of several: a finding per line and rule, the counts of the ranks beside it."""
    merged = dict(reports[0])
    by_id: dict[str, list[dict[str, Any]]] = {}
    for report in reports:
        for finding in report["findings"]:
            by_id.setdefault(finding["id"], []).append(finding)
    findings = []
    for same in by_id.values():
        counts = [finding["count"] for finding in same]
        first = max(same, key=lambda f: f["count"])
        spread = {
            "ranks": len(same),
            "min": min(counts),
            "median": statistics.median_low(counts),
            "max": max(counts),
        }
        findings.append({**first, "evidence": {**first["evidence"], "across_ranks": spread}})
    findings.sort(key=lambda f: (f["compiled"], -(f["cost"]["share"] or 0.0), -f["count"]))
    merged["findings"] = [{**finding, "rank": number} for number, finding in enumerate(findings, 1)]
    notes = {(n["kind"], n["where"], n["note"]): n for report in reports for n in report["not_seen"]}
    merged["not_seen"] = list(notes.values())
    return merged
