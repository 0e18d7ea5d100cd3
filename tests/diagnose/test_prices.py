"""What a finding costs: shares that add up to a step, and waste counted whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diagnose.made import op, read, sized, steps

from leanstep import diagnose
from leanstep.diagnose import cost
from leanstep.diagnose.find import find
from leanstep.diagnose.outputs import screen
from leanstep.tape.lines import Line, Site

MIB = 1024 * 1024
RATES = cost.Calibration(1e-6, 5e-6, 1e10, 2e9, 1e11)


def record(step, num: int = 2):
    with diagnose.watch(steps=num, warmup=1) as watch:
        for _ in range(num + 1):
            step()
            watch.step()
    return watch


def test_reads_are_a_share_of_a_gpus_step() -> None:
    """Ten thousand reads wait longer on a GPU than this step takes here; their share stays below one."""
    made = steps([*[read()] * 10_000, *[op("mul", sized(8), 2)] * 90])
    (finding,) = cost.price(find(made), made, 0.1, RATES)
    assert finding.seconds is None and finding.seconds_range == (0.1, 0.5)
    assert 0.99 < finding.share < 1


def test_a_teachers_whole_backward_is_idle() -> None:
    teacher, student = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    x = torch.randn(128, 64)

    def step() -> None:
        hidden = teacher(torch.tanh(teacher(x)))
        F.mse_loss(student(x), hidden).backward()
        optimizer.step()
        optimizer.zero_grad()
        teacher.zero_grad()

    watch = record(step)
    (finding,) = [f for f in watch.findings() if f.rule == "unused-grad"]
    # Two layers: both weights' gradients, and one gradient of an input.
    assert finding.work.flops == 3 * 2 * 128 * 64 * 64
    assert finding.work.moved_bytes > 0


def test_what_is_worth_a_line_does_not_depend_on_how_busy_the_machine_is() -> None:
    bank = torch.nn.Parameter(torch.zeros(8, 256, 256))
    optimizer = torch.optim.SGD([bank], lr=0.1)

    def step() -> None:
        torch.stack([bank[i].sum() for i in range(8)]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    watch = record(step)
    shown, small = [], []
    for step_seconds in (1e-4, 1e4):
        findings = cost.price(watch.findings(), watch.steps, step_seconds, RATES)
        shown.append([finding.rule for finding in cost.worth_a_line(findings, watch.steps)])
        small.append([cost.is_small(finding) for finding in findings])
    assert shown == [["zero-fill"]] * 2
    assert small == [[False], [True]]
    counted = "1 smaller finding: 1 × zero-fill (--all shows it)"
    assert counted in screen.screen(watch, findings, "train.py")
    assert counted not in screen.screen(watch, findings, "train.py", show_all=True)


def test_a_head_is_priced_by_all_that_lives_at_once() -> None:
    hidden, weight = torch.nn.Parameter(torch.randn(512, 8)), torch.nn.Parameter(torch.randn(8192, 8))
    optimizer = torch.optim.SGD([hidden, weight], lr=0.1)
    targets = torch.randint(0, 8192, (512,))

    def step() -> None:
        logp = F.log_softmax(hidden @ weight.t(), -1)
        p = logp.exp()
        (-(logp.gather(1, targets[:, None])).mean() + (p * logp).sum(-1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    watch = record(step)
    found = [f for f in watch.findings() if f.rule == "full-vocab"]
    saved = sum(f.evidence["bytes"] for f in found)
    peak = found[0].evidence["peak_bytes"]
    assert saved == 2 * 16 * MIB
    # logp, p, and gradients of both at least.
    assert peak >= 4 * 16 * MIB
    assert abs(sum(f.work.held_bytes for f in found) - peak) < 1


def step_of_adamw(foreach):
    weights = [torch.nn.Parameter(torch.randn(64)) for _ in range(24)]
    optimizer = torch.optim.AdamW(weights, foreach=foreach)

    def step() -> None:
        sum(w.square().sum() for w in weights).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_an_optimizers_loop_is_priced_with_its_python() -> None:
    watch = record(step_of_adamw(foreach=False))
    (finding,) = [f for f in watch.findings() if f.rule == "unbatched-optimizer"]
    work = finding.work
    assert work.loop_ops >= 200 and work.moved_bytes > 0 and not work.ops
    (priced,) = cost.price([finding], watch.steps, 0.1, RATES)
    expected = work.loop_ops * RATES.loop_op_s + work.moved_bytes / RATES.bytes_per_s
    assert priced.seconds == pytest.approx(expected)


@pytest.mark.parametrize(("foreach", "confidence"), [(None, "medium"), (False, "high")])
def test_a_loop_that_torch_only_makes_on_a_cpu_is_said_to_be_one(foreach, confidence: str) -> None:
    (finding,) = [f for f in record(step_of_adamw(foreach)).findings() if f.rule == "unbatched-optimizer"]
    assert finding.confidence == confidence
    assert ("already" in finding.fix) == ("already" in finding.short_fix) == (foreach is None)


def test_advice_fits_the_place(tmp_path) -> None:
    """A condition over several lines of transformers is known by what stands on any of them."""
    folder = tmp_path / "site-packages" / "transformers"
    folder.mkdir(parents=True)
    (folder / "trainer.py").write_text(
        "if (flag and (\n    torch.isnan(x) or torch.isinf(x))\n):\n    pass\n"
    )
    line = Line(str(folder / "trainer.py"), 1, "train", True)
    made = steps([read(Site(line, Line("train.py", 7)))] * 2)
    assert find(made)[0].short_fix == "logging_nan_inf_filter=False"
