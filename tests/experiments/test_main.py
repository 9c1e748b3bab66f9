"""Experiments by name, their flags, bars and ranks."""

import math
import re

import pytest

from costmodel.errors import UserError
from experiments.__main__ import KINDS, definitions, kind_of, list_experiments, run, settings_of
from experiments.bars import Figure
from experiments.smollm2.tables import spearman


def test_every_experiment_has_a_known_kind():
    assert {kind_of(name) for name in definitions()} <= set(KINDS)


@pytest.mark.parametrize(("name", "end"), [("moon", "'moon'."), ("smollm", "'smollm'; did you mean smollm2?")])
def test_an_unknown_experiment_is_refused_by_name_with_the_nearest(name, end):
    with pytest.raises(ValueError, match=f"experiment must be one of .*smollm2.* but got {re.escape(end)}$"):
        run(name)


def test_the_list_has_whole_sentences(capsys):
    list_experiments()
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(":")[0] for line in lines} == set(definitions())
    assert all(line.endswith((".", "?")) for line in lines)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("smollm2-healing", {"placements": {}}, "`placements` must not be empty"),
        ("gpu", {"bars": 1}, "unknown key 'bars'"),
    ],
)
def test_bad_settings_are_refused(name, change, message):
    with pytest.raises(UserError, match=message):
        settings_of(name, **change)


@pytest.mark.parametrize(
    ("name", "flag", "message"),
    [
        ("table", {"device": "cpu"}, "table does not take --device; flags that it takes: --scale"),
        ("families", {"parts": "step"}, "families does not take --parts; flags that it takes: none"),
    ],
)
def test_a_flag_of_other_experiments_is_refused(name, flag, message):
    with pytest.raises(UserError, match=message):
        run(name, **flag)


def test_a_figure_is_judged_by_its_bars_alone():
    figures = [Figure("a", 1.0, "{:.1f} s", least, most) for least, most in ((None, None), (1.0, 1.0), (1.1, None))]
    assert [figure.cells[1:] for figure in (*figures, Figure("b", 2.0, most=1.0))] == [
        ["1.0 s", "", ""],
        ["1.0 s", ">= 1.0 s <= 1.0 s", "PASS"],
        ["1.0 s", ">= 1.1 s", "FAIL"],
        ["2.00", "<= 1.00", "FAIL"],
    ]


PRINTED = {"a": 1.0, "b": 2.0, "c": 3.0, "d": math.inf}


@pytest.mark.parametrize(
    ("first", "second", "correlation"),
    [
        ({"a": 1.0, "b": 2.0, "c": 3.0}, {"c": 5.0, "a": 4.0, "b": 6.0}, 0.5),  # 1 - 6 * (0 + 1 + 1) / (3 * 8)
        (PRINTED, {"a": 1.0, "b": 2.0, "c": 3.0, "d": math.inf}, 1.0),  # a divergence ranks last
        (PRINTED, {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}, 1.0),
        ({"a": 1.0, "b": 2.0}, {"a": 5.0, "b": 5.0}, math.nan),
    ],
)
def test_spearman(first, second, correlation):
    assert spearman(first, second) == pytest.approx(correlation, nan_ok=True)
