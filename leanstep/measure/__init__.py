"""Measurements: time, memory, host reads, parity with fp64, drift of training runs, compiled kernels."""
