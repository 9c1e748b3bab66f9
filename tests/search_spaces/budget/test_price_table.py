from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.cost import Price
from costmodel.estimate import Pricer, estimate
from costmodel.ops import Op
from costmodel.protocols import load_pricer
from search_spaces.budget.price_table import (
    BLOCK_ROWS,
    PriceTable,
    member_of_row,
    price_many,
    price_table,
    rows_of,
)
from search_spaces.budget.priceable import priceable
from search_spaces.budget.priced_space import Accounting, price_space
from search_spaces.definition import SHIPPED
from search_spaces.deployed import deployed
from search_spaces.lower import lower
from search_spaces.space import SearchSpace, load_space, member_at, members, num_members
from search_spaces.workload import Workload

PRICERS = {"published": load_pricer(), "semi2k": load_pricer("semi2k")}
SPACES = {name: load_space(name) for name in SHIPPED}


@cache
def table_of(space: str, pricer: str, accounting: Accounting = "deployed") -> PriceTable:
    """Of what the protocol can price of a shipped space."""
    found = priceable(SPACES[space], PRICERS[pricer], Workload(prompt_len=32), accounting)
    return price_table(price_space(found.space, PRICERS[pricer], 32, accounting))


@pytest.mark.parametrize(
    ("space", "pricer", "accounting"), [*product(SHIPPED, PRICERS, ["deployed"]), ("gpt2-small", "semi2k", "written")]
)
@settings(max_examples=10)
@given(data=st.data())
def test_rows_cost_what_their_op_graphs_cost(
    space: str, pricer: str, accounting: Accounting, data: st.DataObject
) -> None:
    """Bytes and rounds are equal, and so are seconds, since ops cost multiples of one step."""
    table = table_of(space, pricer, accounting)
    size = num_members(table.priced.space)
    drawn = [member_at(table.priced.space, data.draw(st.integers(0, size - 1))) for _ in range(3)]
    prices = price_many(table, rows_of(table, drawn))
    for row, member in enumerate(drawn):
        run = member.architecture if accounting == "written" else deployed(member.architecture)
        whole = estimate(lower(run, 32), PRICERS[pricer]).total
        assert (prices.latency_s[row], prices.sent_bytes[row]) == (whole.latency_s, whole.sent_bytes)
        assert (prices.rounds is None) == (whole.rounds is None)
        assert prices.rounds is None or prices.rounds[row] == whole.rounds


def test_bytes_are_integers_where_the_protocol_counts_them() -> None:
    prices = price_many(table_of("gpt2-papers", "semi2k"), np.zeros((1, 12), dtype=np.uint8))
    assert prices.sent_bytes.dtype == np.int64
    assert prices.rounds is not None
    assert price_many(table_of("gpt2-papers", "published"), np.zeros((1, 12), dtype=np.uint8)).rounds is None


@pytest.mark.parametrize("space", SHIPPED)
def test_rows_are_members_and_back(space: str) -> None:
    table = table_of(space, "published")
    size = num_members(table.priced.space)
    drawn = [member_at(table.priced.space, index) for index in (0, size // 3, size - 1)]
    plain = [replace(member, entropy_regularised=False) for member in drawn]
    assert [member_of_row(table, row) for row in rows_of(table, drawn)] == plain


def test_every_row_of_a_small_space_and_no_other(small_space: SearchSpace, pricer: Pricer) -> None:
    """With constraints and without: whatever is no member is refused, whatever is has its price."""
    table = price_table(price_space(small_space, pricer, 8))
    known = {tuple(row) for row in rows_of(table, members(small_space)).tolist()}
    for row in np.ndindex(*(len(table.layers),) * 3):
        if row in known:
            member = member_of_row(table, np.array(row))
            whole = estimate(lower(deployed(member.architecture), 8), pricer).total
            assert price_many(table, np.array([row])).latency_s[0] == whole.latency_s
        else:
            with pytest.raises(ValueError, match="rows must be members of space 'small', but row 0 is none"):
                price_many(table, np.array([row]))


def test_blocks_join(pricer: Pricer) -> None:
    table = price_table(price_space(SPACES["tiny"], pricer, 8))
    rows = np.random.default_rng(0).integers(0, len(table.layers), (2 * BLOCK_ROWS + 3, 2))
    prices = price_many(table, rows)
    for row in (0, BLOCK_ROWS - 1, BLOCK_ROWS, len(rows) - 1):
        assert price_many(table, rows[row : row + 1]).latency_s[0] == prices.latency_s[row]
    assert price_many(table, rows[:0]).latency_s.shape == (0,)


def test_layers_are_priced_per_depth(pricer: Pricer) -> None:
    """Layer 0 of He and Hofmann's block alone has a value projection."""

    class PerLinear(type(pricer)):  # type: ignore[misc]
        def price(self, op: Op) -> Price:
            return Price(latency_s=float(type(op).__name__ == "Linear"), sent_bytes=0.0)

    tiny = SPACES["tiny"]
    table = price_table(price_space(replace(tiny, base=replace(tiny.base, block="sas")), PerLinear(), 8))
    member = member_of_row(table, np.zeros(2, dtype=int))
    whole = estimate(lower(deployed(member.architecture), 8), PerLinear()).total
    assert price_many(table, np.zeros((1, 2), dtype=int)).latency_s[0] == whole.latency_s


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((4, 3), dtype=int), r"`rows` must be members x 12 layers, but got an array of shape \(4, 3\)"),
        (np.zeros(12, dtype=int), r"`rows` must be members x 12 layers, but got an array of shape \(12,\)"),
        (np.full((1, 12), 84), "choices must be from 0 to 83, but go from 84 to 84"),
        (np.full((1, 12), -1), "choices must be from 0 to 83, but go from -1 to -1"),
    ],
)
def test_bad_rows_are_refused(rows: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        price_many(table_of("gpt2-papers", "published"), rows)


def test_outsiders_have_no_row() -> None:
    with pytest.raises(ValueError, match="only members of space 'tiny' have a row"):
        rows_of(table_of("tiny", "published"), [member_at(SPACES["ladder"], 0)])
