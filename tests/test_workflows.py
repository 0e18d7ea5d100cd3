"""The workflows run only what a commit names, and leave no token behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_keep_no_credentials(path: Path):
    lines = path.read_text(encoding="utf-8").splitlines()
    used = [number for number, line in enumerate(lines) if re.search(r"\buses:", line)]
    assert used
    for number in used:
        assert re.search(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v[\d.]+$", lines[number]), lines[number]
        if "actions/checkout@" in lines[number]:
            assert "persist-credentials: false" in lines[number + 1]


def test_what_is_published_is_built_without_the_tests():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    jobs = dict(re.findall(r"^  (\w+):\n((?:    .*\n|\n)*)", text[text.index("jobs:") :], re.MULTILINE))
    assert set(jobs) == {"test", "build", "publish"}
    assert "upload-artifact" in jobs["build"] and "upload-artifact" not in jobs["test"]
    assert "make" not in jobs["build"] and "needs: [test, build]" in jobs["publish"]
