"""Figures beside their bars."""

from experiments.bars import Figure


def test_a_figure_is_judged_by_its_bars_alone() -> None:
    figures = [Figure("a", 1.0, "{:.1f} s", least, most) for least, most in ((None, None), (1.0, 1.0), (1.1, None))]
    assert [figure.cells[1:] for figure in (*figures, Figure("b", 2.0, most=1.0))] == [
        ["1.0 s", "", ""],
        ["1.0 s", ">= 1.0 s <= 1.0 s", "PASS"],
        ["1.0 s", ">= 1.1 s", "FAIL"],
        ["2.00", "<= 1.00", "FAIL"],
    ]
