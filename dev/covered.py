"""Which lines of leanstep/ do the tests run? In every process, forked ones included.

    make covered PYTEST_ARGS="-m quick"     the lines of `make test`
    make covered                            the lines of `make test-all`

Arguments are pytest's. It writes build/covered/: `lines.txt` with the missing lines of each file, and
`.coverage` with the test that ran a line, for `coverage html --show-contexts`. A process that is killed
leaves no data. coverage's own patches lose forked children and those that end by `os._exit`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "covered"
# Python imports it in each process whose PYTHONPATH has its folder.
SITE = """
import atexit
import os

import coverage

OUT, SOURCE, current = {out!r}, {source!r}, None


def start():
    global current
    forked, test = current, os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0]
    if forked is not None and forked._started:
        forked.stop()
    name = f"{{OUT}}/.coverage.{{os.getpid()}}.{{os.urandom(4).hex()}}"
    current = coverage.Coverage(
        config_file=False, data_file=name, source=[SOURCE], context=test or None, messages=False
    )
    words = "no-data-collected module-not-measured module-not-imported trace-changed"
    current.set_option("run:disable_warnings", words.split())
    current._auto_save = False
    current.start()


def save():
    global current
    ended, current = current, None
    if ended is not None:
        ended.stop()
        ended.save()


def exit_now(status, exit_now=os._exit):
    save()
    exit_now(status)


start()
atexit.register(save)
os.register_at_fork(after_in_child=start)
os._exit = exit_now
"""
PLUGIN = """
import sitecustomize


def pytest_runtest_logstart(nodeid, location):
    if sitecustomize.current is not None:
        sitecustomize.current.switch_context(nodeid)
"""


def main(arguments: list[str]) -> int:
    shutil.rmtree(OUT, ignore_errors=True)
    site = OUT / "site"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(SITE.format(out=str(OUT), source=str(ROOT / "leanstep")))
    (site / "name_tests.py").write_text(PLUGIN)
    command = [sys.executable, "-m", "pytest", "-o", "timeout=900", "-p", "name_tests"]
    failed = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
    ).returncode
    data = coverage.Coverage(config_file=False, data_file=str(OUT / ".coverage"), messages=False)
    data.combine([str(OUT)])
    with (OUT / "lines.txt").open("w", encoding="utf-8") as file:
        share = data.report(file=file, show_missing=True)
    print(f"{share:.1f} % of the statements of leanstep/ ran; missing lines: {OUT / 'lines.txt'}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
