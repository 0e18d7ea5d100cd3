"""What a GPU would find in a Triton kernel, without one: races, bounds, shared memory, registers, spills."""

from leanstep.extras import require

require("kernels", "triton", "numpy")
