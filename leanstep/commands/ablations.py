"""`leanstep train gpt --ablate FIELD=VALUE,...`: paired runs with and without a change of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from leanstep.commands import BadInput
from leanstep.commands.terminal import write_json

UNCHANGED = "unchanged"


def compare_variants(
    plan: Any,
    variants: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    world: Any,
    json_path: str | None,
    html: str | None = None,
) -> int:
    """Train the plan as it is and with the fields of each variant, all with the same seeds.

    Seeds outside, variants inside: the machine's drift over the hours is the same for all.
    """
    losses: dict[str, list[float]] = {name: [] for name in (UNCHANGED, *variants)}
    for seed in seeds:
        for name, own in losses.items():
            model = {**plan.options.get("model", {}), **variants.get(name, {})}
            changed = replace(plan, options={**plan.options, "model": model})
            _, outcome = changed.run(seed, plan.out / _folder(name) / f"seed-{seed}", world)
            if outcome.stopped_by in ("SIGTERM", "SIGINT"):
                return 0 if outcome.stopped_by == "SIGTERM" else 130
            if outcome.last_evaluation.get("val_loss") is None:
                raise BadInput("--eval-every: expected an evaluation at the end of the run, there was none")
            own.append(outcome.last_evaluation["val_loss"])
    if world.is_main:
        rows = _rows(losses)
        result = {"recipe": plan.recipe, "preset": plan.preset, "seeds": list(seeds), "rows": rows}
        write_json(result, json_path)
        if html is not None:
            from leanstep.report.page import add_section

            add_section(html, "ablations", result)
        if json_path != "-":
            _print(rows)
    return 0


def _folder(variant: str) -> Path:
    return Path("".join(letter if letter.isalnum() or letter in "=_.-" else "_" for letter in variant))


def _rows(losses: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    from leanstep.measure.drift import paired_shift

    unchanged = losses[UNCHANGED]
    rows = []
    for name, own in losses.items():
        row: dict[str, Any] = {"variant": name, "losses": own, "loss": sum(own) / len(own)}
        rows.append(row if name == UNCHANGED else {**row, **paired_shift(unchanged, own)})
    return rows


def _print(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("variant", "final loss", "difference", "95 % interval", "p", "could see"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for row in rows:
        cells = [row["variant"], f"{row['loss']:.4f}"]
        if "shift" in row:
            cells += [
                f"{row['shift']:+.4f}",
                f"{row['shift_low']:+.4f} to {row['shift_high']:+.4f}",
                f"{row['p_value']:.2g}",
                f"{row['detectable_shift']:.4f}",
            ]
        table.add_row(*cells)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{len(rows[0]['losses'])} paired runs. Could see: a shift that they would find 4 times out of 5."
    )
