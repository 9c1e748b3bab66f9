"""What a search begins with: forms of every kind, spread over the prices."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from costmodel.cost import Budget
from costmodel.protocols import load_pricer
from nas.searchers.anchors import MOST_ANCHORS, anchors, published_members
from nas.searchers.draws import IDLE_SHARE
from search_spaces.architecture import Layer
from search_spaces.bases import base_architecture
from search_spaces.budget.feasible import FeasibleSpace, within_budget
from search_spaces.budget.priced_space import Accounting, cheapest, most_expensive, price_of, price_space
from search_spaces.deployed import deployed_id
from search_spaces.notation import Member, parse
from search_spaces.space import load_space, with_first_layers


def begun(
    space: str, minutes: float, accounting: Accounting = "deployed", kept: Sequence[Layer] = ()
) -> tuple[FeasibleSpace, list[Member]]:
    priced = price_space(with_first_layers(load_space(space), kept), load_pricer(), 128, accounting)
    feasible = within_budget(priced, Budget(latency_s=60 * minutes))
    return feasible, anchors(feasible, published_members(feasible.space))


@pytest.mark.parametrize("minutes", [2.5, 5.0, 8.0])
def test_each_deployed_form_is_there_once_within_budget_over_the_whole_range(minutes: float) -> None:
    feasible, anchors = begun("gpt2-small", minutes)
    assert len({deployed_id(anchor.architecture) for anchor in anchors}) == len(anchors) <= MOST_ANCHORS
    assert all(feasible.fits(anchor) for anchor in anchors)
    prices = sorted(price_of(feasible.priced, anchor).latency_s for anchor in anchors)
    least = price_of(feasible.priced, cheapest(feasible.priced)).latency_s
    most = min(60 * minutes, price_of(feasible.priced, most_expensive(feasible.priced)).latency_s)
    assert prices[0] >= least + IDLE_SHARE * (most - least)
    assert prices[-1] > most - 0.4 * (most - least)
    gaps = [dearer - cheaper for cheaper, dearer in pairwise(prices)]
    assert max(gaps, default=0.0) < 0.4 * (most - least)


def test_the_first_layers_whole_and_a_few_relus_with_norms_that_fold_the_first_far_apart() -> None:
    feasible, anchors = begun("gpt2-small", 5.0)
    prices = [price_of(feasible.priced, member).latency_s / 60 for member in anchors]
    assert (prices[0], prices[1]) == (max(prices), min(prices))
    assert abs(prices[2] - sum(prices[:2]) / 2) < 0.5
    shallow = [parse(f"{count}xlSlRo-{12 - count}xooooo", feasible.space.base) for count in range(1, 11)]
    assert len(set(shallow) & set(anchors)) == 5
    assert shallow[9] == anchors[0]
    assert len([anchor for anchor in anchors if anchor not in shallow]) >= 3
    for member in anchors:
        kept = [layer.ffn != "none" for layer in member.architecture.layers]
        assert kept[0]
        assert kept == sorted(kept, reverse=True)


def test_layers_that_all_members_begin_with_are_in_front() -> None:
    kept = parse("SM+LN+G", base_architecture("gpt2-small")).architecture.layers[:2]
    _, anchors = begun("gpt2-small", 8.0, kept=kept)
    assert len(anchors) == MOST_ANCHORS
    assert all(anchor.architecture.layers[:2] == kept for anchor in anchors)
    assert {anchor.architecture.layers[11].attention for anchor in anchors} >= {"none", "softmax"}


def test_a_space_without_frozen_norms_has_none() -> None:
    _, anchors = begun("tiny", 5.0)
    assert anchors
    assert all(layer.norm1 == "none" for anchor in anchors for layer in anchor.architecture.layers)


def test_as_written_the_published_rows_and_the_cheapest_member() -> None:
    feasible, anchors = begun("ladder", 5.0, "written")
    within = [member for member in published_members(feasible.space) if feasible.fits(member)]
    assert anchors == list(dict.fromkeys([*within, cheapest(feasible.priced)]))
