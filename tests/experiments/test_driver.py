"""The benchmark of the driver, small."""

from experiments import driver
from experiments.__main__ import settings_of
from experiments.driver import Bars


def test_a_made_up_run_is_resumed_proposed_from_and_plotted() -> None:
    figures = driver.measured(settings_of("driver"), Bars(trials=12, load_s=1e9, propose_s=0.0, plot_s=1e9))
    assert figures[0].name.startswith("12 trials, 72 records, ")
    assert [figure.verdict for figure in figures] == ["", "PASS", "", "FAIL", "PASS"]
