"""The page in a real browser: opened from the file system, network off."""

from __future__ import annotations

from pathlib import Path

import pytest
from report import samples

from leanstep.report.page import add_section

MARKS = """
return [...document.querySelectorAll('.chart')].map(c => [...c.querySelectorAll('.bar, .line')]
  .filter(m => m.getBoundingClientRect().width > 0).length)
"""
RIGHT_EDGES = """
return [...document.querySelectorAll('.chart, .chart svg, .chart b, .feet span')]
  .map(part => part.getBoundingClientRect().right)
"""
WIDTHS = "return [document.documentElement.scrollWidth, window.innerWidth]"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    path = folder / "index.html"
    add_section(path, "demo", samples.demo_payload(folder))
    add_section(path, "diagnose", samples.diagnose_report(folder))
    return path


def colour(driver, selector: str, name: str = "color") -> str:
    return driver.execute_script(
        "return getComputedStyle(document.querySelector(arguments[0])).getPropertyValue(arguments[1])",
        selector,
        name,
    )


def test_opens_without_a_word_on_the_console(open_page, page: Path):
    driver = open_page(page)
    assert driver.title == "leanstep report"
    assert driver.get_log("browser") == []
    requests = driver.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in requests if not name.startswith("data:")] == []


def test_every_chart_has_data(open_page, page: Path):
    driver = open_page(page)
    marks = driver.execute_script(MARKS)
    assert len(marks) == 3 * 3  # three examples: time, memory, memory over one step
    assert all(count >= 2 for count in marks), marks


def test_a_click_on_a_finding_shows_its_source_line(open_page, page: Path):
    driver = open_page(page)
    finding = driver.find_element("css selector", "#lens .finding")
    line = finding.find_element("css selector", ".code .hit")
    assert not line.is_displayed()
    finding.find_element("css selector", "summary").click()
    assert line.is_displayed()
    assert line.text.split() == ["7", "logits", "=", "head(hidden)"]
    assert "Gather the rows before the head." in finding.text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fits_a_phone(open_page, page: Path, scheme: str):
    driver = open_page(page, width=390, scheme=scheme)
    for details in driver.find_elements("css selector", "details"):
        driver.execute_script("arguments[0].open = true", details)
    content, window = driver.execute_script(WIDTHS)
    assert content <= window == 390
    assert max(driver.execute_script(RIGHT_EDGES)) <= 391
    assert driver.get_log("browser") == []


def test_dark_and_light_follow_the_system_and_the_button(open_page, page: Path):
    light = colour(open_page(page, scheme="light"), "body", "background-color")
    driver = open_page(page, scheme="dark")
    dark = colour(driver, "body", "background-color")
    assert light != dark
    bar = "#lens .chart .bar.fast"
    before = colour(driver, bar, "background-color")
    driver.find_element("id", "theme").click()
    assert colour(driver, "body", "background-color") == light
    assert colour(driver, bar, "background-color") != before


def test_prints_everything_on_white(open_page, page: Path):
    driver = open_page(page, scheme="dark", media="print")
    driver.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    assert driver.execute_script("return document.querySelectorAll('details:not([open])').length") == 0
    assert colour(driver, "body", "background-color") == "rgb(255, 255, 255)"
    assert colour(driver, "body") == "rgb(28, 27, 25)"
    driver.execute_script("window.dispatchEvent(new Event('afterprint'))")
    assert driver.execute_script("return document.querySelectorAll('details[open]').length") == 0
    assert driver.execute_script("return document.documentElement.dataset.theme") is None
    printed = driver.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    assert len(printed["data"]) > 50_000
