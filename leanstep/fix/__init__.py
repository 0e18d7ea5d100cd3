"""Mechanical fixes for findings. Each one is applied to a copy, proven and measured before it is offered.

leanstep fix train.py            a diff
leanstep fix train.py --write    apply it
"""

from __future__ import annotations

from leanstep.fix.offers import Fixes, Offer, Settings, find_fixes

__all__ = ["Fixes", "Offer", "Settings", "find_fixes"]
