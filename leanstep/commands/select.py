"""Turn what was typed into cases, sizes, implementations and sweeps, or into one clear line."""

from __future__ import annotations

import torch

from leanstep.case import Case, all_cases, get_case
from leanstep.commands import BadInput

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def select_cases(names: list[str] | None) -> list[Case]:
    if not names:
        return list(all_cases().values())
    try:
        return [get_case(name) for name in names]
    except ValueError as error:
        raise BadInput(str(error)) from None


def split_list(text: str | None, argument: str) -> tuple[str, ...] | None:
    """`a,b` -> ("a", "b"); an empty item is a typing error."""
    if text is None:
        return None
    items = tuple(item.strip() for item in text.split(","))
    if not all(items):
        raise BadInput(f"{argument}: expected names separated by commas, got {text!r}")
    return items


def check_implementations(cases: list[Case], names: tuple[str, ...] | None) -> None:
    """Every name must exist in at least one of the cases."""
    known = {i.name for case in cases for i in case.implementations}
    for name in names or ():
        if name not in known:
            raise BadInput(f"--impl: no implementation {name!r}; there are {', '.join(sorted(known))}")


def parse_dtypes(text: str | None) -> tuple[torch.dtype, ...] | None:
    names = split_list(text, "--dtype")
    if names is None:
        return None
    for name in names:
        if name not in DTYPES:
            raise BadInput(f"--dtype: no dtype {name!r}; it takes {', '.join(DTYPES)}")
    return tuple(DTYPES[name] for name in names)


def parse_device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise BadInput(f"--device: no device {text!r}; it takes cpu or cuda[:N]") from None
    if device.type not in ("cpu", "cuda"):
        raise BadInput(f"--device: expected cpu or cuda[:N], got {text!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device: cuda is not available on this machine")
    return device


def parse_sweep(text: str | None, cases: list[Case]) -> list[dict[str, int | float]]:
    """`variants=3,6,12` -> one override per value; without --sweep one empty override."""
    if text is None:
        return [{}]
    key, equals, values = text.partition("=")
    items = [item.strip() for item in values.split(",")]
    if not equals or not key.strip() or not all(items):
        raise BadInput(f"--sweep: expected key=value,value, got {text!r}")
    key = key.strip()
    for case in cases:
        for name, params in case.sizes.items():
            if key not in params:
                raise BadInput(
                    f"--sweep: {case.name} has no parameter {key!r} at {name}; it has {', '.join(params)}"
                )
    return [{key: _number(item)} for item in items]


def _number(text: str) -> int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise BadInput(f"--sweep: expected a number, got {text!r}")
