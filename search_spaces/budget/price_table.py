"""Prices of very many members at once: members as rows of integers, prices by look-up.

A row holds, per layer, the number of its choice in `PriceTable.layers`. Adding up is exact where the prices of ops are
multiples of one power of two, as those of every protocol here are: bytes equal the op graph's to the byte.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import UserError
from search_spaces.architecture import Layer
from search_spaces.budget.priced_space import PricedSpace
from search_spaces.graph import Boundary, Choice, Head, Vertex, after
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
    graph = priced.space.graph
    layers = priced.space.layers
    levels: list[list[Boundary]] = [[] for _ in range(priced.space.base.num_layers + 1)]
    for vertex in graph:
        if isinstance(vertex, Boundary):
            levels[vertex.depth].append(vertex)
    steps = tuple(_step(priced, layers, *ends) for ends in pairwise(levels))
    return PriceTable(priced=priced, layers=layers, steps=steps, lost=len(levels[-1]) * len(layers))


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


def _step(
    priced: PricedSpace, layers: tuple[Layer, ...], level: list[Boundary], following: list[Boundary]
) -> LevelPrices:
    """The edges from each boundary of a level, and from one more, past the last, where the lost stay."""
    graph = priced.space.graph
    onward = np.full((len(level) + 1, len(layers)), len(following) * len(layers), dtype=np.intp)
    vertices: dict[tuple[int, int], list[Vertex]] = {}
    for row, boundary in enumerate(level):
        for column, layer in enumerate(layers):
            choice = Choice(depth=boundary.depth, layer=layer, state=boundary.state)
            if choice in graph:
                stop = after(graph, choice)
                onward[row, column] = following.index(stop) * len(layers)
                ends = (boundary, *(vertex for vertex in graph.succ[stop] if isinstance(vertex, Head)))
                vertices[row, column] = [choice, *(end for end in ends if end in priced.prices)]
    prices = {name: _summed(priced, name, vertices, onward.shape) for name in _known(priced)}
    return LevelPrices(onward=onward.ravel(), prices=prices)


def _summed(
    priced: PricedSpace, name: str, vertices: dict[tuple[int, int], list[Vertex]], shape: tuple[int, ...]
) -> NDArray[Any]:
    """By edge, the sum over its vertices; integers where all prices are."""
    whole = all(isinstance(getattr(price, name), int) for price in priced.prices.values())
    sums = np.zeros(shape, dtype=np.int64 if whole else np.float64)
    for edge, passed in vertices.items():
        sums[edge] = sum(getattr(priced.prices[vertex], name) for vertex in passed)
    return sums.ravel()


def _known(priced: PricedSpace) -> list[str]:
    return [name for name in MEASURES if all(getattr(price, name) is not None for price in priced.prices.values())]
