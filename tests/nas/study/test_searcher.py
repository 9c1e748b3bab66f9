import numpy as np
import pytest

from costmodel.cost import Budget
from nas.study.early_stop import dominated_at_rung
from nas.study.finalists import Result
from nas.study.schedule import GENERATION_SIZE, Proposal, TrialSchedule
from nas.study.searcher import SEARCHERS
from search_spaces.budget.feasible import within_budget
from search_spaces.budget.priced_space import cheapest, price_of
from search_spaces.notation import parse


def schedule(feasible, searcher="evolution", num_trials=12, seed=0, anchors=(), baselines=()):
    strategy = SEARCHERS[searcher](feasible, anchors)
    return TrialSchedule(strategy=strategy, seed=seed, num_trials=num_trials, baselines=baselines)


def outcome(feasible, proposal, status="completed"):
    """A made-up result that depends on the proposal alone."""
    latency_s = 99.0 if proposal.role == "baseline" else price_of(feasible.priced, proposal.member).latency_s
    loss = 5.0 - latency_s / 20 + 0.01 * proposal.index
    completed = status == "completed"
    return Result(index=proposal.index, status=status, latency_s=latency_s, log_perplexity=loss if completed else None)


def run(feasible, plan, order):
    """Runs a schedule, two trials at a time; `order` says which of the running trials ends next."""
    running: list[Proposal] = []
    while True:
        while len(running) < 2 and (proposal := plan.ask()) is not None:
            running.append(proposal)
        if not running:
            assert plan.finished
            return [proposal.member for proposal in plan.proposals]
        plan.tell(outcome(feasible, running.pop(order(len(running)))))


@pytest.mark.parametrize("searcher", list(SEARCHERS))
def test_proposals_do_not_depend_on_arrival_order(feasible, searcher):
    first = run(feasible, schedule(feasible, searcher), order=lambda count: 0)
    last = run(feasible, schedule(feasible, searcher), order=lambda count: count - 1)
    assert first == last
    assert first != run(feasible, schedule(feasible, searcher, seed=1), order=lambda count: 0)


@pytest.mark.parametrize("searcher", list(SEARCHERS))
def test_every_proposal_is_new_and_within_budget(feasible, searcher):
    members = run(feasible, schedule(feasible, searcher), order=lambda count: 0)
    assert len(set(members)) == len(members) == 12
    assert all(feasible.fits(member) for member in members)


@pytest.mark.parametrize("searcher", list(SEARCHERS))
def test_a_small_space_is_used_up_once(feasible, searcher):
    small = within_budget(feasible.priced, Budget(latency_s=12.5))
    members = run(small, schedule(small, searcher, num_trials=10_000), order=lambda count: 0)
    assert 0 < small.num_feasible < 10_000
    assert len(set(members)) == len(members) == small.num_feasible


def test_evolution_begins_with_the_anchors(feasible):
    anchors = [feasible.sample(np.random.default_rng(seed)) for seed in (1, 2)]
    plan = schedule(feasible, anchors=anchors)
    assert [plan.ask().member for _ in range(2)] == anchors


def test_baselines_come_first_may_exceed_the_budget_and_do_not_count(feasible):
    baseline = parse("SM+LN+G", feasible.space.base)
    assert not feasible.fits(baseline)
    plan = schedule(feasible, num_trials=3, baselines=[baseline])
    asked = [plan.ask() for _ in range(4)]
    assert [proposal.role for proposal in asked] == ["baseline", "candidate", "candidate", "candidate"]
    assert plan.finished


def test_the_next_generation_waits_for_the_one_before_the_last(feasible):
    plan = schedule(feasible)
    asked = [plan.ask() for _ in range(2 * GENERATION_SIZE)]
    assert plan.ask() is None
    assert not plan.finished
    for proposal in asked[:GENERATION_SIZE]:
        plan.tell(outcome(feasible, proposal))
    assert plan.ask() is not None


def test_raising_the_number_of_trials_keeps_those_there_were(feasible):
    short = run(feasible, schedule(feasible, num_trials=6), order=lambda count: 0)
    long = run(feasible, schedule(feasible, num_trials=12), order=lambda count: 0)
    assert long[:6] == short


def test_diverged_trials_have_no_offspring(feasible):
    plan = schedule(feasible)
    for _ in range(GENERATION_SIZE):
        plan.tell(outcome(feasible, plan.ask(), status="diverged"))
    for _ in range(GENERATION_SIZE):
        plan.ask()
    assert plan.ask() is not None  # a random member: there is no parent to mutate


def test_rivals_are_eight_completed_candidates_or_none(feasible):
    plan = schedule(feasible, num_trials=20, baselines=[parse("SM+LN+G", feasible.space.base)])
    asked: list[Proposal] = []
    while len(asked) < 1 + 4 * GENERATION_SIZE and (proposal := plan.ask()) is not None:
        asked.append(proposal)
        plan.tell(outcome(feasible, proposal))
    generations = {proposal.generation: proposal for proposal in asked}
    assert plan.rivals(generations[2]) == ()  # sees one generation, of four trials
    assert [rival.index for rival in plan.rivals(generations[3])] == [1, 2, 3, 4, 5, 6, 7, 8]  # no baseline


def test_diverged_trials_do_not_count_as_rivals(feasible):
    plan = schedule(feasible, num_trials=20)
    asked = [plan.ask() for _ in range(2 * GENERATION_SIZE)]
    for proposal in asked:
        plan.tell(outcome(feasible, proposal, status="diverged" if proposal.index == 0 else "completed"))
    later = [plan.ask() for _ in range(GENERATION_SIZE)]
    for proposal in later:
        plan.tell(outcome(feasible, proposal))
    assert plan.rivals(plan.ask()) == ()


def test_offspring_spread_over_the_latencies(feasible):
    """Drawn without a latency target, offspring would follow the members, of which few are cheap."""
    cheapest_s = price_of(feasible.priced, cheapest(feasible.priced)).latency_s
    middle_s = (cheapest_s + feasible.budget.latency_s) / 2

    def cheap_share(members):
        return sum(price_of(feasible.priced, member).latency_s < middle_s for member in members) / len(members)

    bred = []
    for seed in range(5):
        bred += run(feasible, schedule(feasible, num_trials=24, seed=seed), order=lambda count: 0)[
            2 * GENERATION_SIZE :
        ]
    drawn = [feasible.sample(np.random.default_rng(seed)) for seed in range(500)]
    assert cheap_share(bred) > 1.25 * cheap_share(drawn)


def test_a_trial_is_dominated_only_in_price_and_loss():
    rival = Result(index=0, status="completed", latency_s=10.0, log_perplexity=2.0, rung_losses=(3.0, 2.0))
    assert dominated_at_rung(0, 11.0, 3.1, [rival])
    assert dominated_at_rung(0, 10.0, 3.1, [rival])
    assert not dominated_at_rung(0, 9.0, 9.0, [rival])  # cheaper: survives whatever its loss
    assert not dominated_at_rung(0, 11.0, 2.9, [rival])
    assert not dominated_at_rung(0, 10.0, 3.0, [rival])  # equal
    assert not dominated_at_rung(2, 11.0, 9.0, [rival])  # the rival never reached that rung
