import pytest

from nas.report.draw import draw_panels, save_figure
from nas.report.panels import BarPanel, HeatPanel, LinePanel, PanelFigure, Series

LINES = LinePanel("lines", "step", "nats", (Series("a", (1.0, 2.0), (3.0, 4.0)), Series("b", (1.0,), (2.0,), ("p",))))
BARS = BarPanel("bars", "%", ("x", "y"), (("low", (1.0, 2.0)), ("high", (3.0, 4.0))), stacked=True)
HEAT = HeatPanel("heat", "head", "layer", ((0.1, None), (0.2, 0.3)), (0.0, 1.0))


@pytest.mark.parametrize("panels", [(LINES,), (LINES, BARS, HEAT, HEAT), (BARS._replace(stacked=False),)])
def test_figures_are_written_with_a_panel_each(panels, tmp_path):
    figure = draw_panels(PanelFigure("title", panels, columns=3, colours="nats"))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title for title in titles if title] == [panel.title for panel in panels]
    assert all(path.stat().st_size > 1000 for path in save_figure(tmp_path / "figure", figure))


def test_stacked_bars_end_at_their_sums():
    (axes,) = draw_panels(PanelFigure("title", (BARS,))).axes
    ends = [bar.get_window_extent().transformed(axes.transData.inverted()).x1 for bar in axes.patches]
    assert ends == pytest.approx([1, 2, 4, 6])


def test_what_is_no_number_has_no_colour():
    axes = draw_panels(PanelFigure("title", (HEAT,))).axes[0]
    assert [list(row) for row in axes.images[0].get_array().mask] == [[False, True], [False, False]]
