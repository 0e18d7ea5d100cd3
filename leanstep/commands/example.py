"""One bundled example: a training step as people write it and with leanstep in place, compared in every way.

Each example is a folder with `before.py` and `after.py`. Both run as scripts and define `setup(dtype)`,
`make_batch(step, dtype)`, `loss_fn(model, batch)` and `train_step(model, optimizer, batch)`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import leanstep
from leanstep.commands import BadInput, FellShort

SIDES = ("before", "after")
Report = Callable[[str], None]


@dataclass(frozen=True)
class Example:
    name: str
    title: str
    summary: str


EXAMPLES = (
    Example(
        "lens",
        "A controller trained from preferences",
        "The objective loops over pairs of contexts and over their entries, and asks the device for one "
        "number after the other. The fast path is one block of tensor ops with the same value and gradient.",
    ),
    Example(
        "rl",
        "A GRPO update with long prompts",
        "Logits are computed for every position, then all but the sampled response is thrown away. The fast "
        "path selects rows before the LM head and works tile by tile: no tokens-by-vocabulary tensor exists.",
    ),
    Example(
        "speedrun",
        "A GPT on parameter banks with Muon",
        "Indexing a bank inside the layer loop makes autograd write a zero-filled gradient of the whole bank "
        "per use, and Muon goes matrix by matrix. The fast path takes banks apart once and works by shape.",
    ),
)


def examples_folder() -> Path:
    """The folder with the examples: inside an installed package, or beside it in a checkout."""
    package = Path(leanstep.__file__).parent
    for folder in (package / "examples", package.parent / "examples"):
        if all((folder / e.name / f"{side}.py").is_file() for e in EXAMPLES for side in SIDES):
            return folder
    raise BadInput(f"demo: the bundled examples are missing beside {package}; run it from a checkout")


def readable_examples(out: Path) -> Path:
    """The examples as a user's own files: from an installed package they are copied to `out/examples` first.

    `diagnose` names the user's lines and passes over installed packages; and the reader can open them there.
    """
    folder = examples_folder()
    if folder.parent != Path(leanstep.__file__).parent:
        return folder
    target = out / "examples"
    try:
        shutil.copytree(folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise BadInput(f"--out: cannot copy the examples to {target}: {error}") from None
    return target.resolve()


def load(folder: Path, side: str) -> ModuleType:
    """Import `folder/side.py` with its sibling modules, leaving none of them behind for the next example."""
    siblings = {path.stem for path in folder.glob("*.py")}
    hidden = {name: sys.modules.pop(name) for name in siblings & set(sys.modules)}
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(f"example_{folder.name}_{side}", folder / f"{side}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(folder))
        for name in siblings:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


def diagnose_script(path: Path, *, steps: int = 2) -> dict[str, Any]:
    """What `leanstep diagnose PATH --json` gives, with the script's own output kept away from the screen."""
    from leanstep.diagnose import Limits, screen
    from leanstep.diagnose.cost import is_small
    from leanstep.diagnose.run_script import Stop, run_script
    from leanstep.diagnose.watch import Watch

    def stop() -> None:
        raise Stop

    watch = Watch(steps, 1, Limits(), timed_warmup=True, on_done=stop)
    said = io.StringIO()
    with _siblings_forgotten(path.parent), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        outcome = run_script(path, [], watch)
    if outcome.exception == "KeyboardInterrupt":
        raise KeyboardInterrupt
    if outcome.code:
        last = said.getvalue().strip().splitlines()[-1:] or [f"exit code {outcome.code}"]
        raise FellShort(f"demo: {path} failed: {last[0]}")
    # As on the terminal: what costs less than half a percent of the step is not worth a line.
    findings = [finding for finding in watch.findings() if not is_small(finding)]
    return screen.as_json(watch, findings, str(path))


@contextlib.contextmanager
def _siblings_forgotten(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for path in folder.glob("*.py"):
            sys.modules.pop(path.stem, None)


def prove(name: str, before: ModuleType, after: ModuleType) -> list[dict[str, Any]]:
    """Loss and gradients of one step: `after` may be no further from fp64 than twice what `before` is."""
    from leanstep.measure import parity

    truth, plain = _loss_and_gradients(before, torch.float64), _loss_and_gradients(before, torch.float32)
    candidate = _loss_and_gradients(after, torch.float32)
    rows = []
    for tensor, expected in truth.items():
        error = parity.relative_error(candidate[tensor], expected)
        plain_error = parity.relative_error(plain[tensor], expected)
        bound = parity.FACTOR[torch.float32] * plain_error + parity.FLOOR[torch.float32]
        rows.append(
            {
                "case": name,
                "impl": "after",
                "dtype": "fp32",
                "tensor": tensor,
                "error": error,
                "reference_error": plain_error,
                "bound": bound,
                "ok": bool(error <= bound),
            }
        )
    return rows


def _loss_and_gradients(module: ModuleType, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model, _ = module.setup(dtype)
    loss = module.loss_fn(model, module.make_batch(0, dtype))
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        found[f"grad:{name}"] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return found


def losses(module: ModuleType, steps: int) -> list[float]:
    """The loss of the first steps of a fresh training run."""
    model, optimizer = module.setup()
    run = [module.train_step(model, optimizer, module.make_batch(step)) for step in range(steps)]
    return torch.stack(run).tolist()


def measure(modules: dict[str, ModuleType], *, budget_s: float, report: Report) -> dict[str, dict[str, Any]]:
    """Time (interleaved) and memory (apart) of one training step of each side."""
    from leanstep.measure.peaks import memory_timeline
    from leanstep.measure.timing import interleave

    steps = {side: _step(module) for side, module in modules.items()}
    report("time")
    timings = interleave(
        steps, budget_s=budget_s, on_round=lambda done, planned: report(f"time, round {done} of {planned}")
    )
    report("memory")
    found = {}
    for side, step in steps.items():
        _, timeline = memory_timeline(step)
        timing = timings[side]
        found[side] = {
            "median_s": timing.median_s,
            "p20_s": timing.p20_s,
            "p80_s": timing.p80_s,
            "peak_bytes": max((int(level) for _, level in timeline), default=0),
            "timeline": [[t, level] for t, level in timeline],
        }
    return found


def _step(module: ModuleType) -> Callable[[], dict[str, torch.Tensor]]:
    model, optimizer = module.setup()
    batch = module.make_batch(0)
    # The step is timed many times on one batch: with a rate of zero it does the same work each time.
    for one in optimizer if isinstance(optimizer, list) else [optimizer]:
        for group in one.param_groups:
            group["lr"] = 0.0

    def step() -> dict[str, torch.Tensor]:
        return {"loss": module.train_step(model, optimizer, batch)}

    return step


def compare(
    example: Example, examples: Path, *, steps: int, budget_s: float, report: Report
) -> dict[str, Any]:
    """Everything about one of the `examples`, as the page's `demo` section holds it."""
    from leanstep.report.excerpts import difference

    folder = examples / example.name
    texts = {side: (folder / f"{side}.py").read_text(encoding="utf-8") for side in SIDES}
    found: dict[str, Any] = {side: {} for side in SIDES}
    for side in SIDES:
        report(f"diagnose {side}.py")
        found[side]["diagnose"] = diagnose_script(folder / f"{side}.py")
    modules = {side: load(folder, side) for side in SIDES}
    report("prove loss and gradients")
    proof = prove(example.name, modules["before"], modules["after"])
    for side in SIDES:
        report(f"train {steps} steps, {side}")
        found[side]["losses"] = losses(modules[side], steps)
    for side, figures in measure(modules, budget_s=budget_s, report=report).items():
        found[side] |= figures
    before, after = found["before"], found["after"]
    return {
        "name": example.name,
        "title": example.title,
        "summary": example.summary,
        "diff": difference(texts["before"], texts["after"]),
        **found,
        "time_ratio": before["median_s"] / after["median_s"],
        "memory_ratio": before["peak_bytes"] / max(after["peak_bytes"], 1),
        "proof": proof,
    }
