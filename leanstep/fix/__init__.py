"""Mechanical fixes for findings. Each one is applied to a copy, proven and measured before it is offered.

leanstep fix train.py            a diff
leanstep fix train.py --write    apply it
"""

# ruff: noqa: E402  (first the line that names the extra, then what imports libcst)
from __future__ import annotations

from leanstep.extras import require

require("fix", "fix", "libcst")

from leanstep.fix.offers import Fixes, Offer, Settings, find_fixes

__all__ = ["Fixes", "Offer", "Settings", "find_fixes"]
