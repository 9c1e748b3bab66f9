"""The edges of the layered graph, depth by depth, for counting, look-ups and exact programs."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import networkx as nx

from search_spaces.graph import Boundary, Choice, State, Vertex, source

Cost: TypeAlias = tuple[int, ...]


class Edge(NamedTuple):
    """A choice between two boundaries, numbered within their levels in the order of the graph.

    `passed` are the vertices whose cost it carries: the choice, the source for the first layer, the head for the last.
    """

    start: int
    stop: int
    choice: Choice
    passed: tuple[Vertex, ...]

    def cost(self, costs: Mapping[Vertex, Cost]) -> Cost:
        """Return the cost, in the units of `costs`, which must have every vertex in `passed`."""
        return added(costs[vertex] for vertex in self.passed)


def added(costs: Iterable[Cost]) -> Cost:
    """Return the sum of costs, measure by measure; there must be one."""
    return tuple(map(sum, zip(*costs, strict=True)))


def edges_by_depth(graph: nx.DiGraph) -> list[list[Edge]]:
    """Return every choice of each depth, in the order of the graph."""
    places: dict[tuple[int, State], int] = {}  # keyed by the depth and state that a choice shares with its boundary
    counts = Counter[int]()
    for vertex in graph:
        if isinstance(vertex, Boundary):
            places[vertex.depth, vertex.state] = counts[vertex.depth]
            counts[vertex.depth] += 1
    levels: list[list[Edge]] = [[] for _ in range(max(counts))]
    for choice, onward in graph.adjacency():
        if isinstance(choice, Choice):
            (stop,) = onward
            passed = choice, *(() if choice.depth else (source(graph),))
            if stop.depth == len(levels):
                passed += tuple(graph.succ[stop])
            numbers = places[choice.depth, choice.state], places[stop.depth, stop.state]
            levels[choice.depth].append(Edge(*numbers, choice, passed))
    return levels
