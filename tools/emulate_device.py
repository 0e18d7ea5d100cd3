"""A device of known durations: kernels are sleeps in a thread. Do the predicted gains of removed syncs hold?

    python tools/emulate_device.py            a few planted steps; predicted and measured gain of each sync
    python tools/emulate_device.py 10         durations ten times as long, for a machine that is busy

The host thread spins for the cost of a call and puts the kernel's duration into a queue; a device thread
takes them in order and sleeps; a sync waits until the queue is empty. The same events go through the clock of
`leanstep rehearse` with the same costs. Wall-clock times: run it on a quiet machine, it is no part of the
tests. Durations are long (milliseconds), so that the scheduler's own delays stay small beside them.
"""

from __future__ import annotations

import queue
import random
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from leanstep.rehearse.devices import DEVICES
from leanstep.rehearse.events import HostWait, Kernel, Launch, Line
from leanstep.rehearse.time_model import Clock, HostCosts

SCALE = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
COSTS = HostCosts(
    call_us=2000 * SCALE,
    backward_us=2000 * SCALE,
    view_us=200 * SCALE,
    launch_us=300 * SCALE,
    wait_us=500 * SCALE,
)
Event = Launch | HostWait


class Emulated(Clock):
    """The clock with durations given by the kernels' names, in milliseconds."""

    def price(self, kernel: Kernel) -> float:
        return float(kernel.name) * 1e-3


def predicted(events: list[Event]) -> float:
    clock = Emulated(DEVICES["h100"], costs=COSTS)
    for event in events:
        clock.play(event)
    return clock.now


def measured(events: list[Event]) -> float:
    work: queue.Queue[float | None] = queue.Queue()

    def device() -> None:
        while (duration := work.get()) is not None:
            until = time.perf_counter() + duration
            while (left := until - time.perf_counter()) > 0:
                time.sleep(left)
            work.task_done()

    thread = threading.Thread(target=device, daemon=True)
    thread.start()
    start = time.perf_counter()
    for event in events:
        if isinstance(event, HostWait):
            work.join()
            busy(COSTS.wait_us)
            continue
        busy(COSTS.call_us if event.kernels else COSTS.view_us)
        for kernel in event.kernels:
            work.put(float(kernel.name) * 1e-3)
    work.join()
    took = time.perf_counter() - start
    work.put(None)
    return took


def busy(us: float) -> None:
    until = time.perf_counter() + us * 1e-6
    while (left := until - time.perf_counter()) > 0:
        time.sleep(left)  # gives the interpreter to the device thread


def planted(seed: int, blocks: int = 6) -> list[Event]:
    """Blocks of one long kernel, a read of its result, and small calls that could have run ahead of it."""
    draw = random.Random(seed)
    lines = [Line("planted.py", number, "step") for number in (10, 20, 30)]

    def call(ms: float) -> Launch:
        return Launch("op", (Kernel("pointwise", 0.0, name=str(SCALE * ms)),), None, "forward", 0)

    events: list[Event] = []
    for block in range(blocks):
        events.append(call(draw.choice((8.0, 12.0, 16.0))))
        events.append(HostWait("item", lines[block % 3], "forward", 0))
        events += [call(0.5) for _ in range(draw.randint(2, 5))]
    return events


def without(events: list[Event], line: Line) -> list[Event]:
    return [e for e in events if not (isinstance(e, HostWait) and e.line == line)]


def main() -> None:
    worst = 0.0
    for seed in range(4):
        events = planted(seed)
        now = predicted(events), min(measured(events) for _ in range(3))
        print(f"step {seed}: predicted {now[0] * 1e3:.1f} ms, measured {now[1] * 1e3:.1f} ms")
        for number in (10, 20, 30):
            rest = without(events, Line("planted.py", number, "step"))
            then = predicted(rest), min(measured(rest) for _ in range(3))
            gains = [(a - b) * 1e3 for a, b in zip(now, then, strict=True)]
            away = abs(gains[0] / gains[1] - 1) if gains[1] > 0 else float("inf")
            worst = max(worst, away)
            print(
                f"  without line {number}: predicted {gains[0]:6.1f} ms, measured {gains[1]:6.1f} ms less"
                f" ({100 * away:.1f}% apart)"
            )
    print(f"largest distance of a gain: {100 * worst:.1f}%")


if __name__ == "__main__":
    main()
