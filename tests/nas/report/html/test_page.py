import math
import shutil
from dataclasses import replace
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path

import pytest

from costmodel.config.units import format_bytes, format_seconds
from costmodel.errors import UserError
from nas.report.__main__ import report
from nas.report.html.answer import rows_beside
from nas.report.html.page import ASSETS, REPORT_FILE, write_report
from nas.report.html.placements import kept_words, layer_map, legend
from nas.report.summary import perplexity_text
from nas.run.config import StudyConfig
from nas.run.folder import run_pricer
from nas.run.run import Run
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.budget.priced_space import price_architecture
from search_spaces.notation import parse
from tests.nas.report.html.conftest import record

EARLIER = Path(__file__).parents[2] / "run" / "stored"
MOST_BYTES = 400_000
LOADERS = ("src", "href", "srcset", "action", "formaction", "poster", "background", "data", "ping", "manifest")
BRINGERS = {"script", "link", "img", "iframe", "object", "embed", "base", "video", "audio"}


class Page(HTMLParser):
    """Elements and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "meta" and dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"] or ""

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(folder: Path) -> Page:
    return Page(write_report(Run.read(folder)).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def whole_page(whole_folder: Path) -> Page:
    return Page((whole_folder / REPORT_FILE).read_text(encoding="utf-8"))


def test_the_answer_is_the_best_within_the_budget(whole_page: Page, whole_folder: Path) -> None:
    *_, best = Run.read(whole_folder).front
    assert best.notation == "10xlSlRo-2xooooo"
    answer = whole_page.text[: whole_page.text.index("The front")]
    assert "attention in 10 of 12 layers, ReLU FFN in 10, no norm in any layer once frozen ones are folded" in answer
    for words in (format_seconds(best.latency_s), format_bytes(best.sent_bytes), "8.12 ± 0.08", "2 seeds", "10xoSoRo"):
        assert words in answer
    # beside it: what was trained to compare, the parent, a row of the papers alone, and the n-grams
    for words in ("7.10", "6.90", "EReg(SM(t)+ScFuFFN_i6)", "3.25", "11.50", "16.20"):
        assert words in answer


def test_a_row_of_the_papers_that_was_trained_is_one_row(make_run) -> None:
    """SM+LN+G has the parent's own perplexity, a row on the front that of this run."""
    records = [
        record(0, "SM+LN+G", "baseline", 0, math.log(7.04)),
        record(1, "SM+ScFuFFN_i6", "candidate", 0, math.log(22.0)),
        record(2, "10xlSlRo-2xooooo", "candidate", 0, math.log(8.1)),
    ]
    run = Run.read(make_run(records))
    rows = {row.name: row for row in rows_beside(run)}
    row = rows["SM+LN+G"]
    assert (row.kind, row.here, row.paper.perplexity) == ("parent", "6.90", 2.69)
    row = rows["SM+ScFuFFN_i6"]
    assert (row.kind, row.here) == ("trained", "22.00")
    assert (row.paper.perplexity, row.paper.latency_min) == (3.54, Decimal("4.23"))
    assert (rows["SM+ScFuFFN"].kind, rows["SM+ScFuFFN"].here) == ("paper", "")
    assert [rows[name].kind for name in ("10xlSlRo-2xooooo", "trigram")] == ["pick", "n-gram"]
    assert next(iter(rows)) == "SM+LN+G"  # the most expensive


def test_the_proxy_is_spoken_of_where_models_are_of_another_width_than_prices(make_run, whole_page: Page) -> None:
    assert "of a small proxy" in whole_page.text
    assert "papers' latency" in whole_page.text
    text = page_of(make_run([record(0, "SM_i12", "candidate", 0, 2.0, width=768)])).text
    assert "Perplexities are of the model's own width, 768: 4,096 tokens per candidate" in text
    assert "of a small proxy" not in text
    assert "instead of" not in text


def test_the_front_has_the_prices_of_the_ledger_and_its_layers(whole_page: Page, whole_folder: Path) -> None:
    text, run = whole_page.text, Run.read(whole_folder)
    front = text[text.index("Layer by layer") : text.index("Where the costs come from")]
    assert len(run.front) == 4
    for member in run.front:
        said = f"{member.arch_id} {format_seconds(member.latency_s)}, {format_bytes(member.sent_bytes)}"
        assert f"{said}; perplexity {perplexity_text(member)}" in front
    assert "is worse than a trigram model" in front
    assert "its price range crosses the budget" in front
    assert [tag for tag, _ in whole_page.tags].count("svg") == 2


def test_the_page_loads_and_runs_nothing_and_is_small(whole_page: Page, whole_folder: Path, tmp_path: Path) -> None:
    path, page = whole_folder / REPORT_FILE, whole_page
    assert path.read_bytes() == write_report(Run.read(whole_folder), tmp_path / "again.html").read_bytes()
    assert path.stat().st_size < MOST_BYTES
    assert page.policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert not [(tag, name) for tag, attributes in page.tags for name in attributes if name in LOADERS]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    links = [value for _, attributes in page.tags for name, value in attributes.items() if name == "xlink:href"]
    assert {(value or "")[:1] for value in links} == {"#"}
    assert not {tag for tag, _ in page.tags} & BRINGERS
    style = (ASSETS / "style.css").read_text()
    assert "url(" not in style
    assert "@import" not in style


def test_a_folder_is_no_file_to_write(whole_folder: Path, tmp_path: Path) -> None:
    for path, why in ((tmp_path, ", but is a folder"), (tmp_path / "nowhere" / "page.html", ": No such file or")):
        with pytest.raises(UserError, match=f"--output .* must be a file that we can write{why}"):
            report(str(whole_folder), path)


def test_what_comes_from_a_run_is_escaped(make_run) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
    candidate = record(0, "SM+LN+R", "candidate", 0, 2.0, left_unfolded=(evil,), notation=evil)
    failed = record(1, "SM+LN+R", "candidate", 0, None, status="failed", reason=evil)
    folder = make_run([candidate, failed], meta={"hardware": {evil: evil}}, budget_latency="9min")
    text = write_report(Run.read(folder)).read_text(encoding="utf-8")
    page = Page(text)
    assert "alert(1)" in page.text
    assert "<script>alert" not in text
    assert not {tag for tag, _ in page.tags} & BRINGERS


def test_what_is_to_be_distrusted_is_said(whole_page: Page) -> None:
    _, _, limits = whole_page.text.partition("Limits of these results")
    caveats, _, again = limits.partition("Reproduce this run")
    for words in (
        "width 96 instead of 768, 4,096 tokens per candidate",
        "Members of the front have 1 to 2 seeds",
        "5 of 12,345 members within the budget were tried (1.0e30 in the space); 1 diverged",
        "The pick, the same function for less: ",
        "with --projection last --rows needed; ",
        "over all coefficients consistent with the printed rows",
        "extrapolated: num_layers 6, 10 (data: 12 to 18), num_heads 6 (data: 12)",
        "2 parties, semi-honest, dishonest majority",
        "trigram 16.2",
    ):
        assert words in caveats
    assert "python -m nas.search --budget-latency 5min" in again
    assert "c0ffee" in again


def test_a_run_without_a_completed_trial_says_so_and_why(make_run) -> None:
    failed = record(0, "SM+LN+R", "candidate", 0, None, status="failed", reason="no memory left")
    started = record(1, "SM+LN+G", "candidate", 0, None, event="started", status="running")
    proposed = record(2, "SM+LN+G", "candidate", 0, None, event="proposed", status="proposed")  # is not unfinished
    page = page_of(make_run([failed, started, proposed]))
    assert "completion: 0 had only a low-fidelity evaluation, 0 diverged, 1 failed, 1 unfinished." in page.text
    assert "SM+LN+R: failed, no memory left" in page.text
    assert "Reproduce this run" in page.text
    assert "svg" not in {tag for tag, _ in page.tags}


def test_the_command_prices_what_the_run_prices(make_run) -> None:
    of_run = {"protocol": "cheetah", "network": "wan", "projection": "last", "new_tokens": 4, "weights": "server"}
    page = page_of(make_run([record(0, "SM_i12", "candidate", 0, 2.0)], **of_run)).text
    for flags in ("--protocol cheetah --network wan", "--projection last", "--new-tokens 4", "--weights server"):
        assert flags in page


def test_masks_that_are_kept_are_of_the_protocols_of_the_run(make_run) -> None:
    folder = make_run([record(0, "SM_i12", "candidate", 0, 2.0)], protocol="semi2k", weight_masks="kept")
    assert "--weight-masks kept" in page_of(folder).text
    run = Run.find(str(folder))

    def sent_bytes(config: StudyConfig) -> float:
        pricer = run_pricer(None, config, "semi2k")
        return price_architecture(run.base, pricer, run.workload, "folded").price.sent_bytes

    assert sent_bytes(run.config) < 0.9 * sent_bytes(replace(run.config, weight_masks=None))
    assert run.config.setting_of("aby3") is None
    with pytest.raises(UserError, match="`weight_masks` kept is of protocol semi2k, but got protocol aby3"):
        run_pricer(None, replace(run.config, protocol="aby3"), "aby3")


def test_a_run_with_nothing_within_the_budget_says_so(make_run) -> None:
    page = page_of(make_run([record(0, "SM+LN+R", "baseline", 0, 2.0)]))
    assert "No model yet None of the 1 models that were trained to the end has a place within 5.00 min" in page.text
    assert "The cheapest, SM+LN+R, costs 6.06 min" in page.text
    assert [tag for tag, _ in page.tags].count("svg") == 2


@pytest.mark.parametrize("name", ["published", "semi2k"])
def test_runs_priced_by_a_former_cost_model_have_a_page(name: str, tmp_path, capsys) -> None:
    folder = Path(shutil.copytree(EARLIER / name, tmp_path / name))
    report(str(folder), tmp_path / "page.html")
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert f"protocol {name}" in page.text
    assert "trigram" not in page.text
    assert "The ledger was priced by cost model" in page.text


BASE = base_architecture("gpt2-small")


def columns(name: str, cost_of="folded"):
    return layer_map(parse(name, BASE).architecture, cost_of)


def test_what_is_kept_folds_or_is_not_there():
    first, *_, last = columns("6xlHlRo-6xooooo")
    assert [(cell.letter, cell.kind, cell.status) for cell in first] == [
        ("l", "frozen-layernorm", "folds"),
        ("H", "softmax-half", "kept"),
        ("R", "relu", "kept"),
    ]
    assert [(cell.letter, cell.status) for cell in last] == [("·", "absent")] * 3
    assert first.norm.words == "frozen LayerNorm, folds away"


def test_two_norms_of_a_layer_share_a_cell_and_a_legend_has_each_once():
    assert [column.norm.letter for column in columns("6xLSoRo-6xLSLRo")][5:7] == ["L·", "L"]
    assert columns("12xlSLRo")[0].norm == ("lL", "layernorm", "frozen LayerNorm and LayerNorm", "kept")
    entries = legend([columns("6xLSoRo-6xooooo"), columns("12xLPLRo")])
    assert [(part, cell.letter) for part, cell in entries] == [
        ("norm", "L·"), ("norm", "L"), ("attention", "S"), ("attention", "P"), ("ffn", "R"),
    ]  # fmt: skip


def test_linear_ffns_and_norms_inside_sub_layers_fold_unless_prices_are_as_written():
    assert columns("SM+ScFuFFN")[3].ffn.status == "folds"
    assert columns("SM+ScFuFFN", "unfolded")[3].ffn.status == "kept"
    assert columns("12xLSLFs")[11].ffn.status == "kept"  # a live norm is on either side
    base = base_architecture("smollm2-135m", Dimensions(layers=3))
    placed = parse("1xMSMWo-1xMSMWofo-1xooMWo", replace(base, block="qwen3")).architecture
    words = "attention in 2 of 3 layers, SwiGLU FFN in 3, RMSNorm in 3, norms inside sub-layers in 1, final RMSNorm"
    assert kept_words(placed, "folded") == words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SM_i12", "attention in 12 of 12 layers, no FFN, no norm in any layer"),
        ("SM+LN+G", "attention in 12 of 12 layers, GELU FFN in 12, LayerNorm in 12, final LayerNorm"),
        (
            "4xoSoRo-8xoHooo-L",
            "attention in 12 of 12 layers (8 of them with half of the heads), ReLU FFN in 4, "
            "no norm in any layer, final LayerNorm",
        ),
    ],
)
def test_what_is_left_is_counted(name, words):
    assert kept_words(parse(name, BASE).architecture, "folded") == words
