import math

import pytest
from rich.console import Console

from experiments.ranking import (
    correlation_table,
    decided_pairs,
    means,
    pairs_in_order,
    perplexity_table,
    spearman,
    verdicts,
)

PRINTED = {"a": 1.0, "b": 2.0, "c": 3.0, "d": math.inf}
VARIANTS = {
    "short": {0: {"a": 30.0, "b": 20.0, "c": 10.0, "d": 40.0}, 1: {"a": 32.0, "b": 20.0, "c": 10.0, "d": 40.0}},
    "long": {0: {"a": 3.0, "b": 5.0, "c": 4.0, "d": math.inf}},
}


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


def test_ties_and_divergences():
    assert pairs_in_order({"a": 1.0, "b": 1.0, "c": 2.0}, {"a": 5.0, "b": 6.0, "c": 5.5}) == (1, 2)
    assert means({0: {"a": 1.0, "b": 2.0}, 1: {"a": 3.0, "b": math.inf}}) == {"a": 2.0, "b": math.inf}


def test_tables_and_verdicts_say_what_came_out():
    console = Console(record=True, width=200)
    console.print(perplexity_table(PRINTED, VARIANTS))
    console.print(correlation_table(PRINTED, VARIANTS, dict.fromkeys(VARIANTS, 60.0)))
    for line in verdicts(PRINTED, VARIANTS):
        console.print(line)
    text = console.export_text()
    assert "31 (1.4), 3" in text  # row a, short: mean and deviation of 30 and 32, third of four
    assert "3 of 6" in text  # short has the three pairs with d
    assert "5 of 6" in text  # long swaps b and c
    assert "papers: a 1 < b 2 < c 3 < d diverged" in text
    assert "short: d diverged with 0 of 2 seeds" in text
    assert "long: d diverged with 1 of 1 seed" in text


def test_only_pairs_beyond_two_pooled_errors_are_decided():
    e = math.e
    # losses: a 1.0 and 1.2, b 1.1 and 1.3, c 3 and 3.2; pooled variance 0.02, so a difference of 0.28 decides
    by_seed = {0: {"a": e**1.0, "b": e**1.1, "c": e**3}, 1: {"a": e**1.2, "b": e**1.3, "c": e**3.2}}
    assert decided_pairs(by_seed, {"a": 1.0, "b": 2.0, "c": 3.0}) == (2, 2)
    assert decided_pairs(by_seed, {"a": 1.0, "b": 9.0, "c": 3.0}) == (1, 2)
    assert decided_pairs({0: by_seed[0]}, {"a": 1.0, "b": 2.0, "c": 3.0}) == (0, 0)


def test_a_row_that_always_diverged_is_behind_and_one_that_sometimes_did_is_left_out():
    inf = math.inf
    by_seed = {0: {"a": 2.0, "b": inf, "c": inf, "d": inf}, 1: {"a": 2.1, "b": inf, "c": 9.0, "d": inf}}
    assert decided_pairs(by_seed, {"a": 1.0, "b": inf, "c": 2.0, "d": inf}) == (2, 2)
