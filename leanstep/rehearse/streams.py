"""When a device finishes the kernels on its streams and the transfers that overlap with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

# Share of the units that a collective takes from concurrent kernels. Lee et al. 2025 (arXiv 2507.03114)
# measure kernels of Llama and GPT training on A100 and H100: concurrent with collectives they take 18.9%
# longer on average. That is 21 of an H100's 132 units; NCCL starts 16 to 24 blocks.
TAKEN = 1 - 1 / 1.189


class Streams:
    """End times of streams and of links between devices, in seconds.

    Kernels on a stream run in order. Streams run concurrently but share the units: a kernel that starts while
    another stream is busy delays that stream by the time in which both run, less the start time `start_s`.
    A collective runs on the link of its group, after earlier launches on its stream; concurrent kernels lose
    the share `TAKEN`. Calls are made in program order, with the host's time.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._start_s = start_s
        self._ends: dict[int, float] = {0: 0.0}
        self._busy_since: dict[int, float] = {0: 0.0}
        self._links: dict[Hashable, float] = {}
        self._transfers: deque[tuple[float, float]] = deque()
        self._marks: dict[int, float] = {}

    def end(self, stream: int = 0) -> float:
        return self._ends.get(stream, 0.0)

    def end_of_all(self) -> float:
        return max(*self._ends.values(), self.end_of_links())

    def end_of_links(self) -> float:
        return max(self._links.values(), default=0.0)

    def run(self, stream: int, seconds: float, launched: float, *, on_units: bool = True) -> float:
        """Run a kernel, or a copy that needs no units (on_units=False), and return its end."""
        begin = self._begin(stream, launched)
        end = begin + seconds
        if on_units:
            if self._transfers:
                end += TAKEN * self._beside_transfers(begin, end, launched)
            if stream or len(self._ends) > 1:
                self._delay(begin + self._start_s, end, 1.0, stream)
        self._ends[stream] = end
        return end

    def transfer(self, link: Hashable, seconds: float, stream: int, launched: float, mark: int) -> None:
        """Run a collective that a stream launched; `mark` denotes its end."""
        begin = max(self._links.get(link, 0.0), self.end(stream), launched)
        end = self._links[link] = begin + seconds
        self._transfers.append((begin, end))
        self._delay(begin, end, TAKEN)
        self._marks[mark] = end

    def mark(self, mark: int, stream: int) -> None:
        """Store the end of what was launched on a stream."""
        self._marks[mark] = self.end(stream)

    def wait(self, mark: int, stream: int, launched: float) -> float:
        """Block a stream until a mark is reached; return the seconds that it is idle."""
        until, begin = self._marks.get(mark, 0.0), max(self.end(stream), launched)
        if until <= self.end(stream):
            return 0.0
        self._ends[stream] = self._busy_since[stream] = until
        return max(0.0, until - begin)

    def end_of(self, mark: int) -> float:
        return self._marks.get(mark, 0.0)

    def _begin(self, stream: int, launched: float) -> float:
        end = self._ends.get(stream, 0.0)
        if launched > end or stream not in self._ends:
            self._busy_since[stream] = launched
            return launched
        return end

    def _beside_transfers(self, begin: float, end: float, launched: float) -> float:
        transfers = self._transfers
        while transfers and transfers[0][1] <= launched:  # nothing starts before the host launches it
            transfers.popleft()
        return sum(max(0.0, min(end, after) - max(begin, before)) for before, after in transfers)

    def _delay(self, begin: float, end: float, share: float, runs_on: int | None = None) -> None:
        """Delay the busy streams: new work takes a share of their units."""
        for stream, busy_until in self._ends.items():
            if stream != runs_on and busy_until > begin:
                both = min(end, busy_until) - max(begin, self._busy_since[stream])
                if both > 0:
                    self._ends[stream] = busy_until + share * both
