"""A device of known durations, kernels as sleeps in a thread: do `diagnose --device`'s gains hold?

    python dev/emulate_device.py          planted scripts: predicted and measured gain of each removed sync
    python dev/emulate_device.py 400      durations 400 times as long (200 unless told)

Each planted script reads the device on three lines. It is rehearsed as it is: the predicted gain of a line is
what `diagnose --device` says of a host-sync finding there. Then it is rehearsed with that read taken out of
the program, and both are played for real: the host thread spends the cost of each call and puts the
kernel's duration into a queue, a device thread takes them in order and sleeps, a sync waits until it is
empty. The measured gain is the difference of the two steps on the wall clock.

Durations are stretched, so that the scheduler's own delays stay small beside them. A tool, not a test: it
takes three minutes of mostly sleeping and its figures are wall-clock times.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from leanstep.commands import on_device
from leanstep.rehearse.devices import DEVICES, Device
from leanstep.rehearse.events import Event, HostWait, Launch, Recording, Request
from leanstep.rehearse.stage import rehearse
from leanstep.rehearse.time_model import Clock, HostCosts

STRETCH = float(sys.argv[1]) if len(sys.argv) > 1 else 200.0
REPEATS = 3
LINES = ("layer", "norm", "metric")
# device, width, rows, layers: the device far behind its host, about as fast, and faster than it.
SCRIPTS = {
    "bound by the device": ("a100", 1024, 8192, 8),
    "balanced": ("h100", 1024, 2048, 8),
    "bound by the host": ("b200", 256, 512, 8),
}
PROGRAM = """
import sys
import torch

width, rows, layers, left_out = *map(int, sys.argv[1:4]), sys.argv[4]
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to("cuda").bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
batch = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
seen = []
for _ in range(4):
    hidden = batch
    for layer in model:
        hidden = layer(hidden).relu()
        largest = hidden.max()
        if left_out != "layer":
            seen.append(largest.item())  # MARK layer
    hidden.square().mean().backward()
    for p in model.parameters():
        norm = p.grad.norm()
        if left_out != "norm":
            seen.append(float(norm))  # MARK norm
    optimizer.step()
    optimizer.zero_grad()
    for part in batch.split(rows // 8):
        share = (part.float() > 0.5).float().mean()
        if left_out != "metric":
            seen.append(share.tolist())  # MARK metric
"""


def rehearsed(script: Path, name: str, left_out: str) -> Recording:
    device, *sizes = SCRIPTS[name]
    recording = rehearse(
        Request(str(script), (*map(str, sizes), left_out), device=device, steps=4), quiet=True
    )
    assert recording.ended == "steps", recording.refused
    return recording


def predicted(recording: Recording, script: Path, device: Device) -> tuple[float, dict[str, float]]:
    """Seconds of the step, and of each marked line's gain: the replay behind `diagnose --device`."""
    numbers = {
        line.split("# MARK ")[1]: number
        for number, line in enumerate(script.read_text().splitlines(), 1)
        if "# MARK " in line
    }
    findings = [{"rule": "host-sync", "line": numbers[name], "count": 1} for name in LINES]
    report = on_device.gains(findings, [str(script)] * len(LINES), recording, device)
    gained = zip(LINES, report["findings"], strict=True)
    return report["step_ms"] * 1e-3, {name: entry["gain_ms"] * 1e-3 for name, entry in gained}


@dataclass
class End:
    """When each thread was through with a step."""

    host: float
    device: float = 0.0


class Emulator:
    """Plays events on two threads. Deadlines follow each other, so that late wake-ups do not add up."""

    def __init__(self, device: Device):
        self.clock, self.costs = Clock(device), HostCosts()
        self.work: queue.Queue[tuple[float, float] | End | None] = queue.Queue()
        self.done = 0.0

    def play(self, steps: Sequence[Sequence[Event]]) -> float:
        """Seconds of the last step, not stretched: between the ends of two steps on the later thread."""
        thread = threading.Thread(target=self._device, daemon=True)
        thread.start()
        punctual(True)
        self.host = self.done = time.perf_counter()
        ends = []
        for events in steps:
            for event in events:
                if isinstance(event, HostWait):
                    self.work.join()
                    self.host = max(self.host, time.perf_counter())
                    self._spend(self.costs.wait_us)
                elif isinstance(event, Launch):
                    self._call(event)
            end = End(time.perf_counter())
            self.work.put(end)
            ends.append(end)
        self.work.join()
        self.work.put(None)
        thread.join()
        punctual(False)
        before, after = (max(end.host, end.device) for end in ends[-2:])
        return (after - before) / STRETCH

    def _call(self, event: Launch) -> None:
        first = self.costs.backward_us if event.phase == "backward" else self.costs.call_us
        self._spend(first if event.kernels else self.costs.view_us)
        further = False
        for kernel in event.kernels:
            for _ in range(kernel.launches):
                if further:
                    self._spend(self.costs.launch_us)
                further = True
                duration = STRETCH * self.clock.price(kernel) / kernel.launches
                self.work.put((max(self.host, time.perf_counter()), duration))

    def _spend(self, us: float) -> None:
        self.host += STRETCH * us * 1e-6
        until(self.host)

    def _device(self) -> None:
        punctual(True)
        while (task := self.work.get()) is not None:
            if isinstance(task, End):
                task.device = time.perf_counter()
            else:
                launched, duration = task
                self.done = max(self.done, launched) + duration
                until(self.done)
            self.work.task_done()
        self.work.task_done()


def punctual(on: bool) -> None:
    """Whether this thread wakes up in time on a busy machine; no matter where that is not allowed."""
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO if on else os.SCHED_OTHER, os.sched_param(1 if on else 0))


def until(deadline: float) -> None:
    while (left := deadline - time.perf_counter()) > 0:
        time.sleep(left)


def measured(recording: Recording, device: Device) -> float:
    """Least seconds of a step that follows another: what disturbs a run only lengthens it."""
    steps = [recording.events[step.first : step.last] for step in recording.steps[-2:]]
    return min(Emulator(device).play(steps) for _ in range(REPEATS))


def main() -> None:
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "planted.py"
        script.write_text(PROGRAM)
        for name, (key, *_) in SCRIPTS.items():
            device = DEVICES[key]
            whole = rehearsed(script, name, "nothing")
            step, gains = predicted(whole, script, device)
            took = measured(whole, device)
            print(f"{name} ({key}): step predicted {step * 1e3:.2f} ms, emulated {took * 1e3:.2f} ms")
            for line in LINES:
                gained = took - measured(rehearsed(script, name, line), device)
                # Gains below half a percent of the step are nothing; so must the other be.
                apart = abs(gains[line] - gained) / max(gained, 0.005 * took)
                worst = max(worst, apart)
                print(
                    f"  without {line:7s} predicted {gains[line] * 1e3:7.3f} ms less,"
                    f" measured {gained * 1e3:7.3f} ms less ({100 * apart:.0f}% apart)"
                )
    print(f"largest distance: {100 * worst:.0f}%")


if __name__ == "__main__":
    main()
