"""The page in a browser: what a click, a hover and a key do, that nothing is loaded, and that it can be read.

It needs Chromium (Debian: `apt-get install chromium`) and playwright, which drives it; without either it is skipped.
"""

import json
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from costmodel.config.units import format_bytes, format_seconds
from nas.report.html.page import REPORT_FILE, write_report
from nas.run.run import Run
from tests.nas.report.html.made_runs import record, write_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--no-sandbox", "--disable-quic", "--disable-background-networking")
DRAWN = "document.body.dataset.drawn === 'all'"
LEAST_CONTRAST = 4.5  # of text: WCAG 2.2, success criterion 1.4.3
CONTRASTS = """
selector => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = colour => colour.slice(0, 3).map(v => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let one = element; one; one = one.parentElement) {
      const colour = parse(getComputedStyle(one).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll(selector)].filter(one => one.checkVisibility()).map(one => {
    const pair = [light(parse(getComputedStyle(one).color)), light(behind(one))].sort((a, b) => a - b);
    return [(pair[1] + 0.05) / (pair[0] + 0.05), one.className + " " + one.textContent.trim().slice(0, 30)];
  });
}
"""


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
        page.wait_for_function(DRAWN)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not (url.startswith("file:") and url.endswith("report.html"))] == []
    assert len(asked) == len(contexts)


def data_of(page: Any) -> dict[str, Any]:
    return json.loads(page.evaluate("document.getElementById('data').textContent"))


def mark(page: Any, name: str) -> Any:
    """The mark of a model in the chart of the front."""
    return page.locator(f"#front-chart svg [aria-label='{name}']").first


def chosen(page: Any) -> str:
    return page.locator(".panel:visible h3 code").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (400, 800)])
def test_the_answer_is_on_the_first_screen(opened: Any, width: int, height: int, scheme: str) -> None:
    page = opened(width, height, scheme)
    for selector in ("h1", ".answer .layer-map", ".figures", ".verdicts", ".beside"):
        box = page.locator(selector).first.bounding_box()
        assert box["y"] + box["height"] <= height, selector
        assert box["x"] + box["width"] <= width, selector
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".chart svg").count() == 5


@pytest.mark.parametrize("width", [1000, 400])
def test_a_placement_that_changes_with_every_layer_is_no_wider_than_the_page(opened, tmp_path, width: int) -> None:
    long = record(1, "-".join(["1xLSLGo", "1xoSoRo"] * 6), "candidate", 0, 2.0)
    page = opened(width, file=write_report(Run.read(write_run(tmp_path / "run", [long]))))
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(opened: Any, scheme: str) -> None:
    page = opened(scheme=scheme)
    contrasts = page.evaluate(
        CONTRASTS, "td, th, p, dd, dt, li, h1, h2, h3, small, label, button, .key i, .badge, .warning"
    )
    assert len(contrasts) > 300
    assert [contrast for contrast in contrasts if contrast[0] < LEAST_CONTRAST] == []


def test_hovering_shows_architecture_and_costs(opened: Any) -> None:
    page = opened()
    setting = data_of(page)["settings"][0]
    mark(page, "4xlSlRo-8xlSooo").hover()
    tip = page.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    seconds, num_bytes, _ = setting["totals"][2]
    for words in ("4xlSlRo-8xlSooo", "12.05 ± ", format_seconds(seconds), format_bytes(num_bytes)):
        assert words in tip.inner_text()


def test_a_click_chooses_a_model_everywhere(opened: Any) -> None:
    page = opened()
    data = data_of(page)
    assert chosen(page) == data["points"][data["pick"]]["name"] == "10xlSlRo-2xooooo"
    mark(page, "6xoSoRo-6xooooo").click()
    assert chosen(page) == "6xoSoRo-6xooooo"
    assert page.locator("#model").input_value() == "0"
    assert page.locator("button.choose[aria-pressed=true] code").inner_text() == "6xoSoRo-6xooooo"
    setting = data["settings"][0]
    rows = dict(zip(setting["kinds"], data["columns"][setting["parts"][0][0]], strict=True))
    shown = {row.locator("th").inner_text(): row.inner_text() for row in page.locator("#breakdown tbody tr").all()}
    assert set(shown) == {kind for kind, seconds in rows.items() if seconds}
    for kind in shown:
        assert format_seconds(rows[kind]) in shown[kind]


def test_keys_choose_too(opened: Any) -> None:
    page = opened()
    page.locator("#front-chart").focus()
    page.keyboard.press("ArrowLeft")
    assert chosen(page) == "4xlSlRo-8xlSooo"
    page.locator("button.choose").first.focus()
    page.keyboard.press("Enter")
    assert chosen(page) == "6xoSoRo-6xooooo"
    page.locator("#model").select_option(label="SM+LN+G (parent)")
    assert chosen(page) == "SM+LN+G"


def test_another_setting_shows_the_prices_of_the_grid(opened: Any) -> None:
    page = opened()
    data = data_of(page)
    assert page.locator("#measure option").nth(2).is_disabled()
    page.locator("#protocol").select_option("aby3")
    page.locator("#network").select_option("wan")
    page.locator("#seq_len").select_option("256")
    page.locator("#measure").select_option("2")
    (place,) = [
        index
        for index, setting in enumerate(data["settings"])
        if (setting["protocol"], setting["network"], setting["seq_len"]) == ("aby3", "wan", 256)
    ]
    told = page.locator("#told").inner_text()
    assert "Priced anew; no budget holds here; aby3 on wan, prompt of 256 tokens; 3 parties" in told
    assert "perplexities are of 128 tokens all the same" in told
    rounds = data["settings"][place]["totals"][data["pick"]][2]
    assert f"{rounds:,.0f} rounds" in page.locator("#breakdown caption").inner_text()
    page.wait_for_function("document.querySelector('#front-chart svg').textContent.includes('rounds a token')")
    page.locator("#protocol").select_option("published")
    assert page.locator("#network").input_value() == "its own"
    assert page.locator("#measure").input_value() == "0"


def test_print_leaves_out_what_cannot_be_used(opened: Any) -> None:
    page = opened(scheme="dark")
    page.emulate_media(media="print")
    assert not page.locator(".controls").is_visible()
    white = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert white == "rgb(255, 255, 255)"
    assert re.match(rb"%PDF", page.pdf())
    assert page.locator("details:not(.licenses)").first.get_attribute("open") is not None


def test_what_a_run_brings_with_it_does_not_run(opened: Any, tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'"
    candidate = record(0, "SM_i12", "candidate", 0, 2.0, notation=evil, trial_id="t")
    page = opened(file=write_report(Run.read(write_run(tmp_path / "run", [candidate]))))
    page.locator("#model").select_option("0")
    page.locator("#front-chart").get_by_label(evil, exact=True).first.hover()
    page.locator("#vg-tooltip-element.visible").wait_for()
    assert evil in page.locator("#vg-tooltip-element").inner_text()
