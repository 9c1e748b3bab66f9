"""Which members of the front get one more seed, and that it depends on results alone."""

import random
from dataclasses import replace

import pytest

from costmodel.cost import Budget
from nas.run.front import front
from nas.searchers.strategy import SearchProblem, searcher_of
from nas.study.finalists import Result, finalists, next_round
from nas.study.schedule import LAG, Proposal, TrialSchedule
from tests.nas.study.conftest import run_schedule


def result(index: int, loss: float | None, *, latency_s: float, replicate: int = 0, **changes) -> Result:
    status = "diverged" if loss is None else "completed"
    fields = {"status": status, "latency_s": latency_s, "log_perplexity": loss, **changes}
    return Result(index=index, replicate=replicate, **fields)


CHEAP, MIDDLE, DEAR = (result(index, 3.0 - index, latency_s=10.0 + index) for index in range(3))
DOMINATED = result(3, 2.5, latency_s=13.0)


def test_the_front_gets_a_seed_cheapest_first_then_the_next():
    results = [DEAR, DOMINATED, CHEAP, MIDDLE]
    assert next_round(results, [], 2) == [(0, 1), (1, 1), (2, 1)]
    again = [replace(one, replicate=1) for one in (CHEAP, MIDDLE, DEAR)]
    asked = [(0, 1), (1, 1), (2, 1)]
    assert next_round([*results, *again], asked, 2) == [(0, 2), (1, 2), (2, 2)]
    assert next_round([*results, *again], asked, 1) == []
    assert next_round(results, [], 0) == []


def test_who_comes_to_the_front_late_gets_its_seeds_too():
    results = [CHEAP, MIDDLE, DEAR, DOMINATED]
    unlucky = result(2, 9.0, latency_s=12.0, replicate=1)
    rest = [result(index, 3.0 - index, latency_s=10.0 + index, replicate=1) for index in (0, 1)]
    assert finalists([*results, *rest, unlucky]) == [0, 1]
    better = result(1, 4.5, latency_s=11.0, replicate=1)  # a mean of 3.25: the cheapest dominates it, not number 3
    assert next_round([*results, rest[0], better, unlucky], [(0, 1), (1, 1), (2, 1)], 2) == [(0, 2), (3, 1)]


def test_no_more_than_twice_the_first_front_are_trained_again():
    results = [result(index, loss, latency_s=10.0) for index, loss in enumerate((1.0, 1.9, 1.8, 1.7))]
    assert next_round(results, [], 1) == [(0, 1)]
    results.append(result(0, None, latency_s=10.0, replicate=1))
    assert next_round(results, [(0, 1)], 1) == [(3, 1)]
    results.append(result(3, None, latency_s=10.0, replicate=1))
    assert finalists(results) == [2]
    assert next_round(results, [(0, 1), (3, 1)], 1) == []


def test_a_divergence_or_an_unearned_price_ends_it_a_failure_does_not():
    diverged = [CHEAP, result(0, None, latency_s=10.0, replicate=1)]
    assert next_round(diverged, [(0, 1)], 2) == []
    dear = [CHEAP, result(0, 3.0, latency_s=99.0, replicate=1, feasible=False)]
    assert next_round(dear, [(0, 1)], 2) == []
    failed = [CHEAP, result(0, None, latency_s=10.0, replicate=1, status="failed")]
    assert next_round(failed, [(0, 1)], 2) == [(0, 2)]


@pytest.mark.parametrize("seed", range(8))
def test_the_schedule_and_the_report_see_one_front(over_seeds, seed):
    draw, budget = random.Random(seed), Budget(latency_s=300.0)
    records = []
    for index in range(20):
        losses = [draw.choice([None, *(draw.uniform(2, 4) for _ in range(8))]) for _ in range(draw.randint(1, 3))]
        records += over_seeds(index, *losses, latency_s=draw.choice([100.0, 200.0, 250.0, 299.0, 301.0]))
    results = [
        result(one.index, one.val_loss, latency_s=one.latency_s, replicate=one.seed, feasible=one.latency_s <= 300)
        for one in records
    ]
    found = [member.first.index for member in front(records, budget)]
    assert finalists(results) == found
    assert found


def outcome(proposal: Proposal) -> Result:
    """A made-up result with noise that depends on candidate and seed alone."""
    noise = random.Random(f"{proposal.key}").gauss(0, 0.3)
    loss = 5.0 + noise if proposal.replicate != 2 or noise < 0.4 else None
    return result(proposal.index, loss, latency_s=10.0 + proposal.index % 5, replicate=proposal.replicate)


def run(feasible, order, *, num_trials: int = 12, finalist_seeds: int = 2):
    strategy = searcher_of("evolution")(SearchProblem(feasible=feasible, anchors=(), reference_loss=6.0))
    plan = TrialSchedule(strategy=strategy, seed=0, num_trials=num_trials, finalist_seeds=finalist_seeds)
    return run_schedule(plan, outcome, order)


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


def test_a_round_depends_on_all_before_it(feasible):
    """So that a failure before it is not tried again, as the ledger tells by generations LAG apart."""
    generations = sorted({one.generation for one in run(feasible, lambda count: 0) if one.role == "replicate"})
    last = max(one.generation for one in run(feasible, lambda count: 0) if one.role == "candidate")
    assert generations == [last + LAG * number for number in range(1, len(generations) + 1)]


@pytest.mark.parametrize("finalist_seeds", [0, 1])
def test_as_many_seeds_as_asked_for(feasible, finalist_seeds):
    assert max(one.replicate for one in run(feasible, lambda count: 0, finalist_seeds=finalist_seeds)) == finalist_seeds


def test_more_candidates_later_keep_the_seeds_there_were(feasible):
    short = {one.key for one in run(feasible, lambda count: 0) if one.role == "candidate"}
    assert short < {one.key for one in run(feasible, lambda count: 0, num_trials=16)}
