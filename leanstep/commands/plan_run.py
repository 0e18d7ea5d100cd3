"""What every plan begins and ends with: shared options, verdicts per device, the way out of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console

from leanstep.commands import BadInput
from leanstep.commands.output import check_writable, console, write_json
from leanstep.commands.plan_devices import GIB, device_table, judge, parse_devices

JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - = standard output.")
]
HtmlOption = Annotated[
    str | None, typer.Option("--html", metavar="FILE", help="Write the result into this report page.")
]
DeviceOption = Annotated[
    str | None, typer.Option("--devices", help="Only these: h100,h200,a100-40,a100-80,rtx4090,b200.")
]
DeviceSizeOption = Annotated[
    float | None, typer.Option("--device-gb", help="A device of your own with this many GiB.")
]
ReserveOption = Annotated[
    float, typer.Option("--reserve-gb", help="GiB that the rest (model, optimizer, context) already holds.")
]
SimulateOption = Annotated[
    str, typer.Option(help="Run the real code on fake tensors for: leanstep (default), all or none.")
]

Row = dict[str, Any]
Columns = Sequence[tuple[str, Callable[[Row], str]]]


@dataclass(frozen=True)
class PlanRun:
    """One plan under way: the devices it is judged by and where its results go."""

    kind: str
    capacities: dict[str, int]
    reserve_gb: float
    json: str | None
    html: str | None
    out: Console

    @classmethod
    def begin(
        cls,
        kind: str,
        simulate: str,
        devices: str | None,
        device_gb: float | None,
        reserve_gb: float,
        json: str | None,
        html: str | None,
    ) -> PlanRun:
        """Check the shared options before the work starts."""
        if simulate not in ("leanstep", "all", "none"):
            raise BadInput(f"--simulate: expected leanstep, all or none, got {simulate!r}")
        capacities = parse_devices(devices, device_gb, reserve_gb)
        check_writable(json, "--json")
        check_writable(html, "--html")
        return cls(kind, capacities, reserve_gb, json, html, console(json))

    def judge(self, total_bytes: int, parts: dict[str, int]) -> dict[str, Row]:
        """Per device: whether the total fits and, if not, which part takes most."""
        name, part = max(parts.items(), key=lambda item: item[1])
        return judge(total_bytes, self.capacities, f"{name} {part / GIB:.2f} GiB")

    def finish(self, result: Row, title: str, columns: Columns) -> bool:
        """Write the result and print its rows; false when standard output carries only the JSON object."""
        from leanstep.measure.timing import environment

        reserve = round(self.reserve_gb * GIB)
        head = {"plan": self.kind, "capacities": self.capacities, "reserve_bytes": reserve}
        result = {**environment(), **head, **result}
        write_json(result, self.json)
        if self.html:
            from leanstep.report.page import add_section

            add_section(self.html, "plan", result)
        if self.json == "-":
            return False
        self.out.print(device_table(title, result["rows"], columns, self.capacities))
        return True
