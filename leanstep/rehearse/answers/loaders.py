"""DataLoader: it runs in this process; how many batches the rehearsal saw, and what comes after them."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic  # the program's own clock may return predicted time
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter

from leanstep.rehearse.tape import Tape

_OFF = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "multiprocessing_context")
# Batches to look at after the rehearsal, and the seconds that this may take.
_AHEAD, _AHEAD_S = 256, 3.0


class Loaders:
    """The batches that the program reads. sizes: elements of the largest tensor of each."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.sizes: list[int] = []
        self.restarts = 0
        self._last: Iterator[Any] | None = None

    def install(self) -> None:
        from torch.utils.data import DataLoader

        construct, iterate = DataLoader.__init__, DataLoader.__iter__

        def build(loader: Any, *args: Any, **kwargs: Any) -> None:
            pinned = bool(kwargs.get("pin_memory"))
            for name in (*_OFF, "pin_memory_device", "timeout"):
                kwargs.pop(name, None)
            construct(loader, *args[:5], **kwargs)
            loader.__dict__["_rehearsed_pinned"] = pinned

        def batches(loader: Any) -> Any:
            began = loader.__dict__.get("_rehearsed_begun", False)
            self.restarts += began and self.tape.step > 0
            loader.__dict__["_rehearsed_begun"] = True
            source = iterate(loader)
            for batch in source:
                if size := _size(batch):  # not the texts that a trainer tokenizes later
                    self._last = source
                    self.sizes.append(size)
                if loader.__dict__.get("_rehearsed_pinned"):
                    for tensor in tree_iter(batch):
                        if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor):
                            self.tape.pin(tensor)
                yield batch

        patched: Any = DataLoader
        patched.__init__, patched.__iter__ = build, batches

    def report(self) -> str:
        """Describe the batches that were seen; read the next ones on the host for a longer one."""
        if not self.sizes:
            return ""
        least, most = min(self.sizes), max(self.sizes)
        text = f"batches: {len(self.sizes)} seen, " + (
            f"all of {most:,} elements" if least == most else f"{least:,} to {most:,} elements"
        )
        ahead = self._look_ahead()
        if ahead and max(ahead) > most:
            number = len(self.sizes) + 1 + ahead.index(max(ahead))
            text += (
                f"; batch {number} has {max(ahead):,}, {max(ahead) / most:.1f} times the largest seen: "
                "expect more memory than predicted here"
            )
        if self.restarts:
            text += f"; the DataLoader was restarted {self.restarts} times, which is not in the step time"
        return text

    def _look_ahead(self) -> list[int]:
        sizes: list[int] = []
        end = monotonic() + _AHEAD_S
        try:
            with self.tape.aside():
                while self._last is not None and len(sizes) < _AHEAD and monotonic() < end:
                    sizes.append(_size(next(self._last)))
        except Exception:  # the program's own data: whatever it raises, the report goes on
            return sizes
        return sizes


def _size(batch: Any) -> int:
    return max((t.numel() for t in tree_iter(batch) if isinstance(t, Tensor)), default=0)
