"""A priced space as arrays, stage by stage: what the exact programs of this folder run on."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from costmodel.errors import UserError
from search_spaces.architecture import Layer
from search_spaces.budget.cost_counts import Cost
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.budget.priced_space import priced_layer
from search_spaces.graph import Boundary, Choice, Vertex, after, source
from search_spaces.notation import Member
from search_spaces.space import path_of

Scores: TypeAlias = NDArray[np.float64]  # depth x number of the layer in `Stages.layers`; the lower, the better
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Index: TypeAlias = NDArray[np.intp]

FREE: Cost = (0, 0)


class Edges(NamedTuple):
    """The choices of one depth, one entry each, ordered by `start`.

    start, stop: numbers of the boundaries before and after, within their levels. layer, form: numbers of what is
    chosen, and of what is priced of it, in `Stages.layers` and `Stages.forms`. cost: latency and bytes, edges x 2, in
    the units of `search_spaces.budget`; the embedding's is in the first depth's, the head's in the last one's.
    """

    start: Index
    stop: Index
    layer: Index
    form: Index
    cost: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stages:
    """Made by `stages_of`. num_boundaries: of every level, the source's first. limit: most latency and bytes."""

    feasible: FeasibleSpace
    layers: tuple[Layer, ...]
    forms: tuple[Layer, ...]
    steps: tuple[Edges, ...] = field(repr=False)
    num_boundaries: tuple[int, ...]

    @property
    def limit(self) -> Cost:
        return self.feasible.paths.limit

    @property
    def shape(self) -> tuple[int, int]:
        """Of scores: depths x layers."""
        return len(self.steps), len(self.layers)

    def numbered(self, placements: Sequence[Sequence[Layer]]) -> Index:
        """Layers as numbers in `layers`, placements x depth."""
        numbers = {layer: number for number, layer in enumerate(self.layers)}
        return np.array([[numbers[layer] for layer in layers] for layers in placements], dtype=np.intp)


def stages_of(feasible: FeasibleSpace) -> Stages:
    """The graph of a space with the costs that its budget counts; a measure without a bound costs nothing."""
    graph = feasible.space.graph
    choices = [vertex for vertex in graph if isinstance(vertex, Choice)]
    forms = {choice: _form(feasible, choice) for choice in choices}
    layers = feasible.space.layers
    form_numbers = {form: number for number, form in enumerate(dict.fromkeys(forms.values()))}
    layer_numbers = {layer: number for number, layer in enumerate(layers)}
    places = _places(graph)
    depth = feasible.space.base.num_layers
    rows: list[list[tuple[int, ...]]] = [[] for _ in range(depth)]
    for choice in choices:
        (begin,) = graph.pred[choice]
        stop = after(graph, choice)
        latency, sent = _cost(feasible, choice, begin, stop)
        numbers = layer_numbers[choice.layer], form_numbers[forms[choice]]
        rows[choice.depth].append((places[begin], places[stop], *numbers, latency, sent))
    return Stages(
        feasible=feasible,
        layers=layers,
        forms=tuple(form_numbers),
        steps=tuple(_edges(sorted(of_depth)) for of_depth in rows),
        num_boundaries=tuple(sum(boundary.depth == level for boundary in places) for level in range(depth + 1)),
    )


def checked(stages: Stages, scores: Scores) -> Scores:
    """The same scores. Raises UserError if they are of another shape or not finite."""
    if scores.shape != stages.shape:
        raise UserError(f"scores must be {stages.shape[0]} depths x {stages.shape[1]} layers, but are {scores.shape}.")
    if not np.isfinite(scores).all():
        raise UserError("scores must be finite numbers; give what is impossible a large one.")
    return scores


def forms_of(stages: Stages, member: Member) -> list[int]:
    """By depth, the number of what is priced of a member. Raises UserError if it is not in the space."""
    numbers = {form: number for number, form in enumerate(stages.forms)}
    path = path_of(stages.feasible.space, member.architecture.layers)
    return [numbers[_form(stages.feasible, one)] for one in path if isinstance(one, Choice)]


def least_to_go(stages: Stages) -> list[Ints]:
    """By level, boundaries x 2: the least latency from there to the sink, and the least bytes, each by itself."""
    found = [np.zeros((stages.num_boundaries[-1], 2), dtype=np.int64)]
    for edges in reversed(stages.steps):
        firsts = np.flatnonzero(np.diff(edges.start, prepend=-1))
        found.insert(0, np.minimum.reduceat(edges.cost + found[0][edges.stop], firsts, axis=0))
    return found


def _form(feasible: FeasibleSpace, choice: Choice) -> Layer:
    return priced_layer(feasible.space, choice, feasible.priced.accounting)


def _places(graph: nx.DiGraph) -> dict[Boundary, int]:
    """The number of every boundary within its level, in the order of the graph."""
    places: dict[Boundary, int] = {}
    counts: dict[int, int] = {}
    for vertex in graph:
        if isinstance(vertex, Boundary):
            places[vertex] = counts.get(vertex.depth, 0)
            counts[vertex.depth] = places[vertex] + 1
    return places


def _cost(feasible: FeasibleSpace, choice: Choice, begin: Boundary, stop: Boundary) -> Cost:
    graph, costs = feasible.space.graph, feasible.costs
    passed: list[Vertex] = [choice, *([begin] if begin == source(graph) else [])]
    if stop.depth == feasible.space.base.num_layers:
        passed += list(graph.succ[stop])
    each = [costs.get(vertex, FREE) for vertex in passed]
    return sum(cost[0] for cost in each), sum(cost[1] for cost in each)


def _edges(rows: list[tuple[int, ...]]) -> Edges:
    table: NDArray[Any] = np.array(rows, dtype=np.int64)
    start, stop, layer, form = (table[:, column].astype(np.intp) for column in range(4))
    return Edges(start=start, stop=stop, layer=layer, form=form, cost=table[:, 4:])
