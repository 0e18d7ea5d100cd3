"""One module per command of `leanstep`; `cli.py` mounts them."""

from __future__ import annotations


class BadInput(Exception):
    """The caller's mistake: one line that names the argument, what came and what is expected. Exit code 2."""


class FellShort(Exception):
    """The thing asked about fell short (a proof failed, a gate fired). Exit code 1."""
