"""Busy hosts: processes that run during a timing, and how OpenMP's threads wait on busy cores."""

from __future__ import annotations

import os

import pytest

from leanstep.measure import busy


def test_processes_run_during_the_block_only(monkeypatch):
    start, children = busy.start, []
    monkeypatch.setattr(
        busy,
        "start",
        lambda *args, **options: children.append(start(*args, **options)) or children[-1],
    )
    with busy.busy_processes(2):
        assert [child.poll() for child in children] == [None, None]
    assert None not in [child.poll() for child in children]


@pytest.mark.parametrize(
    ("share", "policy", "expected"),
    [(0.9, None, "passive"), (0.1, None, None), (0.9, "active", "active")],
)
def test_threads_sleep_where_others_use_the_cores(monkeypatch, share, policy, expected):
    monkeypatch.setattr(busy, "busy_share", lambda: share)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    busy.sleep_while_waiting()
    assert os.environ.get("OMP_WAIT_POLICY") == expected


def test_the_share_is_that_of_the_cores_this_process_may_use(monkeypatch):
    looks = iter([[(100, 200), (50, 200)], [(110, 210), (52, 210)]])
    monkeypatch.setattr(busy, "_core_times", lambda: next(looks))
    assert busy.busy_share(0.0) == pytest.approx(12 / 20)


def test_an_unknown_share_is_none_at_all(monkeypatch):
    monkeypatch.setattr(busy, "_core_times", list)
    assert busy.busy_share(60.0) == 0.0
