"""Findings from a profiler's trace of a run that happened elsewhere."""

from leanstep.extras import require

require("--trace", "trace", "numpy")
