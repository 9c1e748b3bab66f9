"""Where bootstraps go under `ckks`: dynamic programming over the levels of all values that are still needed.

Any value can be bootstrapped, to the same level, between any two steps. That of least ciphertexts is found exactly, for
any graph; among these, the one whose rotations and relinearisations run on fewer levels. States are the levels of the
values that a later step reads, few of them in a decoder: the residual stream, and what its branch has in flight.

A search needs costs that add up over layers. So every layer begins at `BOUNDARY`, which it must leave, and is placed by
itself: exactly under that rule, and never better than over the whole graph.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import TypeAlias

from costmodel.errors import UserError
from costmodel.protocols.ckks_steps import Step

BOUNDARY = 1  # levels between layers: what a projection without a norm needs

Bootstraps: TypeAlias = frozenset[tuple[int, str]]  # before which step, of which value


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """bootstraps: values that are bootstrapped before a step, by its index. levels: the least that each may have."""

    bootstraps: Bootstraps
    levels: tuple[int, ...]


_Path: TypeAlias = tuple[tuple[str, ...], "_Path | None"]  # what is bootstrapped; what came before
_State: TypeAlias = dict[tuple[tuple[str, int], ...], tuple[tuple[int, int], _Path | None]]


def place(
    steps: Sequence[Step], top: int, start: Mapping[str, int] | None = None, kept: Mapping[str, int] | None = None
) -> Placement:
    """Return the placement of fewest bootstrapped ciphertexts.

    top: levels after a bootstrap, and of inputs that `start` does not name. kept: least levels of outputs.
    A UserError is raised for a step that needs more levels than there are.
    """
    given, wanted = start or {}, kept or {}
    size = {step.name: step.ciphertexts for step in steps}
    last_use = {name: index for index, step in enumerate(steps) for name in step.inputs}
    last_use.update(dict.fromkeys(wanted, len(steps)))
    outside = {name for step in steps for name in step.inputs} - size.keys()
    states: _State = {tuple(sorted((name, given.get(name, top)) for name in outside)): ((0, 0), None)}
    for index, step in enumerate(steps):
        if step.depth > top:
            raise UserError(
                f"op {step.node.name!r} needs {step.depth} levels at once for its {step.kind.replace('_', ' ')}, but "
                f"the parameters of ckks leave {top} after a bootstrap; choose a testbed with more."
            )
        after: _State = {}
        for state, (cost, path) in states.items():
            for chosen in _subsets([name for name in dict.fromkeys(step.inputs) if dict(state)[name] < top]):
                levels = dict(state) | dict.fromkeys(chosen, top)
                level = min((levels[name] for name in step.inputs), default=top)
                if level < step.depth:
                    continue
                levels[step.name] = level - step.depth
                live = tuple(sorted((name, at) for name, at in levels.items() if last_use.get(name, -1) > index))
                total = cost[0] + sum(size.get(name, 1) for name in chosen), cost[1] + _moved(step) * level
                if live not in after or total < after[live][0]:
                    after[live] = total, (chosen, path)
        states = after
    ended = [state for state in states if all(level >= wanted.get(name, 0) for name, level in state)]
    if not ended:
        raise UserError(f"op {steps[-1].node.name!r} must leave {BOUNDARY} levels, but ckks has {top}; choose more.")
    path = min((states[state] for state in ended), key=lambda found: found[0])[1]
    bootstraps, index = set[tuple[int, str]](), len(steps)
    while path is not None:
        chosen, path = path
        index -= 1
        bootstraps.update((index, name) for name in chosen)
    return Placement(bootstraps=frozenset(bootstraps), levels=_least_levels(steps, bootstraps, wanted))


def _least_levels(
    steps: Sequence[Step], bootstraps: set[tuple[int, str]], wanted: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the levels of steps if every value is lowered, which is free, to what its readers need."""
    needed, levels = dict(wanted), list[int]()
    for index, step in reversed(list(enumerate(steps))):
        levels.append(needed.get(step.name, 0) + step.depth)
        for name in step.inputs:
            needed[name] = 0 if (index, name) in bootstraps else max(needed.get(name, 0), levels[-1])
    return tuple(reversed(levels))


def _subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [chosen for count in range(len(names) + 1) for chosen in combinations(names, count)]


def place_by_layer(steps: Sequence[Step], top: int) -> Placement:
    """Return the placement where every layer is placed by itself, between the same levels.

    Layer 0 begins below the top by the embedding's level, and what a layer hands on has at least `BOUNDARY` levels; no
    bootstrap is at its end.
    """
    layer_of = {step.name: step.node.layer for step in steps}
    handed = {name for step in steps for name in step.inputs if layer_of.get(name, step.node.layer) != step.node.layer}
    fresh = max(BOUNDARY, top - sum(step.depth for step in steps if step.node.layer == "embed"))
    bootstraps, levels = set[tuple[int, str]](), list[int]()
    known: dict[object, tuple[Placement, list[str]]] = {}  # layers repeat; with the names in order
    for layer, group in groupby(steps, key=lambda step: step.node.layer):
        part = list(group)
        names = list(dict.fromkeys(name for step in part for name in (*step.inputs, step.name)))
        begins = fresh if layer == 0 else BOUNDARY
        start = {name: begins for name in names if layer_of.get(name, layer) != layer}
        kept = {step.name: fresh if layer == "embed" else BOUNDARY for step in part if step.name in handed}
        shape = [(step.depth, step.ciphertexts, _moved(step), [*map(names.index, step.inputs)]) for step in part]
        ends = [(start.get(name), kept.get(name), name in layer_of) for name in names]
        if (key := repr((shape, ends))) not in known:
            known[key] = place(part, top, start, kept), names
        placed, its_names = known[key]
        bootstraps |= {(len(levels) + index, names[its_names.index(name)]) for index, name in placed.bootstraps}
        levels += placed.levels
    return Placement(bootstraps=frozenset(bootstraps), levels=tuple(levels))


def _moved(step: Step) -> int:
    return sum(count for (what, _), count in step.work.items() if what in ("rotation", "relinearisation"))


def num_ciphertexts(steps: Sequence[Step], placement: Placement) -> int:
    """Count the ciphertexts that are bootstrapped."""
    size = {step.name: step.ciphertexts for step in steps}
    return sum(size.get(name, 1) for _, name in placement.bootstraps)
