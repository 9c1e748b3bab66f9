import math

import numpy as np
import pytest

from costmodel.protocols.published import published_rows
from nas.report.draw import draw_front, draw_panels, save_figure
from nas.report.front_figures import BarPanel, LinePanel, PanelFigure, Series, front_figure, label
from nas.run.folder import ParentResult
from nas.run.members import members
from search_spaces.bases import base_architecture

GPT2 = {"base": base_architecture("gpt2-small")}  # 12 layers


@pytest.fixture
def records(make_record):
    """A front of two, one dominated, one baseline over budget, one stopped, one diverged."""
    return [
        make_record(0, latency_s=120.0, val_loss=3.0, perplexity=math.exp(3.0), latency_s_range=(60.0, 180.0)),
        make_record(1, latency_s=240.0, val_loss=2.0, perplexity=math.exp(2.0), latency_s_range=None),
        make_record(2, latency_s=270.0, val_loss=2.5, perplexity=math.exp(2.5), latency_s_range=(269.9, 270.1)),
        make_record(3, latency_s=480.0, val_loss=1.0, perplexity=math.e, role="baseline", notation="SM+LN+G"),
        make_record(4, latency_s=60.0, val_loss=0.5, status="paused"),
        make_record(5, latency_s=30.0, val_loss=None, perplexity=None, status="diverged"),
    ]


def test_every_trial_is_in_its_group_with_its_range_and_the_published_rows_beside(make_run, records):
    data = front_figure(make_run(records, meta=GPT2), published_rows())
    assert data.budget_min == 5.0
    assert [mark.latency_min for mark in data.front] == [2.0, 4.0]
    assert [mark.perplexity for mark in data.front] == pytest.approx([math.exp(3.0), math.exp(2.0)])
    assert [mark.latency_min for mark in data.dominated] == [4.5]
    assert [mark[:2] for mark in data.baselines] == [("SM+LN+G", 8.0)]
    assert (data.paused_min, data.diverged_min) == ((1.0,), (0.5,))
    assert [mark.range_min for mark in data.front] == [(1.0, 3.0), None]
    assert [mark.range_min for mark in data.dominated] == [None]  # 0.2 s of 270 s
    assert {mark.name: mark.latency_min for mark in data.published}["SM+LN+G"] == pytest.approx(8.21)
    assert front_figure(make_run(records), published_rows()).published == ()


def test_the_parent_and_the_ngrams_are_drawn_with_names(make_run, records, ngrams):
    parent = ParentResult(name="builtin", notation="SM+LN+G", val_loss=1.5, latency_s=480.0)
    data = front_figure(make_run(records, meta=GPT2 | {"parent": parent}), published_rows())
    axes = draw_front(data).axes[0]
    (mark,) = [line for line in axes.lines if line.get_label() == "parent SM+LN+G, unmodified"]
    assert list(np.ravel(mark.get_xdata())) == [8.0]
    assert list(np.ravel(mark.get_ydata())) == [pytest.approx(math.exp(1.5))]
    front = draw_front(front_figure(make_run(records, meta={"ngrams": ngrams}), ()))
    without = draw_front(front_figure(make_run(records), ()))
    for figure, times in ((front, 1), (without, 0)):
        texts = [text.get_text() for axes in figure.axes for text in axes.texts]
        assert (texts.count("trigram 18"), texts.count("5-gram 14")) == (times, times)


def test_the_legend_is_below_the_axes(make_run, records, ngrams):
    """It could cover the points that are dominated, whose place is that of a legend."""
    of_two = {"protocol": "published,sigma", "budget_latency": "published=5min,sigma=2s"}
    run = make_run(records, meta=GPT2 | {"ngrams": ngrams}, **of_two)
    figure = draw_front(front_figure(run, published_rows()))
    figure.canvas.draw()
    (legend,) = figure.legends
    assert all(axes.get_legend() is None for axes in figure.axes)
    top = legend.get_window_extent().y1
    assert all(top < axes.get_tightbbox().y0 for axes in figure.axes)
    assert {"dominated", "budget 5.00 min, and 2 s under sigma"} <= {text.get_text() for text in legend.get_texts()}


def test_means_have_a_spread_and_single_seeds_that_of_a_trial(make_run, over_seeds):
    records = [*over_seeds(0, 3.0, 3.2), *over_seeds(1, 2.0, latency_s=200.0), *over_seeds(2, 1.0, None)]
    data = front_figure(make_run(records, meta=GPT2), published_rows())
    assert [mark.perplexity for mark in data.front] == pytest.approx([math.exp(3.1), math.exp(2.0)])
    # two seeds 0.2 apart: a deviation of 0.2 / sqrt 2, an error of the mean of 0.1
    assert data.front[0].spread == pytest.approx((math.exp(2.9), math.exp(3.3)))
    assert data.front[1].spread == pytest.approx(tuple(math.exp(2 + apart * 0.2 * math.sqrt(2)) for apart in (-1, 1)))
    assert (data.dominated, len(data.diverged_min)) == ((), 1)  # it has no mean


def test_trigram_and_5_gram_are_always_drawn_lower_orders_only_among_the_trials(make_run, make_record, ngrams):
    def drawn(*perplexities: float) -> dict[str, float]:
        made = [make_record(i, perplexity=value, val_loss=math.log(value)) for i, value in enumerate(perplexities)]
        data = front_figure(make_run(made, meta={"ngrams": ngrams}), ())
        assert data.ngrams_title == "n-gram models of 524,288 tokens"
        return {name: round(perplexity, 6) for name, perplexity in data.ngrams.items()}

    assert drawn(30.0, 35.0) == {"trigram": 18, "5-gram": 14}
    assert drawn(30.0, 45.0) == {"bigram": 40, "trigram": 18, "5-gram": 14}
    assert drawn(12.0, 210.0) == {"unigram": 200, "bigram": 40, "trigram": 18, "5-gram": 14}


def test_long_placements_are_labelled_by_id(make_record):
    named, unnamed = members([make_record(6, notation="SM+LN+G"), make_record(7, notation="1xLSLGo-" * 4)])
    assert (label(named), label(unnamed)) == ("SM+LN+G", "a7")


LINES = LinePanel("lines", "step", "nats", (Series("a", (1.0, 2.0), (3.0, 4.0)), Series("b", (1.0,), (2.0,))))
BARS = BarPanel("bars", "%", ("x", "y"), (("low", (1.0, 2.0)), ("high", (3.0, 4.0))))


@pytest.mark.parametrize("panels", [(LINES,), (LINES, BARS)])
def test_figures_are_written_with_a_panel_each(panels, tmp_path):
    figure = draw_panels(PanelFigure("title", panels, columns=3))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title for title in titles if title] == [panel.title for panel in panels]
    assert all(path.stat().st_size > 1000 for path in save_figure(tmp_path / "figure", figure))


def test_stacked_bars_end_at_their_sums():
    (axes,) = draw_panels(PanelFigure("title", (BARS,))).axes
    ends = [bar.get_window_extent().transformed(axes.transData.inverted()).x1 for bar in axes.patches]
    assert ends == pytest.approx([1, 2, 4, 6])
