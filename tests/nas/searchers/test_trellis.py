"""The parts of `trellis` against what defines them, and the whole on losses that are made up."""

from dataclasses import replace

import numpy as np
import pytest

from costmodel.cost import Budget
from nas.run.pareto import hypervolume
from nas.searchers import surrogate
from nas.searchers.draws import Draws
from nas.searchers.strategy import SearchProblem, Trained
from nas.searchers.surrogate import SEED_NOISE, features_of, fit
from nas.searchers.trellis import LEAST_RESULTS, Trellis, completion, completion_weights, expected_improvement
from nas.searchers.uniform import Stratified
from search_spaces.bases import Dimensions
from search_spaces.budget.feasible import within_budget
from search_spaces.budget.priced_space import price_of, price_space
from search_spaces.definition import load_definition
from search_spaces.notation import Member
from search_spaces.optima.stages import stages_of
from search_spaces.space import build_space, members, sample


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


def trained(problem, members):
    return [
        Trained(
            member=member,
            latency_s=price_of(problem.feasible.priced, member).latency_s,
            log_perplexity=loss_of(member),
        )
        for member in members
    ]


def test_expected_improvement_is_the_mean_over_draws():
    rng = np.random.default_rng(0)
    points, reference = [(2.0, 3.0), (4.0, 2.0), (7.0, 1.5), (11.0, 0.1), (1.0, 9.0)], (10.0, 5.0)
    latency_s, mean, deviation = np.array([1.0, 3.0, 5.0, 9.5, 12.0]), np.full(5, 2.2), np.full(5, 0.7)
    found = expected_improvement(latency_s, mean, deviation, points, reference)
    before = hypervolume(points, reference)
    drawn = rng.normal(2.2, 0.7, size=4000)
    for place, latency in enumerate(latency_s):
        added = [hypervolume([*points, (latency, loss)], reference) - before for loss in drawn]
        assert found[place] == pytest.approx(np.mean(added), abs=4 * np.std(added) / np.sqrt(len(added)) + 1e-12)


def test_a_fit_is_the_normal_distribution_given_the_results(features, problem):
    """By the block formula for conditional normals, on the joint covariance of results and one more member."""
    rng = np.random.default_rng(1)
    members = [sample(problem.feasible.space, rng) for _ in range(12)]
    losses = np.array([loss_of(member) for member in members[:-1]])
    rows = features.rows(members)
    posterior = fit(features, rows[:-1], list(range(11)), losses).posterior
    worths = [0.005, 0.01, 0.02, 0.05, 0.1]
    means = []
    for worth in worths:
        mean, covariance = features.prior(worth)
        joint = rows @ covariance @ rows.T + posterior.discrepancy**2 * np.eye(12)
        gain = joint[-1, :-1] @ np.linalg.inv(joint[:-1, :-1] + SEED_NOISE**2 * np.eye(11))
        means.append((rows[-1] @ mean + gain @ (losses - rows[:-1] @ mean), joint[-1, -1] - gain @ joint[:-1, -1]))
    predicted = posterior.predict(rows[-1:])
    found, deviation = float(predicted.mean[0]), float(predicted.deviation[0])
    assert any(found == pytest.approx(m, rel=1e-6) and deviation**2 == pytest.approx(v, rel=1e-6) for m, v in means)


def test_many_results_are_fitted_by_features_to_the_same(features, problem, monkeypatch):
    rng = np.random.default_rng(3)
    members = list({sample(problem.feasible.space, rng): None for _ in range(120)})
    rows, losses = features.rows(members), np.array([loss_of(member) for member in members])
    assert len(members) > rows.shape[1]
    fast = fit(features, rows, list(range(len(members))), losses)
    monkeypatch.setattr(surrogate, "_fit_of_many", None)  # would raise
    slow = fit(features, rows, [0, 0, *range(2, len(members))], losses)
    assert slow.r2() != fast.r2()  # two results of one member go the other way
    monkeypatch.undo()
    whole = np.equal.outer(range(len(members)), range(len(members))).astype(float)
    gram, crossed = rows.T @ rows, rows.T @ (losses - rows @ features.prior(0.02)[0])
    apart = losses - rows @ features.prior(0.02)[0]
    ways = [
        [surrogate._log_posterior(features, rows, whole, losses, *pair) for pair in surrogate.PAIRS],
        [
            surrogate._log_posterior_of_many(surrogate._whitened(features, gram)[pair[0]], crossed, apart, *pair)
            for pair in surrogate.PAIRS
        ],
    ]
    assert ways[0] == pytest.approx(ways[1], rel=1e-6)
    mean, covariance = features.prior(surrogate.PAIRS[int(np.argmax(ways[0]))][0])
    kernel = rows @ covariance @ rows.T + (fast.posterior.discrepancy**2 + SEED_NOISE**2) * whole
    gain = covariance @ rows.T @ np.linalg.inv(kernel)
    assert fast.posterior.mean == pytest.approx(mean + gain @ apart, abs=1e-6)
    assert fast.posterior.covariance == pytest.approx(covariance - gain @ rows @ covariance, abs=1e-8)
    inverse = np.linalg.inv(kernel)
    errors = inverse @ apart / inverse.diagonal()
    assert fast.r2() == pytest.approx(1 - errors @ errors / ((losses - losses.mean()) ** 2).sum(), abs=1e-6)


def test_what_is_left_out_is_predicted_from_the_rest(features, problem):
    rng = np.random.default_rng(2)
    members = [sample(problem.feasible.space, rng) for _ in range(20)]
    losses = np.array([loss_of(member) for member in members])
    rows = features.rows(members)
    assert fit(features, rows, list(range(20)), losses).r2() > 0.5
    assert fit(features, rows, list(range(20)), rng.permutation(losses)).r2() < 0.3


def test_scores_that_add_up_are_the_surrogate_but_for_what_is_scarce(features, problem):
    rng = np.random.default_rng(3)
    weights = rng.normal(size=features.rows([sample(problem.feasible.space, rng)]).shape[1])
    weights[-2:] = 0  # of what is scarce
    scores = features.additive(weights, [1, 1])
    members = [replace(sample(problem.feasible.space, rng), entropy_regularised=False) for _ in range(5)]
    numbers = {layer: number for number, layer in enumerate(features.stages.layers)}
    sums = [
        sum(scores[depth, numbers[layer]] for depth, layer in enumerate(member.architecture.layers))
        for member in members
    ]
    whole = features.rows(members) @ weights
    assert np.diff(sums) == pytest.approx(np.diff(whole))


def test_a_member_that_came_out_as_expected_makes_others_like_it_more_certain(features, problem):
    rng = np.random.default_rng(4)
    rows = features.rows([sample(problem.feasible.space, rng) for _ in range(6)])
    posterior = fit(features, rows[:0], [], np.zeros(0)).posterior
    before = posterior.predict(rows)
    after = before.condition_on(0)
    assert after.mean == pytest.approx(before.mean)
    assert (after.deviation <= before.deviation + 1e-12).all()
    assert after.deviation[0] < 0.7 * before.deviation[0]
    both = after.condition_on(3)  # by the formula for conditional normals
    noise = (posterior.discrepancy**2 + SEED_NOISE**2) * np.eye(2)
    seen = rows[[0, 3]] @ posterior.covariance
    left = posterior.covariance - seen.T @ np.linalg.inv(seen @ rows[[0, 3]].T + noise) @ seen
    assert both.variance == pytest.approx(((rows @ left) * rows).sum(axis=1), rel=1e-9)
    assert both.crossed == pytest.approx(rows @ left, abs=1e-12)


def test_what_diverges_is_learned():
    counts = np.column_stack([np.ones(40), np.linspace(0, 1, 40)])
    completed = (counts[:, 1] > 0.5).astype(float)
    likely = completion(counts, completion_weights(counts, completed))
    assert likely[0] < 0.3 < 0.7 < likely[-1]
    assert (np.diff(likely) > 0).all()
    all_well = completion(counts, completion_weights(counts, np.ones(40)))
    assert all_well.min() > 0.95


def front_of(problem, strategy, num_generations, seed):
    members: list = []
    for generation in range(num_generations):
        known = trained(problem, members)
        members += strategy.propose(4, np.random.default_rng([seed, generation]), members, known)
    points = [(one.latency_s, one.log_perplexity) for one in trained(problem, members)]
    return hypervolume(points, (40.0, 6.0))


def test_it_finds_more_than_draws_over_prices_do(problem):
    """Of 20 trainings; the exhaustive front of the space is 1."""
    draws = Draws(problem.feasible)
    listed = [member for member in problem.feasible.members() if draws.place_of(member).slice is not None]
    whole = hypervolume([(one.latency_s, one.log_perplexity) for one in trained(problem, listed)], (40.0, 6.0))
    ours = [front_of(problem, Trellis(problem), 5, seed) / whole for seed in range(3)]
    theirs = [front_of(problem, Stratified(problem), 5, seed) / whole for seed in range(3)]
    assert min(ours) > 0.95
    assert np.mean(ours) > np.mean(theirs)


def test_it_says_when_results_do_not_bear_it_out(problem):
    rng = np.random.default_rng(5)
    strategy = Trellis(problem)
    members = [sample(problem.feasible.space, rng) for _ in range(2 * LEAST_RESULTS)]
    sound = trained(problem, members)
    assert "bred" not in (strategy.remark(sound) or "")
    assert "R^2" in (strategy.remark(sound) or "")
    noise = [replace(one, log_perplexity=float(rng.normal(4, 0.5))) for one in sound]
    assert "bred from the front instead" in (strategy.remark(noise) or "")
    assert strategy.remark(sound[:2]) is None
    assert len(strategy.propose(4, rng, members, noise)) == 4


def most_expensive(problem) -> Member:
    """A baseline: beyond the budget."""
    found = max(members(problem.feasible.space), key=lambda one: price_of(problem.feasible.priced, one).latency_s)
    assert not problem.feasible.fits(found)
    return found


def test_trainings_of_before_are_known_but_are_no_results(problem):
    """It begins with the best of them; its own results alone say whether what is fitted holds."""
    rng = np.random.default_rng(7)
    known = [sample(problem.feasible.space, rng) for _ in range(40)]
    before = trained(problem, known)
    told = Trellis(replace(problem, known=tuple(before)))
    first = told.propose(4, rng, [most_expensive(problem)], [])
    assert set(first) <= set(known)
    fitting = [one for one in before if told.draws.place_of(one.member).slice is not None]
    best = min(fitting, key=lambda one: one.log_perplexity)
    assert best.log_perplexity in {one.log_perplexity for one in before if one.member in first}
    noise = [replace(one, log_perplexity=float(rng.normal(4, 0.5))) for one in trained(problem, known[:16])]
    assert "40 trainings of before" in (told.remark(noise) or "")
    assert "bred from the front instead" in (told.remark(noise) or "")


def test_what_is_in_training_counts_as_if_it_had_come_out(problem):
    draws = Draws(problem.feasible)
    members = [member for member in problem.feasible.members() if draws.place_of(member).slice is not None]
    strategy, rng = Trellis(problem), np.random.default_rng
    results = trained(problem, members[:8])
    alone = strategy.propose(4, rng(0), members[:8], results)
    assert strategy.propose(4, rng(0), [*members[:8], alone[0]], results)[0] != alone[0]
    assert strategy.propose(4, rng(0), [*members[:8], alone[0]], results)[0] == alone[1]
