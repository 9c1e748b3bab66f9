import csv
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.cost import Budget
from nas.run.intervals import (
    ERRORS_APART,
    Documents,
    differences,
    document_error,
    joined,
    mean_documents,
    pooled_deviation,
    seed_error,
)
from nas.run.members import difference_error, front, in_noise, members, verdict
from nas.run.pareto import dominates, hypervolume, knee, nondominated, ranks

BUDGET = Budget(latency_s=300.0)


def test_a_member_is_all_seeds_of_a_candidate_which_a_summary_counts_apart(over_seeds, make_run):
    records = [*over_seeds(0, 3.0, 3.1, 3.4), *over_seeds(1, 2.0), *over_seeds(2, None)]
    repeated, single = members(records)
    assert [trial.seed for trial in repeated.trials] == [0, 1, 2]
    assert repeated.val_loss == pytest.approx(np.mean([3.0, 3.1, 3.4]))
    assert repeated.perplexity == pytest.approx(math.exp(9.5 / 3))
    assert repeated.standard_error == pytest.approx(np.std([3.0, 3.1, 3.4], ddof=1) / math.sqrt(3))
    assert single.standard_error == pytest.approx(np.std([3.0, 3.1, 3.4], ddof=1))  # that of the others
    low, high = repeated.perplexity_bounds or (0.0, 0.0)
    assert math.log(high / low) == pytest.approx(4 * repeated.standard_error)
    apart = ((0.05, 1e4), (0.95, 3.0))
    (far,) = members([replace(single.first, val_loss=502.85, documents=apart, second_documents=((1.0, 1e4),))])
    assert (far.perplexity_bounds or (0.0, 0.0))[1] == far.second_perplexity == math.exp(700)
    records = [*over_seeds(0, 2.0, 2.1), *over_seeds(1, 1.9, latency_s=200.0), *over_seeds(2, None)]
    summary = make_run(records, finalist_seeds=2).summary
    assert (summary.completed, summary.diverged, summary.ended) == (2, 1, 3)
    assert (summary.replicates, summary.running, summary.seeds_left) == (1, 0, 1 + 2)


def test_deviations_are_pooled_and_an_error_over_seeds_is_below_neither():
    groups = [[1.0, 1.2], [2.0, 2.1, 2.5], [7.0]]
    squares = sum(np.var(group, ddof=0) * len(group) for group in groups)
    assert pooled_deviation(groups) == pytest.approx(math.sqrt(squares / (1 + 2)))
    assert pooled_deviation([[1.0], [2.0]]) is None
    assert seed_error([1.0, 1.0], 0.3) == pytest.approx(0.3 / math.sqrt(2))
    assert seed_error([1.0, 2.0], 0.3) == pytest.approx(np.std([1.0, 2.0], ddof=1) / math.sqrt(2))
    assert seed_error([1.0], 0.3) == 0.3
    assert seed_error([1.0, 2.0], None) is None


EVEN = ((0.25, 2.0), (0.25, 2.4), (0.25, 2.6), (0.25, 3.0))
UNEVEN = ((0.5, 2.0), (0.3, 2.5), (0.2, 3.0), (0.0, 0.0))  # the last has no target


def test_errors_and_differences_by_document():
    assert document_error(EVEN) == pytest.approx(np.std([2.0, 2.4, 2.6, 3.0], ddof=1) / math.sqrt(4))
    # the mean is 1 + 0.75 + 0.6 = 2.35: 3 / 2 ((0.5 * 0.35)^2 + (0.3 * 0.15)^2 + (0.2 * 0.65)^2)
    assert document_error(UNEVEN) == pytest.approx(math.sqrt(1.5 * (0.175**2 + 0.045**2 + 0.13**2)))
    assert document_error(((1.0, 2.0), (0.0, 0.0))) is document_error(()) is None
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
    verdicts = verdict(member, other), verdict(other, member), verdict(member, third)
    assert verdicts == ("better", "worse", "no difference shown")
    assert in_noise([other, member, third]) == (False, False, True)


def test_an_error_is_over_seeds_and_documents_and_without_either_nothing_is_better(over_seeds):
    member, other = members([*over_seeds(0, 2.5, 2.52, documents=EVEN), *over_seeds(1, 2.6, documents=EVEN)])
    assert member.seed_error == pytest.approx(0.01)
    assert other.seed_error == pytest.approx(0.01 * math.sqrt(2))  # the pooled one of the run
    assert member.standard_error == pytest.approx(math.hypot(0.01, document_error(EVEN) or 0))
    assert difference_error(member, other) == pytest.approx(0.01 * math.sqrt(3))  # alike in every document
    member, other = members([*over_seeds(0, 1.0), *over_seeds(1, 9.0)])
    assert verdict(member, other) == "not tested"
    assert (in_noise([member, other]), in_noise([])) == ((False, False), ())


def test_better_takes_two_standard_errors_of_the_difference(over_seeds):
    """Two seeds 0.02 apart each: s = 0.02 / sqrt 2, an error of 0.01, and 2 sqrt(2) 0.01 = 0.0283 between means."""
    records = over_seeds(0, 3.00, 3.02)
    others = (over_seeds(1, 2.97, 2.99), over_seeds(1, 2.98, 3.0))
    beyond, within = (members([*records, *other])[::-1] for other in others)
    assert (verdict(*beyond), verdict(*beyond[::-1])) == ("better", "worse")
    assert verdict(*within) == "no difference shown"


def test_only_completed_candidates_reach_the_front_by_their_means(make_run, over_seeds, make_record):
    lucky, steady = over_seeds(0, 2.0, 4.0, latency_s=200.0), over_seeds(1, 2.5, 2.5, latency_s=100.0)
    assert [member.arch_id for member in front([lucky[0], steady[0]], BUDGET)] == ["a1", "a0"]
    assert [member.arch_id for member in front([*lucky, *steady], BUDGET)] == ["a1"]
    run = make_run([*lucky, *steady])
    assert (run.pick("best"), run.pick("a0")) == (steady[0], lucky[0])  # with the weights of the first seed
    inside, outside = make_record(0, latency_s=290.0), make_record(1, latency_s=310.0, val_loss=0.1, perplexity=1.1)
    baseline = make_record(2, latency_s=50.0, role="baseline", val_loss=0.1)
    stopped = make_record(3, latency_s=50.0, status="paused", val_loss=0.1)
    assert [member.first for member in front([inside, outside, baseline, stopped], BUDGET)] == [inside]


def test_a_member_costs_what_its_dearest_seed_does_and_has_no_place_if_one_diverged(over_seeds):
    records = [*over_seeds(0, 2.0, None, 2.0), *over_seeds(1, 3.0)]
    assert [member.arch_id for member in front(records, BUDGET)] == ["a1"]
    assert [(member.num_seeds, member.num_diverged) for member in members(records)] == [(2, 1), (1, 0)]
    cheap, dear = over_seeds(0, 2.0, 2.0, parent_divergence=0.1)
    dear = replace(dear, latency_s=150.0, sent_bytes=2e9, deployed="2xoSoRo", parent_divergence=0.2)
    (member,) = front([cheap, dear], BUDGET)
    assert (member.latency_s, member.sent_bytes, member.deployed) == (150.0, 2e9, "2xoSoRo")
    assert member.parent_divergence == 0.1  # of the seed whose weights are used
    assert front([cheap, dear], Budget(latency_s=149.0)) == ()
    assert front([cheap, replace(dear, fold_holds=False)], BUDGET) == ()


POINTS = st.lists(st.tuples(st.integers(0, 9).map(float), st.integers(0, 9).map(float)), max_size=12)


@given(POINTS)
def test_nondominated_is_the_definition(points):
    expected = [not any(dominates(other, point) for other in points) for point in points]
    assert nondominated(points) == expected
    assert [rank == 0 for rank in ranks(points)] == expected


def test_hypervolume_and_knee_by_hand():
    # (10 - 2) x (5 - 3) for the first, plus (10 - 4) x (3 - 1) for the second; nothing for what is beyond
    assert hypervolume([(2.0, 3.0), (4.0, 1.0), (11.0, 1.0), (1.0, 6.0)], (10.0, 5.0)) == 8 * 2 + 6 * 2
    assert hypervolume([], (10.0, 5.0)) == 0
    assert knee([(0.0, 10.0), (1.0, 2.0), (10.0, 0.0), (5.0, 9.0)]) == 1
    assert knee([(1.0, 5.0), (2.0, 4.0)]) == 1
    with pytest.raises(ValueError, match="at least one point"):
        knee([])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_diverged_trial_is_never_a_point(bad):
    for function in (nondominated, ranks, knee):
        with pytest.raises(ValueError, match="finite"):
            function([(1.0, bad), (2.0, 1.0)])


# One trial each of a search from the builtin parent at scale `proxy`, seed 0, under Python 3.11.7
DOCUMENTS = Path(__file__).parent / "documents.csv"
NUM_SPLITS = 20


def losses_by_document() -> list[Documents]:
    with DOCUMENTS.open(newline="") as file:
        _, *rows = csv.reader(file)
    values = np.array([[float(cell) for cell in row[1:]] for row in rows])
    return [tuple(zip(values[:, 0].tolist(), losses.tolist(), strict=True)) for losses in values[:, 1:].T]


def half(documents: Documents, chosen: np.ndarray) -> Documents:
    kept = [document for document, inside in zip(documents, chosen, strict=True) if inside]
    whole = sum(share for share, _ in kept)
    return tuple((share / whole, loss) for share, loss in kept)


def holds(documents: Documents, chosen: np.ndarray) -> bool:
    """Whether the means of two halves are apart by no more than two errors of both.

    Of D documents that count alike the difference of the means of random halves has variance 4 S^2 / D, S^2 that of the
    documents, which is the sum of both halves' squared errors, S^2 / (D / 2) each: the halves share no document.
    """
    chosen_half, other = half(documents, chosen), half(documents, ~chosen)
    means = [sum(share * loss for share, loss in pairs) for pairs in (chosen_half, other)]
    error = joined(document_error(chosen_half), document_error(other))
    return abs(means[0] - means[1]) <= ERRORS_APART * error


@pytest.mark.parametrize("kind", ["losses", "differences"])
def test_the_interval_of_one_half_holds_the_mean_of_the_other(kind):
    trained = losses_by_document()
    pairs = [differences(losses, other) for losses, other in combinations(trained, 2)]
    series = trained if kind == "losses" else pairs
    rng, count = np.random.default_rng(0), len(trained[0])
    splits = [rng.permutation(count) < count // 2 for _ in range(NUM_SPLITS)]
    held = [holds(documents, chosen) for documents in series for chosen in splits]
    assert np.mean(held) >= 0.9  # 0.90 of losses and 0.95 of differences; over 2,000 splits 0.96 and 0.95
    assert not all(held)  # two errors are no more than they must be
