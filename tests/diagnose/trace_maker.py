"""Small traces: of scripts run under torch.profiler, and hand-written ones of a GPU."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
from pathlib import Path
from typing import Any

from diagnose.conftest import run_beside
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, schedule

TO_HOST = "Memcpy DtoH (Device -> Pageable)"


def profiled(script: Path, out: Path, num_steps: int = 3) -> Path:
    """Run a script; profile `num_steps` steps after its first optimizer step, as a user's loop would."""
    optimizers: list[int] = []
    state: dict[str, Any] = {}

    def on_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        optimizers.append(id(optimizer))
        if id(optimizer) != optimizers[0] or state.get("done"):
            return
        if "profiler" in state:
            state["profiler"].step()
            return
        state["profiler"] = profile(
            activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True,
            schedule=schedule(wait=0, warmup=0, active=num_steps, repeat=1), on_trace_ready=save,
        )  # fmt: skip
        state["profiler"].start()

    def save(profiler: Any) -> None:
        profiler.export_chrome_trace(str(out))
        state["done"] = True

    hook = register_optimizer_step_post_hook(on_step)
    try:
        with run_beside(script), contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        hook.remove()
        if "profiler" in state and not state.get("done"):
            state["profiler"].stop()
    assert out.is_file(), "the script took too few optimizer steps"
    return out


class GpuTrace:
    """Builds events of a host thread and of a device's stream; times in microseconds."""

    def __init__(self, vendor: str = "cuda") -> None:
        self.vendor, self.events, self.links = vendor, [], 0

    def add(self, cat: str, name: str, start: float, end: float, tid: Any = 1, **args: Any) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 1,
                "tid": tid,
                "ts": start,
                "dur": end - start,
                "args": args,
            }
        )

    def step(self, number: int, start: float, end: float) -> None:
        self.add("user_annotation", f"ProfilerStep#{number}", start, end)

    def note(self, name: str, start: float, end: float) -> None:
        self.add("user_annotation", name, start, end)

    def frame(self, name: str, start: float, end: float) -> None:
        self.add("python_function", name, start, end)

    def op(
        self, name: str, start: float, end: float, dims: Any = None, types: Any = None, **args: Any
    ) -> None:
        if dims is not None:
            args |= {"Input Dims": dims, "Input type": types or ["float"] * len(dims)}
        self.add("cpu_op", name, start, end, **args)

    def launch(self, at: float, start: float, end: float, took: float = 2.0, tid: int = 1) -> None:
        """A launch on the host and its kernel."""
        self.links += 1
        self.add("cuda_runtime", f"{self.vendor}LaunchKernel", at, at + took, tid=tid, correlation=self.links)
        self.add("kernel", "kernel", start, end, tid=7, device=0, stream=7, correlation=self.links)

    def copy(
        self, call: str, at: float, until: float, kind: str, start: float, end: float, size: int = 4
    ) -> None:
        self.links += 1
        self.add("cuda_runtime", self.vendor + call, at, until, correlation=self.links)
        self.add(
            "gpu_memcpy", kind, start, end, tid=7, device=0, stream=7, correlation=self.links, bytes=size
        )

    def call(self, name: str, start: float, end: float) -> None:
        self.links += 1
        self.add("cuda_runtime", self.vendor + name, start, end, correlation=self.links)

    def write(self, path: Path, **facts: Any) -> Path:
        path.write_text(
            json.dumps({"schemaVersion": 1, **facts, "traceEvents": self.events}), encoding="utf-8"
        )
        return path


def waiting(vendor: str, sync: str, copy: str, num_steps: int = 2) -> GpuTrace:
    """Steps of a millisecond with one `.item()` each; the device is idle from 122 to 165."""
    trace = GpuTrace(vendor)
    for number in range(num_steps):
        at = 1000.0 * number
        trace.step(number, at, at + 1000)
        trace.op("aten::mm", at + 10, at + 20)
        trace.launch(at + 12, at + 20, at + 120)
        trace.op("aten::item", at + 30, at + 135)
        trace.op("aten::_local_scalar_dense", at + 31, at + 134)
        trace.copy("MemcpyAsync", at + 32, at + 35, copy, at + 120, at + 122)
        trace.call(sync, at + 36, at + 130)
        trace.op("aten::mm", at + 150, at + 160)
        trace.launch(at + 155, at + 165, at + 1018)
    return trace
