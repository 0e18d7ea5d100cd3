"""Records: the t-test against published figures and scipy, the file, the comparison."""

from __future__ import annotations

import json

import pytest
from scipy import stats

from leanstep.recipes.records import Record, Run, compare, loss_test, resolvable_shift


def make_record(losses, times, target=3.28, **changes):
    runs = tuple(
        Run(seed=i, steps=100, train_time_s=200.0, val_loss=loss, reached_step=90, reached_time_s=time)
        for i, (loss, time) in enumerate(zip(losses, times, strict=True))
    )
    return Record(
        **{
            "recipe": "gpt",
            "settings": {},
            "target": target,
            "runs": runs,
            "machine": {"cpu": "x"},
            **changes,
        }
    )


def test_published_losses_give_the_published_p():
    test = loss_test([3.2783, 3.2789, 3.2795, 3.2786], 3.28)
    assert test.mean == pytest.approx(3.278825, abs=1e-9)
    assert test.sd == pytest.approx(0.000512, abs=1e-6)
    assert test.t == pytest.approx(-4.587, abs=1e-3)
    assert test.p == pytest.approx(0.00973, abs=1e-5)
    assert test.significant
    other = loss_test([3.2764, 3.2799, 3.2773, 3.2793], 3.28)
    assert other.p == pytest.approx(0.0601, abs=1e-4)
    assert not other.significant


def test_the_test_is_scipys():
    losses = [3.31, 3.29, 3.27, 3.30, 3.28]
    expected = stats.ttest_1samp(losses, 3.28, alternative="less")
    mine = loss_test(losses, 3.28)
    assert mine.t == pytest.approx(expected.statistic) and mine.p == pytest.approx(expected.pvalue)


def test_one_run_or_no_spread_claims_nothing_false():
    assert loss_test([3.0], 3.28).p is None and not loss_test([3.0], 3.28).significant
    assert loss_test([3.0, 3.0], 3.28).p == 0 and loss_test([3.5, 3.5], 3.28).p == 1
    assert loss_test([3.28, 3.28], 3.28).p == 0.5
    with pytest.raises(ValueError, match="at least one"):
        loss_test([], 3.28)
    with pytest.raises(ValueError, match="finite"):
        loss_test([3.0, float("nan")], 3.28)


def test_time_to_target_is_the_first_evaluation_at_or_below_it():
    lines = [
        {"step": 0, "val_loss": 6.0, "train_time_s": 0.0},
        {"step": 10, "val_loss": 3.0, "train_time_s": 1.5},
        {"step": 20, "val_loss": 3.5, "train_time_s": 3.0},
    ]
    run = Run.from_evaluations(7, lines, 3.0)
    assert (run.reached_step, run.reached_time_s, run.val_loss, run.steps) == (10, 1.5, 3.5, 20)
    missed = Run.from_evaluations(7, lines, 2.9)
    assert missed.reached_step is None and missed.reached_time_s is None
    diverged = Run.from_evaluations(7, [{"step": 1, "val_loss": "nan", "train_time_s": 0.1}], 2.9)
    assert diverged.reached_step is None


def test_a_record_comes_back_from_its_file(tmp_path):
    record = make_record([3.27, 3.275], [10.0, 11.0])
    record.write(tmp_path / "record.json")
    assert Record.read(tmp_path / "record.json") == record
    assert json.loads((tmp_path / "record.json").read_text())["summary"]["time_to_target_s"]["mean"] == 10.5


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '{"format": "other"}', '{"format": "leanstep-record-1", "runs": []}']
)
def test_a_foreign_file_is_named(tmp_path, content):
    path = tmp_path / "record.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"record: .*record\.json is no record file"):
        Record.read(path)
    with pytest.raises(ValueError, match="no record file"):
        Record.read(tmp_path / "absent.json")


def test_comparison_gives_deltas_and_doubts():
    old, new = (
        make_record([3.27, 3.28], [20.0, 22.0]),
        make_record([3.26, 3.27], [10.0, 11.0], machine={"cpu": "y"}),
    )
    result = compare(new, old)
    assert result["time_delta_s"] == pytest.approx(-10.5) and result["time_ratio"] == pytest.approx(2.0)
    assert result["loss_delta"] == pytest.approx(-0.01)
    welch = stats.ttest_ind([10.0, 11.0], [20.0, 22.0], equal_var=False, alternative="less")
    assert result["time_p"] == pytest.approx(welch.pvalue)
    assert any("cpu differs" in w for w in result["warnings"])
    assert any("loss shift of about" in w for w in result["warnings"])


def test_sixty_three_runs_show_half_a_standard_deviation():
    assert resolvable_shift(0.0012, 63) == pytest.approx(0.0006, rel=0.01)
