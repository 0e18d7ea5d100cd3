"""Repairs of findings that need no thought: applied to a copy, proven, measured, then offered.

leanstep fix train.py            a diff
leanstep fix train.py --write    apply it
"""

from __future__ import annotations

from leanstep.fix.offers import Fixes, Offer, Settings, find_fixes

__all__ = ["Fixes", "Offer", "Settings", "find_fixes"]
