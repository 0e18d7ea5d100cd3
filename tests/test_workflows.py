"""The workflows follow GitHub's schema, run only what a commit names, and leave no token behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def parsed(name: str) -> dict:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))


def violations(path: Path) -> int:
    """Return the exit code of the published schema's check, which needs no network."""
    check = pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    with pytest.raises(SystemExit) as ended:
        check.main(["--builtin-schema", "vendor.github-workflows", str(path)])
    return ended.value.code


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_follow_the_schema(path: Path, capsys):
    assert violations(path) == 0, capsys.readouterr().out


def test_the_schema_refuses_a_misspelt_key(tmp_path: Path):
    text = FILES[0].read_text(encoding="utf-8")
    (tmp_path / "wrong.yml").write_text(text.replace("runs-on:", "run-on:"), encoding="utf-8")
    assert violations(tmp_path / "wrong.yml") == 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_keep_no_credentials(path: Path):
    lines = path.read_text(encoding="utf-8").splitlines()
    used = [number for number, line in enumerate(lines) if re.search(r"\buses:", line)]
    assert used
    for number in used:
        assert re.search(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v[\d.]+$", lines[number]), lines[number]
        if "actions/checkout@" in lines[number]:
            assert "persist-credentials: false" in lines[number + 1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_jobs_have_a_time_limit_and_read_only_tokens(path: Path):
    text = parsed(path.name)
    assert text["permissions"] == {"contents": "read"}
    for name, job in text["jobs"].items():
        assert name == "publish" or job["timeout-minutes"] <= 120
        assert name == "publish" or "permissions" not in job


def test_the_parts_of_a_pull_requests_suite_are_the_whole_suite():
    jobs = parsed("tests.yml")["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.10", "3.11", "3.12", "3.13"]
    words = " ".join(jobs["test-all"]["strategy"]["matrix"]["part"]).split()
    listed = [path.relative_to(ROOT) for word in words for path in ROOT.glob(word)]
    tests = {p.relative_to(ROOT) for p in (ROOT / "tests").rglob("test_*.py") if "third_party" not in p.parts}
    assert len(listed) == len(set(listed))
    assert tests == {
        file
        for path in listed
        for file in (
            [path] if path.suffix else [p.relative_to(ROOT) for p in (ROOT / path).rglob("test_*.py")]
        )
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_commands_name_targets_and_files_that_exist(path: Path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    steps = [step for job in parsed(path.name)["jobs"].values() for step in job["steps"]]
    commands = "\n".join(step["run"] for step in steps if "run" in step)
    for target in re.findall(r"\bmake ([a-z][\w-]*)", commands):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for name in re.findall(r"(?<![\w./-])((?:tests|dev)/[\w./-]+)", commands):
        assert (ROOT / name).exists(), name


def test_what_is_published_is_built_without_the_tests():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    jobs = dict(re.findall(r"^  (\w+):\n((?:    .*\n|\n)*)", text[text.index("jobs:") :], re.MULTILINE))
    assert set(jobs) == {"test", "build", "publish"}
    assert "make test-all" in jobs["test"] and "cache" not in text
    assert "upload-artifact" in jobs["build"] and "upload-artifact" not in jobs["test"]
    assert "make" not in jobs["build"] and "needs: [test, build]" in jobs["publish"]
