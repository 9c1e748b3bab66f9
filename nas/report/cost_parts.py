"""The parts of a cost, by kind of op or by layer."""

from collections.abc import Callable, Iterable

from costmodel.cost import Price, total_price
from costmodel.ops import Node, Op, OpGraph


def by_part(graphs: Iterable[OpGraph], price: Callable[[Op], Price], part: Callable[[Node], str]) -> dict[str, Price]:
    """The price of each part of some op graphs, in the order in which they come."""
    prices: dict[str, list[Price]] = {}
    for graph in graphs:
        for node in graph:
            prices.setdefault(part(node), []).append(price(node.op))
    return {name: total_price(those) for name, those in prices.items()}


def kind_of(node: Node) -> str:
    """The name of an op in figures."""
    return node.op.label or type(node.op).__name__
