"""Findings from a profiler trace of an earlier run."""

from leanstep.extras import require

require("--trace", "trace", "numpy")
