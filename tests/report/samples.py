"""Payloads as the commands give them, small but complete: what the page must be able to show."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

ENVIRONMENT = {"leanstep": "0.1.0", "torch": "2.13.0", "device": "cpu (Practice CPU)", "threads": 2}

SCRIPT = """import torch

head = torch.nn.Linear(64, 1000)


def loss_fn(hidden, targets, mask):
    logits = head(hidden)
    logp = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    kept = logp[mask]  # <script>alert("not markup")</script>
    total = 0.0
    for value in kept:
        total += value.item()
    return -kept.mean()
"""


def bench_result(case: str = "logprob-linear", size: str = "cpu", scale: float = 1.0) -> dict[str, Any]:
    def row(impl: str, kind: str, median: float | None, extra: int | None, **more: Any) -> dict[str, Any]:
        ratio = 2.4 * scale / median if median else None
        return {
            "impl": impl,
            "kind": kind,
            "available": median is not None,
            "median_s": median,
            "p20_s": median and median * 0.98,
            "p80_s": median and median * 1.05,
            "time_ratio": ratio,
            "peak_bytes": extra and extra + 2**28,
            "extra_bytes": extra,
            "memory_ratio": ratio,
            "host_syncs": 0 if median else None,
            "error": 3e-7 if median else None,
            "note": "",
            **more,
        }

    rows = [
        row("plain", "reference", 2.4 * scale, 790_000_000),
        row("leanstep", "fast", 0.45 * scale, 21_000_000),
        row("trl-chunked", "peer", 1.9 * scale, 95_000_000, note="all rows"),
        row("liger", "peer", None, None, note="liger_kernel is not installed"),
        row("limit", "limit", 0.41 * scale, 0, error=None, note="the bare GEMMs"),
    ]
    return {**ENVIRONMENT, "case": case, "size": size, "rows": rows}


def proof_rows(case: str, ok: bool = True) -> list[dict[str, Any]]:
    names = ("logp", "entropy", "grad:hidden", "grad:weight")
    rows = [
        {
            "case": case,
            "impl": "leanstep",
            "dtype": dtype,
            "tensor": f"odd/{name}",
            "error": 2e-7 * (i + 1),
            "reference_error": 3e-7 * (i + 1),
            "bound": 7e-7 * (i + 1),
            "ok": True,
        }
        for dtype in ("fp32", "bf16")
        for i, name in enumerate(names)
    ]
    if not ok:
        rows[1] |= {"error": float("inf"), "ok": False}
    return rows


def finding(rank: int, rule: str, line: int, code: str, file: str, **more: Any) -> dict[str, Any]:
    return {
        "id": f"{rule}:{file}:{code}",
        "rule": rule,
        "rank": rank,
        "file": file,
        "line": line,
        "function": "loss_fn",
        "code": code,
        "called_from": [],
        "count": 192,
        "counts": [192, 192, 192],
        "phase": "forward",
        "in_loop": False,
        "cost": {
            "seconds": 0.003 / rank,
            "bytes": 786432 * rank,
            "flops": 75497472,
            "share": 0.3 / rank,
            "basis": "calibrated",
        },
        "what": "192 of 256 rows of the head's gradient are zero.",
        "why": "Their products are computed and dropped.",
        "fix": "Gather the rows before the head.",
        "leanstep": "leanstep.heads.linear_logprobs",
        "confidence": "high",
        "evidence": {"rows": 256, "dead": 192},
        "baselined": False,
        **more,
    }


def diagnose_report(folder: Path, name: str = "train.py", *, clean: bool = False) -> dict[str, Any]:
    """A report on a script that really exists in `folder`."""
    script = folder / name
    script.write_text(SCRIPT, encoding="utf-8")
    found = [
        finding(1, "dead-rows", 7, "logits = head(hidden)", str(script)),
        finding(
            2, "host-sync", 12, "total += value.item()", str(script), cost={"seconds": 0.004, "share": 0.1}
        ),
        finding(3, "full-vocab", 8, "logp = logits.log_softmax(-1)", str(script)),
    ]
    return {
        "schema": 1,
        **ENVIRONMENT,
        "python": "3.11",
        "script": str(script),
        "argv": [],
        "exit": {"code": 0, "exception": None},
        "steps": {"warmup": 1, "recorded": 3, "boundary": "optimizer", "ops": 3561, "step_seconds": 0.041},
        "findings": [] if clean else found,
        "not_seen": [{"kind": "compiled", "where": "model.py:40", "note": "ran eagerly while recording"}],
    }


def demo_payload(folder: Path) -> dict[str, Any]:
    def side(name: str, scale: float, clean: bool) -> dict[str, Any]:
        timeline = [[i / 1000, (math.sin(i / 320) ** 2) * 4e8 * scale] for i in range(1000)]
        return {
            "diagnose": diagnose_report(folder, f"{name}.py", clean=clean),
            "median_s": 0.8 * scale,
            "p20_s": 0.79 * scale,
            "p80_s": 0.82 * scale,
            "peak_bytes": int(4e8 * scale),
            "timeline": timeline,
            "losses": [3.0 - 0.1 * i for i in range(8)],
        }

    def example(name: str, title: str, scale: float) -> dict[str, Any]:
        return {
            "name": name,
            "title": title,
            "summary": "A practice step of the test-suite.",
            "diff": [
                {"sign": " ", "number": 6, "text": "def loss_fn(hidden, targets, mask):"},
                {"sign": "-", "number": 7, "text": "    logits = head(hidden)"},
                {
                    "sign": "+",
                    "number": 7,
                    "text": "    out = linear_logprobs(hidden, head.weight, targets, rows=rows)",
                },
                {"sign": "…", "number": None, "text": ""},
                {"sign": " ", "number": 13, "text": "    return -kept.mean()"},
            ],
            "before": side(f"{name}_before", 1.0, False),
            "after": side(f"{name}_after", scale, True),
            "time_ratio": 1 / scale,
            "memory_ratio": 0.8 / scale,
            "proof": proof_rows(name),
        }

    return {
        **ENVIRONMENT,
        "seconds": 141.0,
        "examples": [
            example("lens", "A controller trained from preferences", 1 / 230),
            example("rl", "A GRPO update with long prompts", 1 / 5.4),
            example("speedrun", "A small GPT on parameter banks with Muon", 1 / 1.9),
        ],
    }
