"""Where bootstraps go under `ckks`: dynamic programming over the levels of all values that are still needed.

Any value can be bootstrapped, to the same level, between any two steps. That of least ciphertexts is found exactly, for
any graph; among these, the one whose rotations and relinearisations run on fewer levels. States are the levels of the
values that a later step reads, few of them in a decoder: the residual stream, and what its branch has in flight.

A search needs costs that add up over layers. So every layer begins at `BOUNDARY`, which it must leave, and is placed by
itself: exactly under that rule, and never better than over the whole graph.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import TypeAlias

from costmodel.errors import UserError
from costmodel.protocols.ckks_steps import Step

BOUNDARY = 1  # levels between layers: what a projection without a norm needs
Bootstraps: TypeAlias = tuple[tuple[int, str], ...]  # before which step, of which value


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Steps with their bootstraps, and the lowest level that each step's inputs may have."""

    steps: tuple[Step, ...]
    bootstraps: Bootstraps
    levels: tuple[int, ...]

    @property
    def bootstrapped(self) -> list[tuple[Step, Step | None]]:
        """The step that reads each bootstrapped value, and the step that makes it; None for an input of the graph."""
        known = {step.name: step for step in self.steps}
        return [(self.steps[index], known.get(name)) for index, name in self.bootstraps]

    @property
    def counts(self) -> Counter[str]:
        """The number of runs of each primitive, and of bootstraps."""
        total = Counter(bootstrap=sum(of.ciphertexts if of else 1 for _, of in self.bootstrapped))
        for step in self.steps:
            for (primitive, _), count in step.work.items():
                total[primitive] += count
        return +total


def place(
    steps: Sequence[Step], top: int, start: Mapping[str, int] | None = None, kept: Mapping[str, int] | None = None
) -> Placement:
    """Return the placement with the fewest bootstrapped ciphertexts.

    top: levels after a bootstrap, and of inputs that `start` does not name. kept: least levels of outputs.
    A UserError is raised for a step that needs more levels than there are.
    """
    given, wanted = start or {}, kept or {}
    size = {step.name: step.ciphertexts for step in steps}
    last_use = {name: index for index, step in enumerate(steps) for name in step.inputs}
    last_use.update(dict.fromkeys(wanted, len(steps)))
    outside = {name for step in steps for name in step.inputs} - size.keys()
    # the levels of values -> the cost so far, in ciphertexts and then in levels of moves, and how it came about
    states: dict[tuple[tuple[str, int], ...], tuple[tuple[int, int], Bootstraps]]
    states = {tuple(sorted((name, given.get(name, top)) for name in outside)): ((0, 0), ())}
    for index, step in enumerate(steps):
        if step.depth > top:
            raise UserError(
                f"op {step.node.name!r} needs {step.depth} levels at once for its {step.kind.replace('_', ' ')}, but "
                f"the parameters of ckks leave {top} after a bootstrap; choose a testbed with more."
            )
        before, states = states, {}
        moves = sum(count for (what, _), count in step.work.items() if what in ("rotation", "relinearisation"))
        for state, (cost, taken) in before.items():
            low = [name for name in dict.fromkeys(step.inputs) if dict(state)[name] < top]
            for chosen in (names for count in range(len(low) + 1) for names in combinations(low, count)):
                levels = dict(state) | dict.fromkeys(chosen, top)
                level = min((levels[name] for name in step.inputs), default=top)
                if level < step.depth:
                    continue
                levels[step.name] = level - step.depth
                live = tuple(sorted((name, at) for name, at in levels.items() if last_use.get(name, -1) > index))
                total = cost[0] + sum(size.get(name, 1) for name in chosen), cost[1] + moves * level
                if live not in states or total < states[live][0]:
                    states[live] = total, (*taken, *((index, name) for name in chosen))
    ended = [found for state, found in states.items() if all(level >= wanted.get(name, 0) for name, level in state)]
    if not ended:
        raise UserError(f"op {steps[-1].node.name!r} must leave {BOUNDARY} levels, but ckks has {top}; choose more.")
    bootstraps = min(ended, key=lambda found: found[0])[1]
    return Placement(steps=tuple(steps), bootstraps=bootstraps, levels=_least_levels(steps, bootstraps, wanted))


def _least_levels(steps: Sequence[Step], bootstraps: Bootstraps, wanted: Mapping[str, int]) -> tuple[int, ...]:
    """Return the levels of steps if every value is lowered, which is free, to what its readers need."""
    needed, levels = dict(wanted), list[int]()
    for index, step in reversed(list(enumerate(steps))):
        levels.append(needed.get(step.name, 0) + step.depth)
        for name in step.inputs:
            needed[name] = 0 if (index, name) in bootstraps else max(needed.get(name, 0), levels[-1])
    return tuple(reversed(levels))


def place_by_layer(steps: Sequence[Step], top: int) -> Placement:
    """Return the placement in which every layer is placed separately, from and to the same levels.

    Layer 0 begins below the top by the embedding's depth, and each layer's output has at least `BOUNDARY` levels; there
    is no bootstrap at the end of a layer.
    """
    layer_of = {step.name: step.node.layer for step in steps}
    handed = {name for step in steps for name in step.inputs if layer_of.get(name, step.node.layer) != step.node.layer}
    fresh = max(BOUNDARY, top - sum(step.depth for step in steps if step.node.layer == "embed"))
    bootstraps, levels = list[tuple[int, str]](), list[int]()
    known: dict[str, tuple[Placement, list[str]]] = {}  # layers repeat; with the names in order
    for layer, group in groupby(steps, key=lambda step: step.node.layer):
        part = list(group)
        names = list(dict.fromkeys(name for step in part for name in (*step.inputs, step.name)))
        begins = fresh if layer == 0 else BOUNDARY
        start = {name: begins for name in names if layer_of.get(name, layer) != layer}
        kept = {step.name: fresh if layer == "embed" else BOUNDARY for step in part if step.name in handed}
        shape = [(step.depth, step.ciphertexts, step.work, *map(names.index, step.inputs)) for step in part]
        if (key := repr((shape, [(start.get(name), kept.get(name)) for name in names]))) not in known:
            known[key] = place(part, top, start, kept), names
        placed, its_names = known[key]
        bootstraps += [(len(levels) + index, names[its_names.index(name)]) for index, name in placed.bootstraps]
        levels += placed.levels
    return Placement(steps=tuple(steps), bootstraps=tuple(bootstraps), levels=tuple(levels))
