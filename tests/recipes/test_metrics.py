"""Metrics: means over the interval, one device read, a log that can be cut back."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from leanstep.recipes.metrics import Board, Interval, MetricsLog


class CountReads(TorchDispatchMode):
    reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "_local_scalar_dense" in str(function):
            self.reads += 1
        return function(*args, **(kwargs or {}))


def test_tensors_are_averaged_numbers_are_last_and_tokens_are_summed():
    interval = Interval()
    interval.add({"loss": torch.tensor(1.0), "lr": 0.5, "tokens": 10}, 0.5)
    interval.add({"loss": torch.tensor([2.0]), "lr": 0.25, "tokens": 30}, 1.5)
    assert interval.read() == {"loss": 1.5, "lr": 0.25, "tokens": 40, "tokens_per_s": 20.0}


def test_adding_reads_no_device_value():
    with CountReads() as mode:
        interval = Interval()
        for i in range(5):
            interval.add({"loss": torch.ones(()) * i, "norm": torch.ones(())}, 0.1)
        assert mode.reads == 0
        assert interval.read()["loss"] == 2


def test_a_half_filled_interval_survives_saving():
    whole, first, second = Interval(), Interval(), Interval()
    values = [torch.rand(()) for _ in range(6)]
    for i, value in enumerate(values):
        whole.add({"loss": value, "lr": float(i), "tokens": 1}, 0.1)
        if i < 3:
            first.add({"loss": value, "lr": float(i), "tokens": 1}, 0.1)
    second.load_state_dict(first.state_dict(), torch.device("cpu"))
    for i, value in enumerate(values[3:], start=3):
        second.add({"loss": value, "lr": float(i), "tokens": 1}, 0.1)
    assert second.read() == whole.read() and second.steps == 6


def test_a_metric_must_be_one_number():
    with pytest.raises(ValueError, match=r"metrics: loss must be one number, got shape \(3,\)"):
        Interval().add({"loss": torch.ones(3)}, 0.1)


def test_cutting_back_drops_later_and_torn_lines(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    log.truncate_to(3)
    assert log.read() == []
    for step in (1, 2, 3, 4):
        log.append({"step": step, "loss": 1 / step})
    with log.path.open("a") as file:
        file.write('{"step": 5, "lo')
    log.sync()
    log.truncate_to(3)
    assert [json.loads(line) for line in log.path.read_text().splitlines()] == [
        {"step": step, "loss": 1 / step} for step in (1, 2, 3)
    ]
    assert list(tmp_path.iterdir()) == [log.path]


def test_foreign_lines_are_left_out_and_named(tmp_path):
    log, said = MetricsLog(tmp_path / "m.jsonl"), []
    log.append({"step": 1, "loss": 2.0})
    foreign = [b"\xff\xfe", b'{"step": "two"}', b'{"step": true}', b'{"step": 2, "val_loss": "low"}']
    foreign += [b'{"step": 2, "loss": [1]}', b"[" * 10**5, b'{"loss": 1}', b"9" * 5000]
    log.path.write_bytes(log.path.read_bytes() + b"\n".join(foreign) + b"\n")
    log.append({"step": 2, "loss": float("nan")})
    assert log.read() == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": "nan"}]
    log.truncate_to(1, say=said.append)
    assert said == ["m.jsonl: line 2 is no metric line; 8 such lines left out"]
    assert log.path.read_text() == '{"step": 1, "loss": 2.0}\n'


def test_values_unknown_to_json_become_text(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl")
    log.append({"step": 1, "loss": float("nan")})
    assert json.loads(log.path.read_text()) == {"step": 1, "loss": "nan"}


def test_the_board_writes_numbers_and_forgets_what_comes_again(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, log_dir, purge_step):
            calls.append((log_dir, purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append("closed")

    stub = types.ModuleType("torch.utils.tensorboard")
    stub.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    board = Board(tmp_path, resumed_at=4)
    board.add(5, {"step": 5, "loss": 2.0, "name": "x"})
    board.close()
    assert calls == [(str(tmp_path), 5), ("loss", 2.0, 5), "closed"]
    Board(tmp_path, resumed_at=0)
    assert calls[-1] == (str(tmp_path), None)


def test_without_tensorboard_there_is_no_board(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    board = Board(tmp_path / "tb", 0)
    board.add(1, {"loss": 2.0})
    board.close()
    assert not board.active and not (tmp_path / "tb").exists()
