"""Means over seeds, and what they show, against numpy by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from costmodel.cost import Budget
from nas.run.front import front
from nas.run.members import better, in_noise, members, pooled_deviation, standard_error, verdict

BUDGET = Budget(latency_s=300.0)


def test_a_member_is_all_seeds_of_a_candidate(over_seeds):
    records = [*over_seeds(0, 3.0, 3.1, 3.4), *over_seeds(1, 2.0), *over_seeds(2, None)]
    repeated, single = members(records)
    assert [trial.seed for trial in repeated.trials] == [0, 1, 2]
    assert repeated.mean_loss == pytest.approx(np.mean([3.0, 3.1, 3.4]))
    assert repeated.perplexity == pytest.approx(math.exp(9.5 / 3))
    assert repeated.standard_error == pytest.approx(np.std([3.0, 3.1, 3.4], ddof=1) / math.sqrt(3))
    assert single.standard_error == pytest.approx(np.std([3.0, 3.1, 3.4], ddof=1))  # that of the others
    assert single.perplexity_bounds is None
    low, high = repeated.perplexity_bounds or (0.0, 0.0)
    assert math.log(high / low) == pytest.approx(4 * repeated.standard_error)


def test_deviations_are_pooled_by_their_degrees_of_freedom():
    groups = [[1.0, 1.2], [2.0, 2.1, 2.5], [7.0]]
    squares = sum(np.var(group, ddof=0) * len(group) for group in groups)
    assert pooled_deviation(groups) == pytest.approx(math.sqrt(squares / (1 + 2)))
    assert pooled_deviation([[1.0], [2.0]]) is None


def test_an_error_is_never_below_the_pooled_nor_below_its_own():
    assert standard_error([1.0, 1.0], 0.3) == pytest.approx(0.3 / math.sqrt(2))
    assert standard_error([1.0, 2.0], 0.3) == pytest.approx(np.std([1.0, 2.0], ddof=1) / math.sqrt(2))
    assert standard_error([1.0], 0.3) == 0.3
    assert standard_error([1.0, 2.0], None) is None


def test_better_takes_two_standard_errors_of_the_difference(over_seeds):
    """Two seeds 0.02 apart each: s = 0.02 / sqrt 2, an error of 0.01, and 2 sqrt(2) 0.01 = 0.0283 between means."""
    one = over_seeds(0, 3.00, 3.02)
    beyond, within = members([*one, *over_seeds(1, 2.97, 2.99)])[::-1], members([*one, *over_seeds(1, 2.98, 3.0)])[::-1]
    assert better(*beyond)
    assert (verdict(*beyond), verdict(*beyond[::-1])) == ("better", "worse")
    assert verdict(*within) == "no difference shown"


def test_without_a_second_seed_nothing_is_better(over_seeds):
    one, other = members([*over_seeds(0, 1.0), *over_seeds(1, 9.0)])
    assert not better(one, other)
    assert in_noise([one, other]) == (False, False)
    assert in_noise([]) == ()


def test_the_front_is_of_means_and_the_lucky_leave_it(over_seeds):
    lucky, steady = over_seeds(0, 2.0, 4.0, latency_s=200.0), over_seeds(1, 2.5, 2.5, latency_s=100.0)
    assert [member.arch_id for member in front([lucky[0], steady[0]], BUDGET)] == ["a1", "a0"]
    assert [member.arch_id for member in front([*lucky, *steady], BUDGET)] == ["a1"]


def test_a_member_of_which_a_seed_diverged_has_no_place(over_seeds):
    records = [*over_seeds(0, 2.0, None, 2.0), *over_seeds(1, 3.0)]
    assert [member.arch_id for member in front(records, BUDGET)] == ["a1"]
    assert [(member.num_seeds, member.num_diverged) for member in members(records)] == [(2, 1), (1, 0)]


def test_a_member_costs_what_its_most_expensive_seed_was_verified_at(over_seeds):
    cheap, dear = over_seeds(0, 2.0, 2.0)
    dear = replace(dear, latency_s=150.0, sent_bytes=2e9, deployed="2xoSoRo")
    (member,) = front([cheap, dear], BUDGET)
    assert (member.latency_s, member.sent_bytes, member.deployed) == (150.0, 2e9, "2xoSoRo")
    assert front([cheap, dear], Budget(latency_s=149.0)) == ()
    assert front([cheap, replace(dear, fold_holds=False)], BUDGET) == ()


def test_the_pick_is_by_means_and_has_the_weights_of_the_first_seed(make_run, over_seeds):
    lucky, steady = over_seeds(0, 2.0, 4.0, latency_s=200.0), over_seeds(1, 2.5, 2.5, latency_s=100.0)
    run = make_run([*lucky, *steady])
    assert (run.pick("best"), run.pick("a0")) == (steady[0], lucky[0])


def test_a_summary_counts_replicates_apart(make_run, over_seeds):
    records = [*over_seeds(0, 2.0, 2.1), *over_seeds(1, 1.9, latency_s=200.0), *over_seeds(2, None)]
    summary = make_run(records, finalist_seeds=2).summary
    assert (summary.completed, summary.diverged, summary.ended) == (2, 1, 3)
    assert (summary.replicates, summary.running, summary.seeds_left) == (1, 0, 1 + 2)
