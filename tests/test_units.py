"""Numbers as people read them."""

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
