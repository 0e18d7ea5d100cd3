"""One module per command of `leanstep`; `cli.py` mounts them."""

from __future__ import annotations

from leanstep.files import BadInput

__all__ = ["EXIT_CODES", "BadInput", "FellShort"]

# Scripts and CI rely on them: docs/reference.md.
EXIT_CODES = {
    0: "success",
    1: "the check failed: a proof, a rule of --fail-on, a comparison, a diverged loss",
    2: "bad input, a missing extra or an output that cannot be written; one line says which",
    3: "rehearse: the script ended or was refused before enough steps were recorded",
    129: "ended by SIGHUP",
    130: "interrupted (Ctrl-C)",
    143: "ended by SIGTERM",
}


class FellShort(Exception):
    """The thing asked about fell short (a proof failed, a gate fired). Exit code 1."""
