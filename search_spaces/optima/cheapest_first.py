"""Members by ascending price, as many as are asked for: best-first search with the exact rest of the way as estimate.

Source: Hart, Nilsson and Raphael 1968, "A formal basis for the heuristic determination of minimum cost paths",
https://doi.org/10.1109/TSSC.1968.300136.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from operator import le

from search_spaces.budget.cost_counts import Cost, added
from search_spaces.notation import Member
from search_spaces.optima.stages import Edges, Stages, least_to_go
from search_spaces.space import member_of


def cheapest_first(stages: Stages) -> Iterator[Member]:
    """The members within the budget, by ascending latency (or what else has a budget), then in a fixed order.

    Of members that are priced as the same form in every layer one comes, with the first recipe of the space.
    """
    limit = stages.limit
    column = int(limit[0] == 0 and len(limit) > 1)
    to_go: list[list[Cost]] = [list(map(tuple, level.tolist())) for level in least_to_go(stages)]
    leaving = [_leaving(edges) for edges in stages.steps]
    tick = count()
    known: set[tuple[int, ...]] = set()
    heap: list[tuple[int, int, int, tuple[int, ...], tuple[int, ...], Cost]] = []

    def push(at: int, layers: tuple[int, ...], forms: tuple[int, ...], cost: Cost) -> None:
        whole = added([to_go[len(layers)][at], cost])
        if all(map(le, whole, limit)):
            heappush(heap, (whole[column], next(tick), at, layers, forms, cost))

    push(0, (), (), (0,) * len(limit))
    while heap:
        *_, at, layers, forms, cost = heappop(heap)
        if len(layers) == len(stages.steps):
            if forms not in known:
                known.add(forms)
                yield member_of(stages.feasible.space, [stages.layers[number] for number in layers])
            continue
        for layer, form, stop, layer_cost in leaving[len(layers)][at]:
            push(stop, (*layers, layer), (*forms, form), added([cost, layer_cost]))


def _leaving(edges: Edges) -> dict[int, list[tuple[int, int, int, Cost]]]:
    """The first choice of each form and next boundary, by the boundary they leave: layer, form, stop, cost."""
    columns = (edges.start, edges.form, edges.stop, edges.layer)
    by_choice: dict[tuple[int, ...], tuple[int, int, int, Cost]] = {}
    for start, form, stop, layer, cost in zip(
        *(column.tolist() for column in columns), edges.cost.tolist(), strict=True
    ):
        by_choice.setdefault((start, form, stop), (layer, form, stop, tuple(cost)))
    choices: dict[int, list[tuple[int, int, int, Cost]]] = {}
    for (start, *_), choice in by_choice.items():
        choices.setdefault(start, []).append(choice)
    return choices
