import pytest

from nas.report.draw import draw_panels, save_figure
from nas.report.panels import BarPanel, LinePanel, PanelFigure, Series

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
