"""Callbacks in real trainers and loops: the same numbers, figures in the log once, nothing left behind."""

from __future__ import annotations

import csv
import gc
import warnings
from pathlib import Path

import pytest
import torch
from integrations.test_transformers import Rows
from integrations.tiny_models import causal_lm

from leanstep import diagnose
from leanstep.integrations.callbacks import StepReport, recorded

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import Trainer, TrainingArguments

    from leanstep.integrations.callbacks import LeanstepCallback

# transformers, TRL, Lightning and the trackers warn about their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")
FIGURES = {"leanstep/host_reads", "leanstep/wasted_ms"}


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Switched off: filling `torch.empty` adds ops to a recorded step."""


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert diagnose.watch.__globals__["_current"] is None


def train(tmp_path: Path, callbacks=(), steps: int = 8, **options):
    """A stock Trainer over a tiny Qwen2: the losses it logs, its weights, itself."""
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=steps, use_cpu=True,
        report_to=options.pop("report_to", []), logging_steps=options.pop("logging_steps", 1),
        disable_tqdm=True, save_strategy="no", learning_rate=1e-2, seed=3, **options,
    )  # fmt: skip
    trainer = Trainer(causal_lm("qwen2"), arguments, train_dataset=Rows(), callbacks=list(callbacks))
    trainer.train()
    history = trainer.state.log_history
    losses = [(e["step"], e["loss"], e["grad_norm"]) for e in history if "loss" in e]
    return losses, [p.detach().clone() for p in trainer.model.parameters()], trainer


def figures(trainer) -> list[tuple[int, dict[str, float]]]:
    found = []
    for entry in trainer.state.log_history:
        mine = {name: value for name, value in entry.items() if name.startswith("leanstep/")}
        if mine:
            found.append((entry["step"], mine))
    return found


def test_in_a_trainer_nothing_changes_and_the_figures_are_logged_once(tmp_path):
    texts: list[str] = []
    callback = LeanstepCallback(steps=2, warmup=1, show=texts.append)
    losses, weights, trainer = train(tmp_path, [callback])
    plain_losses, plain_weights, _ = train(tmp_path)
    assert losses == plain_losses and len(losses) == 8
    assert all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=True))
    # One step of warm-up, two recorded, one timed: with the log of the fourth.
    ((step, scalars),) = figures(trainer)
    assert step == 4 and scalars.keys() == FIGURES
    # The NaN filter, the logged loss and gradient norm, the mask code: see docs/diagnose.md.
    assert scalars["leanstep/host_reads"] >= 4
    assert 0 < scalars["leanstep/wasted_ms"] < 1e3 * callback.report.watch.step_seconds + 1e-9
    (text,) = texts
    assert "2 steps recorded after 1" in text
    assert "dead-rows" in text and "LeanTrainer" in text and "host-sync" in text
    assert "training_step" not in vars(trainer)


def test_gradient_accumulation_is_one_step(tmp_path):
    callback = LeanstepCallback(steps=2, warmup=1, show=lambda _: None)
    train(tmp_path, [callback], gradient_accumulation_steps=2)
    assert [record.backward_runs for record in callback.report.watch.steps] == [2, 2]


def test_a_short_training_reports_with_its_last_log(tmp_path):
    texts: list[str] = []
    callback = LeanstepCallback(top=1, show=texts.append)
    _, _, trainer = train(tmp_path, [callback], steps=4, logging_steps=500)
    ((step, scalars),) = figures(trainer)
    assert step == 4 and scalars.keys() == FIGURES
    assert "2 steps recorded after 2" in texts[0]
    assert "more, smaller: leanstep diagnose shows all" in texts[0]
    _, _, trainer = train(tmp_path, [LeanstepCallback(show=texts.append)], steps=1)
    assert figures(trainer) == []
    assert texts[1:] == ["leanstep: no step was recorded: the training ended within 1 steps"]


def test_an_error_leaves_no_recording(tmp_path):
    class Failing(Rows):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            self.served = getattr(self, "served", 0) + 1
            if self.served > 12:
                sample["input_ids"] = sample["input_ids"] + 10**6
            return sample

    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=9, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    callback = LeanstepCallback(steps=5, warmup=1, show=lambda _: None)
    trainer = Trainer(causal_lm("llama"), arguments, train_dataset=Failing(), callbacks=[callback])
    with pytest.raises(IndexError):
        trainer.train()
    assert callback.report.done and callback.report.scalars == {}


def test_the_figures_reach_tensorboard(tmp_path, monkeypatch):
    """transformers puts the trackers of `report_to` before the user's callbacks."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    callback = LeanstepCallback(steps=1, warmup=1, show=lambda _: None)
    train(tmp_path, [callback], steps=4, report_to=["tensorboard"])
    expected = callback.report.scalars
    assert expected.keys() == FIGURES
    (folder,) = {path.parent for path in tmp_path.rglob("*tfevents*")}
    events = EventAccumulator(str(folder)).Reload()
    logged = {name: events.Scalars(f"train/{name}") for name in expected}
    assert all(len(values) == 1 and values[0].step == 3 for values in logged.values())
    assert {name: values[0].value for name, values in logged.items()} == pytest.approx(expected, rel=1e-6)


def lightning_module():
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Sequential(
                torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4)
            )
            self.losses: list[float] = []

        def training_step(self, batch, index):
            loss = self.model(batch).square().mean()
            self.losses.append(loss.item())  # the planted read
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return lightning, Module


def fit(tmp_path, lightning, module, callbacks=(), **options):
    torch.manual_seed(0)
    model, data = module(), torch.utils.data.DataLoader(torch.randn(48, 16), batch_size=4)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=list(callbacks), enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
        logger=options.pop("logger", False), **options,
    )  # fmt: skip
    trainer.fit(model, data)
    return model


def test_in_lightning(tmp_path):
    lightning, module = lightning_module()
    from leanstep.integrations.callbacks import LeanstepLightning

    texts: list[str] = []
    callback = LeanstepLightning(steps=2, warmup=1, show=texts.append)
    loggers = [lightning.loggers.CSVLogger(tmp_path, name) for name in ("first", "second")]
    model = fit(tmp_path, lightning, module, [callback], logger=loggers, accumulate_grad_batches=2)
    plain = fit(tmp_path, lightning, module, accumulate_grad_batches=2)
    assert model.losses == plain.losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert [record.backward_runs for record in callback.report.watch.steps] == [2, 2]
    assert callback.report.scalars["leanstep/host_reads"] == 2
    assert "# the planted read" in texts[0] and len(texts) == 1
    for logger in loggers:
        (row,) = csv.DictReader(Path(logger.log_dir, "metrics.csv").open())
        assert {name: float(row[name]) for name in FIGURES} == pytest.approx(callback.report.scalars)


def test_an_error_in_lightning_leaves_no_recording(tmp_path):
    lightning, module = lightning_module()
    from leanstep.integrations.callbacks import LeanstepLightning

    class Failing(module):
        def training_step(self, batch, index):
            if index == 3:
                raise OSError("disk")
            return super().training_step(batch, index)

    callback = LeanstepLightning(steps=9, warmup=1, show=lambda _: None)
    with pytest.raises(OSError, match="disk"):
        fit(tmp_path, lightning, Failing, [callback])
    assert callback.report.done and callback.report.scalars == {}


def loop(batches, record=None, error_at: int = -1):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for number, batch in enumerate(record(batches) if record else batches):
        if number == error_at:
            break
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # once
    return losses


def test_one_line_in_a_plain_loop():
    batches = torch.randn(7, 4, 16)
    logged: list[dict[str, float]] = []
    texts: list[str] = []
    losses = loop(batches, lambda b: recorded(b, steps=2, log=logged.append, show=texts.append))
    assert losses == loop(batches)
    (scalars,) = logged
    assert scalars.keys() == FIGURES and scalars["leanstep/host_reads"] == 1
    (text,) = texts
    assert "2 steps recorded after 2" in text and "# once" in text


def test_a_loop_that_is_left_early_reports_what_was_recorded():
    texts: list[str] = []
    loop(torch.randn(9, 4, 16), lambda b: recorded(b, warmup=0, steps=9, show=texts.append), error_at=3)
    gc.collect()
    assert len(texts) == 1 and "3 steps recorded" in texts[0]


def test_a_failing_loader_leaves_no_recording():
    def batches():
        yield from torch.randn(4, 4, 16)
        raise OSError("disk")

    texts: list[str] = []
    with pytest.raises(OSError, match="disk"):
        loop(batches(), lambda b: recorded(b, steps=9, warmup=1, show=texts.append))
    assert texts == []


def test_another_recording_goes_first():
    texts: list[str] = []
    with diagnose.watch():
        losses = loop(torch.randn(5, 4, 16), lambda b: recorded(b, warmup=1, show=texts.append))
    assert len(losses) == 5
    assert texts == ["leanstep: another recording is already running; this one is off"]


@pytest.mark.parametrize("options", [{"steps": 0}, {"warmup": -1}, {"top": 0}])
def test_bad_numbers_are_named(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}: expected at least"):
        StepReport(**options)
