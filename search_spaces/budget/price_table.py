"""Prices of very many members at once: members as rows of integers, prices by look-up.

A row holds, per layer, the number of its choice in `PriceTable.layers`. Adding up is exact where the prices of ops are
multiples of one power of two, as those of every protocol here are: bytes equal the op graph's to the byte.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import UserError
from search_spaces.architecture import Layer
from search_spaces.budget.edges import Edge, edges_by_depth
from search_spaces.budget.priced_space import PricedSpace
from search_spaces.notation import Member
from search_spaces.space import contains, member_of

MemberRows: TypeAlias = NDArray[np.integer[Any]]

MEASURES = ("latency_s", "sent_bytes", "rounds")
BLOCK_ROWS = 1 << 14  # priced at a time, so that what is in between stays in the cache


class Prices(NamedTuple):
    """One entry per row. sent_bytes are integers where the protocol's are; rounds is None where they are not known."""

    latency_s: NDArray[np.float64]
    sent_bytes: NDArray[Any]
    rounds: NDArray[np.int64] | None


class LevelPrices(NamedTuple):
    """One layer's choice, as arrays over edges: (number of the boundary before it) x (number of layers) + choice.

    onward: number of the boundary after it x (number of layers); where there is no such edge, and after that, the
        number of boundaries. prices: by measure, the source's added to the first step and the head's to the last.
    """

    onward: NDArray[np.intp]
    prices: dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PriceTable:
    """What looking up takes; made by `price_table`.

    layers: the distinct layers of the space, in the order of its graph. lost: where a row ends that is no member.
    """

    priced: PricedSpace
    layers: tuple[Layer, ...]
    steps: tuple[LevelPrices, ...] = field(repr=False)
    lost: int


def price_table(priced: PricedSpace) -> PriceTable:
    """The prices of a space's vertices as arrays."""
    layers = priced.space.layers
    names = [name for name in MEASURES if all(getattr(price, name) is not None for price in priced.prices.values())]
    steps = tuple(_step(priced, layers, names, edges) for edges in edges_by_depth(priced.space.graph))
    return PriceTable(priced=priced, layers=layers, steps=steps, lost=int(steps[-1].onward[-1]))


def price_many(table: PriceTable, rows: MemberRows) -> Prices:
    """The price of every row (members x layers).

    Raises UserError if the rows have another number of layers, or one of them is no member of the space.
    """
    num_layers, num_choices = len(table.steps), len(table.layers)
    if rows.ndim != 2 or rows.shape[1] != num_layers:
        raise UserError(f"`rows` must be members x {num_layers} layers, but got an array of shape {rows.shape}.")
    if rows.size and not 0 <= rows.min() <= rows.max() < num_choices:
        raise UserError(f"choices must be from 0 to {num_choices - 1}, but go from {rows.min()} to {rows.max()}.")
    sums = {name: np.zeros(len(rows), values.dtype) for name, values in table.steps[0].prices.items()}
    for start in range(0, len(rows), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        at = np.zeros(len(rows[block]), dtype=np.intp)
        for step, choices in zip(table.steps, rows[block].T, strict=True):
            edges = at + choices
            at = step.onward[edges]
            for name, values in step.prices.items():
                sums[name][block] += values[edges]
        if (at == table.lost).any():
            row = start + int(np.argmax(at == table.lost))
            raise UserError(f"rows must be members of space {table.priced.space.name!r}, but row {row} is none.")
    return Prices(latency_s=sums["latency_s"], sent_bytes=sums["sent_bytes"], rounds=sums.get("rounds"))


def rows_of(table: PriceTable, members: Iterable[Member]) -> NDArray[np.intp]:
    """Members as rows; recipes have no price. Raises UserError for one that is not in the space."""
    number = {layer: index for index, layer in enumerate(table.layers)}
    rows = []
    for member in members:
        if not contains(table.priced.space, member):
            raise UserError(f"only members of space {table.priced.space.name!r} have a row, but got {member!r:.200}.")
        rows.append([number[layer] for layer in member.architecture.layers])
    return np.array(rows, dtype=np.intp).reshape(-1, len(table.steps))


def member_of_row(table: PriceTable, row: MemberRows) -> Member:
    """The member that one row stands for, in or out of the space, without entropy regularisation."""
    return member_of(table.priced.space, [table.layers[index] for index in row], entropy_regularised=False)


def _step(priced: PricedSpace, layers: tuple[Layer, ...], names: Sequence[str], edges: Sequence[Edge]) -> LevelPrices:
    """The edges from each boundary of a level, and from one more, past the last, where the lost stay."""
    shape = 2 + max(edge.start for edge in edges), len(layers)
    onward = np.full(shape, (1 + max(edge.stop for edge in edges)) * len(layers), dtype=np.intp)
    at = {edge: (edge.start, layers.index(edge.choice.layer)) for edge in edges}
    for edge in edges:
        onward[at[edge]] = edge.stop * len(layers)
    prices = {}
    for name in names:
        whole = all(isinstance(getattr(price, name), int) for price in priced.prices.values())
        prices[name] = np.zeros(shape, dtype=np.int64 if whole else np.float64)
        for edge in edges:
            prices[name][at[edge]] = sum(getattr(priced.prices[vertex], name) for vertex in edge.passed)
    return LevelPrices(onward=onward.ravel(), prices={name: values.ravel() for name, values in prices.items()})
