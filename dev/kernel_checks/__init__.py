"""Checks of Triton kernels without a GPU: races, bounds, shared memory, registers, spills."""

from leanstep.extras import require

require("kernels", "triton", "numpy")
