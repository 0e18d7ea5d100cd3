"""`watch()`: numbers unchanged, everything left again, steps where they belong, little memory."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.optim import optimizer as optimizer_module
from torch.utils._python_dispatch import TorchDispatchMode

import leanstep
from leanstep import diagnose
from leanstep.diagnose import cost, step_clock
from leanstep.diagnose.outputs import screen
from leanstep.diagnose.step_clock import StepClock
from leanstep.diagnose.watch import Watch
from leanstep.tape import nodes

STEPS = Path(__file__).parent / "steps"


def state() -> tuple[object, ...]:
    """All that a recording touches in the process."""
    return (
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        dict(optimizer_module._global_optimizer_pre_hooks),
        dict(optimizer_module._global_optimizer_post_hooks),
        torch.optim.Optimizer.__init__,
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        list(warnings.filters),
        warnings.showwarning,
        getattr(torch.cuda.CUDAGraph, "replay", None),
        torch.autograd._engine_run_backward,
        torch.Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
        torch.multinomial,
        torch.distributions.MultivariateNormal.sample,
        "sample" in vars(torch.distributions.MultivariateNormal),
        torch.amp.GradScaler.step,
    )


def training(seed: int = 0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(8, 16)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def test_recording_changes_no_number() -> None:
    step = training()
    plain = [step() for _ in range(5)]
    step = training()
    recorded = []
    with diagnose.watch(steps=5, warmup=0) as watch:
        for _ in range(5):
            recorded.append(step())
            watch.step()
    assert len(watch.steps) == 5
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


def test_recording_changes_no_number_of_leansteps_own_paths() -> None:
    """Watched, their jobs run on one thread in a row: same bits."""
    from leanstep.heads import linear_logprobs
    from leanstep.muon import NorMuon

    def train(record: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        hidden, weight = torch.nn.Parameter(torch.randn(70, 24)), torch.nn.Parameter(torch.randn(901, 24) / 5)
        optimizer = NorMuon([hidden, weight], lr=0.02)
        targets = torch.randint(0, 901, (70,))
        with diagnose.watch(steps=9, warmup=0) if record else contextlib.nullcontext():
            for _ in range(3):
                out = linear_logprobs(hidden, weight, targets, entropy="grad")
                (-out.logp.mean() - 0.1 * out.entropy.mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [hidden.detach(), weight.detach()]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))


def test_the_loop_of_leansteps_own_optimizer_is_not_the_users() -> None:
    """The advice would be NorMuon. Another optimizer on the same line is found all the same."""
    from leanstep.muon import NorMuon

    def ops_found(*kinds: str) -> list[int]:
        torch.manual_seed(0)
        matrices = [torch.randn(16, 16, requires_grad=True) for _ in range(40)]
        rows = [torch.randn(8, requires_grad=True) for _ in range(40)]
        made = {
            "own": NorMuon(matrices, lr=0.02),
            "loop": torch.optim.AdamW(rows, lr=0.1, foreach=False),
        }
        with diagnose.watch(steps=2) as watch:
            for _ in range(3):
                torch.stack([x.sum() for x in (*matrices, *rows)]).sum().backward()
                for kind in kinds:
                    made[kind].step()
                watch.step()
        return [f.count for f in watch.findings() if f.rule == "unbatched-optimizer"]

    (alone,) = ops_found("loop")
    assert (ops_found("own"), ops_found("own", "loop")) == ([], [alone])


@pytest.mark.parametrize("of_others", [0.0, 7.0])
def test_time_of_other_processes_is_no_part_of_a_step(monkeypatch, tmp_path, of_others) -> None:
    """A busy machine changes neither the step's time nor the share of a finding."""
    cost.calibrate()  # once per process, with the real clock
    statistics, seconds, waited = tmp_path / "schedstat", [0.0], [0.0]
    monkeypatch.setattr(step_clock, "_SCHEDULER_STATISTICS", statistics)
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: seconds[0])
    statistics.write_text("123 0 7\n")
    weight = torch.zeros(8, 8, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)
    with diagnose.watch(steps=1, warmup=0) as watch:
        for _ in range(4):
            weight.sum().backward()
            optimizer.step()
            waited[0] += of_others
            seconds[0] += 0.5 + of_others
            statistics.write_text(f"123 {int(waited[0] * 1e9)} 7\n")
            watch.step()
    assert watch.step_seconds == pytest.approx(0.5)
    # A script's own clock shows the time that is left out: the header says so.
    assert watch.waited_seconds == pytest.approx(of_others)
    said = "Wall-clock time: 7.5 s per step. Other processes used the cores for 7 s of it."
    assert (said in screen.header(watch, "train.py")) is bool(of_others)


def test_a_system_without_scheduler_statistics_gives_plain_time(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(step_clock, "_SCHEDULER_STATISTICS", tmp_path / "none")
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: 3.25)
    assert step_clock.own_seconds() == 3.25


def test_the_clock_divides_a_step() -> None:
    times = iter([0.0, 3.0, 4.0, 6.0, 6.5, 7.0, 7.25])
    clock = StepClock(now=lambda: next(times))
    clock.start()
    clock.first_op()
    clock.backward_begins()
    clock.backward_ends()
    clock.optimizer_begins()
    clock.optimizer_ends()
    clock.end()
    assert clock.seconds == 7.25
    assert clock.parts == {
        "before the model": 3.0, "forward": 1.0, "backward": 2.0, "optimizer": 0.5, "other": 0.75,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("warmup", "text"), [(0.5, "· 500 ms per step"), (2.0, "· at most 1 s per step (while recording)")]
)
def test_a_warm_up_slower_than_a_recorded_step_is_no_measure(warmup: float, text: str) -> None:
    watch = Watch()
    watch._measured_seconds, watch._longest_possible = warmup, 1.0
    assert text in screen.header(watch, "train.py")


def test_a_step_that_waited_longer_than_it_took_has_no_time() -> None:
    """The scheduler's statistics and the clock disagree where the process was stopped."""
    watch = Watch()
    watch._measured_seconds = -0.016
    assert watch.step_seconds is None
    assert "per step" not in screen.header(watch, "train.py")


def test_findings_print_as_lines() -> None:
    step = training()
    with diagnose.watch(steps=2, warmup=0) as watch:
        for _ in range(2):
            float(step())
            watch.step()
    (line,) = str(watch.findings()).splitlines()
    assert "host-sync: 1 read → keep on the device" in line
    assert str(diagnose.watch().findings()) == "no findings"


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("timed", [False, True])
def test_everything_is_left_again(error, timed: bool) -> None:
    step = training()
    before = state()
    watch = Watch(steps=2, warmup=1, timed_warmup=timed)

    def run() -> None:
        with watch:
            step()
            training()()
            for _ in range(5):
                step()
                if error is not None:
                    raise error("stop")

    if error is None:
        run()
    else:
        with pytest.raises(error):
            run()
    assert state() == before
    assert diagnose.watch().findings() == []


def test_an_error_inside_the_optimizer_does_not_stay_its_phase() -> None:
    model = torch.nn.Linear(4, 4)

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no")

    failing, working = Failing(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    with diagnose.watch(steps=2, warmup=0) as watch:
        for _ in range(2):
            with torch.no_grad():
                model(torch.randn(2, 4))
            model(torch.randn(2, 4)).sum().backward()
            with pytest.raises(RuntimeError):
                failing.step()
            working.step()
            watch.step()
    phases = [{op.phase for op in step.ops if op.name == "addmm"} for step in watch.steps]
    assert phases == [{"forward"}, {"forward"}]


def test_findings_are_kept_when_the_training_raises() -> None:
    step = training()
    with pytest.raises(ValueError, match="stop"), diagnose.watch(steps=9, warmup=0) as watch:
        for number in range(4):
            float(step())
            watch.step()
            if number == 2:
                raise ValueError("stop")
    assert [(f.rule, f.count) for f in watch.findings()] == [("host-sync", 1)]
    assert len(watch.steps) == 3


def test_nested_watches_are_refused() -> None:
    with diagnose.watch(), pytest.raises(RuntimeError, match="already active"), diagnose.watch():
        pass
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize(("argument", "value"), [("steps", 0), ("warmup", -1)])
def test_bad_arguments_are_named(argument: str, value: int) -> None:
    with pytest.raises(ValueError, match=argument):
        diagnose.watch(**{argument: value})


def test_step_outside_a_watch_does_nothing() -> None:
    diagnose.step()


def test_explicit_steps_win_over_the_optimizer(write_script, watched) -> None:
    script = write_script(
        "import torch\n"
        "from leanstep import diagnose\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(4):\n"
        "    for _ in range(2):\n"
        "        model(torch.randn(2, 4)).sum().backward()\n"
        "        optimizer.step()\n"
        "        print(float(model.weight.detach().sum()))\n"
        "    diagnose.step()\n"
    )
    watch = watched(script)
    assert (watch.boundary, len(watch.steps)) == ("explicit", 3)
    assert [(f.rule, f.line.number, f.counts) for f in watch.findings()] == [("host-sync", 9, [2, 2, 2])]


def test_what_prepares_a_batch_belongs_to_every_step(write_script, watched) -> None:
    """The read stands before the first op with a gradient; the last step has no successor to count it for."""
    script = write_script(
        "import torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "data = torch.randn(8, 4)\n"
        "for _ in range(4):\n"
        "    batch = data[data[:, 0] > 0]\n"
        "    model(batch).sum().backward()\n"
        "    optimizer.step()\n"
        "with torch.no_grad():\n"
        "    print(model(data).sum().item())\n"
    )
    watch = watched(script)
    assert [(f.line.number, f.counts, f.confidence) for f in watch.findings()] == [(6, [1, 1, 1], "medium")]


def test_recording_stops_after_its_steps_and_the_script_runs_on(write_script, watched) -> None:
    script = write_script(
        "import torch\nmodel = torch.nn.Linear(4, 4)\noptimizer = torch.optim.SGD(model.parameters(), "
        "lr=0.1)\n"
        "depths = []\n"
        "for _ in range(9):\n    model(torch.randn(2, 4)).sum().backward()\n    optimizer.step()\n"
        "    depths.append(torch._C._len_torch_dispatch_stack())\n"
        "assert depths == [1, 1, 1, 0, 0, 0, 0, 0, 0], depths\n"
    )
    watch = watched(script)
    assert len(watch.steps) == 3
    # One more step is timed; beside other processes it may be nothing but waits.
    assert watch.step_seconds is not None or watch.waited_seconds > 0


def test_a_mode_of_the_user_survives_ours() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    step = training()
    counter = FlopCounterMode(display=False)
    with diagnose.watch(steps=1, warmup=0) as watch:
        step()
        with counter:
            step()
            watch.step()
            step()
    assert torch._C._len_torch_dispatch_stack() == 0
    # Two steps inside: forward and backward of both layers, the first layer's input needs no gradient.
    assert counter.get_total_flops() == 2 * 2 * 8 * 16 * (2 * 16 + 3 * 4)


def test_private_names_missing(monkeypatch, watched) -> None:
    """Without them forward findings are right, backward ops have no source line, and the header says so."""

    monkeypatch.setattr(nodes, "current_node", None)
    monkeypatch.setattr(nodes, "sequence_number", None)
    watch = watched(STEPS / "sync_in_loop.py")
    assert [(f.rule, f.line.number, f.count) for f in watch.findings()] == [("host-sync", 17, 64)]
    assert "backward ops have no source line" in screen.screen(watch, [], "train.py")
    assert watched(STEPS / "zero_fill_bank.py").findings() == []


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def test_a_thousand_steps_stay_small() -> None:
    w = torch.ones(16, 16, requires_grad=True)
    x = torch.randn(4, 16)
    with diagnose.watch(steps=1100, warmup=0) as watch:
        for number in range(1100):
            (x @ w).square().mean().backward()
            w.grad.norm().item()
            watch.step()
            if number == 100:
                gc.collect()
                before = _resident_mib()
    grown = _resident_mib() - before
    assert len(watch.steps) == 1100
    assert [f.count for f in watch.findings()] == [1]
    assert grown < 20
    # Events, and when storages were freed, of the last few steps only.
    assert max(len(watch.tape.events), len(watch.tape.freed)) < 12 * watch.tape.count / 1100


class _Ops(TorchDispatchMode):
    """Counts what reaches torch; entered first, it also sees what a recorder inside it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Hooks on saved tensors make torch detach them, which launches nothing.
        self.count += func is not torch.ops.aten.detach.default
        return func(*args, **(kwargs or {}))


def test_recording_adds_no_op_to_thousands_of_tiny_ones() -> None:
    model = torch.nn.Linear(32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 32)

    def step() -> None:
        optimizer.zero_grad()
        scores, loss = model(x).squeeze(-1), torch.zeros(())
        for i in range(16):
            for j in range(i + 1, 16):
                loss = loss - torch.nn.functional.logsigmoid(scores[i] - scores[j])
        loss.backward()
        optimizer.step()

    own = str(Path(diagnose.__file__).parents[1]) + os.sep
    lines = 0

    def count_lines(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count_lines if frame.f_code.co_filename.startswith(own) else None

    step()
    with _Ops() as plain:
        step()
    with _Ops() as recorded, Watch(steps=10_000, warmup=0) as watch:
        step()
        watch.step()
        recorded.count = 0
        tracer = sys.gettrace()
        sys.settrace(count_lines)
        try:
            step()
        finally:
            sys.settrace(tracer)
    assert recorded.count == plain.count > 1000
    # The time per op follows the lines that the recorder executes.
    assert lines / plain.count < 170


DEEP = """\
import torch
w = torch.ones(4, requires_grad=True)
optimizer = torch.optim.SGD([w], lr=1e-6)
for _ in range(3):
    h = w
    for _ in range(6000):
        h = h * 1.0001
    h.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_deep_graph_is_freed_without_overflowing_the_stack(tmp_path) -> None:
    """torch frees nodes that were asked for recursively; a small stack shows it with a small graph."""
    (tmp_path / "deep.py").write_text(DEEP, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "leanstep", "diagnose", "deep.py", "--steps", "2"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(leanstep.__file__).parents[1])},
        capture_output=True, text=True, check=False, timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (2**19, 2**19)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    assert "2 steps recorded" in done.stdout and "op-storm" in done.stdout
