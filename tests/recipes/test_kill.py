"""`kill -9` at random moments through the real command line; `kill_resume.py` is the long version."""

from __future__ import annotations

import signal
import time

import pytest
from recipes.kill_resume import finish, kill_at_random_steps, metric_lines, start, write_data


@pytest.mark.timeout(280)
def test_killed_runs_end_with_the_same_bits(tmp_path):
    result = kill_at_random_steps(tmp_path, kills=2, steps=14, seed=1)
    assert result["kills"] == 2 and result["weights_differ"] == [] and result["random_differs"] == []
    assert result["metrics_equal"]
    # No temporary file is left, and only the newest checkpoints.
    assert result["files"] == ["step-00000012.safetensors", "step-00000014.safetensors"]


@pytest.mark.timeout(280)
def test_sigterm_saves_and_exits_zero(tmp_path):
    write_data(tmp_path)
    process = start(tmp_path, "out", 2000)
    while not metric_lines(tmp_path / "out") and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    text = finish(process)
    assert "SIGTERM: saved step" in text
    last = metric_lines(tmp_path / "out")[-1]["step"]
    assert (tmp_path / "out" / "checkpoints" / f"step-{last:08d}.safetensors").exists()
