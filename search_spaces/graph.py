"""The layered graph of a search space, in which each source-to-sink path is one architecture.

A path alternates boundaries and choices, `Boundary(0) -> Choice(0) -> Boundary(1) -> ... -> Boundary(L) -> Head ->
SINK`. The state of a boundary decides which layers may follow it. Every choice has exactly one predecessor and one
successor, and every vertex is on some path. Vertices are inserted depth by depth, and the choices after a boundary in
the order of the alphabet (the list of distinct layers). This order also numbers the paths.
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

    `state` describes the layers before this point by these numbers, which are all 0 at the source:
    - the highest rank (`NormForm.rank`) of the norms before and after sub-layers;
    - 1 if a live norm (one that depends on the data after folding) reads the residual stream, else 0;
    - 1 if a sub-layer has no norm before it that subtracts the mean, and the first number is at most the rank of a
      frozen LayerNorm (above it, the final norm does not depend on this), else 0;
    - 1 if the logit cap is sure to stay, because a layer keeps the score cap or the base has no score cap, else 0;
    - the state of each constraint or, for listed placements, the index of the set of endings that may follow.
    """

    depth: int
    state: State


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The choice of `layer` as layer number `depth`, from 0; the boundary before it has the same depth and state."""

    depth: int
    layer: Layer
    state: State


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The end of a path: final norm and vocabulary projection.

    is_capped: whether the logit cap stays, if the base model has one.
    """

    final_norm: Norm
    is_capped: bool = True


Vertex: TypeAlias = Boundary | Choice | Head | Literal["sink"]


# Each constraint maps its state (0 at the source) and the next layer to a new state, or to None to forbid that layer.
CONSTRAINTS: dict[ConstraintName, Callable[[int, Layer], int | None]] = {
    # forbids an FFN in every layer after a layer without FFN (arXiv 2410.13060, the `_ip` rows)
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

    withheld: attention -> layers, numbered from 0, that must not have it. first_layers: the layers that every sequence
        begins with, whether or not the alphabet has them. has_caps: whether the base model has a score cap.

    A UserError is raised if no sequence is left.
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
    """Return the graph whose paths are exactly the given placements, each once even if it is listed repeatedly.

    Placements share common endings. members: the layers of each placement. has_caps: whether the base model has a score
        cap. A UserError is raised if there is no placement, or they differ in their number of layers.
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
    """Return the layers of path number `index` (from 0, in the order of the graph) from `start` to depth `stop`.

    num_paths: returns, for a choice, the number of paths to depth `stop` that begin with it; only these are numbered.
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
    """Return the boundaries and choices of the path from `start` with these layers; None if the graph has no such path.

    The first vertex is `start`, the last one the boundary after the last layer.
    """
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


Cost: TypeAlias = tuple[int, ...]  # a number per measure, such as latency and bytes


class Edge(NamedTuple):
    """A choice, with the boundaries before and after it.

    start, stop: index of the boundary before and after the choice among those of the same depth, in the graph's order.
    passed: the vertices whose costs sum to the edge's cost: the choice, in the first layer also the source, and in the
        last layer also the head.
    """

    start: int
    stop: int
    choice: Choice
    passed: tuple[Vertex, ...]

    def cost(self, costs: Mapping[Vertex, Cost]) -> Cost:
        """Return the sum of `costs` over the vertices in `passed`, all of which `costs` must have."""
        return added(costs[vertex] for vertex in self.passed)


def added(costs: Iterable[Cost]) -> Cost:
    """Return the sum of costs, measure by measure; an empty tuple if there are no costs."""
    return tuple(map(sum, zip(*costs, strict=True)))


def edges_by_depth(graph: nx.DiGraph) -> list[list[Edge]]:
    """Return an `Edge` for every `Choice` of the graph: a list for each depth, in the order of the graph's vertices."""
    places: dict[tuple[int, State], int] = {}  # keyed by depth and state, which a choice shares with its boundary
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
