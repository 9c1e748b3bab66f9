"""Exact programs against enumeration of a small space."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.cost import Budget
from costmodel.errors import UserError
from search_spaces.budget.feasible import within_budget
from search_spaces.budget.priced_space import price_of, price_space
from search_spaces.optima.cheapest_first import cheapest_first
from search_spaces.optima.optima import best, diverse, frontier, member_of_optimum
from search_spaces.optima.stages import forms_of, stages_of

SEQ_LEN = 8


@pytest.fixture(scope="module")
def priced(small_space, pricer):
    return price_space(small_space, pricer, SEQ_LEN)


@pytest.fixture(scope="module", params=[Budget(latency_s=47.0), Budget(latency_s=55.0, sent_bytes=4000.0)])
def stages(priced, request):
    return stages_of(within_budget(priced, request.param))


@pytest.fixture(scope="module")
def listed(stages):
    """Every architecture within the budget: its member, numbers of its layers, forms, latency and bytes."""
    numbers = {layer: number for number, layer in enumerate(stages.layers)}
    rows = []
    for member in stages.feasible.members():
        if not member.entropy_regularised:
            price = price_of(stages.feasible.priced, member)
            layers = [numbers[layer] for layer in member.architecture.layers]
            bytes_counted = price.sent_bytes if stages.limit[1] else 0.0
            rows.append((member, layers, forms_of(stages, member), price.latency_s, bytes_counted))
    assert len(rows) > 50
    return rows


def total(scores, layers):
    return sum(scores[depth, layer] for depth, layer in enumerate(layers))


def drawn(stages, seed):
    """Scores of a few values, so that some are equal, or of many."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=stages.shape) if seed % 2 else rng.integers(0, 4, size=stages.shape).astype(float)


@given(seed=st.integers(0, 1000))
def test_the_best_is_the_least_of_all(stages, listed, seed):
    scores = drawn(stages, seed)
    found = best(stages, scores)
    assert found is not None
    member = member_of_optimum(stages, found)
    assert found.score == pytest.approx(min(total(scores, layers) for _, layers, *_ in listed))
    assert stages.feasible.fits(member)
    assert found.latency_s == pytest.approx(price_of(stages.feasible.priced, member).latency_s)


@given(seed=st.integers(0, 1000), num=st.integers(1, 3), least=st.integers(1, 3))
def test_the_best_unlike_others_is_the_least_of_those(stages, listed, seed, num, least):
    scores = drawn(stages, seed)
    rng = np.random.default_rng(seed)
    others = [listed[int(row)] for row in rng.choice(len(listed), size=num)]

    def is_unlike(forms):
        return all(sum(one != two for one, two in zip(forms, other[2], strict=True)) >= least for other in others)

    left = [total(scores, layers) for _, layers, forms, *_ in listed if is_unlike(forms)]
    found = best(stages, scores, unlike=[other[0] for other in others], least_changes=least)
    assert (found is None) == (not left)
    if found is not None:
        assert found.score == pytest.approx(min(left))
        assert is_unlike(forms_of(stages, member_of_optimum(stages, found)))


@given(seed=st.integers(0, 1000))
def test_the_frontier_is_what_nothing_dominates(stages, listed, seed):
    scores = drawn(stages, seed)
    points = {(latency, sent, round(total(scores, layers), 9)) for _, layers, _, latency, sent in listed}
    expected = {
        point
        for point in points
        if not any(other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in points)
    }
    found = [(one.latency_s, one.sent_bytes, round(one.score, 9)) for one in frontier(stages, scores)]
    assert len(found) == len(set(found))
    assert {tuple(map(float, point)) for point in found} == {tuple(map(float, point)) for point in expected}
    assert [point[0] for point in found] == sorted(point[0] for point in found)


def test_diverse_optima_differ_from_one_another_and_get_no_better(stages):
    found = diverse(stages, drawn(stages, 1), 4, least_changes=2)
    forms = [forms_of(stages, member_of_optimum(stages, one)) for one in found]
    assert len(found) == 4
    assert all(one.score <= two.score for one, two in pairwise(found))
    for index, one in enumerate(forms):
        assert all(sum(a != b for a, b in zip(one, other, strict=True)) >= 2 for other in forms[:index])


def test_cheapest_first_is_all_of_them_by_price(stages, listed):
    found = list(cheapest_first(stages))
    prices = [price_of(stages.feasible.priced, member).latency_s for member in found]
    assert prices == sorted(prices)
    assert {tuple(forms_of(stages, member)) for member in found} == {tuple(forms) for _, _, forms, *_ in listed}
    assert len(found) == len({tuple(forms) for _, _, forms, *_ in listed})


def test_nothing_within_the_budget_is_no_optimum(priced):
    stages = stages_of(within_budget(priced, Budget(latency_s=1.0)))
    scores = np.zeros(stages.shape)
    assert best(stages, scores) is None
    assert frontier(stages, scores) == []
    assert list(cheapest_first(stages)) == []


@pytest.mark.parametrize(
    ("change", "said"), [(lambda scores: scores[1:], "depths x"), (lambda s: s * np.nan, "finite")]
)
def test_scores_that_do_not_fit_are_an_error(stages, change, said):
    with pytest.raises(UserError, match=said):
        best(stages, change(np.zeros(stages.shape)))
