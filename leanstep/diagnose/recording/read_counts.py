"""Host reads of the running step: which calls and ops are reads, and of which values."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from leanstep.diagnose.recording import source
from leanstep.diagnose.recording.lineage import moves_to_device
from leanstep.diagnose.step_records import BACKWARD, FORWARD, OPTIMIZER
from leanstep.tape.lines import IN_COUNTER, IN_DATA, IN_LEANSTEP, IN_SCALER, Site
from leanstep.tape.syncs import HostCopies, call_read, run_read_call


class ReadCounter:
    """Counts reads in a recorder's state; reads of values of unknown origin stay pending."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.copies = HostCopies()
        # Reads of device tensors, which torch's sync debugging also reports.
        self.on_device = 0

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a Python-level call that may be a read."""
        with torch._C.DisableTorchFunction():
            kind = call_read(func, args, kwargs)
            if kind is None and func is Tensor.to and moves_to_device(args, kwargs):
                self._leave_host(args[0], sys._getframe(1))
        if kind is None:
            return func(*args, **kwargs)
        return run_read_call(func, args, kwargs, kind, self.copies, self._num_reads, self._count_call)

    def _leave_host(self, tensor: Tensor, frame: FrameType) -> None:
        # Ignore a library's `.to(x.device)`: most of these calls move nothing.
        site, _ = self.recorder.stack.locate(frame, False)
        if site is not None and not site.line.library and tensor.layout is torch.strided:
            self.recorder.state.families.leave_host(tensor.untyped_storage()._cdata)

    def _num_reads(self) -> int:
        return self.recorder.state.num_reads

    def _count_call(self, kind: str, target: Tensor | None) -> None:
        recorder = self.recorder
        with torch._C.DisableTorchFunction():
            in_engine = source.current_node is not None and source.current_node() is not None
            site, flags = recorder.stack.locate(sys._getframe(3), in_engine)
            if site is None:
                return
            tainted = False
            if target is not None:
                storage = target.untyped_storage()._cdata
                tainted = (
                    target.requires_grad
                    or storage in recorder.parameters
                    or storage in recorder.state.tainted
                    or storage in recorder.state.gradients_under_way
                )
            phase = BACKWARD if in_engine else OPTIMIZER if recorder.stepping else FORWARD
            self.count(kind, target, site, phase, flags, tainted)

    def count(
        self, kind: str, target: Tensor | None, site: Site, phase: str, flags: int, tainted: bool
    ) -> None:
        """Count one read at `site`; `tainted`: the value depends on a parameter."""
        # torch's optimizers keep their step counters on the host, as samplers do with permutations.
        if flags & (IN_COUNTER | IN_DATA | IN_LEANSTEP):
            return
        if target is not None and self.copies.holds(target):
            return
        recorder = self.recorder
        # A GradScaler checks whether gradients overflowed: these values come from the model.
        tainted |= bool(flags & IN_SCALER)
        if recorder.accelerator and target is not None and target.device.type == "cpu" and kind != "cpu":
            return
        state = recorder.state
        state.num_reads += 1
        if recorder.accelerator if target is None else target.device.type != "cpu":
            self.on_device += 1
        if tainted or recorder.accelerator or target is None:
            state.count_read(site, kind, phase, "of the model" if tainted else "of data")
        else:
            family = state.families.of(target.untyped_storage()._cdata)
            state.reads_of_data.append((site, kind, phase, family))
