"""A priced space as arrays, stage by stage, for the exact programs of this package."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import UserError
from search_spaces.architecture import Layer
from search_spaces.budget.edges import Cost, Edge, edges_by_depth
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.budget.priced_space import priced_layer

Scores: TypeAlias = NDArray[np.float64]  # depth x number of the layer in `Stages.layers`; lower is better
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Index: TypeAlias = NDArray[np.intp]


class Edges(NamedTuple):
    """The choices of one depth, one entry each, ordered by `start`.

    `start` and `stop` number the boundaries before and after, within their levels. `layer` numbers the chosen layer in
    `Stages.layers`, and `form` the layer as it is priced. `cost` is edges x measures of the budget, in steps of the
    budget; the first depth includes the embedding, the last the head.
    """

    start: Index
    stop: Index
    layer: Index
    form: Index
    cost: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Stages:
    """The stages of a space, made by `stages_of`; `num_last` counts the boundaries after the last layer."""

    feasible: FeasibleSpace
    layers: tuple[Layer, ...]
    steps: tuple[Edges, ...] = field(repr=False)
    num_last: int

    @property
    def limit(self) -> Cost:
        return self.feasible.paths.limit

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of scores: depths x layers."""
        return len(self.steps), len(self.layers)

    def numbered(self, placements: Sequence[Sequence[Layer]]) -> Index:
        """Return layers as their numbers in `layers`, placements x depth."""
        numbers = {layer: number for number, layer in enumerate(self.layers)}
        return np.array([[numbers[layer] for layer in layers] for layers in placements], dtype=np.intp)


def stages_of(feasible: FeasibleSpace) -> Stages:
    """Return the graph of a space with the costs that its budget counts; a measure without a bound costs nothing."""
    levels, layers = edges_by_depth(feasible.space.graph), feasible.space.layers
    cost_of = feasible.priced.cost_of
    forms = {edge.choice: priced_layer(feasible.space, edge.choice, cost_of) for edges in levels for edge in edges}
    form_numbers = {form: number for number, form in enumerate(dict.fromkeys(forms.values()))}
    layer_numbers = {layer: number for number, layer in enumerate(layers)}

    def row(edge: Edge) -> tuple[int, ...]:
        what = layer_numbers[edge.choice.layer], form_numbers[forms[edge.choice]]
        return (edge.start, edge.stop, *what, *edge.cost(feasible.costs))

    return Stages(
        feasible=feasible,
        layers=layers,
        steps=tuple(_edges(sorted(map(row, edges))) for edges in levels),
        num_last=1 + max(edge.stop for edge in levels[-1]),
    )


def checked(stages: Stages, scores: Scores) -> Scores:
    """Return the scores unchanged; a UserError is raised if they have another shape or are not finite."""
    if scores.shape != stages.shape:
        raise UserError(f"scores must be {stages.shape[0]} depths x {stages.shape[1]} layers, but are {scores.shape}.")
    if not np.isfinite(scores).all():
        raise UserError("scores must be finite numbers; give what is impossible a large one.")
    return scores


def least_to_go(stages: Stages) -> list[Ints]:
    """Return the least cost from each boundary to the sink: by level, boundaries x measures.

    Each measure is minimised separately, so that no single path need have all of them.
    """
    to_go = [np.zeros((stages.num_last, len(stages.limit)), dtype=np.int64)]
    for edges in reversed(stages.steps):
        firsts = np.flatnonzero(np.diff(edges.start, prepend=-1))
        to_go.insert(0, np.minimum.reduceat(edges.cost + to_go[0][edges.stop], firsts, axis=0))
    return to_go


def _edges(rows: list[tuple[int, ...]]) -> Edges:
    table: NDArray[Any] = np.array(rows, dtype=np.int64)
    start, stop, layer, form = (table[:, column].astype(np.intp) for column in range(4))
    return Edges(start=start, stop=stop, layer=layer, form=form, cost=table[:, 4:])
