"""One module per command of `leanstep`; `cli.py` mounts them."""

from __future__ import annotations

from leanstep.files import BadInput

__all__ = ["EXIT_CODES", "BadInput", "FellShort"]

# Scripts and CI rely on them: docs/reference.md.
EXIT_CODES = {
    0: "success",
    1: "the check ran and failed: the updates differ, or a rule of --fail-on fired",
    2: "bad input, a missing extra, scripts that cannot be compared; one line says which",
    3: "rehearse: the script ended or stopped before enough steps were recorded",
    129: "ended by SIGHUP",
    130: "interrupted (Ctrl-C)",
    143: "ended by SIGTERM",
}


class FellShort(Exception):
    """The check ran and failed. Exit code 1."""
