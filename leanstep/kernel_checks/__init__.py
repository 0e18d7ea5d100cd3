"""Checks of Triton kernels without a GPU: races, bounds, shared memory, registers, spills."""
