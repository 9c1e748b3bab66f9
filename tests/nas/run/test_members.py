"""Means over seeds, and what they show, against numpy by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

from costmodel.cost import Budget
from nas.run.front import front
from nas.run.intervals import differences, document_error, joined, mean_documents, pooled_deviation, seed_error
from nas.run.members import difference_error, in_noise, members, verdict

BUDGET = Budget(latency_s=300.0)


def test_a_member_is_all_seeds_of_a_candidate(over_seeds):
    records = [*over_seeds(0, 3.0, 3.1, 3.4), *over_seeds(1, 2.0), *over_seeds(2, None)]
    repeated, single = members(records)
    assert [trial.seed for trial in repeated.trials] == [0, 1, 2]
    assert repeated.mean_loss == pytest.approx(np.mean([3.0, 3.1, 3.4]))
    assert repeated.perplexity == pytest.approx(math.exp(9.5 / 3))
    assert repeated.standard_error == pytest.approx(np.std([3.0, 3.1, 3.4], ddof=1) / math.sqrt(3))
    assert single.standard_error == pytest.approx(np.std([3.0, 3.1, 3.4], ddof=1))  # that of the others
    low, high = repeated.perplexity_bounds or (0.0, 0.0)
    assert math.log(high / low) == pytest.approx(4 * repeated.standard_error)


def test_deviations_are_pooled_by_their_degrees_of_freedom():
    groups = [[1.0, 1.2], [2.0, 2.1, 2.5], [7.0]]
    squares = sum(np.var(group, ddof=0) * len(group) for group in groups)
    assert pooled_deviation(groups) == pytest.approx(math.sqrt(squares / (1 + 2)))
    assert pooled_deviation([[1.0], [2.0]]) is None


def test_an_error_over_seeds_is_never_below_the_pooled_nor_below_its_own():
    assert seed_error([1.0, 1.0], 0.3) == pytest.approx(0.3 / math.sqrt(2))
    assert seed_error([1.0, 2.0], 0.3) == pytest.approx(np.std([1.0, 2.0], ddof=1) / math.sqrt(2))
    assert seed_error([1.0], 0.3) == 0.3
    assert seed_error([1.0, 2.0], None) is None


EVEN = ((0.25, 2.0), (0.25, 2.4), (0.25, 2.6), (0.25, 3.0))
UNEVEN = ((0.5, 2.0), (0.3, 2.5), (0.2, 3.0), (0.0, 0.0))  # the last has no target


def test_an_error_over_documents_is_that_of_a_mean_where_all_count_alike():
    assert document_error(EVEN) == pytest.approx(np.std([2.0, 2.4, 2.6, 3.0], ddof=1) / math.sqrt(4))
    # the mean is 1 + 0.75 + 0.6 = 2.35: 3 / 2 ((0.5 * 0.35)^2 + (0.3 * 0.15)^2 + (0.2 * 0.65)^2)
    assert document_error(UNEVEN) == pytest.approx(math.sqrt(1.5 * (0.175**2 + 0.045**2 + 0.13**2)))
    assert document_error(((1.0, 2.0), (0.0, 0.0))) is document_error(()) is None


def test_differences_are_by_document_and_only_over_the_same():
    harder = tuple((share, 3 * loss) for share, loss in EVEN)
    assert differences(EVEN, harder) == pytest.approx(np.array([(0.25, 2 * loss) for _, loss in EVEN]))
    assert differences(EVEN, UNEVEN) == differences(EVEN, ()) == differences((), ()) == ()
    assert mean_documents([EVEN, harder]) == pytest.approx(np.array([(0.25, 2 * loss) for _, loss in EVEN]))
    assert joined(None, 3.0, 4.0) == 5
    assert joined(None, None) is None


def test_documents_test_what_one_seed_does_not(over_seeds):
    """0.1 nats apart in each document but for 0.01: paired the error is 0.01 / sqrt 3, alone 0.2."""
    up_and_down = list(zip(EVEN, (1, -1, 1, -1), strict=True))
    worse = tuple((share, loss + 0.1 + 0.01 * off) for (share, loss), off in up_and_down)
    near = tuple((share, loss + 0.001 + 0.2 * off) for (share, loss), off in up_and_down)
    losses = ((2.5, EVEN), (2.6, worse), (2.501, near))
    records = [over_seeds(index, loss, documents=documents) for index, (loss, documents) in enumerate(losses)]
    member, other, third = members([record for of_one in records for record in of_one])
    assert member.standard_error == member.document_error == pytest.approx(document_error(EVEN))
    assert difference_error(member, other) == pytest.approx(0.01 / math.sqrt(3))
    assert (verdict(member, other), verdict(other, member), verdict(member, third)) == (
        "better",
        "worse",
        "no difference shown",
    )
    assert in_noise([other, member, third]) == (False, False, True)


def test_an_error_is_over_seeds_and_documents(over_seeds):
    member, other = members([*over_seeds(0, 2.5, 2.52, documents=EVEN), *over_seeds(1, 2.6, documents=EVEN)])
    assert member.seed_error == pytest.approx(0.01)
    assert other.seed_error == pytest.approx(0.01 * math.sqrt(2))  # the pooled one of the run
    assert member.standard_error == pytest.approx(math.hypot(0.01, document_error(EVEN) or 0))
    assert difference_error(member, other) == pytest.approx(0.01 * math.sqrt(3))  # alike in every document


def test_better_takes_two_standard_errors_of_the_difference(over_seeds):
    """Two seeds 0.02 apart each: s = 0.02 / sqrt 2, an error of 0.01, and 2 sqrt(2) 0.01 = 0.0283 between means."""
    records = over_seeds(0, 3.00, 3.02)
    beyond, within = (
        members([*records, *over_seeds(1, 2.97, 2.99)])[::-1],
        members([*records, *over_seeds(1, 2.98, 3.0)])[::-1],
    )
    assert (verdict(*beyond), verdict(*beyond[::-1])) == ("better", "worse")
    assert verdict(*within) == "no difference shown"


def test_without_a_second_seed_and_documents_nothing_is_better(over_seeds):
    member, other = members([*over_seeds(0, 1.0), *over_seeds(1, 9.0)])
    assert verdict(member, other) == "not tested"
    assert in_noise([member, other]) == (False, False)
    assert in_noise([]) == ()


def test_front_and_pick_are_of_means_and_the_lucky_leave_them(make_run, over_seeds):
    lucky, steady = over_seeds(0, 2.0, 4.0, latency_s=200.0), over_seeds(1, 2.5, 2.5, latency_s=100.0)
    assert [member.arch_id for member in front([lucky[0], steady[0]], BUDGET)] == ["a1", "a0"]
    assert [member.arch_id for member in front([*lucky, *steady], BUDGET)] == ["a1"]
    run = make_run([*lucky, *steady])
    assert (run.pick("best"), run.pick("a0")) == (steady[0], lucky[0])  # with the weights of the first seed


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


def test_a_summary_counts_replicates_apart(make_run, over_seeds):
    records = [*over_seeds(0, 2.0, 2.1), *over_seeds(1, 1.9, latency_s=200.0), *over_seeds(2, None)]
    summary = make_run(records, finalist_seeds=2).summary
    assert (summary.completed, summary.diverged, summary.ended) == (2, 1, 3)
    assert (summary.replicates, summary.running, summary.seeds_left) == (1, 0, 1 + 2)
