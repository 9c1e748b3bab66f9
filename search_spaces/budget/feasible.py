"""The part of a search space within a budget: its size, and uniform sampling from it.

Costs are compared as integers (see `priced_space`). The budget is raised by half a unit per op, the largest rounding
error, so that no member within the budget is excluded. A measure without a bound is ignored.

If a table of exact costs would be too large, costs are rounded up to multiples of a step. Then all counted members are
within the budget, but members up to `tolerance` below it may be excluded.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import floordiv
from typing import NamedTuple

import numpy as np

from costmodel.config.units import format_bytes, format_seconds
from costmodel.cost import Budget, Costs, Price
from costmodel.errors import InfeasibleError, UserError
from costmodel.estimate import Pricer
from search_spaces.budget.counting import (
    EXACT_ADDITIONS,
    ROUNDED_ADDITIONS,
    BoundedPaths,
    bounded_paths,
    draw,
    layers_of_paths,
    windowed,
)
from search_spaces.budget.priced_space import (
    UNITS_PER,
    CostForm,
    PricedSpace,
    cheapest,
    most_expensive,
    price_of,
    price_space,
    priceable,
)
from search_spaces.graph import Cost, Vertex, added
from search_spaces.lower import Workload
from search_spaces.notation import Member
from search_spaces.space import SearchSpace, member_of, path_of, path_of_member, random_below

MOST_STEPS = 2**14  # steps that a budget has if costs are rounded; halved until tables are small enough
WORDS: dict[str, Callable[[float], str]] = {
    "latency_s": format_seconds,
    "sent_bytes": format_bytes,
    "key_bytes": lambda bound: f"{format_bytes(bound)} of keys",
}
MAX_UNITS = 2.0**62  # greatest cost, so that sums fit in 64 bits: 194 days, 288 PB


class Bounded(NamedTuple):
    """A space priced under a protocol, and its budget under that protocol."""

    priced: PricedSpace
    budget: Budget


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FeasibleSpace:
    """The members of a priced space within a budget, or a slice of them by latency (`price_slices`); it may be empty.

    costs: Costs of the priced vertices, in steps: latency (0 without a bound), then every other bounded measure,
        then the same for each space in `also`.
    step: Number of integer units (`UNITS_PER`) in a step, for each of these measures.
    tolerance: The greatest share of a budget by which a member may be below it and still be excluded by rounding.
    also: The same space under other protocols, each with the budget that members must meet too.
    """

    priced: PricedSpace
    budget: Budget
    costs: dict[Vertex, Cost] = field(repr=False)
    paths: BoundedPaths = field(repr=False)
    step: Cost
    tolerance: float
    also: tuple[Bounded, ...] = ()

    @property
    def every(self) -> tuple[Bounded, ...]:
        """Every protocol's priced space with its budget; slices are by latency under the first."""
        return Bounded(self.priced, self.budget), *self.also

    @property
    def space(self) -> SearchSpace:
        return self.priced.space

    @property
    def num_feasible(self) -> int:
        """The number of members within the budget, exact unless rounding excludes some of them (`tolerance`)."""
        return self.paths.num_paths * len(self.space.recipes)

    def fits(self, member: Member) -> bool:
        """Return whether a model is a member of the space, within the budget (and the slice).

        A UserError is raised for layers that the space's base cannot have.
        """
        path = path_of_member(self.space, member)
        return path is not None and self.holds(self.cost_of_path(path))

    def cost_of_path(self, path: Iterable[Vertex]) -> Cost:
        """Return the cost of the path through these vertices, with the measures of `costs`, in steps."""
        return added(cost for vertex in path if (cost := self.costs.get(vertex)))

    def holds(self, cost: Cost) -> bool:
        """Return whether a path with this cost is within the budget (and the slice)."""
        within = all(part <= most for part, most in zip(cost, self.paths.limit, strict=True))
        return within and self.paths.above < cost[0]

    @property
    def latency_s_bounds(self) -> tuple[float, float]:
        """Exclusive lower and inclusive upper bound of latency as counted, which may be rounded up, in seconds.

        Both are 0 without a bound on latency.
        """
        above, limit = max(0, self.paths.above) * self.step[0], self.paths.limit[0] * self.step[0]
        return above / UNITS_PER["latency_s"], limit / UNITS_PER["latency_s"]

    def members(self) -> Iterator[Member]:
        """Yield every member within the budget once, always in the same order."""
        for layers in layers_of_paths(self.paths):
            for recipe in self.space.recipes:
                yield member_of(self.space, layers, entropy_regularised=recipe)

    def sample(self, rng: np.random.Generator) -> Member:
        """Draw a member within the budget uniformly; an InfeasibleError is raised if there is none."""
        check_feasible(self)
        recipe = self.space.recipes[random_below(len(self.space.recipes), rng)]
        return member_of(self.space, draw(self.paths, rng), entropy_regularised=recipe)


def within_budget(priced: PricedSpace, budget: Budget, also: Sequence[Bounded] = ()) -> FeasibleSpace:
    """Return the members within the budget. also: the space under other protocols, with budgets to be met as well.

    A UserError is raised if costs are too many or too large to tabulate, or keys are bounded under a protocol without.
    """
    every = Bounded(priced, budget), *also
    for constraint in every:
        constraint.budget.check_keys(constraint.priced.pricer.protocol, has_keys=constraint.priced.pricer.has_keys)
    num_layers = priced.space.base.num_layers
    costs = {
        vertex: _counted([constraint.priced.costs[vertex] for constraint in every], every) for vertex in priced.costs
    }
    if (num_layers + 2) * max(map(max, costs.values())) > MAX_UNITS:
        raise UserError(
            f"members of space {priced.space.name!r} must cost less than 194 days and 288 PB to be counted."
        )
    limits: list[Cost] = []
    for constraint in every:
        bounds, slack = constraint.budget.bounds, constraint.priced.num_ops / 2
        most = (min(bounds[name] * per + slack, MAX_UNITS) if name in bounds else 0 for name, per in UNITS_PER.items())
        limits.append(tuple(map(math.floor, most)))
    limit = _counted(limits, every)
    num_bounds = sum(map(bool, limit))
    exact = EXACT_ADDITIONS if num_bounds <= 1 else EXACT_ADDITIONS // 4 * num_bounds  # tuples of costs take longer
    for steps in (None, *(MOST_STEPS >> halvings for halvings in range(MOST_STEPS.bit_length()))):
        step = tuple(1 if steps is None else max(1, most // steps) for most in limit)
        rounded = {
            vertex: tuple(-(-part // units) for part, units in zip(cost, step, strict=True))
            for vertex, cost in costs.items()
        }
        max_additions = exact if steps is None else ROUNDED_ADDITIONS
        paths = bounded_paths(priced.space.graph, rounded, tuple(map(floordiv, limit, step)), max_additions)
        shares = (units / most for units, most in zip(step, limit, strict=True) if units > 1)
        tolerance = (num_layers + 2) * max(shares, default=0.0)  # each vertex is rounded up by less than a step
        if paths is not None and tolerance < 1:
            return FeasibleSpace(
                priced=priced,
                budget=budget,
                costs=rounded,
                paths=paths,
                step=step,
                tolerance=tolerance,
                also=tuple(also),
            )
    raise UserError(
        f"the members of space {priced.space.name!r} within {_budgets(every)} need tables that are too large to be "
        f"counted; give fewer budgets, or fewer choices per layer."
    )


def priced_within(
    space: SearchSpace, budgets: Sequence[tuple[Pricer, Budget]], workload: Workload, cost_of: CostForm
) -> tuple[FeasibleSpace, dict[str, str]]:
    """Return the members within the budget of every protocol, and choice -> reason for choices that cannot be priced.

    budgets: a pricer and budget per protocol; slices are by latency under the first. Errors are as by `priceable`,
        `price_space` and `within_budget`.
    """
    left_out: dict[str, str] = {}
    for pricer, _ in budgets:
        space, reasons = priceable(space, pricer, workload, cost_of)
        left_out |= reasons
    first, *also = (Bounded(price_space(space, pricer, workload, cost_of), budget) for pricer, budget in budgets)
    return within_budget(*first, also), left_out


def priced_anew(feasible: FeasibleSpace, space: SearchSpace, workload: Workload) -> FeasibleSpace:
    """Return the members of `space` within the budgets of `feasible`, priced under its protocols for a workload.

    Errors are as by `price_space` and `within_budget`.
    """
    first, *also = (
        Bounded(price_space(space, constraint.priced.pricer, workload, constraint.priced.cost_of), constraint.budget)
        for constraint in feasible.every
    )
    return within_budget(*first, also)


def price_slices(feasible: FeasibleSpace, num_slices: int) -> tuple[FeasibleSpace, ...]:
    """Divide the members into at most `num_slices` slices of equal width in latency, cheapest first, none empty.

    Without a bound on latency there is at most one slice, because all latencies then count as 0.
    """
    # rounding may order members of equal cost either way
    slack = feasible.space.base.num_layers + 2 if feasible.tolerance else feasible.priced.num_ops
    least, most = (
        feasible.cost_of_path(path_of(feasible.space, end(feasible.priced).architecture.layers))[0]
        for end in (cheapest, most_expensive)
    )
    least, most = least - slack, min(most + slack, feasible.paths.limit[0])
    edges = [least - 1 + (most - least + 1) * place // num_slices for place in range(num_slices + 1)]
    slices = [replace(feasible, paths=windowed(feasible.paths, *ends)) for ends in pairwise(edges) if ends[0] < ends[1]]
    return tuple(part for part in slices if part.num_feasible)


def check_feasible(feasible: FeasibleSpace) -> None:
    """Raise an InfeasibleError if no member is within the budget.

    The error names, for each bounded measure of each protocol, the member that is cheapest in it, with its cost.
    """
    if feasible.num_feasible:
        return
    priced = feasible.priced
    least: dict[tuple[str, str], Bounded] = {}
    for constraint in feasible.every:
        for member in (cheapest(constraint.priced, name) for name in UNITS_PER if name in constraint.budget.bounds):
            least[member.name, format_price(price_of(constraint.priced, member))] = constraint
    costs = ", ".join(
        f"{name}, costs {price}{_under(constraint, feasible.also)}" for (name, price), constraint in least.items()
    )
    under = "" if feasible.also else f" under {priced.pricer.protocol!r}"
    raise InfeasibleError(
        f"no member of space {priced.space.name!r} is within the budget of {_budgets(feasible.every)} at sequence "
        f"length {priced.seq_len}{under}; the cheapest, {costs}; raise the budget or shorten the sequence."
    )


def _budgets(every: Sequence[Bounded]) -> str:
    return " and ".join(f"{format_budget(constraint.budget)}{_under(constraint, every[1:])}" for constraint in every)


def _under(constraint: Bounded, also: Sequence[Bounded]) -> str:
    return f" under {constraint.priced.pricer.protocol!r}" if also else ""


def format_price(price: Price | Costs) -> str:
    """Return a cost as text such as `4.76 min and 6.43 GB`, and `, 9.10 GB of keys` if the protocol has keys."""
    keys = "" if price.key_bytes is None else f", {format_bytes(price.key_bytes)} of keys"
    return f"{format_seconds(price.latency_s)} and {format_bytes(price.sent_bytes)}{keys}"


def format_budget(budget: Budget) -> str:
    """Return a budget as text such as `5.00 min and 8.00 GB` (`nothing` without bounds), then other protocols'."""
    bounds = " and ".join(WORDS[name](bound) for name, bound in budget.bounds.items()) or "nothing"
    others = (f"{format_budget(other)} under {name}" for name, other in budget.also if other.bounds)
    return ", and ".join((bounds, *others))


def format_left_out(feasible: FeasibleSpace) -> str:
    """Return in words which members within the budget rounding may leave out; an empty text if it leaves none out."""
    share = 100 * feasible.tolerance
    return f"; members up to {share:.2g} % below it may be left out" if share else ""


def _counted(costs: Sequence[Cost], every: Sequence[Bounded]) -> Cost:
    """Return the counted costs under each protocol: latency (0 without a bound), then the other bounded measures."""
    counted: list[int] = []
    for cost, constraint in zip(costs, every, strict=True):
        measured, bounds = dict(zip(UNITS_PER, cost, strict=True)), constraint.budget.bounds
        counted.append(measured["latency_s"] * ("latency_s" in bounds))
        counted += [part for name, part in measured.items() if name in bounds and name != "latency_s"]
    return tuple(counted)
