"""Memory of the running step: how much of one width is alive at once, and short-lived buffers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from leanstep.diagnose.step_records import Tally, tally
from leanstep.tape.lines import Site


class LiveBytes:
    """The peak bytes of tensors of one width."""

    def __init__(self) -> None:
        self.peak = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        for key in [key for key, (held, _) in self._held.items() if held.expired()]:
            del self._held[key]
        self._held[storage._cdata] = (StorageWeakRef(storage), tensor.nbytes)
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._held.values()))


class Churn:
    """Large buffers allocated under no_grad, by line, and which of them outlive the next step."""

    def __init__(self) -> None:
        # Buffers of the previous step, until it is known which of them outlive this one.
        self._earlier: tuple[dict[Site, Tally], list[tuple[Site, StorageWeakRef, int, int]]] = ({}, [])
        self._outlived: dict[Site, int] = {}
        self.new_step()

    def new_step(self) -> None:
        self.fresh: list[tuple[Site, StorageWeakRef, int, int]] = []

    def add(self, outs: Any, site: Site, least: int, weight_matmuls: int) -> None:
        """Record a buffer. `weight_matmuls`: matmuls with a weight so far, to tell layers from a loop."""
        for out in outs:
            if out.nbytes >= least:
                self.fresh.append((site, StorageWeakRef(out.untyped_storage()), out.nbytes, weight_matmuls))

    def close(self) -> dict[Site, Tally]:
        """Return the buffers of this step. Those that also outlive the next step are removed at its end."""
        self.settle()
        tallies: dict[Site, Tally] = {}
        spans: dict[Site, tuple[int, int]] = {}
        for site, _, num_bytes, weight_matmuls in self.fresh:
            spans[site] = (spans.get(site, (weight_matmuls, 0))[0], weight_matmuls)
            tally(tallies, site, num_bytes)
        # The activations of a frozen model are not churn: layers run between one buffer and the next.
        tallies = {s: t for s, t in tallies.items() if spans[s][1] - spans[s][0] < t.count / 2}
        self._earlier = (tallies, self.fresh)
        return tallies

    def settle(self, last: bool = False) -> None:
        """Remove the buffers of the previous step that are still alive: they are in use.

        A variable that is reassigned in every step holds its value until then and does not count. So a buffer
        that is alive at the end of its own step (`last`: there is no later step) counts as in use only if
        earlier steps showed it, or if it is more than one value of the line.
        """
        tallies, fresh = self._earlier
        alive: dict[Site, int] = {}
        for site, storage, _, _ in fresh:
            if not storage.expired():
                alive[site] = alive.get(site, 0) + 1
        for site, entry in tallies.items():
            held = self._outlived.get(site, max(alive.get(site, 0) - 1, 0)) if last else alive.get(site, 0)
            if not last:
                self._outlived[site] = held
            if held:
                entry.bytes -= entry.bytes * held // entry.count
                entry.count -= held
        self._earlier = ({}, [])
