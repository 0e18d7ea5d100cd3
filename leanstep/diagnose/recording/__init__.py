"""Record a running step: hooks into torch, lines of source, counters. `watch` is the entry point."""
