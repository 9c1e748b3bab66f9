import math

import numpy as np
import pytest

from experiments.__main__ import settings_of
from experiments.across_widths import (
    Settings,
    committed,
    figures,
    linear_fit,
    loss_table,
    pairs_apart,
    prices,
    share_lost,
    worth_table,
)
from search_spaces.bases import base_architecture
from search_spaces.deployed import deployed_id
from search_spaces.notation import parse

LATENCY_S = {"cheap": 100.0, "middle": 150.0, "dear": 200.0, "beaten": 210.0}
NARROW = {"cheap": 2.5, "middle": 2.2, "dear": 2.0, "beaten": 2.1}
REFERENCE = (300.0, 3.0)


@pytest.fixture(scope="module")
def settings() -> Settings:
    made: Settings = settings_of("across-widths")
    return made


def test_rows_are_within_the_budget_and_deploy_differently(settings: Settings):
    latency_s = prices(settings)
    assert max(latency_s[row] for row in settings.rows) <= 300
    base = base_architecture(settings.base)
    assert len({deployed_id(parse(row, base).architecture) for row in settings.rows}) == len(settings.rows) == 24


def test_what_is_committed_is_whole_and_holds_all_bars_but_what_is_lost_at_the_widest(settings: Settings):
    losses = {
        width: {row: math.log(ended.ranked) for row, ended in by_row.items()}
        for width, by_row in committed(settings).items()
    }
    assert {len(by_row) for by_row in losses.values()} == {28}
    shown = figures(settings, prices(settings), losses)
    missed = [figure for figure in shown if figure.verdict == "FAIL"]
    assert [(figure.name, round(figure.value, 3)) for figure in missed] == [("96 to 192: hypervolume lost", 0.03)]
    assert list(worth_table(settings, losses).columns[3].cells) == ["0.50 ± 0.21", "1.02 ± 0.30", "1.51 ± 0.40"]


def test_a_linear_fit_is_exact_where_losses_are_and_its_errors_are_of_what_it_leaves():
    values = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    losses = 2 + values @ [0.5, 0.25]
    assert np.allclose(linear_fit(values, losses), [(0.5, 0), (0.25, 0)])
    # what an interaction of 0.4 leaves: +-0.1 at four rows, one degree of freedom
    (worth, error), _ = linear_fit(values, losses + 0.4 * values.prod(axis=1))
    assert [worth, error] == pytest.approx([0.7, 0.2])


def test_what_both_widths_order_alike_loses_nothing():
    wide = {row: loss / 2 for row, loss in NARROW.items()}
    assert pairs_apart(NARROW, wide) == (6, 6)
    assert share_lost(LATENCY_S, NARROW, wide, REFERENCE) == pytest.approx(0, abs=1e-12)


def test_a_member_that_is_missed_costs_its_area():
    wide = NARROW | {"beaten": 1.9}  # dominated at the narrow width, best at the wide one
    whole = 200 * 0.5 + 150 * 0.3 + 100 * 0.2 + 90 * 0.1
    assert share_lost(LATENCY_S, NARROW, wide, REFERENCE) == pytest.approx(9 / whole)
    assert pairs_apart(NARROW, wide) == (5, 6)


def test_pairs_within_noise_do_not_count_and_a_divergence_is_behind_all():
    wide = NARROW | {"beaten": NARROW["dear"] + 0.01, "middle": math.inf}
    agreeing, num = pairs_apart(NARROW, wide)
    assert (agreeing, num) == (4, 5)  # without (dear, beaten); `cheap` and `middle` are swapped
    assert math.isfinite(share_lost(LATENCY_S, NARROW, wide, REFERENCE))


def test_the_table_and_its_bars_are_of_every_width(settings: Settings):
    rows = (*settings.rows, *settings.control)
    losses = {width: {row: 2.0 + place / 100 for place, row in enumerate(rows)} for width in settings.widths}
    assert loss_table(prices(settings), losses).row_count == len(rows)
    shown = list(figures(settings, prices(settings), losses))
    assert [figure.verdict for figure in shown if figure.verdict] == ["PASS"] * 4  # of two doublings, two each
    assert sum("papers" in figure.name for figure in shown) == 2
