"""Findings from a profiler's trace of a run that happened elsewhere."""
