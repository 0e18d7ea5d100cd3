"""Honest measurement: time, memory, host reads, parity with fp64, drift of a training run, planned peaks."""
