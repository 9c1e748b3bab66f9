"""New members within a budget, drawn evenly over prices: what a search falls back on, and begins with.

Nearly all members lie at the budget: of uniform draws from `gpt2-small` at 5 minutes a token, 19 of 20 cost within 10 %
of it. So a draw is uniform within one of NUM_SLICES equal slices of the price, the one with the fewest members so far.
"""

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import islice
from operator import floordiv
from typing import NamedTuple

import numpy as np

from search_spaces.budget.cost_counts import Cost
from search_spaces.budget.feasible import FeasibleSpace, price_slices
from search_spaces.deployed import deployed
from search_spaces.notation import Member
from search_spaces.optima.optima import Optimum
from search_spaces.space import path_of_member

NUM_SLICES = 8  # with the default 13 candidates, one or two in each
# Of the range of prices as deployed, at the cheap end, where next to nothing is left of the model: trained from the
# builtin parent, deployed forms of 2.1 to 3.2 minutes have perplexities of 101 to 17, above the trigram's 16.
IDLE_SHARE = 0.4
TRIES = 32  # draws from a slice of which none is new before the next slice is tried
WALKED = 10_000  # members looked through, in their order, where draws find nothing new: small spaces are used up


class Place(NamedTuple):
    """Where a member is among all. form: what makes it one answer, its deployed form where that is priced, or itself.

    latency_s: not a number for what is no member of the space. fits: whether it is within the budget. slice: the number
    of the slice that holds it, None if none does.
    """

    form: Hashable
    latency_s: float
    fits: bool
    slice: int | None


class Draws:
    """The members within a budget, sliced by price.

    slices: those that hold a member, cheapest first; of prices as deployed without the cheap end, IDLE_SHARE of the
        range, unless the space lists its members. No two hold the same member.
    """

    def __init__(self, feasible: FeasibleSpace) -> None:
        self.feasible = feasible
        is_listed = feasible.space.definition.members is not None  # by someone who wants them all
        idle = IDLE_SHARE if feasible.priced.accounting == "deployed" and not is_listed else 0.0
        self.slices = price_slices(feasible, NUM_SLICES, idle) or price_slices(feasible, NUM_SLICES)
        self._places: dict[Member, Place] = {}

    def place_of(self, member: Member) -> Place:
        """Remembered, since a long search asks of every member again and again."""
        if (known := self._places.get(member)) is None:
            known = self._places[member] = self._placed(member)
        return known

    def _placed(self, member: Member) -> Place:
        form = deployed(member.architecture) if self.feasible.priced.accounting == "deployed" else member
        path = path_of_member(self.feasible.space, member)
        if path is None:
            return Place(form=form, latency_s=math.nan, fits=False, slice=None)
        cost, prices = self.feasible.cost_of_path(path), self.feasible.priced.prices
        latency_s = sum(price.latency_s for vertex in path if (price := prices.get(vertex)))
        return Place(form=form, latency_s=latency_s, fits=self.feasible.holds(cost), slice=self.slice_at(cost))

    def new_of(self, members: Collection[Member], seen: Collection[Member]) -> list[Member]:
        """The members within budget whose form is that of none seen and of none before it."""
        forms, new = {self.place_of(member).form for member in seen}, list[Member]()
        for member in members:
            place = self.place_of(member)
            if place.fits and place.form not in forms:
                forms.add(place.form)
                new.append(member)
        return new

    def slice_of(self, optimum: Optimum) -> int | None:
        """The number of the slice that holds it, None if none does."""
        return self.slice_at(tuple(map(floordiv, optimum.cost, self.feasible.step)))

    def slice_at(self, cost: Cost) -> int | None:
        """The number of the slice that holds members of this cost, in steps, None if none does."""
        return next((number for number, part in enumerate(self.slices) if part.holds(cost)), None)

    def emptiest(self, members: Iterable[Member], rng: np.random.Generator) -> list[int]:
        """The numbers of the slices, those with the fewest of the members first, equal ones in random order."""
        return self._emptiest(self._held(members), rng)

    def filled(
        self, chosen: Sequence[Member], size: int, rng: np.random.Generator, seen: Collection[Member]
    ) -> list[Member]:
        """`chosen` with new members, up to `size`; fewer only if none was found."""
        members = list(chosen)
        if len(members) >= size:
            return members
        forms = {self.place_of(member).form for member in (*seen, *members)}
        held = self._held((*seen, *members))
        while len(members) < size and (member := self._new(rng, held, forms)) is not None:
            members.append(member)
            forms.add(self.place_of(member).form)
            held[self.place_of(member).slice] += 1
        return members

    def _held(self, members: Iterable[Member]) -> Counter[int | None]:
        """How many each slice holds."""
        return Counter(self.place_of(member).slice for member in members)

    def _emptiest(self, held: Counter[int | None], rng: np.random.Generator) -> list[int]:
        return sorted(map(int, rng.permutation(len(self.slices))), key=lambda number: held[number])

    def _new(self, rng: np.random.Generator, held: Counter[int | None], forms: Collection[Hashable]) -> Member | None:
        """A member of none of the forms, from the slice that holds the fewest members and has one."""
        for number in self._emptiest(held, rng):
            for _ in range(TRIES):
                if self.place_of(member := self.slices[number].sample(rng)).form not in forms:
                    return member
        walk = islice(self.feasible.members(), WALKED)
        return next((member for member in walk if self.place_of(member).form not in forms), None)
