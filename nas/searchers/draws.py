"""New members within a budget, drawn evenly over costs: the start of most searchers, and their fallback.

Nearly all members cost almost as much as the budget allows: of uniform draws from `gpt2-small` at 5 minutes a token, 19
of 20 cost within 10 % of it. A draw is therefore uniform within one of NUM_SLICES equal slices of latency, the one with
the fewest members so far.
"""

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import islice
from operator import floordiv
from typing import NamedTuple

import numpy as np

from search_spaces.budget.feasible import FeasibleSpace, price_slices
from search_spaces.deployed import deployed
from search_spaces.graph import Cost
from search_spaces.notation import Member
from search_spaces.optima import Optimum
from search_spaces.space import path_of_member

NUM_SLICES = 8  # one or two of the default 14 candidates in each
TRIES = 32  # draws from a slice without a new member before the next slice is tried
WALKED = 10_000  # members enumerated when draws find nothing new, so that small spaces are searched to the end


class Place(NamedTuple):
    """The latency and slice of a member, and the form by which members with the same model are recognised.

    form: identifies the model whose cost counts: the folded form if costs are folded costs, else the member itself.
        latency_s: seconds per token; NaN if the space does not contain the member. fits: whether the member is within
        the budget. slice: the number of the slice that contains the member, or None.
    """

    form: Hashable
    latency_s: float = math.nan
    fits: bool = False
    slice: int | None = None


class Draws:
    """The members within a budget, in slices of latency that do not overlap.

    slices: the slices that contain at least one member, cheapest first.
    """

    def __init__(self, feasible: FeasibleSpace) -> None:
        self.feasible = feasible
        self.slices = price_slices(feasible, NUM_SLICES)
        self._places: dict[Member, Place] = {}

    def place_of(self, member: Member) -> Place:
        """Return the `Place` of a member, cached because long searches ask for every member repeatedly."""
        if member not in self._places:
            place = Place(deployed(member.architecture) if self.feasible.priced.cost_of == "folded" else member)
            if (path := path_of_member(self.feasible.space, member)) is not None:
                cost, prices = self.feasible.cost_of_path(path), self.feasible.priced.prices
                latency_s = sum(price.latency_s for vertex in path if (price := prices.get(vertex)))
                place = Place(place.form, latency_s, fits=self.feasible.holds(cost), slice=self.slice_at(cost))
            self._places[member] = place
        return self._places[member]

    def new_of(self, members: Collection[Member], seen: Collection[Member]) -> list[Member]:
        """Return the members within the budget whose `Place.form` is new: no seen and no earlier member has it."""
        forms, new = {self.place_of(member).form for member in seen}, list[Member]()
        for member in members:
            place = self.place_of(member)
            if place.fits and place.form not in forms:
                forms.add(place.form)
                new.append(member)
        return new

    def slice_of(self, optimum: Optimum) -> int | None:
        """Return the number of the slice that contains the optimum, or None."""
        return self.slice_at(tuple(map(floordiv, optimum.cost, self.feasible.step)))

    def slice_at(self, cost: Cost) -> int | None:
        """Return the number of the slice that contains a cost, given in units of `FeasibleSpace.step`, or None."""
        return next((number for number, part in enumerate(self.slices) if part.holds(cost)), None)

    def emptiest(self, members: Iterable[Member], rng: np.random.Generator) -> list[int]:
        """Return the numbers of all slices, those that contain the fewest of `members` first, ties in random order."""
        return self._emptiest(self._held(members), rng)

    def filled(
        self, chosen: Sequence[Member], size: int, rng: np.random.Generator, seen: Collection[Member]
    ) -> list[Member]:
        """Return `chosen` and newly drawn members, `size` in all; fewer only if no more new members are found.

        A member is new if no seen, chosen or drawn member has its `Place.form`. It is drawn from the slice with the
        fewest of these members or, if TRIES draws there find none that is new, from the next slice. If no slice yields
        one, it is the first new one among WALKED members within the budget.
        """
        members, known = list(chosen), (*seen, *chosen)
        forms, held = {self.place_of(member).form for member in known}, self._held(known)
        while len(members) < size and (member := self._new(rng, held, forms)) is not None:
            members.append(member)
            forms.add(self.place_of(member).form)
            held[self.place_of(member).slice] += 1
        return members

    def _held(self, members: Iterable[Member]) -> Counter[int | None]:
        return Counter(self.place_of(member).slice for member in members)

    def _emptiest(self, held: Counter[int | None], rng: np.random.Generator) -> list[int]:
        return sorted(map(int, rng.permutation(len(self.slices))), key=lambda number: held[number])

    def _new(self, rng: np.random.Generator, held: Counter[int | None], forms: Collection[Hashable]) -> Member | None:
        """Return a member with a new form, drawn from the emptiest slice that yields one, else enumerated, or None."""
        for number in self._emptiest(held, rng):
            for _ in range(TRIES):
                if self.place_of(member := self.slices[number].sample(rng)).form not in forms:
                    return member
        walk = islice(self.feasible.members(), WALKED)
        return next((member for member in walk if self.place_of(member).form not in forms), None)
