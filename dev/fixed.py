"""`leanstep fix` over many scripts, into one file: python dev/fixed.py results/fixes.json SCRIPT[::ARGS]...

Each script is repaired on a copy; what is offered must be accepted by `git apply`, and the repaired script
must have no offer left. A script without an offer must be left as it is, byte for byte.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from leanstep.files import BadInput, write_text
from leanstep.fix.offers import Settings, find_fixes, overlaid
from leanstep.fix.repairs import project_root
from leanstep.measure.timing import environment
from leanstep.prove.script_jobs import module_path


def examine(script: Path, argv: list[str]) -> dict:
    """One row: what was offered and refused, what the copy showed, what is left in the repaired script."""
    settings = Settings(fork=True, budget_s=4.0)
    old = {path: path.read_bytes() for path in script.parent.rglob("*.py")}
    try:
        fixes = find_fixes(script, argv, settings)
    except BadInput as error:
        return {"script": script.name, "problem": str(error)}
    same = all(path.read_bytes() == data for path, data in old.items())
    row = {
        "script": "/".join(script.parts[-2:]),
        "offers": [
            {
                "repair": offer.title,
                "rules": sorted({finding.rule for finding in offer.findings}),
                "checks": len(offer.proof.rows),
                "proven": offer.proof.ok,
                "time_ratio": offer.bench.time_ratio,
                "host_reads": [offer.bench.before.host_syncs, offer.bench.after.host_syncs],
                "ops": [offer.bench.before.ops, offer.bench.after.ops],
            }
            for offer in fixes.offers
        ],
        "together": fixes.together.bench.time_ratio if fixes.together else None,
        "refused": [f"{finding.rule}: {why}" for finding, why in fixes.refused],
        "only_read": same,
    }
    if fixes.changed:
        with tempfile.TemporaryDirectory() as folder:
            for path, (data, _) in fixes.changed.items():
                target = Path(folder) / _from_here(path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
            applied = subprocess.run(["git", "apply", "-"], input=fixes.diff(), text=True, cwd=folder)
            row["diff_applies"] = applied.returncode == 0 and all(
                (Path(folder) / _from_here(path)).read_bytes() == new
                for path, (_, new) in fixes.changed.items()
            )
        changed = {path: new for path, (_, new) in fixes.changed.items()}
        with (
            overlaid(script.absolute(), project_root(script.absolute()), changed) as (copy, places),
            module_path(places),
        ):
            row["offers_left"] = len(find_fixes(copy, argv, settings).offers)
    return row


def _from_here(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(*path.parts[1:])


def main() -> None:
    target, *scripts = sys.argv[1:]
    rows = []
    for text in scripts:
        name, _, arguments = text.partition("::")
        rows.append(examine(Path(name), shlex.split(arguments)))
        print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
        write_text(target, json.dumps({**environment(), "rows": rows}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
