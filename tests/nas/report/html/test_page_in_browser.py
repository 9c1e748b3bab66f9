"""The page in a browser: that it fits, that it can be read, and that nothing is loaded.

It needs Chromium (Debian: `apt-get install chromium`) and playwright, which drives it; without either it is skipped.
"""

import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nas.report.html.page import REPORT_FILE, write_report
from nas.run.run import Run
from tests.nas.report.html.conftest import record, write_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--no-sandbox", "--disable-quic", "--disable-background-networking")
LEAST_CONTRAST = 4.5  # of text: WCAG 2.2, success criterion 1.4.3
CONTRASTS = Path(__file__).with_name("contrasts.js").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    if find_spec("playwright") is None:
        pytest.skip("needs playwright: pip install playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, whole_folder: Path) -> Iterator[Any]:
    """Opens the page, at another size or in dark if asked to; at the end nothing was loaded and nothing complained."""
    contexts, said, asked = [], [], []

    def open_page(
        width: int = 1280, height: int = 800, scheme: str = "light", file: Path = whole_folder / REPORT_FILE
    ) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not (url.startswith("file:") and url.endswith("report.html"))] == []
    assert len(asked) == len(contexts)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (400, 800)])
def test_the_answer_is_on_the_first_screen(opened: Any, width: int, height: int, scheme: str) -> None:
    page = opened(width, height, scheme)
    for selector in ("h1", ".answer .layer-map", ".figures", ".verdicts", ".beside"):
        box = page.locator(selector).first.bounding_box()
        assert box["y"] + box["height"] <= height, selector
        assert box["x"] + box["width"] <= width, selector
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".chart svg").count() == 2


@pytest.mark.parametrize("width", [1000, 400])
def test_a_placement_that_changes_with_every_layer_is_no_wider_than_the_page(opened, tmp_path, width: int) -> None:
    long = record(1, "-".join(["1xLSLGo", "1xoSoRo"] * 6), "candidate", 0, 2.0)
    page = opened(width, file=write_report(Run.read(write_run(tmp_path / "run", [long]))))
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(opened: Any, scheme: str) -> None:
    page = opened(scheme=scheme)
    contrasts = page.evaluate(CONTRASTS, "td, th, p, dd, dt, li, h1, h2, h3, small, .key i, .badge, .warning")
    assert len(contrasts) > 200
    assert [contrast for contrast in contrasts if contrast[0] < LEAST_CONTRAST] == []


def test_print_is_on_white(opened: Any) -> None:
    page = opened(scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert re.match(rb"%PDF", page.pdf())
