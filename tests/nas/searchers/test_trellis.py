import math
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from costmodel.cost import Budget
from costmodel.protocols import load_pricer
from nas.run.pareto import hypervolume
from nas.searchers import surrogate, trellis
from nas.searchers.draws import Draws
from nas.searchers.strategy import Observation, RemainingBudget, SearchProblem, points_of
from nas.searchers.surrogate import SEED_NOISE, Observations, features_of, fit, gap_share, gap_shares_closed
from nas.searchers.trellis import Trellis, completion, completion_weights, expected_improvement
from nas.searchers.uniform import Stratified
from nas.training.distillation.sub_layers import BlockScores, sub_layers_of
from search_spaces.bases import Dimensions
from search_spaces.budget.feasible import within_budget
from search_spaces.budget.priced_space import price_of, price_space
from search_spaces.notation import Member
from search_spaces.optima import frontier, member_of_optimum, stages_of
from search_spaces.space import build_space, load_definition, members, sample
from tests.conftest import python
from tests.nas.searchers.gpt2_search import asked_for


@pytest.fixture(scope="module")
def problem(feasible) -> SearchProblem:
    definition = replace(load_definition("tiny"), dimensions=Dimensions(layers=3))
    priced = price_space(build_space(definition), feasible.priced.pricer, 16)
    return SearchProblem(feasible=within_budget(priced, Budget(latency_s=40.0)), reference_loss=6.0)


@pytest.fixture(scope="module")
def features(problem):
    return features_of(stages_of(problem.feasible), problem)


def loss_of(member) -> float:
    """Made up: what each form is worth grows with depth, and losing all ReLUs and GELUs costs more than each."""
    worth = {"gelu": 0.30, "relu": 0.25, "fused": 0.1, "none": 0.0}
    layers = enumerate(member.architecture.layers)
    gained = sum(worth[layer.ffn] * (1 + depth / 5) + 0.05 * (layer.norm1 == "layernorm") for depth, layer in layers)
    return 5.0 - gained + 0.3 * all(layer.ffn in ("fused", "none") for layer in member.architecture.layers)


def prior(features, worth):
    """Mean and covariance of the weights."""
    root = features.root * features.scales(worth)
    return features.mean, root @ root.T


def trained(problem, members):
    prices = [price_of(problem.feasible.priced, member).latency_s for member in members]
    return [
        Observation(member=member, latency_s=latency_s, log_perplexity=loss_of(member))
        for member, latency_s in zip(members, prices, strict=True)
    ]


def asked_one_by_one(problem, remaining):
    """Each suggestion of `trellis`, with all results so far; a short training is off by 0.02."""
    strategy, rng, known = Trellis(problem), np.random.default_rng(0), dict[Member, Observation]()
    while remaining.final_trainings:
        (suggestion,) = strategy.suggestions(1, rng, [*known], [*known.values()], remaining)
        (end,) = trained(problem, [suggestion.member])
        remaining = remaining.after(is_proxy=suggestion.is_proxy)
        known[suggestion.member] = replace(end, deviation=0.02) if suggestion.is_proxy else end
        yield suggestion, known


def test_where_no_member_is_expected_to_reach_the_reference_the_best_are_trained(problem):
    parent = most_expensive(problem).architecture
    stages = stages_of(problem.feasible)
    sub_layers = {
        sub_layer
        for depth in range(parent.num_layers)
        for layer in stages.layers
        for sub_layer in sub_layers_of(parent, depth, layer)
    }
    kept = {sub_layer for depth, layer in enumerate(parent.layers) for sub_layer in sub_layers_of(parent, depth, layer)}
    scores = BlockScores(divergences={sub_layer: 9.0 * (sub_layer not in kept) for sub_layer in sub_layers})
    problem = replace(problem, parent=parent, parent_loss=2.0, short_finetune=True, blocks=scores, reference_loss=2.4)
    strategy = Trellis(problem)
    best = strategy.reference[1] - trellis.REACH
    assert best > 2.4
    remaining = RemainingBudget(proxy_evals=0, final_trainings=4)
    suggestions = strategy.suggestions(4, np.random.default_rng(0), [], [], remaining)
    expected = [suggestion.expected or math.nan for suggestion in suggestions]
    assert min(expected) < best + trellis.REACH
    assert max(expected) < best + 3 * trellis.REACH  # the worst are at more than 8


def test_where_little_heals_a_parent_is_expected_where_it_is(problem):
    parent = most_expensive(problem)
    problem = replace(problem, parent=parent.architecture, parent_loss=2.5, short_finetune=True)
    features = features_of(stages_of(problem.feasible), problem)
    assert features.rows([parent])[0] @ features.mean == pytest.approx(2.5)


def test_expected_improvement_is_the_mean_over_draws():
    rng = np.random.default_rng(0)
    points, reference = [(2.0, 3.0), (4.0, 2.0), (7.0, 1.5), (11.0, 0.1), (1.0, 9.0)], (10.0, 5.0)
    latency_s, mean, deviation = np.array([1.0, 3.0, 5.0, 9.5, 12.0]), np.full(5, 2.2), np.full(5, 0.7)
    expected = expected_improvement(latency_s, mean, deviation, points, reference)
    before = hypervolume(points, reference)
    drawn = rng.normal(2.2, 0.7, size=4000)
    for place, latency in enumerate(latency_s):
        added = [hypervolume([*points, (latency, loss)], reference) - before for loss in drawn]
        assert expected[place] == pytest.approx(np.mean(added), abs=4 * np.std(added) / np.sqrt(len(added)) + 1e-12)
    dominated = [(5.0, 4.5), (6.0, 4.0), (8.0, 3.0)]  # each better than the one before it, none than the front
    assert (expected_improvement(latency_s, mean, deviation, [*points, *dominated], reference) == expected).all()


def test_posterior_and_likelihood_are_those_of_the_kernel_of_results(features, problem):
    rng = np.random.default_rng(3)
    members = list({sample(problem.feasible.space, rng): None for _ in range(60)})
    rows, losses = features.rows(members), np.array([loss_of(member) for member in members])
    noise = rng.uniform(0.005, 0.05, size=len(members))
    posterior = fit(features, Observations(rows, losses, noise**2))
    apart, likelihoods = losses - rows @ features.mean, {}
    for worth, discrepancy in surrogate.PAIRS:
        kernel = rows @ prior(features, worth)[1] @ rows.T + np.diag(discrepancy**2 + noise**2)
        likelihood = -apart @ np.linalg.solve(kernel, apart) / 2 - np.linalg.slogdet(kernel)[1] / 2
        likelihoods[worth, discrepancy] = likelihood + surrogate._log_prior(worth, discrepancy)
    worth, discrepancy = max(likelihoods, key=likelihoods.__getitem__)
    covariance = prior(features, worth)[1]
    inverse = np.linalg.inv(rows @ covariance @ rows.T + np.diag(discrepancy**2 + noise**2))
    assert posterior.discrepancy == discrepancy
    gain = covariance @ rows.T @ inverse
    assert posterior.mean == pytest.approx(features.mean + gain @ apart, abs=1e-6)
    root = posterior.root
    assert root @ root.T == pytest.approx(covariance - gain @ rows @ covariance, abs=1e-8)


def test_what_was_observed_of_a_member_itself_counts_beyond_its_features(features, problem):
    """By the block formula for conditional normals, on the member's own mean beside the observations."""
    rng = np.random.default_rng(8)
    rows = features.rows([sample(problem.feasible.space, rng) for _ in range(9)])
    losses, noise = rng.normal(4, 0.3, size=8), rng.uniform(0.01, 0.3, size=8)
    posterior = fit(features, Observations(rows[:8], losses, noise**2))
    given = np.append(losses, 0.0), np.append(noise**2, np.inf)
    mean, deviation = posterior.predict(rows).with_own(*given)
    posteriors = []
    for worth in surrogate.WORTHS:
        centre, covariance = prior(features, worth)
        joint = rows @ covariance @ rows.T + posterior.discrepancy**2 * np.eye(9)
        gain = joint[:, :8] @ np.linalg.inv(joint[:8, :8] + np.diag(noise**2))
        means = rows @ centre + gain @ (losses - rows[:8] @ centre)
        posteriors.append((means, (joint - gain @ joint[:8]).diagonal()))
    assert any(np.allclose(mean, m, atol=1e-6) and np.allclose(deviation**2, v, atol=1e-8) for m, v in posteriors)


def test_scores_that_add_up_are_the_surrogate_but_for_what_is_scarce(features, problem):
    rng = np.random.default_rng(3)
    weights = rng.normal(size=features.rows([sample(problem.feasible.space, rng)]).shape[1])
    weights[-3:] = 0  # of what is scarce, and of gaps
    scores = features.additive(weights, np.ones((len(features.stages.steps), 2)))
    members = [replace(sample(problem.feasible.space, rng), entropy_regularised=False) for _ in range(5)]
    numbers = {layer: number for number, layer in enumerate(features.stages.layers)}
    sums = [
        sum(scores[depth, numbers[layer]] for depth, layer in enumerate(member.architecture.layers))
        for member in members
    ]
    whole = features.rows(members) @ weights
    assert np.diff(sums) == pytest.approx(np.diff(whole))


def test_a_gap_is_pairs_of_layers_without_attention_between_which_one_closes():
    rows = ([1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [1, 0, 0, 0, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0])
    assert gap_share(np.array(rows, dtype=bool)) == pytest.approx([0, 0, 0.3, 0.2, 1])
    # with runs of 1 and 2 beside it, of ten pairs three end or begin there, and two go across
    has_attention = np.array([False, True, False, False, True])
    assert gap_shares_closed(has_attention) == pytest.approx([0, 0.5, 0.1, 0.1, 0.2])
    has_attention[1] = False
    assert gap_shares_closed(has_attention)[1] == pytest.approx(0.5)


def test_a_member_that_came_out_as_expected_makes_others_like_it_more_certain(features, problem):
    rng = np.random.default_rng(4)
    rows = features.rows([sample(problem.feasible.space, rng) for _ in range(6)])
    posterior = fit(features, Observations(rows[:0], np.zeros(0), np.zeros(0)))
    before = posterior.predict(rows)
    after = before.condition_on(0)
    assert after.mean == pytest.approx(before.mean)
    assert (after.deviation <= before.deviation + 1e-12).all()
    assert after.deviation[0] < 0.7 * before.deviation[0]
    both = after.condition_on(3)  # by the formula for conditional normals
    noise = (posterior.discrepancy**2 + SEED_NOISE**2) * np.eye(2)
    covariance = posterior.root @ posterior.root.T
    seen = rows[[0, 3]] @ covariance
    left = covariance - seen.T @ np.linalg.inv(seen @ rows[[0, 3]].T + noise) @ seen
    assert both.variance == pytest.approx(((rows @ left) * rows).sum(axis=1), rel=1e-9)
    assert both.crossed @ posterior.root.T == pytest.approx(rows @ left, abs=1e-12)


def test_what_diverges_is_learned():
    counts = np.column_stack([np.ones(40), np.linspace(0, 1, 40)])
    completed = (counts[:, 1] > 0.5).astype(float)
    likely = completion(counts, completion_weights(counts, completed))
    assert likely[0] < 0.3 < 0.7 < likely[-1]
    assert (np.diff(likely) > 0).all()
    all_well = completion(counts, completion_weights(counts, np.ones(40)))
    assert all_well.min() > 0.95


def test_members_like_those_that_diverged_are_put_off(problem, monkeypatch):
    strategy, rng = Trellis(problem), np.random.default_rng
    members = list(islice(problem.feasible.members(), 40))
    kept = strategy._counts(members)[:, -1]  # share of layers with a nonlinear FFN
    many = kept > np.median(kept)
    results = trained(problem, members)
    diverged = [
        replace(end, log_perplexity=None) if is_lost else end for end, is_lost in zip(results, many, strict=True)
    ]
    likely = strategy._completion(members, diverged)
    assert likely[many].max() < likely[~many].min()
    (first,) = strategy.propose(1, rng(0), [], results)
    lost = strategy._counts([first])
    monkeypatch.setattr(trellis, "completion", lambda counts, weights: (counts != lost).any(axis=1).astype(float))
    (other,) = strategy.propose(1, rng(0), [], results)
    assert (strategy._counts([other]) != lost).any()


def front_of(problem, strategy, num_generations, seed):
    members: list = []
    for generation in range(num_generations):
        known = trained(problem, members)
        members += strategy.propose(4, np.random.default_rng([seed, generation]), members, known)
    points = [(end.latency_s, end.log_perplexity) for end in trained(problem, members)]
    return hypervolume(points, (40.0, 6.0))


def test_the_searcher_finds_a_larger_front_than_stratified_draws(problem):
    draws = Draws(problem.feasible)
    listed = [member for member in problem.feasible.members() if draws.place_of(member).slice is not None]
    whole = hypervolume([(end.latency_s, end.log_perplexity) for end in trained(problem, listed)], (40.0, 6.0))
    ours = [front_of(problem, Trellis(problem), 5, seed) / whole for seed in range(2)]
    theirs = [front_of(problem, Stratified(problem), 5, seed) / whole for seed in range(2)]
    assert min(ours) > 0.95
    assert np.mean(ours) > np.mean(theirs)


def test_a_final_training_comes_first_and_of_later_evaluations_the_best_are_promoted(problem):
    """With two looks for each end after the first; ends were looked at before, and are good for their price."""
    proxy_evals, ends = list[Member](), list[Member]()
    for suggestion, known in asked_one_by_one(problem, RemainingBudget(proxy_evals=6, final_trainings=4, per_end=2.0)):
        (proxy_evals if suggestion.is_proxy else ends).append(suggestion.member)
        assert suggestion.is_proxy or suggestion.member in proxy_evals or len(known) == 1
        assert len(proxy_evals) >= 2 * (len(ends) - 1)
    assert (len(proxy_evals), len(ends)) == (6, 4)
    points = dict(points_of([*known.values()]))
    whole = hypervolume(list(points.values()), (40.0, 6.0))
    assert hypervolume([points[member] for member in ends], (40.0, 6.0)) > 0.97 * whole


def test_more_evaluations_for_each_final_training_do_not_delay_it(problem):
    asked = asked_one_by_one(problem, RemainingBudget(proxy_evals=24, final_trainings=5, per_end=6.0))
    is_proxy = [suggestion.is_proxy for suggestion, _ in islice(asked, 11)]
    assert is_proxy[0] is False
    assert 6 <= is_proxy.index(False, 1) - 1 <= 9


def test_a_promoted_candidate_is_not_asked_for_again(problem):
    strategy, rng = Trellis(problem), np.random.default_rng(0)
    members = [sample(problem.feasible.space, rng) for _ in range(6)]
    members = [member for member in dict.fromkeys(members) if problem.feasible.fits(member)]
    proxy_evals = [replace(outcome, deviation=0.02) for outcome in trained(problem, members)]
    (first,) = strategy.suggestions(1, rng, members, proxy_evals, RemainingBudget(proxy_evals=0, final_trainings=4))
    assert first.member in members
    proxy_evals = [replace(outcome, promoted=outcome.member == first.member) for outcome in proxy_evals]
    (second,) = strategy.suggestions(1, rng, members, proxy_evals, RemainingBudget(proxy_evals=0, final_trainings=3))
    assert second.member != first.member


def most_expensive(problem) -> Member:
    """A baseline: beyond the budget."""
    member = max(
        members(problem.feasible.space), key=lambda member: price_of(problem.feasible.priced, member).latency_s
    )
    assert not problem.feasible.fits(member)
    return member


def test_a_member_in_training_counts_at_its_predicted_loss(problem):
    draws = Draws(problem.feasible)
    members = [member for member in problem.feasible.members() if draws.place_of(member).slice is not None]
    strategy, rng = Trellis(problem), np.random.default_rng
    results = trained(problem, members[:8])
    alone = strategy.propose(4, rng(0), members[:8], results)
    assert strategy.propose(4, rng(0), [*members[:8], alone[0]], results)[0] != alone[0]
    assert strategy.propose(4, rng(0), [*members[:8], alone[0]], results)[0] == alone[1]


def test_proposals_do_not_depend_on_the_threads_of_blas():
    """This process has one thread of it."""
    code = "from tests.nas.searchers.gpt2_search import asked_for; print(*asked_for(), sep='\\n')"
    many = python("-c", code, env={"OPENBLAS_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}).splitlines()
    assert len(many) == 7
    assert asked_for() == many


def test_what_a_deep_space_holds_at_a_price_is_drawn_from():
    """Costs of optima are in units, those of slices in steps of the budget."""
    space = build_space(replace(load_definition("smollm2-135m"), dimensions=Dimensions(layers=8)))
    priced = price_space(space, load_pricer("semi2k", "lan"), 128)
    draws = Draws(within_budget(priced, Budget(latency_s=27.0)))
    stages = stages_of(draws.feasible)
    scores = np.random.default_rng(0).normal(size=stages.shape)
    optima = frontier(stages, scores)[::5]
    places = [draws.place_of(member_of_optimum(stages, optimum)).slice for optimum in optima]
    assert [draws.slice_of(optimum) for optimum in optima] == places
    assert len(set(places)) > 2
