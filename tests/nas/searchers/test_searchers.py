from dataclasses import replace
from functools import partial
from typing import Any, final

import numpy as np
import pytest

from costmodel.cost import Budget
from nas.searchers.draws import Draws
from nas.searchers.optuna_samplers import OptunaStrategy, _layer
from nas.searchers.strategy import SEARCHERS, Observation, SearchProblem, Strategy, Suggestion, searcher_of
from nas.study.schedule import LAG, TrialSchedule
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.budget.feasible import within_budget
from search_spaces.budget.priced_space import (
    price_of,
    price_space,
)
from search_spaces.deployed import deployed
from search_spaces.notation import parse
from search_spaces.space import build_space, load_definition, with_first_layers
from tests.nas.study.conftest import run_schedule

GENERATION_SIZE = 4


def schedule(feasible, searcher="evolution", num_trials=12, seed=0, baselines=(), known=()):
    strategy = searcher_of(searcher)(SearchProblem(feasible=feasible, reference_loss=6.0))
    given = {"seed": seed, "num_trials": num_trials, "baselines": baselines, "known": known}
    return TrialSchedule(strategy=strategy, reference=(40.0, 6.0), generation_size=GENERATION_SIZE, **given)


def proposed(members):
    """Candidates as a ledger would have them."""
    return [
        Suggestion(member, index=index, generation=index // GENERATION_SIZE) for index, member in enumerate(members)
    ]


def outcome(feasible, proposal, status="completed"):
    """A made-up result that depends on the proposal alone."""
    latency_s = 99.0 if proposal.role == "baseline" else price_of(feasible.priced, proposal.member).latency_s
    loss = 5.0 - latency_s / 20 + 0.01 * proposal.index
    result: dict[str, Any] = {"latency_s": latency_s, "log_perplexity": loss if status == "completed" else None}
    return Observation(member=proposal.member, index=proposal.index, status=status, **result)


def run(feasible, plan, order=lambda count: 0):
    """The members of a schedule that is run to its end; those that begin first end first, unless `order` says else."""
    return [proposal.member for proposal in run_schedule(plan, partial(outcome, feasible), order)]


@pytest.mark.parametrize("searcher", list(SEARCHERS))
def test_proposals_are_new_within_budget_whatever_arrives_first_until_a_space_is_used_up(feasible, searcher):
    first = run(feasible, schedule(feasible, searcher))
    last = run(feasible, schedule(feasible, searcher), order=lambda count: count - 1)
    assert first == last
    assert first != run(feasible, schedule(feasible, searcher, seed=1))
    assert len({deployed(member.architecture) for member in first}) == len(first) == 12
    assert all(feasible.fits(member) for member in first)
    small = within_budget(feasible.priced, Budget(latency_s=12.5))
    members = run(small, schedule(small, searcher, num_trials=10_000))
    within = len({deployed(member.architecture) for member in small.members()})
    assert 0 < within < small.num_feasible < 10_000
    assert len({deployed(member.architecture) for member in members}) == len(members) == within


@pytest.mark.parametrize("searcher", ["nsga2", "tpe", pytest.param("gp", marks=pytest.mark.slow)])
def test_samplers_suggest_layers_that_all_members_begin_with(feasible, searcher):
    kept = parse("SM+LN+G", feasible.space.base).architecture.layers[:1]
    priced = price_space(with_first_layers(feasible.space, kept), feasible.priced.pricer, 16)
    begun = within_budget(priced, Budget(latency_s=99.0))
    members = run(begun, schedule(begun, searcher))
    strategy = searcher_of(searcher)(SearchProblem(feasible=begun, reference_loss=6.0))
    known = [Observation(member=member, latency_s=9.0, log_perplexity=5.0) for member in members]
    assert isinstance(strategy, OptunaStrategy)
    study = strategy._study(0, known)
    suggested = [study.ask(strategy.options).params for _ in range(8)]
    assert all(_layer(params, 0) == kept[0] for params in suggested)
    assert len({_layer(params, 1) for params in suggested}) > 1


def test_any_sampler_of_optuna_is_a_searcher_by_its_name(feasible):
    members = run(feasible, schedule(feasible, "optuna:RandomSampler"))
    assert len(set(members)) == len(members)
    problem = SearchProblem(feasible=feasible, reference_loss=6.0)
    with pytest.raises(ValueError, match=r"optuna:NoSampler must name a class of optuna\.samplers, but there is none"):
        searcher_of("optuna:NoSampler")(problem)
    with pytest.raises(ValueError, match=r"optuna:GridSampler must name a sampler that needs no argument but a seed"):
        searcher_of("optuna:GridSampler")(problem)


def test_as_written_every_member_is_one_answer(feasible):
    priced = price_space(feasible.space, feasible.priced.pricer, 16, "unfolded")
    small = within_budget(priced, Budget(latency_s=13.5))
    members = run(small, schedule(small, num_trials=10_000))
    assert len(set(members)) == len(members) == small.num_feasible > 4


def test_diverged_trials_have_no_offspring(feasible):
    plan = schedule(feasible)
    for _ in range(GENERATION_SIZE):
        plan.tell(outcome(feasible, plan.ask(), status="diverged"))
    for _ in range(GENERATION_SIZE):
        plan.ask()
    assert plan.ask() is not None  # a random member: there is no parent to mutate


def test_baselines_come_first_may_exceed_the_budget_and_do_not_count(feasible):
    baseline = parse("SM+LN+G", feasible.space.base)
    assert not feasible.fits(baseline)
    plan = schedule(feasible, num_trials=3, baselines=[baseline])
    asked = [plan.ask() for _ in range(4)]
    assert [proposal.role for proposal in asked] == ["baseline", "candidate", "candidate", "candidate"]
    assert plan.finished


def test_the_next_generation_waits_and_raising_the_number_of_trials_keeps_those_there_were(feasible):
    plan = schedule(feasible)
    asked = [plan.ask() for _ in range(2 * GENERATION_SIZE)]
    assert plan.ask() is None
    assert not plan.finished
    for proposal in asked[:GENERATION_SIZE]:
        plan.tell(outcome(feasible, proposal))
    assert plan.ask() is not None
    short = run(feasible, schedule(feasible, num_trials=6))
    long = run(feasible, schedule(feasible, num_trials=12))
    assert long[:6] == short


def test_what_a_ledger_knows_stands(feasible):
    """What was proposed changes nothing; what another version proposed is proposed again, and nothing twice."""
    whole = run(feasible, schedule(feasible))
    assert run(feasible, schedule(feasible, known=proposed(whole[:6]))) == whole
    others = run(feasible, schedule(feasible, seed=5))[:6]
    plan = schedule(feasible, known=proposed(others))
    members = run(feasible, plan)
    assert members[:6] == others
    assert len(set(members)) == len(members) == 12
    assert [proposal.generation for proposal in plan.proposals] == [index // GENERATION_SIZE for index in range(12)]
    again = schedule(feasible, known=proposed(whole))
    again.strategy.propose = None  # would raise
    assert run(feasible, again) == whole
    first = schedule(feasible, baselines=[parse("SM+LN+G", feasible.space.base)])
    whole = run(feasible, first)
    again = schedule(feasible, baselines=[parse("SM+LN+R", feasible.space.base)], known=first.proposals[:3])
    assert run(feasible, again) == whole


@final
class Looking(Strategy):
    """Looks at three and takes the first that stands to its end."""

    takes_proxies = True

    def __init__(self, problem):
        self.draws = Draws(problem.feasible)

    def propose(self, size, rng, seen, trained):
        return self.draws.filled([], size, rng, seen)

    def suggestions(self, size, rng, seen, trained, remaining):
        standing = [outcome.member for outcome in trained if outcome.deviation is not None and not outcome.promoted]
        ends = [Suggestion(member) for member in standing[:1] if remaining.proxy_evals < 3 * remaining.final_trainings]
        proxy_evals = self.propose(min(size - len(ends), remaining.proxy_evals), rng, seen, trained)
        return [*ends, *(Suggestion(member, is_proxy=True, expected=5.0) for member in proxy_evals)]


def looking(feasible, known=()):
    strategy = Looking(SearchProblem(feasible=feasible, reference_loss=6.0))
    sizes: dict[str, Any] = {"num_trials": 4, "num_proxy_evals": 12, "generation_size": 3}
    return TrialSchedule(strategy=strategy, seed=0, reference=(40.0, 6.0), known=known, **sizes)


def evaluated(feasible, proposal):
    end = outcome(feasible, proposal)
    at_rung = replace(end, rung_losses=(end.log_perplexity + 0.5,))
    return replace(at_rung, status="paused", log_perplexity=None) if proposal.is_proxy else at_rung


@pytest.mark.parametrize("kept", [0, 3, 7, 16])
def test_evaluated_candidates_are_promoted_under_their_index_whatever_arrives_first(feasible, kept):
    told = partial(evaluated, feasible)
    whole = run_schedule(looking(feasible), told, lambda count: 0)
    assert run_schedule(looking(feasible), told, lambda count: count - 1) == whole
    proxy_evals = {proposal.index: proposal for proposal in whole if proposal.is_proxy}
    ends = [proposal for proposal in whole if not proposal.is_proxy]
    assert (len(proxy_evals), len(ends)) == (12, 4)
    assert all(proxy_evals[end.index].member == end.member for end in ends)
    assert all(proxy_evals[end.index].generation <= end.generation - LAG for end in ends)
    assert run_schedule(looking(feasible, known=whole[:kept]), told, lambda count: 0) == whole


def test_an_evaluation_that_was_skipped_does_not_count(feasible):
    plan = looking(feasible)
    asked = [plan.ask() for _ in range(2)]
    assert None not in asked
    assert plan.num_evaluated == len(plan.proposals)
    plan.skip(asked[1])
    assert plan.num_evaluated == len(plan.proposals) - 1


def test_an_evaluation_has_its_deviation_until_the_final_training_ends(feasible):
    plan = looking(feasible)
    run_schedule(plan, partial(evaluated, feasible), lambda count: 0)
    trained = plan.trained()
    assert sum(outcome.deviation is None for outcome in trained) == 4
    ends = {proposal.index for proposal in plan.proposals if not proposal.is_proxy}
    last = max(proposal.generation for proposal in plan.proposals if proposal.index in ends and proposal.is_proxy)
    earlier = plan.trained(last)
    assert sum(outcome.promoted for outcome in earlier) == sum(
        proposal.generation > last for proposal in plan.proposals if not proposal.is_proxy
    )


def slice_counts(slices, members):
    return [sum(part.fits(member) for member in members) for part in slices]


def test_stratified_draws_cover_the_whole_range_of_costs(feasible):
    members = run(feasible, schedule(feasible, "stratified", num_trials=24))
    slices = Draws(feasible).slices
    forms = [len({deployed(member.architecture) for member in part.members()}) for part in slices]
    counts = slice_counts(slices, members)
    assert len(counts) >= 4
    assert all(count >= min(24 // len(slices), held) for count, held in zip(counts, forms, strict=True))


def test_every_member_is_in_one_slice_or_none(feasible):
    draws = Draws(feasible)
    members = list(feasible.members())
    for member in members:
        holding = [number for number, part in enumerate(draws.slices) if part.fits(member)]
        assert holding == [number for number in [draws.place_of(member).slice] if number is not None]
    assert {draws.place_of(member).slice for member in members} >= set(range(len(draws.slices)))
    stranger = replace(members[0], architecture=parse("12xLSLGo", base_architecture("gpt2-small")).architecture)
    assert draws.place_of(stranger).slice is None


def test_offspring_spread_over_the_latencies(feasible):
    """Drawn without a latency target, offspring would follow the members, of which hardly any is cheap."""
    space = build_space(replace(load_definition("gpt2-small"), dimensions=Dimensions(layers=6)))
    wide = within_budget(price_space(space, feasible.priced.pricer, 16), Budget(latency_s=75.0))
    slices = Draws(wide).slices
    bred = run(wide, schedule(wide, num_trials=32))[2 * GENERATION_SIZE :]
    drawn = [wide.sample(np.random.default_rng(seed)) for seed in range(24)]
    counts = slice_counts(slices, bred)
    assert min(counts) >= 1
    assert max(counts) <= 8
    assert sum(slice_counts(slices, drawn)[:3]) == 0


def test_a_searcher_of_ones_own_is_loaded_and_what_is_none_is_refused(feasible):
    made = searcher_of("nas.searchers.uniform:Stratified")(SearchProblem(feasible=feasible, reference_loss=6.0))
    assert len(made.propose(4, np.random.default_rng(0), [], [])) == 4
    for name, said in (
        ("moon", "must be one of trellis, evolution"),
        ("nas.searchers.moon:Class", "cannot be loaded: No module"),
        ("nas.searchers.uniform:Moon", "cannot be loaded: .*Moon"),
        ("nas.searchers.draws:Draws", "must be a subclass of"),
        (":", "cannot be loaded"),
    ):
        with pytest.raises(ValueError, match=said):
            searcher_of(name)
