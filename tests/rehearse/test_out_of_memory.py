"""A full device: scripts that look for the largest batch take the branch that they would take there."""

from __future__ import annotations

import json

import pytest
from rehearse.rehearsed import run_text

from leanstep.rehearse.answers.fake_device import RehearsalError
from leanstep.rehearse.devices import device_named
from leanstep.rehearse.out_of_memory import _catches
from leanstep.rehearse.verdict import judge

PROBE = """\
import json, torch
layers = [torch.nn.Linear(8192, 8192) for _ in range(4)]
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(rows):
    model(torch.randn(rows, 8192, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

rows, tried = 65536, []
while rows < 2**24:
    try:
        step(rows)
    except HANDLED:
        break
    tried.append(rows)
    rows *= 2
full = torch.cuda.memory_allocated()
for _ in range(5):
    step(1024)
    free, total = torch.cuda.mem_get_info()
    print(json.dumps([tried, full, total - free, torch.cuda.memory_reserved()]))
"""
HANDLERS = {
    "torch.cuda.OutOfMemoryError": True,
    "(ValueError, torch.OutOfMemoryError)": True,
    "ValueError": False,
}
WITHS = ("contextlib.suppress(torch.OutOfMemoryError)", "contextlib.suppress(ValueError, RuntimeError)")


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_full_device_raises_where_the_program_catches_it(tmp_path, handler):
    steps = 3 if HANDLERS[handler] else 4
    got = run_text(tmp_path, PROBE.replace("HANDLED", handler), device="h100", steps=steps)
    report = judge(got.recording, [device_named("h100")])
    if not HANDLERS[handler]:
        assert not report["memory"]["fits"] and got.recording.ended == "steps"
        return
    tried, full, taken, reserved = json.loads(got.printed.splitlines()[-1])
    # The probe's updates are no steps of the training: three with 1,024 rows were seen, and are reported.
    assert tried == [65536, 131072, 262144] and len(got.printed.splitlines()) == 2
    assert report["memory"]["fits"] and 20 < report["time"]["step_ms"] < 50
    # What the failed attempt held was freed, and what is reserved is answered as the device would.
    parameters = 4 * (8192 * 8192 + 8192) * 4
    assert parameters <= full < parameters + (100 << 20)
    assert taken == reserved + device_named("h100").context_bytes and reserved > 20 << 30
    assert any("torch.OutOfMemoryError was raised" in note for note in got.recording.notes)


@pytest.mark.parametrize("handler", ["except:", "except RuntimeError:", *WITHS])
def test_a_search_for_the_largest_batch_ends_where_it_would_on_the_device(tmp_path, handler):
    attempt = "    try:\n        step(rows)\n        break\n    HANDLER\n        rows //= 2\n"
    if handler in WITHS:
        attempt = "    with HANDLER:\n        step(rows)\n        break\n    rows //= 2\n"
    search = "import contextlib\nrows = 2**24\nwhile rows > 1:\n" + attempt.replace("HANDLER", handler)
    text = PROBE[: PROBE.index("rows, tried")] + search + "print(rows)\n"
    got = run_text(tmp_path, text, device="h100", steps=1)
    assert got.printed.splitlines()[-1] == "262144"
    assert any("torch.OutOfMemoryError was raised" in note for note in got.recording.notes)


@pytest.mark.parametrize("mode", ["raise", "report"])
def test_oom_raise_and_report(tmp_path, mode):
    text = PROBE.replace("HANDLED", "ValueError" if mode == "raise" else "torch.OutOfMemoryError")
    got = run_text(tmp_path, text, device="h100", steps=20, oom=mode)
    if mode == "raise":
        refused = got.recording.refused
        assert refused.line.number == 7
        assert "OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 GiB" in refused.reason
    else:
        assert not judge(got.recording, [device_named("h100")])["memory"]["fits"]


def test_an_unknown_mode_is_one_line(tmp_path):
    with pytest.raises(RehearsalError, match="oom: expected auto, raise, report, got 'sometimes'"):
        run_text(tmp_path, "", oom="sometimes")


SOURCE = """\
try:
    step()
except RuntimeError as error:
    if "out of memory" not in str(error):
        raise
try:
    step()
except Exception as error:
    if should_reduce_batch_size(error):
        halve()
try:
    step()
except Exception:
    raise
step()
try:
    pass
except MemoryError:
    step()
try:
    step()
except:
    rows //= 2
try:
    main()
except RuntimeError as error:
    print(error)
    sys.exit(1)
try:
    step()
except torch.OutOfMemoryError:
    raise
except:
    pass
with suppress(ValueError), contextlib.suppress((KeyError, RuntimeError)):
    step()
with suppress(ValueError):
    step()
"""


# Lines of SOURCE where the error is caught, and where it is not.
CAUGHT, NOT_CAUGHT = (2, 7, 21, 36), (12, 15, 19, 25, 30, 38)


@pytest.mark.parametrize("number", CAUGHT + NOT_CAUGHT)
def test_which_handlers_expect_a_full_device(tmp_path, number):
    (tmp_path / "handlers.py").write_text(SOURCE)
    assert _catches(str(tmp_path / "handlers.py"), number) is (number in CAUGHT)
