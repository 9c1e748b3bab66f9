"""The page of a run, without a browser: what it says, that it says it safely, and that it asks for nothing."""

import hashlib
import json
import math
import re
import shutil
from base64 import b64encode
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from costmodel.config.units import format_bytes, format_seconds
from costmodel.errors import UserError
from nas.report.__main__ import report
from nas.report.html.answer import rows_beside
from nas.report.html.grid import price_grid
from nas.report.html.page import ASSETS, REPORT_FILE, SCRIPTS, write_report
from nas.report.html.points import points_of
from nas.run.config import StudyConfig
from nas.run.folder import run_pricer
from nas.run.run import Run
from search_spaces.pricing import price_architecture
from tests.nas.report.html.made_runs import TOKENS, record

EARLIER = Path(__file__).parents[2] / "run" / "stored"
MOST_BYTES = 3_000_000
LOADERS = ("src", "href", "srcset", "action", "formaction", "poster", "background", "data", "ping", "manifest")


class Page(HTMLParser):
    """Elements, texts by section, and scripts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "meta" and dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"] or ""

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and self.get_starttag_text().startswith("<script"):
            self.scripts.append(data)
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def data(self) -> dict[str, Any]:
        (text,) = [script for script in self.scripts if script.startswith("{")]
        return json.loads(text)


def page_of(folder: Path) -> Page:
    return Page(write_report(Run.read(folder)).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def whole_page(whole_folder: Path) -> Page:
    return Page((whole_folder / REPORT_FILE).read_text(encoding="utf-8"))


def test_the_answer_is_the_best_within_the_budget(whole_page: Page, whole_folder: Path) -> None:
    page, run = whole_page, Run.read(whole_folder)
    best = run.front[-1]
    assert best.notation == "10xlSlRo-2xooooo"
    answer = page.text[: page.text.index("The front")]
    assert "attention in 10 of 12 layers, ReLU FFN in 10, no norm in any layer once frozen ones are folded" in answer
    for words in (format_seconds(best.latency_s), format_bytes(best.sent_bytes), "8.12 ± 0.08", "2 seeds", "10xoSoRo"):
        assert words in answer
    # beside it: what was trained to compare, the parent, a row of the papers alone, and the n-grams
    for words in ("7.10", "6.90", "EReg(SM(t)+ScFuFFN_i6)", "3.25", "11.50", "16.20"):
        assert words in answer
    assert run.front[page.data["pick"]] == best


def test_a_row_of_the_papers_that_was_trained_is_one_row(make_run) -> None:
    """SM+LN+G has the parent's own perplexity, a row on the front that of this run."""
    records = [
        record(0, "SM+LN+G", "baseline", 0, math.log(7.04)),
        record(1, "SM+ScFuFFN_i6", "candidate", 0, math.log(22.0)),
        record(2, "10xlSlRo-2xooooo", "candidate", 0, math.log(8.1)),
    ]
    run = Run.read(make_run(records))
    points = points_of(run)
    rows = {row.name: row for row in rows_beside(run, points, price_grid(run, points).settings[0])}
    assert (rows["SM+LN+G"].kind, rows["SM+LN+G"].here, rows["SM+LN+G"].printed) == ("parent", "6.90", "2.69")
    row = rows["SM+ScFuFFN_i6"]
    assert (row.kind, row.here, row.printed, row.printed_price) == ("trained", "22.00", "3.54", "4.23 min")
    assert (rows["SM+ScFuFFN"].kind, rows["SM+ScFuFFN"].here) == ("paper", "")
    assert [rows[name].kind for name in ("10xlSlRo-2xooooo", "trigram")] == ["pick", "n-gram"]
    assert next(iter(rows)) == "SM+LN+G"  # the most expensive


def test_the_proxy_is_spoken_of_where_models_are_of_another_width_than_prices(make_run, whole_page: Page) -> None:
    assert "of a small proxy" in whole_page.text
    assert "papers' price" in whole_page.text
    text = page_of(make_run([record(0, "SM_i12", "candidate", 0, 2.0, width=768)])).text
    assert "Perplexities are of the model's own width, 768: 4,096 tokens a candidate" in text
    assert "of a small proxy" not in text
    assert "instead of" not in text


def test_its_numbers_are_those_of_the_ledger(whole_page: Page, whole_folder: Path) -> None:
    """Every trained member has them, not rounded; the grid's own price of the same forms agrees to its digits."""
    data, run = whole_page.data, Run.read(whole_folder)
    setting = data["settings"][0]
    assert (setting["protocol"], setting["network"], setting["seq_len"]) == ("published", None, 128)
    by_name = {member.notation: member for member in run.members}
    trained = [index for index, point in enumerate(data["points"]) if point["role"] in ("front", "baseline")]
    assert {data["points"][index]["name"] for index in trained} == set(by_name)
    for index in trained:
        member = by_name[data["points"][index]["name"]]
        assert setting["totals"][index] == [member.latency_s, member.sent_bytes, None]
        assert data["points"][index]["perplexity"] == pytest.approx(member.perplexity, rel=1e-12)
        for measure in (0, 1):
            parts = data["columns"][setting["parts"][index][measure]]
            assert sum(parts) == pytest.approx(setting["totals"][index][measure], rel=1e-5)
    assert setting["budgets"] == [300.0, None, None]
    assert setting["fronts"][0] == [0, 1, 2, 3]
    assert setting["fronts"][2] is None


def test_the_grid_has_every_protocol_network_and_prompt(whole_page: Page) -> None:
    settings = whole_page.data["settings"]
    names = [(setting["protocol"], setting["network"], setting["seq_len"]) for setting in settings]
    assert len(names) == len(set(names)) == 4 + 5 * 4 * 4
    longer, shorter = (settings[names.index(("aby3", "wan", seq_len))] for seq_len in (256, 128))
    assert all(a[0] > b[0] and a[1] > b[1] for a, b in zip(longer["totals"], shorter["totals"], strict=True))
    assert "3 parties" in longer["trust"]
    # fewest rounds and lowest perplexity: the baseline takes part where no budget holds
    assert longer["fronts"][2]
    assert "extrapolated: " in settings[names.index(("published", None, 512))]["outside"]


def test_it_loads_nothing_and_is_small(run_folder: Path) -> None:
    path = write_report(Run.read(run_folder))
    page = Page(path.read_text(encoding="utf-8"))
    assert path.read_bytes() == write_report(Run.read(run_folder), run_folder / "again.html").read_bytes()
    assert path.stat().st_size < MOST_BYTES
    assert not [(tag, name) for tag, attributes in page.tags for name in attributes if name in LOADERS]
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "embed", "base", "video", "audio"}
    style = (ASSETS / "style.css").read_text()
    assert "url(" not in style
    assert "@import" not in style


def test_a_folder_is_no_file_to_write(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--output .* must be a file that we can write, but is a folder"):
        report(str(run_folder), tmp_path)
    with pytest.raises(UserError, match="--output .* must be a file that we can write: No such file or directory"):
        report(str(run_folder), tmp_path / "nowhere" / "page.html")


def test_only_our_scripts_may_run(whole_page: Page) -> None:
    """By digest; what an injected script would be is refused by the browser, and nothing may be loaded."""
    page = whole_page
    run = [script for script in page.scripts if not script.startswith("{") and script.strip()]
    assert run == [(ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS]
    digests = [f"'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in run]
    assert page.policy.split("; ")[:2] == ["default-src 'none'", f"script-src {' '.join(digests)}"]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


def test_what_comes_from_a_run_is_escaped(make_run) -> None:
    """In text, in attributes and in the data of the scripts."""
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
    candidate = record(0, "SM+LN+R", "candidate", 0, 2.0, left_unfolded=(evil,), trial_id=evil, notation=evil)
    failed = record(1, "SM+LN+R", "candidate", 0, None, status="failed", reason=evil)
    folder = make_run([candidate, failed], meta={"hardware": {evil: evil}}, budget_latency="9min")
    text = write_report(Run.read(folder)).read_text(encoding="utf-8")
    page = Page(text)
    assert "alert(1)" in page.text
    assert "<script>alert" not in text
    assert "img" not in {tag for tag, _ in page.tags}
    assert len([tag for tag, _ in page.tags if tag == "script"]) == len(SCRIPTS) + 1
    assert page.data["points"][0]["name"] == evil


def test_curves_are_thinned_and_rungs_kept(whole_page: Page, whole_folder: Path) -> None:
    data, run = whole_page.data, Run.read(whole_folder)
    (number,) = [place for place, member in enumerate(run.front, 1) if member.first.trial_id == "trial1-s0-a0"]
    training = [point for point in data["curves"] if point["series"] == "training"]
    assert {point["number"] for point in training} == {number}
    assert len(training) == math.ceil(512 / 7)  # at most 80 means: of 7 steps each
    assert training[0]["tokens"] == 8 * 7
    assert training[0]["loss"] == pytest.approx(3 - 4 / 512, abs=1e-4)
    validation = [point for point in data["curves"] if point["series"] == "validation" and point["number"] == number]
    assert [point["tokens"] for point in validation] == [TOKENS // 4, TOKENS // 2, TOKENS]
    assert [point["loss"] for point in validation] == pytest.approx([math.log(15.5) + by for by in (0.375, 0.25, 0.0)])


@pytest.mark.parametrize("torn", [None, "", '{"step": 768, "head', "[]\n", '{"step": 768}\n'])
def test_entropies_are_those_of_the_last_step(run_folder: Path, torn: str | None) -> None:
    if torn is not None:
        path = run_folder / "trials" / "trial1-s0-a0" / "diagnostics.jsonl"
        path.write_text(path.read_text() * bool(torn) + torn)
    cells = page_of(run_folder).data["entropies"]
    assert len(cells) == (12 * 6 if torn is None else 0)
    if torn is None:
        assert max(cell["entropy"] for cell in cells) == pytest.approx(0.5 + 0.2 * 5 + 0.1 * 11)


def test_the_hypervolume_ends_where_the_run_does(whole_page: Page, whole_folder: Path) -> None:
    data, run = whole_page.data, Run.read(whole_folder)
    last = data["hypervolumes"][-1]
    assert last["hypervolume"] == pytest.approx(run.summary.hypervolume)
    assert last["tokens"] == 512 + 8 * TOKENS
    assert len(data["hypervolumes"]) == 1 + 9


def test_what_is_to_be_distrusted_is_said(whole_page: Page) -> None:
    page = whole_page
    caveats = page.text[page.text.index("What to distrust") : page.text.index("How to do it again")]
    for words in (
        "width 96 instead of 768, 4,096 tokens a candidate",
        "Members of the front have 1 to 2 seeds",
        "5 of 12,345 members within the budget were tried (1e+30 in the space); 1 diverged",
        "over all coefficients consistent with the printed rows",
        "extrapolated: num_layers 6, 10 (data: 12 to 18), num_heads 6 (data: 12)",
        "2 parties, semi-honest, dishonest majority",
        "trigram 16.2",
    ):
        assert words in caveats
    again = page.text[page.text.index("How to do it again") :]
    assert "python -m nas.search --budget-latency 5min" in again
    assert "loss above the first one" in again
    assert "c0ffee" in again


def test_a_run_without_a_completed_trial_says_so_and_why(make_run) -> None:
    failed = record(0, "SM+LN+R", "candidate", 0, None, status="failed", reason="no memory left")
    started = record(1, "SM+LN+G", "candidate", 0, None, event="started", status="running")
    proposed = record(2, "SM+LN+G", "candidate", 0, None, event="proposed", status="proposed")  # is not unfinished
    page = page_of(make_run([failed, started, proposed]))
    assert (
        "No model yet No trial was trained to completion: 0 paused at a look, 0 diverged, 1 failed, 1 unfinished."
        in page.text
    )
    assert "SM+LN+R: failed, no memory left" in page.text
    assert "How to do it again" in page.text
    assert "script-src 'none'" in page.policy
    assert page.scripts == []


def test_the_command_prices_what_the_run_prices(make_run) -> None:
    of_run = {"protocol": "cheetah", "network": "wan", "projection": "last", "new_tokens": 4, "weights": "server"}
    folder = make_run([record(0, "SM_i12", "candidate", 0, 2.0)], **of_run)
    page = page_of(folder).text
    for flags in ("--protocol cheetah --network wan", "--projection last", "--new-tokens 4", "--weights server"):
        assert flags in page


def test_masks_that_are_kept_are_of_the_protocols_of_the_run(make_run) -> None:
    folder = make_run([record(0, "SM_i12", "candidate", 0, 2.0)], protocol="semi2k", weight_masks="kept")
    assert "--weight-masks kept" in page_of(folder).text
    run = Run.find(str(folder))

    def sent_bytes(config: StudyConfig) -> float:
        pricer = run_pricer(None, config, "semi2k")
        return price_architecture(run.base, pricer, run.workload, "deployed").price.sent_bytes

    assert sent_bytes(run.config) < 0.9 * sent_bytes(replace(run.config, weight_masks=None))
    assert run.config.setting_of("aby3") is None
    with pytest.raises(UserError, match="`weight_masks` kept is of protocol semi2k, but got protocol aby3"):
        run_pricer(None, replace(run.config, protocol="aby3"), "aby3")


def test_a_run_with_nothing_within_the_budget_says_so(make_run) -> None:
    page = page_of(make_run([record(0, "SM+LN+R", "baseline", 0, 2.0)]))
    assert "No model yet None of the 1 models that were trained to the end has a place within 5.00 min" in page.text
    assert "The cheapest, SM+LN+R, costs 6.06 min" in page.text
    assert [point["role"] for point in page.data["points"]][:2] == ["baseline", "parent"]


@pytest.mark.parametrize("name", ["published", "semi2k"])
def test_runs_priced_by_a_former_cost_model_have_a_page(name: str, tmp_path, capsys) -> None:
    folder = Path(shutil.copytree(EARLIER / name, tmp_path / name))
    report(str(folder), tmp_path / "page.html")
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert page.data["settings"][0]["protocol"] == name
    assert "trigram" not in page.text
    assert "The ledger was priced by cost model" in page.text


def test_the_licences_come_with_what_they_are_of(whole_page: Page) -> None:
    licences = (ASSETS / "LICENSES.txt").read_text(encoding="utf-8")
    for script in SCRIPTS:
        if match := re.fullmatch(r"(vega[a-z-]*)-([\d.]+)\.min\.js", script):
            assert f"{match[1]} {match[2]}" in licences
    assert "University of Washington Interactive Data Lab" in whole_page.text
