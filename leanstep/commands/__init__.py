"""One module per command of `leanstep`; `cli.py` mounts them."""

from __future__ import annotations

from leanstep.files import BadInput

__all__ = ["BadInput", "FellShort"]


class FellShort(Exception):
    """The thing asked about fell short (a proof failed, a gate fired). Exit code 1."""
