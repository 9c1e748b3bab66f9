"""Tests of ckks in a space: layers add up exactly, and what a placement over layers would save is bounded by that."""

from itertools import islice

import pytest

from costmodel.cost import Budget
from costmodel.protocols import load_pricer
from costmodel.protocols.ckks import place
from search_spaces.budget.feasible import within_budget
from search_spaces.budget.priced_space import price_architecture, price_of, price_space
from search_spaces.deployed import deployed
from search_spaces.lower import Workload, lower
from search_spaces.space import load_space, members

SEQ_LEN = 16


@pytest.fixture(scope="module")
def priced():
    return price_space(load_space("tiny"), load_pricer("ckks"), SEQ_LEN)


def test_members_of_tiny_cost_what_their_op_graphs_cost(priced):
    whole = {}
    for member in islice(members(priced.space), 0, None, 7):
        architecture = member.architecture
        if architecture not in whole:
            whole[architecture] = price_architecture(
                architecture, priced.pricer, Workload(prompt_len=SEQ_LEN), "folded"
            )
        assert price_of(priced, member).latency_s == pytest.approx(whole[architecture].price.latency_s, rel=1e-12)
        assert price_of(priced, member).sent_bytes == whole[architecture].price.sent_bytes
    assert len({cost.price.latency_s for cost in whole.values()}) > 5


def test_a_budget_counts_the_members_of_tiny_that_an_enumeration_counts(priced):
    seconds = sorted(price_of(priced, member).latency_s for member in members(priced.space))
    for share in (0.1, 0.5, 0.9):
        budget = (seconds[int(share * len(seconds))] + seconds[int(share * len(seconds)) + 1]) / 2
        fitting = sum(one <= budget for one in seconds)
        assert within_budget(priced, Budget(latency_s=budget)).num_feasible == fitting


def test_a_placement_over_all_layers_is_never_dearer_than_the_layers_of_tiny(priced):
    saved = set()
    for architecture in {deployed(member.architecture) for member in islice(members(priced.space), 0, None, 7)}:
        placed = priced.pricer.placed(lower(architecture, SEQ_LEN).nodes)
        fewest = place(placed.steps, priced.pricer.testbed.levels).counts["bootstrap"]
        saved.add(placed.counts["bootstrap"] - fewest)
    assert min(saved) >= 0
    assert max(saved) > 0
