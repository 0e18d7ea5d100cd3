"""`leanstep rules`: the rules of diagnose, as a list or one in full."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from leanstep.commands import BadInput
from leanstep.commands.terminal import JsonOption, check_writable, console, print_text, write_json


def rules(
    rule: Annotated[str | None, typer.Argument(help="Print this one in full.", show_default=False)] = None,
    json: JsonOption = None,
) -> None:
    """List the rules of leanstep diagnose: when each one fires and what to do.

    Examples: leanstep rules

    leanstep rules host-sync
    """
    from leanstep.diagnose import rule_list

    check_writable(json, "--json")
    names = list(rule_list.FIRES_WHEN)
    if rule is not None and rule not in names:
        raise BadInput(f"RULE: no rule {rule!r}; there are {', '.join(names)}")
    out = console(json)
    if rule is not None:
        print_text(out, rule_list.as_markdown(rule).rstrip("\n"))
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("rule", "fires when", "do"):
            table.add_column(column, no_wrap=column == "rule")
        for entry in map(rule_list.as_dict, names):
            table.add_row(entry["rule"], entry["fires_when"], entry["short_fix"])
        out.print(table, markup=False)
    write_json({"rules": [rule_list.as_dict(name) for name in ([rule] if rule else names)]}, json)
