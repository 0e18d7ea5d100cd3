"""Several ranks under `torchrun`: each records itself; rank 0 reports, for itself or for all of them.

Reports meet in torch's own TCPStore at MASTER_ADDR:MASTER_PORT, because the process group may be gone by the
time the script has ended. torchrun's agent keeps one there until its last rank ends; without it rank 0 opens
one.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import statistics
import time
from typing import Any


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
    deadline = time.monotonic() + timeout_s
    reports, problem = [report] if is_first() else [], f"gave no report within {timeout_s:.0f} s"
    try:
        store = _store(timeout_s)
        store.set(str(rank()), json.dumps(report))
        for number in range(1, world_size()) if is_first() else ():
            left = datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.1))
            # A rank that died leaves the others' findings worth printing.
            with contextlib.suppress(RuntimeError):
                store.wait([str(number)], left)
                reports.append(json.loads(store.get(str(number))))
    except (RuntimeError, ValueError, KeyError) as error:
        # torch's store errors are RuntimeErrors; no address or port in the environment is a KeyError.
        problem = f"could not be asked ({type(error).__name__})"
    if not is_first():
        return None
    merged = merge(reports)
    if len(reports) < world_size():
        note = f"{world_size() - len(reports)} of {world_size()} ranks {problem}"
        merged["not_seen"].append({"kind": "rank", "where": "", "note": note})
    return merged


def _store(timeout_s: float) -> Any:
    """The store that all ranks of this job reach, under a name that no other user of it has."""
    from torch.distributed import PrefixStore, TCPStore

    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "False") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_first() and not has_agent,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        # Shares the port with the store of the script's own process group, if that is still there.
        multi_tenant=True,
    )
    return PrefixStore(f"leanstep-diagnose-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


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
