import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from costmodel.cost import Budget
from nas.run.members import front
from nas.searchers.strategy import Observation, SearchProblem, Suggestion, searcher_of
from nas.study.schedule import (
    AROUND_LINE,
    FROM_PARENT,
    LAG,
    LINE,
    TrialSchedule,
    finalists,
    losses_after_proxies,
    next_round,
)
from search_spaces.bases import BASES
from search_spaces.notation import parse
from tests.nas.study.conftest import run_schedule

MEMBER = parse("SM+LN+G", BASES["tiny"])


def result(index: int, loss: float | None, *, latency_s: float, replicate: int = 0, **changes) -> Observation:
    status = "diverged" if loss is None else "completed"
    fields = {"member": MEMBER, "status": status, "latency_s": latency_s, "log_perplexity": loss, **changes}
    return Observation(index=index, replicate=replicate, **fields)


CHEAP, MIDDLE, DEAR = (result(index, 3.0 - index, latency_s=10.0 + index) for index in range(3))
DOMINATED = result(3, 2.5, latency_s=13.0)


def wanted(results, asked=(), *, seeds=2, most=99, size=99):
    return next_round(results, asked, seeds=seeds, most=most, size=size, reference=(20.0, 5.0))


def test_members_whose_order_is_in_doubt_come_first_and_a_second_seed_before_a_third():
    close = result(1, 2.999, latency_s=11.0)
    assert {index for index, _ in wanted([DEAR, DOMINATED, CHEAP, close], size=2)} == {0, 1}
    assert {index for index, _ in wanted([DEAR, DOMINATED, CHEAP, MIDDLE])} == {0, 1, 2}
    level = [result(index, 3.0 - index * 0.01, latency_s=10.0 + index) for index in range(3)]
    again = [replace(level[0], replicate=1), replace(level[2], replicate=1)]
    assert wanted([*level, *again], [(0, 1), (2, 1)])[0] == (1, 1)


def test_there_are_no_more_than_asked_for_of_a_member_in_a_round_and_in_all():
    results = [DEAR, CHEAP, MIDDLE]
    assert len(wanted(results, size=2)) == 2
    assert len(wanted(results, [(0, 1), (1, 1)], most=3)) == 1
    assert wanted(results, [(0, 1), (1, 1), (2, 1)], most=3) == []
    assert sorted(wanted(results, [(0, 1), (1, 1), (2, 1)], seeds=2)) == [(0, 2), (1, 2), (2, 2)]
    assert wanted(results, [(0, 1), (1, 1), (2, 1)], seeds=1) == []


def test_who_comes_to_the_front_late_gets_its_seeds_too():
    results = [CHEAP, MIDDLE, DEAR, DOMINATED]
    unlucky = result(2, 9.0, latency_s=12.0, replicate=1)
    rest = [result(index, 3.0 - index, latency_s=10.0 + index, replicate=1) for index in (0, 1)]
    assert finalists([*results, *rest, unlucky]) == [0, 1]
    better = result(1, 4.5, latency_s=11.0, replicate=1)  # a mean of 3.25: the cheapest dominates it, not number 3
    late = wanted([*results, rest[0], better, unlucky], [(0, 1), (1, 1), (2, 1)])
    assert sorted(late) == [(0, 2), (3, 1)]


@pytest.mark.parametrize(
    ("loss", "changes", "expected"),
    [(None, {}, []), (3.0, {"latency_s": 99.0, "feasible": False}, []), (None, {"status": "failed"}, [(0, 2)])],
)
def test_a_divergence_or_an_unearned_price_ends_it_a_failure_does_not(loss, changes, expected):
    again = result(0, loss, **{"latency_s": 10.0, **changes}, replicate=1)
    assert wanted([CHEAP, again], [(0, 1)]) == expected


@pytest.mark.parametrize("seed", range(8))
def test_the_schedule_and_the_report_see_one_front(over_seeds, seed):
    draw, budget = random.Random(seed), Budget(latency_s=300.0)
    records = []
    for index in range(20):
        losses = [draw.choice([None, *(draw.uniform(2, 4) for _ in range(8))]) for _ in range(draw.randint(1, 3))]
        records += over_seeds(index, *losses, latency_s=draw.choice([100.0, 200.0, 250.0, 299.0, 301.0]))
    results = [
        result(end.index, end.val_loss, latency_s=end.latency_s, replicate=end.seed, feasible=end.latency_s <= 300)
        for end in records
    ]
    assert finalists(results) == [member.first.index for member in front(records, budget)] != []


def outcome(proposal: Suggestion) -> Observation:
    """A made-up result with noise that depends on candidate and seed alone."""
    noise = random.Random(f"{proposal.key}").gauss(0, 0.3)
    loss = 5.0 + noise if proposal.replicate != 2 or noise < 0.4 else None
    latency_s = 10.0 + proposal.index % 5
    return result(proposal.index, loss, latency_s=latency_s, replicate=proposal.replicate, member=proposal.member)


def run(feasible, order, *, finalist_seeds: int = 2):
    strategy = searcher_of("evolution")(SearchProblem(feasible=feasible, reference_loss=6.0))
    counts: dict[str, Any] = {"num_trials": 12, "most_replicates": 12, "finalist_seeds": finalist_seeds}
    return run_schedule(TrialSchedule(strategy=strategy, seed=0, reference=(40.0, 6.0), **counts), outcome, order)


def test_replicates_follow_all_candidates_and_do_not_depend_on_arrival_order(feasible):
    first, last = run(feasible, lambda count: 0), run(feasible, lambda count: count - 1)
    assert first == last
    roles = [proposal.role for proposal in first]
    assert roles == ["candidate"] * 12 + ["replicate"] * (len(roles) - 12)
    assert len(roles) > 14
    assert len({proposal.key for proposal in first}) == len(first)
    members = {proposal.index: proposal.member for proposal in first[:12]}
    assert all(proposal.member == members[proposal.index] for proposal in first)
    assert {proposal.replicate for proposal in first} == {0, 1, 2}
    # a round depends on all before it, so that a failure before it is not tried again: LAG generations apart
    generations = sorted({proposal.generation for proposal in first[12:]})
    assert generations == [first[11].generation + LAG * number for number in range(1, len(generations) + 1)]


@pytest.mark.parametrize("seeds", [0, 1])
def test_as_many_seeds_as_asked_for(feasible, seeds):
    assert max(proposal.replicate for proposal in run(feasible, lambda count: 0, finalist_seeds=seeds)) == seeds


def look(loss: float) -> Observation:
    return Observation(member=MEMBER, status="paused", latency_s=1.0, log_perplexity=None, rung_losses=(loss,))


def end(at_rung: float, at_end: float) -> Observation:
    return Observation(member=MEMBER, latency_s=1.0, log_perplexity=at_end, rung_losses=(at_rung, at_end))


def test_without_final_results_the_prior_predicts_losses_from_those_of_evaluations():
    (known, expected) = losses_after_proxies([end(2.5, 2.1), look(2.5)][1:] * 2, 1.9)
    assert known == expected
    assert known.mean == pytest.approx(1.9 + LINE[0] + LINE[1] * 0.6)
    variance = FROM_PARENT[0] ** 2 + (0.6 * FROM_PARENT[1]) ** 2 + AROUND_LINE**2
    assert known.deviation == pytest.approx(variance**0.5)
    best, other = losses_after_proxies([look(4.0), look(5.0)], None)
    assert best.mean < other.mean
    assert best.deviation > losses_after_proxies([look(4.0)], 4.0)[0].deviation
    failed = Observation(member=MEMBER, status="failed", latency_s=1.0, log_perplexity=None)
    assert losses_after_proxies([failed], 1.9) == [None]


def test_predicted_losses_are_those_of_the_normal_distribution_given_final_results():
    """By the block formula for conditional normals."""
    pairs = np.array([(2.4, 2.2), (2.9, 2.5), (3.3, 2.6)])
    terms = np.column_stack([np.ones(4), [*(pairs[:, 0] - 1.9), 2.6 - 1.9]])
    joint = terms @ np.diag(np.square(FROM_PARENT)) @ terms.T + AROUND_LINE**2 * np.eye(4)
    mean = terms @ LINE + 1.9
    gain = joint[3, :3] @ np.linalg.inv(joint[:3, :3])
    expected = losses_after_proxies([*(end(*pair) for pair in pairs), look(2.6)], 1.9)[-1]
    assert expected.mean == pytest.approx(mean[3] + gain @ (pairs[:, 1] - mean[:3]))
    assert expected.deviation**2 == pytest.approx(joint[3, 3] - gain @ joint[:3, 3])
