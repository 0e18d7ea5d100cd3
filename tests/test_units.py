"""Formatted numbers."""

from __future__ import annotations

import pytest

from leanstep import units


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (8.45, ("8.45×", "less peak memory")),
        (0.5, ("2.00×", "more peak memory")),
        (0.95, ("≈", "the same peak memory")),
    ],
)
def test_memory_change_in_words(value: float, shown: tuple[str, str]):
    assert units.memory_change(value) == shown


def test_durations_and_sizes():
    assert units.duration(141.2) == "141 s" and units.duration(1661) == "27 min 41 s"
    assert units.seconds(0.0111) == "11.1 ms" and units.size(62_431_395_840) == "58.1 GiB"
    assert units.ratio(412.3) == "412×" and units.ratio(None) == "-"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(12.34, "12 s"), (0.00123, "1.2 ms"), (0.0456, "46 ms"), (7.89e-6, "7.9 µs")]
)
def test_an_estimate_has_few_figures(seconds: float, shown: str):
    assert units.about(seconds) == shown


def test_a_range_has_one_unit():
    assert units.about_range(0.0002, 0.0456) == "0.2–46 ms" and units.about_range(1e-6, 2e-5) == "1–20 µs"


def test_predicted_times_and_memory():
    assert [units.ms(value) for value in (1234.5, 12.34, 0.4567)] == ["1,234 ms", "12.3 ms", "457 µs"]
    assert units.gib(62_431_395_840) == "58.14 GiB" and units.gib(3_565_158) == "3.4 MiB"
