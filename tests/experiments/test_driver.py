"""The benchmark of the driver, small."""

from dataclasses import replace

import pytest
from rich.console import Console

from costmodel.config.schema import decode
from costmodel.config.strict_yaml import load_mapping
from experiments import driver
from experiments.__main__ import definitions
from experiments.driver import Bars, Settings, beside

DATA = {key: value for key, value in load_mapping(definitions()["driver"]).items() if key != "kind"}


def test_a_made_up_run_is_resumed_proposed_from_and_plotted() -> None:
    settings = decode(Settings, DATA, "experiment driver")
    small = replace(settings, bars=(Bars(trials=12, load_s=1e9, propose_s=0.0, plot_s=1e9),))
    row = driver.measured(small, small.bars[0])
    assert row[:2] == ["12", "72"]
    assert [cell.partition("(")[2] for cell in row[4:]] == ["within 1e+09 s)", "", "OVER 0 s)", "within 1e+09 s)"]


def test_only_whole_generations_are_made_up() -> None:
    data = DATA | {"bars": [{"trials": 13, "load_s": 1.0, "propose_s": 1.0}]}
    with pytest.raises(ValueError, match="`trials` must be a multiple of 4, but got 13"):
        driver.run("driver", data, Console(quiet=True))


def test_what_was_not_asked_is_not_judged() -> None:
    assert [beside(None, 1.0), beside(1.0, 1.0), beside(1.1, 1.0)] == ["-", "1.00 s (within 1 s)", "1.10 s (OVER 1 s)"]
