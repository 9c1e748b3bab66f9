"""Mutation and crossover of members of a search space, for evolutionary search; the results are members too."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import TypeVar

import numpy as np

from costmodel.errors import UserError
from search_spaces.architecture import Layer
from search_spaces.graph import Boundary, after, nth_layers, source, walk
from search_spaces.notation import Member
from search_spaces.space import SearchSpace, contains, member_of, num_architectures, num_members, random_below

Item = TypeVar("Item")


def mutate(space: SearchSpace, member: Member, rng: np.random.Generator) -> Member:
    """Return another member: one or two neighbouring layers are redrawn, or entropy regularisation is switched.

    If the remaining layers allow no other choice for the redrawn ones, the layers on both sides are redrawn too, until
    there is another choice. This keeps many layers even in a space that lists its members. If the space has both
    recipes, with and without entropy regularisation, one mutation in `num_layers + 1` on average switches only the
    recipe; in a space of one architecture, every mutation does. If the space has a single member, that member is
    returned. A UserError is raised if `member` is not in the space.
    """
    _check_member(space, member)
    if num_members(space) == 1:
        return member
    recipe_alone = num_architectures(space) == 1
    if len(space.recipes) > 1 and (recipe_alone or rng.integers(space.base.num_layers + 1) == 0):
        return replace(member, entropy_regularised=not member.entropy_regularised)
    layers = _redrawn(space, member.architecture.layers, rng)
    return member_of(space, layers, entropy_regularised=member.entropy_regularised)


def crossover(space: SearchSpace, first: Member, second: Member, rng: np.random.Generator) -> Member:
    """Return `first` with some consecutive layers replaced by the layers of `second` at the same depths.

    The result is drawn uniformly from all such placements that are in the space and differ from both parents; if there
    is none, it has the layers of a random parent. The recipe is that of a random parent, too. A UserError is raised if
    a parent is not in the space.
    """
    _check_member(space, first)
    _check_member(space, second)
    parents = (first.architecture.layers, second.architecture.layers)
    cuts = combinations(range(space.base.num_layers + 1), 2)
    spliced = dict.fromkeys(parents[0][:start] + parents[1][start:stop] + parents[0][stop:] for start, stop in cuts)
    start = source(space.graph)
    children = [layers for layers in spliced if layers not in parents and walk(space.graph, start, layers) is not None]
    layers = _pick(children or parents, rng)
    recipe = _pick((first.entropy_regularised, second.entropy_regularised), rng)
    return member_of(space, layers, entropy_regularised=recipe)


def _redrawn(space: SearchSpace, layers: tuple[Layer, ...], rng: np.random.Generator) -> tuple[Layer, ...]:
    """Replace a window of one or two layers, widened as needed, by another valid one, drawn uniformly."""
    num_layers = len(layers)
    width = min(num_layers, 1 + int(rng.integers(2)))
    start = int(rng.integers(num_layers - width + 1))
    stop = start + width
    while True:
        path = walk(space.graph, source(space.graph), layers[:start])
        assert path is not None
        begin = path[-1]
        assert isinstance(begin, Boundary)
        ways = _windows(space, begin, layers[stop:])
        if ways[begin] > 1:
            break
        start, stop = max(0, start - 1), min(num_layers, stop + 1)
    drawn = layers[start:stop]
    while drawn == layers[start:stop]:  # at least every second draw differs
        index = random_below(ways[begin], rng)
        drawn = tuple(nth_layers(space.graph, begin, stop, index, lambda choice: ways[after(space.graph, choice)]))
    return layers[:start] + drawn + layers[stop:]


def _windows(space: SearchSpace, begin: Boundary, ending: tuple[Layer, ...]) -> dict[Boundary, int]:
    """Return, for each boundary between `begin` and `ending`, the number of paths from it that `ending` can follow."""
    stop = space.base.num_layers - len(ending)
    levels = [[begin]]
    for _ in range(begin.depth, stop):
        reached = (after(space.graph, choice) for boundary in levels[-1] for choice in space.graph.succ[boundary])
        levels.append(list(dict.fromkeys(reached)))
    ways = {boundary: int(walk(space.graph, boundary, ending) is not None) for boundary in levels[-1]}
    for boundary in (boundary for level in reversed(levels[:-1]) for boundary in level):
        ways[boundary] = sum(ways[after(space.graph, choice)] for choice in space.graph.succ[boundary])
    return ways


def _pick(items: Sequence[Item], rng: np.random.Generator) -> Item:
    return items[int(rng.integers(len(items)))]


def _check_member(space: SearchSpace, member: Member) -> None:
    if not contains(space, member):
        raise UserError(f"only a member of space {space.name!r} can be varied, but got {member!r:.200}.")
