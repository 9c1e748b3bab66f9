"""Members by ascending price, as many as are asked for: best-first search with the exact rest of the way as estimate.

Source: Hart, Nilsson and Raphael 1968, "A formal basis for the heuristic determination of minimum cost paths",
https://doi.org/10.1109/TSSC.1968.300136.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

import numpy as np

from search_spaces.budget.cost_counts import Cost, added
from search_spaces.notation import Member
from search_spaces.optima.stages import Stages, least_to_go
from search_spaces.space import member_of


def cheapest_first(stages: Stages) -> Iterator[Member]:
    """The members within the budget, by ascending latency (or what else has a budget), then in a fixed order.

    Of members that are priced as the same form in every layer one comes, with the first recipe of the space.
    """
    column = int(stages.limit[0] == 0 and len(stages.limit) > 1)
    to_go = least_to_go(stages)
    space, tick = stages.feasible.space, count()
    known: set[tuple[int, ...]] = set()
    heap: list[tuple[int, int, int, tuple[int, ...], tuple[int, ...], Cost]] = []

    def push(at: int, layers: tuple[int, ...], forms: tuple[int, ...], cost: Cost) -> None:
        least = to_go[len(layers)][at]
        if (least + cost <= stages.limit).all():
            heappush(heap, (cost[column] + int(least[column]), next(tick), at, layers, forms, cost))

    push(0, (), (), (0,) * len(stages.limit))
    while heap:
        *_, at, layers, forms, cost = heappop(heap)
        if len(layers) == len(stages.steps):
            if forms not in known:
                known.add(forms)
                yield member_of(
                    space, [stages.layers[number] for number in layers], entropy_regularised=space.recipes[0]
                )
            continue
        edges = stages.steps[len(layers)]
        leaving = np.flatnonzero(edges.start == at)
        _, firsts = np.unique(np.column_stack([edges.form, edges.stop])[leaving], axis=0, return_index=True)
        for edge in leaving[np.sort(firsts)]:
            after = added([cost, tuple(map(int, edges.cost[edge]))])
            push(int(edges.stop[edge]), (*layers, int(edges.layer[edge])), (*forms, int(edges.form[edge])), after)
