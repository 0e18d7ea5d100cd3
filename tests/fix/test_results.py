"""The table of repairs in docs/fix.md says what results/fixes.json says."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_page_quotes_the_results():
    rows = json.loads((ROOT / "results" / "fixes.json").read_text(encoding="utf-8"))["rows"]
    page = (ROOT / "docs" / "fix.md").read_text(encoding="utf-8")
    assert f"{len(rows)} scripts" in page
    for row in rows:
        assert row["only_read"], row["script"]
        if not row["offers"]:
            continue
        assert row["diff_applies"] and row["offers_left"] == 0, row["script"]
        for offer in row["offers"]:
            assert offer["proven"]
            shown = f"| `{row['script']}` | {offer['repair']} | {offer['time_ratio']:.2f}× |"
            assert shown in page, shown
