"""Tiles of a few rows and columns, so that small tensors have several, also one part of them per core."""

from __future__ import annotations

import sys

import pytest

from leanstep.heads import logprob, losses, passes


def shrink(monkeypatch, size=21, rows=3):
    """Tiles of `size` logits; blocks and chunks of `rows` rows of 17 fp64 logits; C++ for any size."""
    rowwise = sys.modules["leanstep.heads.rowwise"]
    monkeypatch.setattr(logprob, "CPU_TILE_BYTES", 4 * size)
    monkeypatch.setattr(logprob, "COLUMN_BLOCK", 1)
    monkeypatch.setattr(rowwise, "CPU_BLOCK_BYTES", 8 * 17 * rows)
    monkeypatch.setattr(rowwise, "FEWEST_ROWS", 1)
    monkeypatch.setattr(losses, "CPU_CHUNK_BYTES", 8 * 17 * rows)
    monkeypatch.setattr(losses, "FEWEST_ROWS", 1)
    monkeypatch.setattr(passes, "NATIVE_LOGITS", 1)


@pytest.fixture(params=["whole", "tiles", "cores"])
def tiles(request, monkeypatch):
    if request.param != "whole":
        shrink(monkeypatch)
    if request.param == "cores":
        monkeypatch.setattr(logprob, "CORE_WORK", 0)
        monkeypatch.setattr(logprob, "num_threads", lambda: 2)
    return request.param
