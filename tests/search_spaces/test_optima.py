import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.cost import Budget
from costmodel.errors import UserError
from search_spaces.budget.feasible import within_budget
from search_spaces.budget.priced_space import price_of, price_space
from search_spaces.deployed import deployed
from search_spaces.optima import frontier, member_of_optimum, stages_of

SEQ_LEN = 8


@pytest.fixture(scope="module")
def priced(small_space, pricer):
    return price_space(small_space, pricer, SEQ_LEN)


@pytest.fixture(scope="module", params=[Budget(latency_s=47.0), Budget(latency_s=55.0, sent_bytes=4000.0)])
def stages(priced, request):
    return stages_of(within_budget(priced, request.param))


@pytest.fixture(scope="module")
def listed(stages):
    """Every architecture within the budget: numbers of its layers, what is priced of it, its costs that are bounded."""
    numbers = {layer: number for number, layer in enumerate(stages.layers)}
    rows = []
    for member in stages.feasible.members():
        if not member.entropy_regularised:
            price = price_of(stages.feasible.priced, member)
            layers = [numbers[layer] for layer in member.architecture.layers]
            rows.append((layers, forms_of(member), price.latency_s, *[price.sent_bytes] * (len(stages.limit) - 1)))
    assert len(rows) > 50
    return rows


def forms_of(member):
    """The layers of a member as they are priced: deployed wherever they stand so."""
    return deployed(member.architecture).layers


def total(scores, layers):
    return sum(scores[depth, layer] for depth, layer in enumerate(layers))


def drawn(stages, seed):
    """Scores of a few values, so that some are equal, or of many."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=stages.shape) if seed % 2 else rng.integers(0, 4, size=stages.shape).astype(float)


@given(seed=st.integers(0, 1000))
def test_the_best_of_the_frontier_is_the_least_of_all(stages, listed, seed):
    scores = drawn(stages, seed)
    optimum = min(frontier(stages, scores), key=lambda optimum: optimum.score)
    member = member_of_optimum(stages, optimum)
    assert optimum.score == pytest.approx(min(total(scores, layers) for layers, *_ in listed))
    assert stages.feasible.fits(member)
    assert optimum.latency_s == pytest.approx(price_of(stages.feasible.priced, member).latency_s)


@given(seed=st.integers(0, 1000))
def test_the_frontier_is_what_nothing_dominates(stages, listed, seed):
    scores = drawn(stages, seed)
    points = {(*costs, round(total(scores, layers), 9)) for layers, _, *costs in listed}
    expected = {
        point
        for point in points
        if not any(other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in points)
    }
    frontier_points = [
        (optimum.latency_s, *(sent / 2**4 for sent in optimum.cost[1:]), round(optimum.score, 9))
        for optimum in frontier(stages, scores)
    ]
    assert len(frontier_points) == len(set(frontier_points))
    assert {tuple(map(float, point)) for point in frontier_points} == {tuple(map(float, point)) for point in expected}
    assert [point[0] for point in frontier_points] == sorted(point[0] for point in frontier_points)


def test_nothing_within_the_budget_is_no_optimum(priced):
    stages = stages_of(within_budget(priced, Budget(latency_s=1.0)))
    scores = np.zeros(stages.shape)
    assert frontier(stages, scores) == []


@pytest.mark.parametrize(
    ("change", "said"), [(lambda scores: scores[1:], "depths x"), (lambda s: s * np.nan, "finite")]
)
def test_scores_that_do_not_fit_are_an_error(stages, change, said):
    with pytest.raises(UserError, match=said):
        frontier(stages, change(np.zeros(stages.shape)))
