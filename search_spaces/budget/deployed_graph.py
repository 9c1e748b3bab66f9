"""The deployed architectures of a space as a layered graph of its own: one path for each, so that they can be counted.

Several placements deploy to one architecture (see `search_spaces.deployed`). A placement spells out a deployed
architecture layer by layer, some of which vanish, and two of which may be joined; so a deployed architecture is a word
that a nondeterministic automaton accepts, whose states are the boundaries of the space's graph. Its subset
construction reads each word along one path. Words shorter than the space is deep end with empty layers.

Source: Rabin and Scott 1959, "Finite Automata and Their Decision Problems", https://doi.org/10.1147/rd.32.0114.
"""

from dataclasses import replace
from typing import TypeAlias

import networkx as nx

from search_spaces.architecture import LIVE_NORMS, NORM_RANK, Layer, implied_final_norm
from search_spaces.budget.priced_space import EMPTY_LAYER
from search_spaces.deployed import Region, deployed_layer
from search_spaces.graph import Boundary, Choice, Head, State, after, closed, source
from search_spaces.space import SearchSpace

Positions: TypeAlias = frozenset[Boundary]
Moves: TypeAlias = dict[Boundary, dict[Layer, list[Boundary]]]

ENDED = -1  # in the place of a set's number, where a word has ended


def deployed_graph(space: SearchSpace) -> nx.DiGraph:
    """The graph: boundaries, choices (layers as deployed), heads and sink, as in `search_spaces.graph`.

    The state of a boundary: number of the set of positions, rank of the live norm so far, and whether the layer before
    it is attention alone, behind which an FFN alone would be the same layer.
    """
    moves, numbers = _deployed_moves(space), dict[Positions, int]()
    joins = space.base.block_facts.join == "sequential"
    closures = _closures(moves, space.graph)
    positions = closures[source(space.graph)]
    level = {Boundary(depth=0, state=(numbers.setdefault(positions, 0), 0, 0)): positions}
    graph = nx.DiGraph()
    graph.add_nodes_from(level)
    for depth in range(space.base.num_layers):
        following: dict[Boundary, Positions] = {}
        edges: list[tuple[Choice, Boundary]] = []
        for boundary, held in level.items():
            _, rank, after_attention = boundary.state
            for layer, reached in _words(moves, closures, held, joins=joins).items():
                if after_attention and layer.attention == "none":
                    continue
                number = numbers.setdefault(reached, len(numbers))
                live = [NORM_RANK[norm] for norm in (layer.norm1, layer.norm2) if norm in LIVE_NORMS]
                state = (number, max(rank, *live, 0), int(joins and layer.ffn == "none"))
                edges.append(_edge(boundary, layer, state))
                following[edges[-1][1]] = reached
            if boundary.state[0] == ENDED or _accepts(space, held):
                edges.append(_edge(boundary, EMPTY_LAYER, (ENDED, rank, 0)))
                following[edges[-1][1]] = frozenset()
        # depth by depth, as the order of the vertices is that of every table made of them
        graph.add_edges_from((Boundary(depth=depth, state=choice.state), choice) for choice, _ in edges)
        graph.add_edges_from(edges)
        level = following
    for boundary, held in level.items():
        if boundary.state[0] == ENDED or _accepts(space, held):
            graph.add_edge(boundary, Head(final_norm=implied_final_norm(boundary.state[1], centred=True)))
    return closed(graph)


def _edge(start: Boundary, layer: Layer, state: State) -> tuple[Choice, Boundary]:
    choice = Choice(depth=start.depth, layer=layer, state=start.state)
    return choice, Boundary(depth=start.depth + 1, state=state)


def _deployed_moves(space: SearchSpace) -> Moves:
    """The layers that the choices of each boundary deploy to, and the boundaries after those."""
    known: dict[tuple[Layer, bool], Layer] = {}
    moves: Moves = {}
    for vertex in space.graph:
        if isinstance(vertex, Choice):
            start, stop = Boundary(depth=vertex.depth, state=vertex.state), after(space.graph, vertex)
            ahead = not stop.state[1]
            if (vertex.layer, ahead) not in known:
                region = Region(ahead=ahead, behind=False)
                known[vertex.layer, ahead] = deployed_layer(space.base, vertex.layer, region)
            reached = moves.setdefault(start, {}).setdefault(known[vertex.layer, ahead], [])
            if stop not in reached:
                reached.append(stop)
    return moves


def _closures(moves: Moves, graph: nx.DiGraph) -> dict[Boundary, Positions]:
    """Each boundary with those that only empty layers lie before."""
    closures: dict[Boundary, Positions] = {}
    for boundary in reversed([vertex for vertex in graph if isinstance(vertex, Boundary)]):
        onward = moves.get(boundary, {}).get(EMPTY_LAYER, ())
        closures[boundary] = frozenset((boundary, *(behind for stop in onward for behind in closures[stop])))
    return closures


def _words(
    moves: Moves, closures: dict[Boundary, Positions], positions: Positions, *, joins: bool
) -> dict[Layer, Positions]:
    """Where each deployed layer, whole or joined of two, leads."""
    reached: dict[Layer, set[Boundary]] = {}
    for position in positions:
        for layer, stops in moves.get(position, {}).items():
            if layer != EMPTY_LAYER:
                reached.setdefault(layer, set()).update(stops)
    words: dict[Layer, set[Boundary]] = {
        layer: set().union(*(closures[stop] for stop in stops)) for layer, stops in reached.items()
    }
    if joins:
        for first in [layer for layer in words if layer.ffn == "none"]:
            for position in tuple(words[first]):
                for second, stops in moves.get(position, {}).items():
                    if second.attention == "none" and second != EMPTY_LAYER:
                        whole = replace(first, norm2=second.norm2, ffn=second.ffn, stabiliser=second.stabiliser)
                        words.setdefault(whole, set()).update(*(closures[stop] for stop in stops))
    return {layer: frozenset(stops) for layer, stops in words.items()}


def _accepts(space: SearchSpace, positions: Positions) -> bool:
    """Whether the space's layers may all have been read."""
    return any(position.depth == space.base.num_layers for position in positions)
