import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.cost import Budget, Price
from costmodel.errors import InfeasibleError, UserError
from costmodel.estimate import Pricer
from costmodel.protocols import load_pricer
from search_spaces.architecture import Layer
from search_spaces.bases import MAX_LAYERS, Dimensions
from search_spaces.budget import counting
from search_spaces.budget import feasible as feasible_module
from search_spaces.budget.counting import Move, Table
from search_spaces.budget.feasible import Bounded, FeasibleSpace, check_feasible, price_slices, within_budget
from search_spaces.budget.priced_space import Measure, PricedSpace, cheapest, most_expensive, price_of, price_space
from search_spaces.notation import parse
from search_spaces.space import (
    Definition,
    SearchSpace,
    build_space,
    load_definition,
    load_space,
    member_at,
    members,
    num_members,
)


def budget_at(priced: PricedSpace, latency: float | None, sent: float | None) -> Budget:
    """A budget at these shares of the way from the cheapest to the most expensive member, in half steps of the prices.

    Prices of the fixture are whole seconds and hundreds of bytes: budgets meet them exactly or miss them by far more
    than the slack of half a unit an op.
    """
    bounds = {}
    axes: dict[Measure, tuple[float | None, float]] = {"latency_s": (latency, 0.5), "sent_bytes": (sent, 50.0)}
    for measure, (share, step) in axes.items():
        if share is not None:
            least, most = (
                getattr(price_of(priced, end(priced, measure)), measure) for end in (cheapest, most_expensive)
            )
            bounds[measure] = max(step, step * round((least + share * (most - least)) / step))
    return Budget(**bounds)


SHARES = st.none() | st.floats(-0.1, 1.1) | st.sampled_from([0.0, 0.5, 1.0])


@pytest.fixture(scope="module")
def agrees(small_space: SearchSpace, pricer: Pricer) -> Callable[..., bool]:
    """Whether count and list of the members within `budget_at` are those found by pricing every member."""
    priced = price_space(small_space, pricer, 8)
    costs = {member: price_of(priced, member) for member in members(small_space)}

    def check(latency: float | None, sent: float | None) -> bool:
        budget = budget_at(priced, latency, sent)
        feasible = within_budget(priced, budget)
        admitted = {member for member, cost in costs.items() if budget.admits(cost)}
        listed = list(feasible.members())
        return feasible.num_feasible == len(listed) and len(admitted) == len(listed) and admitted == set(listed)

    return check


@given(latency=SHARES, sent=SHARES)
def test_the_count_is_exact(agrees, latency, sent):
    assert agrees(latency, sent)


def assert_uniform(feasible: FeasibleSpace) -> None:
    """Chi-square over the feasible members, 5 draws expected of each; beyond +-5 standard deviations is a bug."""
    size, expected, rng = feasible.num_feasible, 5, np.random.default_rng(0)
    counts = Counter(feasible.sample(rng) for _ in range(size * expected))
    listed = list(feasible.members())
    assert set(counts) <= set(listed)
    statistic = sum((counts[member] - expected) ** 2 / expected for member in listed)
    assert abs(statistic - (size - 1)) < 5 * (2 * (size - 1)) ** 0.5


@pytest.mark.parametrize("shares", [(None, 0.3), (0.5, 0.4)])
def test_sampling_within_budget_is_uniform(small_space, pricer, shares):
    priced = price_space(small_space, pricer, 8)
    feasible = within_budget(priced, budget_at(priced, *shares))
    assert 20 < feasible.num_feasible < num_members(small_space)
    for part in (feasible, max(price_slices(feasible, 5), key=lambda part: part.num_feasible)):
        assert_uniform(part)
        assert set(part.members()) == {member for member in members(small_space) if part.fits(member)}


def test_sampling_is_uniform_where_ways_of_equal_cost_differ_in_number(make_space, pricer):
    """Two layers before the cut reach one cost in several ways, each standing for a different number of layers."""
    space = make_space(num_layers=4)
    priced = price_space(space, pricer, 8)
    feasible = within_budget(priced, Budget(latency_s=7 + 4 * 3 + 11 + 7))  # 7 s for norms and activations
    assert 300 < feasible.num_feasible < 1500
    assert_uniform(feasible)


@pytest.mark.parametrize("shares", [(0.8, None), (2.0, None), (0.8, 0.5), (None, 0.5)])
def test_slices_part_the_members_by_equal_steps_of_the_price(small_space, pricer, shares):
    priced = price_space(small_space, pricer, 8)
    feasible = within_budget(priced, budget_at(priced, *shares))
    slices = price_slices(feasible, 5)
    listed = [member for part in slices for member in part.members()]
    assert sorted(map(hash, listed)) == sorted(map(hash, feasible.members()))
    assert sum(part.num_feasible for part in slices) == feasible.num_feasible
    if feasible.budget.latency_s is None:
        assert len(slices) == 1
        return
    assert len(slices) > 2
    widths = {round(high - low, 6) for low, high in (part.latency_s_bounds for part in slices)}
    assert len(widths) == 1
    for part in slices:
        low, high = part.latency_s_bounds
        inside = set(part.members())
        assert all(low - 1e-9 < price_of(priced, member).latency_s < high + 1e-9 for member in inside)
        assert all(part.fits(member) == (member in inside) for member in islice(feasible.members(), 200))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("gpt2-papers", 2 * (2 * 2 + 1)),  # attention x (FFN x stabiliser + none), no norms
        ("gpt2-small", 2 * 2 * 2 + 1),  # no attention, norm2 frozen or none x FFN x stabiliser + none
    ],
)
def test_a_share_of_the_large_space(name, layers, pricer):
    """Those of the least latency as deployed: no live norm, no GELU, no ReLU, so linear or no FFN."""
    space = load_space(name)
    priced = price_space(space, pricer, 128)
    exactly = price_of(priced, cheapest(priced)).latency_s
    feasible = within_budget(priced, Budget(latency_s=exactly))
    assert feasible.num_feasible == 2 * layers**12  # recipes
    assert within_budget(priced, Budget(latency_s=1e300, sent_bytes=1e300)).num_feasible == num_members(space)
    assert within_budget(priced, Budget()).num_feasible == num_members(space)
    rng = np.random.default_rng(0)
    assert all(price_of(priced, feasible.sample(rng)).latency_s == exactly for _ in range(20))


def test_a_member_costing_the_budget_exactly_fits(pricer):
    class Thirds(type(pricer)):  # type: ignore[misc]
        def price(self, op):
            price = super().price(op)
            return type(price)(latency_s=price.latency_s / 3e12, sent_bytes=price.sent_bytes / 700)

    space = load_space("tiny")
    priced = price_space(space, Thirds(), 8)
    for member in islice(members(space), 0, None, 5):
        price = price_of(priced, member)
        assert within_budget(priced, Budget(latency_s=price.latency_s, sent_bytes=price.sent_bytes)).fits(member)


def test_members_of_the_deepest_space_are_listed_and_prices_beyond_64_bits_refused(pricer):
    class Ages(type(pricer)):  # type: ignore[misc]
        def price(self, op):
            return type(super().price(op))(latency_s=1e8, sent_bytes=0.0)

    with pytest.raises(ValueError, match="members of space 'tiny' must cost less than 194 days and 288 PB"):
        within_budget(price_space(load_space("tiny"), Ages(), 8), Budget(latency_s=1e9))
    members = ("SM+LN+G", "SM+R")  # few, since what is checked is the depth
    deepest = Definition(name="deepest", base="tiny", dimensions=Dimensions(layers=MAX_LAYERS), members=members)
    feasible = within_budget(price_space(build_space(deepest), pricer, 8), Budget(latency_s=1e6))
    assert next(feasible.members()).architecture.num_layers == MAX_LAYERS


@pytest.mark.parametrize("measures", [("latency_s",), ("sent_bytes",), ("latency_s", "sent_bytes")])
def test_where_exact_tables_are_too_large_costs_are_rounded_up_to_steps_of_the_budget(
    small_space, sizes, measures, monkeypatch
):
    priced = price_space(small_space, sizes, 8)
    budget = Budget(**{name: getattr(price_of(priced, most_expensive(priced, name)), name) for name in measures})
    exact = within_budget(priced, budget)
    count = counting.bounded_paths
    monkeypatch.setattr(feasible_module, "bounded_paths", lambda *asked: None if max(asked[2]) > 100 else count(*asked))
    feasible_space = within_budget(priced, budget)
    assert exact.tolerance == 0 < feasible_space.tolerance
    assert feasible_space.tolerance == pytest.approx(5 / 64, rel=0.02)
    surely = {
        member
        for member in members(small_space)
        if all(
            getattr(price_of(priced, member), name) <= most * (1 - feasible_space.tolerance)
            for name, most in budget.bounds.items()
        )
    }
    listed = set(feasible_space.members())
    assert surely <= listed <= set(exact.members())
    assert len(listed) == feasible_space.num_feasible < exact.num_feasible
    assert sum(part.num_feasible for part in price_slices(feasible_space, 4)) == feasible_space.num_feasible
    assert all(feasible_space.fits(member) for member in listed)
    rng = np.random.default_rng(0)
    assert {feasible_space.sample(rng) for _ in range(100)} <= listed


def test_a_deep_space_within_five_budgets_is_counted_and_what_is_drawn_fits_them_all(monkeypatch):
    monkeypatch.setattr(counting, "MAX_ROWS", 2**14)  # which five budgets exceed before they are rounded
    space = build_space(replace(load_definition("tiny"), dimensions=Dimensions(layers=24)))
    measures: dict[str, tuple[Measure, ...]] = {
        "semi2k": ("latency_s", "sent_bytes"),
        "sigma": ("latency_s", "sent_bytes", "key_bytes"),
    }
    asked = [(price_space(space, load_pricer(protocol), 8), names) for protocol, names in measures.items()]
    middle = member_at(space, num_members(space) // 2)
    first, *also = (
        Bounded(priced, Budget(**{name: getattr(price_of(priced, middle), name) * 1.02 for name in names}))
        for priced, names in asked
    )
    within = within_budget(*first, also)
    assert within.tolerance > 0
    assert 0 < within.num_feasible < num_members(space)
    rng = np.random.default_rng(0)
    for member in (within.sample(rng) for _ in range(20)):
        assert all(
            getattr(price_of(constraint.priced, member), name) <= most * (1 + 1e-9)
            for constraint in within.every
            for name, most in constraint.budget.bounds.items()
        )


@pytest.fixture(scope="module")
def keyed() -> PricedSpace:
    """Two layers under `sigma`, some seconds dearer in keys than in time."""
    space = build_space(replace(load_definition("tiny"), dimensions=Dimensions(layers=2)))
    return price_space(space, load_pricer("sigma"), 8)


@pytest.fixture(scope="module")
def keyed_costs(keyed: PricedSpace) -> list[Price]:
    return [price_of(keyed, member) for member in members(keyed.space)]


@pytest.fixture(scope="module")
def online(keyed: PricedSpace) -> PricedSpace:
    """The same layers under a protocol without keys."""
    return price_space(keyed.space, load_pricer("semi2k", "wan"), 8)


def test_infeasible_names_the_cheapest_and_its_cost(small_space, pricer, keyed):
    ladder, small = (price_space(space, pricer, 8) for space in (load_space("ladder"), small_space))
    other = price_space(keyed.space, load_pricer("semi2k"), 8)
    message = (
        "no member of space 'ladder' is within the budget of 50 s at sequence length 8 under 'round'; "
        "the cheapest, SM+ScFFN, costs 54 s and 500 B; raise the budget or shorten the sequence."
    )
    two = [Bounded(keyed, Budget(latency_s=1e-6))]
    for feasible, said in (
        (within_budget(ladder, Budget(latency_s=50)), re.escape(message)),
        (within_budget(small, Budget(latency_s=1, sent_bytes=1)), "of 1 s and 1 B at .* the cheapest, SM_i3, costs"),
        (within_budget(keyed, Budget(latency_s=60.0, key_bytes=1.0)), "of 1.00 min and 1 B of keys .* of keys; raise"),
        (within_budget(other, Budget(latency_s=60.0), two), "of 1.00 min under 'semi2k' and 1e-06 s under 'sigma' at"),
    ):
        assert feasible.num_feasible == 0
        for use in (check_feasible, lambda feasible: feasible.sample(np.random.default_rng(0))):
            with pytest.raises(InfeasibleError, match=said):
                use(feasible)
    within = within_budget(price_space(load_space("tiny"), pricer, 8), Budget(latency_s=1e6))
    assert not within.fits(parse("SM+LN+G", within.space.base))
    check_feasible(within)  # which passes, since there are others


def test_budgets_that_cannot_be_counted_are_refused(keyed, monkeypatch):
    with pytest.raises(UserError, match="but protocol semi2k has none"):
        within_budget(price_space(keyed.space, load_pricer("semi2k"), 8), Budget(key_bytes=1e9))
    monkeypatch.setattr(counting, "MAX_ROWS", 0)
    with pytest.raises(UserError, match="within 1 s and 1.00 GB of keys need tables that are too large to be counted"):
        within_budget(keyed, Budget(latency_s=1.0, key_bytes=1e9))


@given(shares=st.tuples(*[st.floats(0.0, 1.0)] * 3))
def test_keys_are_counted_as_exactly_as_latency_and_bytes(keyed, keyed_costs, shares):
    measures: tuple[Measure, ...] = ("latency_s", "sent_bytes", "key_bytes")
    bounds: dict[str, float] = {}
    for measure, share in zip(measures, shares, strict=True):
        every = sorted({getattr(cost, measure) for cost in keyed_costs})
        place = int(share * (len(every) - 1))  # halfway to the next, so that rounding is of no account
        bounds[measure] = (every[place] + every[min(place + 1, len(every) - 1)]) / 2 + 1e-9
    for asked in ({"key_bytes"}, {"latency_s", "key_bytes"}, set(measures)):
        budget = Budget(**{measure: bounds[measure] for measure in asked})  # type: ignore[arg-type]
        expected = sum(all(getattr(cost, name) <= most for name, most in budget.bounds.items()) for cost in keyed_costs)
        feasible = within_budget(keyed, budget)
        assert feasible.num_feasible == expected == len(list(feasible.members()))


@given(shares=st.tuples(*[st.floats(0.0, 1.0)] * 3))
def test_members_within_the_budgets_of_two_protocols(keyed, online, shares):
    axes: list[tuple[PricedSpace, Measure]] = [(online, "latency_s"), (keyed, "latency_s"), (keyed, "key_bytes")]
    bounds = []
    for (priced, measure), share in zip(axes, shares, strict=True):
        low, high = (getattr(price_of(priced, end(priced, measure)), measure) for end in (cheapest, most_expensive))
        bounds.append(low + share * (high - low))
    first, second = Budget(latency_s=bounds[0]), Budget(latency_s=bounds[1], key_bytes=bounds[2])
    feasible_space = within_budget(online, first, [Bounded(keyed, second)])
    expected = set(within_budget(online, first).members()) & set(within_budget(keyed, second).members())
    assert (set(feasible_space.members()), feasible_space.num_feasible) == (expected, len(expected))
    assert all(feasible_space.fits(member) for member in expected)


def extended(counts: dict[tuple[int, ...], int], moves: dict[tuple[int, ...], int]) -> Table | None:
    """Ways with these costs, extended by as many layers of each cost; costs of more than (9, 3) are not counted."""
    ways = [Move(0, 0, cost, [Layer()] * num) for cost, num in moves.items()]
    digits = [[num >> counting.DIGIT * place & 2**counting.DIGIT - 1 for num in counts.values()] for place in range(2)]
    return counting._extended(
        Table(np.array([*counts]), np.array([digits])), ways, np.array([[9, 3]]), counting.MAX_ROWS
    )


def test_numbers_of_ways_are_exact_beyond_64_bits():
    table = extended({(1, 2): 5, (2, 1): 2**40 - 1, (2, 2): 2**62 + 3}, {(0, 0): 3, (0, 1): 1})
    assert table is not None
    found = dict(zip(map(tuple, table.costs.tolist()), table.counts[0], strict=True))
    assert found == {(1, 2): 15, (1, 3): 5, (2, 1): 3 * (2**40 - 1), (2, 2): 3 * 2**62 + 8 + 2**40, (2, 3): 2**62 + 3}


@pytest.mark.parametrize(("name", "value"), [("MAX_ROWS", 1), ("ODD", np.array([1, 1]))])
def test_tables_too_large_or_with_two_costs_of_one_key_are_not_made(name, value, monkeypatch):
    """By odd numbers 1 and 1, (1, 2) and (2, 1) have one key."""
    assert extended({(0, 0): 1}, {(1, 2): 5, (2, 1): 7}) is not None
    monkeypatch.setattr(counting, name, value)
    assert extended({(0, 0): 1}, {(1, 2): 5, (2, 1): 7}) is None
