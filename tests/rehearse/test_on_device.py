"""`diagnose --device`: gains of findings by replay, with hand-computed times."""

from __future__ import annotations

import pytest

from leanstep.commands import BadInput, on_device
from leanstep.rehearse.devices import DEVICES
from leanstep.rehearse.events import HostWait, Kernel, Launch, Recording, Refusal, Request, Step, Storage
from leanstep.rehearse.time_model import RATES, HostCosts
from leanstep.tape.lines import Line

H100 = DEVICES["h100"]
FILE = "train.py"
COSTS = HostCosts()


def lasting(us: float, kind: str = "pointwise") -> Kernel:
    rates = RATES["nvidia"]
    return Kernel(kind, (us - rates.start_us) * 1e-6 * H100.hbm * rates.stream)


def call(kernel: Kernel, number: int, phase: str = "forward") -> Launch:
    return Launch("op", (kernel,), Line(FILE, number, "main"), phase, 0)


def read(number: int) -> list[Launch | HostWait]:
    line = Line(FILE, number, "main")
    return [HostWait("item", line, "forward", 0)]


def recording(*events: Launch | HostWait, steps: int = 3) -> Recording:
    made = Recording(Request(FILE), "2.13", ended="steps")
    for step in range(steps):
        first = len(made.events)
        made.events += list(events)
        made.steps.append(Step(step, first, len(made.events)))
    return made


def finding(rule: str, line: int, **more: object) -> dict:
    return {"rule": rule, "file": FILE, "line": line, "count": 1, "evidence": {}, **more}


def gain(rule: str, line: int, made: Recording, **more: object) -> dict:
    return on_device.gains([finding(rule, line, **more)], [FILE], made, H100)["findings"][0]


def test_a_read_that_the_host_waits_for_gains_its_wait_and_its_own_cost():
    # call 10, kernel 100, sync 12: the next call's kernel starts 22 us after the sync ends.
    made = recording(call(lasting(100), 3), *read(4), call(lasting(100), 5), *read(6))
    got = gain("host-sync", 4, made)
    # Without it the second kernel follows the first at once: 22 us less.
    assert got["gain_ms"] == pytest.approx(22e-3, rel=1e-6)
    assert got["why"] == ""


def test_a_read_of_a_full_queue_gains_nothing_and_says_why():
    slow = [call(lasting(5000), 3) for _ in range(4)]
    made = recording(*slow, *read(4))
    got = gain("host-sync", 4, made)
    assert got["gain_share"] < 0.005
    assert got["why"] == "the device is the bottleneck"


def test_a_storm_becomes_one_call_a_phase():
    tiny = [call(lasting(2), 7) for _ in range(50)]
    back = [call(lasting(2), 7, "backward") for _ in range(50)]
    made = recording(*tiny, *back)
    got = gain("op-storm", 7, made)
    # 50 calls of 10 us and 50 of 5 become one each.
    assert got["gain_ms"] == pytest.approx((49 * 10 + 49 * 5) * 1e-3, rel=0.05)


def test_kernels_of_a_kind_go_and_others_of_the_line_stay():
    made = recording(call(lasting(1000, "strided"), 9), call(lasting(1000), 9), call(lasting(1000), 10))
    assert gain("transposed-copy", 9, made)["gain_ms"] == pytest.approx(1.0, rel=0.02)
    assert gain("transposed-copy", 10, made)["gain_ms"] == pytest.approx(0.0, abs=1e-9)


def test_dead_rows_shrink_the_products_of_their_line():
    product = Kernel("gemm", 1e6, 2.0 * 8192 * 32768 * 1024, "bfloat16", (1, 8192, 32768, 1024))
    made = recording(call(product, 12))
    got = gain("dead-rows", 12, made, count=4096, evidence={"rows": 8192})
    assert 0.35 < got["gain_share"] < 0.65


def test_an_unbatched_optimizer_is_replayed_as_one_pass():
    made = recording(*[call(lasting(3), 20, "optimizer") for _ in range(100)])
    made.storages[0] = Storage(0, 512, (128,), "float32", None, "forward", 0, "parameter")
    assert gain("unbatched-optimizer", 20, made)["gain_share"] > 0.9


def test_a_rule_of_the_cpu_says_so_and_memory_is_given_in_bytes():
    made = recording(call(lasting(10), 3))
    assert gain("slow-dtype", 3, made) == {"gain_ms": None, "gain_share": None, "why": "a matter of this CPU"}
    assert gain("full-vocab", 3, made)["gain_bytes"] == 0


def test_an_event_is_at_a_line_of_one_file():
    here = on_device.at("/home/train.py", 3)
    assert here(Line("/home/train.py", 3, "main")) and not here(Line("/home/train.py", 4, "main"))
    assert not here(Line("/home/other.py", 3, "main")) and not here(None)


def test_without_a_step_one_line_says_why():
    made = Recording(Request(FILE), "2.13", refused=Refusal(None, "reads data_ptr()"), ended="refused")
    with pytest.raises(BadInput, match="--device: no step could be predicted: reads data_ptr"):
        on_device.gains([], [], made, H100)


def test_the_lines_name_rule_place_and_gain():
    made = recording(call(lasting(100), 3), *read(4), call(lasting(100), 5), *read(6))
    findings = [finding("host-sync", 4), finding("slow-dtype", 5)]
    report = on_device.gains(findings, [FILE, FILE], made, H100)
    lines = on_device.text(report, findings).splitlines()
    assert lines[0].startswith("on h100 (predicted): ") and "ms per step, " in lines[0]
    assert "host-sync train.py:4: " in lines[1] and "ms less" in lines[1]
    assert lines[2] == "  slow-dtype train.py:5: a matter of this CPU"
