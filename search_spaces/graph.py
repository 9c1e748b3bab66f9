"""The layered graph of a search space, in which each source-to-sink path is one architecture.

A path alternates boundaries and choices, `Boundary(0) -> Choice(0) -> Boundary(1) -> ... -> Boundary(L) -> Head ->
SINK`. The state of a boundary decides which layers may follow, so a constraint only removes vertices. Every choice has
exactly one predecessor and one successor, and every vertex is on some path. Vertices are inserted depth by depth and,
at each boundary, in the order of the alphabet (the list of distinct layers), which is the order of enumeration.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

import networkx as nx

from costmodel.errors import UserError
from search_spaces.architecture import Layer, implied_final_norm, least_rank, reader_norms
from search_spaces.block import Block
from search_spaces.deployed import reads_live_norm
from search_spaces.forms import CENTRED_NORMS, NORMS, Norm
from search_spaces.inner import keeps_cap

State: TypeAlias = tuple[int, ...]
Transition: TypeAlias = Callable[[int, State, Layer], State | None]
ConstraintName = Literal["ffn-removed-only-in-deepest-suffix"]

SINK: Literal["sink"] = "sink"


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """The point before layer `depth`, or after the last layer.

    `state` has, in this order: the rank of the highest norm so far; 1 once a live norm (one that depends on the data
    after folding) has read the residual stream; 1 once a sub-layer has read it without a norm that subtracts the mean,
    as long as that matters to the final norm; 1 once the logit cap is sure to stay, because a layer keeps the score cap
    or scores have none; then the states of the constraints, or, for listed placements, the set of endings, by number.
    """

    depth: int
    state: State


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The choice of `layer` at `depth`, from the boundary with the same depth and state."""

    depth: int
    layer: Layer
    state: State


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The end of a path: final norm and vocabulary projection. is_capped: whether a logit cap of the base stays."""

    final_norm: Norm
    is_capped: bool = True


Vertex: TypeAlias = Boundary | Choice | Head | Literal["sink"]


# Each constraint takes its state (0 at the source) and the next layer, and returns the new state, or None to refuse.
CONSTRAINTS: dict[ConstraintName, Callable[[int, Layer], int | None]] = {
    # refuse an FFN in a layer behind one without FFN (arXiv 2410.13060, the `_ip` rows)
    "ffn-removed-only-in-deepest-suffix": lambda removed, layer: (
        None if removed and layer.ffn != "none" else int(layer.ffn == "none")
    )
}


def free_graph(
    num_layers: int,
    block: Block,
    alphabet: Sequence[Layer],
    constraints: Sequence[ConstraintName],
    *,
    withheld: Mapping[str, Collection[int]] = MappingProxyType({}),
    first_layers: Sequence[Layer] = (),
    has_caps: bool = False,
) -> nx.DiGraph:
    """Return the graph of all sequences of `num_layers` layers from the alphabet that the constraints allow.

    `withheld` maps an attention to depths that do not offer it; every sequence begins with `first_layers`; `has_caps`
    says whether the base has a score cap. A UserError is raised if no sequence is left.
    """

    everywhere = frozenset(alphabet)

    def step(depth: int, state: State, layer: Layer) -> State | None:
        offered = first_layers[depth : depth + 1] or everywhere
        if layer not in offered or depth in withheld.get(layer.attention, ()):
            return None
        after = [CONSTRAINTS[name](seen, layer) for name, seen in zip(constraints, state[4:], strict=True)]
        allowed = tuple(seen for seen in after if seen is not None)
        return (*_head(block, depth, state, layer, has_caps), *allowed) if len(allowed) == len(after) else None

    distinct = list(dict.fromkeys((*alphabet, *first_layers)))
    return _layered_graph(num_layers, distinct, (0,) * (4 + len(constraints)), step)


def listed_graph(block: Block, members: Iterable[tuple[Layer, ...]], *, has_caps: bool = False) -> nx.DiGraph:
    """Return the graph of exactly the given placements, all of one length; repeated ones count once.

    The last number of a state is that of a set of possible endings, so that placements share common ends. `has_caps`
    says whether the base has a score cap. A UserError is raised if there is no placement, or their lengths differ.
    """
    words = list(dict.fromkeys(members))
    if len({len(word) for word in words}) != 1:
        raise UserError("members must be at least one and have the same number of layers.")
    endings = [frozenset(words)]
    numbers = {endings[0]: 0}

    def step(depth: int, state: State, layer: Layer) -> State | None:
        rest = frozenset(word[1:] for word in endings[state[4]] if word[0] == layer)
        if not rest:
            return None
        if numbers.setdefault(rest, len(endings)) == len(endings):
            endings.append(rest)
        return (*_head(block, depth, state, layer, has_caps), numbers[rest])

    alphabet = list(dict.fromkeys(layer for word in words for layer in word))
    return _layered_graph(len(words[0]), alphabet, (0, 0, 0, 0, 0), step)


def source(graph: nx.DiGraph) -> Boundary:
    """Return the boundary that every path starts from."""
    first: Boundary = next(iter(graph))
    return first


def after(graph: nx.DiGraph, choice: Choice) -> Boundary:
    """Return the boundary that a choice leads to."""
    boundary: Boundary = next(graph.successors(choice))
    return boundary


def nth_layers(
    graph: nx.DiGraph, start: Boundary, stop: int, index: int, num_paths: Callable[[Choice], int]
) -> list[Layer]:
    """Return the layers of path number `index` (from 0) among all paths from `start` to depth `stop`.

    `num_paths` returns, for a choice, the number of paths to depth `stop` that begin with it.
    """
    boundary, layers = start, list[Layer]()
    while boundary.depth < stop:
        for choice in graph.succ[boundary]:
            if index < num_paths(choice):
                break
            index -= num_paths(choice)
        layers.append(choice.layer)
        boundary = after(graph, choice)
    return layers


def walk(graph: nx.DiGraph, start: Boundary, layers: Iterable[Layer]) -> list[Boundary | Choice] | None:
    """Return the vertices that these layers pass from `start`, both ends included; None if there is no such path."""
    boundary, path = start, list[Boundary | Choice]([start])
    for layer in layers:
        choice = Choice(depth=boundary.depth, layer=layer, state=boundary.state)
        try:
            boundary = after(graph, choice)
        except nx.NetworkXError:  # no such vertex; checking first would take 1.5 times as long
            return None
        path += [choice, boundary]
    return path


def completions(graph: nx.DiGraph) -> dict[Vertex, int]:
    """Return the exact number of paths from each vertex to the sink."""
    counts: dict[Vertex, int] = {SINK: 1}
    for vertex in reversed(list(graph)):
        if vertex != SINK:
            counts[vertex] = sum(counts[successor] for successor in graph.succ[vertex])
    return counts


def _head(block: Block, depth: int, state: State, layer: Layer, has_caps: bool) -> tuple[int, int, int, int]:
    """Return the first four numbers of the state after a layer (see `Boundary`)."""
    norms = reader_norms(layer)
    rank = max(state[0], *(NORMS[norm].rank for norm in norms), least_rank(block))
    live = state[1] or reads_live_norm(block, depth, layer)
    uncentred = state[2] or any(norm not in CENTRED_NORMS for norm in norms)
    is_capped = state[3] or not has_caps or keeps_cap(layer)
    return rank, int(live), int(uncentred and rank <= NORMS["frozen-layernorm"].rank), int(is_capped)


def _layered_graph(num_layers: int, alphabet: Sequence[Layer], initial: State, step: Transition) -> nx.DiGraph:
    """Return the graph of the transitions that `step` allows, without vertices that do not lead to a head.

    A UserError is raised if nothing is left.
    """
    graph, level = nx.DiGraph(), [Boundary(depth=0, state=initial)]
    graph.add_node(level[0])
    for depth in range(num_layers):
        edges = [
            (boundary, Choice(depth=depth, layer=layer, state=boundary.state), state)
            for boundary in level
            for layer in alphabet
            if (state := step(depth, boundary.state, layer)) is not None
        ]
        level = list(dict.fromkeys(Boundary(depth=depth + 1, state=state) for _, _, state in edges))
        graph.add_edges_from((boundary, choice) for boundary, choice, _ in edges)
        graph.add_edges_from((choice, Boundary(depth=depth + 1, state=state)) for _, choice, state in edges)
    for boundary in level:
        rank, _, uncentred, is_capped, *_ = boundary.state
        norm = implied_final_norm(rank, centred=not uncentred)
        graph.add_edge(boundary, Head(final_norm=norm, is_capped=bool(is_capped)))
    graph.add_edges_from([(vertex, SINK) for vertex in list(graph) if isinstance(vertex, Head)])
    if SINK not in graph:
        raise UserError("the choices and constraints leave no architecture in the space; allow more of them.")
    reaching = nx.ancestors(graph, SINK)
    graph.remove_nodes_from([vertex for vertex in list(graph) if vertex not in reaching and vertex != SINK])
    return graph


Cost: TypeAlias = tuple[int, ...]


class Edge(NamedTuple):
    """A choice between two boundaries, which `start` and `stop` number within their levels in the order of the graph.

    `passed` are the vertices whose costs an edge has: its choice, and the source (first layer) or head (last layer).
    """

    start: int
    stop: int
    choice: Choice
    passed: tuple[Vertex, ...]

    def cost(self, costs: Mapping[Vertex, Cost]) -> Cost:
        """Return the cost, in the units of `costs`, which must have every vertex in `passed`."""
        return added(costs[vertex] for vertex in self.passed)


def added(costs: Iterable[Cost]) -> Cost:
    """Return the sum of costs, measure by measure; an empty tuple if there are no costs."""
    return tuple(map(sum, zip(*costs, strict=True)))


def edges_by_depth(graph: nx.DiGraph) -> list[list[Edge]]:
    """Return an `Edge` for every `Choice` of the graph: a list for each depth, in the order of its vertices."""
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
