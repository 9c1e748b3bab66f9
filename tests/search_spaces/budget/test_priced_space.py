from dataclasses import replace

import numpy as np
import pytest

from costmodel.cost import Price
from costmodel.estimate import Pricer, estimate
from costmodel.ops import Op
from search_spaces.budget.priced_space import cheapest, most_expensive, price_of, price_space
from search_spaces.definition import SHIPPED
from search_spaces.lower import lower
from search_spaces.notation import Member, name_of, parse
from search_spaces.space import SearchSpace, load_space, members, sample

SPACES = {name: load_space(name) for name in SHIPPED}


def whole(member: Member, pricer: Pricer, seq_len: int = 8) -> Price:
    return estimate(lower(member.architecture, seq_len), pricer).total


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("seq_len", [1, 64])
def test_a_path_costs_what_its_op_graph_costs(name: str, seq_len: int, pricer: Pricer) -> None:
    space, rng = SPACES[name], np.random.default_rng(0)
    priced = price_space(space, pricer, seq_len)
    for member in (sample(space, rng) for _ in range(30)):
        assert price_of(priced, member) == whole(member, pricer, seq_len)


def test_simplified_blocks_are_priced_per_depth(pricer: Pricer) -> None:
    """Layer 0 alone has a value projection; the price of a layer may depend on where it stands."""

    class PerLinear(type(pricer)):  # type: ignore[misc]
        def price(self, op: Op) -> Price:
            return Price(latency_s=float(type(op).__name__ == "Linear"), sent_bytes=0.0)

    tiny = SPACES["tiny"]
    space = replace(tiny, base=replace(tiny.base, block="sas"))
    priced = price_space(space, PerLinear(), 8)
    for member in members(space):
        assert price_of(priced, member) == whole(member, PerLinear())


@pytest.mark.parametrize("measure", ["latency_s", "sent_bytes"])
def test_cheapest_and_dearest_by_enumeration(small_space: SearchSpace, pricer: Pricer, measure: str) -> None:
    priced = price_space(small_space, pricer, 8)
    costs = {member: getattr(price_of(priced, member), measure) for member in members(small_space)}
    assert costs[cheapest(priced, measure)] == min(costs.values())
    assert costs[most_expensive(priced, measure)] == max(costs.values())


def test_cheapest_and_dearest_of_gpt2_small(pricer: Pricer) -> None:
    """Seconds as in the fixture: 12 softmax and the ends, then 25 LayerNorms and 12 GELUs."""
    priced = price_space(SPACES["gpt2-small"], pricer, 128)
    least, most = cheapest(priced), most_expensive(priced)
    assert name_of(least.architecture) == "SM_i12"
    assert price_of(priced, least).latency_s == 7 + 12 * 3 + 11
    assert name_of(most.architecture) == "SM+LN+G"
    assert price_of(priced, most).latency_s == 7 + 12 * (3 + 2 * 2 + 5) + 2 + 11


def test_outsiders_have_no_price(pricer: Pricer) -> None:
    priced = price_space(SPACES["tiny"], pricer, 8)
    with pytest.raises(ValueError, match="only members of space 'tiny' are priced here"):
        price_of(priced, parse("SM+LN+G", SPACES["tiny"].base))


def test_sequence_length_beyond_the_context_is_refused(pricer: Pricer) -> None:
    with pytest.raises(ValueError, match="`seq_len` must be between 1 and the context 128, but got 129"):
        price_space(SPACES["tiny"], pricer, 129)


@pytest.mark.parametrize("latency_s", [float("nan"), float("inf"), -1.0])
def test_impossible_prices_are_refused(pricer: Pricer, latency_s: float) -> None:
    class Broken(type(pricer)):  # type: ignore[misc]
        def price(self, op: Op) -> Price:
            return Price(latency_s=latency_s, sent_bytes=0.0)

    with pytest.raises(ValueError, match="prices under 'round' must be finite and non-negative"):
        price_space(SPACES["tiny"], Broken(), 8)


def test_prices_that_do_not_add_up_are_refused(pricer: Pricer) -> None:
    """`cheapest` and every count rest on additivity, so a lowering that broke it must not go unseen."""

    def lower_with_surcharge(architecture, seq_len):  # type: ignore[no-untyped-def]
        graph = lower(architecture, seq_len)
        mixed = len(set(architecture.layers)) > 1
        return (*graph, *graph) if mixed else tuple(graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("search_spaces.budget.priced_space.lower", lower_with_surcharge)
        with pytest.raises(ValueError, match="prices under 'round' must add up over layers"):
            price_space(SPACES["ladder"], pricer, 8)
