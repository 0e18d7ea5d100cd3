"""One module per command of `leanstep`; `cli.py` mounts them."""

from __future__ import annotations

from leanstep.files import BadInput

__all__ = ["EXIT_CODES", "BadInput", "FellShort"]

# Scripts and CI rely on them: docs/exit_codes.md.
EXIT_CODES = {
    0: "done, and nothing speaks against it",
    1: "the answer is no: a proof failed, a rule of --fail-on fired, a comparison got worse, a loss diverged",
    2: "bad input, a missing extra or an output that cannot be written; one line says which",
    3: "rehearse: the script ended or was refused before enough steps were seen",
    129: "ended by SIGHUP",
    130: "interrupted (Ctrl-C)",
    143: "ended by SIGTERM",
}


class FellShort(Exception):
    """The thing asked about fell short (a proof failed, a gate fired). Exit code 1."""
