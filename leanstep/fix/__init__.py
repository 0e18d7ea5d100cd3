"""Mechanical fixes for findings. Each one is applied to a copy, proven and measured before it is offered.

leanstep fix train.py            a diff
leanstep fix train.py --write    apply it
"""

from __future__ import annotations

from leanstep.extras import require

require("fix", "fix", "libcst")
