"""FSDP2: gradients and changes are gathered, with the names and values of a plain run. --drift of a pair."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from prove.captured_scripts import job

from leanstep.prove import compare
from leanstep.prove.compare import prove_drift
from leanstep.prove.script_jobs import run_job
from leanstep.prove.sketches import distance
from leanstep.report.updates import drift_sentence

# FSDP2 warns about views; a forked script has the filters of this session.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.timeout(120)
def test_a_sharded_update_is_captured_whole():
    (plain,) = run_job(job("sharded.py", steps=1), fork=True)
    ranks = run_job(job("sharded.py", "--fsdp", steps=1, ranks=2), fork=True)
    assert [run.error for run in (plain, *ranks)] == [None] * 3, [run.said for run in ranks]
    mine, theirs = plain.updates[0], ranks[0].updates[0]
    assert (
        set(mine.gradients)
        == set(theirs.gradients)
        == {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}
    )
    for kind in ("gradients", "changes"):
        for name, sketch in getattr(mine, kind).items():
            other = getattr(theirs, kind)[name]
            assert other.shape == sketch.shape
            assert distance(other, sketch) <= 1e-4 * sketch.norm, (kind, name)


@pytest.mark.timeout(120)
def test_drift_moves_the_seeds_and_pairs_the_runs():
    before, after = job("policy.py"), job("policy.py", "--variant", "rows-first")
    drift = prove_drift(before, after, runs=3, fork=True)
    assert drift["ok"] and drift["runs"] == 3
    assert abs(drift["shift"]) < 1e-4
    sentence = drift_sentence(drift)
    assert "3 paired runs: shift " in sentence and "p = " in sentence and "4 times out of 5" in sentence
    first = [
        run_job(job("policy.py", steps=1, seed=seed), fork=True)[0].updates[0].loss for seed in (1000, 2000)
    ]
    assert first[0] != first[1]


def test_every_pair_of_a_drift_has_a_seed_of_its_own(monkeypatch):
    seeds = []

    def losses(asked, fork):
        seeds.append(asked.seed)
        final = 1.0 + 0.5 * (len(seeds) % 2) + 0.001 * len(seeds) ** 2
        return [SimpleNamespace(error=None, updates=[SimpleNamespace(loss=2.0), SimpleNamespace(loss=final)])]

    monkeypatch.setattr(compare, "run_job", losses)
    before, after = job("policy.py"), job("policy.py")
    better = prove_drift(after, before, runs=3)
    assert seeds == [1000, 1000, 2000, 2000, 3000, 3000] and better["steps"] == 2
    assert better["first_divergence"] == 1 and better["shift"] < 0 and better["ok"]
    seeds[:] = [0]
    worse = prove_drift(before, after, runs=3)
    assert worse["shift"] > 0 and not worse["ok"]
