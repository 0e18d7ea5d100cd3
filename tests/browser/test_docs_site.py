"""The documentation builds without a broken link, and a reader finds a page by searching."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from leanstep.diagnose import explain
from leanstep.diagnose.rules import RULES

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")
    folder = tmp_path_factory.mktemp("site")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        capture_output=True, text=True, cwd=ROOT, timeout=280,
        env={**os.environ, "PYTHONPATH": paths, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site on this machine: its search needs a server."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def visit(browser, address: str):
    """visit("rules/dead-rows/"): the page in the browser; nothing but this machine can be reached."""
    online = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", online)

    def load(page: str):
        browser.get_log("browser")
        browser.get(f"{address}/{page}")
        return browser

    yield load
    browser.execute_cdp_cmd("Network.emulateNetworkConditions", {**online, "offline": True})


def test_every_rule_has_the_page_that_explain_names(site: Path):
    for name, rule in RULES.items():
        text = (site / explain.page_of(name) / "index.html").read_text(encoding="utf-8")
        plain = re.sub(r"<[^>]+>", "", text)
        assert f"ignore[{name}]" in plain, name
        first = re.escape(rule.why.split(".")[0].split("'")[0][:40])
        assert re.search(first.replace(r"\ ", r"\s+"), plain), name


def test_pages_open_without_errors_and_load_nothing_from_elsewhere(visit, address: str):
    for page in (
        "",
        "rules/dead-rows/",
        "published/",
        "api/heads/",
        "gallery/",
        "heads/",
    ):
        driver = visit(page)
        errors = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        assert not errors, (page, errors)
        names = driver.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
        assert all(name.startswith((address, "data:")) for name in names), (page, names)
    assert "linear_logprobs" in visit("api/heads/").find_element("css selector", "article").text


def test_the_search_finds_a_rule(visit):
    from selenium.webdriver.support.ui import WebDriverWait

    driver = visit("")
    field = driver.find_element("css selector", "input.md-search__input")
    driver.execute_script("document.querySelector('#__search').click()")
    field.send_keys("dead-rows")
    links = WebDriverWait(driver, 30, 0.1).until(
        lambda d: [
            a.get_attribute("href") for a in d.find_elements("css selector", "a.md-search-result__link")
        ]
    )
    assert any("rules/dead-rows" in link for link in links), links
