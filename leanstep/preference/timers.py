"""Section timers that never make the host wait: CUDA events read at log time, the wall clock on a CPU."""

from __future__ import annotations

import time

import torch


class SectionTimer:
    """Milliseconds between marks, summed by section.

    `start(device)`, then `mark("name")` at the end of each section; `read()` gives mean milliseconds per
    call and clears. Reading CUDA events waits for the last one: call it at log time only.
    """

    def __init__(self) -> None:
        self._spans: dict[str, list] = {}
        self._last: float | torch.cuda.Event = 0.0
        self._cuda = False

    def start(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last = self._now()

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self, name: str, since: float | torch.cuda.Event | None = None) -> float | torch.cuda.Event:
        """End a section; it began at the previous mark, or at `since`."""
        now = self._now()
        self._spans.setdefault(name, []).append((self._last if since is None else since, now))
        self._last = now
        return now

    def read(self) -> dict[str, float]:
        """Mean milliseconds per section since the last reading."""
        means = {}
        for name, spans in self._spans.items():
            total = 0.0
            for begin, end in spans:
                if isinstance(begin, float) and isinstance(end, float):
                    total += 1000 * (end - begin)
                else:
                    assert not isinstance(begin, float) and not isinstance(end, float)
                    end.synchronize()
                    total += begin.elapsed_time(end)
            means[name] = total / len(spans)
        self._spans.clear()
        return means
