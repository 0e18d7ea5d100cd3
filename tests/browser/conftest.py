"""A real browser with the network off. Tests are skipped, with the reason, where there is none."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # No name resolves and no proxy helps: whatever the page asks for fails and shows in the log.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """A selenium driver of the system's chromium, offline."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no chromium with chromedriver on this machine (Debian: chromium, chromium-driver)")
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        session = webdriver.Chrome(options=options, service=Service(driver))
        session.execute_cdp_cmd("Network.enable", {})
        session.execute_cdp_cmd(
            "Network.emulateNetworkConditions",
            {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0},
        )
        try:
            yield session
        finally:
            session.quit()


@pytest.fixture
def open_page(browser):
    """open_page(path, width=1280, scheme="light"): load a file at this width and colour scheme."""

    def load(path: Path, width: int = 1280, scheme: str = "light", media: str = ""):
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        # Without motion a click does not chase a page that is still scrolling.
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"media": media, "features": [{"name": k, "value": v} for k, v in features.items()]},
        )
        browser.get_log("browser")
        browser.get(path.as_uri())
        return browser

    return load
