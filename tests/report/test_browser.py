"""The report in a real browser: what a reader sees, at the widths of a telephone and of a laptop, light and dark."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from gtpo_verl.report.page import write_report

CHROMIUM = "/usr/bin/chromium"  # Debian's, which `make test` installs
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=120_000)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, run_writer) -> Path:
    """The page of a sweep of three arms on three seeds."""
    writer = run_writer(tmp_path_factory.mktemp("outputs"), seed=1)
    path = writer.sweep(seeds=range(3), prompts=60, samples=4, every=10)
    return write_report([path], path).html


@pytest.fixture(params=[(390, "light"), (1366, "dark")], ids=str)
def opened(request: pytest.FixtureRequest, browser: Browser, report: Path) -> Iterator[Page]:
    """The page with its charts; whatever the console says or the network is asked for fails the test."""
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(120_000)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: request.url == report.as_uri() or said.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_selector("body[data-drawn]")
    yield page
    page.close()
    assert said == []


def test_nothing_is_wider_than_the_window(opened: Page) -> None:
    assert opened.evaluate("document.documentElement.scrollWidth") <= opened.viewport_size["width"]
    cut = """[...document.querySelectorAll(".plot svg, .scroll, .card, .text, .tokens")]
        .filter(one => one.getBoundingClientRect().right > innerWidth + 1).map(one => one.outerHTML.slice(0, 80))"""
    assert opened.evaluate(cut) == []


def test_every_chart_is_drawn_with_the_colours_of_the_page(opened: Page) -> None:
    places = opened.evaluate("document.querySelectorAll('[data-chart]').length")
    assert opened.evaluate("document.querySelectorAll('.plot svg').length") == places == 18
    stroke = "getComputedStyle(document.querySelector('#accuracy .mark-line path')).stroke"
    arm = """(() => { const one = document.createElement("i"); one.style.color = "var(--arm1)";
        document.body.append(one); return getComputedStyle(one).color; })()"""
    assert opened.evaluate(stroke) == opened.evaluate(arm)


def test_the_page_has_the_values_of_the_summary(opened: Page, report: Path) -> None:
    summary = json.loads(report.with_name("summary.json").read_text())
    cards = opened.locator(".verdict .number").all_inner_texts()
    assert cards == [f"{100 * final['mean']:.1f} %" for final in summary["over_seeds"]["final"]]
    text = opened.locator("main").inner_text()
    for comparison in summary["over_seeds"]["comparisons"]:
        assert comparison["verdict"] in text


def test_an_arm_can_be_chosen_in_every_chart(opened: Page) -> None:
    faint = (
        "[...document.querySelectorAll('#accuracy .mark-line path')].map(one => getComputedStyle(one).strokeOpacity)"
    )
    assert opened.evaluate(faint) == ["1", "1", "1"]
    opened.locator("#accuracy button", has_text="GTPO").click()
    opened.wait_for_function(f"new Set({faint}).size == 2")
    assert opened.evaluate(faint).count("1") == 1
